"""Builds a kernel's plan: rows, the axis that runs over lanes, phases, stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import torch

from fuser.ir.loop_body import Recorder, Row, indirect_rows, loads_in, map_exprs, renumber, renumber_expr, row_exprs
from fuser.ir.ranges import recombined, simplify_divmod
from fuser.ir.sizes import (
    INDIRECT,
    LOOP,
    ONE,
    ZERO,
    Expr,
    Sym,
    coefficient,
    expr,
    floordiv,
    minimum,
    product,
    rows_in,
    substitute,
    symbols,
)  # fmt: skip
from fuser.lowering.context import LoweringContext
from fuser.ops import REDUCTIONS, SCANS, compute_dtype
from fuser.scheduler.choices import LARGE, write_out
from fuser.scheduler.contraction import contraction_of
from fuser.scheduler.kernel_plan import Axis, KernelPlan, Reduce, Store
from fuser.scheduler.neighbours import compute_several
from fuser.scheduler.nodes import Node, Ordered, row_cost
from fuser.scheduler.short_axes import write_out_reducing
from fuser.scheduler.traversal import RUN, Kernel
from fuser.targets import Target


class _Builder:
    """Collects the fused rows of one kernel."""

    def __init__(self, ctx: LoweringContext, kernel: Kernel, buffers: dict[str, tuple[Expr, ...]]) -> None:
        self.ctx = ctx
        self.kernel = kernel
        self.strides = buffers
        self.out = Recorder()
        self.values: dict[str, int] = {}
        self.stores: list[tuple[str, Expr, int]] = []
        self.reductions: list[tuple[str, int, torch.dtype]] = []

    def add(self, node: Node, is_stored: Callable[[str], bool]) -> None:
        """Append a node's rows, then its store or reduction."""
        mapping = self.kernel.maps[node.name]
        sizes = self.kernel.axes.size
        number: dict[int, int] = {}

        def moved(e: Expr) -> Expr:
            return recombined(simplify_divmod(renumber_expr(substitute(e, mapping), number), sizes))

        for n, row in enumerate(node.rows):
            if row.op == "load":
                if row.buffer in self.values:
                    number[n] = self.values[row.buffer]
                    continue
                address = flat_address(row.indices, self.strides[row.buffer])
                row = Row("load", row.args, row.dtype, (row.buffer, (address,)))
            if row_exprs(row):
                row = map_exprs(row, moved)
            args = tuple(number[a] for a in row.args)
            number[n] = self.out.add_row(Row(row.op, args, row.dtype, row.attr)).row
        result = number[node.result]
        if node.is_reduction:
            self.reductions.append((node.kind, result, node.buffer.dtype))
            dtype = compute_dtype(node.buffer.dtype)
            result = self.out.add_row(Row("reduced", (), dtype, len(self.reductions) - 1)).row
        if node.identity_store:
            self.values[node.buffer.name] = result
        if is_stored(node.buffer.name):
            address = moved(flat_address(node.store_index, self.strides[node.buffer.name]))
            self.stores.append((node.buffer.name, address, result))


def flat_address(index: tuple[Expr, ...], stride: tuple[Expr, ...]) -> Expr:
    """The element offset of a logical index."""
    out = ZERO
    for i, s in zip(index, stride):
        out = out + i * s
    return out


