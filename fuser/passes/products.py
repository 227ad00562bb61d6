"""Reads the two products of attention in all spellings: the role of each operand, and the order of its dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fuser.lazy_dataclasses import dataclass
from fuser.passes.calls import Call, shape_of


class Mismatch(Exception):
    """Raised for a chain that is not attention, or cannot be rewritten safely."""


@dataclass(frozen=True)
class Factor:
    """An operand. `order`: for each dim of (batch ..., rows, width), the dim of `node`; None: repeated."""

    node: fx.Node
    order: tuple[int | None, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the dims are those of the node, in order."""
        return self.order == tuple(range(len(self.order)))

    def swapped(self) -> Factor:
        """The factor with rows and width swapped."""
        return Factor(self.node, (*self.order[:-2], self.order[-1], self.order[-2]))

    def of(self, node: fx.Node, swap: bool) -> Factor:
        """The factor for `node`, the source of `self.node`; `swap`: through a swap of the last two dims."""
        rank = len(shape_of(node) or ())
        change = {rank - 1: rank - 2, rank - 2: rank - 1} if swap else {}
        return Factor(node, tuple(d if d is None else change.get(d, d) for d in self.order))


def _operands(call: Call) -> tuple[Any, Any]:
    """Both operands of a product of matrices."""
    names = ("input", ("other", "mat2", "tensor2"))
    other = next((call.kwargs[n] for n in names[1] if n in call.kwargs), None)
    found = (*call.args, other)[:2] if len(call.args) < 2 else call.args
    if len(found) != 2 or len(call.args) + len(call.kwargs) != 2:
        raise Mismatch
    return found[0], found[1]


def _is_einsum(call: Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], str)


def _terms(call: Call) -> tuple[list[str], str, list[fx.Node]]:
    """The letters of an einsum's two operands and of its result, and the operands. Dims under dots get letters, too."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2 or len(operands) != 2 or call.kwargs:
        raise Mismatch
    hidden = {len(shape_of(o) or ()) - len(t.replace("...", "")) for o, t in zip(operands, terms) if "..." in t}
    if len(hidden) > 1 or hidden and min(hidden) < 0:
        raise Mismatch
    dots = "0123456789"[: max(hidden, default=0)]
    terms, out = [t.replace("...", dots) for t in terms], out.replace("...", dots)
    if any(len(set(t)) != len(t) for t in (*terms, out)) or not all(isinstance(o, fx.Node) for o in operands):
        raise Mismatch
    if any(len(t) != len(shape_of(o) or ()) for t, o in zip(terms, operands)):
        raise Mismatch
    return terms, out, operands


def _ordered(node: fx.Node, term: str, wanted: Sequence[str]) -> Factor:
    if set(term) - set(wanted):
        raise Mismatch
    return Factor(node, tuple(term.index(c) if c in term else None for c in wanted))


def scores_product(call: Call, rank: int) -> tuple[Factor, Factor]:
    """Queries and keys, each (batch ..., tokens, width), of a product whose result is (batch ..., queries, keys)."""
    if not _is_einsum(call):
        q, k = _operands(call)
        plain = tuple(range(rank))
        if not all(isinstance(o, fx.Node) and len(shape_of(o) or ()) == rank for o in (q, k)):
            raise Mismatch
        return Factor(q, plain), Factor(k, plain).swapped()
    terms, out, operands = _terms(call)
    summed = set("".join(terms)) - set(out)
    if len(summed) != 1 or len(out) != rank or not all(summed <= set(t) for t in terms):
        raise Mismatch
    (width,) = summed
    *batch, row, column = list(out)
    if column in terms[0]:
        terms, operands = terms[::-1], operands[::-1]
    if row not in terms[0] or column in terms[0] or row in terms[1] or column not in terms[1]:
        raise Mismatch
    if not set(batch) <= set(terms[0]):
        raise Mismatch
    k = _ordered(operands[1], terms[1], [*batch, column, width])
    return _ordered(operands[0], terms[0], [*batch, row, width]), k


def weighted_product(call: Call, weights: fx.Node) -> tuple[Factor, tuple[int, ...]]:
    """The values in a product with `weights` (batch ..., queries, keys), and the order of the result's dims."""
    rank = len(shape_of(weights) or ())
    if not _is_einsum(call):
        first, v = _operands(call)
        if first is not weights or v is weights or not isinstance(v, fx.Node) or len(shape_of(v) or ()) != rank:
            raise Mismatch
        return Factor(v, tuple(range(rank))), tuple(range(rank))
    terms, out, operands = _terms(call)
    if operands[1] is weights:
        terms, operands = terms[::-1], operands[::-1]
    if operands[0] is not weights or operands[1] is weights:
        raise Mismatch
    *batch, row, column = list(terms[0])
    others = set(terms[1]) - set(terms[0])
    if len(others) != 1 or row in terms[1] or column not in terms[1] or set(out) != {*batch, row, *others}:
        raise Mismatch
    (width,) = others
    made = [*batch, row, width]
    return _ordered(operands[1], terms[1], [*batch, column, width]), tuple(made.index(c) for c in out)
