"""TorchScript's arithmetic on numbers where it differs from Python's: division by zero, and nan outside a domain."""

from __future__ import annotations

import math


def divide(a: float, b: float) -> float:
    """a / b, which is infinite or nan if b is zero."""
    if b == 0:
        return math.nan if a == 0 or a != a else math.inf if a > 0 else -math.inf
    return a / b


def power(a: float, b: float) -> float:
    """a ** b as a float, for integers too; nan for a root of a negative number."""
    if a < 0 and b != math.floor(b):
        return math.nan
    raised: float = float(a) ** b
    return raised


def square_root(a: float) -> float:
    """The square root of a; nan for negative numbers."""
    return math.nan if a < 0 else math.sqrt(a)
