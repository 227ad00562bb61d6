"""Plans: kernels of earlier processes, found again without lowering, scheduling, code generation or a compiler.

A plan is a kernel's launch program (patterns of inputs, guards, buffers, steps) and the name of its library, as JSON.
Its key is derived from all that determines it: the canonical graph, the settings, the arguments for which it was
compiled (dtypes, sizes, strides, values of numbers), torch's version and this package's sources; then compiler and
processor. So a plan that a process finds is the kernel that it would have compiled itself. Prebuilt plans are named by
the first part of the key, and are found where their libraries run (`runtime/prebuilt.py`). Plans are entries of the
cache, trusted and checked like libraries (`runtime/files.py`). If a plan or its library is damaged, both are made
again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from fuser import config, extensions
from fuser.errors import BackendError
from fuser.kernel_cache import KernelSpec
from fuser.kernel_spec import Bind, BufferPattern, Check, GpuLaunch, InputPattern, LaunchProgram, Step, is_aligned
from fuser.kernel_store import FusedKernel
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import eviction, files, prebuilt, remote
from fuser.runtime.encode import encode
from fuser.runtime.prebuilt import Prebuilt
from fuser.targets import HOST

settings: Any = config  # its attributes are made from a table

FORMAT = 3
MOST_OPERATORS = 12  # operators named in a plan
_DECIDING = ("canonical", "codegen", "cpu", "ir", "lowering", "ops", "scheduler")
_DECIDING_FILES = ("kernel_spec.py", "machines.py", "pipeline.py", "plans.py", "refusals.py", "targets.py")
_SEAL = r"\n#fuser [0-9a-f]{64}\n\Z"
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


# -- keys --------------------------------------------------------------------------------------------------------------
@functools.cache
def version() -> str | None:
    """An identifier of this package's sources and this torch, for names of plans; None if there are no sources."""
    root = os.path.dirname(__file__)
    try:
        groups = [_DECIDING_FILES, *(_sources(root, name) for name in _DECIDING)]
        paths = sorted(path for group in groups for path in group)
        if not all(groups):
            return None
        name = f"{_stamp(root, paths)}.sources"
        known = read(name)
        if not isinstance(known, str):
            known = _digest(root, paths)
            write(name, known)
        return known
    except OSError:  # a package with compiled files only, or in an archive
        return None


def _stamp(root: str, paths: Iterable[str]) -> str:
    """A stamp of the files that changes when one is written, so that a process need not read all 160 of them."""
    looks = [(f.st_ino, f.st_size, f.st_mtime_ns, f.st_ctime_ns) for f in (os.stat(f"{root}/{path}") for path in paths)]
    text = repr((FORMAT, torch.__version__, root, looks))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(root: str, paths: Iterable[str]) -> str:
    digest = hashlib.sha256(f"{FORMAT} {torch.__version__}".encode())
    for path in paths:
        digest.update(f"\0{path}\0".encode() + pathlib.Path(root, path).read_bytes())
    return digest.hexdigest()[:32]


def _sources(root: str, folder: str) -> list[str]:
    """The source files in `folder` and its subfolders. OSError if there is no such folder."""
    found = []
    for name in os.listdir(os.path.join(root, folder)):
        if name.endswith(".py"):
            found.append(f"{folder}/{name}")
        elif "." not in name and not name.startswith("__"):
            found += _sources(root, f"{folder}/{name}")
    return found


def key_of(spec: KernelSpec, args: Sequence[Any], machine: str | None) -> str | None:
    """The name of the plan of `spec` for arguments like `args` on a machine; None if there can be none.

    Without a machine, it is the name of a prebuilt plan: the first part of the full name.
    """
    known = version()
    added = extensions.mark()
    if known is None or added is None or spec.registered.opaque:  # Python objects that no text identifies
        return None
    described = tuple(map(_described, args))
    parts = (known + added, repr((torch.get_default_dtype(), spec.config, described)), spec.graph.text)
    portable = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    if machine is None:
        return portable
    return f"{portable}-{machine_suffix(machine)}"


