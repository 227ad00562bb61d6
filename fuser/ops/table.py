"""The one table of loop-level operations: a row per scalar or reduction op, read by everything below `ops`.

A row says how an op is evaluated by torch (the IR interpreter), how it is spelled in C++ and in Triton, what it costs,
and with which samples it is tested. Adding an op touches this folder alone.

Dtypes of a row's arguments are *compute* dtypes: float16 and bfloat16 are computed in float32 and converted by loads,
stores and `to_dtype`, so cells never see them. All tensor arguments of a row have one dtype unless `signature` says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch

from fuser.lazy_dataclasses import dataclass

FLOATS = (torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
INTS = (*SIGNED, torch.uint8)
BOOL = (torch.bool,)
ALL = (*FLOATS, *INTS, *BOOL)

# A cell: a template, a function from the argument's dtype to a template, or None: Unsupported. In a C++ template
# {0} {1} … are the arguments, {T} the C++ type of the *argument*, {U} the unsigned type in which its integer arithmetic
# wraps, {I} the integer as wide as a float, {D} the helpers' suffix for its dtype (f32, i64, …), {f} the suffix of the
# C maths functions ("f" or "").
Cell = str | Callable[[torch.dtype], str | None] | None
SAME = "="  # in `lanes`: the cell for scalars reads the same with vectors
JOINING, TURNING = ("&", "|", "^"), ("!", "~")
LOGIC = (*JOINING, *TURNING)


@dataclass(frozen=True)
class Near:
    """A C++ helper that gives an op's float32 results for arguments from `low` to `high`, or NaN, in less time.

    helper: its name behind `fuser_`, or `fuser_lanes_` for vectors. gives: the interval of these results.
    """

    low: float
    high: float
    helper: str
    gives: tuple[float, float]


@dataclass(frozen=True)
class OpRow:
    """One loop-level op.

    result: "same" (the arguments' dtype), "bool", or a dtype.
    signature: per argument "t" (the row's dtype) or "b" (bool), for `where`; empty means all "t".
    eval: the op on torch tensors of compute dtype.
    cpp: its C++ expression for scalars; must vectorise when used inside a simd loop, wherever the machine can.
    text: the module of `fuser.ops` with the C++ helpers that the cell calls, where few kernels need it: it is loaded
      when the cell is. All other helpers are found by name (see `ops/prelude.py`).
    cost: about how many simple operations it is worth; 1 for an add, 20 for an exp.
    domain: the interval from which tests draw arguments, beside special values.
    ulps: most units in the last place that its float results may be off; 0 means the same bits as eager.
    extra: facts that lowerings ask for, such as {"int_zero_div": True} (see `notes`).
    jumps: whether a float result jumps, so that an argument's last bit decides between results that are far apart.

    Traits, which generators and the scheduler ask for; no op is known to them by its name:
    sign: the arithmetic ("+" "-" "*" "/"), comparison ("<" …) or logic ("&" "|" "^" "!" "~") that the op is.
    selects: the arguments of which the result is one, as it is, negated, or replaced by zero.
    copies: whether the result is the only argument itself. negates: whether it is that with the other sign.
    wins: of extremes, the comparison that the first argument must win.
    plain_nan: whether a NaN among the results is an argument's, made quiet, or the machine's own.
    keeps_zero: whether the result is zero where all arguments are.
    steep: whether a small error of a float argument can make a large one of the result.
    exponential: whether it is exp, if only on part of the numbers.
    draw: of random numbers, which of a pair's two words is taken (2: each place has its own), and the place of that.
    keeps_integers: whether an integer is its own result.
    inexact: dtypes in which eager's own results are off, so that kernels leave them to ATen.
    lanes: C++ on explicit vectors, by the arguments' dtype (of `where`, the values'): float32, or bool for flags;
      `SAME`, or None where there is none.
    within: the interval of all float results, NaN apart; one from 0.0 has no -0.0.
    near: a helper for float32 arguments that are known to lie in an interval.
    inline: whether it is a function whose cells are straight-line code but for rare arguments, in vectors too.
    fast: Triton for float32 by the hardware's approximations, where all results are rounded to a half.
    """

    name: str
    arity: int
    eval: Callable[..., torch.Tensor]
    cpp: Cell
    triton: Cell = None
    dtypes: tuple[torch.dtype, ...] = ALL
    result: str | torch.dtype = "same"
    signature: str = ""
    text: str = ""
    cost: int = 1
    domain: tuple[float, float] = (-4.0, 4.0)
    notes: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    ulps: float = 0.0
    jumps: bool = False
    sign: str = ""
    selects: tuple[int, ...] = ()
    copies: bool = False
    negates: bool = False
    wins: str = ""
    plain_nan: bool = False
    keeps_zero: bool = False
    steep: bool = False
    exponential: bool = False
    draw: tuple[int, str] | None = None
    keeps_integers: bool = False
    inexact: tuple[torch.dtype, ...] = ()
    lanes: Callable[[torch.dtype], str | None] | None = None
    within: tuple[float, float] | None = None
    near: Near | None = None
    inline: bool = False
    fast: str = ""

    @property
    def decides(self) -> bool:
        """Whether floats are compared or made whole: their last bits decide the result."""
        return self.jumps or self.result != "same"

    @property
    def chooses(self) -> bool:
        """Whether the first argument is a condition, which chooses one of the others."""
        return self.signature.startswith("b") and bool(self.selects)

    @property
    def typed(self) -> int:
        """The number of an argument of the row's dtype."""
        return max(self.signature.find("t"), 0)

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The result's dtype when the row's arguments have compute dtype `dtype`."""
        if isinstance(self.result, torch.dtype):
            return self.result
        return torch.bool if self.result == "bool" else dtype


@dataclass(frozen=True)
class ReductionRow:
    """One reduction: fold values into an accumulator that starts at `identity(accumulator dtype)`.

    accumulate: from the input's compute dtype to the accumulator's.
    result: "acc" (the accumulator's dtype) or a dtype; the caller casts further if the graph asks for it.
    combine: for plain rows, the new accumulator from ({0} accumulator, {1} value), both of the accumulator's dtype.
      It is associative up to rounding and commutative, so it also joins two accumulators.
      For `index` rows, a bool from ({0} accumulator, {1} its index, {2} value, {3} its index): whether value and index
      replace the accumulator's. Their accumulator starts at (identity, `NO_INDEX`); the result is the index.
    overtakes: of `index` rows, a bool from ({0} accumulator, {1} value): whether a value at a higher index replaces it.
    eval: (tensor of compute dtype, sorted dims, keepdim) -> tensor; index rows take one dim, or all.
    idempotent: whether folding a value in twice gives what folding it in once does.
    adds: whether it is a sum: float32 partial sums may go to float64 totals, and an empty one is 0.0, not -0.0.
    extreme: the comparison that a value must win to replace the accumulator, ">" or "<"; "" if none decides.
    value: of `index` rows, the reduction whose result is the value at the index.
    pointwise: the op that folds two values, with the new value first for extremes; "" if there is none.
    wraps: the C++ operator that folds whole vectors of unsigned integers; "" where `combine` takes vectors.
    folder: the Triton function that joins two accumulators; "" if there is none.
    atomic: the Triton function that combines a value with what is in memory; "" if there is none.
    contracts: whether its values are products of two operands, which generators may take apart: a contraction.
    """

    name: str
    eval: Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]
    identity: Callable[[torch.dtype], int | float | bool]
    combine: Cell
    accumulate: Callable[[torch.dtype], torch.dtype]
    triton: Cell = None
    dtypes: tuple[torch.dtype, ...] = ALL
    result: str | torch.dtype = "acc"
    index: bool = False
    cost: int = 1
    notes: str = ""
    overtakes: Cell = None
    idempotent: bool = False
    adds: bool = False
    extreme: str = ""
    value: str = ""
    pointwise: str = ""
    wraps: str = ""
    folder: str = ""
    atomic: str = ""
    contracts: bool = False

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The result's dtype for an input of compute dtype `dtype`."""
        return self.result if isinstance(self.result, torch.dtype) else self.accumulate(dtype)


@dataclass(frozen=True)
class ScanRow:
    """One scan: each place holds what the values up to it, in order, make of `identity(accumulator dtype)`.

    accumulate: from the values' compute dtype to the accumulator's, as eager has it.
    combine: the new accumulator from ({0} accumulator, {1} value), both of the accumulator's dtype. For `index` rows, a
      bool: whether the value's place is the new result.
    eval: (tensor of compute dtype, dim) -> tensor.
    adds: whether it is a sum: chunks of a row may be added up apart.
    extreme: the comparison that a value must win, or draw, to be the new result; "" if none decides.
    value: of `index` rows, the scan whose results are the values at the places; place: of that one, the `index` row.
    helper: what helpers of blocks are called after (see `scans_cpp`); "" if there are none.
    folder: the Triton function that joins two values.
    """

    name: str
    eval: Callable[[torch.Tensor, int], torch.Tensor]
    identity: Callable[[torch.dtype], int | float | bool]
    combine: Cell
    accumulate: Callable[[torch.dtype], torch.dtype]
    dtypes: tuple[torch.dtype, ...] = ALL
    index: bool = False
    adds: bool = False
    extreme: str = ""
    value: str = ""
    place: str = ""
    helper: str = ""
    folder: str = ""


NO_INDEX = 2**63 - 1
