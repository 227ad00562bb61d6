"""Decisions of contests: in this process, and on disk for one machine, pair of versions and class of inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuser import config, machines
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import eviction, files

settings: Any = config  # its attributes are made from a table

FORMAT = 5  # to be raised when earlier outcomes are no longer valid, such as when contests measure in another way
MARGIN = 0.97  # a contestant has to take less than this share of the incumbent's time
_LIBRARIES = ("DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_")  # prefixes of environment variables that change libraries


@dataclass(frozen=True)
class Choice:
    """The winner, the reason, each contestant's microseconds sorted by speed, and the subject."""

    winner: str
    reason: str
    times: tuple[tuple[str, float], ...]
    what: str = ""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {t:.1f} µs" for name, t in self.times[:4])
        return f"{self.what}: {self.winner} ({self.reason}{'; ' if times else ''}{times})"


_made: dict[str, Choice] = {}  # by name, in this process


def choices() -> tuple[Choice, ...]:
    """The decisions of contests, such as which of two forms of a group is faster on this machine.

    Returns:
        A `Choice` for each decision of this process, and for each that it read from disk.
    """
    return tuple(_made.values())


def name_of(*parts: Any) -> str:
    """The name of a choice about `parts`, the same in every process."""
    return hashlib.sha256(repr((FORMAT, torch.__version__, *parts)).encode()).hexdigest()[:32]


def machine() -> tuple[Any, ...]:
    """The facts on which CPU times depend: the processor, the number of threads, settings of libraries."""
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(_LIBRARIES))
    return machines.cpu_text(), torch.get_num_threads(), tuple(variables)


def cpu_folder() -> pathlib.Path | None:
    """The folder of CPU choices; None if nothing can be kept."""
    if not settings.cache_dir:
        return None
    try:
        return files.folder(settings.cache_dir, "choices")
    except files.Refused as e:
        files.say_once(settings.cache_dir, f"choices are not kept: {e}")
    except OSError:
        pass
    return None


def find(name: str, folder: pathlib.Path | None) -> Choice | None:
    """An earlier choice of this process or in `folder`; None if there is none or it cannot be read."""
    if name in _made or folder is None:
        return _made.get(name)
    try:
        found = json.loads(files.read(folder / f"{name}.choice.json") or b"")
        times = tuple((str(n), float(t)) for n, t in found["times"])
        choice = Choice(str(found["winner"]), str(found["reason"]), times, str(found["what"]))
    except (ValueError, KeyError, TypeError):
        return None
    _made[name] = choice
    return choice


def remember(name: str, choice: Choice) -> None:
    """Store a choice in this process."""
    _made[name] = choice


def keep(name: str, choice: Choice, folder: pathlib.Path | None) -> None:
    """Store a choice in this process and in `folder`."""
    remember(name, choice)
    if folder is not None:
        data = json.dumps(dataclasses.asdict(choice)).encode()
        with contextlib.suppress(OSError):  # a full disk, or a read-only folder
            files.write(folder / f"{name}.choice.json", data)
            eviction.note(len(data))


def decide(times: Mapping[str, float], incumbent: str, failed: Sequence[tuple[str, str]] = ()) -> Choice:
    """The fastest by microseconds, if it beats the incumbent by a margin; else the incumbent."""
    ordered = tuple(sorted(times.items(), key=lambda item: item[1]))
    best = ordered[0][0]
    reason = "raced"
    if best != incumbent and times[best] > MARGIN * times[incumbent]:
        best, reason = incumbent, "raced; nothing was clearly faster"
    if failed:
        reason += f"; {len(failed)} did not compile"
    return Choice(best, reason, ordered)


__all__ = ["Choice", "choices", "cpu_folder", "decide", "find", "keep", "machine", "name_of", "remember"]
