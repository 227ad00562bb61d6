"""Compiles kernels for the background in another process (`compile_server.py`), which leaves them in the cache.

A thread that lowers and schedules competes with the calling threads for the interpreter, and delays them by up to
milliseconds. Work that cannot be described to another process, or is not kept in the cache, is done in the thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from fuser import config, examples, extensions
from fuser.canonical import portable
from fuser.errors import CompileError, GraphError, Unsupported
from fuser.kernel_cache import KernelSpec
from fuser.reasons import from_json
from fuser.runtime import peer, process

settings: Any = config  # its attributes are made from a table
_wanted: ContextVar[bool] = ContextVar("_wanted", default=False)
# In this process's time: the other process has its own limit for each run of a compiler, of which there may be two.
_PATIENCE = 60.0


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """Let another process do the compilations of this thread in the block."""
    before = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(before)


@functools.cache
def _peer() -> peer.Peer | None:
    command = peer.python("fuser.compile_server")
    return peer.Peer(command, CUDA_VISIBLE_DEVICES="", FUSER_CHECK_IR="0") if command is not None else None


def make(spec: KernelSpec, args: Sequence[Any], refusals_only: bool = False) -> bool:
    """Whether another process has put the kernel of `spec` for arguments like `args`, or its refusal, into the cache.

    Unsupported or CompileError if it found that there is no kernel. False if no other process is wanted or works.
    """
    if extensions.any_known():  # another process does not have these
        return False
    if not _wanted.get() or not settings.cache_dir or torch.get_default_dtype() is not torch.float32:
        return False
    other, request = _peer(), _request(spec, args, refusals_only)
    if other is None or request is None:
        return False
    try:
        found = other.ask(request, _PATIENCE + 2 * settings.compile_timeout_seconds)
    except peer.Gone:
        if process.is_ending():
            raise CompileError("nothing more is compiled, since this process ends") from None
        return False
    if "failed" in found:
        raise CompileError(str(found["failed"]))
    if found.get("refused") is not None:
        raise Unsupported(from_json(found["refused"]))
    return "defect" not in found


def _request(spec: KernelSpec, args: Sequence[Any], refusals_only: bool) -> dict[str, Any] | None:
    r = spec.registered
    try:
        graph, given = portable.encode_graph(r), [examples.as_json(a) for a in args]
    except (GraphError, Unsupported):
        return None
    return {
        "graph": graph, "n_bound": len(r.bound), "functional": r.graph.functional, "text": spec.graph.text,
        "in_place": r.writes and not any("writes into a tensor" in reason for reason in r.blocked),
        "settings": {s.name: getattr(config, s.name) for s in config.SETTINGS}, "config": list(spec.config),
        "args": given, "refusals": refusals_only,
    }  # fmt: skip


__all__ = ["make", "preferred"]
