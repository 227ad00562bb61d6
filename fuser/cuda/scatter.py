"""Scatters: the CPU runs their points in order, programs here do not.

If several points write one element, one of the values stays, as in eager, or atomic operations combine them.
"""

from __future__ import annotations

import dataclasses

from fuser.cuda.layout import Context
from fuser.cuda.nest import Function, Nest
from fuser.cuda.text import Guard
from fuser.errors import Unsupported
from fuser.ir.loop_body import loads_in
from fuser.ir.sizes import ONE, Sym, coefficient
from fuser.ops import REDUCTIONS, triton_store
from fuser.scheduler.kernel_plan import KernelPlan, Store

Written = tuple[tuple[Function, ...], tuple[()], tuple[Guard, ...]]


def write_scatter(plan: KernelPlan, name: str, ctx: Context) -> Written:
    """The kernel of a scatter's plan, and its guards."""
    assert plan.ordered is not None
    nest = Scatter(_in_no_order(plan), name, ctx)
    nest.open_programs()
    nest.all_at_once()
    made = dataclasses.replace(nest.close_function(name, nest.units()), unordered=bool(plan.ordered.how))
    return (made,), (), tuple(dict.fromkeys(nest.guards))


def _in_no_order(plan: KernelPlan) -> KernelPlan:
    """The plan without reduced axes; the axis along which memory is contiguous is last."""
    axes = [dataclasses.replace(a, reduced=False) for a in plan.axes]
    vector = plan.vector or _running(plan)
    axes.sort(key=lambda a: a.sym == vector)
    return dataclasses.replace(plan, axes=tuple(axes), vector=vector)


def _running(plan: KernelPlan) -> Sym | None:
    """The axis along which stores, or else most loads, are contiguous."""
    written, read = [s.address for s in plan.stores], [r.address for r in loads_in(plan.rows)]
    near = {a.sym: [sum(coefficient(e, a.sym) == ONE for e in es) for es in (written, read)] for a in plan.axes}
    return max(reversed(near), key=near.__getitem__, default=None)


class Scatter(Nest):
    """Writes the value of each point to the element that its rows compute."""

    def store(self, s: Store) -> None:
        """One write for each point of the tile, even if its address or value does not vary along a dim."""
        assert self.plan.ordered is not None
        how, every = self.plan.ordered.how, frozenset(range(len(self.layout.dims)))
        address = self.address(s.address)
        if self.expr_dims(s.address) != every:
            address = f"({address} + tl.zeros({self.shape()}, tl.int{self.bits}))"
        target = f"{self.params.pointer(s.buffer)} + ({address})"
        value, mask = triton_store(self.dtypes[s.buffer], f"t{s.row}"), self.mask(every)
        masked = f", {mask}" if mask else ""
        if not how:
            self.out.add(f"tl.store({target}, {value}{masked})")
        elif REDUCTIONS[how].atomic:
            self.out.add(f"{REDUCTIONS[how].atomic}({target}, {value}{masked}, sem='relaxed')")
        else:
            raise Unsupported(f"no atomic operation combines by {how!r}")
