"""Bundles: the kernels of a cache in one file, for other machines, users and paths, with or without a compiler.

A bundle is an archive (`runtime/archive.py`): a manifest and entries of the cache, without their checksums, which the
archive has for all. Plans have the names under which every machine finds them. Unpacked, it is a folder that is only
read (`runtime/prebuilt.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

import torch

from fuser import config, machines, plans
from fuser.cpu import toolchain
from fuser.cuda import kept
from fuser.cuda import toolchain as cuda_toolchain
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import archive, compilers, files, launcher, machine, native_build, prebuilt
from fuser.runtime.archive import ArchiveError

settings: Any = config  # its attributes are made from a table

# The members that a bundle may have beside its manifest.
MEMBERS = re.compile(
    r"plans/[0-9a-f]{32}(-[0-9a-f]{16})?\.(plan|refusal)|plans/[0-9a-f]{32}\.operators|cpu/[0-9a-f]{32}\.(so|cpp)|native/[0-9a-f]{24}\.so"
    r"|cuda/[0-9a-f]{32}(\.json|\.cubin|\.choice\.json)"
)
_PLAN = re.compile(r"([0-9a-f]{32})-[0-9a-f]{16}\.plan")
_MOST_BYTES = 1 << 33  # of all members of a bundle; a larger file is refused unread


@dataclass(frozen=True)
class Bundle:
    """The contents of a bundle: numbers of kernels by device, its bytes, and why entries of the cache were left out.

    `path` is its file, or the folder into which it was unpacked; `differs`: the reasons why it is not used here.
    """

    path: pathlib.Path
    manifest: prebuilt.Manifest
    kernels: dict[str, int]
    bytes: int
    left_out: dict[str, int] = field(default_factory=dict)
    differs: tuple[machine.Difference, ...] = ()


# -- export ------------------------------------------------------------------------------------------------------------
def export(path: str | os.PathLike[str], key: bytes | None = None) -> Bundle:
    """Write the kernels of the cache that this process would find into a bundle.

    Kernels of other compilers, versions and sources are left out.

    Args:
        path: the file to write, whole or not at all.
        key: signs the bundle; None leaves it unsigned.

    Returns:
        A `Bundle`: numbers of kernels by device, its bytes, and how many entries were left out, by reason.

    Raises:
        ValueError: there is no cache (`config.cache_dir` is "").
        InputError: the key is not bytes.
        OSError: the file cannot be written.
    """
    if not settings.cache_dir:
        raise ValueError("there is no cache to export: config.cache_dir is ''")
    root = pathlib.Path(settings.cache_dir)
    members: dict[str, bytes] = {}
    left_out: Counter[str] = Counter()
    capabilities = _add_binaries(root, members, left_out)
    _add_plans(root, members, left_out)
    _add_refusals(root, members)
    _add_launcher(members)
    made: dict[str, Any] = {
        "torch": torch.__version__, "sources": plans.version(),
        "python": platform.python_version(),
    }  # fmt: skip
    if compilers.why_none() is None:
        made.update(toolchain.machine_facts())
    needs = {"isa": sorted(_instructions(members))}
    manifest = prebuilt.Manifest(made, machine.facts() | needs, cuda_toolchain.triton_version(), capabilities)
    archive.write(path, {**members, prebuilt.MANIFEST: manifest.encode()}, key)
    size = os.stat(path).st_size
    return Bundle(pathlib.Path(path), manifest, _kernels(members), size, dict(left_out))


def _kernels(names: Any) -> dict[str, int]:
    ends = {"cpu": r"plans/[0-9a-f]{32}\.plan", "cuda": r"cuda/.*\.cubin"}
    return {device: sum(re.fullmatch(pattern, n) is not None for n in names) for device, pattern in ends.items()}


def _names(folder: pathlib.Path) -> Iterator[str]:
    try:
        yield from sorted(os.listdir(files.existing_folder(folder)))
    except OSError:
        return


def _own_suffix() -> str:
    here = toolchain.machine()
    return plans.machine_suffix(here) if here is not None else ""


def _add_plans(root: pathlib.Path, members: dict[str, bytes], left_out: Counter[str]) -> None:
    own = _own_suffix()
    for name in _names(root / "plans"):
        match = _PLAN.fullmatch(name)
        if match is None:
            continue
        plan = files.read(root / "plans" / name)
        about = plans.about(plan)
        if plan is not None and about.get("binaries"):
            why = _why_left_out(about, members)
            left_out.update([why] if why is not None else [])
            members.update({f"plans/{name}": plan} if why is None else {})
            continue
        library = about.get("library", "")
        code = files.read(root / "cpu" / library) if MEMBERS.fullmatch(f"cpu/{library}") else None
        if plan is None or code is None:
            left_out["not whole"] += 1
        elif not name.endswith(f"{own}.plan"):
            left_out["of another compiler or processor"] += 1
        elif about.get("sources") != plans.version():
            left_out["of another torch or other sources of fuser"] += 1
        else:
            members[f"plans/{match[1]}.plan"] = plan
            members[f"cpu/{library}"] = code
            source = (root / "cpu" / library).with_suffix(".cpp")
            if source.is_file() and not source.is_symlink():
                members[f"cpu/{source.name}"] = source.read_bytes()
    _add_operators(root, members)


def _add_refusals(root: pathlib.Path, members: dict[str, bytes]) -> None:
    """Add the refusals of this version alone: with them, other machines split groups without lowering."""
    own = _own_suffix()
    for name in _names(root / "plans"):
        match = re.fullmatch(r"([0-9a-f]{32})(-[0-9a-f]{16})?\.refusal", name)
        data = files.read(root / "plans" / name) if match is not None else None
        if match is None or data is None:
            continue
        about = plans.details(data)
        if match[2] is None:
            fits = plans.question_key(str(about.get("question"))) == match[1]
        elif "sm" in about:
            fits = _why_left_out(about, members) is None
        else:
            fits = match[2] == f"-{own}" and about.get("sources") == plans.version()
        if fits:
            members[f"plans/{name if 'sm' in about else f'{match[1]}.refusal'}"] = data


def _add_operators(root: pathlib.Path, members: dict[str, bytes]) -> None:
    names = files.read(root / "plans" / f"{plans.version()}.operators")
    if names is not None:
        members[f"plans/{plans.version()}.operators"] = names


def _why_left_out(about: Mapping[str, Any], members: Mapping[str, bytes]) -> str | None:
    """The reason why a GPU's plan is of no use elsewhere; None if all its binaries are among the members."""
    if about.get("sources") != plans.version() or about.get("sources of fuser.cuda") != kept.sources():
        return "of another torch or other sources of fuser"
    if about.get("triton") != str(cuda_toolchain.triton_version()):
        return "of another Triton"
    return None if all(f"cuda/{b}.cubin" in members for b in about.get("binaries", ())) else "not whole"


