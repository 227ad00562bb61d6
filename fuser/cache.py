"""Access to the cache: its contents, whether they are whole, bundles of them, and why a kernel was not found.

`python -m fuser cache` offers the same as commands. `docs/caching.md` describes files and formats.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fuser import bundles, compiler, config, plans
from fuser.bundles import Bundle, export, import_
from fuser.examples import concrete
from fuser.kernel_cache import REGISTRY
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import eviction, files, prebuilt
from fuser.runtime.archive import ArchiveError
from fuser.runtime.machine import Difference

settings: Any = config  # its attributes are made from a table

# Kinds of files, by their path in the cache. Other files were not made by fuser, or are only for people.
KINDS: tuple[tuple[str, str], ...] = (
    ("library", r"cpu/[0-9a-f]{32}\.so"),
    ("plan", r"plans/[0-9a-f]{32}(-[0-9a-f]{16})?\.plan"),
    ("refusal", r"plans/[0-9a-f]{32}(-[0-9a-f]{16})?\.refusal"),
    ("operators", r"plans/[0-9a-f]{32}\.operators"),
    ("sources", r"plans/[0-9a-f]{32}\.sources"),
    ("flags", r"cpu/toolchain-[0-9a-f]{16}"),
    ("binary", r"cuda/[0-9a-f]{32}\.(cubin|json)"),
    ("choice", r"(choices|cuda)/[0-9a-f]{32}\.choice\.json"),
    ("launcher", r"native/[0-9a-f]{24}\.so"),
    ("manifest", re.escape(prebuilt.MANIFEST)),
    ("source", r"cpu/[0-9a-f]{32}\.cpp|cuda/[0-9a-f]{32}\.py"),
    ("reproducer", r"reproducers/.*"),
    ("lock", r"(.*/)?\.(lock|work)-.*"),
)
UNSEALED = ("source", "reproducer", "lock", "other")


@dataclass(frozen=True)
class Entry:
    """A file of the cache: its kind (see `KINDS`), path in the cache, bytes, seconds since creation and last use.

    `serves` names its kernel, if a plan does. The files of an imported bundle are one entry.
    """

    kind: str
    name: str
    bytes: int
    age: float
    unused: float
    serves: str = ""


@dataclass(frozen=True)
class Problem:
    """An entry that is not used, and the reason."""

    name: str
    why: str


@dataclass(frozen=True)
class Miss:
    """Why a kernel was not found: the fields in which the most similar plan differs, and that plan's name.

    Empty if it is found; `nearest` is "" if there is no plan at all.
    """

    nearest: str
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        if not self.differences:
            return f"found: {self.nearest}" if self.nearest else "no plan is kept"
        return "\n".join([f"the most similar plan is {self.nearest}; it differs in", *map(str, self.differences)])


# -- what there is -----------------------------------------------------------------------------------------------------
def kind_of(name: str | os.PathLike[str]) -> str:
    """The kind of a file of the cache, by its name alone; the file need not exist.

    Args:
        name: a path relative to the cache, with "/" between its parts.

    Returns:
        One of the names in `KINDS`, or "other".
    """
    path = os.fspath(name)
    return next((kind for kind, pattern in KINDS if re.fullmatch(pattern, path)), "other")


def _root(folder: str | os.PathLike[str] | None) -> pathlib.Path:
    """The cache, or another folder with its layout. ValueError if there is none."""
    if folder is None and not settings.cache_dir:
        raise ValueError("no cache is kept: config.cache_dir is ''")
    return pathlib.Path(settings.cache_dir if folder is None else folder)


def _walk(root: pathlib.Path) -> Iterator[tuple[str, os.stat_result]]:
    """All files and other non-folders, by path; imported bundles as one folder each."""
    for folder, names, others in os.walk(root):
        here = os.path.relpath(folder, root)
        if here == prebuilt.BUNDLES:
            others, names[:] = [n for n in names if not n.startswith(".")], [n for n in names if n.startswith(".")]
        for name in sorted(others):
            with contextlib.suppress(OSError):  # removed by another process
                path = os.path.normpath(os.path.join(here, name))
                yield path, os.lstat(os.path.join(root, path))


def entries(folder: str | os.PathLike[str] | None = None) -> list[Entry]:
    """The contents of the cache.

    Args:
        folder: another folder of the cache's layout; None is the cache.

    Returns:
        An `Entry` for each file, and one for each imported bundle. Empty if the folder does not exist. Sizes are bytes,
        times seconds.

    Raises:
        ValueError: no cache is kept (`config.cache_dir` is ""), and no folder is given.
    """
    root, now = _root(folder), time.time()
    serves = dict(_served(root))
    out = []
    for name, found in _walk(root):
        kind, size, used = kind_of(name), found.st_size, found.st_atime
        if stat.S_ISDIR(found.st_mode):
            kind, inside = "bundle", [s for _, s in _walk(root / name)]
            size, used = sum(s.st_size for s in inside), max((s.st_atime for s in inside), default=used)
        used = max(used, found.st_mtime)
        out.append(Entry(kind, name, size, now - found.st_mtime, max(now - used, 0.0), serves.get(name, "")))
    return out


def _served(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The kernels that plans and their libraries are for, by path."""
    for name, about in _plans(root):
        args = ", ".join(map(str, about.get("args", ())))
        text = f"{about['name']}({args}): {about.get('operators', '')}"
        yield f"plans/{name}", text
        yield f"{'cuda' if 'binaries' in about else 'cpu'}/{about['library']}", text
        yield from ((f"cuda/{b}.{end}", text) for b in about.get("binaries", ()) for end in ("cubin", "json"))
    with contextlib.suppress(OSError):
        for path in sorted((root / prebuilt.BUNDLES).iterdir()):
            with contextlib.suppress(OSError, ValueError):
                differs = bundles.differences(prebuilt.read(path).manifest)
                yield f"{prebuilt.BUNDLES}/{path.name}", "; ".join(map(str, differs)) or "used here"


