"""Recomputing cheap producers inside their readers.

A pointwise buffer that is read at an index which cannot line up with the reader's loops (broadcast, sliced, shifted,
under a mask) would need a kernel of its own. Where recomputing costs little, its rows are copied into the reader
instead, with the reader's index in place of its loop variables. Buffers nobody reads any more disappear later.

A producer may be the last of a chain, which would be copied as a whole: what counts is the cost of the chain, times
how often it is computed more than once. Else steps of a stencil would compute each step anew for each neighbour.
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
    indirect_symbol,
    is_checked,
    map_exprs,
    prune_with,
    renumber,
    renumber_expr,
    row_exprs,
)  # fmt: skip
from fuser.ir.sizes import INDIRECT, LOOP, Expr, Sym, expr, product, substitute, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.align import digits_of
from fuser.scheduler.nodes import Node, normalise, row_cost

CHEAP = 8  # operations a recomputed element may cost
FEW = 8  # a reader of at most one element in so many computes them itself, whatever they cost
AGAIN = 8  # readings of an element that is looked up, from which it is looked up once and kept in memory
# A value that follows from reductions by at least FEW_OPERATIONS is stored if at least MANY elements read it.
MANY, FEW_OPERATIONS = 64, 4
DEEP = 48  # operations that chains may cost for each element they make, beside those of the first time
REPEATS = 4  # times at most that an element counts which a reader computes along a loop of its own
COSTLY = 64  # what an element may cost that a scatter or scan computes itself
MOST_ROWS = 96  # rows a reader may have after it took in a producer


@dataclass(frozen=True)
class Producers:
    """Who computes which buffer, and how many points a loop nest has in the example."""

    by_buffer: Mapping[str, Node]
    hint: Callable[[Expr], int]
    stored: Collection[str] = ()  # buffers that are written to memory in any case
    shared: Collection[str] = ()  # buffers that loops read which no scan can join
    apart: bool = False  # whether what each row or column has one value of is computed with the reduction before it
    reductions: Collection[str] = ()  # the buffers that these make
    components: int = 0  # of a place, up to which one turn of a loop computes them all
    table_work: int = 0  # operations to spare from which what comes from indices alone lies in memory; 0: it never does
    evaluations: Mapping[str, float] = field(default_factory=dict)  # how often an element is computed if it is inlined

    def points(self, node: Node) -> int:
        """Points of the loops of `node` in the example."""
        return math.prod(max(self.hint(size), 1) for _, size in node.domain)

    def spares(self, node: Node) -> bool:
        """Whether who reads the result of `node`, which lies in memory, spares that of another which then need not."""
        if node.buffer.name not in self.stored:
            return False
        behind = [self.by_buffer[b] for b in node.reads if b in self.by_buffer and b not in self.stored]
        return any(n.reads and self.points(n) >= self.points(node) for n in behind)

    def computed_together(self, reader: Node, innermost: Sym, producer: Node) -> bool:
        """Whether one turn of the reader's loop computes all its components, for which an element of `producer` is one.

        `scheduler.choices` takes the innermost loop away then.
        """
        count = reader.sizes()[innermost].as_int()
        if count is None or count > self.components or reader.is_reduction or not reader.identity_store:
            return False
        return self.points(reader) <= count * self.points(producer)

    def is_deep(self, node: Node) -> bool:
        """Whether inlining repeats more than DEEP operations: those from memory to the result, times the repeats."""
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


def inline_cheap(
    nodes: list[Node],
    hint: Callable[[Expr], int],
    stored: Collection[str] = (),
    scans_share: bool = False,
    table_work: int = 0,
    apart: bool = False,
    components: int = 0,
) -> None:
    """Copy cheap producers into readers that cannot line up with them. `nodes` are in order of execution.

    `scans_share`: what is not cheap and other loops read too is not computed a second time by a scan.
    `table_work`, `apart`: as in `Target`. `components`: as in `Producers`.
    """
    makers = {n.buffer.name: n for n in nodes if n.identity_store and not n.is_reduction and not n.buffer.table}
    shared = {b for n in nodes if n.ordered is None for b in n.reads} if scans_share else ()
    reductions = {n.buffer.name for n in nodes if n.is_reduction}
    producers = Producers(makers, hint, stored, shared, apart, reductions, components, table_work)
    producers = replace(producers, evaluations=_evaluations(nodes, producers))
    for node in nodes:
        if node.contracts:
            continue
        if any(_should_inline(producers, node, r, node.rows) for r in node.rows if r.op == "load"):
            _inline_into(node, producers)


def _evaluations(nodes: Sequence[Node], producers: Producers) -> dict[str, float]:
    """By buffer: once for all readers that line up with its loops, and for each other as often as that has points."""
    aligned: set[str] = set()
    out: dict[str, float] = {}
    for node in nodes:
        sizes = node.sizes()
        for row in node.rows:
            producer = producers.by_buffer.get(row.attr[0]) if row.op == "load" else None
            if producer is None:
                continue
            name = producer.buffer.name
            if not row.args and _lines_up(producer, row.attr[1], sizes):
                aligned.add(name)
            else:
                ratio = producers.points(node) / producers.points(producer)
                out[name] = out.get(name, 0.0) + min(ratio, REPEATS)
    for name in aligned & out.keys():
        out[name] += 1
    return out


def _lines_up(producer: Node, index: tuple[Expr, ...], sizes: Mapping[Sym, Expr]) -> bool:
    """Whether each loop of a reader, whose loops have these `sizes`, is one of the producer's, and all of it."""
    digits = [digits_of(e, sizes) for e in index]
    whole = all(
        d is not None and product(s for _, s in d) == n for d, n in zip(digits, producer.buffer.size, strict=True)
    )
    return whole and {v for d in digits if d is not None for v, _ in d} == set(sizes)