def build_plan(
    ctx: LoweringContext, kernel: Kernel, strides: dict[str, tuple[Expr, ...]], dtypes: dict[str, torch.dtype],
    is_stored: Callable[[str], bool],
) -> KernelPlan | None:  # fmt: skip
    """The plan of a kernel; None if no result of it is needed outside."""
    builder = _Builder(ctx, kernel, strides)
    for node in kernel.nodes:
        builder.add(node, is_stored)
    if not builder.stores:
        return None
    ordered = kernel.nodes[0].ordered
    if ordered is not None:
        return _ordered_plan(ctx, kernel, ordered, builder, dtypes)
    rows, stores, reductions = _live(builder)
    axes = [Axis(a, kernel.axes.size[a], a in kernel.reduced, ctx.hint(kernel.axes.size[a])) for a in kernel.axes.order]
    run = 1
    gone: Sym | None = axes[0].sym if axes and ctx.target.written_out else None
    while gone is not None:
        if reductions:
            found = write_out_reducing(ctx, axes, rows, stores, reductions)
            gone, builder.out.rows, builder.stores, builder.reductions = found
        else:
            sizes = [(a.sym, a.size) for a in axes]
            gone, builder.out.rows, builder.stores = write_out(ctx, sizes, rows, stores, run)
        run *= next((a.hint for a in axes if a.sym is gone), 1)
        axes = [a for a in axes if a.sym is not gone]
        rows, stores, reductions = _live(builder)
    if ctx.target.neighbours and not reductions:
        axes, rows, stores = compute_several(ctx, axes, rows, stores)
    axes, rows, stores = _order_and_merge(ctx, axes, rows, stores)
    short = _short_row(rows, reductions, dtypes, ctx.target) if ctx.target.vector_bytes else 0
    vector = _column_axis(axes, rows, reductions, dtypes)
    if vector is None and ctx.target.square_tiles and reductions:
        vector = _crossed(axes, rows)
    vector = vector or _choose_vector(axes, rows, stores, reductions, short, run)
    across = next((a for a in axes if a.sym == vector and not a.reduced), None)
    along = _choose_vector(axes, rows, stores, reductions, 0) if across is not None and short else None
    for a in axes:
        most = short - 1 if a.hint < short else LONG_ROW
        if a.reduced and a.sym == along and a.hint <= most:
            ctx.assume("le", a.size, most)  # vectors run across rows that are short; longer rows have another kernel
    if ctx.target.vector_bytes:
        row = along or _choose_vector(axes, rows, stores, reductions, 0, run)
        reduced = short > 0 and any(a.sym == row and a.reduced for a in axes)
        _assume_length(ctx, axes, row, (short, REDUCED) if reduced else ())
    thin = next((a for a in axes if short and not reductions and _is_thin(a, axes, rows, stores, vector)), None)
    if thin is not None:
        ctx.assume("le", thin.size, FEW - 1)  # longer rows have another kernel, along themselves
    if vector is not None:
        axes.sort(key=lambda a: (a.reduced, a.sym == vector))
    plan = _finish(kernel, axes, vector, rows, stores, reductions, dtypes, ctx.target)
    if _may_split(plan, ctx.target):
        plan = replace(plan, split=_is_split(ctx, axes, vector))
    return plan


# Lengths of rows at which another loop is faster. Fewer than LARGE elements share a kernel: they take less time than
# a call. With one thread of an AVX2 machine a softmax of 50000 rows of 3 takes 0.38 ms, by the kernel for rows of 1024
# 2.3 ms; of 20000 rows of 8 0.25 and 0.69 ms, by the kernel for rows of 3 0.83; two sums of 20000 rows of 8 0.14, 0.91
# and 1.2 ms. An `index_add` of 64 rows of 1024 takes 0.08 ms, by the kernel for rows of 3 0.74; `x.roll(1, 1)` of 20000
# rows of 8, which are written out, 0.03 ms, by that for rows of 20 0.16; a count of 15000 rows of 12 0.06 and 0.30.
# Rows from REDUCED on have more accumulators: `any` of 1000 rows of 100 takes 0.02 ms, by the kernel for 1024 0.035.
LENGTHS, REDUCED, SCANNED = (8, 32), 128, 16


