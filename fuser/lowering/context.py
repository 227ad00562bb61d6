"""The state of one lowering: symbols and known facts about them, the buffers made so far, scalar inputs.

It is passed to every `lower_*` function. Nothing here is global, so eight threads can lower eight graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import targets
from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, loop_variables, ops, record, record_store
from fuser.ir.nodes import Buffer, Index, Pointwise, Reduction, Scan, Scatter, StorageBox, TensorBox, strides_of
from fuser.ir.ranges import is_nonnegative
from fuser.ir.sizes import (
    ONE,
    SIZE,
    STRIDE,
    ZERO,
    Expr,
    Sym,
    evaluate,
    expr,
    product,
    substitute,
    symbol,
    symbols,
)  # fmt: skip
from fuser.kernel_spec import memory_order
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because
from fuser.targets import Target


@dataclass(frozen=True)
class Scalar:
    """A Python float input of the graph, known at run time."""

    name: str
    hint: float


@dataclass(frozen=True)
class Number:
    """A Python float that the graph computes from `sizes` and, if `has_inputs`, from float inputs.

    `build` records the rows that compute it, in float64; `positive` if it is known to be above zero.
    """

    build: Callable[[], Value]
    sizes: tuple[Expr, ...]
    has_inputs: bool
    positive: bool


Operand = TensorBox | Scalar | Number | Expr | int | float | bool


class LoweringContext:
    """The state of one lowering. `numerics`: "fast" or "eager"; `target`: the device of all tensors."""

    def __init__(self, numerics: str = "fast", target: Target | None = None) -> None:
        self.numerics = numerics
        self.target = targets.of(targets.HOST) if target is None else target
        self.buffers: list[Buffer] = []
        self.hints: dict[Sym, int] = {}
        self.facts: dict[Sym, Expr] = {}  # symbols found equal to something else
        self.guards: dict[tuple[str, Expr, Expr], None] = {}  # other relations that this lowering relies on, in order
        self.scalars: list[Scalar] = []
        self.writes: list[tuple[str, int]] = []  # buffers to be written into inputs, by the input's number
        self.result_orders: dict[str, tuple[int, ...]] = {}  # by buffer, for results with dims of size 1
        self.result_sizes: dict[str, tuple[Expr, ...]] = {}  # by buffer, for results that are reshaped
        self.perhaps_views: set[str] = set()  # copies where Python's x[0-dim tensor] returns a view
        self.origin = ""
        self.op = ""  # the operator being lowered; below, its result(s) and arguments as meta tensors
        self.meta: Any = None
        self.arg_metas: tuple[Any, ...] = ()
        self.n_readers = 0  # number of nodes of the graph that read the result
        self.is_scanned = False  # whether one of them is a scan
        self.is_normed = False  # whether one of them is a norm of images
        self.claims: Counter[int] = Counter()  # by id of a StorageBox: how many nodes and outputs read a box over it

    # -- symbols -----------------------------------------------------------------------------------------------------
    def new_symbol(self, name: str, hint: int, kind: str = SIZE) -> Expr:
        """A new symbol whose value in the example is `hint`."""
        out = symbol(name, kind)
        self.hints[Sym(name, kind)] = hint
        return out

    def canon(self, e: Expr | int) -> Expr:
        """`e` with all known facts substituted."""
        e = expr(e)
        while self.facts and any(s in self.facts for s in symbols(e)):
            e = substitute(e, self.facts)
        return e

    def hint(self, e: Expr | int) -> int:
        """The value of `e` in the example."""
        return evaluate(self.canon(e), self.hints)

    def specialise(self, e: Expr | int) -> int:
        """Make `e` a constant: its symbols become facts, and guards of the kernel. Returns the constant."""
        e = self.canon(e)
        for s in sorted(symbols(e)):
            self.facts[s] = expr(self.hints[s])
        return self.hint(e)

    def is_equal(self, a: Expr | int, b: Expr | int) -> bool:
        """Whether `a == b` in every call of this kernel; if true in the example, it becomes a fact."""
        x, y = self.canon(a), self.canon(b)
        if x == y:
            return True
        if evaluate(x, self.hints) != evaluate(y, self.hints):
            return False
        self.learn_equal(x, y)
        return True

    def learn_equal(self, x: Expr, y: Expr) -> None:
        """Record `x == y`: one symbol is replaced by the other side, or all symbols become constants."""
        sx, sy = x.as_symbol(), y.as_symbol()
        if sx is not None and (sy is None or _preferred(sy, sx)) and sx not in symbols(y):
            self.facts[sx] = y
        elif sy is not None and sy not in symbols(x):
            self.facts[sy] = x
        else:
            self.specialise(x)
            self.specialise(y)

    def assume(self, relation: str, a: Expr | int, b: Expr | int) -> None:
        """Rely on `a relation b` ("eq", "ne", "lt", "le"), which becomes a guard unless it always holds.

        Unsupported if it does not hold in the example.
        """
        x, y = self.canon(a), self.canon(b)
        gap = y - x
        if not _holds(relation, evaluate(gap, self.hints)):
            raise Unsupported(f"{x} {relation} {y} does not hold for these sizes")
        if gap.as_int() is None and (relation in ("eq", "ne") or not is_nonnegative(gap - int(relation == "lt"))):
            self.guards[relation, x, y] = None

    def is_less(self, a: Expr | int, b: Expr | int) -> bool:
        """Whether `a < b` in the example, and in every call of this kernel: the answer becomes a guard."""
        less = self.hint(a) < self.hint(b)
        self.assume(*(("lt", a, b) if less else ("le", b, a)))
        return less

    def is_one(self, size: Expr | int) -> bool:
        """Whether a size is the constant 1 (not merely 1 in the example)."""
        return self.canon(size) == ONE

    def broadcast_sizes(self, sizes: Sequence[tuple[Expr, ...]]) -> tuple[Expr, ...]:
        """The common size of broadcast tensors. A dim that is 1 in only some of them becomes the constant 1."""
        rank = max((len(s) for s in sizes), default=0)
        out: list[Expr] = []
        for position in range(rank):
            dims = [s[position - rank + len(s)] for s in sizes if position - rank + len(s) >= 0]
            out.append(self._broadcast_dim(dims))
        return tuple(out)

    def _broadcast_dim(self, dims: list[Expr]) -> Expr:
        dims = [self.canon(d) for d in dims]
        if all(self.hint(d) == 1 for d in dims):
            common = next((d for d in dims if d != ONE), ONE)
            for d in dims:
                if d != ONE:
                    self.is_equal(common, d)
            return self.canon(common)
        wide = [d for d in dims if self.hint(d) != 1]
        for d in dims:
            if self.hint(d) == 1 and d != ONE:
                self.specialise(d)
        for d in wide[1:]:
            if not self.is_equal(wide[0], d):
                raise Unsupported(because("eager_raises", f"sizes {wide[0]} and {d} do not broadcast"))
        return self.canon(wide[0])

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether kernels for the device read and write tensors of `dtype`."""
        return dtype in self.target.dtypes

    # -- loops -------------------------------------------------------------------------------------------------------
    def new_buffer(self, dtype: torch.dtype, size: Sequence[Expr], order: tuple[int, ...] | None = None) -> Buffer:
        """A buffer without loops yet, dense in `order` (outermost to innermost; row-major if None)."""
        if not self.takes(dtype):
            raise Unsupported(because("dtype", f"dtype {dtype} is not fused"), self.origin)
        size = tuple(self.canon(s) for s in size)
        name, stride = f"buf{len(self.buffers)}", strides_of(size, order)
        buffer = Buffer(name, dtype, size, stride, origin=self.origin, order=order)
        self.buffers.append(buffer)
        return buffer

    def empty(self, size: Sequence[Expr], dtype: torch.dtype, order: tuple[int, ...] | None = None) -> TensorBox:
        """A tensor to be filled by `into_slice`."""
        return TensorBox(StorageBox(self.new_buffer(dtype, size, order)))

    def pointwise(
        self, size: Sequence[Expr], dtype: torch.dtype, inner_fn: Callable[[Index], Value],
        order: tuple[int, ...] | None = None,
    ) -> TensorBox:  # fmt: skip
        """A tensor of `size` whose element at an index is `inner_fn(index)`."""
        buffer = self.new_buffer(dtype, size, order)
        body = record(lambda index: self._finish(inner_fn(index), dtype), len(buffer.size))
        buffer.loops.append(Pointwise(buffer.size, body, loop_variables(len(buffer.size))))
        return TensorBox(StorageBox(buffer))

    def table(self, size: Sequence[Expr], dtype: torch.dtype, inner_fn: Callable[[Index], Value]) -> TensorBox:
        """`pointwise`, but computed once for all readers: for few elements, each of which many loops read."""
        made = self.pointwise(size, dtype, inner_fn)
        made.storage.buffer.table = True
        return made

    def reduction(
        self, kind: str, size: Sequence[Expr], reduced: Sequence[Expr], dtype: torch.dtype,
        inner_fn: Callable[[Index, Index], Value], kept: Sequence[int] | None = None,
        order: tuple[int, ...] | None = None,
    ) -> TensorBox:  # fmt: skip
        """A tensor of `size`: `kind` over all `reduced` indices of `inner_fn(index, reduced_index)`.

        `index` runs over the dims `kept` of `size` (all if None); the others have size 1.
        """
        buffer = self.new_buffer(dtype, size, order)
        kept = range(len(buffer.size)) if kept is None else kept
        n = len(kept)
        domain = (*(buffer.size[d] for d in kept), *(self.canon(r) for r in reduced))
        body = record(lambda index: inner_fn(index[:n], index[n:]), len(domain))
        store = dict(zip(kept, loop_variables(n)))
        where = tuple(store.get(d, ZERO) for d in range(len(buffer.size)))
        buffer.loops.append(Reduction(domain, body, where, len(reduced), kind))
        return TensorBox(StorageBox(buffer))

    def _finish(self, value: Value, dtype: torch.dtype) -> Value:
        value = ops.to_dtype(value, compute_dtype(dtype))
        return ops.round_to(value, dtype) if self.numerics == "eager" else value

    def order_of_meta(self, result: int | None = None) -> tuple[int, ...] | None:
        """The dims of the node's result (or its result `result`) in eager's memory order; None if it is row-major."""
        meta = self.meta if result is None else self.meta[result]
        if not isinstance(meta, torch.Tensor) or meta.is_contiguous():
            return None
        return memory_order(meta.size(), meta.stride())

    def into_slice(
        self, target: TensorBox, size: Sequence[Expr], inner_fn: Callable[[Index], Value],
        store_index: Callable[[Index], Index],
    ) -> None:  # fmt: skip
        """Add a loop to `target` that fills part of its buffer: the value at `index` goes to `store_index(index)`."""
        buffer = target.storage.buffer
        size = tuple(self.canon(s) for s in size)
        body = record(lambda index: self._finish(inner_fn(index), buffer.dtype), len(size))
        buffer.loops.append(Pointwise(size, body, store_index(loop_variables(len(size)))))

    def scatter_into(
        self, target: TensorBox, size: Sequence[Expr],
        inner_fn: Callable[[Index], tuple[Value, Sequence[Expr]]], combine: str = "",
    ) -> None:  # fmt: skip
        """Add a loop to `target` over `size`, in order: `inner_fn` gives a value and the index of its store."""
        buffer = target.storage.buffer
        size = tuple(self.canon(s) for s in size)

        def finished(index: Index) -> tuple[Value, Sequence[Expr]]:
            value, where = inner_fn(index)
            return self._finish(value, buffer.dtype), where

        body, where = record_store(finished, len(size))
        buffer.loops.append(Scatter(size, body, where, combine))

    def scan(
        self, kind: str, size: Sequence[Expr], dim: int, dtype: torch.dtype, inner_fn: Callable[[Index], Value],
        order: tuple[int, ...] | None = None,
    ) -> TensorBox:  # fmt: skip
        """A tensor of `size`: the element at an index is `kind` over the values of `inner_fn` up to it along `dim`."""
        buffer = self.new_buffer(dtype, size, order)
        rank = len(buffer.size)
        dims = [*(d for d in range(rank) if d != dim), dim]
        place = dict(zip(dims, range(rank)))
        body = record(lambda index: inner_fn(tuple(index[place[d]] for d in range(rank))), rank)
        variables = loop_variables(rank)
        where = tuple(variables[place[d]] for d in range(rank))
        buffer.loops.append(Scan(tuple(buffer.size[d] for d in dims), body, where, kind))
        return TensorBox(StorageBox(buffer))

    # -- operands ----------------------------------------------------------------------------------------------------
    def input_tensor(self, number: int, dtype: torch.dtype, size: Sequence[Expr], stride: Sequence[Expr]) -> TensorBox:
        """The tensor input `number`."""
        buffer = Buffer(f"in{number}", dtype, tuple(size), tuple(stride), input_number=number)
        return TensorBox(StorageBox(buffer))

    def size_of(self, operand: Operand) -> tuple[Expr, ...]:
        """The logical size; () for a number."""
        return tuple(self.canon(s) for s in operand.size) if isinstance(operand, TensorBox) else ()

    def loader(self, operand: Operand, size: Sequence[Expr], dtype: torch.dtype) -> Callable[[Index], Value]:
        """A function that loads the operand at an index of the broadcast `size`, in the compute dtype of `dtype`."""
        if isinstance(operand, TensorBox):
            box = operand
            own = self.size_of(box)
            lead = len(size) - len(own)
            keep = [not self.is_one(s) for s in own]
            for d, s in enumerate(own):
                if lead < 0 or keep[d] and not self.is_equal(s, size[lead + d]):
                    raise Unsupported(f"size {own} does not broadcast to {tuple(size)}", self.origin)

            def load(index: Index) -> Value:
                inner = tuple(i if k else expr(0) for i, k in zip(index[lead:], keep))
                return ops.to_dtype(box.load(inner), dtype)

            return load
        if isinstance(operand, Scalar):
            scalar = operand
            return lambda index: ops.to_dtype(ops.scalar(scalar.name, torch.float64), dtype)
        if isinstance(operand, Number):
            made = operand
            return lambda index: ops.to_dtype(made.build(), dtype)
        if isinstance(operand, Expr):
            size_value = operand
            if size_value.as_int() is None:
                return lambda index: ops.index_expr(self.canon(size_value), compute_dtype(dtype))
            operand = int(size_value.as_int() or 0)
        number = operand
        return lambda index: ops.constant(number, dtype)

    def numel(self, operand: TensorBox) -> Expr:
        """Number of elements."""
        return product(self.size_of(operand))


def _preferred(a: Sym, b: Sym) -> bool:
    """Whether `a` rather than `b` represents both: sizes of tensors come before numbers, then by name."""
    return (a.kind != SIZE, a) < (b.kind != SIZE, b)


def _holds(relation: str, gap: int) -> bool:
    return {"eq": gap == 0, "ne": gap != 0, "lt": gap > 0, "le": gap >= 0}[relation]


def as_expr(value: Any) -> Expr:
    """A size argument as an expression."""
    if isinstance(value, (int, Expr)):
        return expr(value)
    raise Unsupported(f"a size must be an integer or a size expression, not {type(value).__name__}")


__all__ = ["LoweringContext", "Number", "Operand", "Scalar", "STRIDE", "as_expr"]
