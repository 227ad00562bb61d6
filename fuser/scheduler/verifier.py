"""The rules of kernel plans, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fuser.errors import VerifyError
from fuser.ir.loop_body import compute_dtype
from fuser.ir.sizes import Sym, symbols
from fuser.ir.verifier import verify_row, verify_symbols
from fuser.scheduler.plan import KernelPlan


def verify_plan(
    plan: KernelPlan, dtypes: Mapping[str, torch.dtype], ready: set[str], known: Iterable[Sym], scalars: Iterable[str]
) -> None:
    """Check one plan. `ready` are the buffers that hold data before it; those that it stores are added."""
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
            name = row.attr[0]
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
        if not any(symbols(a.size) is not None and a.reduced for a in plan.axes):
            continue  # everything that was reduced has size 1
        if plan.phases[r.row] > r.phase:
            raise VerifyError(f"reduction {r.number} runs in pass {r.phase}, before its value is there")


__all__ = ["verify_plan"]
