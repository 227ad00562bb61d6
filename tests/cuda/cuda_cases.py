"""Functions whose Triton kernels are compiled, interpreted and run: the benchmark's rows and what they leave out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernel_rows import ROWS, Inputs
from fuser import config, interface
from fuser.cuda import fused_kernel
from fuser.errors import Unsupported
from fuser.lowering.graph import lower_graph
from fuser.scheduler.schedule import schedule

Make = Callable[[Inputs], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A function and its arguments."""

    name: str
    fn: Callable[..., Any]
    make: Make

    def args(self, device: str) -> tuple[Any, ...]:
        """Seeded arguments on a device."""
        return self.make(Inputs(device, torch.Generator().manual_seed(7)))

    def fake_args(self) -> tuple[Any, ...]:
        """CUDA tensors without memory; no GPU is needed."""
        with FakeTensorMode():
            return tuple(_on_cuda(a) if isinstance(a, torch.Tensor) else a for a in self.args("cpu"))

    def source(self, args: tuple[Any, ...]) -> fused_kernel.Source:
        """The Triton source for arguments like `args`. Unsupported if there is none."""
        spec = interface.kernel_spec(interface.register_fusion(torch.fx.symbolic_trace(self.fn)))
        if spec.blocked:
            raise Unsupported(spec.blocked[0])
        lowered = lower_graph(spec.graph, args, config.numerics)
        return fused_kernel.generate(lowered, schedule(lowered, config.max_body_rows), spec.graph.single)


def _on_cuda(t: torch.Tensor) -> torch.Tensor:
    base = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="cuda")
    return base.as_strided(t.shape, t.stride(), t.storage_offset())


def _row_case(row: Any, size: int) -> Case:
    return Case(f"{row.name}/{size}", row.fn, lambda i: row.make(i, row.sizes[size]))


def long_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def long_mean_var(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(-1), x.var(-1)


def extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.amax(-1), x.amin(-1)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor + 1


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[index] * 2


def sum_and_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(0), x.amax(0)


BF16 = torch.bfloat16
EXTRA = (
    Case("softmax/long", long_softmax, lambda i: (i.normal(3, 20000),)),
    Case("softmax/odd", long_softmax, lambda i: (i.normal(7, 77),)),
    Case("softmax/bf16", long_softmax, lambda i: (i.normal(5, 3000, dtype=BF16),)),
    Case("log_softmax/long", lambda x: F.log_softmax(x, -1), lambda i: (i.normal(3, 17001),)),
    Case("mean_var/long", long_mean_var, lambda i: (i.normal(2, 17000),)),
    Case("extremes/odd", extremes, lambda i: (i.normal(9, 133),)),
    Case("argmax/split", lambda x: x.argmax(), lambda i: (i.normal(300, 130),)),
    Case("sum_and_max/split", sum_and_max, lambda i: (i.normal(5000, 70),)),
    Case("column_sum/odd", lambda x: x.sum(0), lambda i: (i.normal(700, 33),)),
    Case("scalar", scaled, lambda i: (i.normal(33, 3), 0.37)),
    Case("broadcast/odd", lambda x, y: x + y, lambda i: (i.normal(5, 1, 33), i.normal(7, 33))),
    Case("strided", lambda x, y: x * y, lambda i: (i.normal(40, 66)[:, ::2], i.normal(40, 33))),
    Case("unaligned", lambda x: x * 2, lambda i: (i.normal(1001)[1:],)),
    Case("integers", lambda x: (x * 3 - 1) // 2 + x % 5, lambda i: (i.below(100, 77),)),
    Case("gather", gather_rows, lambda i: (i.normal(50, 20), i.below(50, 30))),
)
_ROWS = (_row_case(r, size) for r in ROWS if not r.mutates for size in (0, 2))
CASES: dict[str, Case] = {c.name: c for c in (*_ROWS, *EXTRA)}
LARGE = tuple(name for name in CASES if not name.endswith("/0"))
# Each kind of kernel once or twice: the interpreter is slow.
INTERPRETED = (
    "relu_mul_add/0", "bias_gelu_mul/0", "sigmoid_silu/0", "softmax/0", "softmax_middle/0", "layer_norm/0",
    "group_norm/0", "cross_entropy/0", "swiglu/0", "rope/0", "adam/0", "transposed_add/0", "column_sum/0", "full_sum/0",
    "argmax/0", "embedding_layer_norm/0", "masked_softmax/0", "mixed_dtypes/0", "bf16_gelu/0", "bf16_rms_norm/0",
    "bool_masks/0", "softmax/odd", "softmax/bf16", "log_softmax/long", "mean_var/long", "extremes/odd", "argmax/split",
    "sum_and_max/split", "scalar", "broadcast/odd", "strided", "unaligned", "integers", "gather",
)  # fmt: skip
