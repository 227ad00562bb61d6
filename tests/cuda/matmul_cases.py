"""Matmuls with what follows them: functions, arguments, and the sources of the kernels that do both at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cuda_cases import Case
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import checks
from fuser import config, interface
from fuser.cuda import fused_kernel, matmul
from fuser.cuda.matmul import MatmulTile
from fuser.frontends import matmuls
from fuser.lowering.graph import lower_graph
from fuser.scheduler.schedule import schedule

aten = torch.ops.aten
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = MatmulTile(16, 16, 16, 4, 2)
ORDER = {aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.addmm.default: (2, 0, 1)}


@dataclass(frozen=True)
class MatmulCase(Case):
    """`follow(matmul's result, *others)`; the arguments are a, b, for addmm the bias, then the others."""

    target: Any = aten.mm.default
    follow: Callable[..., Any] = torch.relu
    tile: MatmulTile = SMALL
    precision: str = "ieee"

    def problem(self, out: Any, args: tuple[Any, ...]) -> str | None:
        """None, or what is wrong with the results `out`.

        What follows a product of halves sees it unrounded, where eager rounds it. Results in float32 show that: then
        eager's are no measure, and results have to be those of float64, but for float32's own roundings.
        """
        exact = checks.tensors(self.fn(*checks.to_float64(args)))
        eager = checks.tensors(self.fn(*args))
        if any(e.dtype.itemsize > args[0].dtype.itemsize for e in eager):
            return checks.judge(checks.tensors(out), [e.to(t.dtype) for e, t in zip(exact, eager)]).problem
        return checks.judge(checks.tensors(out), eager, exact).problem

    def graph(self, args: tuple[Any, ...]) -> Any:
        """The canonical graph with the outer product in the matmul's place."""
        n = len(ORDER[self.target])
        result = self.target(*(args[i] for i in ORDER[self.target]))
        traced = make_fx(self.follow)(result, *args[n:]).graph
        joined = matmuls.combined(self.target, traced, 0)
        return interface.kernel_spec(interface.register_fusion(joined, functional=True)).graph

    def source(self, args: tuple[Any, ...]) -> fused_kernel.Source:
        graph = self.graph(args)
        lowered = lower_graph(graph, args, config.numerics)
        plan = schedule(lowered, config.max_body_rows)
        return matmul.generate(lowered, plan, graph.single, self.tile, self.precision)


def _case(name: str, target: Any, follow: Callable[..., Any], make: Callable[..., Any]) -> MatmulCase:
    n = len(ORDER[target])

    def fn(*args: Any) -> Any:
        return follow(target(*(args[i] for i in ORDER[target])), *args[n:])

    return MatmulCase(name, fn, make, target, follow)


def heads(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows and columns seen as four dims, and a factor for one of rows and one of columns."""
    return x.view(3, 11, 4, 8) * scale


MM, BMM, ADDMM = aten.mm.default, aten.bmm.default, aten.addmm.default
MATMULS = {
    c.name: c
    for c in (
        _case("mm relu", MM, lambda x: torch.relu(x) * 2, lambda i: (i.normal(33, 40), i.normal(40, 70))),
        _case("mm even", MM, torch.tanh, lambda i: (i.normal(32, 48), i.normal(48, 64))),
        _case("mm transposed", MM, lambda x, r: x + r,
              lambda i: (i.normal(40, 33).t(), i.normal(70, 40).t(), i.normal(33, 70))),
        _case("addmm gelu bf16", ADDMM, lambda x, r: F.gelu(x) + r,
              lambda i: (i.normal(33, 48, dtype=BF16), i.normal(64, 48, dtype=BF16).t(), i.normal(64, dtype=BF16),
                         i.normal(33, 64, dtype=BF16))),
        _case("addmm matrix f16", ADDMM, lambda x: (torch.sigmoid(x), x * 2),
              lambda i: (i.normal(20, 24, dtype=F16), i.normal(24, 40, dtype=F16), i.normal(20, 40, dtype=F16))),
        _case("row scale", MM, lambda x, s: (x * s).to(torch.float16),
              lambda i: (i.normal(33, 20), i.normal(20, 37), i.normal(33, 1))),
        _case("swiglu", MM, lambda x, g: F.silu(g) * x,
              lambda i: (i.normal(2, 17, 32, dtype=F16).view(34, 32), i.normal(48, 32, dtype=F16).t(),
                         i.normal(34, 48, dtype=F16))),
        _case("heads", MM, heads, lambda i: (i.normal(33, 20), i.normal(20, 32), i.normal(3, 1, 4, 1))),
        _case("bmm", BMM, lambda x, m: torch.exp(x - m),
              lambda i: (i.normal(3, 20, 17), i.normal(3, 17, 33), i.normal(3, 20, 1))),
        _case("strided", MM, lambda x: x + 1, lambda i: (i.normal(40, 60)[::2, ::3], i.normal(20, 66)[:, ::2])),
        _case("wide f16", MM, lambda x, w: (x * w).float(),
              lambda i: (i.normal(20, 50, dtype=F16), i.normal(50, 40, dtype=F16), i.normal(40, dtype=F16))),
        _case("wide bf16", MM, lambda x, w: (x * w).float(),
              lambda i: (i.normal(130, 200, dtype=BF16), i.normal(200, 300, dtype=BF16), i.normal(300, dtype=BF16))),
    )
}  # fmt: skip
INTERPRETED_MATMULS = tuple(name for name in MATMULS if "bf16" not in name)  # the interpreter multiplies no bf16


def with_tile(case: MatmulCase, tile: MatmulTile) -> MatmulCase:
    """The case with another tile."""
    return dataclasses.replace(case, tile=tile)
