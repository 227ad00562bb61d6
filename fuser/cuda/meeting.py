"""Long rows shared by several programs that meet: each holds a part in registers, so memory is read once.

A program reduces its part, stores what it found, and waits for the other programs of its row; then all of them combine
the parts in the same order and go on, with the values that they still hold. Programs take their numbers from a counter,
so that those of a row begin before those of the next: the programs of the oldest unfinished row are all under way, or
nothing but them is, and a GPU has places for `tiles.MEETING_MOST` programs. So nobody waits for one that cannot begin.
(TorchInductor's cooperative reductions and semaphores of serial split-K products wait in the same way.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fuser.cuda import tiles
from fuser.cuda.driver import MEETS
from fuser.cuda.layout import Context, Dim, Layout, blocks, is_column, narrowest, online_phases, widest
from fuser.cuda.nest import Function, Nest
from fuser.cuda.split import Partial
from fuser.cuda.text import Guard
from fuser.ir.sizes import Expr, expr, product
from fuser.ops import REDUCTIONS, triton_number
from fuser.scheduler.kernel_plan import KernelPlan, Reduce

HELPERS = """@triton.jit
def fuser_take_number(counter, programs):
    number = tl.atomic_add(counter, 1, sem='relaxed', scope='gpu')
    if number == programs - 1:
        tl.store(counter, 0)
    return number


@triton.jit
def fuser_meet(counter, all_there):
    tl.debug_barrier()  # what all threads stored comes before the count
    seen = tl.atomic_add(counter, 1, sem='acq_rel', scope='gpu') + 1
    while seen < all_there:
        seen = tl.atomic_add(counter, 0, sem='acq_rel', scope='gpu')
    tl.debug_barrier()


@triton.jit
def fuser_leave(counter, last):
    if tl.atomic_add(counter, 1, sem='acq_rel', scope='gpu') == last:
        tl.store(counter, 0)
"""


@dataclass(frozen=True)
class Choice:
    """Whether programs meet, each with so many `elements` of a row, and what that rests on."""

    elements: int
    guards: tuple[Guard, ...]


def choose(plan: KernelPlan, ctx: Context) -> Choice:
    """How the rows of a plan are shared: 0 elements where they are not."""
    if not _may_meet(plan, ctx):
        return Choice(0, ())
    n, elements = product(a.size for a in plan.reduced_axes), tiles.MEETING_ELEMENTS
    least, most = expr(tiles.MEETING_FROM), expr(elements * tiles.MEETING_MOST)
    if ctx.hint(n) < tiles.MEETING_FROM:
        return Choice(0, _open(("lt", n, least)))
    if ctx.hint(n) > elements * tiles.MEETING_MOST:
        return Choice(0, _open(("lt", most, n)))
    return Choice(elements, _open(("le", least, n), ("le", n, most)))


def _open(*guards: Guard) -> tuple[Guard, ...]:
    return tuple(g for g in guards if g[1].as_int() is None or g[2].as_int() is None)


def _may_meet(plan: KernelPlan, ctx: Context) -> bool:
    """Whether rows are read more than once, by reductions of numbers that a program can combine."""
    if not tiles.MEETING or ctx.smaller or is_column(plan) or not plan.reductions:
        return False
    loops = sum(bool(p.roots) for p in plan.passes) - len(online_phases(plan))
    if loops < 2 or not any(p.stores for p in plan.passes) or widest(plan) > 4 or narrowest(plan) < 2:
        return False
    read = {r.attr[0] for n, r in enumerate(plan.rows) if r.op == "load" and plan.varies[n] & plan.inside}
    sums = all(not REDUCTIONS[r.kind].index and plan.rows[r.row].dtype is torch.float32 for r in plan.reductions)
    return sums and len(read) <= tiles.MEETING_TENSORS


class MeetingNest(Nest):
    """Writes the kernel: a part of a row in registers, the rows of the plan in order."""

    def __init__(self, plan: KernelPlan, name: str, ctx: Context, choice: Choice) -> None:
        kept = [a for a in plan.axes if not a.reduced]
        part = Dim(list(plan.reduced_axes), choice.elements, "r")
        super().__init__(plan, name, ctx, Layout(kept, [part], tiles.MEETING_WARPS, list(choice.guards)))
        self.chunks: Expr = blocks(part.size, part.block)
        self.met = 0
        self.partials = [Partial(f"{name}_p{r.number}", self.spec(r)[2], self.units()) for r in plan.reductions]
        rows = product(a.size for a in kept)
        self.partials += [
            Partial(f"{name}_numbers", torch.int32, expr(1), counters=True),
            Partial(f"{name}_arrived", torch.int32, rows, counters=True),
        ]
        self.dtypes.update((p.name, p.dtype) for p in self.partials)

    def write(self) -> Function:
        """The kernel."""
        units = self.params.number(self.units(), self.bits)
        numbers = self.params.pointer(f"{self.name}_numbers")
        self.out.add(f"number = fuser_take_number({numbers}, {units})")
        self.open_programs(number="number")
        self.out.add(f"counter = {self.params.pointer(f'{self.name}_arrived')} + number // {self.parts()}")
        self.all_at_once()
        self.out.add(f"fuser_leave(counter, {self.parts()} * {self.met + 1} - 1)")
        made = self.close_function(self.name + MEETS, self.units())
        return replace(made, helpers=(HELPERS,), registers=tiles.MEETING_REGISTERS)

    def parts(self) -> str:
        """How many programs share a row."""
        return self.params.number(self.chunks, self.bits, "n_br")

    def result(self, n: int, r: Reduce, values: str, indices: str) -> None:
        """The `reduced` row `n`, once all programs of the row have found theirs."""
        spec, _, acc = self.spec(r)
        self.emitted.add(n)
        self.met += 1
        pointer = self.params.pointer(f"{self.name}_p{r.number}")
        self.out.add(f"tl.store({pointer} + number, {self.fold(r, values, indices)})")
        self.out.add(f"fuser_meet(counter, {self.parts()} * {self.met})")
        nothing = triton_number(spec.identity(acc), acc)
        part = f"tl.arange(0, {tiles.MEETING_MOST})"
        self.out.add(
            f"part{r.number} = tl.load({pointer} + (number // {self.parts()}) * {self.parts()} + {part}, "
            f"{part} < {self.parts()}, other={nothing}, cache_modifier='.cg')"
        )
        self.out.add(f"t{n} = {self.fold(r, f'part{r.number}', '')}")


def write_meeting(
    plan: KernelPlan, name: str, ctx: Context, choice: Choice
) -> tuple[tuple[Function, ...], tuple[Partial, ...], tuple[Guard, ...]]:
    """The kernel of a plan, its temporaries, and what the choice rests on."""
    nest = MeetingNest(plan, name, ctx, choice)
    function = nest.write()
    return (function,), tuple(nest.partials), tuple(dict.fromkeys(nest.guards))
