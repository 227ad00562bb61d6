"""The rows of the table of reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fuser.ops.pointwise import _TRITON_MAX, _TRITON_MIN, NUMBERS, by
from fuser.ops.table import FLOATS, ReductionRow

Dims = tuple[int, ...]


def same(dtype: torch.dtype) -> torch.dtype:
    """The accumulator's dtype where it is the values' own."""
    return dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Integers and bools are summed in int64, as in eager."""
    return dtype if dtype.is_floating_point else torch.int64


def _to_bool(_: torch.dtype) -> torch.dtype:
    return torch.bool


def smallest(dtype: torch.dtype) -> int | float | bool:
    """The smallest value of a dtype."""
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def largest(dtype: torch.dtype) -> int | float | bool:
    """The largest value of a dtype."""
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _dim_by_dim(op: Callable[..., Any]) -> Callable[[torch.Tensor, Dims, bool], torch.Tensor]:
    """`op(x, dim, keepdim)` applied to several dims, the last first."""

    def run(x: torch.Tensor, dims: Dims, keepdim: bool) -> torch.Tensor:
        for d in sorted(dims, reverse=True):
            x = op(x, d, keepdim)
        return x

    return run


def _index(op: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, Dims, bool], torch.Tensor]:
    def run(x: torch.Tensor, dims: Dims, keepdim: bool) -> torch.Tensor:
        if len(dims) == 1:
            return op(x, dims[0], keepdim)
        if len(dims) != x.dim():
            raise ValueError(f"{op.__name__} reduces one dimension or all of {x.dim()}, not {len(dims)}")
        out = op(x)
        return out.reshape([1] * x.dim()) if keepdim else out

    return run


def _replaces(sign: str) -> Callable[[torch.dtype], str | None]:
    """Whether the value is better, or equal at a lower index. NaN is better than any number and equal to NaN."""
    floats = (
        f"({{2}} {sign} {{0}}) | (({{2}} != {{2}}) & ({{0}} == {{0}}))"
        " | ((({2} == {0}) | (({2} != {2}) & ({0} != {0}))) & ({3} < {1}))"
    )
    whole = f"({{2}} {sign} {{0}}) | (({{2}} == {{0}}) & ({{3}} < {{1}}))"
    return by(floats, whole, whole)


def _overtakes(worse: str, sign: str) -> Callable[[torch.dtype], str | None]:
    """Whether the value is better, or NaN where there was none: neither worse nor equal."""
    return by(f"!({{1}} {worse} {{0}}) & ({{0}} == {{0}})", f"{{1}} {sign} {{0}}", f"{{1}} {sign} {{0}}")


ADD = by("{0} + {1}", "({T})(({U}){0} + ({U}){1})")
MUL = by("{0} * {1}", "({T})(({U}){0} * ({U}){1})")
# The first of equal values stays, also of zeros of both signs, as in eager.
_MAX = by("({0} >= {1}) | ({0} != {0}) ? {0} : {1}", "{0} > {1} ? {0} : {1}", "{0} | {1}")
_MIN = by("({0} <= {1}) | ({0} != {0}) ? {0} : {1}", "{0} < {1} ? {0} : {1}", "{0} & {1}")

_BETTER_MAX, _BETTER_MIN = (f"fuser_better_{n}({{0}}, {{1}}, {{2}}, {{3}})" for n in ("argmax", "argmin"))

ROWS = (
    ReductionRow(
        "sum", lambda x, d, k: x.sum(d, k), lambda _: 0, ADD, _wide, "({0} + {1})", adds=True, pointwise="add",
        wraps="+", folder="fuser_combine_sum", atomic="tl.atomic_add",
    ),
    ReductionRow(
        "dot", lambda x, d, k: x.sum(d, k), lambda _: 0, ADD, same, "({0} + {1})", dtypes=FLOATS, adds=True,
        wraps="+", folder="fuser_combine_sum", contracts=True,
    ),
    ReductionRow(
        "prod", _dim_by_dim(torch.prod), lambda _: 1, MUL, _wide, "({0} * {1})", pointwise="mul", wraps="*",
        folder="fuser_combine_prod",
    ),
    ReductionRow(
        "max", lambda x, d, k: torch.amax(x, d, k), smallest, _MAX, same, by(*_TRITON_MAX), idempotent=True,
        extreme=">", pointwise="maximum", folder="fuser_combine_max", atomic="tl.atomic_max",
    ),
    ReductionRow(
        "min", lambda x, d, k: torch.amin(x, d, k), largest, _MIN, same, by(*_TRITON_MIN), idempotent=True,
        extreme="<", pointwise="minimum", folder="fuser_combine_min", atomic="tl.atomic_min",
    ),
    ReductionRow(
        "any", lambda x, d, k: torch.any(x.bool(), d, k), lambda _: False, "{0} | {1}", _to_bool, "({0} | {1})",
        idempotent=True,
    ),
    ReductionRow(
        "all", lambda x, d, k: torch.all(x.bool(), d, k), lambda _: True, "{0} & {1}", _to_bool, "({0} & {1})",
        idempotent=True,
    ),
    ReductionRow(
        "argmax", _index(torch.argmax), smallest, _replaces(">"), same, _BETTER_MAX, NUMBERS, torch.int64, index=True,
        overtakes=_overtakes("<=", ">"), idempotent=True, extreme=">", value="max", folder="fuser_combine_argmax",
    ),
    ReductionRow(
        "argmin", _index(torch.argmin), largest, _replaces("<"), same, _BETTER_MIN, NUMBERS, torch.int64, index=True,
        overtakes=_overtakes(">=", "<"), idempotent=True, extreme="<", value="min", folder="fuser_combine_argmin",
    ),
)  # fmt: skip
