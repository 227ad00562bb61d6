"""Quotients by constants as a product and its remainder, which round as the division does.

With h + l = 1 / c to 47 bits, x * h + x * l in one rounding is x / c rounded, unless x / c is within a relative
distance of 2^-46 of the midpoint of two floats (Brisebarre, Muller, Raina: Accelerating correctly rounded
floating-point division when the divisor is known in advance, IEEE TC 2004). For a constant there are few such x, and
each is tried here. h is 1 / c rounded towards 0: then both products have one sign, so infinities and zeros are right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

BITS = 24  # of a float32's significand
NEAREST = 16  # units of 2^-48 of the quotient from a midpoint, within which x is tried
LEAST, MOST = 2.0**-100, 2.0**100  # of constants


def _rounded(value: Fraction, how: Callable[[Fraction], int] = round) -> Fraction:
    """A normal number rounded to a float32's bits, by default to nearest even."""
    two = type(value)(2)
    exponent = math.frexp(float(abs(value)))[1] - BITS
    if abs(value) < two ** (exponent + BITS - 1):
        exponent -= 1
    unit = two**exponent
    return how(value / unit) * unit


@functools.lru_cache(maxsize=256)
def factors(divisor: float) -> tuple[float, float] | None:
    """The factors (h, l) for a divisor, rounded to float32; None if a division is better or would differ."""
    if not LEAST <= abs(divisor) <= MOST:
        return None
    from fractions import Fraction  # it imports decimal, 5 ms, and few kernels divide by constants

    c = _rounded(Fraction(divisor))
    h = _rounded(1 / c, math.trunc)
    if not 1 / c - h:  # a power of two
        return None
    low = _rounded(1 / c - h)
    same = all(_rounded(x / c) == _rounded(x * h + _rounded(x * low)) for x in map(Fraction, _tried(c)))
    return (float(h), float(low)) if same else None


def _tried(c: Fraction) -> list[int]:
    """The significands x whose quotients by `c` are close to the midpoint of two floats: 2^s x - (2m + 1) c = d."""
    own = int(math.frexp(abs(float(c)))[0] * 2**BITS)
    even = own & -own
    odd, found = own // even, set[int]()
    first, end = 2 ** (BITS - 1), 2**BITS
    for shift in (BITS, BITS + 1):
        for d in range(-NEAREST, NEAREST + 1):
            if d and d % even == 0:
                x = d // even * pow(2**shift // even, -1, odd) % odd
                found.update(range(x + -(-(first - x) // odd) * odd, end, odd))
    return sorted(found)


__all__ = ["factors"]
