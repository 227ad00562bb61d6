"""The keys that the queries of an attention attend to."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from fuser.lazy_dataclasses import dataclass

BLOCK = 64  # queries that share a range of keys; range ends are multiples of it
HUGE = -1e9  # a number at most this masks a key, beside a key with more than `LEAST`
LEAST = -1e6  # a mask above this leaves a key some weight beside others
RANGES = "fuser_reach"  # in a node's metadata: the `Reach` of its mask


class Reaching(Protocol):
    """The known structure of a mask, for every number of queries and keys."""

    @property
    def share(self) -> float:
        """The share of scores that are not masked, for the sizes seen while tracing."""

    def at(self, rows: int, keys: int) -> Reach | None:
        """The keys of each block of queries; None if all may be attended to."""


@dataclass(frozen=True)
class Reach:
    """For each block of queries, the first key that one of them may attend to, and the one after the last.

    `whole`: for each block of queries, the keys to which the mask adds 0. `checked`: a query whose keys are all masked
    attends to all keys or to none, depending on what the mask says of the others.
    """

    ranges: tuple[tuple[int, int], ...]
    rows: int
    keys: int
    checked: bool = False
    whole: tuple[tuple[int, int], ...] = ()

    def at(self, rows: int, keys: int) -> Reach:
        """Itself; its sizes have to be these."""
        assert (rows, keys) == (self.rows, self.keys), "a mask of other sizes"
        return self

    def of(self, rows: slice) -> slice:
        """The keys of some queries; at least one, so that sums are not empty."""
        some = [r for r in self.ranges[rows.start // BLOCK : -(-rows.stop // BLOCK)] if r[0] < r[1]]
        return slice(min(a for a, _ in some), max(b for _, b in some)) if some else slice(0, 1)

    def masked(self, mask: torch.Tensor) -> torch.Tensor:
        """`mask`, [..., queries or 1, keys or 1], with minus infinity where nothing is attended to."""
        seen = torch.zeros((self.rows, self.keys), dtype=torch.bool, device="cpu")
        for n, (low, high) in enumerate(self.ranges):
            seen[n * BLOCK : (n + 1) * BLOCK, low:high] = True
        return torch.where(seen, mask, -torch.inf)

    def is_enough(self, mask: torch.Tensor) -> bool:
        """Whether each query certainly attends to a key in `mask`, the part for these keys: [..., queries, keys]."""
        return not self.checked or bool((mask.amax(-1) > LEAST).all())

    @functools.cached_property
    def share(self) -> float:
        """The share of all scores inside the ranges."""
        seen = 0
        for n, (low, high) in enumerate(self.ranges):
            seen += (min((n + 1) * BLOCK, self.rows) - n * BLOCK) * (high - low)
        return seen / max(self.rows * self.keys, 1)


__all__ = ["BLOCK", "HUGE", "RANGES", "Reach", "Reaching"]