def question_key(question: str) -> str | None:
    """The name of an answer that depends only on this package's sources and torch; None if there can be none."""
    known, added = version(), extensions.mark()
    if known is None or added is None:
        return None
    return hashlib.blake2b(f"{known}{added}\0{question}".encode(), digest_size=16).hexdigest()


def machine_suffix(machine: str) -> str:
    """The suffix of the names of a machine's plans."""
    return hashlib.blake2b(machine.encode(), digest_size=8).hexdigest()


def portable(key: str) -> str:
    """The machine-independent part of a plan's name."""
    return key.partition("-")[0]


def _described(a: Any) -> Any:
    if not isinstance(a, torch.Tensor):
        return a
    found = a.dtype, a.device.type, tuple(a.shape), a.stride()
    return found if a.device.type == HOST else (*found, is_aligned(a))  # CPU kernels accept any alignment


def facts(spec: KernelSpec, args: Sequence[Any]) -> dict[str, Any]:
    """The parts of a key by name, for people: see `fuser.cache.explain_miss`."""
    operators = list(dict.fromkeys(node.op.removeprefix("aten.") for node in spec.graph.calls))
    return {
        "graph": spec.graph.hash[:16],
        "operators": " ".join(operators[:MOST_OPERATORS]) + " …" * (len(operators) > MOST_OPERATORS),
        "args": [_argument(a) for a in args],
        "settings": {name: str(value) for name, value in spec.config},
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "torch": torch.__version__,
        "sources": version(),
    }


def _argument(a: Any) -> str:
    if not isinstance(a, torch.Tensor):
        return repr(a)
    text = f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
    return text if a.is_contiguous() else f"{text} strides {list(a.stride())}"


def _folder() -> pathlib.Path | None:
    with contextlib.suppress(OSError):  # the code that keeps libraries reports it
        return files.folder(settings.cache_dir, "plans") if settings.cache_dir else None
    return None


def read(name: str, shared: bool = False) -> Any:
    """The JSON of an entry among the plans; None if there is none. `shared`: also of an entry in the remote store."""
    folder = _folder()
    fetch = remote.read if shared else files.read
    return _parsed(fetch(folder / name) if folder is not None else None)


def everywhere(name: str) -> Iterator[Any]:
    """The JSON of entries that are the same on all machines: here, in the remote store, and in bundles."""
    yield read(name, shared=True)
    for folder in prebuilt.all_folders():
        yield _parsed(folder.read("plans", name))


def _parsed(data: bytes | None) -> Any:
    try:
        return json.loads(data) if data is not None else None
    except (ValueError, RecursionError):
        return None


def write(name: str, value: Any, shared: bool = False) -> None:
    """Store JSON among the plans, for other processes; with `shared` also in the remote store."""
    folder = _folder()
    if folder is not None:
        data = json.dumps(value, separators=(",", ":")).encode()
        with contextlib.suppress(OSError):  # a read-only folder: the next process works without it, too
            files.write(folder / name, data)
            eviction.note(len(data))
        if shared:
            remote.offer(folder / name, data)


# -- kernels -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KeptKernel:
    """A kernel of an earlier process. Its source is read on demand."""

    name: str
    program: LaunchProgram
    library: Any
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]

    @functools.cached_property
    def source(self) -> str:
        """The text from which the library was made, if it was kept; it is for people."""
        path = pathlib.Path(str(self.library))
        try:
            return re.sub(_SEAL, "", (path.with_suffix(".cpp") if path.suffix == ".so" else path).read_text())
        except OSError:
            return f"// {self.name} was taken from {self.library}; its source was not kept\n"


