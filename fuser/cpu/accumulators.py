"""Accumulators of reducing nests: arrays of lanes, updates of a lane, flushes of partial sums, and the fold of lanes.

An index reduction keeps the best value of each lane and an int32 that locates it: the value's index, or in row nests
the first index of the loop iteration. The lowering makes sure that indices fit into an int32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from fuser.cpu.facts import Facts
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.cpu.vir.printer import INTEGERS
from fuser.ir.sizes import expr
from fuser.lazy_dataclasses import dataclass
from fuser.ops import CPP_TYPES, REDUCTIONS, ReductionRow
from fuser.scheduler.kernel_plan import Reduce

NO_PLACE = 2**31 - 1
BEYOND_CACHES = 1 << 22  # elements
FLUSH = 256  # float32 additions per lane of a row nest before they go to a float64 total
COLUMN_FLUSH, SHORT_COLUMN_FLUSH, SHORT_COLUMN = 32, 8, 64  # the same in column nests; the second up to 64 rows
SHORT_FLUSH = 16  # additions in a lane of a row nest before they are added to a second lane
SMALL_BLOCK = 64  # lanes of a block of columns that are set and flushed in a few instructions, whether taken or not
WIDE_ROW = 1024  # elements of a row from which lanes are folded as float64: the fold no longer dominates the time
COUNTER = ir.Name("turns")  # of a pass: rows since the last flush in a column nest, groups of iterations in a row nest
SHUFFLE_HELPER = """\
#if defined(__clang__) || __GNUC__ >= 12
#define FUSER_SHUFFLE(I, a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define FUSER_SHUFFLE(I, a, ...) __builtin_shuffle(a, (I){__VA_ARGS__})
#endif
"""


@dataclass(frozen=True)
class Accumulator:
    """How one reduction of a nest is accumulated.

    value: the dtype of the reduced values; dtype: of the lanes. number: the number in the names of its arrays; an
    extreme beside its own index uses the arrays of the index reduction (`shares`). flushes: whether partial sums are
    added to float64 totals. notes_nans: whether an extreme ignores NaNs and a second array records them: one
    instruction each, with a shorter dependence chain. in_order: whether the index is the loop variable, so each lane
    sees increasing indices. counts_turns: whether lanes keep the first index of the iteration that gave their value,
    not the value's own index.
    """

    facts: Facts
    reduce: Reduce
    spec: ReductionRow
    value: torch.dtype
    dtype: torch.dtype
    number: int
    flushes: bool
    notes_nans: bool
    in_order: bool
    counts_turns: bool

    @property
    def shares(self) -> bool:
        """Whether the value is kept in another reduction's arrays."""
        return self.number != self.reduce.number

    @property
    def overlaps(self) -> bool:
        """Whether the tail of a row has lanes that were already taken."""
        return not self.facts.is_column and takes_some_twice(self.facts, self.reduce.phase)

    @property
    def kind(self) -> str:
        """The C++ type of lanes."""
        return CPP_TYPES[self.dtype]

    @property
    def identity(self) -> ir.Number:
        """The initial value of each lane."""
        return ir.Number(self.spec.identity(self.dtype), self.dtype)

    @property
    def total_dtype(self) -> torch.dtype:
        """The dtype of the finished value."""
        return torch.float64 if self.flushes else self.dtype

    def total(self, lane: ir.Like) -> ir.Value:
        """The finished value: that of lane `lane` in column nests, the only one in row nests."""
        name, lane = f"{'tot' if self.flushes else 'acc'}{self.number}", lane if self.facts.is_column else 0
        return ir.Name(name) if self.flushes and not self.facts.is_column else ir.Name(name)[lane]

    @property
    def lanes(self) -> ir.Name:
        """The lane array; for flushed float32 sums of row nests, the array to which groups of iterations are added."""
        return ir.Name(f"{'mid' if self.flushes and not self.facts.is_column else 'acc'}{self.number}")

    def to_total(self, lane: ir.Value) -> ir.Set:
        """Add a lane of float32 sums (in row nests the folded lane 0) to its float64 total."""
        held = self.lanes[lane if self.facts.is_column else 0]
        return ir.Set(self.total(lane), ir.Cast("double", held), "+")

    def join(self, dtype: torch.dtype, a: ir.Value, b: ir.Value, ai: ir.Value, bi: ir.Value) -> ir.Statement:
        """Combine value `b` (and its index) into `a`."""
        if self.spec.index:
            better = ir.Op("combine", self.reduce.kind, dtype, (a, ai, b, bi))
            return ir.Block(ir.If(better), (ir.Set(a, b), ir.Set(ai, bi)))
        return ir.Set(a, ir.Op("combine", self.reduce.kind, dtype, (a, b)))

    def fold(self, wide: bool = False) -> ir.Fold:
        """Fold the lanes into lane 0, or if `wide`, as float64 into the total."""
        table, name = "combine", self.spec.value or self.reduce.kind
        if self.notes_nans:
            table, name = "wins", self.spec.extreme
        elif self.spec.wraps and not self.dtype.is_floating_point and self.dtype is not torch.bool:
            table, name = "sign", self.spec.wraps
        lanes, vector_bytes = self.facts.lanes, self.facts.machine.vector_bytes
        return ir.Fold(self.lanes.name, self.dtype, lanes, vector_bytes, table, name, self.total(0) if wide else None)