def _should_inline(producers: Producers, reader: Node, load: Row, rows: Sequence[Row]) -> bool:
    """Whether `reader`, whose rows are `rows` by now, computes what it reads by `load` itself, if it has room."""
    producer = producers.by_buffer.get(load.attr[0])
    if producer is None or producer is reader:
        return False
    if not producer.reads and (reader.ordered is not None or not _is_table(producers, producer, reader)):
        return True
    if not reads_all_checked(producer, load, reader.sizes()):
        return False
    if reader.ordered is not None:  # it shares its loops with nobody
        dear = producer.cost() > CHEAP or any(r.op == "indirect" for r in producer.rows)
        if dear and reader.ordered.kind == "scan" and load.attr[0] in producers.shared:
            return False
        return producer.cost() <= COSTLY
    index: tuple[Expr, ...] = load.attr[1]
    if not load.args and _lines_up(producer, index, reader.sizes()):
        return False  # the scheduler can line the two up
    if producers.points(reader) * FEW > producers.points(producer) and producers.spares(producer):
        return False
    read = _varies_along(rows, index)
    innermost = next(iter(_inwards(reader)), None)
    # Once for a row; where rows are turned, what varies along them alone is made once for all, as generators do.
    hoisted = innermost not in read or (reader.buffer.order is not None and read == {innermost})
    together = innermost is not None and producers.computed_together(reader, innermost, producer)
    hoisted = hoisted and (innermost in read or innermost is None or together or _turns(producers, reader, read) >= FEW)
    if producers.points(reader) >= AGAIN * producers.points(producer) and _looks_up_along(producer, index, innermost):
        return False
    if producers.apart and not reader.is_reduction and _is_of_reductions(producers, producer, reader):
        return False
    if together and load.args and _varies_along(rows, (indirect_symbol(load.args[0]),)) == {innermost}:
        return True  # a piece of a join: only the turn of its own components computes it
    few = producers.points(reader) * FEW <= producers.points(producer)
    return hoisted or few or (producer.cost() <= CHEAP and not producers.is_deep(producer))


def _is_of_reductions(producers: Producers, producer: Node, reader: Node) -> bool:
    """Whether what reductions leave is computed on by itself, in the kernel of one, and read for many elements each."""
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
    """Whether what comes from indices alone is worth memory: each element is dear, and is read many times."""
    points, cost = producers.points(producer), producer.cost()
    again = producers.points(reader) - points
    many = again >= (AGAIN - 1) * points and again * cost >= producers.table_work
    return producers.table_work > 0 and cost > CHEAP and many


def _inwards(reader: Node) -> list[Sym]:
    """The loops, from the one that runs over neighbours in the memory of the result to the outermost."""
    loops = [v for v, _ in reader.domain][::-1]
    if reader.is_reduction or not reader.identity_store or reader.buffer.order is None:
        return loops
    found: dict[Sym, None] = {}
    for dim in reversed(reader.buffer.order):
        own = symbols(reader.store_index[dim]) & reader.sizes().keys()
        found.update(dict.fromkeys(sorted(own, key=lambda s: s.name, reverse=True)))
    return [*found, *(v for v in loops if v not in found)]


def _turns(producers: Producers, reader: Node, read: Set[Sym]) -> int:
    """How many points in a row share what varies along the loops `read`."""
    sizes = reader.sizes()
    shared = itertools.takewhile(lambda v: v not in read, _inwards(reader))
    return math.prod(max(producers.hint(sizes[v]), 1) for v in shared)


