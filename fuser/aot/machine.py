"""What a machine must have to run the kernels of a file: fields that are written with it and compared at loading."""

from __future__ import annotations

import pathlib
import platform
import re
import sys
from typing import Any

import torch

from fuser.errors import AotError
from fuser.runtime.encode import LAYOUT

FORMAT = 1  # of the program's JSON
# What g++ -march=native may use unasked, as Linux spells it.
_ISA = re.compile(r"sse\w*|ssse3|avx\w*|fma\w*|f16c|bmi\d|abm|popcnt|movbe|asimd\w*|sve\w*|fp|fphp|neon|bf16|i8mm")


def describe() -> dict[str, Any]:
    """The fields of this machine and process."""
    return {
        "format": FORMAT,
        "launch": LAYOUT,
        "torch": torch.__version__.split("+")[0],
        "system": sys.platform,
        "processor": platform.machine(),
        "instructions": _instructions(),
    }


def _instructions() -> list[str]:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    line = next((ln for ln in text.splitlines() if ln.startswith(("flags", "Features"))), "")
    return sorted(word for word in set(line.partition(":")[2].split()) if _ISA.fullmatch(word))


_CURES = {
    "format": "use the version of fuser that wrote it, or write it again with this one",
    "launch": "use the version of fuser that wrote it, or write it again with this one",
    "torch": "install that version of torch, or write it again with this one",
    "system": "write it again on this system",
    "processor": "write it again on such a processor",
    "instructions": "write it again on the oldest processor that is to run it",
}


def check(path: str, wanted: Any) -> None:
    """AotError names the first field in which this machine is not what the file was written for."""
    here = describe()
    if not isinstance(wanted, dict):
        raise AotError(f"{path} does not say for which machine it was written: write it again")
    for field, cure in _CURES.items():
        want, have = wanted.get(field), here[field]
        if field == "instructions":
            missing = sorted(set(want or ()) - set(have))
            if missing:
                raise AotError(
                    f"{path} is for another machine: field {field!r}: expected {', '.join(missing)}, which this "
                    f"processor lacks; {cure}"
                )
        elif want != have:
            raise AotError(f"{path} is for another machine: field {field!r}: expected {want!r}, here {have!r}; {cure}")


def check_capability(path: str, wanted: Any) -> None:
    """AotError if there is no GPU that runs binaries for `wanted`, such as 90: of its generation, and not older."""
    if not torch.cuda.is_available():
        raise AotError(f"{path} is for another machine: field 'capability': expected {wanted}, here is no CUDA device")
    major, minor = torch.cuda.get_device_capability(0)
    if wanted // 10 != major or wanted % 10 > minor:
        raise AotError(
            f"{path} is for another machine: field 'capability': expected {wanted}, here {major}{minor}; write it "
            "again on such a GPU"
        )


__all__ = ["FORMAT", "check", "check_capability", "describe"]
