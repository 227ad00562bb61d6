"""Loops over float16 that g++ vectorises: elements are converted a piece at a time, before the loop and after it.

The compiler has no vectors of the instructions that convert halves, which take a dozen others each. So a piece of what
is read lies in the first level cache as floats before the loop, and what it writes is converted from there.
"""

from __future__ import annotations

import torch

from fuser.cpu.parts import PartsNest
from fuser.cpu.segments import FARTHEST, find_edge
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import LOOP, ONE, Expr, substitute, symbol
from fuser.scheduler.kernel_plan import Store

_FAR = ir.Number(4 * FARTHEST, torch.int64)
MOST_PIECES = 6  # more would not fit into the first level cache


class HalvesNest(PartsNest):
    """A nest that reads and writes float16 by way of pieces of floats."""

    def half_loads(self, phase: int) -> list[int]:
        """Loads of float16 in a pass that are contiguous along the vector axis."""
        return [n for n in self.rows_of(phase) if not self.checked and self._reads_halves(n)]

    def _reads_halves(self, n: int) -> bool:
        row = self.plan.rows[n]
        if row.op != "load" or n in self.staged or n in self.guarded or n in self.moved:
            return False
        if self.is_part(n):
            return self.dtypes[row.attr[0]] is torch.float16
        if row.args and (n in self.parts or not self._bounds(row.args[0])):
            return False
        return self._is_line(row.attr[0], row.attr[1][0])

    def _bounds(self, mask: int) -> list[tuple[bool, ir.Value]]:
        """The bounds that a condition sets on the index along the vector axis; none if it is not made of such bounds.

        Each is (before, index): the condition holds before the index, or from it on.
        A condition that does not depend on the vector axis is bounded beyond all indices.
        """
        found: list[tuple[bool, ir.Value]] = []
        pending = [mask]
        while pending:
            n = pending.pop()
            edge = find_edge(self, self.plan.rows[n])
            if edge is not None:
                found.append(edge)
            elif not self.is_full(n) and not self.is_lane(n):
                found.append((True, ir.Select(self.ref(n), _FAR, ir.Unary("-", _FAR))))
            elif self.is_full(n) and self.plan.rows[n].traits.sign == "&":
                pending += self.plan.rows[n].args
            else:
                return []
        return found

    def _declare_bounds(self, n: int, start: str, count: ir.Value) -> None:
        self.out.var("i64", f"low{n}", 0)
        self.out.var("i64", f"high{n}", count)
        edge = ir.Name("edge")
        for before, place in self._bounds(self.plan.rows[n].args[0]):
            side = ir.Name(f"high{n}" if before else f"low{n}")
            with self.out.block(ir.Plain()):
                self.out.let("i64", edge.name, place - start)
                self.out.set(side, ir.Select(edge < side if before else edge > side, edge, side))

    def _is_line(self, buffer: str, address: Expr) -> bool:
        return self.dtypes[buffer] is torch.float16 and self.step(address) == ONE

    def half_stores(self, phase: int) -> list[Store]:
        """The same of stores."""
        mine = [s for s in self.passes[phase].stores if s.row not in self.moved and not self.checked]
        return [s for s in mine if self._is_line(s.buffer, s.address)]

    def has_halves(self, phase: int) -> bool:
        """Whether a pass over pieces converts float16 before and after each."""
        return 0 < len(self.half_loads(phase)) + len(self.half_stores(phase)) <= MOST_PIECES

    def open_pieces(self, phase: int, start: str, place: ir.Like, length: int, count: ir.Like) -> None:
        """Prepare a loop of `count` elements from `start` on, at most `length`: parts, and float16 as float32.

        `place` is the current index of the loop in each.
        """
        place, count = ir.value(place), ir.value(count)
        self._open_parts(phase, start, place, count)
        if self.has_halves(phase):
            self._open_halves(phase, start, place, length, count)

    def close_pieces(self, phase: int, start: str, count: ir.Like) -> None:
        """After that loop; no result is converted that is no longer in `results`."""
        self._close_halves(phase, start, count)
        self._close_parts(phase)

    def _open_halves(self, phase: int, start: str, place: ir.Value, length: int, count: ir.Value) -> None:
        assert self.vector is not None
        origin = {self.vector.sym: symbol(start, LOOP)}
        length = -(-length // 16) * 16  # whole vectors
        for n in self.half_loads(phase):
            buffer, (address,) = self.plan.rows[n].attr
            piece = ir.Name(f"piece{n}")
            self.out.scratch("float", piece.name, length, aligned=self.line)
            at = ir.Name(f"part{n}") if n in self.parts else self.address(buffer, substitute(address, origin))
            if self.plan.rows[n].args and n not in self.parts:
                self._declare_bounds(n, start, count)
                self.out.add(ir.Widen(piece, at, count, ir.Name(f"low{n}"), ir.Name(f"high{n}")))
            else:
                self.out.add(ir.Widen(piece, at, count))
            self.pieces[n] = piece[place]
        for k, s in enumerate(self.half_stores(phase)):
            self.out.scratch("float", f"result{phase}_{k}", length, aligned=self.line)
            self.results[s] = ir.Name(f"result{phase}_{k}")[place]

    def _close_halves(self, phase: int, start: str, count: ir.Like) -> None:
        assert self.vector is not None
        self.pieces.clear()
        for k, s in enumerate(self.half_stores(phase) if self.results else []):
            origin = {self.vector.sym: symbol(start, LOOP)}
            to = self.address(s.buffer, substitute(s.address, origin), self.tile_of(s))
            self.out.add(ir.Narrow(to, ir.Name(f"result{phase}_{k}"), ir.value(count)))
        self.results.clear()