def _plans(root: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(root / "plans")):
            if name.endswith(".plan") and (about := plans.about(files.read(root / "plans" / name, used=False))):
                yield name, about


# -- keeping it in order -----------------------------------------------------------------------------------------------
def verify(folder: str | os.PathLike[str] | None = None, remove: bool = False) -> list[Problem]:
    """Find entries that are damaged or not as they were written, and plans whose library is missing.

    Args:
        folder: another folder of the cache's layout; None is the cache.
        remove: remove these entries, to be made again.

    Returns:
        A `Problem` for each such entry; empty if all are whole.

    Raises:
        ValueError: no cache is kept (`config.cache_dir` is ""), and no folder is given.
    """
    root = _root(folder)
    out = []
    for place in (root, *sorted(root.glob("*/"))):
        try:
            files.existing_folder(place)
        except FileNotFoundError:
            return []
        except OSError as e:
            out.append(Problem(os.path.relpath(place, root), str(e)))
    for name, found in _walk(root):
        if stat.S_ISDIR(found.st_mode):
            inside = verify(root / name)
            out += [Problem(f"{name}/{p.name}", p.why) for p in inside]
            if inside and remove:
                shutil.rmtree(root / name, ignore_errors=True)
        elif kind_of(name) not in UNSEALED and (why := _why_not_used(root / name, found)) is not None:
            out.append(Problem(name, why))
            if remove:
                (root / name).unlink(missing_ok=True)
    for name, about in _plans(root):
        missing = [path for path in _needed(about) if not (root / path).is_file()]
        if missing:
            out.append(Problem(f"plans/{name}", f"its library {missing[0].name} is missing"))
            if remove:
                (root / "plans" / name).unlink(missing_ok=True)
    return out


