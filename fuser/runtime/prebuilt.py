"""Prebuilt kernels: folders made elsewhere that are only read, before anything is compiled.

These are `config.prebuilt_cache` and the bundles that were imported into the cache. Each has the layout of the cache,
its entries end in the same checksums, and only this user or root may own or write it. Its manifest says which machines
its libraries are for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
from typing import Any

from fuser import config
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import files, machine

settings: Any = config  # its attributes are made from a table

FORMAT = 1
MANIFEST = "manifest.json"
BUNDLES = "bundles"  # the folder of imported bundles in the cache


@dataclass(frozen=True)
class Manifest:
    """The requirements of a bundle's entries. `made` is for people: versions and counts by name."""

    made: dict[str, Any]
    machine: dict[str, Any]  # see `machine.facts`
    triton: str | None  # the version that compiled the GPU's binaries
    capabilities: tuple[int, ...]  # of the devices for which there are binaries

    def encode(self) -> bytes:
        """The manifest as JSON; equal manifests give equal bytes."""
        kept = {"format": FORMAT, **vars(self), "capabilities": list(self.capabilities)}
        return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def decode(data: bytes) -> Manifest:
    """The manifest in `data`. ValueError, with the reason, if it is not one."""
    try:
        kept = json.loads(data)
        if kept["format"] != FORMAT:
            raise ValueError(f"its manifest has format {kept['format']!r}, where {FORMAT} is read")
        facts, triton, capabilities = kept["machine"], kept["triton"], kept["capabilities"]
        isa = facts["isa"]
        fits = (
            all(isinstance(facts[name], str) for name in ("architecture", "libc"))
            and isinstance(isa, list) and all(isinstance(name, str) for name in isa)
            and (triton is None or isinstance(triton, str)) and isinstance(kept["made"], dict)
            and isinstance(capabilities, list) and all(type(c) is int for c in capabilities)
        )  # fmt: skip
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        fits = False
    if not fits:
        raise ValueError("its manifest is of another form")
    return Manifest(kept["made"], {k: facts[k] for k in ("architecture", "isa", "libc")}, triton, tuple(capabilities))


@dataclass(frozen=True)
class Prebuilt:
    """A folder of prebuilt entries. `differs`: the reasons why its CPU libraries do not run here."""

    path: pathlib.Path
    manifest: Manifest
    differs: tuple[machine.Difference, ...]

    def read(self, *names: str) -> bytes | None:
        """The contents of an entry; None if there is none that is whole and trusted."""
        return files.read(self.path.joinpath(*names))


def read(path: pathlib.Path) -> Prebuilt:
    """The folder at `path`. files.Refused if others may write it, OSError or ValueError if it is not one."""
    files.existing_folder(path)
    for name in ("cpu", "cuda", "native", "plans"):
        if os.path.lexists(path / name):
            files.existing_folder(path / name)
    why = files.distrusted(path / MANIFEST, os.lstat(path / MANIFEST))
    if why is not None:
        raise files.Refused(why)
    data = files.read(path / MANIFEST)
    if data is None:
        raise ValueError("there is no whole manifest in it")
    manifest = decode(data)
    return Prebuilt(path, manifest, machine.differences(manifest.machine))


def all_folders() -> tuple[Prebuilt, ...]:
    """All readable folders, that of the setting first. One warning says why another is not used."""
    return _folders(settings.prebuilt_cache, settings.cache_dir)


def for_cpu() -> tuple[Prebuilt, ...]:
    """The folders with libraries that run here."""
    return tuple(p for p in all_folders() if not p.differs)


def for_gpu() -> tuple[Prebuilt, ...]:
    """The folders with binaries for GPUs."""
    return tuple(p for p in all_folders() if p.manifest.capabilities)


def forget() -> None:
    """Forget the folders, so the next call looks for them again."""
    _folders.cache_clear()


@functools.lru_cache(maxsize=8)
def _folders(named: str, cache_dir: str) -> tuple[Prebuilt, ...]:
    paths = [pathlib.Path(p) for p in named.split(os.pathsep) if p]
    with contextlib.suppress(OSError):
        if cache_dir and (imported := os.path.join(cache_dir, BUNDLES)) and os.path.lexists(imported):
            names = os.listdir(files.existing_folder(pathlib.Path(imported)))
            paths += [pathlib.Path(imported, name) for name in sorted(names) if not name.startswith(".")]
    return tuple(found for path in paths if (found := _found(path)) is not None)


def _found(path: pathlib.Path) -> Prebuilt | None:
    try:
        return read(path)
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        files.say_once(path, f"the prebuilt kernels in {path} are not used: {why}")
        return None


__all__ = ["BUNDLES", "FORMAT", "MANIFEST", "Manifest", "Prebuilt", "all_folders", "decode", "for_cpu", "for_gpu",
           "forget", "read"]  # fmt: skip