class Keeper(Protocol):
    """A backend whose kernels' plans are kept for other processes.

    `machine` is all that determines its code beside the source, `machine_facts` the same by name; None: nothing is
    kept. `kept_of` describes a kernel's library for a plan, with at least its name as "library"; None: the library is
    this process's own. `library_of` loads that library again, from the cache or from the folder of a bundle; None if
    it is not whole. It may raise KeyError, TypeError and ValueError. `elsewhere` gives folders of prebuilt kernels,
    each with the name of the plan `key` in it.
    """

    def machine(self) -> str | None: ...

    def machine_facts(self) -> Mapping[str, str]: ...

    def kept_of(self, kernel: Any) -> Mapping[str, Any] | None: ...

    def library_of(self, kept: Mapping[str, Any], folder: pathlib.Path | None = None) -> Any: ...

    def elsewhere(self, key: str) -> Iterable[tuple[Prebuilt, str]]: ...


def find(key: str, keeper: Keeper, elsewhere: bool = True) -> KeptKernel | None:
    """The kernel kept under `key`, or with `elsewhere` a prebuilt one for it; None if there is none."""
    kept = entries(key, "plan", keeper, elsewhere)
    return next((k for found, folder in kept if (k := _kernel(found, keeper, folder)) is not None), None)


def entries(
    key: str, kind: str, keeper: Keeper, elsewhere: bool = True
) -> Iterator[tuple[Any, pathlib.Path | None]]:  # fmt: skip
    """The JSON kept under `key`, with its bundle's folder: here, in bundles, and last in the remote store."""
    name, here = f"{key}.{kind}", _folder() if key != portable(key) else None
    if here is not None:
        yield _parsed(files.read(here / name)), None
    for folder, its_name in keeper.elsewhere(key) if elsewhere else ():
        yield _parsed(folder.read("plans", f"{its_name}.{kind}")), folder.path
    if here is not None and settings.remote_cache:
        yield read(name, shared=True), None


def _kernel(kept: Any, keeper: Keeper, folder: pathlib.Path | None) -> KeptKernel | None:
    if kept is None:
        return None
    try:
        program = decode_program(kept["program"])
        encode(program)  # it checks that no launch can access anything outside
        library = keeper.library_of(kept, folder)
        reasons = tuple((a, b, c) for a, b, c in kept["reasons"])
        return KeptKernel(kept["name"], program, library, kept["n_kernels"], reasons) if library is not None else None
    except (KeyError, TypeError, ValueError, IndexError, BackendError):  # of another form: it is made again
        return None


def about(plan: bytes | None) -> dict[str, Any]:
    """The description in a kept plan: its kernel's and library's names, and all that its key was derived from."""
    kept = _parsed(plan)
    try:
        found = {"name": str(kept["name"]), "library": str(kept["library"]), **kept["about"]}
        found |= {"binaries": list(map(str, kept["binaries"]))} if "binaries" in kept else {}
    except (KeyError, TypeError):
        return {}
    return {str(k): v for k, v in found.items()}


def details(data: bytes) -> dict[str, Any]:
    """The description in a refusal: all that its key was derived from, or the question that it answers."""
    kept = _parsed(data)
    about = kept.get("about", kept) if isinstance(kept, dict) else {}
    return about if isinstance(about, dict) else {}


def keep(key: str, kernel: FusedKernel, keeper: Keeper, about: dict[str, Any]) -> None:
    """Keep a kernel with its library for other processes. `about` is for people."""
    library = keeper.kept_of(kernel) if _folder() is not None else None
    if library is None:
        return
    made: Any = kernel
    write(
        f"{key}.plan",
        {
            "name": kernel.name, **library, "program": encode_program(kernel.program), "n_kernels": made.n_kernels,
            "reasons": made.reasons, "about": about,
        },
        shared=True,
    )  # fmt: skip


# -- operators ---------------------------------------------------------------------------------------------------------
_NO_OPERATORS: tuple[frozenset[str], frozenset[str], frozenset[str]] = (frozenset(), frozenset(), frozenset())


