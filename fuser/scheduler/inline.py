"""Inlines cheap producers into their readers, which recompute them.

A pointwise buffer may be read at an index that cannot line up with the reader's loops (broadcast, sliced, shifted,
under a mask). It would need a kernel of its own. If recomputation costs little, its rows are copied into the reader
instead, with the reader's index for its loop variables. Buffers without readers are dropped later.

A producer may be the last of a chain, which would be copied as a whole. The cost of the chain counts, times how often
it is computed more than once. Otherwise each step of a stencil would recompute the step before for each neighbour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import field, replace

import torch

from fuser.ir.loop_body import (
    Recorder,
    Row,
    indirect_rows,
    is_checked,
    loads_in,
    map_exprs,
    prune_with,
    renumber,
    renumber_expr,
    row_exprs,
)  # fmt: skip
from fuser.ir.sizes import LOOP, Expr, Sym, expr, indirect, product, substitute, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.align import digits_of
from fuser.scheduler.nodes import Node, normalise
from fuser.targets import Target

CHEAP = 8  # operations a recomputed element may cost
FEW = 8  # a reader with at most 1/FEW of the producer's points computes its elements itself, whatever they cost
AGAIN = 8  # readings per gathered element from which it is computed once and stored
# A value computed from reductions by at least FEW_OPERATIONS is stored if each element is read at least MANY times.
MANY, FEW_OPERATIONS = 64, 4
DEEP = 48  # operations per element that repeated evaluations of a chain may cost in all
REPEATS = 4  # upper bound on the evaluations counted for an element along a reader's own loop
COSTLY = 64  # operations that an element may cost if a scatter or scan recomputes it
MOST_ROWS = 96  # rows that a reader may have after inlining


@dataclass(frozen=True)
class Producers:
    """The producer of each buffer by name; `hint` gives a size's value in the example, `target` is the device."""

    by_buffer: Mapping[str, Node]
    hint: Callable[[Expr], int]
    target: Target
    stored: Collection[str] = ()  # buffers that are written to memory in any case
    shared: Collection[str] = ()  # buffers that other loops than scatters and scans read
    reductions: Collection[str] = ()  # the buffers that reductions make
    evaluations: Mapping[str, float] = field(default_factory=dict)  # how often an element is computed if it is inlined

    def points(self, node: Node) -> int:
        """Number of points of the node's loops in the example."""
        return math.prod(max(self.hint(size), 1) for _, size in node.domain)

    def spares(self, node: Node) -> bool:
        """Whether materialising `node` lets one of its producers, at least as large, stay unmaterialised."""
        if node.buffer.name not in self.stored:
            return False
        behind = [self.by_buffer[b] for b in node.reads if b in self.by_buffer and b not in self.stored]
        return any(n.reads and self.points(n) >= self.points(node) for n in behind)

    def computed_together(self, reader: Node, innermost: Sym, producer: Node) -> bool:
        """Whether one iteration of the reader's loop computes all components that share one element of `producer`.

        `scheduler.choices` then writes out the innermost loop.
        """
        count = reader.sizes()[innermost].as_int()
        if count is None or count > self.target.components or reader.is_reduction or not reader.identity_store:
            return False
        return self.points(reader) <= count * self.points(producer)

    def is_deep(self, node: Node) -> bool:
        """Whether inlining repeats more than DEEP operations: those of the chain times its repeated evaluations."""
        again = self.evaluations.get(node.buffer.name, 1.0) - 1
        if again <= 0:
            return False
        cost, seen, pending = 0, {node.buffer.name}, [node]
        while pending and cost * again <= DEEP:
            found = pending.pop()
            cost += found.cost()
            behind = [b for b in found.reads if b in self.by_buffer and b not in seen and b not in self.stored]
            seen.update(behind)
            pending += [self.by_buffer[b] for b in behind]
        return cost * again > DEEP


def inline_cheap(nodes: list[Node], hint: Callable[[Expr], int], target: Target, stored: Collection[str]) -> None:
    """Copy cheap producers into readers that cannot line up with them. `nodes` are in order of execution."""
    makers = {n.buffer.name: n for n in nodes if n.identity_store and not n.is_reduction and not n.buffer.table}
    shared = {b for n in nodes if n.ordered is None for b in n.reads} if target.scans_alone else ()
    reductions = {n.buffer.name for n in nodes if n.is_reduction}
    producers = Producers(makers, hint, target, stored, shared, reductions)
    producers = replace(producers, evaluations=_evaluations(nodes, producers))
    for node in nodes:
        if node.contracts:
            continue
        if any(_should_inline(producers, node, r, node.rows) for r in loads_in(node.rows)):
            _inline_into(node, producers)