def _assume_length(ctx: LoweringContext, axes: list[Axis], along: Sym | None, further: tuple[int, ...]) -> None:
    """Guards on the length of rows along the axis `along`: large calls with rows of another class get another kernel.

    The classes end at LENGTHS, behind the length that may be written out, and at the `further` lengths. One row alone
    has one kernel.
    """
    row = next((a for a in axes if a.sym == along), None)
    if row is None or len(axes) == 1:
        return
    elements = product(a.size for a in axes)
    ends = sorted({*LENGTHS, ctx.target.written_out + 1, *further})
    shorter, longer = ([n for n in ends if (n <= row.hint) is side] for side in (True, False))
    if shorter:
        ctx.assume("le", minimum(elements, expr(LARGE)), floordiv(row.size, expr(shorter[-1])) + (LARGE - 1))
    if longer:
        many, long = floordiv(elements, expr(LARGE)), floordiv(row.size, expr(longer[0]))
        ctx.assume("le", minimum(many, ONE) + minimum(long, ONE), ONE)


def _column_axis(
    axes: list[Axis], rows: list[Row], reductions: list[tuple[str, int, torch.dtype]], dtypes: dict[str, torch.dtype]
) -> Sym | None:
    """The axis along which a contraction's results are contiguous; None if the nest is not a contraction."""
    kept, reduced = ([a.sym for a in axes if a.reduced is side] for side in (False, True))
    found = contraction_of(kept, reduced, rows, [(kind, n) for kind, n, _ in reductions], dtypes)
    return found.columns[-1] if found is not None else None


def _crossed(axes: list[Axis], rows: list[Row]) -> Sym | None:
    """A kept axis along which one large operand is contiguous while another is contiguous along a reduced axis.

    Tiles of columns read both operands in runs. None if all large operands are contiguous along the same kind of axis.
    """
    points = math.prod(max(a.hint, 1) for a in axes)
    loads = [r.address for r in loads_in(rows) if not indirect_rows(r)]
    large = [e for e in loads if 8 * _touched(e, axes) >= points]
    along = [a for e in large for a in axes if a.hint >= RUN and coefficient(e, a.sym) == ONE]
    kept = [a.sym for a in along if not a.reduced]
    return kept[0] if kept and any(a.reduced for a in along) else None


def _ordered_plan(
    ctx: LoweringContext, kernel: Kernel, ordered: Ordered, builder: _Builder, dtypes: dict[str, torch.dtype]
) -> KernelPlan:
    """A scatter's or scan's plan: the axes are not merged; a kept axis along which stores are contiguous uses lanes.

    If no axis uses lanes, the kept axis along which loads are contiguous comes last.
    """
    rows, stores, _ = _live(builder)
    if ordered.kind == "scan" and any(rows[row].op == "pair" for _, _, row in stores):
        ordered = replace(ordered, how=SCANS[ordered.how].place or ordered.how)
    axes = [Axis(a, kernel.axes.size[a], a in kernel.reduced, ctx.hint(kernel.axes.size[a])) for a in kernel.axes.order]
    address = stores[0][1]
    lanes = [a for a in axes if not a.reduced and a.hint >= LEAST_LANES and coefficient(address, a.sym) == ONE]
    vector = lanes[0].sym if lanes else None
    if ctx.target.vector_bytes:
        _assume_length(ctx, axes, next((a.sym for a in axes if coefficient(address, a.sym) == ONE), None), (SCANNED,))
    last = vector if lanes or not ctx.target.vector_bytes else _read_across(axes, rows)
    axes.sort(key=lambda a: (a.reduced, a.sym == last))
    plan = _finish(kernel, axes, vector, rows, stores, [], dtypes, ctx.target)
    return replace(plan, ordered=ordered, name=f"{ordered.kind}_{ordered.how or 'set'}_d{len(axes)}")


LEAST_LANES = 4  # elements of an axis along which an ordered kernel has lanes


def _read_across(axes: Sequence[Axis], rows: Sequence[Row]) -> Sym | None:
    """The kept axis along which loads are contiguous; None if there is none, or if a reduced axis is such an axis.

    Iterations along it should be consecutive, because they read the same cache lines.
    """
    loads = [r.address for r in loads_in(rows)]
    if any(coefficient(e, a.sym) == ONE for e in loads for a in axes if a.reduced):
        return None
    return next((a.sym for a in axes if not a.reduced and any(coefficient(e, a.sym) == ONE for e in loads)), None)