def accumulators(facts: Facts) -> tuple[Accumulator, ...]:
    """The accumulator of each reduction of the plan, in order."""
    return tuple(_accumulator(facts, r) for r in facts.plan.reductions)


def takes_some_twice(facts: Facts, phase: int) -> bool:
    """Whether the tail of a row is a full array of lanes that overlaps the array before it.

    Lanes that were taken before are skipped, except by idempotent reductions. A pass with stores does not overlap: it
    may overwrite its input.
    """
    whole = facts.along.hint % facts.lanes == 0 or facts.along.hint < facts.lanes
    return not whole and not facts.passes[phase].stores


def own_of(every: Iterable[Accumulator], phase: int) -> list[Accumulator]:
    """The accumulators of a pass, without extremes that are kept in another's arrays."""
    return [a for a in every if a.reduce.phase == phase and not a.shares]


def dtypes_of(facts: Facts, r: Reduce) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of a reduction's values and of its accumulator."""
    row = facts.plan.rows[r.row]
    value = facts.plan.rows[row.args[0]].dtype if row.op == "pair" else row.dtype
    spec = REDUCTIONS[r.kind]
    dtype = spec.accumulate(value)
    if spec.adds and dtype is torch.float32 and _waits_for_memory(facts):
        dtype = torch.float64
    return value, _truth(facts) if dtype is torch.bool else dtype


def _accumulator(facts: Facts, r: Reduce) -> Accumulator:
    spec, (value, dtype) = REDUCTIONS[r.kind], dtypes_of(facts, r)
    extreme = bool(spec.extreme) and not spec.index and dtype.is_floating_point
    in_order = _is_in_order(facts, r)
    return Accumulator(
        facts, r, spec, value, dtype, _holder(facts, r).number, spec.adds and dtype is torch.float32,
        extreme and not facts.is_column, in_order, in_order and not facts.is_column,
    )  # fmt: skip


def _waits_for_memory(facts: Facts) -> bool:
    """Whether a nest is one long sum of more elements than caches hold: memory-bound, so float64 additions are free."""
    long = math.prod(a.hint for a in facts.reduced_axes) >= BEYOND_CACHES
    return facts.plan.split and not facts.is_column and long


def _truth(facts: Facts) -> torch.dtype:
    """The dtype of a lane of `any` or `all`, as wide as the widest value read: g++ does not vectorise sums of bools."""
    rows = [r for n, r in enumerate(facts.plan.rows) if r.op == "load" and facts.is_full(n)]
    wide = max((r.dtype.itemsize for r in rows), default=1)
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wide]


def _is_in_order(facts: Facts, r: Reduce) -> bool:
    if not REDUCTIONS[r.kind].index or len(facts.reduced_axes) != 1:
        return False
    index = facts.plan.rows[facts.plan.rows[r.row].args[1]]
    return index.op == "index" and index.attr == expr(facts.reduced_axes[0].sym)


def _holder(facts: Facts, r: Reduce) -> Reduce:
    """The reduction whose accumulator holds the value of `r`: an extreme beside its own index has none of its own."""
    for other in facts.plan.reductions:
        if REDUCTIONS[other.kind].value == r.kind and other.phase == r.phase:
            if facts.plan.rows[other.row].args[0] == r.row:
                return other
    return r


