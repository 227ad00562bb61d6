"""Writes into inputs: a kernel stores into an input directly if its old content is no longer needed, else a copy does.

By the lowering's rules, reads of a written input are reads of its old content. A store may replace that content once
every read has happened: no later kernel or pass reads the input, and in the same kernel each point reads it only where
it stores. Any other write goes through a separate buffer, which is copied at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import is_checked, loads_in, loop_variables, ops, record
from fuser.ir.nodes import Buffer, Pointwise
from fuser.ir.sizes import Expr
from fuser.lowering.context import LoweringContext
from fuser.reasons import because
from fuser.scheduler.fusion import start_kernel
from fuser.scheduler.kernel_plan import KernelPlan, Store
from fuser.scheduler.nodes import make_nodes
from fuser.scheduler.plan import build_plan

Strides = dict[str, tuple[Expr, ...]]
Dtypes = dict[str, torch.dtype]


def place_writes(
    ctx: LoweringContext, plans: Sequence[KernelPlan], kept: set[str], strides: Strides, dtypes: Dtypes
) -> list[KernelPlan]:
    """`plans` with the context's writes into inputs added. `kept` are buffers that stay in memory in any case."""
    out = list(plans)
    if any(is_checked(r) for p in out for r in p.rows):
        raise Unsupported(because("writes", "an index that is checked may fail when inputs are written already"))
    late: list[KernelPlan] = []
    for buffer, number in ctx.writes:
        target = f"in{number}"
        at, *others = [i for i, p in enumerate(out) if any(s.buffer == buffer for s in p.stores)]
        if strides[buffer] == strides[target] and not others and _is_last_use(out, at, buffer, target):
            out[at] = _redirected(out[at], buffer, target, buffer in kept, dtypes)
        else:
            late.append(_copy(ctx, buffer, target, len(out) + len(late), strides, dtypes))
    return out + late


def _is_last_use(plans: Sequence[KernelPlan], at: int, buffer: str, target: str) -> bool:
    """Whether nothing reads `target` after the stores into `buffer`, and each point reads it only where it stores.

    A point that stores several elements, of a short axis, may read each element only for that element's new content.
    """

    def loads(plan: KernelPlan) -> dict[int, Expr]:
        return {n: r.address for n, r in enumerate(plan.rows) if r.op == "load" and r.buffer == target}

    plan, own = plans[at], loads(plans[at])
    if any(loads(p) for p in plans[at + 1 :]):
        return False
    stores = [s for s in plan.stores if s.buffer == buffer]
    if len(stores) > 1 and own:
        rest = [*(s.row for s in plan.stores if s.buffer != buffer), *(r.row for r in plan.reductions)]
        if not own.keys().isdisjoint(plan.passes.needed(rest)):
            return False
    for store in stores:
        needed = own.keys() if len(stores) == 1 else own.keys() & set(plan.passes.needed([store.row]))
        if any(own[n] != store.address for n in needed):
            return False
    later = list(plan.passes)[min(s.phase for s in stores) + 1 :]
    return all(own.keys().isdisjoint((*p.before, *p.inner, *p.outer)) for p in later)


def _redirected(plan: KernelPlan, buffer: str, target: str, keep: bool, dtypes: Dtypes) -> KernelPlan:
    """The plan with stores into `target` instead of `buffer`, or in addition if `keep`."""
    stores: list[Store] = []
    for s in plan.stores:
        moved = dataclasses.replace(s, buffer=target)
        stores += [s] if s.buffer != buffer else [s, moved] if keep else [moved]
    used = dict.fromkeys([r.buffer for r in loads_in(plan.rows)] + [s.buffer for s in stores])
    return dataclasses.replace(plan, stores=tuple(stores), buffers=tuple((b, dtypes[b]) for b in used))


def _copy(
    ctx: LoweringContext, source: str, target: str, order: int, strides: Strides, dtypes: Dtypes
) -> KernelPlan:
    """A plan that copies a buffer into an input."""
    made = next(b for b in ctx.buffers if b.name == source)
    body = record(lambda index: ops.load(source, index, made.dtype), len(made.size))
    loops = Pointwise(made.size, body, loop_variables(len(made.size)))
    buffer = Buffer(target, made.dtype, made.size, strides[target], [loops], origin="copy into an input")
    (node,) = make_nodes(ctx, [buffer])
    plan = build_plan(ctx, start_kernel(node, order), strides, dtypes, lambda name: True)
    assert plan is not None
    return plan