def _live(builder: _Builder) -> tuple[list[Row], list[tuple[str, Expr, int]], list[tuple[str, int, torch.dtype]]]:
    """The rows, stores and reductions without those that no store needs, renumbered."""
    rows = builder.out.rows
    needed: set[int] = set()
    pending = [n for _, e, row in builder.stores for n in (row, *rows_in(e))]
    live_reductions: set[int] = set()
    while pending:
        n = pending.pop()
        if n in needed:
            continue
        needed.add(n)
        pending += [*rows[n].args, *indirect_rows(rows[n])]
        if rows[n].op == "reduced":
            live_reductions.add(rows[n].attr)
            pending.append(builder.reductions[rows[n].attr][1])
    number = {old: new for new, old in enumerate(sorted(needed))}
    red_number = {old: new for new, old in enumerate(sorted(live_reductions))}

    out = []
    for n in sorted(needed):
        row = renumber(rows[n], number)
        out.append(replace(row, attr=red_number[row.attr]) if row.op == "reduced" else row)
    stores = [(b, renumber_expr(e, number), number[r]) for b, e, r in builder.stores]
    reductions = [(k, number[r], d) for i, (k, r, d) in enumerate(builder.reductions) if i in live_reductions]
    return out, stores, reductions


def _all_exprs(rows: list[Row], stores: list[tuple[str, Expr, int]]) -> list[Expr]:
    return list({e for r in rows for e in row_exprs(r)} | {e for _, e, _ in stores})


def _order_and_merge(
    ctx: LoweringContext, axes: list[Axis], rows: list[Row], stores: list[tuple[str, Expr, int]]
) -> tuple[list[Axis], list[Row], list[tuple[str, Expr, int]]]:
    """Sort axes by the main access's strides, and merge adjacent axes along which all addresses are contiguous."""
    main = _main_access(rows, stores, axes)
    position = {a.sym: i for i, a in enumerate(axes)}

    def key(a: Axis) -> tuple[bool, float, int]:
        c = coefficient(main, a.sym) if main is not None else None
        stride = abs(ctx.hint(c)) if c is not None and _is_plain(c) else 0
        return (a.reduced, -stride if stride else -float("inf") if a.reduced else 1.0, position[a.sym])

    axes = sorted(axes, key=key)
    at = 0
    while at + 1 < len(axes):
        x, y = axes[at], axes[at + 1]
        if x.reduced == y.reduced and all(_mergeable(e, x, y) for e in _all_exprs(rows, stores)):
            mapping = {x.sym: ZERO}
            rows = [_substituted(r, mapping) for r in rows]
            stores = [(b, substitute(e, mapping), r) for b, e, r in stores]
            axes[at : at + 2] = [Axis(y.sym, x.size * y.size, y.reduced, x.hint * y.hint)]
            at = max(at - 1, 0)
        else:
            at += 1
    return axes, rows, stores


def _is_plain(e: Expr) -> bool:
    return all(s.kind not in (INDIRECT, LOOP) for s in symbols(e))


def _main_access(rows: list[Row], stores: list[tuple[str, Expr, int]], axes: list[Axis]) -> Expr | None:
    """The address that depends on the most axes; a store's address comes before a load's."""
    everywhere = [e for _, e, _ in stores] + [r.address for r in loads_in(rows)]
    count = {e: sum(1 for a in axes if a.sym in symbols(e)) for e in everywhere}
    return max(everywhere, key=lambda e: count[e], default=None)


def _substituted(row: Row, mapping: dict[Sym, Expr]) -> Row:
    return map_exprs(row, lambda e: substitute(e, mapping)) if row_exprs(row) else row


