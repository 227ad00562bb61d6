"""Whether an operator takes its neighbours to ATen: a program with elementwise calls on all sides of it, in groups.

Nothing is compiled and nothing is run by kernels: the program is traced, put into groups, and each group is turned into
the source of a kernel, in pieces where it has to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from fuser import compiler, config
from fuser.canonical import Registered, canonicalize
from fuser.errors import CompileError, Unsupported
from fuser.fallback import Fallback
from fuser.ops.cells import CPP_TYPES
from fuser.passes.extract import extract
from fuser.passes.grouping import group_nodes
from fuser.splitting import Piece, split
from tests import compare
from tests.opinfo.runner import SEED, Sample

BEFORE, AFTER = torch.ops.aten.sinh.default, torch.ops.aten.asinh.default

SPLIT: list[str] = []  # why groups were split


def surrounded(sample: Sample) -> fx.GraphModule:
    """The functional trace of the sample's call, with `BEFORE` on its floats and `AFTER` on its results but complex."""

    def program(zero: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        around = [t + torch.sinh(t) * zero if t.is_floating_point() else t for t in tensors]
        results = [t for t in compare.leaves(sample.call(*around)) if isinstance(t, torch.Tensor)]
        return tuple(torch.asinh(t + zero) if _is_fusible(t) else t for t in results)

    torch.manual_seed(SEED)
    zero = torch.zeros(())
    return make_fx(dispatch_functionalize(program))(zero, *compare.copy_inputs(sample.tensors))


def _is_fusible(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and t.dtype in CPP_TYPES


def lost_neighbours(module: fx.GraphModule) -> tuple[int, list[str]]:
    """How many of the elementwise calls there are, and why those are not fused that are not."""
    graph = module.graph
    wanted = [n for n in graph.nodes if n.target in (BEFORE, AFTER) and _is_fusible(n.meta["val"])]
    lost: list[str] = []
    grouping = group_nodes(graph)
    plan = extract(graph, grouping)
    lost += [f"outside: {grouping.reasons.get(n.name)}" for n in plan.outside if n in wanted]
    for group in plan.groups:
        if any(n.target in (BEFORE, AFTER) for n in group.graph.nodes):
            lost += _lost(canonicalize(group.graph), [n.meta.get("val") for n in group.inputs])
    return len(wanted), lost


def _lost(registered: Registered, examples: Sequence[Any]) -> Iterator[str]:
    """Why calls of a group are not fused."""
    backend = compiler.find_backend("cpu")
    assert backend is not None
    spec = compiler.compile_upfront(registered, 0, config.key())
    with FakeTensorMode() as mode:
        args = [_fake(mode, e) for e in examples]
        try:
            if spec.blocked:
                raise Unsupported(spec.blocked[0])
            compiler.generate(spec, args, backend)
            return
        except (Unsupported, CompileError) as e:
            reason = str(e)
        found = compiler.find_refused(spec, args)
    graphs: list[fx.Graph] = []
    SPLIT.append(reason)
    made = split(registered, found, lambda g: (0, graphs.append(g) or Fallback(canonicalize(g))))
    if made is None:
        yield from [reason] * sum(n.op in ("aten.sinh", "aten.asinh") for n in registered.graph.calls)
        return
    yield from (u.reason for u in made.unfused if u.op in ("aten.sinh", "aten.asinh"))
    for piece in made.pieces:
        yield from _lost_of(piece)


def _lost_of(piece: Piece) -> Iterator[str]:
    if None not in piece.examples:
        yield from _lost(canonicalize(piece.graph), piece.examples)


def _fake(mode: FakeTensorMode, e: Any) -> Any:
    if not isinstance(e, torch.Tensor):
        return e
    return torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device="cpu")


__all__ = ["lost_neighbours", "surrounded"]
