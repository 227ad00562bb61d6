"""Which keys the queries of an attention attend to."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from fuser.lazy_dataclasses import dataclass

BLOCK = 64  # queries that share a range of keys, and the grid of its ends
HUGE = -1e9  # and below: a number that masks a key, beside one of more than `LEAST`
LEAST = -1e6
RANGES = "fuser_reach"  # in a node's metadata: the `Reach` of its mask


class Reaching(Protocol):
    """What is known of a mask, for every number of queries and keys."""

    @property
    def share(self) -> float:
        """The part of all scores that is left, for the sizes that were seen while tracing."""

    def at(self, rows: int, keys: int) -> Reach | None:
        """The keys of each block of queries; None where all may be attended to."""


@dataclass(frozen=True)
class Reach:
    """For each block of queries, the first key that one of them may attend to, and the one behind the last.

    `whole`: the keys of each block of queries to which the mask adds 0. `checked`: a query all of whose keys are masked
    attends to all, or to none, by what the mask says of the others.
    """

    ranges: tuple[tuple[int, int], ...]
    rows: int
    keys: int
    checked: bool = False
    whole: tuple[tuple[int, int], ...] = ()

    def at(self, rows: int, keys: int) -> Reach:
        """Itself, for the sizes that it is for."""
        assert (rows, keys) == (self.rows, self.keys), "a mask of other sizes"
        return self

    def of(self, rows: slice) -> slice:
        """The keys of some queries; at least one, so that sums are of something."""
        some = [r for r in self.ranges[rows.start // BLOCK : -(-rows.stop // BLOCK)] if r[0] < r[1]]
        return slice(min(a for a, _ in some), max(b for _, b in some)) if some else slice(0, 1)

    def masked(self, mask: torch.Tensor) -> torch.Tensor:
        """`mask`, [..., queries or 1, keys or 1], and minus infinity where nothing is attended to."""
        seen = torch.zeros((self.rows, self.keys), dtype=torch.bool, device="cpu")
        for n, (low, high) in enumerate(self.ranges):
            seen[n * BLOCK : (n + 1) * BLOCK, low:high] = True
        return torch.where(seen, mask, -torch.inf)

    def is_enough(self, mask: torch.Tensor) -> bool:
        """Whether each query has a key of those whose part of the mask this is, [..., queries, keys], for certain."""
        return not self.checked or bool((mask.amax(-1) > LEAST).all())

    @functools.cached_property
    def share(self) -> float:
        """The part of all scores that is in the ranges."""
        seen = 0
        for n, (low, high) in enumerate(self.ranges):
            seen += (min((n + 1) * BLOCK, self.rows) - n * BLOCK) * (high - low)
        return seen / max(self.rows * self.keys, 1)


__all__ = ["BLOCK", "HUGE", "RANGES", "Reach", "Reaching"]
