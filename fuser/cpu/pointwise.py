"""Pointwise nests: units are (kept axes x blocks of the vector axis); transposed reads go through tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fuser.cpu.bits import BitsLoop
from fuser.cpu.lanes import LaneLoop
from fuser.cpu.moves import moved_rows
from fuser.cpu.nest import ROWS_AHEAD, TILE_COLUMNS, TILE_STRIDE, size, storage_type
from fuser.cpu.records import Function
from fuser.cpu.segments import Segments, find_segments, open_segments
from fuser.cpu.streams import StreamingNest
from fuser.cpu.transposes import EDGES, MOST_APART
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import indirect_rows
from fuser.ir.sizes import LOOP, ONE, Expr, coefficient, expr, floordiv, product, substitute, symbol, symbols
from fuser.scheduler.kernel_plan import Axis
from fuser.scheduler.nodes import row_cost

HOIST_COST = 4  # operations from which a row is computed before the loops
LEAST_TURNS, MOST_HOISTED = 8, 4  # fewest iterations of these loops; most hoisted rows, each a block on the stack
BLOCK = 4096  # elements of the vector axis in one unit of a pointwise nest
TILE_ROWS = 128  # a transposed read goes through a tile of TILE_ROWS x TILE_COLUMNS in the first level cache


@dataclass(frozen=True)
class Choice:
    """How the innermost loop is written: its segments, the rows hoisted before it, and its explicit vectors if any."""

    segments: Segments | None
    hoisted: Sequence[int]
    vectors: tuple[str, type[LaneLoop | BitsLoop]] | None  # where a macro is not 0; else the plain loop


class PointwiseNest(StreamingNest):
    """No reduction."""

    choice = Choice(None, (), None)

    def _choose(self, outer: Sequence[Axis]) -> Choice:
        """The form of the innermost loop, which is inside loops over `outer`. Facts about rows are set in the nest."""
        if self.checked:
            return Choice(None, self._choose_hoisted(outer), None)
        segments = find_segments(self) if self.tile_axis is None else None
        if segments is not None:
            self.parts = segments.parts(self)
            self.hold(frozenset(segments.rows))
        hoisted = [] if segments is not None else self._choose_hoisted(outer)
        moved = moved_rows(self.plan)
        floats = [n for n, r in enumerate(self.plan.rows) if r.dtype is torch.float32 and r.op != "const"]
        computed = any(self.is_full(n) and n not in moved for n in floats)
        if computed and not hoisted and LaneLoop(self).fits():
            return Choice(segments, hoisted, ("FUSER_LANES", LaneLoop))
        self.moved = moved
        if self.tile_axis is None and segments is None and not hoisted and BitsLoop(self).fits():
            return Choice(segments, hoisted, ("FUSER_MASKS", BitsLoop))
        return Choice(segments, hoisted, None)

    def whole(self) -> Function:
        """The single function of the plan."""
        self.find_transposed()
        tiled = self.tile_axis
        outer = [a for a in self.kept if a is not self.vector and a is not tiled]
        self.choice = self._choose(outer if tiled is None else [*outer, tiled])
        hoisted = self.choice.hoisted
        self.open_function()
        self.emitted |= self.constant
        digits = self.digits(outer)
        units = product(a.size for a in outer)
        if tiled is not None:
            digits.append(("band", (ir.Name(f"n_{tiled.sym.name}") + (TILE_ROWS - 1)) // TILE_ROWS))
            units = units * floordiv(tiled.size + (TILE_ROWS - 1), expr(TILE_ROWS))
        block = TILE_COLUMNS if tiled is not None else BLOCK
        if self.vector is not None:
            digits.append(("block", (ir.Name(f"n_{self.vector.sym.name}") + (block - 1)) // block))
            units = units * floordiv(self.vector.size + (block - 1), expr(block))
        self.emit_constants()
        for n in hoisted:
            self.out.scratch(self.kind(n), f"lane{n}", block)
        if hoisted:
            self.out.var("i64", "ready", -1)
        self.open_units(digits)
        if self.vector is not None:
            self.open_range("v", ir.Name("block") * block, block, f"n_{self.vector.sym.name}")
            self._compute_hoisted(hoisted)
        if tiled is not None:
            self._fill_tiles(tiled)
            self.out.open(ir.For(tiled.sym.name, ir.Name("r0"), ir.Name("r1")))
            self._prefetch_rows(tiled)
        self._pointwise_unit()
        if tiled is not None:
            self.out.close()
        self.out.close()
        return Function(self.close_function(), units, self.work(), expr(0))

    def _choose_hoisted(self, outer: Sequence[Axis]) -> list[int]:
        """Costly rows that vary along the vector axis alone: computed once for a block, not in every iteration."""
        if self.vector is None or math.prod(a.hint for a in outer) < LEAST_TURNS:
            return []
        alone = {n for n, along in enumerate(self.plan.varies) if along == {self.vector.sym}}
        roots = {self.unrounded(s) for s in self.plan.stores if self.store_is_full(s)}
        roots |= {d for n in range(len(self.plan.rows)) if n not in alone for d in self.deps(n)}
        chosen = []
        for n in sorted(roots & alone):
            behind = [self.plan.rows[m] for m in self.closure([n])]
            costly = sum(row_cost(r) for r in behind) >= HOIST_COST
            if costly and not any(r.op in ("indirect", "pair") for r in (*behind, self.plan.rows[n])):
                chosen.append(n)
        return chosen[:MOST_HOISTED]

    def _compute_hoisted(self, hoisted: Sequence[int]) -> None:
        """Compute the hoisted rows of a block, if the last unit had another one."""
        if not hoisted:
            return
        assert self.vector is not None
        v = self.vector.sym.name
        rows = self.closure(hoisted)
        self.emit_unit_rows(self.passes.outside(d for n in rows for d in self.deps(n)))
        self.out.open(ir.If(ir.Name("block").differs("ready")))
        self.out.set("ready", "block")
        self.out.open(ir.For(v, ir.Name("v0"), ir.Name("v1"), simd=True))
        for n in rows:
            self.declare(n)
        for n in hoisted:
            place = ir.Name(f"lane{n}")[ir.Name(v) - "v0"]
            self.out.set(place, self.ref(n))
            self.hoisted[n] = place
        self.out.close()
        self.out.close()

    def _prefetch_rows(self, tiled: Axis) -> None:
        """Prefetch rows of a tile some rows ahead: they are too short for the hardware to predict the next one."""
        assert self.vector is not None
        if not self.machine.prefetches:
            return
        v, t = self.vector.sym, tiled.sym
        ahead = {v: symbol("v0", LOOP) + symbol("q", LOOP), t: expr(t) + ROWS_AHEAD}
        for buffer, address in self.lines_read([n for n in range(len(self.plan.rows)) if n not in self.staged]):
            if t in symbols(address):
                at = self.address(buffer, substitute(address, ahead))
                self.out.add(self.prefetch(buffer, at, ir.Name("v1") - "v0", 0, 2))

    def _pointwise_unit(self) -> None:
        self.emit_unit_rows(sorted({*self.passes[0].before, *self.passes[0].outer}))
        if self.vector is not None:
            self._vector_loop(self.vector.sym.name)
        self.emit_outer_stores(0)

    def _vector_loop(self, v: str) -> None:
        plain = self.choice.vectors is None
        if self.streams(0) or (plain and self.has_halves(0)):
            with self.tiles_of(0, v, "v0", "v1", halves=plain):
                self._segment_loop(v, "w0", "w1")
        else:
            self._segment_loop(v, "v0", "v1")

    def _segment_loop(self, v: str, low: str, high: str) -> None:
        vectors, segments = self.choice.vectors, self.choice.segments
        if segments is not None:
            open_segments(self, segments, low, high)
            low, high = "from", "to"
        if vectors is not None:
            with self.out.block(ir.Only(vectors[0])):
                vectors[1](self).emit(low, high)
            self.out.open(ir.Otherwise())
        held = segments.conditions(self) if segments is not None else []
        if held:  # g++ vectorises loads with steps where conditions are no matter
            tests: list[ir.Value] = [*held]
            with self.out.block(ir.If(functools.reduce(ir.Value.__and__, tests))):
                for c in held:
                    self.out.let("bool", c.name, ir.Number(True, torch.bool))
                self._plain_loop(v, low, high)
            self.out.open(ir.Else())
        self._plain_loop(v, low, high)
        if held:
            self.out.close()
        if vectors is not None:
            self.out.close()
        if segments is not None:
            self.out.close()

    def _plain_loop(self, v: str, low: str, high: str) -> None:
        self.out.open(self.simd(v, low, high))
        self.emit_inner(0)
        self.out.close()

    def find_transposed(self) -> None:
        """Loads that run along another axis than the vector axis go through tiles, if there is one such axis."""
        if self.vector is None or self.checked:
            return
        others = [a for a in self.kept if a is not self.vector]
        along: dict[int, Axis] = {}
        for n, row in enumerate(self.plan.rows):
            if row.op != "load" or row.args or indirect_rows(row):
                continue
            address = row.attr[1][0]
            c = coefficient(address, self.vector.sym)
            if c is None or c.as_int() in (0, 1, -1):
                continue
            axis = next((a for a in others if coefficient(address, a.sym) == ONE), None)
            if axis is not None:
                along[n] = axis
        if along and len({a.sym for a in along.values()}) == 1:
            self.tile_axis = next(iter(along.values()))
            self.staged = {n: k for k, n in enumerate(along)}

    def _fill_tiles(self, tiled: Axis) -> None:
        """Read a band of each transposed operand along its own rows."""
        assert self.vector is not None
        t, v = tiled.sym.name, self.vector.sym.name
        r0, r1, v0, v1 = map(ir.Name, ("r0", "r1", "v0", "v1"))
        self.open_range("r", ir.Name("band") * TILE_ROWS, TILE_ROWS, f"n_{t}")
        for n, k in self.staged.items():
            buffer, (address,) = self.plan.rows[n].attr
            kind, width = self.kind(n), self.dtypes[buffer].itemsize
            begin: ir.Value = v0
            self.out.scratch(kind, f"tile{k}", TILE_ROWS * TILE_STRIDE, aligned=self.line)
            if storage_type(self.dtypes[buffer]) == kind:
                begin = self._fill_blocks(tiled, k, buffer, address, width)
            with self.out.block(ir.For(v, begin, v1)), self.out.block(ir.For(t, r0, r1)):
                self.out.set(self.in_tile(n), self.loaded(n))

    def _fill_blocks(self, tiled: Axis, k: int, buffer: str, address: Expr, width: int) -> ir.Value:
        """Read what makes whole blocks of tile `k` by registers; returns where the vector axis goes on from."""
        assert self.vector is not None
        r0, r1, v0, v1 = map(ir.Name, ("r0", "r1", "v0", "v1"))
        rows, step, last, end = (ir.Name(f"{name}{k}") for name in ("rows", "step", "last", "end"))
        edge, length = EDGES[width], ir.Name(f"n_{self.vector.sym.name}")
        self.out.let("i64", step.name, size(coefficient(address, self.vector.sym) or expr(0)))
        # Rows are rounded up to whole blocks if the elements that are read past them are inside the buffer.
        self.out.let("i64", rows.name, (r1 - r0 + (edge - 1)) // edge * edge)
        past = ir.Select(step > 0, (rows - (r1 - r0) + step - 1) // step, length)
        self.out.let("i64", last.name, length - past)
        self.out.let("i64", end.name, ir.least(last, v1))
        blocks = ir.Select(end > v0, (end - v0) // edge * edge, ir.Number(0))
        apart = ir.Name(f"apart{k}")
        self.out.let("bool", apart.name, step.same(r1 - r0) & (step > 1) & (step <= MOST_APART))
        self.out.let("i64", f"columns{k}", ir.Select(apart, v1 - v0, blocks))
        origin = {tiled.sym: symbol("r0", LOOP), self.vector.sym: symbol("v0", LOOP)}
        corner = self.address(buffer, substitute(address, origin))
        to, columns = ir.Name(f"tile{k}"), ir.Name(f"columns{k}")
        self.out.add(ir.Block(ir.If(apart), (ir.Transpose(width, corner, step, to, None, columns),)))
        self.out.add(ir.Block(ir.Else(), (ir.Transpose(width, corner, step, to, rows, columns),)))
        return v0 + f"columns{k}"