def _mergeable(e: Expr, x: Axis, y: Axis) -> bool:
    cx, cy = coefficient(e, x.sym), coefficient(e, y.sym)
    return cx is not None and cy is not None and cx == cy * y.size


def _choose_vector(
    axes: list[Axis], rows: list[Row], stores: list[tuple[str, Expr, int]],
    reductions: list[tuple[str, int, torch.dtype]], short: int, run: int = 1,
) -> Sym | None:  # fmt: skip
    """The axis with the most contiguous accesses, weighted by the amount that each reads or writes.

    Accesses also count if their stride is `run`, where the elements between are accessed, too. A reduced axis shorter
    than `short` gives way to a kept axis.
    """
    if not axes:
        return None
    points = math.prod(max(a.hint, 1) for a in axes)
    accesses = [(r.address, 1.0) for r in loads_in(rows)] + [(e, 2.0) for _, e, _ in stores]
    reduces = any(a.reduced for a in axes)
    shares = {e: _touched(e, axes) / points for e, _ in accesses}
    along = _varying(axes, rows, reductions, [e for e, _ in accesses])

    def score(item: tuple[int, Axis]) -> tuple[float, int]:
        at, a = item
        total = 0.0
        for e, weight in accesses:
            if reduces and not any(x.reduced and x.sym in along[e] for x in axes):
                continue  # outside the reduced loops
            c = coefficient(e, a.sym)
            weight *= shares[e]
            if c is not None and c.as_int() in (1, run):
                total += weight
            elif a.sym not in along[e]:
                total += weight / 4
        if a.hint < FEW:
            total /= TURN if short and (a.hint <= FEW // 2 or not is_read_along(a)) else FEW
        return (total, at)

    def is_read_along(a: Axis) -> bool:
        addresses = [r.address for r in loads_in(rows)]
        return any(2 * shares[e] > 1 and coefficient(e, a.sym) == ONE for e in addresses)

    best = max(enumerate(axes), key=score)
    if short and not reduces and best[1].hint < FEW and sum(map(row_cost, rows)) >= COSTLY:
        return max((a for a in axes if a.hint >= LEAST_APART or a is best[1]), key=lambda a: a.hint).sym
    if best[1].reduced and (best[1].hint < short or (short and score(best)[0] == 0.0 and best[1].hint < LONG_ROW)):
        across = [item for item in enumerate(axes) if not item[1].reduced and item[1].hint >= LEAST_ACROSS]
        best = max(across, key=lambda item: (score(item)[0], item[1].hint), default=best)
    return best[1].sym


def _varying(
    axes: list[Axis], rows: list[Row], reductions: list[tuple[str, int, torch.dtype]], addresses: list[Expr]
) -> dict[Expr, frozenset[Sym]]:
    """For each address the axes along which it varies, by itself or by an index that it looks up."""
    own = {a.sym for a in axes}
    known = {e: frozenset(symbols(e) & own) for e in addresses}
    if not any(map(rows_in, addresses)):
        return known
    _, varies = phases_of(axes, rows, [r for _, r, _ in reductions])
    return {e: along.union(*(varies[n] for n in rows_in(e))) for e, along in known.items()}


def _is_thin(
    a: Axis, axes: list[Axis], rows: list[Row], stores: list[tuple[str, Expr, int]], vector: Sym | None
) -> bool:
    """Whether axis `a` is a contiguous axis of fewer than FEW elements and lanes may run along another axis.

    Lanes also take another axis if some load varies along one other axis alone, such as one number per channel of
    images.
    """
    if a.hint >= FEW or not all(coefficient(e, a.sym) == ONE for _, e, _ in stores):
        return False
    others = {b.sym for b in axes if b is not a}
    loads = [symbols(r.address) & {b.sym for b in axes} for r in loads_in(rows)]
    alone = len(axes) > 2 and any(len(along) == 1 and along <= others for along in loads)
    return a.sym != vector or alone


FEW, LEAST_APART = 8, 64  # adjacent elements that fill no register; strided ones that do, if arithmetic dominates
TURN = 64  # elements that cost as much as the overhead of a loop of a few iterations
LONG_ROW = 256  # length below which a row of non-contiguous elements counts as short
LEAST_ACROSS = 8  # number of rows from which lanes across rows pay


def _short_row(
    rows: list[Row], reductions: list[tuple[str, int, torch.dtype]], dtypes: dict[str, torch.dtype], target: Target
) -> int:
    """Row length below which lanes run across rows: a short row fills no register and pays for a horizontal fold.

    float64 sums have a lower limit: a sum over lanes is more exact than a sequential sum. So does a single extreme: it
    is cheaper to fold than an extreme with its index, or than one that further passes over the row wait for.
    """
    dearly = any(REDUCTIONS[kind].extreme for kind, _, _ in reductions)
    dearly = dearly and not any(REDUCTIONS[kind].adds and dtype is torch.float64 for kind, _, dtype in reductions)
    alone = len(reductions) == 1 and not REDUCTIONS[reductions[0][0]].index
    narrowest = min((compute_dtype(dtypes[r.buffer]).itemsize for r in loads_in(rows)), default=4)
    return max(target.dearly_folded if dearly and not alone else 16, target.vector_bytes // narrowest)


def _touched(e: Expr, axes: list[Axis]) -> int:
    """Number of elements that an address reaches; the number of points if it is a gather."""
    looked_up = any(s.kind == INDIRECT for s in symbols(e))
    return math.prod(max(a.hint, 1) for a in axes if looked_up or a.sym in symbols(e))


def _finish(
    kernel: Kernel, axes: list[Axis], vector: Sym | None, rows: list[Row], stores: list[tuple[str, Expr, int]],
    reductions: list[tuple[str, int, torch.dtype]], dtypes: dict[str, torch.dtype], target: Target,
) -> KernelPlan:  # fmt: skip
    phases, varies = phases_of(axes, rows, [r for _, r, _ in reductions])
    # Two empty or equal parts of a result may become the same store.
    final = tuple(dict.fromkeys(Store(b, e, r, _store_phase(phases, r, e)) for b, e, r in stores))
    done = tuple(Reduce(i, k, r, d, phases[r]) for i, (k, r, d) in enumerate(reductions))
    full = {n for n, along in enumerate(varies) if along & {a.sym for a in axes if a.reduced}}
    final = _late(final, rows, done, full)
    used = dict.fromkeys([r.buffer for r in loads_in(rows)] + [b for b, _, _ in stores])
    return KernelPlan(
        name=_name(kernel, axes, done),
        axes=tuple(axes), vector=vector, rows=tuple(rows), phases=phases, varies=varies, stores=final,
        reductions=done, buffers=tuple((b, dtypes[b]) for b in used),
        split=False,
        comments=tuple(f"{n.buffer.name}: {n.buffer.origin}" for n in kernel.nodes if n.buffer.origin),
    )  # fmt: skip


def phases_of(
    axes: Sequence[Axis], rows: Sequence[Row], reduced: Sequence[int]
) -> tuple[tuple[int, ...], tuple[frozenset[Sym], ...]]:
    """For each row the first pass over the reduced axes in which it is known, and the axes along which it varies.

    `reduced` are the rows that the reductions take, by the reductions' numbers.
    """
    phases: list[int] = []
    varies: list[frozenset[Sym]] = []
    own = {a.sym for a in axes}
    kept = frozenset(a.sym for a in axes if not a.reduced)
    for row in rows:
        if row.op == "reduced":
            phases.append(phases[reduced[row.attr]] + 1)
            varies.append(kept)
            continue
        needs = [*row.args, *indirect_rows(row)]
        along = frozenset(s for e in row_exprs(row) for s in symbols(e) if s in own)
        phases.append(max((phases[d] for d in needs), default=0))
        varies.append(along.union(*(varies[d] for d in needs)))
    return tuple(phases), tuple(varies)


def _store_phase(phases: Sequence[int], row: int, address: Expr) -> int:
    return max([phases[row], *(phases[u] for u in rows_in(address))])


COSTLY = 40  # operations from which a row is not computed twice for a store


def _late(
    stores: tuple[Store, ...], rows: list[Row], reductions: tuple[Reduce, ...], full: set[int]
) -> tuple[Store, ...]:
    """The stores, where a costly row is stored in the pass that computes it for another store anyway.

    This computes a dropout's mask once, to store and to apply it, unless an earlier reduction needs it. `full`: rows of
    the reduced loops.
    """
    costly = {s.row for s in stores if s.row in full and sum(row_cost(rows[n]) for n in _behind(rows, s.row)) >= COSTLY}
    if not reductions or not costly:
        return stores
    first: dict[int, int] = {}
    for r in reductions:
        first.update(dict.fromkeys(_behind(rows, r.row), 0))
    for s in sorted(stores, key=lambda s: s.phase):
        for n in _behind(rows, s.row) - {s.row}:
            first.setdefault(n, s.phase)
    later = {row: first.get(row, 0) for row in costly}
    return tuple(replace(s, phase=max(s.phase, later.get(s.row, 0))) for s in stores)


def _behind(rows: list[Row], n: int) -> set[int]:
    """The row `n` and all rows that it depends on, up to results of reductions."""
    seen: set[int] = set()
    pending = [n]
    while pending:
        n = pending.pop()
        if n not in seen:
            seen.add(n)
            pending += [*rows[n].args, *indirect_rows(rows[n])] if rows[n].op != "reduced" else []
    return seen


def _may_split(plan: KernelPlan, target: Target) -> bool:
    """Whether the target splits reductions, and the kernel reduces in one pass over the data."""
    if not target.split_units or not plan.reductions or any(r.phase for r in plan.reductions):
        return False
    reduced = {a.sym for a in plan.reduced_axes}
    return not any(symbols(s.address) & reduced for s in plan.stores if s.phase > 0)


def _is_split(ctx: LoweringContext, axes: list[Axis], vector: Sym | None) -> bool:
    """Whether to split the reduction: few independent results and many elements.

    Large calls for which the answer differs get another kernel; small ones have either.
    """
    target = ctx.target

    def share(a: Axis) -> Expr:
        return floordiv(a.size + (target.lane_block - 1), expr(target.lane_block)) if a.sym == vector else a.size

    several = minimum(floordiv(product(share(a) for a in axes if not a.reduced), expr(target.split_units)), ONE)
    large = minimum(floordiv(product(a.size for a in axes), expr(target.split_work)), ONE)
    split = ctx.hint(several) == 0 and ctx.hint(large) == 1
    ctx.assume("le", *((several + large, ONE) if split else (large, several)))
    return split


def _name(kernel: Kernel, axes: list[Axis], reductions: tuple[Reduce, ...]) -> str:
    """The kernel's name for readers of code and profiles: kind and first operators, such as `red_sum_mul_add_d2`."""
    kinds = dict.fromkeys(r.kind for r in reductions)
    words = [*(["red", *kinds] if kinds else ["pw"]), *_operators(kernel, kinds)]
    return f"{'_'.join(words)[:40].rstrip('_')}_d{len(axes)}"


_NAMED = 4  # operators in a kernel's name


def _operators(kernel: Kernel, known: Container[str]) -> list[str]:
    """The first operators of a kernel, as words, without those in `known`."""
    packets = (n.buffer.origin.partition(".")[2] or "copy" for n in kernel.nodes if n.buffer.origin)
    words = dict.fromkeys(packet.partition(".")[0].strip("_") for packet in packets)
    return [word for word in words if word.isidentifier() and word not in known][:_NAMED]