def declare(out: Builder, a: Accumulator, low: ir.Value) -> list[ir.Statement]:
    """Declare lane arrays; returns the statements that set a lane to its identity. The pass starts at `low`."""
    starts: list[ir.Statement] = []

    def array(kind: str, name: str, start: ir.Value) -> None:
        out.scratch(kind, name, a.facts.lanes)
        starts.append(ir.Set(ir.Name(name)["l"], start))

    k, first = a.number, ir.Cast("i32", low) if a.in_order else ir.Number(NO_PLACE)
    array(a.kind, a.lanes.name, a.identity)
    if a.notes_nans:
        array(INTEGERS[a.dtype.itemsize], f"nan{k}", ir.Number(0))
    if a.spec.index:
        array("i32", f"at{k}", ir.Number(0) if a.counts_turns else first)
    if a.flushes and a.facts.is_column:
        array("double", f"tot{k}", ir.Number(0.0, torch.float64))
    elif a.flushes:
        out.var("double", f"tot{k}", ir.Number(0.0, torch.float64))
    return starts


def taken(facts: Facts) -> ir.Like:
    """The number of lanes in use: all of a row nest, whole vectors of a column nest's columns in a large block.

    The block is as wide as the columns of the first call; in a later one it may be nearly empty.
    """
    return (ir.Name("count") + 15) // 16 * 16 if facts.is_column and facts.lanes > SMALL_BLOCK else facts.lanes


def accumulate(out: Builder, a: Accumulator, values: Sequence[ir.Value]) -> None:
    """Combine a value, and its index if any, into its lane, unless an earlier iteration took the lane."""
    k, (value, *index) = a.number, values
    held, x = ir.Name(f"acc{k}")["l"], ir.Name(f"x{k}")
    now: ir.Value = ir.Convert(a.value, a.dtype, value)
    if index:
        _accumulate_index(out, a, now, index[0])
        return
    if a.overlaps and not a.spec.idempotent:
        now = ir.Select(ir.Name("l") < "skip", a.identity, now)
    out.let(a.kind, x.name, now)
    if a.notes_nans:
        out.set(held, ir.Select(ir.Binary(a.spec.extreme, x, held), x, held))
        out.set(ir.Name(f"nan{k}")["l"], x.differs(x), "|")
        return
    out.set(held, ir.Op("combine", a.reduce.kind, a.dtype, (held, x)))


def _accumulate_index(out: Builder, a: Accumulator, now: ir.Value, index: ir.Value) -> None:
    k = a.number
    held, at, x = ir.Name(f"acc{k}")["l"], ir.Name(f"at{k}")["l"], ir.Name(f"x{k}")
    place = ir.Name(f"start{a.reduce.phase}" if a.counts_turns else f"now{k}")
    if not a.counts_turns:
        out.let("i32", place.name, ir.Cast("i32", index))
    out.let(a.kind, x.name, now)
    if a.in_order:
        better = ir.Op("overtakes", a.reduce.kind, a.dtype, (held, x))
    else:
        better = ir.Op("combine", a.reduce.kind, a.dtype, (held, at, x, place))
    out.let("bool", f"better{k}", better)
    out.set(held, ir.Select(ir.Name(f"better{k}"), x, held))
    out.set(at, ir.Select(ir.Name(f"better{k}"), place, at))


def fold(out: Builder, a: Accumulator, low: ir.Value) -> None:
    """Fold the lanes of a row nest's accumulator that is not flushed. `low` is the first index of the pass."""
    if a.spec.index:
        _fold_index(out, a, low)
        return
    out.add(a.fold())
    if a.notes_nans:
        found, best = ir.Name(f"any{a.number}"), ir.Name(f"acc{a.number}")[0]
        out.var(INTEGERS[a.dtype.itemsize], found.name, 0)
        out.each(a.facts.lanes, ir.Set(found, ir.Name(f"nan{a.number}")["l"], "|"))
        out.set(best, ir.Select(found, ir.Number(math.nan, a.dtype), best))


def _fold_index(out: Builder, a: Accumulator, low: ir.Value) -> None:
    """Fold the values, then take the smallest index among the lanes that hold the best value (NaN equals NaN here).

    Lanes that saw no value hold the identity and iteration 0: if the identity is best, lane 0 holds it too.
    """
    k, l, lanes = a.number, ir.Name("l"), a.facts.lanes
    values, at, found = ir.Name(f"lane{k}"), ir.Name(f"at{k}"), ir.Name(f"least{k}")
    held, best = values[l], ir.Name(f"acc{k}")[0]
    out.scratch(a.kind, values.name, lanes)
    out.each(lanes, ir.Set(held, ir.Name(f"acc{k}")[l]))
    out.add(a.fold())
    index = at[l] + ir.Cast("i32", l) if a.counts_turns else at[l]
    same = held.same(best)
    if a.dtype.is_floating_point:
        same = same | (held.differs(held) & best.differs(best))
    out.var("i32", found.name, NO_PLACE)
    with out.block(ir.For("l", ir.Number(0), ir.Number(lanes), simd=True, joins=f"min:{found.name}")):
        out.let("i32", "here", index)
        out.let("i32", "mine", ir.Select(same, ir.Name("here"), ir.Number(NO_PLACE)))
        out.set(found, ir.least("mine", found))
    if a.counts_turns:
        lane = found % lanes
        if a.overlaps:
            p, last = ir.Name(f"p{a.reduce.phase}"), ir.Name(f"last{a.reduce.phase}")
            lane = ir.Select(found < p - low, lane, found - (last - low))
        out.set(best, values[lane])  # of zeros of both signs, the first one
        out.set(found, ir.Cast("i32", low), "+")
    out.set(at[0], found)


