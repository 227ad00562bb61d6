"""Runs the IR with torch: the reference between a lowering and a kernel.

Loop bodies are evaluated row by row, each row for all points of the domain at once. Nothing is fused, reordered or
approximated, and indices are checked exactly. So a difference from eager is a fault of a lowering, and a difference
from the interpreter is a fault of the scheduler or of a code generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Union

import torch

from fuser.errors import VerifyError
from fuser.ir.loop_body import Row, compute_dtype
from fuser.ir.nodes import Buffer, Index, Loops, Reduction, Scan, Scatter
from fuser.ir.sizes import LOOP, Expr, Sym, evaluate
from fuser.lazy_dataclasses import dataclass
from fuser.ops import NO_INDEX, OPS, REDUCTIONS, SCANS

Load = Callable[[str, tuple[torch.Tensor, ...], "torch.Tensor | None"], torch.Tensor]
Values = Union[Sequence[torch.Tensor], Mapping[int, torch.Tensor]]  # by row number


class OutOfRange(VerifyError):
    """An index out of range: of the graph's own making (an indirect index), or a defect of a lowering."""


@dataclass
class Evaluator:
    """Evaluates rows over a domain. `env` has the sizes, `floats` the scalar inputs, `points` the loop variables.

    A value is a tensor of compute dtype that broadcasts to the domain. `load` reads a buffer at an index of such
    tensors, where the mask, if there is one, holds.
    """

    env: Mapping[Sym, int]
    floats: Mapping[str, float]
    points: Mapping[Sym, torch.Tensor]
    load: Load

    def rows(
        self, rows: Sequence[Row], special: Callable[[int, Row, list[torch.Tensor]], torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The value of each row. `special(number, row, values so far)` gives the value of special rows, else None."""
        values: list[torch.Tensor] = []
        for n, row in enumerate(rows):
            value = special(n, row, values)
            values.append(self.row(row, values) if value is None else value)
        return values

    def row(self, row: Row, values: Values) -> torch.Tensor:
        """The value of one row, from the values of earlier ones."""
        args = [values[a] for a in row.args]
        if row.op == "load":
            index = tuple(self.expr(e, values) for e in row.attr[1])
            return self.load(row.attr[0], index, args[0] if args else None)
        if row.op == "const":
            return torch.tensor(_number(row.attr, row.dtype), dtype=row.dtype)
        if row.op == "scalar":
            return torch.tensor(self.floats[row.attr], dtype=torch.float64).to(row.dtype)
        if row.op == "index":
            return self.expr(row.attr, values)
        if row.op == "indirect":
            return self._indirect(row, args, values)
        if row.op == "to_dtype":
            return args[0].to(row.dtype)
        if row.op == "round_to":
            return args[0].to(row.attr).to(row.dtype)
        found = OPS.get(row.op)
        if found is None:
            raise VerifyError(f"row {row.op!r} is no loop-level op: expected a row of fuser.ops.OPS")
        return found.eval(*broadcast(*args))

    def _indirect(self, row: Row, args: Sequence[torch.Tensor], values: Values) -> torch.Tensor:
        size, checked = row.attr
        bound = self.expr(size, values)
        index = torch.where(args[0] < 0, args[0] + bound, args[0])
        outside = (index < 0) | (index >= bound)
        if checked and bool((outside & args[1] if len(args) > 1 else outside).any()):
            raise OutOfRange("an index of the graph is out of range")
        return torch.where(outside, 0, index)

    def expr(self, e: Expr, values: Values) -> torch.Tensor:
        """The value of an index expression at every point, int64."""
        total = torch.zeros((), dtype=torch.int64)
        for monomial, coefficient in e.terms:
            term = torch.tensor(coefficient)
            for a in monomial:
                if isinstance(a, Sym):
                    term = term * self._symbol(a, values)
                else:
                    term = term * _call(a.fn, self.expr(a.args[0], values), self.expr(a.args[1], values))
            total = total + term
        return total

    def _symbol(self, s: Sym, values: Values) -> torch.Tensor:
        if s.row is not None:
            return values[s.row]
        point = self.points.get(s)
        return point if point is not None else torch.tensor(self.env[s])


def broadcast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors, expanded to their common size."""
    size = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return [t.expand(size) for t in tensors]


def _number(text: str, dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return text == "True"
    return float(text) if dtype.is_floating_point else wrapped(int(text), dtype)


def wrapped(value: int, dtype: torch.dtype) -> int:
    """`value` modulo the range of an integer dtype."""
    info = torch.iinfo(dtype)
    return (value - info.min) % (1 << info.bits) + info.min


def _call(fn: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if fn == "min":
        return torch.minimum(a, b)
    if fn == "max":
        return torch.maximum(a, b)
    safe = torch.where(b == 0, 1, b)
    found = torch.div(a, safe, rounding_mode="floor") if fn == "floordiv" else torch.remainder(a, safe)
    return torch.where(b == 0, 0, found)


def reduce(
    kind: str, value: torch.Tensor, index: torch.Tensor | None, dims: tuple[int, ...], keepdim: bool = False
) -> torch.Tensor:
    """`value` reduced by the row `kind` of the table; `index` has the index of each value for an index reduction."""
    row = REDUCTIONS[kind]
    accumulator = row.accumulate(value.dtype)
    if any(value.shape[d] == 0 for d in dims):
        size = [1 if d in dims else n for d, n in enumerate(value.shape) if keepdim or d not in dims]
        return torch.full(size, row.identity(accumulator), dtype=row.result_dtype(value.dtype))
    if not row.index:
        return row.eval(value.to(accumulator), dims, keepdim) if dims else value.to(accumulator)
    if index is None:
        raise VerifyError(f"{kind} reduces values without an index: expected pairs")
    best = (torch.amax if row.extreme == ">" else torch.amin)(value, dims, True) if dims else value
    wins = (value == best) | (value.isnan() & best.isnan() if value.dtype.is_floating_point else False)
    places = torch.where(wins, index, NO_INDEX)
    return torch.amin(places, dims, keepdim) if dims else places


# -- buffers -----------------------------------------------------------------------------------------------------------
class Memory:
    """Buffers by name, as tensors of the buffers' logical sizes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def load(self, name: str, index: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> torch.Tensor:
        """The elements at `index`; 0 where `mask` is False. OutOfRange if an index is out of range."""
        source = self.tensors[name]
        dtype = compute_dtype(source.dtype)
        if not index:
            value = source.to(dtype)
            return value if mask is None else torch.where(mask, value, torch.zeros((), dtype=dtype))
        index = tuple(broadcast(*index, *(() if mask is None else (mask,)))[: len(index)])
        for d, (i, n) in enumerate(zip(index, source.shape)):
            outside = (i < 0) | (i >= n)
            if mask is not None:
                outside = outside & mask
            if bool(outside.any()):
                raise OutOfRange(f"{name} of size {tuple(source.shape)} is read outside of dim {d}")
        if mask is None:
            return source[index].to(dtype)
        if source.numel() == 0:
            return torch.zeros(mask.shape, dtype=dtype)
        value = source[tuple(torch.where(mask, i, 0) for i in index)].to(dtype)
        return torch.where(mask, value, torch.zeros((), dtype=dtype))


def run_buffers(
    buffers: Sequence[Buffer], inputs: Mapping[str, torch.Tensor], env: Mapping[Sym, int],
    floats: Mapping[str, float], canon: Callable[[Expr], Expr] = lambda e: e,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The contents of every buffer, by name, with the buffer's strides. VerifyError for a broken IR.

    `inputs` are the tensors of input buffers, `env` the values of size symbols, `floats` of scalars. `canon`
    substitutes known facts in an expression.
    """
    memory = Memory(inputs)
    for buffer in buffers:
        size = [evaluate(canon(s), env) for s in buffer.size]
        stride = [evaluate(canon(s), env) for s in buffer.stride]
        memory.tensors[buffer.name] = torch.empty_strided(size, stride, dtype=buffer.dtype)
        for loops in buffer.loops:
            _run_loops(memory, buffer, loops, env, floats, canon)
    return memory.tensors


def _run_loops(
    memory: Memory, buffer: Buffer, loops: Loops, env: Mapping[Sym, int], floats: Mapping[str, float],
    canon: Callable[[Expr], Expr],
) -> None:  # fmt: skip
    domain = [evaluate(canon(n), env) for n in loops.domain]
    points = loop_points(domain)
    evaluator = Evaluator(env, floats, points, memory.load)
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def special(n: int, row: Row, values: list[torch.Tensor]) -> torch.Tensor | None:
        if row.op != "pair":
            return None
        pairs[n] = values[row.args[0]], values[row.args[1]]
        return values[row.args[0]]

    values = evaluator.rows(loops.body.rows, special) if 0 not in domain else []
    value = values[loops.body.result].expand(domain) if values else torch.zeros(domain, dtype=loops.body.dtype)
    if isinstance(loops, Reduction):
        dims = tuple(range(len(domain) - loops.n_reduced, len(domain)))
        index = pairs[loops.body.result][1].expand(domain) if pairs else None
        if not values:
            index = torch.zeros(domain, dtype=torch.int64)
        value = reduce(loops.kind, value, index, dims)
        domain = domain[: len(domain) - loops.n_reduced]
        points = loop_points(domain)
        evaluator = Evaluator(env, floats, points, memory.load)
    target = memory.tensors[buffer.name]
    if isinstance(loops, Scan):
        value = scanned(loops.kind, value, len(domain) - 1)
    if isinstance(loops, Scatter):
        if not values:
            return
        where = [evaluator.expr(e, values).expand(domain) for e in loops.store_index]
        _inside(target, where)
        put_in_order(target, where, value, loops.combine)
        return
    store(target, loops.store_index, value, domain, evaluator, values)


def loop_points(domain: Sequence[int]) -> dict[Sym, torch.Tensor]:
    """The loop variables `i0 … in` as tensors that broadcast to `domain`."""
    out = {}
    for d, n in enumerate(domain):
        shape = [1] * len(domain)
        shape[d] = n
        out[Sym(f"i{d}", LOOP)] = torch.arange(n).reshape(shape)
    return out


def store(
    target: torch.Tensor, index: Index, value: torch.Tensor, domain: Sequence[int], evaluator: Evaluator,
    values: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Store `value`, over `domain`, at `index` of `target`. OutOfRange if an index is out of range."""
    value = value.expand(domain).to(target.dtype)
    if 0 in domain:
        return
    where = [evaluator.expr(e, values).expand(domain) for e in index]
    _inside(target, where)
    if where:
        target[tuple(where)] = value
    else:
        target.copy_(value.reshape(()))


def _inside(target: torch.Tensor, where: Sequence[torch.Tensor]) -> None:
    for d, (i, n) in enumerate(zip(where, target.shape)):
        if bool(((i < 0) | (i >= n)).any()):
            raise OutOfRange(f"a buffer of size {tuple(target.shape)} is written outside of dim {d}")


def scanned(kind: str, value: torch.Tensor, dim: int) -> torch.Tensor:
    """The scan `kind` of `value` along `dim`; for an index scan, the indices of the kept values."""
    row = SCANS[kind]
    return row.eval(value.to(row.accumulate(value.dtype)), dim) if value.dim() else value


def put_in_order(target: torch.Tensor, where: Sequence[torch.Tensor], value: torch.Tensor, combine: str) -> None:
    """Store each value at its index in `target`, in row-major order of the values, combined with the old element."""
    row = REDUCTIONS.get(combine)
    flat = [w.reshape(-1).tolist() for w in where]
    new = value.to(compute_dtype(target.dtype)).reshape(-1)
    for k, at in enumerate(zip(*flat) if flat else [()] * new.numel()):
        v = new[k]
        if row is not None:
            v = row.eval(torch.stack([target[at].to(v.dtype), v]), (0,), False)
        target[at] = v.to(target.dtype)


__all__ = [
    "Evaluator", "Memory", "OutOfRange", "broadcast", "loop_points", "put_in_order", "reduce", "run_buffers", "scanned",
    "wrapped",
]  # fmt: skip
