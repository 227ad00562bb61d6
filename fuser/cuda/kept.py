"""The description of a GPU kernel in a plan, and its binaries from that, without Triton, lowering or scheduling."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fuser import config
from fuser.cuda import driver, toolchain
from fuser.cuda.driver import Entry
from fuser.errors import CompileError

if TYPE_CHECKING:
    from fuser.cuda.fused_kernel import FusedKernel
    from fuser.cuda.nest import Function

settings: Any = config  # its attributes are made from a table


# -- keys --------------------------------------------------------------------------------------------------------------
@functools.cache
def sources() -> str | None:
    """The digest of this folder's sources; None if they cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        found = sorted(pathlib.Path(__file__).parent.glob("*.py"))
        for path in found:
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if found else None


def machine(triton: str | None = None) -> str | None:
    """Text of all that determines a kernel on the current device beside lowering; None if no plan can be kept.

    `triton` is the version of Triton that compiled it, by default the installed one.
    """
    if sources() is None or not torch.cuda.is_available():
        return None
    return repr(tuple(machine_facts(triton).items()))


def machine_facts(triton: str | None = None) -> dict[str, str]:
    """The same as a dict, by name. The device itself is included only if races decide tiles."""
    found = {
        "sm": str(driver.capability(torch.cuda.current_device())),
        "triton": str(triton or toolchain.triton_version()),
        "sources of fuser.cuda": str(sources()),
    }
    if settings.max_autotune:
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


# -- plans -------------------------------------------------------------------------------------------------------------
def describe(kernel: FusedKernel) -> dict[str, Any] | None:
    """A kernel as a plan's JSON; None if its binaries are this process's own, or others may choose other tiles."""
    made, folder = kernel.made_of, toolchain.cache_folder()
    if folder is None or not made.lasting:
        return None
    asked = [toolchain.request(made.text, f, kernel.capability, made.numerics) for f in made.functions]
    binaries = [r.digest for r in asked]
    if not all((folder / f"{digest}.cubin").exists() for digest in binaries):  # they were compiled elsewhere
        return None
    return {
        "library": pathlib.PurePath(kernel.library.path).name, "binaries": binaries, "capability": kernel.capability,
        "numerics": made.numerics, "functions": list(map(_encode, made.functions)),
    }  # fmt: skip


def _encode(f: Function) -> list[Any]:
    params = [[p.name, p.kind, p.type, p.divisor] for p in f.params]
    return [f.name, f.body, params, f.warps, f.checked, f.stages, f.registers, list(f.helpers)]


def restore(kept: Mapping[str, Any], folder: pathlib.Path | None) -> driver.Library | None:
    """The binaries that a plan names, from the cache or `folder`, loaded in the driver; None if some are missing.

    KeyError, TypeError or ValueError if the plan has another form.
    """
    steps, name, digests = kept["program"][5], kept["library"], kept["binaries"]
    if kept["capability"] != driver.capability(torch.cuda.current_device()) or len(digests) != len(steps):
        return None
    parts = []
    for digest, step in zip(digests, steps):
        part = toolchain.kept_binary(digest, folder) if _is_name(digest) else None
        if part is None or not _fits(part, step):
            return None
        parts.append(part)
    if not isinstance(name, str) or pathlib.PurePath(name).name != name:
        raise ValueError("a source elsewhere")
    own = folder / "cuda" if folder is not None else toolchain.cache_folder()
    more = functools.partial(_batched, kept["functions"], kept["name"], kept["numerics"], kept["capability"])
    try:
        return driver.Library(str(own / name) if own is not None else name, parts, more)
    except CompileError:  # the driver no longer accepts them: they are compiled again
        return None


def _is_name(digest: Any) -> bool:
    return isinstance(digest, str) and len(digest) == 32 and digest.isalnum()


def _fits(part: Entry, step: Any) -> bool:
    """Whether a step's launch parameters are those of this binary."""
    threads, shared, params = step[4]
    extra = sum(kind == "null" for kind, _ in params)
    return (part.name, part.threads, part.shared, part.extra) == (step[0], threads, shared, extra)


def _batched(kept: Sequence[Any], name: str, numerics: str, capability: int) -> tuple[Entry, ...]:
    """The binaries for many argument sets, compiled at the first request. Raises CompileError."""
    from fuser.cuda import fused_kernel  # few processes need it
    from fuser.cuda.nest import Function
    from fuser.cuda.text import Param
    from fuser.ir.sizes import ONE

    functions = [
        Function(f, body, ONE, ONE, tuple(Param(p, kind, p, type_, divisor) for p, kind, type_, divisor in params),
                 warps, checked, stages, registers, tuple(helpers))
        for f, body, params, warps, checked, stages, registers, helpers in kept
    ]  # fmt: skip
    return fused_kernel.batched_entries(functions, name, numerics, capability)


__all__ = ["describe", "machine", "machine_facts", "restore", "sources"]
