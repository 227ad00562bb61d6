"""Runs the whole scheduler: from lowered buffers to kernel plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import is_checked
from fuser.ir.nodes import Buffer
from fuser.ir.sizes import ZERO, Expr
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import TensorInput
from fuser.scheduler.arrange import arrange
from fuser.scheduler.fusion import Fusion, fuse
from fuser.scheduler.inline import inline_cheap
from fuser.scheduler.kernel_plan import KernelPlan
from fuser.scheduler.nodes import Node, make_nodes
from fuser.scheduler.plan import build_plan
from fuser.scheduler.recompute import recompute
from fuser.scheduler.together import Joined, join_plans
from fuser.scheduler.traversal import Memory
from fuser.scheduler.unroll import unroll_short
from fuser.scheduler.writes import place_writes

MOST_ROUNDS = 3  # rounds of fusing again after results are recomputed instead of stored


@dataclass(frozen=True)
class Schedule:
    """Plans in launch order, the buffers that need memory, and why nodes were kept apart.

    `joined`: by a plan's number, the plan that can replace it and the next one.
    """

    plans: tuple[KernelPlan, ...]
    buffers: tuple[Buffer, ...]
    reasons: tuple[tuple[str, str, str], ...]
    joined: Mapping[int, Joined] = field(default_factory=dict)


def schedule(lowered: Lowered, most_rows: int) -> Schedule:
    """The kernel plans of a lowered graph. Unsupported if an index would go unchecked or an output uncomputed."""
    ctx = lowered.ctx
    outputs = {name for kind, name in lowered.outputs if kind == "buffer"}
    roots = outputs | {name for name, _ in ctx.writes}
    live = _live_buffers(ctx.buffers, roots)
    if any(_is_checking(b) for b in ctx.buffers if b not in live):
        raise Unsupported("an index is read for its size alone: no kernel would look at its places")
    nodes = make_nodes(ctx, live, _empty(lowered))
    unroll_short(nodes, ctx.target, roots)
    inline_cheap(nodes, ctx.hint, ctx.target, roots)
    nodes = _live_nodes(nodes, roots)
    strides: dict[str, tuple[Expr, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    sizes: dict[str, tuple[int, int]] = {}
    _add_inputs(lowered, strides, dtypes, sizes)
    arrange(ctx, nodes, roots, strides)
    strides |= {b.name: b.stride for b in ctx.buffers}
    dtypes |= {b.name: b.dtype for b in ctx.buffers}
    for b in ctx.buffers:
        n = 1
        for s in b.size:
            n *= ctx.hint(s)
        sizes[b.name] = (n * b.dtype.itemsize, n)
    memory = Memory(strides, dtypes, roots)
    fusion = fuse(ctx, nodes, sizes, most_rows, memory)
    if not ctx.writes:  # no input changes meanwhile
        for _ in range(MOST_ROUNDS):
            if not recompute(nodes, fusion, roots, sizes, ctx.target, ctx.hint):
                break
            nodes = _live_nodes(nodes, roots)
            fusion = fuse(ctx, nodes, sizes, most_rows, memory)
    kept = outputs | _crossing(fusion)
    stored = kept | roots
    made = [build_plan(ctx, k, strides, dtypes, stored.__contains__) for k in fusion.kernels]
    plans = [p for p in made if p is not None]
    joined: dict[int, Joined] = {}
    if ctx.writes:
        plans = place_writes(ctx, plans, kept, strides, dtypes)
    elif ctx.target.joins:
        plans, joined = join_plans(plans, outputs)
    needed = {s.buffer for p in plans for s in p.stores}
    missing = outputs - needed
    if missing:
        raise Unsupported(f"outputs {sorted(missing)} are computed by no kernel")
    buffers = tuple(b for b in ctx.buffers if b.name in needed)
    return Schedule(tuple(plans), buffers, tuple(fusion.reasons), joined)


def _empty(lowered: Lowered) -> set[str]:
    """The names of inputs and buffers that have no elements at any call."""
    sizes = {b.name: b.size for b in lowered.ctx.buffers}
    sizes |= {f"in{n}": r.size for n, r in enumerate(lowered.inputs) if isinstance(r, TensorInput)}
    return {name for name, size in sizes.items() if any(lowered.ctx.canon(s) == ZERO for s in size)}


def _add_inputs(
    lowered: Lowered, strides: dict[str, tuple[Expr, ...]], dtypes: dict[str, torch.dtype],
    sizes: dict[str, tuple[int, int]],
) -> None:  # fmt: skip
    ctx = lowered.ctx
    for number, record in enumerate(lowered.inputs):
        if isinstance(record, TensorInput):
            name = f"in{number}"
            strides[name] = tuple(ctx.canon(s) for s in record.stride)
            dtypes[name] = record.dtype
            n = 1
            for s in record.size:
                n *= ctx.hint(s)
            sizes[name] = (n * record.dtype.itemsize, n)


def _is_checking(buffer: Buffer) -> bool:
    """Whether the buffer's loops check an index against its bounds."""
    return any(is_checked(r) for loops in buffer.loops for r in loops.body.rows)


def _live_buffers(buffers: list[Buffer], outputs: set[str]) -> list[Buffer]:
    live: set[str] = set()
    for b in reversed(buffers):
        if b.name in outputs or b.name in live:
            live.add(b.name)
            live.update(name for loops in b.loops for name, _ in loops.body.loads())
    return [b for b in buffers if b.name in live]


def _live_nodes(nodes: list[Node], outputs: set[str]) -> list[Node]:
    live = set(outputs)
    kept = []
    for node in reversed(nodes):
        if node.buffer.name in live:
            live |= node.reads
            kept.append(node)
    return kept[::-1]


def _crossing(fusion: Fusion) -> set[str]:
    """Buffers that one kernel writes and another reads."""
    out: set[str] = set()
    for kernel in fusion.kernels:
        for node in kernel.nodes:
            out |= {b for b in node.reads if b not in kernel.produced}
    return out