def _evaluations(nodes: Sequence[Node], producers: Producers) -> dict[str, float]:
    """Evaluations per element by buffer: 1 for all aligned readers, and for every other reader the ratio of points."""
    aligned: set[str] = set()
    out: dict[str, float] = {}
    for node in nodes:
        sizes = node.sizes()
        for row in node.rows:
            producer = producers.by_buffer.get(row.buffer) if row.op == "load" else None
            if producer is None:
                continue
            name = producer.buffer.name
            if not row.args and _lines_up(producer, row.indices, sizes):
                aligned.add(name)
            else:
                ratio = producers.points(node) / producers.points(producer)
                out[name] = out.get(name, 0.0) + min(ratio, REPEATS)
    for name in aligned & out.keys():
        out[name] += 1
    return out


def _lines_up(producer: Node, index: tuple[Expr, ...], sizes: Mapping[Sym, Expr]) -> bool:
    """Whether a reader with loops of these `sizes` reads the whole of `producer`, along all its loops."""
    digits = [digits_of(e, sizes) for e in index]
    whole = all(
        d is not None and product(s for _, s in d) == n for d, n in zip(digits, producer.buffer.size, strict=True)
    )
    return whole and {v for d in digits if d is not None for v, _ in d} == set(sizes)


def _should_inline(producers: Producers, reader: Node, load: Row, rows: Sequence[Row]) -> bool:
    """Whether `reader`, with `rows` by now, computes the element of `load` itself, provided that it has room."""
    producer = producers.by_buffer.get(load.buffer)
    if producer is None or producer is reader:
        return False
    if not producer.reads and (reader.ordered is not None or not _is_table(producers, producer, reader)):
        return True
    if not reads_all_checked(producer, load, reader.sizes()):
        return False
    if reader.ordered is not None:  # a scatter or scan shares its loops with no other node
        dear = producer.cost() > CHEAP or any(r.op == "indirect" for r in producer.rows)
        if dear and reader.ordered.kind == "scan" and load.buffer in producers.shared:
            return False
        return producer.cost() <= COSTLY
    index: tuple[Expr, ...] = load.indices
    if not load.args and _lines_up(producer, index, reader.sizes()):
        return False  # the scheduler can line the two up
    if producers.points(reader) * FEW > producers.points(producer) and producers.spares(producer):
        return False
    read = _varies_along(rows, index)
    innermost = next(iter(_inwards(reader)), None)
    # Hoisted: computed once per row. With a permuted result, a value along the innermost loop alone is computed once.
    hoisted = innermost not in read or (reader.buffer.order is not None and read == {innermost})
    together = innermost is not None and producers.computed_together(reader, innermost, producer)
    hoisted = hoisted and (innermost in read or innermost is None or together or _turns(producers, reader, read) >= FEW)
    if producers.points(reader) >= AGAIN * producers.points(producer) and _looks_up_along(producer, index, innermost):
        return False
    if producers.target.apart and not reader.is_reduction and _is_of_reductions(producers, producer, reader):
        return False
    if together and load.args and _varies_along(rows, (expr(indirect(load.args[0])),)) == {innermost}:
        return True  # a piece of a join: only its own components' iterations compute it
    few = producers.points(reader) * FEW <= producers.points(producer)
    return hoisted or few or (producer.cost() <= CHEAP and not producers.is_deep(producer))


def _is_of_reductions(producers: Producers, producer: Node, reader: Node) -> bool:
    """Whether a costly value computed from reductions is better stored by their kernel: MANY elements read each."""
    if producers.points(reader) < MANY * producers.points(producer) or producer.cost() < FEW_OPERATIONS:
        return False
    seen, pending = set[str](), [*producer.reads]
    while pending:
        name = pending.pop()
        if name in seen or name in producers.reductions:
            continue
        if name not in producers.by_buffer or not producers.by_buffer[name].reads:
            return False
        seen.add(name)
        pending += producers.by_buffer[name].reads
    return bool(producer.reads)


