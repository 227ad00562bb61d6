"""The time of a fusion beside ATen's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.contests.trial import seconds_a_call
from fuser.debug.reporting import why_unfused
from fuser.debug.traffic import spread
from fuser.errors import Unsupported
from fuser.executor import may_repeat
from fuser.kernel_cache import REGISTRY
from fuser.lazy_dataclasses import dataclass

_ROUNDS, _ROUND_SECONDS, _NOISE = 15, 2e-3, 0.15


@dataclass(frozen=True)
class Timing:
    """Median seconds of a call, and the bytes of its inputs and results, each counted once.

    `spread` and `aten_spread` are the interquartile ranges, in seconds: half of the calls are within such a range.
    """

    seconds: float
    aten_seconds: float
    bytes: int
    spread: float = 0.0
    aten_spread: float = 0.0

    @property
    def noisy(self) -> bool:
        """Whether either time varies by more than 15 % of its median, so that small differences mean nothing."""
        return self.spread > _NOISE * self.seconds or self.aten_spread > _NOISE * self.aten_seconds

    def __str__(self) -> str:
        rate = self.bytes / self.seconds / 1e9
        said = (
            f"{self.seconds * 1e6:,.2f} ± {self.spread * 5e5:,.2f} µs a call, "
            f"{self.aten_seconds / self.seconds:,.2f} times as fast as ATen "
            f"({self.aten_seconds * 1e6:,.2f} ± {self.aten_spread * 5e5:,.2f} µs); "
            f"{self.bytes} bytes in and out, {rate:,.2f} GB/s"
        )
        return f"{said}; the machine is noisy: small differences say nothing" if self.noisy else said


def measure(key: int, inputs: Sequence[Any]) -> Timing:
    """Time a fusion's kernel and ATen in turns, for a tenth of a second or more.

    Args:
        key: what `register_fusion` returned.
        inputs: one value for each placeholder of the graph.

    Returns:
        A `Timing`: medians and spread of seconds a call, and the bytes of inputs and results.

    Raises:
        InputError: wrong inputs.
        Unsupported: no kernel takes them, or calls may not be repeated, since they write into inputs or draw random
            numbers.
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
    (mine, mine_spread), (theirs, theirs_spread) = (spread(list(column)) for column in zip(*pairs))
    return Timing(mine, theirs, count, mine_spread, theirs_spread)


__all__ = ["Timing", "measure"]
