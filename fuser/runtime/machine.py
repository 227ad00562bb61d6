"""A library's requirements on a machine: architecture, instruction sets, C library."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from fuser import machines
from fuser.lazy_dataclasses import dataclass

# Prefixes of Linux's names for instructions that a compiler may use by itself.
_ISA = (
    "3dnow", "abm", "adx", "aes", "amx", "avx", "bmi", "cmov", "cx16", "f16c", "fma", "gfni", "lzcnt", "mmx", "movbe",
    "movdir", "pclmul", "pni", "popcnt", "prefetchw", "sha", "sse", "ssse", "tbm", "vaes", "vpclmul", "xop", "lahf_lm",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A field in which a kept library's machine differs from this one."""

    field: str
    kept: str
    here: str

    def __str__(self) -> str:
        return f"{self.field}: {self.kept} there, {self.here} here"


@functools.lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """The fields that decide whether a library runs here: "architecture", "isa" (a sorted list), "libc"."""
    system = os.uname()
    flags = machines.instructions()
    if system.machine == "x86_64":
        flags = frozenset(w for w in flags if w.startswith(_ISA))
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = ""
    return {"architecture": system.machine, "isa": sorted(flags), "libc": libc or f"another, of {system.sysname}"}


def has(architecture: str, libc: str) -> bool:
    """Whether this machine has the architecture, and a C library such as "glibc 2.35" or a newer one."""
    here = facts()
    return bool(here["architecture"] == architecture and _serves(libc, here["libc"]))


def differences(kept: Mapping[str, Any]) -> tuple[Difference, ...]:
    """The reasons why a library made on a machine with the facts `kept` does not run here; empty if it does.

    Additional instruction sets and a newer C library of the same name do not matter.
    """
    here = facts()
    out = []
    if kept["architecture"] != here["architecture"]:
        out.append(Difference("architecture", kept["architecture"], here["architecture"]))
    elif lacking := sorted(set(kept["isa"]) - set(here["isa"])):
        out.append(Difference("isa", f"with {' '.join(lacking)}", "without"))
    if not _serves(kept["libc"], here["libc"]):
        out.append(Difference("libc", kept["libc"], here["libc"]))
    return tuple(out)


def _serves(kept: str, here: str) -> bool:
    (name, _, old), (own, _, new) = kept.partition(" "), here.partition(" ")
    return kept == here or name == own == "glibc" and _version(old) <= _version(new)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 1 << 30 for part in text.split("."))


__all__ = ["Difference", "differences", "facts", "has"]
