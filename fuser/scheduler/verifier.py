"""Checks the rules of lowered graphs and of kernel plans. Tests check every kernel: the setting is `check_ir`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fuser.errors import VerifyError
from fuser.ir.loop_body import compute_dtype
from fuser.ir.sizes import Sym
from fuser.ir.verifier import verify_buffers, verify_row, verify_symbols
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import TensorInput
from fuser.scheduler.kernel_plan import KernelPlan
from fuser.scheduler.schedule import Schedule


def verify_lowered(lowered: Lowered, schedule: Schedule | None = None) -> None:
    """Check the IR's rules, and those of the plans if given. VerifyError names the broken rule."""
    ctx = lowered.ctx
    records = enumerate(lowered.inputs)
    inputs = {f"in{n}": (r.dtype, len(r.size)) for n, r in records if isinstance(r, TensorInput)}
    verify_buffers(ctx.buffers, inputs, ctx.hints, [s.name for s in ctx.scalars])
    if schedule is None:
        return
    dtypes = {name: dtype for name, (dtype, _) in inputs.items()}
    dtypes |= {b.name: b.dtype for b in ctx.buffers}
    ready = set(inputs)
    for number, plan in enumerate(schedule.plans):
        if number in schedule.joined:
            joined = schedule.joined[number].plan
            verify_plan(joined, dtypes, set(ready), ctx.hints, [s.name for s in ctx.scalars])
        verify_plan(plan, dtypes, ready, ctx.hints, [s.name for s in ctx.scalars])


def verify_plan(
    plan: KernelPlan, dtypes: Mapping[str, torch.dtype], ready: set[str], known: Iterable[Sym], scalars: Iterable[str]
) -> None:
    """Check one plan. `ready` are the buffers that hold data before it; the buffers that it stores are added."""
    try:
        _verify(plan, dtypes, ready, frozenset(known), frozenset(scalars))
    except VerifyError as e:
        raise VerifyError(f"plan {plan.name}: {e}") from None
    ready |= {s.buffer for s in plan.stores}


def _verify(
    plan: KernelPlan, dtypes: Mapping[str, torch.dtype], ready: set[str], known: frozenset[Sym], scalars: frozenset[str]
) -> None:
    axes = {a.sym for a in plan.axes}
    if len(axes) != len(plan.axes):
        raise VerifyError("an axis is there twice")
    stored = {s.buffer for s in plan.stores}
    for n, row in enumerate(plan.rows):
        verify_row(n, plan.rows, known | axes, scalars)
        if row.op == "load":
            name = row.buffer
            if name not in ready and name not in stored:
                raise VerifyError(f"%{n} reads {name}, which nobody wrote")
            if row.dtype is not compute_dtype(dtypes[name]):
                raise VerifyError(f"%{n} loads {name} of {dtypes[name]} as {row.dtype}")
        if any(plan.phases[a] > plan.phases[n] for a in row.args):
            raise VerifyError(f"%{n} is computed in pass {plan.phases[n]}, before what it needs")
    for s in plan.stores:
        verify_symbols(s.address, len(plan.rows), plan.rows, known | axes)
        if plan.phases[s.row] > s.phase:
            raise VerifyError(f"{s.buffer} is stored in pass {s.phase}, before its value is there")
        made, wanted = plan.rows[s.row].dtype, compute_dtype(dtypes[s.buffer])
        if made is not wanted:
            raise VerifyError(f"{s.buffer} of {dtypes[s.buffer]} is stored from a value of {made}")
    for r in plan.reductions:
        if plan.phases[r.row] > r.phase:
            raise VerifyError(f"reduction {r.number} runs in pass {r.phase}, before its value is there")


__all__ = ["verify_lowered", "verify_plan"]