def _looks_up_along(producer: Node, index: tuple[Expr, ...], innermost: Sym | None) -> bool:
    """Whether a reader at `index` would look up another place for each turn of its innermost loop."""
    body = producer.rows
    found = (_varies_along(body, (expr(indirect_symbol(n)),)) for n, r in enumerate(body) if r.op == "indirect")
    along = set[Sym]().union(*found)
    pairs = zip(producer.store_index, index, strict=True)
    return any(innermost in symbols(e) for store, e in pairs if not along.isdisjoint(symbols(store)))


def _varies_along(body: Sequence[Row], index: tuple[Expr, ...]) -> set[Sym]:
    """The loops along which an index varies, by itself or by what rows of `body` look up for it."""
    pending = {s for e in index for s in symbols(e)}
    rows = [int(s.name[1:]) for s in pending if s.kind == INDIRECT]
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
    """Whether a reader with loops of `sizes` reads, by `load`, at all places where `producer` checks an index.

    Eager checks each of them, so whoever reads only some must leave the others' checks to the producer.
    """
    checked = [n for n, r in enumerate(producer.rows) if is_checked(r)]
    if not checked:
        return True
    rows = prune_with(producer.rows, checked[0], [indirect_symbol(n) for n in checked])[0].rows
    deciding = {s for r in rows for e in row_exprs(r) for s in symbols(e) if s.kind == LOOP}
    index: tuple[Expr, ...] = load.attr[1]
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
    """Have `reader` compute what it loads of the buffers that `makers` make, and what these load of each other."""
    out = Recorder()
    _replace(reader, out, _copied(reader, _Copies(out, lambda row: makers.get(row.attr[0])).add))


def _inline_into(reader: Node, producers: Producers) -> None:
    """Copy producers into `reader`, each for all loads that want it or for none.

    If there is room for some of these loads only, the buffer has to be in memory for the others, and all read it there.
    """
    refused: set[str] = set()
    while mixed := _try_to_inline(reader, producers, refused):
        refused |= mixed


def _try_to_inline(reader: Node, producers: Producers, refused: Collection[str]) -> set[str]:
    """Copy producers into `reader`, but for those of `refused`; unless some loads of a buffer found no room: these."""
    out, inlined, crowded = Recorder(), set[str](), set[str]()

    def producer_of(load: Row) -> Node | None:
        name = load.attr[0]
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
    """Put the rows of `reader` somewhere by `add`, which may put others in their place; returns their numbers there."""
    number: dict[int, int] = {}
    for n, row in enumerate(reader.rows):
        number[n] = add(renumber(row, number))
    return number


def _replace(reader: Node, out: Recorder, number: Mapping[int, int]) -> None:
    """The rows of `out` in place of those of `reader`, which have these numbers there."""
    store = tuple(renumber_expr(e, number) for e in reader.store_index)
    body, reader.store_index = prune_with(out.rows, number[reader.result], store)
    reader.rows, reader.result = list(body.rows), body.result
    normalise(reader)
    reader.update_reads()


class _Copies:
    """Rows added to `out`, where a load for which `producer_of` names a producer becomes the producer's rows.

    Equal loads are copied once: of a chain of producers, each of which reads the one before several times, the number
    of copies would double at each link.
    """

    def __init__(self, out: Recorder, producer_of: Callable[[Row], Node | None]) -> None:
        self._out, self._producer_of = out, producer_of
        self._copied: dict[Row, int] = {}

    def add(self, row: Row) -> int:
        """Add a row, or what it loads; and so on for what that loads. Returns its number."""
        if row.op != "load":
            return self._out.add_row(row).row
        if row not in self._copied:
            self._copied[row] = self._load(row)
        return self._copied[row]

    def _load(self, row: Row) -> int:
        producer = self._producer_of(row)
        if producer is None:
            return self._out.add_row(row).row
        return copy_rows(self._out, producer, row.attr[1], row.args[0] if row.args else None, self.add)


def copy_rows(
    out: Recorder, producer: Node, index: tuple[Expr, ...], mask: int | None, add: Callable[[Row], int] | None = None
) -> int:
    """Add `producer`'s rows, evaluated at `index`, to `out`; loads only where `mask` holds. Returns the result row."""
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
    """Loop variables from `store == e`, where `store` is a mixed-radix number of loop variables."""
    digits = digits_of(store, sizes)
    assert digits is not None
    out: dict[Sym, Expr] = {}
    rest = e
    for position, (v, size) in enumerate(reversed(digits)):
        last = position == len(digits) - 1
        out[v] = rest if last else rest % size
        rest = rest // size
    return out


__all__ = ["copy_rows", "expr", "inline_buffers", "inline_cheap", "reads_all_checked", "row_cost"]
