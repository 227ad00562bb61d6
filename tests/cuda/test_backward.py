"""How much memory the kernels of backwards touch: counted in their plans, so that no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import config, interface
from fuser.debug.reference import interpret_schedule
from fuser.frontends.training import Training
from fuser.lowering.graph import Lowered, lower_graph
from fuser.passes.decompositions import decomposition_table
from fuser.passes.extract import extract
from fuser.passes.grouping import group_nodes
from fuser.passes.registry import run_stage
from fuser.scheduler.schedule import Schedule, schedule

BF16 = torch.bfloat16


def on_cuda(t: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


class Compiled:
    """A graph's groups, scheduled as for CUDA and run by the interpreter of schedules."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        run_stage("post_grad", module)
        for node in module.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
        self.module, self.plan = module, extract(module.graph, group_nodes(module.graph))
        self.groups: list[tuple[Lowered, Schedule]] = []
        for group in self.plan.groups:
            spec = interface.kernel_spec(interface.register_fusion(group.graph))
            lowered = lower_graph(spec.graph, [on_cuda(n.meta["val"]) for n in group.inputs], config.numerics)
            self.groups.append((lowered, schedule(lowered, config.max_body_rows)))

    def passes(self, n: int) -> int:
        """How many times kernels read or write tensors of `n` elements, each counted once for each kernel."""
        count = 0
        for lowered, found in self.groups:
            ctx = lowered.ctx
            sizes = {b.name: b.size for b in ctx.buffers}
            sizes |= {f"in{i}": r.size for i, r in enumerate(lowered.inputs)}
            plans = [p for n, p in enumerate(found.plans) if n not in found.joined and n - 1 not in found.joined]
            for plan in [*plans, *(j.plan for j in found.joined.values())]:
                touched = [(r.attr[0], 0) for r in plan.rows if r.op == "load"] + [(s.buffer, 1) for s in plan.stores]
                for name, _ in dict.fromkeys(touched):
                    elements = 1
                    for s in sizes[name]:
                        elements *= ctx.hint(ctx.canon(s))
                    count += elements == n
        return count

    def __call__(self, *args: Any) -> Any:
        known = dict(zip((n for n in self.module.graph.nodes if n.op == "placeholder"), args))
        waiting = list(zip(self.plan.groups, self.groups))
        outside = list(self.plan.outside)
        while waiting or outside:
            for item in [w for w in waiting if all(i in known for i in w[0].inputs)]:
                group, (lowered, found) = item
                values = interpret_schedule(lowered, found, tuple(known[i] for i in group.inputs))
                known.update(zip(group.outputs, values))
                waiting.remove(item)
            for node in [o for o in outside if all(i in known for i in o.all_input_nodes)]:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
                outside.remove(node)
        return torch.fx.node.map_arg(self.module.graph.output_node().args[0], known.__getitem__)


def compiled(fn: Any, args: tuple[torch.Tensor, ...]) -> tuple[list[Compiled], tuple[torch.Tensor, ...]]:
    """Forward and backward of `fn`, and the gradients that they give."""
    found: list[Compiled] = []

    def compile_part(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(Compiled(module))
        return make_boxed_func(found[-1])

    run = aot_function(fn, compile_part, compile_part, Training({}, ()).partition, decomposition_table())
    return found, torch.autograd.grad(run(*args).float().square().sum(), args)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def cross_entropy(x: torch.Tensor, cast: bool = True, **options: Any) -> torch.Tensor:
    target = torch.arange(x.shape[0], device=x.device) * 7 % x.shape[1]
    return F.cross_entropy(x.float() if cast and x.dtype is BF16 else x, target, **options)


ROWS, COLUMNS = 96, 80
CASES = {
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), 1, 0, 3),
    "swiglu": (lambda g, u: F.silu(g) * u, 2, 0, 5),
    "softmax": (lambda x: torch.softmax(x, -1), 1, 0, 3),
    "rms_norm": (rms_norm, 1, 1, 3),
    "layer_norm": (layer_norm, 1, 2, 3),
    "cross_entropy": (cross_entropy, 1, 0, 2),
    "cross_entropy, some ignored": (lambda x: cross_entropy(x, ignore_index=14), 1, 0, 2),
    "cross_entropy, sum": (lambda x: cross_entropy(x, reduction="sum", ignore_index=7), 1, 0, 2),
    "cross_entropy, each": (lambda x: cross_entropy(x, reduction="none", ignore_index=7), 1, 0, 2),
    "cross_entropy of halves": (lambda x: cross_entropy(x, False), 1, 0, 2),
    "cross_entropy of halves, each": (lambda x: cross_entropy(x, False, reduction="none", ignore_index=7), 1, 0, 2),
    "log_softmax of halves": (lambda x: torch.log_softmax(x, -1), 1, 0, 3),
    "log_softmax": (lambda x: torch.log_softmax(x.float(), -1), 1, 0, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_large_tensors_that_a_backward_touches(name: str) -> None:
    fn, large, small, passes = CASES[name]
    made = torch.Generator().manual_seed(3)
    args = [torch.randn(ROWS, COLUMNS, generator=made) for _ in range(large)]
    args += [torch.randn(COLUMNS, generator=made) for _ in range(small)]
    args = tuple(a.to(BF16).requires_grad_() for a in args)
    parts, grads = compiled(fn, args)
    assert parts[1].passes(ROWS * COLUMNS) == passes
    if name.startswith("cross_entropy"):
        assert parts[0].passes(ROWS * COLUMNS) == 1  # the logits are read, and no probabilities written
    exact = tuple(a.detach().double().requires_grad_() for a in args)
    for got, want in zip(grads, torch.autograd.grad(fn(*exact).square().sum(), exact)):
        assert (got.double() - want).norm() <= 0.02 * want.norm()


def test_cross_entropy_of_rows_that_are_not_numbers_or_ignored() -> None:
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1))
    x[0, 2], x[1, 3], x[2], x[3, 1] = -torch.inf, torch.nan, -torch.inf, torch.inf
    x.requires_grad_()
    for ignored in (0, 14):
        def fn(x: torch.Tensor, ignored: int = ignored) -> torch.Tensor:
            return F.cross_entropy(x, torch.full_like(x[:, 0], ignored, dtype=torch.int64) % 7, ignore_index=ignored)

        _, (got,) = compiled(fn, (x,))
        (want,) = torch.autograd.grad(fn(x).square(), x)
        torch.testing.assert_close(got, want, equal_nan=True)
