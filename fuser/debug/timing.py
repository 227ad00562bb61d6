"""How fast a fusion runs, beside ATen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser.contests.trial import seconds_a_call
from fuser.debug.reporting import why_unfused
from fuser.errors import Unsupported
from fuser.executor import may_repeat
from fuser.kernel_cache import REGISTRY

_ROUNDS, _ROUND_SECONDS = 15, 2e-3


@dataclass(frozen=True)
class Timing:
    """Medians of seconds for a call, and the bytes of its inputs and results, each counted once."""

    seconds: float
    aten_seconds: float
    bytes: int

    def __str__(self) -> str:
        rate = self.bytes / self.seconds / 1e9
        return (
            f"{self.seconds * 1e6:,.2f} µs a call, {self.aten_seconds / self.seconds:,.2f} times as fast as ATen "
            f"({self.aten_seconds * 1e6:,.2f} µs); {self.bytes} bytes in and out, {rate:,.2f} GB/s"
        )


def measure(key: int, inputs: Sequence[Any]) -> Timing:
    """Time the fusion `key` on `inputs`, by its kernel and by ATen in turns, for a tenth of a second or more.

    InputError for wrong inputs. Unsupported if no kernel takes them, or if calls may not be repeated, because they
    write into inputs or draw random numbers.
    """
    registration = REGISTRY.find(key)
    spec = registration.spec
    args = registration.arguments(inputs)
    if not may_repeat(spec):
        raise Unsupported("the fusion writes into its inputs or draws random numbers, and is not run repeatedly")
    handle: Any = registration.runner.handle
    handle(*args)  # compiles
    before = handle.hits
    result = handle(*args)
    if handle.hits == before:
        raise Unsupported(why_unfused(spec) or next(reversed(spec.store.fallbacks), "no kernel takes these inputs"))
    results = result if isinstance(result, tuple) else (result,)
    count = sum(t.numel() * t.element_size() for t in (*args, *results) if isinstance(t, torch.Tensor))
    pairs = [
        (seconds_a_call(handle, args, _ROUND_SECONDS), seconds_a_call(spec.fallback, args, _ROUND_SECONDS))
        for _ in range(_ROUNDS)
    ]
    mine, theirs = (statistics.median(column) for column in zip(*pairs))
    return Timing(mine, theirs, count)


__all__ = ["Timing", "measure"]
