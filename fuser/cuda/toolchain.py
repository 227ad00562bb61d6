"""Triton: finding it, compiling a kernel to a binary, keeping binaries on disk. Triton is imported on first need."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fuser import config, forks
from fuser.cuda import compile_worker, driver, pool
from fuser.cuda.driver import Entry
from fuser.errors import CompileError
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because
from fuser.runtime import eviction, files, prebuilt, remote, workers
from fuser.runtime.counting import COUNTS

if TYPE_CHECKING:
    from fuser.cuda.nest import Function

OLDEST_TRITON, NEWEST_TRITON = (3, 4), (3, 7)
FORMAT = 3  # of the entries on disk
settings: Any = config
_lock = forks.lock()  # one compilation at a time in this process: parts of Triton keep state


@functools.cache
def triton_version() -> str | None:
    """The version of the installed Triton; None if there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not() -> str | None:
    """None if kernels can be compiled or found prebuilt, else the reason."""
    return None if _elsewhere() else why_no_triton()


def why_no_triton() -> str | None:
    """None if Triton can be used, else the reason."""
    version = triton_version()
    if version is None or importlib.util.find_spec("triton") is None:
        return because("compiler", "Triton is not installed: kernels for CUDA devices need it (pip install triton)")
    found = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not OLDEST_TRITON <= found <= NEWEST_TRITON:
        low, high = (".".join(map(str, v)) for v in (OLDEST_TRITON, NEWEST_TRITON))
        return because("compiler", f"Triton {version} is installed: expected one from {low} to {high}")
    return None


@dataclass(frozen=True)
class Request:
    """One kernel to compile: its source file's text, the function, and its specialisation."""

    text: str
    name: str
    types: tuple[tuple[str, str], ...]  # (parameter, type) in order
    divisors: tuple[tuple[int, int], ...]  # (parameter number, its divisor)
    warps: int
    capability: int
    fused_multiply_add: bool
    checked: bool
    stages: int = 0  # of pipelined loops; 0: Triton's default
    registers: int = 0  # most registers of a thread; 0: no limit

    @property
    def digest(self) -> str:
        """The digest that identifies the kernel's binary."""
        return self.digest_with(triton_version())

    def digest_with(self, triton: str | None) -> str:
        """The same for another version of Triton."""
        parts = (FORMAT, triton, *(getattr(self, f) for f in self.__dataclass_fields__))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def request(text: str, f: Function, capability: int, numerics: str) -> Request:
    """The request for kernel `f` of the source `text`, for devices of `capability` (such as 90)."""
    types = tuple((p.name, p.type) for p in f.params)
    divisors = tuple((i, p.divisor) for i, p in enumerate(f.params) if p.divisor > 1)
    fused = numerics == "fast"
    return Request(text, f.name, types, divisors, f.warps, capability, fused, f.checked, f.stages, f.registers)


def compile_kernel(r: Request) -> Entry:
    """The binary of a kernel, from disk if it was compiled before, here or elsewhere. Raises CompileError."""
    folder = cache_folder()
    known = (_read(folder, r.digest) if folder is not None else None) or _read_elsewhere(r)
    if known is None and folder is not None:
        with files.claim(folder / r.digest, settings.compile_timeout_seconds):  # another process may be compiling it
            known = _read(folder, r.digest, remote.read)
            if known is None:
                made = _counted(r)
                _keep(folder, r, made)
                return made
    if known is None:
        return _counted(r)
    COUNTS.add("binaries_found")
    return known


def _counted(r: Request) -> Entry:
    made = compile_now(r)
    COUNTS.add("binaries_made")
    return made


def source_path(text: str) -> str:
    """The path of the file with the kernels' source, for people to read."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    folder = cache_folder()
    if folder is None:
        return f"<fuser {digest}>"
    path = folder / f"{digest}.py"
    if not path.exists():  # for people only: no process reads it
        write(path, text.encode(), sealed=False)
    return str(path)


def compile_now(r: Request) -> Entry:
    """Run Triton's compiler, in a process of its own if one can be started. Raises CompileError."""
    reason = why_no_triton()
    if reason is not None:
        raise CompileError(reason)
    asked = {**dataclasses.asdict(r), "path": source_path(r.text)}
    try:
        found = pool.pool().compile(asked, settings.compile_timeout_seconds)
    except pool.CannotStart:
        with _lock:
            found = compile_worker.compile_one(asked)
    if "error" in found:
        raise CompileError(f"Triton cannot compile kernel {r.name} ({asked['path']}): {found['error']}", found["log"])
    return Entry(**{**found, "cubin": base64.b64decode(found["cubin"])})


