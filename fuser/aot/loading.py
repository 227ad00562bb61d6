"""Loading and running an ahead-of-time file: without compiler, Dynamo, Triton and sympy."""

from __future__ import annotations

import hmac
import importlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fuser import plans
from fuser.aot import machine, tensors
from fuser.aot.rows import Rows
from fuser.aot.signature import Signature
from fuser.canonical.structure import Flattened, Unflattened
from fuser.cuda import driver
from fuser.errors import AotError, BackendError, CompileError, GraphError, InputError
from fuser.runtime import archive, files, heap, launcher, native_build, python_launcher
from fuser.runtime.encode import encode

KEY = "FUSER_AOT_KEY"
PROGRAM, TENSORS, SUMS = "program.json", "tensors", "sums"
_DAMAGED = (TypeError, ValueError, KeyError, IndexError, AttributeError, BackendError, GraphError, RuntimeError)


def key_bytes(key: bytes | str | None) -> bytes | None:
    """The given key, or the environment's; None if there is none."""
    found = key if key is not None else os.environ.get(KEY) or None
    return found.encode() if isinstance(found, str) else found


def load(path: str | os.PathLike[str], *, key: bytes | str | None = None) -> LoadedProgram:
    """Load the program in a file that `fuser.aot.compile` wrote; call it like the exported module.

    The file holds code and is trusted like code.

    Args:
        path: the file.
        key: only files signed with it are accepted. None takes the environment's `FUSER_AOT_KEY`. Without any key,
            files that another user owns or may write are refused. Damage is found either way.

    Returns:
        A `LoadedProgram`. Its results need no gradient, and its calls raise InputError for sizes that the export does
        not allow.

    Raises:
        AotError: the file is refused, damaged, or of another machine or version; the message has the cure.
        InputError: the key is neither bytes nor a string.
        OSError: there is no such file, or it cannot be read.
    """
    path, secret = os.fspath(path), key_bytes(key)
    try:
        with archive.Archive(path, secret) as file:
            return _loaded(file, path, secret)
    except archive.ArchiveError as e:
        raise AotError(f"{e}; write it again with fuser.aot.compile") from None


def _loaded(file: archive.Archive, path: str, secret: bytes | None) -> LoadedProgram:
    if not {PROGRAM, TENSORS, SUMS} <= set(file.members):
        raise AotError(f"{path} holds no program: expected a file that fuser.aot.compile wrote")
    text = file.read(PROGRAM)
    try:
        program = json.loads(text)
    except ValueError as e:
        raise AotError(f"{path} holds no program: {e}") from None
    machine.check(path, program.get("machine") if isinstance(program, dict) else None)
    try:
        if program.get("capability") is not None:
            machine.check_capability(path, program["capability"])
        held = _mapped(file, path, program, secret)
        groups = [_Group(file, group) for group in program["groups"]]
        return LoadedProgram(path, program, held, groups)
    except archive.ArchiveError:
        raise
    except OSError as e:
        raise AotError(f"a kernel of {path} cannot be loaded: {e}; write it again on this system") from None
    except _DAMAGED as e:
        raise AotError(f"{path} cannot be used: {e}; write it again with fuser.aot.compile") from None


def _mapped(file: archive.Archive, path: str, program: Any, secret: bytes | None) -> list[torch.Tensor]:
    """The file's tensors. Their memory is the file's pages, copied on write, so other processes see no writes."""
    member = file.members[TENSORS]
    if not member.size:
        return tensors.read(torch.zeros(0, dtype=torch.uint8), program["tensors"])
    whole: Any = torch.UntypedStorage.from_file(path, False, member.start + member.size)
    data = torch.empty(0, dtype=torch.uint8).set_(whole, member.start, (member.size,), (1,))
    if secret is not None:
        found = archive.digest(data.numpy().data)
        whole_again = hmac.compare_digest(found, member.digest)
    else:
        whole_again = tensors.sums(data).numpy().tobytes() == file.read(SUMS)
    if not whole_again:
        raise archive.ArchiveError(f"archive {path} is not used: its tensors are damaged")
    return tensors.read(data, program["tensors"])


