"""Forwards and backwards as they are scheduled for a device, run by the interpreter of schedules. Needs no compiler."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import config, interface
from fuser.debug.reference import interpret_schedule
from fuser.frontends.training import Training
from fuser.kernel_cache import REGISTRY
from fuser.lowering.graph import Lowered, lower_graph
from fuser.passes.decompositions import decomposition_table
from fuser.passes.extract import extract
from fuser.passes.grouping import group_nodes
from fuser.passes.registry import run_stage
from fuser.passes.rounding import round_decided
from fuser.scheduler.schedule import Schedule, schedule


def on_device(t: torch.Tensor, device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)


class Compiled:
    """A graph's groups, scheduled as for a device and run by the interpreter of schedules."""

    def __init__(self, module: torch.fx.GraphModule, device: str = "cuda") -> None:
        run_stage("post_grad", module)
        for node in module.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": torch.device(device)}
        grouping = group_nodes(module.graph)
        round_decided(module.graph, grouping.kinds)
        self.module, self.plan = module, extract(module.graph, grouping)
        self.groups: list[tuple[Lowered, Schedule, tuple[Any, ...]]] = []
        for group in self.plan.groups:
            registration = REGISTRY.find(interface.register_fusion(group.graph))
            args = [*registration.bound, *(on_device(n.meta["val"], device) for n in group.inputs)]
            lowered = lower_graph(registration.spec.graph, args, config.numerics)
            self.groups.append((lowered, schedule(lowered, config.max_body_rows), registration.bound))

    def passes(self, n: int) -> int:
        """How many times kernels read or write tensors of `n` elements, each counted once for each kernel."""
        count = 0
        for lowered, found, _ in self.groups:
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
                group, (lowered, found, bound) = item
                values = interpret_schedule(lowered, found, (*bound, *(known[i] for i in group.inputs)))
                known.update(zip(group.outputs, values))
                waiting.remove(item)
            for node in [o for o in outside if all(i in known for i in o.all_input_nodes)]:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
                outside.remove(node)
        return torch.fx.node.map_arg(self.module.graph.output_node().args[0], known.__getitem__)


def compiled(
    fn: Any, args: tuple[torch.Tensor, ...], device: str = "cuda"
) -> tuple[list[Compiled], tuple[torch.Tensor, ...]]:  # fmt: skip
    """Forward and backward of `fn`, and the gradients that they give."""
    found: list[Compiled] = []

    def compile_part(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(Compiled(module, device))
        return make_boxed_func(found[-1])

    run = aot_function(fn, compile_part, compile_part, Training({}, ()).partition, decomposition_table())
    return found, torch.autograd.grad(run(*args).float().square().sum(), args)
