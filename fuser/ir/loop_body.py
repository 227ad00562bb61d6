"""Loop bodies: straight-line rows recorded by running an `inner_fn` once.

`ops` is the define-by-run interface: lowerings call `ops.add(a, b)`, `ops.load(...)`, and the current handler (a
ContextVar, the only ambient state of a compilation) records a `Row` for each distinct call. The result is data without
closures: it can be hashed, verified, printed, interpreted and stored.

Values have *compute* dtypes: 16-bit and 8-bit floats are loaded into float32. `round_to` rows round a float32 value to
the precision of a narrower type where a user's cast asks for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.sizes import LOOP, Expr, expr, indirect, rows_in, substitute, symbol, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import NO_OP, OPS, OpRow
from fuser.reasons import because

LOW_PRECISION = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


@dataclass(frozen=True, slots=True)
class Row:
    """One value. `args` are numbers of earlier rows; `attr` depends on `op`.

    load      attr (buffer name, index tuple); args () or (mask row,)
    const     attr the Python number
    scalar    attr the name of a scalar input
    index     attr an Expr over loop variables and sizes; the value of the index
    indirect  attr (size Expr, checked); args (row,): an index computed by a row, wrapped if negative, usable in later
              index expressions as the symbol `%<row number>`
    pair      args (value row, index row): what an index reduction reduces; dtype int64
    round_to  attr the torch dtype to round to; the value stays in compute dtype
    to_dtype  args (row,); a change of compute dtype
    any name of `ops.OPS`
    """

    op: str
    args: tuple[int, ...]
    dtype: torch.dtype
    attr: Any = None

    @property
    def traits(self) -> OpRow:
        """The row of the op table for this op; a row without traits for other kinds of row."""
        return OPS.get(self.op, NO_OP)

    @property
    def buffer(self) -> str:
        """The buffer of a load."""
        name: str = self.attr[0]
        return name

    @property
    def indices(self) -> tuple[Expr, ...]:
        """The index of a load along each dim of its buffer; in a kernel plan the flat address alone."""
        found: tuple[Expr, ...] = self.attr[1]
        return found

    @property
    def address(self) -> Expr:
        """The flat address of a load in a kernel plan."""
        found: Expr
        (found,) = self.attr[1]
        return found


@dataclass(frozen=True)
class LoopBody:
    """Rows over loop variables `i0 … in` and the number of the row that is the result."""

    rows: tuple[Row, ...]
    result: int

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of the result."""
        return self.rows[self.result].dtype

    def loads(self) -> Iterator[tuple[str, tuple[Expr, ...]]]:
        """Each (buffer, index) that the body reads."""
        for row in loads_in(self.rows):
            yield row.attr


@dataclass(frozen=True, slots=True)
class Value:
    """A recorded value: the number of its row and its compute dtype."""

    row: int
    dtype: torch.dtype


def loads_in(rows: Iterable[Row]) -> Iterator[Row]:
    """The loads among rows."""
    return (row for row in rows if row.op == "load")


def is_checked(row: Row) -> bool:
    """Whether a row reports an index that is out of range."""
    return row.op == "indirect" and bool(row.attr[1])


