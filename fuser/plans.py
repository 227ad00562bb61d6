"""Kernels that an earlier process made, found again without lowering, scheduling, code generation or a compiler.

A plan is a kernel's launch program (patterns of inputs, guards, buffers, steps) and the name of its library, as JSON.
Its key is made of all that decided it: the canonical graph, the settings, the arguments for which it was made (dtypes,
sizes, strides, values of numbers), torch's version and this package's sources, compiler and processor. So a process
that finds a plan has the kernel that it would have made itself. Plans are entries of the cache, trusted and checked
like libraries (`runtime/files.py`). A plan that is damaged, or whose library is, is made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser import config
from fuser.errors import BackendError
from fuser.kernel_cache import FusedKernel, KernelSpec
from fuser.kernel_spec import Bind, BufferPattern, Check, InputPattern, LaunchProgram, Step
from fuser.runtime import files
from fuser.runtime.encode import encode

settings: Any = config  # its attributes are made from a table

FORMAT = 1
_DECIDING = ("canonical", "codegen", "cpu", "ir", "lowering", "ops", "scheduler")
_DECIDING_FILES = ("kernel_spec.py", "pipeline.py", "plans.py")
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


# -- keys --------------------------------------------------------------------------------------------------------------
@functools.cache
def version() -> str | None:
    """What tells plans of this package's sources and of this torch from all others; None where there are no sources."""
    root = pathlib.Path(__file__).parent
    found = [[root / name for name in _DECIDING_FILES], *(list((root / name).glob("*.py")) for name in _DECIDING)]
    digest = hashlib.blake2b(f"{FORMAT} {torch.__version__}".encode(), digest_size=16)
    try:
        for path in sorted(p for group in found for p in group):
            digest.update(f"\0{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
    except OSError:  # a package of compiled files alone, or in an archive
        return None
    return digest.hexdigest() if all(found) else None


def key_of(spec: KernelSpec, args: Sequence[Any], machine: str) -> str | None:
    """The name of the plan of `spec` for arguments like `args` on a machine; None if there can be none."""
    known = version()
    if known is None or spec.registered.opaque:  # Python objects that no text tells apart
        return None
    described = tuple(map(_described, args))
    parts = (known, machine, repr((torch.get_default_dtype(), spec.config, described)), spec.graph.text)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _described(a: Any) -> Any:
    return (a.dtype, a.device.type, tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a


def _folder() -> pathlib.Path | None:
    with contextlib.suppress(OSError):  # whoever keeps libraries says why
        return files.folder(settings.cache_dir, "plans") if settings.cache_dir else None
    return None


def _read(name: str) -> Any:
    folder = _folder()
    data = files.read(folder / name) if folder is not None else None
    try:
        return json.loads(data) if data is not None else None
    except ValueError:
        return None


def _write(name: str, value: Any) -> None:
    folder = _folder()
    if folder is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be written: the next process works as this one did
            files.write(folder / name, json.dumps(value, separators=(",", ":")).encode())


# -- kernels -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KeptKernel:
    """A kernel of an earlier process. Its source is read when somebody asks for it."""

    name: str
    program: LaunchProgram
    library: str
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]

    @functools.cached_property
    def source(self) -> str:
        """The text from which the library was made, as far as it was kept; it is for reading only."""
        try:
            return pathlib.Path(self.library).with_suffix(".cpp").read_text()
        except OSError:
            return f"// {self.name} was taken from {self.library}; its source was not kept\n"


def find(key: str, library_of: Callable[[str], str | None]) -> KeptKernel | None:
    """The kernel that was kept under `key`; None if there is none. `library_of(name)` is where a whole library is."""
    kept = _read(f"{key}.plan")
    if kept is None:
        return None
    try:
        program = _decode(kept["program"])
        encode(program)  # nothing in it may lead a launch astray
        path = library_of(kept["library"])
        reasons = tuple((a, b, c) for a, b, c in kept["reasons"])
        return KeptKernel(kept["name"], program, path, kept["n_kernels"], reasons) if path is not None else None
    except (KeyError, TypeError, ValueError, BackendError):  # of another form: it is made again
        return None


def keep(key: str, kernel: FusedKernel) -> None:
    """Keep a kernel with its library for other processes."""
    folder, library = _folder(), pathlib.Path(str(kernel.library))
    if folder is None or folder.parent != library.parent.parent or any(s.gpu for s in kernel.program.steps):
        return  # the library is this process's own
    facts: Any = kernel
    _write(
        f"{key}.plan",
        {
            "name": kernel.name, "library": library.name, "program": _encode(kernel.program),
            "n_kernels": facts.n_kernels, "reasons": facts.reasons,
        },
    )  # fmt: skip


# -- operators ---------------------------------------------------------------------------------------------------------
def operators() -> frozenset[str]:
    """The operators that kernels can be made of, as far as an earlier process has kept them."""
    return _operators(settings.cache_dir)


@functools.lru_cache(maxsize=8)
def _operators(cache_dir: str) -> frozenset[str]:
    found = _read(f"{version()}.operators") if version() is not None else None
    return frozenset(found) if isinstance(found, list) and all(isinstance(n, str) for n in found) else frozenset()


def keep_operators(names: Iterable[str]) -> None:
    """Keep them for other processes."""
    if version() is not None:
        _write(f"{version()}.operators", sorted(names))


# -- launch programs as JSON -------------------------------------------------------------------------------------------
def _encode(p: LaunchProgram) -> list[Any]:
    inputs = [
        [i.kind, i.dtype and str(i.dtype), i.device_type, _items(i.sizes), _items(i.strides), i.slot, i.aligned]
        for i in p.inputs
    ]
    buffers = [[str(b.dtype), b.sizes, b.strides, b.output] for b in p.buffers]
    steps = [[s.entry, s.units, s.work, s.scratch] for s in p.steps]
    return [inputs, p.n_slots, p.n_floats, p.guards, buffers, steps, p.outputs, p.single]


def _items(items: Iterable[Bind | Check]) -> list[Any]:
    return [item.slot if isinstance(item, Bind) else item.code for item in items]


def _decode(kept: Any) -> LaunchProgram:
    inputs, n_slots, n_floats, guards, buffers, steps, outputs, single = kept
    return LaunchProgram(
        tuple(_input(*i) for i in inputs),
        n_slots,
        n_floats,
        _codes(guards),
        tuple(BufferPattern(_DTYPES[d], _codes(sizes), _codes(strides), out) for d, sizes, strides, out in buffers),
        tuple(Step(entry, tuple(units), tuple(work), tuple(scratch)) for entry, units, work, scratch in steps),
        tuple((kind, at) for kind, at in outputs),
        single,
    )


def _input(
    kind: str, dtype: str | None, device: str, sizes: Any, strides: Any, slot: int, aligned: bool
) -> InputPattern:  # fmt: skip
    known = _DTYPES[dtype] if dtype is not None else None
    return InputPattern(kind, known, device, _patterns(sizes), _patterns(strides), slot, aligned)


def _patterns(items: Any) -> tuple[Bind | Check, ...]:
    return tuple(Bind(item) if isinstance(item, int) else Check(tuple(item)) for item in items)


def _codes(codes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, codes))
