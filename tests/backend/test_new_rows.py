"""A new op and a new reduction are one row of the table each: kernels for every machine's row are right."""

from __future__ import annotations

import pytest
import torch
import torch.fx

import fuser
from fuser import config, machines, targets
from fuser.canonical import canonicalize
from fuser.cpu import fused_kernel
from fuser.cpu.vir.verifier import verify_kernel
from fuser.debug.vector_interpreter import run_functions
from fuser.kernel_cache import REGISTRY
from fuser.lowering.graph import lower_graph
from fuser.lowering.reductions import reduce_to_result
from fuser.ops import FLOATS, REDUCTIONS, OpRow, ReductionRow
from fuser.scheduler.schedule import schedule
from tests.backend.fused import no_fallback

EVERY = [row.name for row in machines.ROWS]
SHAPES = ((5, 40), (3, 515), (200, 3))


@torch.library.custom_op("rows::bent", mutates_args=())
def bent(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x * x)


@torch.library.custom_op("rows::compound", mutates_args=())
def compound(x: torch.Tensor, dim: int) -> torch.Tensor:
    return (1 + x).prod(dim) - 1


@bent.register_fake
def _(x):
    return torch.empty_like(x)


@compound.register_fake
def _(x, dim):
    return x.sum(dim)


BENT = OpRow("bent", 1, lambda x: x / (1 + x * x), "({0} / (1 + {0} * {0}))", "({0} / (1 + {0} * {0}))", FLOATS)
COMPOUND = ReductionRow(
    "compound", lambda x, dims, keep: torch.stack([1 + x]).prod(dims[0] + 1, keep)[0] - 1, lambda dtype: 0,
    "{0} + {1} + {0} * {1}", lambda dtype: dtype,
)  # fmt: skip


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setitem(REDUCTIONS, "compound", COMPOUND)
    fuser.register_op(BENT, operator=bent)
    fuser.register_lowering(compound, lambda ctx, x, dim: reduce_to_result(ctx, "compound", x, dim))
    yield
    fuser.unregister_op("bent")
    fuser.unregister_lowering(compound)


def program(x):
    y = torch.ops.rows.bent(x)
    small = y * 0.1
    return y, torch.ops.rows.compound(small, -1), torch.ops.rows.compound(small, 0)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=made).to(dtype) for s in SHAPES]


def judge(got, x: torch.Tensor) -> None:
    for mine, eager, true in zip(got, program(x), program(x.double()), strict=True):
        assert mine.dtype is eager.dtype
        own, theirs = ((r.double() - true).abs().max() for r in (mine, eager))
        assert own <= 2 * theirs + 4e-7 * true.abs().max()


@pytest.mark.parametrize("isa", [n for n in EVERY if machines.why_not(machines.find(n)) is None])
def test_kernels_of_machines_that_run_here(isa):
    with config.override(isa=isa):
        registration = REGISTRY.find(fuser.register_fusion(torch.fx.symbolic_trace(program), functional=True))
        for dtype in (torch.float32, torch.bfloat16):
            for x in tensors(dtype):
                judge(registration.handle(x), x)
    no_fallback(registration.spec)
    sources = [k.source for k in registration.spec.store.kernels]
    assert all("bent" in s and "compound" in s for s in sources)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", EVERY)
def test_vector_ir_of_all_machines(isa):
    graph = canonicalize(torch.fx.symbolic_trace(program), False).graph
    for x in tensors(torch.float32)[:1]:
        lowered = lower_graph(graph, (x,))
        assert lowered.ctx.target is targets.of("cpu")
        plans = schedule(lowered, config.max_body_rows)
        functions, launch = fused_kernel.functions_for(lowered, plans, False, machines.find(isa))
        for function in functions:
            verify_kernel(function.code)
        judge(run_functions(functions, launch, [x], ()), x)