def _is_table(producers: Producers, producer: Node, reader: Node) -> bool:
    """Whether a value of indices alone is worth memory: each element is costly and is read many times."""
    points, cost = producers.points(producer), producer.cost()
    again = producers.points(reader) - points
    many = again >= (AGAIN - 1) * points and again * cost >= producers.target.table_work
    return producers.target.table_work > 0 and cost > CHEAP and many


def _inwards(reader: Node) -> list[Sym]:
    """The loops, innermost first: from the one along which the result is contiguous to the outermost."""
    loops = [v for v, _ in reader.domain][::-1]
    if reader.is_reduction or not reader.identity_store or reader.buffer.order is None:
        return loops
    found: dict[Sym, None] = {}
    for dim in reversed(reader.buffer.order):
        own = symbols(reader.store_index[dim]) & reader.sizes().keys()
        found.update(dict.fromkeys(sorted(own, key=lambda s: s.name, reverse=True)))
    return [*found, *(v for v in loops if v not in found)]


def _turns(producers: Producers, reader: Node, read: Set[Sym]) -> int:
    """Number of consecutive points that share the values which vary along the loops `read`."""
    sizes = reader.sizes()
    shared = itertools.takewhile(lambda v: v not in read, _inwards(reader))
    return math.prod(max(producers.hint(sizes[v]), 1) for v in shared)


def _looks_up_along(producer: Node, index: tuple[Expr, ...], innermost: Sym | None) -> bool:
    """Whether a reader at `index` would gather with another index in each iteration of its innermost loop."""
    body = producer.rows
    found = (_varies_along(body, (expr(indirect(n)),)) for n, r in enumerate(body) if r.op == "indirect")
    along = set[Sym]().union(*found)
    pairs = zip(producer.store_index, index, strict=True)
    return any(innermost in symbols(e) for store, e in pairs if not along.isdisjoint(symbols(store)))


def _varies_along(body: Sequence[Row], index: tuple[Expr, ...]) -> set[Sym]:
    """The loops along which an index varies, directly or by the gathered indices that rows of `body` compute."""
    pending = {s for e in index for s in symbols(e)}
    rows = [s.row for s in pending if s.row is not None]
    seen: set[int] = set()
    while rows:
        n = rows.pop()
        if n not in seen:
            seen.add(n)
            row = body[n]
            rows += [*row.args, *indirect_rows(row)]
            pending |= {s for e in row_exprs(row) for s in symbols(e)}
    return {s for s in pending if s.kind == LOOP}


def reads_all_checked(producer: Node, load: Row, sizes: Mapping[Sym, Expr]) -> bool:
    """Whether `load`, in a reader with loops of `sizes`, covers every index at which `producer` checks bounds.

    Eager checks each index, so a reader of only a part must leave the checks to the producer's own loops.
    """
    checked = [n for n, r in enumerate(producer.rows) if is_checked(r)]
    if not checked:
        return True
    rows = prune_with(producer.rows, checked[0], [expr(indirect(n)) for n in checked])[0].rows
    deciding = {s for r in rows for e in row_exprs(r) for s in symbols(e) if s.kind == LOOP}
    index: tuple[Expr, ...] = load.indices
    seen: list[Sym] = []
    for store, e, n in zip(producer.store_index, index, producer.buffer.size, strict=True):
        if deciding.isdisjoint(symbols(store)):
            continue
        digits = digits_of(e, sizes)
        if digits is None or product(s for _, s in digits) != n:
            return False
        seen += [v for v, _ in digits]
    return not load.args and len(seen) == len(set(seen))


def inline_buffers(reader: Node, makers: Mapping[str, Node]) -> None:
    """Inline into `reader` the buffers that `makers` compute, and those that these load in turn."""
    out = Recorder()
    _replace(reader, out, _copied(reader, _Copies(out, lambda row: makers.get(row.buffer)).add))


def _inline_into(reader: Node, producers: Producers) -> None:
    """Copy producers into `reader`, each for all its loads or for none.

    If only some of a buffer's loads can be inlined, the others need the buffer in memory, and all loads read it there.
    """
    refused: set[str] = set()
    while mixed := _try_to_inline(reader, producers, refused):
        refused |= mixed