def compile_all(requests: Sequence[Request]) -> tuple[Entry, ...]:
    """The binaries of several kernels, compiled in parallel. Raises CompileError."""
    if len(requests) < 2:  # none: all results are views, or have no elements
        return tuple(map(compile_kernel, requests))
    own = config.snapshot()  # overrides hold for this thread only

    def compile_one(r: Request) -> Entry:
        with config.override(**own):
            return compile_kernel(r)

    return tuple(workers.run_all(compile_one, requests, pool.workers()))


def load_source(text: str) -> dict[str, Any]:
    """The functions of a source, in this process."""
    return compile_worker.load_source(text, source_path(text))


# -- the disk ----------------------------------------------------------------------------------------------------------
def cache_folder() -> pathlib.Path | None:
    """The folder of binaries; None if nothing can be kept."""
    if not settings.cache_dir:
        return None
    try:
        return files.folder(settings.cache_dir, "cuda")
    except OSError as e:
        where = pathlib.Path(settings.cache_dir) / "cuda"
        files.say_once(where, f"kernels are not kept in {where}, so that each process compiles them again: {e}")
        return None


def _elsewhere() -> tuple[prebuilt.Prebuilt, ...]:
    """Folders of prebuilt binaries for some device of this machine."""
    found = prebuilt.for_gpu()
    if not found or driver.why_not() is not None:
        return ()
    here = {driver.capability(n) for n in range(torch.cuda.device_count())}
    return tuple(p for p in found if here.intersection(p.manifest.capabilities))


def kept_binary(digest: str, folder: pathlib.Path | None) -> Entry | None:
    """The binary of the request with this digest: from the cache or the remote store, or from `folder`."""
    if folder is not None:
        return _read(folder / "cuda", digest)
    own = cache_folder()
    if own is None:
        return None
    return _read(own, digest) or (_read(own, digest, remote.read) if settings.remote_cache else None)


def _read_elsewhere(r: Request) -> Entry | None:
    """A prebuilt binary, compiled by the installed version of Triton or, if there is none, by any."""
    for folder in prebuilt.for_gpu():
        known = _read(folder.path / "cuda", r.digest_with(triton_version() or folder.manifest.triton))
        if known is not None:
            return known
    return None


def _read(
    folder: pathlib.Path, digest: str, read: Callable[[pathlib.Path], bytes | None] = files.read
) -> Entry | None:  # fmt: skip
    facts = read(folder / f"{digest}.json")
    return entry_of(facts, read(folder / f"{digest}.cubin") if facts is not None else None)


def entry_of(facts: bytes | None, cubin: bytes | None) -> Entry | None:
    """The binary that two entries describe; None if they do not belong together."""
    if facts is None or cubin is None:
        return None
    try:
        known = json.loads(facts)
        whole = known["sha256"] == hashlib.sha256(cubin).hexdigest()
        fields = {name: known[name] for name in ("name", "shared", "threads", "extra")}
        fits = isinstance(fields["name"], str) and all(type(v) is int for n, v in fields.items() if n != "name")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Entry(cubin=cubin, **fields) if whole and fits else None


def _keep(folder: pathlib.Path, r: Request, e: Entry) -> None:
    facts = {
        "name": e.name, "shared": e.shared, "threads": e.threads, "extra": e.extra,
        "sha256": hashlib.sha256(e.cubin).hexdigest(), "capability": r.capability, "triton": triton_version(),
    }  # fmt: skip
    for path, data in ((f"{r.digest}.cubin", e.cubin), (f"{r.digest}.json", json.dumps(facts).encode())):
        write(folder / path, data)
        remote.offer(folder / path, data)


def write(path: pathlib.Path, data: bytes, sealed: bool = True) -> None:
    """Write an entry whole or not at all; errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        files.write(path, data, sealed)
        eviction.note(len(data))
