"""The IR as runnable `torch.fx` graphs: a whole lowered graph, and the body of one loop.

Each row is a node that calls a function of this module or of `fx_ops`, which tools for FX graphs may replace. Nothing
is fused, and sizes are computed from the arguments, so a module runs for every size of its class.
`fuser.ir.interpreter` gives rows the same meaning; tests compare the two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fuser.ir.fx_ops import op
from fuser.ir.interpreter import Evaluator, Memory, put_in_order, scanned, wrapped
from fuser.ir.interpreter import reduce as reduced
from fuser.ir.loop_body import LoopBody, Row
from fuser.ir.nodes import Buffer, Loops, Reduction, Scan, Scatter
from fuser.ir.sizes import LOOP, Expr, Sym


# -- functions that nodes call -----------------------------------------------------------------------------------------
def point(dim: int, *domain: int) -> torch.Tensor:
    """Loop variable number `dim` at every point of `domain`."""
    return torch.arange(domain[dim]).reshape([n if d == dim else 1 for d, n in enumerate(domain)])


def load(source: torch.Tensor, *index: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The elements at `index`, in compute dtype; 0 where `mask` is False. OutOfRange if an index is out of range."""
    return Memory({"": source}).load("", tuple(map(torch.as_tensor, index)), mask)


def const(text: str, dtype: torch.dtype) -> torch.Tensor:
    """A constant."""
    value = text == "True" if dtype is torch.bool else float(text) if dtype.is_floating_point else int(text)
    return torch.tensor(wrapped(int(value), dtype) if not (dtype.is_floating_point or dtype is torch.bool) else value,
                        dtype=dtype)  # fmt: skip


def scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    """The value of a scalar input, in `dtype`."""
    return torch.tensor(value, dtype=torch.float64).to(dtype)


def indirect(value: torch.Tensor, size: int, checked: bool, mask: torch.Tensor | None = None) -> torch.Tensor:
    """`value` as an index into a dim of `size`: wrapped if negative, 0 if out of range. OutOfRange if `checked`."""
    args = [value] if mask is None else [value, mask]
    e = Expr({(Sym("n"),): 1})
    return Evaluator({Sym("n"): int(size)}, {}, {}, Memory({}).load)._indirect(
        Row("indirect", (), torch.int64, (e, checked)), args, []
    )