def _instructions(members: Mapping[str, bytes]) -> frozenset[str]:
    """The instructions that the kernels of all plans among `members` need."""
    found: frozenset[str] = frozenset()
    for name in members:
        if re.fullmatch(r"plans/[0-9a-f]{32}\.plan", name):
            settings_of = plans.about(members[name]).get("settings", {})
            found |= machines.find(settings_of.get("isa", "")).needs
    return found


def _add_binaries(root: pathlib.Path, members: dict[str, bytes], left_out: Counter[str]) -> tuple[int, ...]:
    capabilities: set[int] = set()
    for name in _names(root / "cuda"):
        path = root / "cuda" / name
        if re.fullmatch(r"[0-9a-f]{32}\.choice\.json", name) and (choice := files.read(path)) is not None:
            members[f"cuda/{name}"] = choice
        if not re.fullmatch(r"[0-9a-f]{32}\.json", name):
            continue
        facts, cubin = files.read(path), files.read(path.with_suffix(".cubin"))
        if facts is None or cubin is None or cuda_toolchain.entry_of(facts, cubin) is None:
            left_out["not whole"] += 1
            continue
        known = json.loads(facts)
        if type(known.get("capability")) is not int or known.get("triton") != cuda_toolchain.triton_version():
            left_out["of another Triton"] += 1
            continue
        capabilities.add(known["capability"])
        members[f"cuda/{name}"], members[f"cuda/{path.stem}.cubin"] = facts, cubin
    return tuple(sorted(capabilities))


def _add_launcher(members: dict[str, bytes]) -> None:
    module = launcher.native() if launcher.wait(settings.compile_timeout_seconds) else None
    path = pathlib.Path(str(getattr(module, "__file__", None) or ""))
    if path.is_file():
        data = path.read_bytes()
        whole = files.read(path)
        members[f"native/{native_build.portable_name()}"] = whole if whole is not None else data