def operators(ordered: bool = False) -> frozenset[str]:
    """The operators that kernels of some device can contain, as kept by an earlier process; empty if unknown.

    `ordered`: for devices on which points run in order, such as the CPU.
    """
    return _operators(settings.cache_dir, settings.prebuilt_cache)[ordered]


def views() -> frozenset[str]:
    """The operators whose result aliases their first argument, as kept by an earlier process; empty if unknown."""
    return _operators(settings.cache_dir, settings.prebuilt_cache)[2]


@functools.lru_cache(maxsize=8)
def _operators(cache_dir: str, prebuilt_cache: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    if version() is None:
        return _NO_OPERATORS
    name = f"{version()}.operators"
    found = next((kept for kept in everywhere(name) if kept is not None), None)
    if not isinstance(found, list) or len(found) != 3 or not all(map(_are_names, found)):
        return _NO_OPERATORS
    every, unordered, views = map(frozenset, found)
    return every, every - unordered, views


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, str) for n in value)


def keep_operators(names: Iterable[str], unordered: Iterable[str] = (), views: Iterable[str] = ()) -> None:
    """Keep operators for other processes: all, those `unordered` that ordered devices lack, and `views` (aliases)."""
    if version() is not None:
        kept = [sorted(extensions.without(some)) for some in (names, unordered, views)]
        write(f"{version()}.operators", kept, shared=True)


# -- launch programs as JSON -------------------------------------------------------------------------------------------
def encode_program(p: LaunchProgram) -> list[Any]:
    """A launch program as JSON."""
    inputs = [
        [i.kind, i.dtype and str(i.dtype), i.device_type, _items(i.sizes), _items(i.strides), i.slot, i.aligned,
         i.every_stride]
        for i in p.inputs
    ]  # fmt: skip
    buffers = [[str(b.dtype), b.sizes, b.strides, b.output, *([True] if b.counters else [])] for b in p.buffers]
    steps = [[s.entry, s.units, s.work, s.scratch, *_encode_gpu(s.gpu)] for s in p.steps]
    return [inputs, p.n_slots, p.n_floats, p.guards, buffers, steps, p.outputs, p.single]


def _encode_gpu(gpu: GpuLaunch | None) -> list[Any]:
    return [[gpu.threads, gpu.shared, gpu.params]] if gpu is not None else []


def _items(items: Iterable[Bind | Check]) -> list[Any]:
    return [item.slot if isinstance(item, Bind) else item.code for item in items]


def decode_program(kept: Any) -> LaunchProgram:
    """The launch program that `encode_program` wrote. KeyError, TypeError or ValueError if it has another form."""
    inputs, n_slots, n_floats, guards, buffers, steps, outputs, single = kept
    return LaunchProgram(
        tuple(_input(*i) for i in inputs),
        n_slots,
        n_floats,
        _codes(guards),
        tuple(
            BufferPattern(_DTYPES[d], _codes(sizes), _codes(strides), out, *map(bool, counters))
            for d, sizes, strides, out, *counters in buffers
        ),
        tuple(
            Step(entry, tuple(units), tuple(work), tuple(scratch), *map(_decode_gpu, gpu))
            for entry, units, work, scratch, *gpu in steps
        ),
        tuple((kind, at) for kind, at in outputs),
        single,
    )


def _decode_gpu(gpu: Any) -> GpuLaunch:
    threads, shared, params = gpu
    return GpuLaunch(threads, shared, tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in params))


def _input(
    kind: str, dtype: str | None, device: str, sizes: Any, strides: Any, slot: int, aligned: bool, every: bool
) -> InputPattern:  # fmt: skip
    known = _DTYPES[dtype] if dtype is not None else None
    return InputPattern(kind, known, device, _patterns(sizes), _patterns(strides), slot, aligned, every)


def _patterns(items: Any) -> tuple[Bind | Check, ...]:
    return tuple(Bind(item) if isinstance(item, int) else Check(tuple(item)) for item in items)


def _codes(codes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, codes))