def to_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` in another compute dtype."""
    return value.to(dtype)


def round_to(value: torch.Tensor, narrow: torch.dtype) -> torch.Tensor:
    """`value` rounded to the precision of `narrow`, in its own dtype."""
    return value.to(narrow).to(value.dtype)


def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory for a buffer."""
    return torch.empty_strided([int(n) for n in size], [int(n) for n in stride], dtype=dtype)


def reduce(
    value: torch.Tensor, kind: str, domain: Sequence[int], n_reduced: int, index: torch.Tensor | None = None
) -> torch.Tensor:
    """`value` over `domain`, reduced by `kind` over its last `n_reduced` dims; `index`: for an index reduction."""
    dims = tuple(range(len(domain) - n_reduced, len(domain)))
    value = value.expand(tuple(domain)) if value.numel() or 0 in domain else value
    return reduced(kind, value, None if index is None else index.expand(tuple(domain)), dims)


def scan(value: torch.Tensor, kind: str, domain: Sequence[int]) -> torch.Tensor:
    """The scan `kind` of `value` along the last dim of `domain`."""
    return scanned(kind, value.expand(tuple(domain)), len(domain) - 1)


def store(target: torch.Tensor, value: torch.Tensor, domain: Sequence[int], *index: Any) -> torch.Tensor:
    """`target`, after `value` over `domain` is stored at `index`."""
    value = value.expand(tuple(domain)).to(target.dtype)
    if index:
        target[tuple(torch.as_tensor(i).expand(tuple(domain)) for i in index)] = value
    elif 0 not in domain:
        target.copy_(value.reshape(()))
    return target


def scatter(
    target: torch.Tensor, value: torch.Tensor, combine: str, domain: Sequence[int], *index: Any
) -> torch.Tensor:  # fmt: skip
    """`target`, after the values over `domain` are stored in order at `index`, combined by `combine`; "" replaces."""
    where = [torch.as_tensor(i).expand(tuple(domain)) for i in index]
    put_in_order(target, where, value.expand(tuple(domain)), combine)
    return target


def floordiv(a: Any, b: Any) -> Any:
    """The floor of a / b; 0 if b is 0."""
    return _guarded(a, b, torch.floor_divide, operator.floordiv)


def mod(a: Any, b: Any) -> Any:
    """a - b * floor(a / b); 0 if b is 0."""
    return _guarded(a, b, torch.remainder, operator.mod)


def _guarded(a: Any, b: Any, on_tensors: Callable[..., Any], on_numbers: Callable[..., Any]) -> Any:
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        return on_numbers(a, b) if b else 0
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.where(b == 0, 0, on_tensors(a, torch.where(b == 0, 1, b)))


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two indices or sizes."""
    return torch.minimum(*map(torch.as_tensor, (a, b))) if _is_tensor(a, b) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two indices or sizes."""
    return torch.maximum(*map(torch.as_tensor, (a, b))) if _is_tensor(a, b) else max(a, b)


def _is_tensor(*values: Any) -> bool:
    return any(isinstance(v, torch.Tensor) for v in values)


_CALLS = {"floordiv": floordiv, "mod": mod, "min": minimum, "max": maximum}


# -- graphs ------------------------------------------------------------------------------------------------------------
class Builder:
    """Adds loops to `graph` as nodes. `env` has the nodes of sizes, `floats` of scalars, `buffers` of memory."""

    def __init__(
        self, graph: fx.Graph, env: Mapping[Sym, Any], floats: Mapping[str, Any], buffers: dict[str, Any],
        canon: Callable[[Expr], Expr] = lambda e: e,
    ) -> None:  # fmt: skip
        self.graph, self.env, self.floats, self.buffers, self.canon = graph, env, floats, buffers, canon
        self._sizes: dict[Expr, Any] = {}

    def buffer(self, b: Buffer) -> None:
        """Add the memory of `b`, and the loops that fill it."""
        shape, strides = ([self.size(s) for s in dims] for dims in (b.size, b.stride))
        self.buffers[b.name] = self._named(b.name, empty, (shape, strides, b.dtype))
        for loops in b.loops:
            self._loops(b, loops)

    def _loops(self, b: Buffer, loops: Loops) -> None:
        domain = [self.size(n) for n in loops.domain]
        points = self._points(domain)
        values, pairs = self.rows(loops.body.rows, points)
        value = values[loops.body.result]
        call: Callable[..., Any] = store
        before: tuple[Any, ...] = ()
        if isinstance(loops, Reduction):
            more = {"index": pairs[0]} if pairs else None
            value = self.graph.call_function(reduce, (value, loops.kind, domain, loops.n_reduced), more)
            domain = domain[: len(domain) - loops.n_reduced]
            points = self._points(domain)
        elif isinstance(loops, Scan):
            value = self.graph.call_function(scan, (value, loops.kind, domain))
        elif isinstance(loops, Scatter):
            call, before = scatter, (loops.combine,)
        index = [self.index(e, points, values) for e in loops.store_index]
        args = (self.buffers[b.name], value, *before, domain, *index)
        self.buffers[b.name] = self._named(f"{b.name}_filled", call, args)

    def _points(self, domain: Sequence[Any]) -> dict[Sym, Any]:
        return {
            Sym(f"i{d}", LOOP): self._named(f"i{d}", point, (d, *domain)) for d in range(len(domain))
        }

    def rows(self, rows: Sequence[Row], points: Mapping[Sym, Any]) -> tuple[list[Any], list[Any]]:
        """The node of each row, and the index nodes of pairs."""
        values: list[Any] = []
        pairs: list[Any] = []
        for row in rows:
            if row.op == "pair":
                pairs.append(values[row.args[1]])
                values.append(values[row.args[0]])
                continue
            target, args, more = self._row(row, [values[a] for a in row.args], points, values)
            values.append(self.graph.call_function(target, args, more) if target is not None else args[0])
        return values, pairs

    def _row(
        self, row: Row, args: list[Any], points: Mapping[Sym, Any], values: list[Any]
    ) -> tuple[Callable[..., Any] | None, tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        match row.op:
            case "load":
                name, index = row.attr
                where = (self.index(e, points, values) for e in index)
                return load, (self.buffers[name], *where), {"mask": args[0]} if args else {}
            case "const":
                return const, (row.attr, row.dtype), {}
            case "scalar":
                return scalar, (self.floats[row.attr], row.dtype), {}
            case "index":
                return torch.as_tensor, (self.index(row.attr, points, values),), {}
            case "indirect":
                size, checked = row.attr
                return indirect, (args[0], self.size(size), checked, *args[1:]), {}
            case "to_dtype":
                return to_dtype, (args[0], row.dtype), {}
            case "round_to":
                return round_to, (args[0], row.attr), {}
        return op(row.op), tuple(args), {}

    def size(self, e: Expr) -> Any:
        """A size as a number or a node."""
        if e not in self._sizes:
            self._sizes[e] = self.index(self.canon(e), {}, ())
        return self._sizes[e]

    def index(self, e: Expr, points: Mapping[Sym, Any], values: Sequence[Any]) -> Any:
        """An expression as a number or a node."""
        total: Any = None
        for monomial, coefficient in e.terms:
            term: Any = coefficient if coefficient != 1 or not monomial else None
            for atom in monomial:
                found = self._atom(atom, points, values)
                term = found if term is None else self.graph.call_function(operator.mul, (term, found))
            total = term if total is None else self.graph.call_function(operator.add, (total, term))
        return 0 if total is None else total

    def _atom(self, atom: Any, points: Mapping[Sym, Any], values: Sequence[Any]) -> Any:
        if isinstance(atom, Sym):
            if atom.row is not None:
                return values[atom.row]
            return points[atom] if atom in points else self.env[atom]
        a, b = (self.index(e, points, values) for e in atom.args)
        return self.graph.call_function(_CALLS[atom.fn], (a, b))

    def _named(self, name: str, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        return self.graph.create_node("call_function", target, args, name=name)


def body_to_fx(body: LoopBody, dims: int) -> fx.GraphModule:
    """A loop's body as a function of its loop variables `i0 …`, then of sizes, scalars and buffers by their names.

    Loop variables are integers, or tensors that broadcast together; the result is the body's value there.
    """
    graph = fx.Graph()
    points = {Sym(f"i{d}", LOOP): graph.placeholder(f"i{d}") for d in range(dims)}
    known = _Inputs(graph)
    floats = {row.attr: graph.placeholder(row.attr) for row in body.rows if row.op == "scalar"}
    buffers: dict[str, Any] = {name: graph.placeholder(name) for name in dict.fromkeys(n for n, _ in body.loads())}
    values, _ = Builder(graph, known, floats, buffers).rows(body.rows, points)
    graph.output(values[body.result])
    return fx.GraphModule(torch.nn.Module(), graph)


class _Inputs(dict[Sym, Any]):
    """The placeholders of symbols, created on first use."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self._graph = graph

    def __missing__(self, s: Sym) -> Any:
        last = next((n for n in self._graph.nodes if n.op != "placeholder"), None)
        with self._graph.inserting_before(last) if last is not None else self._graph.inserting_after():
            self[s] = self._graph.placeholder(s.name)
        return self[s]


__all__ = ["Builder", "body_to_fx"]
