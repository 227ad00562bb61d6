"""Rows of scans: sums, products and extremes of all values up to an index."""

from __future__ import annotations

import math

import torch

from fuser.ops.pointwise import by
from fuser.ops.reductions import ADD, MUL, largest, same, smallest
from fuser.ops.table import FLOATS, ScanRow


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Eager's accumulator dtypes on the CPU."""
    return torch.float64 if dtype.is_floating_point else torch.int64


def _better(sign: str) -> str:
    """The condition for a later value to replace the result, also an equal one; NaN is only replaced by NaN."""
    return f"({{1}} != {{1}}) | ({{1}} {sign} {{0}})"


_MORE, _LESS = _better(">="), _better("<=")
_MAX = by(f"{_MORE} ? {{1}} : {{0}}", "{1} > {0} ? {1} : {0}", "{0} | {1}")
_MIN = by(f"{_LESS} ? {{1}} : {{0}}", "{1} < {0} ? {1} : {0}", "{0} & {1}")

ROWS = (
    ScanRow("sum", torch.cumsum, lambda _: 0, ADD, _wide, adds=True, helper="sum", folder="fuser_combine_sum"),
    ScanRow("prod", torch.cumprod, lambda _: 1, MUL, _wide, helper="prod", folder="fuser_combine_prod"),
    ScanRow(
        "logaddexp", torch.logcumsumexp, lambda _: -math.inf, "fuser_logaddexp_in_order_{D}({0}, {1})", _wide, FLOATS,
        folder="fuser_combine_logaddexp",
    ),
    ScanRow(
        "max", lambda x, d: x.cummax(d)[0], smallest, _MAX, same, extreme=">", place="argmax", helper="max",
        folder="fuser_combine_max",
    ),
    ScanRow(
        "min", lambda x, d: x.cummin(d)[0], largest, _MIN, same, extreme="<", place="argmin", helper="min",
        folder="fuser_combine_min",
    ),
    ScanRow(
        "argmax", lambda x, d: x.cummax(d)[1], smallest, by(_MORE, "{1} >= {0}", "{1} >= {0}"), same, index=True,
        extreme=">", value="max", helper="max", folder="fuser_combine_max",
    ),
    ScanRow(
        "argmin", lambda x, d: x.cummin(d)[1], largest, by(_LESS, "{1} <= {0}", "{1} <= {0}"), same, index=True,
        extreme="<", value="min", helper="min", folder="fuser_combine_min",
    ),
)  # fmt: skip