# -- import ------------------------------------------------------------------------------------------------------------
def import_(path: str | os.PathLike[str], key: bytes | None = None, to: str | None = None) -> Bundle:
    """Unpack a bundle into the cache, where later processes find its kernels, or into a new folder.

    A bundle is code: import none from a person whose programs you would not run.

    Args:
        path: the bundle's file.
        key: only a bundle that was signed with it is accepted. Without one, files that others may have written are
            refused.
        to: a folder that is empty or does not exist yet; None is the cache.

    Returns:
        A `Bundle`: where it was unpacked, numbers of kernels by device, bytes, and why it is not used here, if so.

    Raises:
        ArchiveError: the file is damaged, refused, or holds what no bundle holds. Nothing of it is written.
        ValueError: `to` is None, and there is no cache (`config.cache_dir` is "").
        InputError: the key is not bytes.
        OSError: the file cannot be read, or it cannot be unpacked, such as into a folder that is not empty.
    """
    with archive.Archive(path, key) as packed:
        manifest = _checked(packed)
        identity = hashlib.sha256("".join(m.digest + n for n, m in packed.members.items()).encode()).hexdigest()[:32]
        target = _target(identity, to)
        shown = 0o755, 0o644  # others may run programs in a container image
        folder_mode, file_mode = shown if to is not None else (0o700, 0o600)
        if to is None and _is_whole(target, packed):
            return _bundle(target, packed, manifest)
        with files.working_folder(target.parent) as work:
            made = work / target.name
            made.mkdir()
            for name in packed.members:
                place = made / name
                place.parent.mkdir(exist_ok=True)
                place.parent.chmod(folder_mode)
                place.write_bytes(packed.read(name))
                files.put(place, place, mode=file_mode)
            made.chmod(folder_mode)
            if target.exists():  # an incomplete one
                os.rename(target, work / "before")
            os.rename(made, target)
        prebuilt.forget()
        return _bundle(target, packed, manifest)


def _bundle(target: pathlib.Path, packed: archive.Archive, manifest: prebuilt.Manifest) -> Bundle:
    size = sum(m.size for m in packed.members.values())
    return Bundle(target, manifest, _kernels(packed.members), size, {}, differences(manifest))


def _checked(packed: archive.Archive) -> prebuilt.Manifest:
    """The manifest of an archive whose members are all whole and allowed in a bundle, else ArchiveError."""
    wrong = [n for n in packed.members if n != prebuilt.MANIFEST and MEMBERS.fullmatch(n) is None]
    if wrong:
        raise ArchiveError(f"archive {packed.path} is no bundle of kernels: it holds {wrong[0]}")
    if prebuilt.MANIFEST not in packed.members:
        raise ArchiveError(f"archive {packed.path} is no bundle of kernels: it has no {prebuilt.MANIFEST}")
    if sum(m.size for m in packed.members.values()) > _MOST_BYTES:
        raise ArchiveError(f"archive {packed.path} is larger than any bundle")
    try:
        manifest = prebuilt.decode(packed.read(prebuilt.MANIFEST))
    except ArchiveError:
        raise
    except ValueError as e:
        raise ArchiveError(f"archive {packed.path} is not used: {e}") from None
    for name in packed.members:
        packed.read(name)
    return manifest


def _target(identity: str, to: str | None) -> pathlib.Path:
    if to is None:
        if not settings.cache_dir:
            raise ValueError("there is no cache to import into: config.cache_dir is ''; name a folder")
        return files.folder(settings.cache_dir, prebuilt.BUNDLES) / identity
    target = pathlib.Path(to).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty: name a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _is_whole(target: pathlib.Path, packed: archive.Archive) -> bool:
    try:
        files.existing_folder(target)
    except OSError:
        return False
    return all((data := files.read(target / n)) is not None and archive.digest(data) == m.digest
               for n, m in packed.members.items())  # fmt: skip


# -- what differs ------------------------------------------------------------------------------------------------------
def differences(manifest: prebuilt.Manifest) -> tuple[machine.Difference, ...]:
    """The fields in which a bundle's machine differs from this process; empty if its kernels are found here."""
    out = list(machine.differences(manifest.machine))
    made = manifest.made
    if made.get("torch") != torch.__version__:
        out.append(machine.Difference("torch", str(made.get("torch")), torch.__version__))
    elif made.get("sources") != plans.version():
        out.append(machine.Difference("sources of fuser", str(made.get("sources")), str(plans.version())))
    if manifest.capabilities and torch.cuda.is_available():
        here = {a * 10 + b for a, b in map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))}
        if not here.intersection(manifest.capabilities):
            out.append(machine.Difference("sm", _joined(manifest.capabilities), _joined(here)))
        triton = cuda_toolchain.triton_version()
        if triton is not None and triton != manifest.triton:
            out.append(machine.Difference("triton", str(manifest.triton), triton))
    return tuple(out)


def _joined(numbers: Any) -> str:
    return " ".join(map(str, sorted(numbers)))


def manifest_of(path: str | os.PathLike[str], key: bytes | None = None) -> prebuilt.Manifest:
    """The manifest of a bundle, or of a folder into which one was unpacked. ArchiveError, ValueError or OSError."""
    if os.path.isdir(path):
        return prebuilt.read(pathlib.Path(path)).manifest
    with archive.Archive(path, key) as packed:
        return _checked(packed)


__all__ = ["Bundle", "differences", "export", "import_", "manifest_of"]
