"""Upfront and runtime compilation, and the devices' backends.

Upfront: a graph becomes a `KernelSpec`, once. Runtime: a `KernelSpec` and actual arguments become a `FusedKernel`, by
the backend of the arguments' device.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from fuser.canonical import CanonicalGraph, Registered, refs_of
from fuser.errors import BackendError, Unsupported
from fuser.fallback import Fallback
from fuser.kernel_cache import FusedKernel, KernelSpec, KernelStore


# -- backends ----------------------------------------------------------------------------------------------------------
@runtime_checkable
class FusionBackend(Protocol):
    """A device's way from a plan to a kernel. `can_fuse` is None, or the reason why it cannot now."""

    name: str

    def can_fuse(self) -> str | None: ...

    def codegen(self, plan: Any) -> str: ...

    def compile(self, plan: Any, source: str) -> FusedKernel: ...


# Where the package's own backends are; each module has a `BACKEND`.
BUILT_IN = {"cpu": "fuser.cpu", "cuda": "fuser.cuda"}
_backends: dict[str, FusionBackend | None] = {}
_overrides: dict[str, bool] = {}
_lock = threading.Lock()


def register_backend(device_type: str, backend: FusionBackend | None) -> None:
    """Compile for `device_type` with `backend`; None goes back to the package's own, if any. BackendError if unfit."""
    _check_device_type(device_type)
    if backend is not None and not isinstance(backend, FusionBackend):
        missing = [n for n in ("name", "can_fuse", "codegen", "compile") if not hasattr(backend, n)]
        raise BackendError(
            f"{type(backend).__name__} is no backend for {device_type!r}: it lacks {', '.join(missing)}; "
            "see fuser.compiler.FusionBackend"
        )
    with _lock:
        if backend is None:
            _backends.pop(device_type, None)
        else:
            _backends[device_type] = backend


def _check_device_type(device_type: str) -> None:
    try:
        torch.device(device_type)
    except (RuntimeError, TypeError):
        raise BackendError(f"{device_type!r} is no device type: expected one such as 'cpu' or 'cuda'") from None


def find_backend(device_type: str) -> FusionBackend | None:
    """The backend of a device type, if there is one."""
    with _lock:
        if device_type not in _backends:
            _backends[device_type] = _built_in(device_type)
        return _backends[device_type]


def _built_in(device_type: str) -> FusionBackend | None:
    if device_type not in BUILT_IN:
        return None
    return getattr(importlib.import_module(BUILT_IN[device_type]), "BACKEND", None)


def override_can_fuse(device_type: str, value: bool | None) -> None:
    """Fuse on a device type or not, whatever its backend says; None asks the backend again."""
    with _lock:
        if value is None:
            _overrides.pop(device_type, None)
        else:
            _overrides[device_type] = bool(value)


def why_not(device_type: str) -> str | None:
    """None if groups on `device_type` are fused, else the reason why they are not."""
    override = _overrides.get(device_type)
    if override is False:
        return f"fusion on {device_type} is switched off"
    backend = find_backend(device_type)
    if backend is None:
        return f"no fusion backend for {device_type}"
    return None if override else backend.can_fuse()


# -- upfront -----------------------------------------------------------------------------------------------------------
def compile_upfront(registered: Registered, key: int, config: tuple[tuple[str, Any], ...]) -> KernelSpec:
    """The specification of a graph: everything that can be known before an input is seen."""
    return KernelSpec(
        key=key,
        graph=registered.graph,
        registered=registered,
        config=config,
        broadcast_groups=broadcast_groups(registered.graph, registered.pointwise),
        blocked=registered.blocked,
        fallback=Fallback(registered),
        store=KernelStore(),
    )


def broadcast_groups(graph: CanonicalGraph, pointwise: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """The sets of inputs that meet in one elementwise computation, through elementwise operations alone.

    Such inputs must broadcast together. One group for each elementwise value that no other elementwise operation
    reads, if more than one input reaches it.
    """
    reach = [0] * len(graph.nodes)  # bit i: input i
    read: set[int] = set()
    for node in graph.nodes:
        if node.index < graph.n_inputs:
            reach[node.index] = 1 << node.index
        elif node.index in pointwise:
            for i in refs_of(node.args):
                reach[node.index] |= reach[i]
                read.add(i)
    roots = {reach[i] for i in pointwise if i not in read}
    return tuple(_bits(mask) for mask in sorted(roots) if mask & (mask - 1))


def _bits(mask: int) -> tuple[int, ...]:
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return tuple(out)


# -- runtime -----------------------------------------------------------------------------------------------------------
def compile_runtime(spec: KernelSpec, args: Sequence[Any]) -> FusedKernel:
    """The kernel of `spec` for arguments like `args` (bound tensors first). Unsupported or CompileError if there is none."""
    raise Unsupported("the runtime compiler is not part of this build")
