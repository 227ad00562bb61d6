"""Requirements of a file's kernels on a machine: fields that are written with it and compared at loading."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from fuser import config, machines
from fuser.errors import AotError
from fuser.runtime.encode import LAYOUT

FORMAT = 1  # of the program's JSON


def describe() -> dict[str, Any]:
    """The fields of this process and of the machine for which it compiles kernels."""
    row = machines.find(config.isa)
    return {
        "format": FORMAT,
        "launch": LAYOUT,
        "torch": torch.__version__.split("+")[0],
        "system": sys.platform,
        "processor": platform.machine(),
        "isa": row.name,
        "instructions": sorted(row.needs),
    }


_CURES = {
    "format": "use the version of fuser that wrote it, or write it again with this one",
    "launch": "use the version of fuser that wrote it, or write it again with this one",
    "torch": "install that version of torch, or write it again with this one",
    "system": "write it again on this system",
    "processor": "write it again on such a processor",
    "instructions": "write it again with config.isa for the oldest processor that is to run it",
    "isa": "write it again with config.isa for the machine that is to run it",
}


def check(path: str, wanted: Any) -> None:
    """Check a file's fields. AotError names the first one in which this machine differs from the file."""
    here = describe()
    if not isinstance(wanted, dict):
        raise AotError(f"{path} does not say for which machine it was written: write it again")
    for field, cure in _CURES.items():
        want, have = wanted.get(field), here[field]
        if field == "instructions":
            missing = sorted(set(want or ()) - machines.instructions())
            if missing:
                raise AotError(
                    f"{path} is for another machine: field {field!r}: expected {', '.join(missing)}, which this "
                    f"processor lacks; {cure}"
                )
        elif field == "isa":
            why = _why_not(want)
            if why is not None:
                raise AotError(f"{path} is for another machine: field {field!r}: {want!r}: {why}; {cure}")
        elif want != have:
            raise AotError(f"{path} is for another machine: field {field!r}: expected {want!r}, here {have!r}; {cure}")


def _why_not(isa: Any) -> str | None:
    """None if kernels made for the row `isa` run here, else the reason."""
    try:
        return machines.why_not(machines.find(isa if isinstance(isa, str) and isa else "no name"))
    except ValueError as e:
        return str(e)


def check_capability(path: str, wanted: Any) -> None:
    """AotError if no GPU here runs binaries for `wanted`, such as 90: of the same generation, and not older."""
    if not torch.cuda.is_available():
        raise AotError(f"{path} is for another machine: field 'capability': expected {wanted}, here is no CUDA device")
    major, minor = torch.cuda.get_device_capability(0)
    if wanted // 10 != major or wanted % 10 > minor:
        raise AotError(
            f"{path} is for another machine: field 'capability': expected {wanted}, here {major}{minor}; write it "
            "again on such a GPU"
        )


__all__ = ["FORMAT", "check", "check_capability", "describe"]
