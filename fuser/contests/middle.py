"""The median without `statistics`, which imports decimals and fractions: a twelfth of the time of `import fuser`."""

from __future__ import annotations

from collections.abc import Iterable


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two middle ones; ValueError if there are no values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("the median of no values: expected one or more")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
