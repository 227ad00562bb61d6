"""16-bit floats that a kernel only moves: they are copied as bits, without conversions."""

from __future__ import annotations

import torch

from fuser.ir.loop_body import indirect_rows
from fuser.scheduler.kernel_plan import KernelPlan

_OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
HALVES = tuple(_OTHER)


def moved_rows(plan: KernelPlan) -> dict[int, torch.dtype]:
    """Rows of a plan that are only loaded, selected and stored, each with the 16-bit float whose bits it holds."""
    dtypes = dict(plan.buffers)
    found: dict[int, torch.dtype] = {}
    for n, row in enumerate(plan.rows):
        kinds = {found.get(a) for a in _sources(plan, n)}
        if row.op == "load":
            kinds = {dtypes[row.attr[0]]}
        if len(kinds) == 1 and (kind := kinds.pop()) in HALVES and row.attr is not _OTHER.get(kind):
            found[n] = kind
    stores = [s.row for s in plan.stores if found.get(s.row) is not dtypes[s.buffer]]
    while unfit := [n for n in (*stores, *_unfit_rows(plan, found)) if n in found]:
        for n in unfit:
            found.pop(n, None)
    return found


def _unfit_rows(plan: KernelPlan, found: dict[int, torch.dtype]) -> list[int]:
    return [a for n in range(len(plan.rows)) for a in _unfit(plan, n, found)]


def _sources(plan: KernelPlan, n: int) -> list[int]:
    """The rows, constants apart, one of whose values row `n` has as it is; none if it computes."""
    row = plan.rows[n]
    args = row.args[1:] if row.traits.chooses else row.args if row.op == "round_to" else ()
    return [a for a in args if plan.rows[a].op != "const"]


def _unfit(plan: KernelPlan, n: int, found: dict[int, torch.dtype]) -> list[int]:
    """Rows of `found` that are not moved only, as far as row `n` knows: those it computes with, or itself."""
    sources = _sources(plan, n)
    if n in found and any(found.get(a) is not found[n] for a in sources):
        return [n]
    row = plan.rows[n]
    return [a for a in (*row.args, *indirect_rows(row)) if a in found and (n not in found or a not in sources)]


def bits_of(value: float, dtype: torch.dtype) -> int:
    """The bits of a number rounded to a 16-bit float."""
    return int(torch.tensor(value, dtype=torch.float64).to(dtype).view(torch.int16).item()) & 0xFFFF


__all__ = ["bits_of", "moved_rows"]
