"""TorchScript's arithmetic on numbers where Python's differs: floats may be divided by zero, a bad domain gives nan."""

from __future__ import annotations

import math


def divide(a: float, b: float) -> float:
    """a / b, which is infinite or nan where b is zero."""
    if b == 0:
        return math.nan if a == 0 or a != a else math.inf if a > 0 else -math.inf
    return a / b


def power(a: float, b: float) -> float:
    """a ** b, a float for integers too."""
    if a < 0 and b != math.floor(b):
        return math.nan
    raised: float = float(a) ** b
    return raised


def square_root(a: float) -> float:
    """The root of a, nan for negative numbers."""
    return math.nan if a < 0 else math.sqrt(a)