def _needed(about: dict[str, Any]) -> list[pathlib.PurePath]:
    """The entries that a plan needs."""
    if "binaries" in about:
        return [pathlib.PurePath("cuda", f"{os.path.basename(b)}.cubin") for b in about["binaries"]]
    return [pathlib.PurePath("cpu", os.path.basename(about["library"]))]


def _why_not_used(path: pathlib.Path, found: os.stat_result) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "it is no file"
    damaged = "its checksum is not that of its name and contents"
    return files.distrusted(path, found) or (damaged if files.read(path, used=False) is None else None)


def clear(kinds: Sequence[str] | None = None, unused: float = 0.0) -> int:
    """Remove entries of the cache. Running processes keep what they have loaded; files being made are left alone.

    Args:
        kinds: names from `KINDS`, or "bundle"; None is all but reproducers. Locks and files of no kind stay.
        unused: only entries that nobody used for so many seconds.

    Returns:
        The bytes removed.

    Raises:
        ValueError: an unknown kind, no number of seconds, or no cache is kept (`config.cache_dir` is "").
    """
    known = [*(kind for kind, _ in KINDS), "bundle"]
    if kinds is not None and (isinstance(kinds, str) or not isinstance(kinds, Iterable)):
        raise ValueError(f"kinds={kinds!r}: expected a list of kinds of entries, such as ['plan', 'library']")
    if not isinstance(unused, (int, float)):
        raise ValueError(f"unused={unused!r}: expected a number of seconds, such as 86400.0")
    wrong = [kind for kind in kinds or () if kind not in known]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no kind of entry: expected one of {', '.join(known)}")
    root = _root(None)
    chosen = set(kinds) if kinds is not None else {*known, "other"} - {"reproducer"}
    removed = 0
    for entry in entries():
        if entry.kind in chosen - {"lock", "other"} and entry.unused >= unused:
            path = root / entry.name
            if entry.kind == "bundle":
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
            removed += 0 if os.path.lexists(path) else entry.bytes
    for place in (root, *root.glob("*/")):
        files.sweep(str(place))
    prebuilt.forget()
    return removed


def trim() -> int:
    """Remove the least recently used entries, as far as the cache exceeds `config.cache_limit_bytes`.

    Returns:
        The bytes removed; 0 if there is no limit.

    Raises:
        ValueError: no cache is kept (`config.cache_dir` is "").
    """
    return eviction.trim(str(_root(None)), settings.cache_limit_bytes) if settings.cache_limit_bytes else 0


# -- why something was not found ---------------------------------------------------------------------------------------
def explain_miss(key: int, inputs: Sequence[Any]) -> Miss:
    """Find out why no kernel of a fusion is found for these inputs, in the cache or among prebuilt ones.

    Nothing is compiled or run.

    Args:
        key: what `register_fusion` returned.
        inputs: one value for each placeholder of the graph, in order; they may be fake tensors. A single tensor may
            stand alone.

    Returns:
        A `Miss`: the fields in which the most similar plan differs; none if there is a kernel.

    Raises:
        UnknownKeyError: the key is not registered in this process.
        InputError: wrong inputs.
        Unsupported: a size of an input depends on data, so it has no value yet.
    """
    registration = REGISTRY.find(key)
    spec, args = registration.spec, tuple(map(concrete, registration.arguments(inputs)))
    backend = compiler.backend_of(args)
    machine = backend.machine() if isinstance(backend, compiler.KeepingBackend) else None
    name = plans.key_of(spec, args, machine)
    if name is None:
        return Miss("", (Difference("graph", "never kept", "one with Python objects, or a fuser without sources"),))
    wanted: dict[str, Any] = plans.facts(spec, args)
    if machine is not None and isinstance(backend, compiler.KeepingBackend):
        wanted |= backend.machine_facts()
    candidates: list[tuple[str, tuple[Difference, ...]]] = []
    local = pathlib.Path(settings.cache_dir, "plans") if settings.cache_dir else None
    for kept, about in _plans(local.parent) if local is not None else ():
        differs = () if kept == f"{name}.plan" else _differences(about, wanted)
        candidates.append((f"{local}/{kept}", differs))
    here = {field: value for field, value in wanted.items() if field not in ("compiler", "processor")}
    keeper = backend if isinstance(backend, compiler.KeepingBackend) else None
    names = {f.path: its_name for f, its_name in keeper.elsewhere(name)} if keeper is not None else {}
    for folder in prebuilt.all_folders():
        for kept, about in _plans(folder.path):
            same = kept == f"{names.get(folder.path, plans.portable(name))}.plan"
            differs = (*folder.differs, *(() if same else _differences(about, here)))
            candidates.append((f"{folder.path}/plans/{kept}", differs))
    if not candidates:
        return Miss("", ())
    return Miss(*min(candidates, key=lambda c: ("graph" in {d.field for d in c[1]}, len(c[1]))))


