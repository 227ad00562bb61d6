"""Reductions in loops over the reduced axes: a loop for each phase, and the statements between the loops."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuser.cuda import moments, tiles
from fuser.cuda.layout import Dim, Online, online_phases, widest
from fuser.cuda.moments import Moments, moments_by_phase
from fuser.cuda.nest import Function, Nest
from fuser.cuda.tiles import VECTOR, divisor_of
from fuser.ir.loop_body import indirect_rows
from fuser.ops import REDUCTIONS, TRITON_TYPES, triton_cell, triton_combine, triton_number
from fuser.scheduler.kernel_plan import Reduce


def write_function(nest: Nest) -> Function:
    """The kernel of a nest."""
    nest.open_programs()
    write_body(nest)
    return nest.close_function(nest.name, nest.units())


def write_body(nest: Nest) -> None:
    """Emit the body of a program."""
    if nest.loop_dim is not None:
        Looped(nest).all_phases()
    else:
        nest.all_at_once()


class Looped:
    """Writes the phases of a nest whose reduced axes are looped over."""

    def __init__(
        self, nest: Nest, bounds: tuple[str, str, str] | None = None, eviction: str | None = None,
        stages: int | None = None,
    ) -> None:  # fmt: skip
        """`bounds`: first index, end and step of a chunk. `eviction`: load tiles to registers a step before their use,
        with this eviction policy; None: keep `stages` tiles in flight through shared memory."""
        self.nest, self.plan, self.out = nest, nest.plan, nest.out
        assert nest.loop_dim is not None
        self.dim: Dim = nest.loop_dim
        self.bounds, self.eviction = bounds, eviction or ""
        self.by_hand = eviction is not None and not nest.ctx.variant.stages
        column = bounds is not None and len(nest.layout.dims) == 2
        plain = bounds is not None and not any(REDUCTIONS[r.kind].index for r in self.plan.reductions)
        alone = plain and sum(r.op == "load" for r in self.plan.rows) == 1
        if stages is None:
            stages = tiles.COLUMN_STAGES if column else tiles.CHUNK_STAGES if alone else 0
        self.ahead = nest.ctx.variant.stages or (stages if eviction is None else 0)
        # A block is split as rounds × threads × neighbours: each thread folds its own elements before they join the
        # running sum.
        self.lane = VECTOR // widest(self.plan)
        self.threads = min(32 * nest.layout.warps, self.dim.block // self.lane)
        one_row = len(nest.layout.dims) == 1
        self.online: dict[int, tuple[Online, ...]] = online_phases(self.plan) if one_row and bounds is None else {}
        # A phase that an online maximum replaces has no loop that could compute moments.
        found = moments_by_phase(self.plan)
        self.moments: dict[int, tuple[Moments, ...]] = {p: m for p, m in found.items() if p - 1 not in self.online}
        self.tiled = not one_row  # with kept dims, each element of a tile has its own moments
        self.lane = self._neighbours()

    def _neighbours(self) -> int:
        """The number of a thread's neighbouring elements: one load gives them, so folds move no value between threads.

        1024 rows of 50257 on an H200: cross entropy takes 60 µs in bfloat16, with eight neighbours 99; in float32 70
        and 83; layer norm 136 and 186, 158 and 190. Softmax 141 and 165 in bfloat16, but 223 and 187 in float32.
        """
        divisor = divisor_of(self.nest.ctx.hint(self.dim.size)) if self.nest.runs_along(self.dim) else VECTOR
        again = bool(self.online) and len(self.passes()) > 1
        few = divisor < 4 and self.bounds is None and not (again and widest(self.plan) > 2)
        return min(self.lane, divisor) if few else self.lane

    def all_phases(self) -> None:
        """A loop for each phase, and the statements between the loops."""
        done: set[int] = set()
        for phase, described in enumerate(self.plan.passes):
            if phase - 1 in self.online:
                continue
            self.phase(phase)
            for m in self.moments.get(phase - 1, ()):
                self.finish_moments(m)
                done.add(m.number)
            for o in self.online.get(phase, ()):
                self.finish_online(o)
                done.update((o.maximum.number, o.sum.number))
            for n in described.results:
                r = self.plan.reductions[self.plan.rows[n].attr]
                if r.number not in done:
                    self.nest.result(n, r, f"acc{r.number}", f"at{r.number}")
        self.outer_rows(self.plan.n_phases)
        for described in self.plan.passes:
            for s in described.after:
                self.nest.store(s)

    def outer_rows(self, phase: int) -> None:
        """Emit rows that do not vary along the reduced axes, as far as they are known in `phase`."""
        for n in self.plan.passes.known(phase):
            if n not in self.nest.emitted:
                self.nest.emit(n)

    def passes(self) -> list[int]:
        """The phases that have a loop."""
        spared = {p + 1 for p in (*self.online, *self.moments)}
        return [p for p, d in enumerate(self.plan.passes) if p not in spared and d.roots]

    def phase(self, phase: int) -> None:
        """The loop of one phase, if it has any work."""
        self.outer_rows(phase)
        described = self.plan.passes[phase]
        if not described.roots or phase - 1 in self.moments:
            return
        online, spreads = self.online.get(phase, ()), self.moments.get(phase, ())
        spared = [o.maximum for o in online] + [m.sum for m in spreads if not self.tiled]
        mine = [r for r in described.folds if r not in spared]
        for r in mine:
            self.start(r)
        for o in online:
            self.start_online(o)
        for m in spreads:
            self.start_moments(m)
        passes = self.passes()
        self.nest.eviction = self.eviction
        if len(passes) > 1:
            policy = "evict_first" if phase == passes[-1] else "evict_last"
            self.nest.eviction = f", eviction_policy='{policy}'"
        backwards = self.bounds is None and passes.index(phase) % 2 == 1
        ahead = self.load_first(described.inner, backwards) if self.by_hand else []
        self.open_loop(backwards)
        if ahead:
            self.load_next(ahead, backwards)
        for n in described.inner:
            if n not in ahead:
                self.nest.emit(n)
        self.nest.eviction = ""
        for s in described.stores:
            self.nest.store(s)
        for r in mine:
            self.accumulate(r)
        for o in online:
            self.accumulate_online(o)
        for m in spreads:
            self.accumulate_moments(m, backwards)
        self.out.close()

    # -- variances in one pass ---------------------------------------------------------------------------------------
    def start_moments(self, m: Moments) -> None:
        """Declare empty moments."""
        if self.tiled:
            moments.start_tile(self.out, m, self.nest.shape())
        else:
            moments.start(self.out, m, self.threads)

    def accumulate_moments(self, m: Moments, backwards: bool) -> None:
        """Add the current tile to the moments."""
        values, _ = self.nest.reduced_inputs(m.sum)
        name, (low, high, step) = self.dim.name, self.range()
        if self.tiled:
            # Backwards, the partial tile comes first, so elements have seen different numbers of values.
            last = f"tl.maximum(({high} - 1 - {name}) // {step}, 0)"
            turn = last if backwards else f"({name}0 - ({low})) // {step}"
            moments.accumulate_tile(self.out, m, values, f"m{name}", turn)
            return
        shape = self.dim.block // (self.lane * self.threads), self.threads, self.lane
        moments.accumulate(self.out, m, values, f"m{name}", f"({self.size()} - {name}0)", shape)

    def count_moments(self, m: Moments) -> None:
        """Compute how many values each element of a tile has seen."""
        if self.tiled:
            low, high, step = self.range()
            self.nest.open_dim(self.dim, f"{low} + ")
            moments.count_tile(self.out, m, self.dim.name, high, step)

    def finish_moments(self, m: Moments) -> None:
        """Emit the row of the sum of squared distances, whose centre is known now."""
        self.count_moments(m)
        axis, back = self.folded()
        for n, row in enumerate(self.plan.rows):
            if row.op == "reduced" and row.attr == m.number:
                self.out.add(f"t{n} = {moments.about(m, f't{m.centre}', axis, back)}")
                self.nest.emitted.add(n)

    def join_moments(self, m: Moments) -> None:
        """Combine the three numbers of a chunk."""
        self.count_moments(m)
        moments.join(self.out, m, *self.folded())

    def folded(self) -> tuple[int, str]:
        """The reduced dim of the tile, and the index text that keeps it as a dim of size 1."""
        axis = len(self.nest.layout.dims) - 1
        return axis, "[:, None]" if axis else ""

    def load_first(self, inner: Iterable[int], backwards: bool) -> list[int]:
        """Load the first tiles of the loop's inputs; returns the rows of these loads."""
        rows = [(n, self.plan.rows[n]) for n in inner]
        found = [n for n, r in rows if r.op == "load" and not r.args and not indirect_rows(r)]
        low, high, _ = self.range()
        self.nest.open_dim(self.dim, f"{self.last_block(high) if backwards else low} + ")
        for n in found:
            self.out.add(f"next{n} = {self.nest.load_stored(self.plan.rows[n])}")
        return found

    def load_next(self, ahead: list[int], backwards: bool) -> None:
        """Use the tiles that were loaded, and load the next ones."""
        name, (_, _, step) = self.dim.name, self.range()
        for n in ahead:
            self.out.add(f"t{n} = {self.nest.loaded(self.plan.rows[n], f'next{n}')}")
            self.nest.emitted.add(n)
        self.nest.open_dim(self.dim, f"{name}0 {'-' if backwards else '+'} {step} + ")
        if backwards:
            self.out.add(f"m{name} = m{name} & ({name} >= 0)")
        for n in ahead:
            self.out.add(f"next{n} = {self.nest.load_stored(self.plan.rows[n])}")
        self.nest.open_dim(self.dim, f"{name}0 + ")

    def last_block(self, high: str) -> str:
        """The offset of the last block."""
        return f"({high} - 1) // {self.dim.block} * {self.dim.block}"

    def range(self) -> tuple[str, str, str]:
        """The loop's first index, end and step."""
        return self.bounds or ("0", self.size(), str(self.dim.block))

    def size(self) -> str:
        """The number of elements to loop over."""
        nest, d = self.nest, self.dim
        return nest.params.number(d.size, nest.bits, f"n_{d.name}", nest.runs_along(d))

    def open_loop(self, backwards: bool) -> None:
        """Open the loop over blocks of the reduced axes; `backwards`: from the data read last, which is in the
        cache."""
        d = self.dim
        low, high, step = self.range()
        if backwards:
            self.out.open(f"for back in range(0, {high}, {d.block})")
            self.out.add(f"{d.name}0 = {self.last_block(high)} - back")
        else:
            kind, more = ("tl.range", f", num_stages={self.ahead}") if self.ahead else ("range", "")
            self.out.open(f"for {d.name}0 in {kind}({low}, {high}, {step}{more})")
        self.nest.open_dim(d, f"{d.name}0 + ")

    def start(self, r: Reduce) -> None:
        """Declare an accumulator with its identity."""
        spec, _, acc = self.nest.spec(r)
        shape = self.nest.shape()
        self.out.add(f"acc{r.number} = tl.full({shape}, {triton_number(spec.identity(acc), acc)}, {TRITON_TYPES[acc]})")
        if spec.index:
            kind = self.nest.index_dtype
            self.out.add(f"at{r.number} = tl.full({shape}, {torch.iinfo(kind).max}, {TRITON_TYPES[kind]})")

    def accumulate(self, r: Reduce) -> None:
        """Combine the current tile with the accumulator."""
        spec, _, acc = self.nest.spec(r)
        k = r.number
        values, indices = self.nest.reduced_inputs(r)
        if not spec.index:
            self.out.add(f"x{k} = {values}")
            self.out.add(f"acc{k} = {triton_combine(r.kind, acc, f'acc{k}', f'x{k}')}")
            return
        self.out.add(f"x{k} = {values}")
        self.out.add(f"i{k} = {indices}")
        self.out.add(f"better{k} = {triton_combine(r.kind, acc, f'acc{k}', f'at{k}', f'x{k}', f'i{k}')}")
        self.out.add(f"acc{k} = tl.where(better{k}, x{k}, acc{k})")
        self.out.add(f"at{k} = tl.where(better{k}, i{k}, at{k})")

    # -- maximum and sum of exponentials in one pass -----------------------------------------------------------------
    def start_online(self, o: Online) -> None:
        """Declare a running maximum and sum for each thread's lanes."""
        shape, k = f"[{self.threads}]", o.maximum.number
        self.out.add(f"high{k} = tl.full({shape}, float('-inf'), tl.float32)")
        self.out.add(f"total{k} = tl.full({shape}, 0.0, tl.float32)")

    def accumulate_online(self, o: Online) -> None:
        """Add a block: where the maximum grows, the sum so far is scaled down."""
        k = o.maximum.number
        values, _ = self.nest.reduced_inputs(o.maximum)
        rounds = self.dim.block // (self.lane * self.threads)
        self.out.add(f"lane{k} = tl.reshape({values}, [{rounds}, {self.threads}, {self.lane}])")
        self.out.add(f"best{k} = tl.reduce(tl.reduce(lane{k}, 2, fuser_combine_max), 0, fuser_combine_max)")
        self.out.add(f"best{k} = {triton_combine('max', torch.float32, f'best{k}', f'high{k}')}")
        # If all values so far are -inf, any finite reference keeps exp(-inf - it) at 0.
        self.out.add(f"from{k} = tl.where(best{k} == float('-inf'), 0.0, best{k})")
        old, new = self._exp(f"high{k} - from{k}"), self._exp(f"lane{k} - from{k}[None, :, None]")
        self.out.add(f"total{k} = total{k} * {old} + tl.sum(tl.sum({new}, 2), 0)")
        self.out.add(f"high{k} = best{k}")

    def _exp(self, text: str) -> str:
        return triton_cell("exp", torch.float32, self.nest.fast, text)

    def finish_online(self, o: Online) -> None:
        """Emit the rows of the maximum and of the sum."""
        k = o.maximum.number
        self.out.add(f"best{k} = tl.reduce(high{k}, 0, fuser_combine_max)")
        self.out.add(f"from{k} = tl.where(best{k} == float('-inf'), 0.0, best{k})")
        scale = self._exp(f"high{k} - from{k}")
        texts = {o.maximum.number: f"best{k}", o.sum.number: f"tl.sum(total{k} * {scale}, 0)"}
        for n, row in enumerate(self.plan.rows):
            if row.op == "reduced" and row.attr in texts:
                self.out.add(f"t{n} = {texts[row.attr]}")
                self.nest.emitted.add(n)