# -- flushes: a lane adds only a few float32 values before its sum is added to a float64 total ------------------------
def most_turns(facts: Facts) -> int:
    """Most float32 additions in a lane of a column nest; fewer if the column is short, where a flush costs little."""
    few = math.prod(a.hint for a in facts.reduced_axes) <= SHORT_COLUMN
    return SHORT_COLUMN_FLUSH if few else COLUMN_FLUSH


def open_counter(out: Builder, declared: bool) -> None:
    """Set the counter to 0; it is already `declared` if an earlier pass of the function used it."""
    out.set(COUNTER, 0) if declared else out.var("i64", COUNTER.name, 0)


def flushing(of: Sequence[Accumulator]) -> list[Accumulator]:
    """The accumulators whose float32 sums are added to float64 totals."""
    return [a for a in of if a.flushes]


def count_rows(out: Builder, of: Sequence[Accumulator], rows: ir.Like, exactly: bool = True) -> None:
    """Count rows of a column nest; flush the sums at `most_turns` rows, or if not `exactly`, at that many or more."""
    mine = flushing(of)
    if not mine:
        return
    most = most_turns(mine[0].facts)
    out.set(COUNTER, rows, "+")
    with out.block(ir.If(COUNTER.same(most) if exactly else COUNTER >= most)):
        out.set(COUNTER, 0)
        flush(out, mine)


def flush(out: Builder, of: Sequence[Accumulator], goes_on: bool = True) -> None:
    """Add float32 sums to float64 totals: each lane's in a column nest, the sum over all lanes in a row nest.

    `goes_on`: the sums are reset to zero.
    """
    lane, zero = ir.Name("l"), ir.Number(0.0, torch.float32)
    for a in flushing(of):
        empty = ir.Set(a.lanes[lane], zero)
        if a.facts.is_column:
            out.each(taken(a.facts), a.to_total(lane), empty)
            continue
        wide = a.facts.along.hint >= WIDE_ROW
        out.add(a.fold(wide))
        if not wide:
            out.add(a.to_total(lane))
        if goes_on:
            out.each(a.facts.lanes, empty)


# Row nests flush by groups of iterations.
def open_group(out: Builder, mine: Sequence[Accumulator]) -> None:
    """Declare the arrays for the sums of one group. They are declared inside the loop, so they stay in registers."""
    for a in mine:
        held = ir.Name(f"acc{a.number}")
        out.scratch(a.kind, held.name, a.facts.lanes)
        out.each(a.facts.lanes, ir.Set(held["l"], a.identity))


def close_group(out: Builder, mine: Sequence[Accumulator]) -> None:
    """Add the sums of one group to those of the row, so that no float32 sum has more than a few terms."""
    for a in mine:
        out.each(a.facts.lanes, ir.Set(a.lanes["l"], ir.Name(f"acc{a.number}")["l"], "+"))
    count_group(out, mine)


def count_group(out: Builder, mine: Sequence[Accumulator]) -> None:
    """Count a group of iterations; after FLUSH // SHORT_FLUSH groups, add the sums to the totals."""
    out.set(COUNTER, 1, "+")
    with out.block(ir.If(COUNTER.same(FLUSH // SHORT_FLUSH))):
        out.set(COUNTER, 0)
        flush(out, mine)


__all__ = [
    "COLUMN_FLUSH", "NO_PLACE", "SHORT_FLUSH", "SHUFFLE_HELPER", "Accumulator", "accumulate", "accumulators",
    "close_group", "count_group", "count_rows", "declare", "dtypes_of", "flush", "flushing", "fold", "open_counter",
    "open_group", "own_of", "takes_some_twice",
]  # fmt: skip