class _Group:
    """A group's kernels in a launcher handle, and its graph on ATen for calls that no kernel accepts."""

    def __init__(self, file: archive.Archive, data: Any) -> None:
        self.by_aten = Rows(data["graph"], int(data["bound"]))
        native = native_build.installed() is not None  # nothing is built here
        self.handle: Any = launcher.make_handle(self.slow) if native else python_launcher.Handle(self.slow)
        for kernel in data["kernels"]:
            program = plans.decode_program(kernel["program"])
            encode(program)  # it checks that no launch can access anything outside
            entry = _gpu_library(file, kernel) if "parts" in kernel else library(file, kernel["library"])
            self.handle.add_kernel(program, entry)

    def slow(self, args: tuple[Any, ...], status: int, named: dict[str, Any] | None = None) -> Any:
        """The result, on ATen, of a call that no kernel accepted."""
        return self.by_aten(*args)


def _gpu_library(file: archive.Archive, kernel: Any) -> Any:
    """A kernel's binaries, loaded in the driver. OSError if they cannot be loaded."""
    parts = [
        driver.Entry(str(p["name"]), file.read(p["cubin"]), int(p["shared"]), int(p["threads"]), int(p["extra"]))
        for p in kernel["parts"]
    ]
    try:
        return driver.Library(f"{file.path}:{kernel['name']}", parts)
    except CompileError as e:
        raise OSError(str(e)) from None


_open: dict[str, tuple[str, int]] = {}  # by digest: a library's path, and the handle of its file in memory


def library(file: archive.Archive, name: str) -> str:
    """The path from which a library of the file is loaded: a file in memory, or in this process's own folder."""
    digest, data = file.members[name].digest, file.read(name)
    if digest not in _open:
        try:
            handle = os.memfd_create("fuser-kernel")
            with os.fdopen(os.dup(handle), "wb") as memory:
                memory.write(data)
            _open[digest] = f"/proc/self/fd/{handle}", handle
        except (OSError, AttributeError):
            place = files.private_folder() / f"{digest[:32]}.so"
            files.write(place, data)
            _open[digest] = str(place), -1
    return _open[digest][0]


def _namespaces(graph: Any) -> set[str]:
    """The namespaces of the operators that a graph and its bodies call."""
    inner = [_namespaces(body["graph"]) for body in graph.get("bodies", ())]
    return {row[1].partition("::")[0] for row in graph["rows"] if row[0] == "call"}.union(*inner)


class LoadedProgram:
    """An exported program with stored kernels. It is called like the exported module; results need no gradient.

    InputError for arguments of another form, or sizes that the export does not allow.
    """

    def __init__(self, path: str, program: Any, held: Sequence[torch.Tensor], groups: Sequence[_Group]) -> None:
        if "fuser" in _namespaces(program["graph"]):  # operators of this package
            importlib.import_module("fuser.ops.random")
        self.path = path
        self._groups = tuple(groups)
        self._held = [held[n] for n in program["held"]]
        self._run = Rows(program["graph"], 0, [g.handle for g in groups])
        self._signature = Signature(program["inputs"], program["ranges"], program["guards"])
        self._takes = Flattened(pytree.treespec_loads(program["takes"]))
        self._makes = Unflattened(pytree.treespec_loads(program["makes"]), None)
        self._flat = bool(program["flat"])
        self._writes = [(int(n), bool(held_), int(where)) for n, held_, where in program["writes"]]
        self._state = {str(name): self._held[n] for name, n in program["state"].items()}
        self._skipped = int(program["skipped"])
        heap.keep_warm()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = args if self._flat and not kwargs else self._takes(args, kwargs)
        if len(leaves) != self._n_leaves:
            leaves = self._takes(args, kwargs)
        self._signature.check(leaves)
        with torch.no_grad():
            results = self._run(*self._held, *leaves)
            for n, is_held, where in self._writes:
                (self._held if is_held else leaves)[where].copy_(results[n])
        return self._makes(results[self._skipped :])

    @property
    def _n_leaves(self) -> int:
        return len(self._signature._leaves)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name: the memory that calls read, and also write if the module has such buffers."""
        return dict(self._state)

    @property
    def kernel_hits(self) -> int:
        """The number of group calls that a kernel answered."""
        return sum(int(g.handle.hits) for g in self._groups)

    @property
    def kernel_misses(self) -> int:
        """The number of group calls that ran on ATen."""
        return sum(int(g.handle.misses) for g in self._groups)

    def __repr__(self) -> str:
        kernels = sum(int(g.handle.kernel_count) for g in self._groups)
        return f"LoadedProgram({pathlib.Path(self.path).name}, {len(self._groups)} groups, {kernels} kernels)"


__all__ = ["InputError", "LoadedProgram", "key_bytes", "library", "load"]
