"""Rows of the op table in high precision, for float64 results: name -> function of mpmath numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import torch

BITS = 160


def _fmod(a: Any, b: Any) -> Any:
    return mp.mpf(math.fmod(float(a), float(b)))


def _remainder(a: Any, b: Any) -> Any:
    r = _fmod(a, b)
    return r + b if r != 0 and (r < 0) != (b < 0) else r


def _zeta(s: Any, q: Any) -> Any:
    if not (1 < s < 60 and 0 < q < 1e4):
        raise ValueError("slow to compute")
    return mp.zeta(s, q)


def _besselk(order: int, x: Any, scaled: bool) -> Any:
    if not 1e-6 < x < 700:
        raise ValueError("slow to compute")
    with mp.workprec(90):
        return mp.besselk(order, x) * (mp.exp(x) if scaled else 1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1 / mp.sqrt(x),
    "exp_down": lambda x: mp.exp(x),
    "exp2": lambda x: mp.mpf(2) ** x,
    "log2": lambda x: mp.log(x) / mp.log(2),
    "sigmoid": lambda x: 1 / (1 + mp.exp(-x)),
    "normal_cdf": lambda x: mp.ncdf(x),
    "fma": lambda x, y, z: x * y + z,
    "fmod": _fmod,
    "remainder": _remainder,
    "pow": lambda x, y: mp.power(x, y),
    "hypot": lambda x, y: mp.sqrt(x * x + y * y),
    "logaddexp": lambda x, y: mp.log(mp.exp(x) + mp.exp(y)),
    "logaddexp2": lambda x, y: mp.log(mp.mpf(2) ** x + mp.mpf(2) ** y) / mp.log(2),
    "xlogy": lambda x, y: x * mp.log(y) if x else mp.mpf(0),
    "xlog1py": lambda x, y: x * mp.log1p(y) if x else mp.mpf(0),
    "ldexp": lambda x, y: x * mp.mpf(2) ** y if y < 1024 else mp.inf,  # eager multiplies by 2^y, which overflows
    "atan2": lambda y, x: mp.atan2(y, x) if x or y else mp.nan,  # mpmath has no signed zeros
    "lgamma": lambda x: mp.log(abs(mp.gamma(x))),
    "digamma": lambda x: mp.digamma(x),
    "half_erfc": lambda x: mp.erfc(x) / 2,
    "trigamma_right": lambda x: mp.psi(1, x) if x >= 0.5 else mp.nan,
    "erfinv": lambda x: mp.erfinv(x),
    "i0": lambda x: mp.besseli(0, x),
    "i0e": lambda x: mp.besseli(0, x) * mp.exp(-abs(x)),
    "i1": lambda x: mp.besseli(1, x),
    "i1e": lambda x: mp.besseli(1, x) * mp.exp(-abs(x)),
    "zeta": _zeta,
    "j0": lambda x: mp.besselj(0, x),
    "j1": lambda x: mp.besselj(1, x),
    "y0": lambda x: mp.bessely(0, x),
    "y1": lambda x: mp.bessely(1, x),
    "spherical_bessel_j0": lambda x: mp.sin(x) / x if x else mp.mpf(1),
    "k0": lambda x: _besselk(0, x, False),
    "k1": lambda x: _besselk(1, x, False),
    "k0e": lambda x: _besselk(0, x, True),
    "k1e": lambda x: _besselk(1, x, True),
    "erfcx": lambda x: mp.erfc(x) * mp.exp(x * x),
    "log_ndtr": lambda x: mp.log(mp.erfc(-x / mp.sqrt(2)) / 2),
    "ndtri": lambda p: mp.sqrt(2) * mp.erfinv(2 * p - 1),
    "entr": lambda x: -x * mp.log(x) if x else mp.mpf(0),
    **{
        name: getattr(mp, name)
        for name in (
            "sqrt exp expm1 log log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc"
        ).split()
    },
}


# Where eager's float64 is no truth for float32: Bessel functions in [5, 8].
SLOW = ("k0", "k1", "k0e", "k1e")
PRECISE = ("j0", "j1", "y0", "y1")

# Sums whose terms may cancel, functions with zeros: their ulps are those of the largest argument, which is as well
# as a rounded sum can do.
CANCELLING = ("logaddexp", "logaddexp2", "lgamma", "digamma")
# Values that are added to 1 or taken from it: their ulps are those of 1.
ABSOLUTE = ("normal_cdf",)


def _truth(function: Callable[..., Any], xs: tuple[float, ...]) -> Any:
    """The value for finite arguments, or None where there is no finite real one."""
    if not all(map(math.isfinite, xs)):
        return None
    try:
        true = function(*map(mp.mpf, xs))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    if isinstance(true, mp.mpc) or not mp.isfinite(true) or abs(true) >= mp.mpf(2) ** 1024:
        return None
    return true if abs(true) > mp.mpf(2) ** -1100 else mp.mpf(0)


def errors(name: str, args: tuple[torch.Tensor, ...], *values: torch.Tensor) -> list[torch.Tensor]:
    """How many ulps of its dtype each of each tensor is off; NaN where the truth, computed once for all of them, is not
    a finite number."""
    out: list[list[float]] = [[] for _ in values]
    digits, least = (52, -1022) if values[0].dtype is torch.float64 else (23, -126)
    with mp.workprec(BITS):
        for xs, vs in zip(zip(*(a.tolist() for a in args)), zip(*(v.tolist() for v in values)), strict=True):
            true = _truth(FUNCTIONS[name], xs)
            if true is None:
                for found in out:
                    found.append(math.nan)
                continue
            scale = max(map(abs, (true, *xs))) if name in CANCELLING else mp.mpf(1) if name in ABSOLUTE else abs(true)
            exponent = max(mp.frexp(scale)[1] - 1, least) if scale else least
            ulp = mp.mpf(2) ** (exponent - digits)
            for found, v in zip(out, vs, strict=True):
                found.append(float(abs(v - true) / ulp) if math.isfinite(v) else math.inf)
    return [torch.tensor(found, dtype=torch.float64) for found in out]
