"""The table of loop-level operations: a row per scalar or reduction op, used by all layers above `ops`.

A row says how torch evaluates an op (the IR interpreter), how it is spelled in C++ and in Triton, what it costs, and
with which samples it is tested. Adding an op changes only this folder.

Dtypes of a row's arguments are *compute* dtypes: float16 and bfloat16 are computed in float32 and converted by loads,
stores and `to_dtype`, so cells never see them. All tensor arguments of a row have one dtype unless `signature` says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuser.lazy_dataclasses import dataclass

FLOATS = (torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
INTS = (*SIGNED, torch.uint8)
BOOL = (torch.bool,)
ALL = (*FLOATS, *INTS, *BOOL)

# A cell: a template, a function from the argument's dtype to a template, or None (Unsupported). In a C++ template {0}
# {1} … are the arguments, {T} the C++ type of the *argument*, {U} the unsigned type in which its integer arithmetic
# wraps, {I} the integer as wide as a float, {D} the helpers' suffix for its dtype (f32, i64, …), {f} the suffix of the
# C maths functions ("f" or "").
Cell = str | Callable[[torch.dtype], str | None] | None
SAME = "="  # in `lanes`: the scalar cell also works for vectors
JOINING, TURNING = ("&", "|", "^"), ("!", "~")
LOGIC = (*JOINING, *TURNING)


@dataclass(frozen=True)
class Near:
    """A faster C++ helper for an op's float32 results, for arguments from `low` to `high`, or NaN.

    helper: its name after `fuser_`, or after `fuser_lanes_` for vectors. gives: the interval of these results.
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
    cpp: its C++ expression for scalars; must vectorise inside a simd loop, wherever the machine can.
    text: the module of `fuser.ops` with the C++ helpers that the cell calls, if few kernels need it: it is loaded with
      the cell. All other helpers are found by name (see `ops/prelude.py`).
    cost: approximate number of simple operations; 1 for an add, 20 for an exp.
    domain: the interval from which tests draw arguments, besides special values.
    ulps: largest error of its float results in units in the last place; 0 means the same bits as eager.
    jumps: whether a float result is discontinuous, so that an argument's last bit decides between distant results.

    Traits, which generators and the scheduler ask for; no op is known to them by its name:
    sign: the arithmetic ("+" "-" "*" "/"), comparison ("<" …) or logic ("&" "|" "^" "!" "~") that the op is.
    selects: the arguments of which the result is one: unchanged, negated, or replaced by zero.
    negates: whether the result is the argument with the other sign.
    wins: for extremes, the comparison that the first argument must win.
    plain_nan: whether a NaN among the results is an argument's, made quiet, or the machine's own.
    keeps_zero: whether the result is zero if all arguments are.
    steep: whether a small error of a float argument can make a large error of the result.
    exponential: whether it is exp, if only for some arguments.
    draw: for random numbers, which of a pair's two words is used (2: each index has its own), and the index of it.
    keeps_integers: whether an integer argument is the result itself.
    inexact: dtypes in which eager's own results are inaccurate, so that kernels leave them to ATen.
    lanes: C++ on explicit vectors, by the arguments' dtype (for `where`, the values'): float32, or bool for flags;
      `SAME`, or None if there is none.
    within: the interval of all float results except NaN; an interval from 0.0 excludes -0.0.
    near: a helper for float32 arguments that are known to be in an interval.
    inline: whether it is a function whose cells are straight-line code except for rare arguments, in vectors too.
    fast: Triton for float32 by the hardware's approximations, if all results are rounded to a 16-bit float.
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
    ulps: float = 0.0
    jumps: bool = False
    sign: str = ""
    selects: tuple[int, ...] = ()
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
        """Whether floats are compared or converted to integers: their last bits decide the result."""
        return self.jumps or self.result != "same"

    @property
    def chooses(self) -> bool:
        """Whether the first argument is a condition that selects one of the others."""
        return self.signature.startswith("b") and bool(self.selects)

    @property
    def typed(self) -> int:
        """The number of an argument of the row's dtype."""
        return max(self.signature.find("t"), 0)

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The result's dtype if the row's arguments have compute dtype `dtype`."""
        if isinstance(self.result, torch.dtype):
            return self.result
        return torch.bool if self.result == "bool" else dtype


@dataclass(frozen=True)
class ReductionRow:
    """One reduction: fold values into an accumulator that starts at `identity(accumulator dtype)`.

    accumulate: from the input's compute dtype to the accumulator's.
    result: "acc" (the accumulator's dtype) or a dtype; the caller casts further if the graph requires it.
    combine: for plain rows, the new accumulator from ({0} accumulator, {1} value), both of the accumulator's dtype.
      It is associative up to rounding and commutative, so it also combines two accumulators.
      For `index` rows, a bool from ({0} accumulator, {1} its index, {2} value, {3} its index): whether value and index
      replace the accumulator's. Their accumulator starts at (identity, `NO_INDEX`); the result is the index.
    overtakes: for `index` rows, a bool from ({0} accumulator, {1} value): whether a later value replaces it.
    eval: (tensor of compute dtype, sorted dims, keepdim) -> tensor; index rows take one dim, or all.
    idempotent: whether folding a value in twice has the same result as once.
    adds: whether it is a sum: float32 partial sums may go to float64 totals, and an empty one is 0.0, not -0.0.
    extreme: the comparison that a value must win to replace the accumulator, ">" or "<"; "" for other reductions.
    value: for `index` rows, the reduction whose result is the value at the index.
    pointwise: the op that folds two values, with the new value first for extremes; "" if there is none.
    wraps: the C++ operator that folds whole vectors of unsigned integers; "" if `combine` supports vectors.
    folder: the Triton function that combines two accumulators; "" if there is none.
    atomic: the Triton function that combines a value with memory; "" if there is none.
    contracts: whether its values are products of two operands, which generators may separate: a contraction.
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
    """One scan: the result at each index folds the values up to it, in order, from `identity(accumulator dtype)`.

    accumulate: from the values' compute dtype to the accumulator's, as in eager.
    combine: the new accumulator from ({0} accumulator, {1} value), both of the accumulator's dtype. For `index` rows, a
      bool: whether the value's index is the new result.
    eval: (tensor of compute dtype, dim) -> tensor.
    adds: whether it is a sum: chunks of a row may be summed separately.
    extreme: the comparison that a value must win, or draw, to be the new result; "" for other scans.
    value: for `index` rows, the scan whose results are the values at the indices; place: the `index` row of that scan.
    helper: the name part of the helpers for blocks (see `scans_cpp`); "" if there are none.
    folder: the Triton function that combines two values.
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