def _differences(about: dict[str, Any], wanted: dict[str, Any]) -> tuple[Difference, ...]:
    out = []
    kept, here = _flat(about), _flat(wanted)
    for field in here:
        if field != "operators" and kept.get(field) != here[field]:
            out.append(Difference(field, str(kept.get(field, "nothing")), here[field]))
    out += [Difference(f, kept[f], "nothing") for f in kept if f.startswith("input ") and f not in here]
    return tuple(out)


def _flat(facts: dict[str, Any]) -> dict[str, str]:
    out = {}
    for field, value in facts.items():
        if isinstance(value, dict):
            out.update({f"{field}.{name}": str(v) for name, v in value.items()})
        elif isinstance(value, list):
            out.update({f"input {n}": str(v) for n, v in enumerate(value)})
        else:
            out[field] = str(value)
    return out


def differences(path: str | os.PathLike[str], key: bytes | None = None) -> tuple[Difference, ...]:
    """The fields because of which this process does not find the kernels of a bundle.

    Args:
        path: a bundle's file, or the folder into which one was unpacked.
        key: the key with which the file was signed, if it was; without one, files that others may have written are
            refused.

    Returns:
        A `Difference` for each field, such as the version of torch; empty if the kernels are found.

    Raises:
        ArchiveError: the file is refused, or is no bundle.
        ValueError: the folder's manifest is damaged.
        InputError: the key is not bytes.
        OSError: there is no such file or folder, or it cannot be read.
    """
    return bundles.differences(bundles.manifest_of(path, key))


def _machine_facts(on_gpu: bool) -> dict[str, str]:
    backend = compiler.find_backend("cuda" if on_gpu else "cpu")
    if not isinstance(backend, compiler.KeepingBackend) or backend.machine() is None:
        return {}
    return dict(backend.machine_facts())


def stale() -> dict[tuple[str, ...], int]:
    """Count the plans of the cache that this process cannot find, such as those of another torch or compiler.

    Returns:
        Numbers of plans by the fields for which they are not found, each field as text.

    Raises:
        ValueError: no cache is kept (`config.cache_dir` is "").
    """
    root = _root(None)
    here: dict[bool, dict[str, str]] = {}  # by whether a plan is a GPU's
    out: dict[tuple[str, ...], int] = {}
    for _, about in _plans(root):
        on_gpu = "binaries" in about
        if on_gpu not in here:
            here[on_gpu] = {"torch": torch.__version__, "sources": str(plans.version()), **_machine_facts(on_gpu)}
        wanted = here[on_gpu].items()
        fields = tuple(str(Difference(f, str(about.get(f)), v)) for f, v in wanted if about.get(f) != v)
        if fields:
            out[fields] = out.get(fields, 0) + 1
    return out


__all__ = [
    "KINDS", "ArchiveError", "Bundle", "Difference", "Entry", "Miss", "Problem", "clear", "differences", "entries",
    "explain_miss", "export", "import_", "kind_of", "stale", "trim", "verify",
]  # fmt: skip
