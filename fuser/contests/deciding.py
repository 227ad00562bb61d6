"""Contests on the CPU by class: each runs once, in this process or in an earlier one that kept its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from fuser import forks
from fuser.contests import race, records
from fuser.contests.race import Contestant
from fuser.contests.records import Choice


class Decisions:
    """The decisions of one kind of contest. Threads that need the same class wait for one contest."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._made: dict[Any, Choice] = {}
        self._lock = forks.lock()

    def choice(
        self, key: Any, names: Sequence[str], what: str, enter: Callable[[], Mapping[str, Contestant]],
        favoured: str = "",
    ) -> Choice:  # fmt: skip
        """The outcome for a class, known or from a contest now of what `enter` makes; the first name is the incumbent.

        A contest that fails does not end the program: the incumbent then wins in this process, without times.
        `favoured` is the entry that stays if its result is the incumbent's and nothing is clearly faster.
        """
        whole = key, tuple(names), torch.get_num_threads(), torch._C._get_mkldnn_enabled()
        found = self._made.get(whole)
        if found is None:
            with self._lock:
                found = self._made.get(whole) or self._decide(whole, names, what, enter, favoured)
                self._made[whole] = found
        return found

    def _decide(
        self, key: Any, names: Sequence[str], what: str, enter: Callable[[], Mapping[str, Contestant]], favoured: str
    ) -> Choice:
        name = records.name_of(self._kind, records.machine(), key)
        folder = records.cpu_folder()
        known = records.find(name, folder)
        if known is not None and known.winner in names:
            return known
        try:
            known, lasting = _held(enter, names[0], what, favoured)
            records.keep(name, known, folder if lasting else None)
        except Exception as e:
            why = str(e) if isinstance(e, race.Unfinished) else f"the contest failed: {race.said(e)}"
            stays = e.stays if isinstance(e, race.Unfinished) else None
            known = Choice(stays or names[0], why, (), what)
            records.remember(name, known)
        return known


def _held(
    enter: Callable[[], Mapping[str, Contestant]], incumbent: str, what: str, favoured: str
) -> tuple[Choice, bool]:
    """Run a contest outside of tracing: Dynamo's Python dispatcher takes longer than a small product."""
    untraced: Any = torch._C._DisablePythonDispatcher()
    plain = torch.autocast("cpu", enabled=False)
    with untraced, _disable_current_modes(), unset_fake_temporarily(), torch.no_grad(), plain:
        return race.race(enter(), incumbent, what, favoured=favoured)


def numbers(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Operands of contests, always the same: a few thousand normal numbers, repeated."""
    chance = torch.Generator(device="cpu").manual_seed(seed)
    block = torch.randn(max(1, min(count, 8191)), generator=chance, device="cpu", dtype=torch.float32).to(dtype)
    return block.repeat(-(-count // block.numel()))[:count]


__all__ = ["Decisions", "numbers"]