# Comparisons and logic in Python, by the sign of the op.
_TESTS: dict[str, Callable[..., bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "&": lambda a, b: bool(a) and bool(b), "|": lambda a, b: bool(a) or bool(b), "!": operator.not_,
}  # fmt: skip


def is_test(row: Row) -> bool:
    """Whether a row is a comparison, or logic whose result is a truth value."""
    return row.dtype is torch.bool and row.traits.sign in _TESTS


def is_both(row: Row) -> bool:
    """Whether a row holds where both of its arguments do."""
    return row.dtype is torch.bool and row.traits.sign == "&"


def outcome(row: Row, args: Sequence[int | bool | None]) -> bool | None:
    """The result of a test, given its arguments; None if one is unknown, or the row is no test."""
    return None if None in args or not is_test(row) else _TESTS[row.traits.sign](*args)


def loop_variables(n: int) -> tuple[Expr, ...]:
    """`i0 … i(n-1)`."""
    while len(_VARIABLES) < n:
        _VARIABLES.append(symbol(f"i{len(_VARIABLES)}", LOOP))
    return tuple(_VARIABLES[:n])


_VARIABLES: list[Expr] = []


class Recorder:
    """The recording handler: equal calls give the same row."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._known: dict[Row, int] = {}
        self._mask: Value | None = None

    def add_row(self, row: Row) -> Value:
        """Append `row`, unless an equal row exists. Returns its value."""
        n = self._known.get(row)
        if n is None:
            n = self._known[row] = len(self.rows)
            self.rows.append(row)
        return Value(n, row.dtype)

    def finish(self, result: Value) -> LoopBody:
        """The body, without rows that its result does not depend on."""
        return prune(self.rows, result.row)


_handler: contextvars.ContextVar[Recorder] = contextvars.ContextVar("fuser_ops_handler")


def prune(rows: Sequence[Row], result: int) -> LoopBody:
    """A body with only the rows that `result` depends on, renumbered."""
    return prune_with(rows, result, ())[0]


def prune_with(rows: Sequence[Row], result: int, index: Sequence[Expr]) -> tuple[LoopBody, tuple[Expr, ...]]:
    """A body with only the rows that `result` and the expressions `index` depend on, and `index` renumbered."""
    needed = {result, *(n for e in index for n in rows_in(e))}
    for n in range(max(needed), -1, -1):
        if n in needed:
            needed.update(rows[n].args)
            needed.update(indirect_rows(rows[n]))
    order = sorted(needed)
    if len(order) == len(rows):
        return LoopBody(tuple(rows), result), tuple(index)
    number = {old: new for new, old in enumerate(order)}
    body = LoopBody(tuple(renumber(rows[n], number) for n in order), number[result])
    return body, tuple(renumber_expr(e, number) for e in index)


def renumber_expr(e: Expr, number: Mapping[int, int]) -> Expr:
    """`e` with the row numbers of its indirect symbols replaced."""
    moved = {s: expr(indirect(number[s.row])) for s in symbols(e) if s.row is not None}
    return substitute(e, moved) if moved else e


def row_exprs(row: Row) -> tuple[Expr, ...]:
    """The index expressions of a row."""
    if row.op == "load":
        return tuple(row.attr[1])
    if row.op == "index":
        return (row.attr,)
    return (row.attr[0],) if row.op == "indirect" else ()


def indirect_rows(row: Row) -> set[int]:
    """Numbers of the rows whose values the row's index expressions use."""
    return {n for e in row_exprs(row) for n in rows_in(e)}


def map_exprs(row: Row, fn: Callable[[Expr], Expr]) -> Row:
    """`row` with `fn` applied to each of its index expressions."""
    if row.op == "load":
        return Row(row.op, row.args, row.dtype, (row.attr[0], tuple(fn(e) for e in row.attr[1])))
    if row.op == "index":
        return Row(row.op, row.args, row.dtype, fn(row.attr))
    if row.op == "indirect":
        return Row(row.op, row.args, row.dtype, (fn(row.attr[0]), row.attr[1]))
    return row


def renumber(row: Row, number: dict[int, int]) -> Row:
    """`row` with the row numbers of its references replaced."""
    if indirect_rows(row):
        row = map_exprs(row, lambda e: renumber_expr(e, number))
    return Row(row.op, tuple(number[a] for a in row.args), row.dtype, row.attr)


class _Ops:
    """`ops.<name>(…)`: the define-by-run calls available to an `inner_fn`. Scalars become constants."""

    def load(self, buffer: str, index: Sequence[Expr], dtype: torch.dtype) -> Value:
        """The element of `buffer` at the logical `index`, in compute dtype; 0 where the current mask is False."""
        recorder = _handler.get()
        mask = recorder._mask
        args = () if mask is None else (mask.row,)
        return recorder.add_row(Row("load", args, compute_dtype(dtype), (buffer, tuple(index))))

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> Value:
        """A constant of compute dtype."""
        dtype = compute_dtype(dtype)
        if dtype.is_floating_point:
            value = float(value)
        elif dtype is torch.bool:
            value = bool(value)
        else:
            value = int(value)
        # Python treats 0.0 and -0.0, 1 and True as equal; their texts differ.
        return _handler.get().add_row(Row("const", (), dtype, repr(value)))

    def scalar(self, name: str, dtype: torch.dtype) -> Value:
        """The scalar input `name` in compute dtype."""
        return _handler.get().add_row(Row("scalar", (), compute_dtype(dtype), name))

    def index_expr(self, e: Expr | int, dtype: torch.dtype = torch.int64) -> Value:
        """The value of an index expression."""
        value = _handler.get().add_row(Row("index", (), torch.int64, expr(e)))
        return value if dtype is torch.int64 else self.to_dtype(value, dtype)

    def indirect(self, value: Value, size: Expr, checked: bool = True) -> Expr:
        """`value` as an index into a dim of `size`: wrapped if negative; out of range is reported if `checked`."""
        value = self.to_dtype(value, torch.int64)
        recorder = _handler.get()
        mask = recorder._mask
        args = (value.row,) if mask is None else (value.row, mask.row)
        out = recorder.add_row(Row("indirect", args, torch.int64, (size, checked)))
        return expr(indirect(out.row))

    def round_to(self, value: Value, dtype: torch.dtype) -> Value:
        """`value` rounded to the precision of `dtype`, still in compute dtype."""
        if dtype not in LOW_PRECISION:
            return value
        return _handler.get().add_row(Row("round_to", (value.row,), torch.float32, dtype))

    def to_dtype(self, value: Value, dtype: torch.dtype) -> Value:
        """`value` converted to the compute dtype of `dtype`, as torch converts."""
        dtype = compute_dtype(dtype)
        if value.dtype is dtype:
            return value
        row = _handler.get().rows[value.row]
        if row.op == "const" and value.dtype.is_floating_point and dtype.is_floating_point:
            return self.constant(float(row.attr), dtype)
        return _handler.get().add_row(Row("to_dtype", (value.row,), dtype, value.dtype))

    def guarded(self, mask: Value, body: Callable[[], Value]) -> Value:
        """`body()` where `mask` holds, else an arbitrary value: loads in `body` are masked."""
        recorder = _handler.get()
        before = recorder._mask
        recorder._mask = mask if before is None else self.logical_and(before, mask)
        try:
            return body()
        finally:
            recorder._mask = before

    def masked(self, mask: Value, body: Callable[[], Value], other: Value | float | int | bool) -> Value:
        """`body()` where `mask` holds, else `other`; loads in `body` are masked."""
        value = self.guarded(mask, body)
        return self.where(mask, value, other if isinstance(other, Value) else self.constant(other, value.dtype))

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """`a` where `condition`, else `b`."""
        return _handler.get().add_row(Row("where", (condition.row, a.row, b.row), a.dtype))

    def pair(self, value: Value, index: Value) -> Value:
        """A value and its int64 index, which `argmax` and `argmin` reduce to an index."""
        return _handler.get().add_row(Row("pair", (value.row, index.row), torch.int64))

    def logical_and(self, a: Value, b: Value) -> Value:
        """The logical and of two bools."""
        return _handler.get().add_row(Row("logical_and", (a.row, b.row), torch.bool))

    def call(self, name: str, *args: Value | float | int) -> Value:
        """The op `name` of the table. All values have one dtype; Python numbers become constants of it."""
        spec = OPS.get(name)
        if spec is None:
            raise Unsupported(f"no loop-level op named {name!r}: expected a row of fuser.ops.OPS")
        dtypes = [a.dtype for a in args if isinstance(a, Value)]
        operand = next((d for d, s in zip(dtypes, spec.signature or "t" * len(dtypes)) if s == "t"), dtypes[0])
        values = [a if isinstance(a, Value) else self.constant(a, operand) for a in args]
        if operand not in spec.dtypes:
            raise Unsupported(because("dtype", f"op {name!r} is not defined for {operand}"))
        if spec.result == "same":
            dtype = operand
        else:
            dtype = torch.bool if spec.result == "bool" else spec.result  # type: ignore[assignment]
        return _handler.get().add_row(Row(name, tuple(v.row for v in values), dtype))

    def __getattr__(self, name: str) -> Callable[..., Value]:
        return lambda *args: self.call(name, *args)


ops = _Ops()


def record(inner_fn: Callable[[tuple[Expr, ...]], Value], rank: int) -> LoopBody:
    """The body recorded by running `inner_fn(loop variables)` once."""
    recorder = Recorder()
    token = _handler.set(recorder)
    try:
        return recorder.finish(inner_fn(loop_variables(rank)))
    finally:
        _handler.reset(token)


def record_store(
    inner_fn: Callable[[tuple[Expr, ...]], tuple[Value, Sequence[Expr]]], rank: int
) -> tuple[LoopBody, tuple[Expr, ...]]:
    """The body and the store index recorded by running `inner_fn(loop variables)`, which returns both, once."""
    recorder = Recorder()
    token = _handler.set(recorder)
    try:
        value, index = inner_fn(loop_variables(rank))
        return prune_with(recorder.rows, value.row, index)
    finally:
        _handler.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """A block whose `ops` calls go to a new recorder, for code that builds bodies directly."""
    recorder = Recorder()
    token = _handler.set(recorder)
    try:
        yield recorder
    finally:
        _handler.reset(token)
