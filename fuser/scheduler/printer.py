"""Kernel plans as text, for reading."""

from __future__ import annotations

from fuser.ir.printer import dtype_text, row_text
from fuser.scheduler.kernel_plan import KernelPlan


def print_plan(plan: KernelPlan) -> str:
    """One plan: its axes, then rows, reductions and stores by phase."""
    axes = ", ".join(
        f"{a.sym} < {a.size}{' reduced' if a.reduced else ''}{' vector' if a.sym == plan.vector else ''}"
        for a in plan.axes
    )
    lines = [f"kernel {plan.name}: {axes or 'one point'}{', split' if plan.split else ''}"]
    if plan.ordered is not None:
        lines[0] += f", {plan.ordered.kind} by {plan.ordered.how or 'replacing'}"
    lines += [f"  # {c}" for c in plan.comments]
    for phase in range(1 + max(plan.phases, default=0)):
        if phase:
            lines.append(f"  pass {phase}")
        lines += [f"  {row_text(n, r)}" for n, r in enumerate(plan.rows) if plan.phases[n] == phase]
        lines += [
            f"  reduction {r.number} = {r.kind} of %{r.row} as {dtype_text(r.dtype)}"
            for r in plan.reductions
            if r.phase == phase
        ]
        lines += [f"  {s.buffer}[{s.address}] = %{s.row}" for s in plan.stores if s.phase == phase]
    return "\n".join(lines) + "\n"


__all__ = ["print_plan"]