def _try_to_inline(reader: Node, producers: Producers, refused: Collection[str]) -> set[str]:
    """Copy producers but `refused` into `reader`, unless a buffer has room for only some of its loads: return these."""
    out, inlined, crowded = Recorder(), set[str](), set[str]()

    def producer_of(load: Row) -> Node | None:
        name = load.buffer
        if name in refused or not _should_inline(producers, reader, load, out.rows):
            return None
        producer = producers.by_buffer[name]
        fits = not producer.reads or len(out.rows) + len(producer.rows) <= MOST_ROWS
        (inlined if fits else crowded).add(name)
        return producer if fits else None

    number = _copied(reader, _Copies(out, producer_of).add)
    mixed = inlined & crowded
    if not mixed:
        _replace(reader, out, number)
    return mixed


def _copied(reader: Node, add: Callable[[Row], int]) -> dict[int, int]:
    """Add the rows of `reader` by `add`, which may add others instead; returns the new number of each row."""
    number: dict[int, int] = {}
    for n, row in enumerate(reader.rows):
        number[n] = add(renumber(row, number))
    return number


def _replace(reader: Node, out: Recorder, number: Mapping[int, int]) -> None:
    """Replace the rows of `reader` by those of `out`; `number` gives each old row's number there."""
    store = tuple(renumber_expr(e, number) for e in reader.store_index)
    body, reader.store_index = prune_with(out.rows, number[reader.result], store)
    reader.rows, reader.result = list(body.rows), body.result
    normalise(reader)
    reader.update_reads()


class _Copies:
    """Adds rows to `out`, and copies a producer's rows for each load for which `producer_of` names a producer.

    Equal loads are copied once. Otherwise, in a chain of producers each of which reads its predecessor twice, the
    number of copies would double at each link.
    """

    def __init__(self, out: Recorder, producer_of: Callable[[Row], Node | None]) -> None:
        self._out, self._producer_of = out, producer_of
        self._copied: dict[Row, int] = {}

    def add(self, row: Row) -> int:
        """The number of `row` in `out`, or of the copied value if it is a load of a producer."""
        if row.op != "load":
            return self._out.add_row(row).row
        if row not in self._copied:
            self._copied[row] = self._load(row)
        return self._copied[row]

    def _load(self, row: Row) -> int:
        producer = self._producer_of(row)
        if producer is None:
            return self._out.add_row(row).row
        return copy_rows(self._out, producer, row.indices, row.args[0] if row.args else None, self.add)


def copy_rows(
    out: Recorder, producer: Node, index: tuple[Expr, ...], mask: int | None, add: Callable[[Row], int] | None = None
) -> int:
    """Add the rows of `producer` at `index` to `out`, with loads masked by `mask`. Returns the result row's number."""
    variables = {v for v, _ in producer.domain}
    mapping: dict[Sym, Expr] = {}
    for store, e in zip(producer.store_index, index):
        mapping.update(_solve(store, e, producer.sizes()))
    assert set(mapping) >= variables, "an identity store covers every loop variable"
    number: dict[int, int] = {}
    for n, row in enumerate(producer.rows):
        if row_exprs(row):
            row = map_exprs(row, lambda e: substitute(renumber_expr(e, number), mapping))
        args = [number[a] for a in row.args]
        if mask is not None and row.op in ("load", "indirect"):
            own = 0 if row.op == "load" else 1
            if len(args) > own:
                args[own] = out.add_row(Row("logical_and", (args[own], mask), torch.bool)).row
            else:
                args.append(mask)
        moved = Row(row.op, tuple(args), row.dtype, row.attr)
        number[n] = add(moved) if add is not None else out.add_row(moved).row
    return number[producer.result]


def _solve(store: Expr, e: Expr, sizes: Mapping[Sym, Expr]) -> dict[Sym, Expr]:
    """The loop variables' values for which `store == e`, where `store` is a mixed-radix number of loop variables."""
    digits = digits_of(store, sizes)
    assert digits is not None
    out: dict[Sym, Expr] = {}
    rest = e
    for position, (v, size) in enumerate(reversed(digits)):
        last = position == len(digits) - 1
        out[v] = rest if last else rest % size
        rest = rest // size
    return out


__all__ = ["copy_rows", "inline_buffers", "inline_cheap", "reads_all_checked"]
