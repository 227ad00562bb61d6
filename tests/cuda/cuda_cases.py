"""Functions whose Triton kernels are compiled, interpreted and run: the benchmark's rows and what they leave out."""

from __future__ import annotations

import math
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
            return tuple(on_cuda(a) if isinstance(a, torch.Tensor) else a for a in self.args("cpu"))

    def source(self, args: tuple[Any, ...]) -> fused_kernel.Source:
        """The Triton source for arguments like `args`. Unsupported if there is none."""
        spec = interface.kernel_spec(interface.register_fusion(torch.fx.symbolic_trace(self.fn)))
        if spec.blocked:
            raise Unsupported(spec.blocked[0])
        lowered = lower_graph(spec.graph, args, config.numerics)
        return fused_kernel.generate(lowered, schedule(lowered, config.max_body_rows), spec.graph.single)


def on_cuda(t: torch.Tensor) -> torch.Tensor:
    base = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="cuda")
    return base.as_strided(t.shape, t.stride(), t.storage_offset())


def _row_case(row: Any, size: int) -> Case:
    return Case(f"{row.name}/{size}", row.fn, lambda i: row.make(i, row.sizes[size]))


def last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.channels_last)


def image_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0]
    return out.relu()


def long_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def long_mean_var(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(-1), x.var(-1)


def long_norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    away = wide - wide.mean(-1, keepdim=True)
    return (away * (away.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)


def batch_norm_columns(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0]


def special_rows(i: Inputs, n: int = 20001) -> torch.Tensor:
    """Rows with NaN, infinities, one number, and numbers far from zero."""
    x = i.normal(6, n)
    x[0, 77], x[1, 3], x[2, n - 1] = math.nan, math.inf, -math.inf
    x[3], x[4] = 0.1, x[4] * 0.1 + 100
    return x


def extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.amax(-1), x.amin(-1)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor + 1


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[index] * 2


def uniform_sum(seed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * torch.ops.fuser.uniform_like(seed, 0, x) + torch.ops.fuser.uniform_like(seed, 1 << 35, x)


def dropped(seed: torch.Tensor, x: torch.Tensor, p: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout and its mask, as the pass `functional_random` writes it."""
    kept = torch.ops.fuser.uniform_like(seed, 0, x) >= p
    return (x * torch.where(kept, 1 / (1 - p), 0.0)).to(x.dtype), kept


def at_the_edges(seed: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Probabilities of 0, nearly 1 and 1, and from a tensor."""
    u = torch.ops.fuser.uniform_like(seed, 8, x)
    return (*dropped(seed, x, 0.0), *dropped(seed, x, 0.9999999), u < 1.0, u < x, u < -1.0)


def seeded(*size: int, dtype: torch.dtype = torch.float32) -> Make:
    """A seed, and numbers in a size."""
    return lambda i: (i.below(1 << 62), i.normal(*size, dtype=dtype))


def sum_and_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(0), x.amax(0)


def norm_gradients(
    g: torch.Tensor, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum along columns for the weight, one along rows for the input, of much the same."""
    wide, scaled = x.float(), (g * w).float()
    along = (scaled * wide).sum(1, keepdim=True)
    return (g * (wide * r)).sum(0).to(w.dtype), (scaled * r - wide * (along * r * r * r / x.shape[1])).to(x.dtype)


def summed_norm_gradients(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, after: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Of a norm before three products, beside a residual: what the backward of a transformer's layer has of it."""
    g, wide = a + b + c, x.float()
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    scaled = (g * w).float()
    along = (scaled * wide).mean(-1, keepdim=True)
    return (g * (wide * r)).sum((0, 1)).to(w.dtype), after + (scaled * r - wide * (along * r * r * r)).to(x.dtype)


def layer_norm_gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    size = [x.shape[-1]]
    _, mean, scale = torch.ops.aten.native_layer_norm(x, size, w, w, 1e-5)
    found = torch.ops.aten.native_layer_norm_backward(g, x, size, mean, scale, w, w, [True, True, True])
    return found[0], found[1], found[2]


def softmax_gradient(y: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With what is summed and largest in each column of it."""
    out = (g - (g * y).sum(-1, keepdim=True)) * y
    return out, out.sum(0), (g * y).amax(0), g.view(-1, 2, g.shape[1]).sum((0, 1))


def key_gradient(g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Of a rotated key that two heads share."""
    both = g.view(2, 3, 2, 10, 16).sum(2)
    turned = both * sin
    turned = torch.cat((turned[..., 8:], -turned[..., :8]), -1)
    return (both * cos + turned).transpose(1, 2).contiguous()


def padded_search(x: torch.Tensor) -> torch.Tensor:
    """Places of the same number for all elements, read where no padding is: seed 601540 of the random programs."""
    found = torch.count_nonzero(x, 0)
    return F.pad(torch.bucketize(found, found), (1, -1), "constant", 1)


BF16 = torch.bfloat16
EXTRA = (
    Case("padded_search", padded_search, lambda i: (i.normal(33, 40),)),
    Case("softmax/long", long_softmax, lambda i: (i.normal(3, 20000),)),
    Case("softmax/odd", long_softmax, lambda i: (i.normal(7, 77),)),
    Case("softmax/bf16", long_softmax, lambda i: (i.normal(5, 3000, dtype=BF16),)),
    Case("log_softmax/long", lambda x: F.log_softmax(x, -1), lambda i: (i.normal(3, 17001),)),
    *(Case(f"log_softmax/long/{n}", lambda x: F.log_softmax(x, -1), lambda i, n=n: (i.normal(3, n, dtype=BF16),))
      for n in (17001, 17002, 17004)),
    *(Case(f"long_classes/{n}", lambda x, t: F.cross_entropy(x.float(), t),
           lambda i, n=n: (i.normal(3, n, dtype=BF16), i.below(n, 3))) for n in (17001, 17002)),
    Case("long_norm/odd", long_norm, lambda i: (i.normal(2, 40001, dtype=BF16),)),
    Case("mean_var/long", long_mean_var, lambda i: (i.normal(2, 17000),)),
    Case("mean_var/special", long_mean_var, lambda i: (special_rows(i),)),
    Case("mean_var/few", long_mean_var, lambda i: (i.normal(3, 140001) + 100,)),
    Case("mean_var/all", lambda x: torch.var_mean(x), lambda i: (i.normal(70001) + 30,)),
    Case("exp_var/long", lambda x: torch.exp(x - x.amax(-1, keepdim=True)).var(-1), lambda i: (i.normal(2, 17001),)),
    Case("mean_var/columns", lambda x: (x.mean(0), x.var(0)), lambda i: (i.normal(1100, 40) + 30,)),
    Case("mean_var/columns/odd", lambda x: (x.mean(0), x.var(0)),
         lambda i: (special_rows(i)[:, :2500].t().contiguous(),)),
    Case("batch_norm/columns", batch_norm_columns, lambda i: (i.normal(5000, 70), i.uniform(70), i.normal(70))),
    Case("long_norm/bf16", long_norm, lambda i: (i.normal(2, 40000, dtype=BF16),)),
    Case("shared/rows", lambda x, w, b: x * w + b, lambda i: (i.normal(3, 2, 5000), i.normal(5000), i.normal(5000))),
    Case("shared/some", lambda x, w, b: x * w + b,
         lambda i: (i.normal(3, 2, 5000).transpose(0, 1), i.normal(3, 5000), i.normal(3, 5000))),
    Case("shared/large", lambda x, w: x * w + 1, lambda i: (i.normal(4, 2100001), i.normal(2100001))),
    Case("turned/batch_norm", lambda x, w, b: turned(image_norm(x, w, b)),
         lambda i: (i.normal(3, 20, 140, 131), i.uniform(20), i.normal(20))),
    Case("turned/cat_batch_norm", lambda x, y, w, b: image_norm(torch.cat([x, y], 1), w, b),
         lambda i: (i.normal(2, 20, 120, 121), last(i.normal(2, 17, 120, 121)), i.uniform(37), i.normal(37))),
    Case("turned/cat", lambda x, b, y: torch.cat([(x + b).relu(), y], 1).clone(memory_format=torch.contiguous_format),
         lambda i: (last(i.normal(2, 40, 31, 33)), i.normal(40, 1, 1), last(i.normal(2, 24, 31, 33)))),
    Case("turned/sums", lambda x, y: (x * y.transpose(1, 2)).sum((0, 2)),
         lambda i: (i.normal(9, 40, 70), i.normal(9, 70, 40))),
    Case("turned/softmax", lambda x: torch.softmax(x, -1).permute(0, 3, 1, 2).contiguous(),
         lambda i: (i.normal(2, 18, 20, 1500),)),
    Case("channels/group_norm", lambda x, w, b: F.group_norm(torch.sigmoid(x), 5, w, b),
         lambda i: (last(i.normal(2, 20, 163, 162) * 3 + 5), i.uniform(20), i.normal(20))),
    Case("channels/group_norm/small", lambda x, w, b: F.group_norm(x, 5, w, b),
         lambda i: (last(i.normal(2, 20, 31, 33)), i.uniform(20), i.normal(20))),
    Case("channels/group_norm/bf16", lambda x: F.group_norm(x, 4),
         lambda i: (last(i.normal(2, 64, 91, 91, dtype=BF16)),)),
    Case("channels/groups", lambda x: x.reshape(2, 5, 4, 31, 33).amax((2, 3, 4)),
         lambda i: (last(i.normal(2, 20, 31, 33)),)),
    Case("layer_norm/few/0", lambda x, w: F.layer_norm(x, x.shape[1:], w),
         lambda i: (i.normal(2, 140, 1000), i.normal(140, 1000))),
    Case("extremes/odd", extremes, lambda i: (i.normal(9, 133),)),
    Case("extremes/bool", lambda x: (x.amax(0), x.amin(1), x.any(1), x.all(0), x.amax()), lambda i: (i.mask(70, 33),)),
    Case("argmax/split", lambda x: x.argmax(), lambda i: (i.normal(300, 130),)),
    Case("sum_and_max/split", sum_and_max, lambda i: (i.normal(2000, 70),)),
    Case("sum_and_max/passing", sum_and_max, lambda i: (i.normal(600, 70),)),
    Case("argmax/passing", lambda x: x.argmax() * 2, lambda i: (i.normal(300, 113),)),
    Case("column_sum/bf16/passing", lambda x: (x * 2).sum(0), lambda i: (i.normal(800, 48, dtype=BF16),)),
    Case("var_columns/passing", lambda x: (x.mean(0), x.var(0)), lambda i: (i.normal(700, 40),)),
    Case("column_sum/many/passing", lambda x: x.sum(0), lambda i: (i.normal(90, 100),)),
    Case("norm_gradients/odd", norm_gradients,
         lambda i: (i.normal(37, 117), i.normal(37, 117), i.uniform(37, 1), i.uniform(117))),
    Case("column_sum/odd", lambda x: x.sum(0), lambda i: (i.normal(700, 33),)),
    Case("scalar", scaled, lambda i: (i.normal(33, 3), 0.37)),
    Case("broadcast/odd", lambda x, y: x + y, lambda i: (i.normal(5, 1, 33), i.normal(7, 33))),
    Case("strided", lambda x, y: x * y, lambda i: (i.normal(40, 66)[:, ::2], i.normal(40, 33))),
    Case("unaligned", lambda x: x * 2, lambda i: (i.normal(1001)[1:],)),
    Case("integers", lambda x: (x * 3 - 1) // 2 + x % 5, lambda i: (i.below(100, 77),)),
    Case("norm_gradients", norm_gradients,
         lambda i: (i.normal(90, 70), i.normal(90, 70), i.uniform(90, 1), i.uniform(70))),
    Case("norm_gradients/bf16", norm_gradients, lambda i: (
        i.normal(999, 800, dtype=BF16), i.normal(999, 800, dtype=BF16), i.uniform(999, 1), i.uniform(800).to(BF16))),
    Case("norm_gradients/summed", summed_norm_gradients,
         lambda i: (*(i.normal(3, 7, 96, dtype=BF16) for _ in range(5)), i.uniform(96).to(BF16))),
    Case("norm_gradients/layer", layer_norm_gradients, lambda i: (i.normal(7, 96), i.normal(7, 96), i.uniform(96))),
    Case("norm_gradients/softmax", softmax_gradient, lambda i: (i.uniform(20, 80), i.normal(20, 80))),
    *(Case(f"norm_gradients/summed/{n}", summed_norm_gradients, lambda i, n=n: (
        *(i.normal(4, 60, n, dtype=BF16) for _ in range(5)), i.uniform(n).to(BF16))) for n in (2048, 4096, 8192)),
    *(Case(f"norm_gradients/layer/{n}", layer_norm_gradients, lambda i, n=n: (
        i.normal(60, n, dtype=BF16), i.normal(60, n, dtype=BF16), i.uniform(n).to(BF16)))
      for n in (768, 4096, 5120)),
    Case("norm_gradients/layer/f32", layer_norm_gradients,
         lambda i: (i.normal(60, 4096), i.normal(60, 4096), i.uniform(4096))),
    Case("norm_gradients/8200", norm_gradients, lambda i: (
        i.normal(60, 8200, dtype=BF16), i.normal(60, 8200, dtype=BF16), i.uniform(60, 1), i.uniform(8200).to(BF16))),
    Case("norm_gradients/f32", norm_gradients,
         lambda i: (i.normal(60, 4000), i.normal(60, 4000), i.uniform(60, 1), i.uniform(4000))),
    Case("key_gradient", key_gradient, lambda i: (
        i.normal(2, 6, 10, 16, dtype=BF16), i.normal(10, 16, dtype=BF16), i.normal(10, 16, dtype=BF16))),
    Case("random", uniform_sum, lambda i: (i.below(1 << 62), i.normal(33, 70))),
    Case("dropout", lambda s, x: dropped(s, F.gelu(x)), seeded(5, 30, 77, dtype=BF16)),
    Case("dropout/wide", lambda s, x: dropped(s, F.gelu(x))[0], seeded(4096, 1024, dtype=BF16)),
    Case("dropout/rows", lambda s, x: dropped(s, x.softmax(-1)), seeded(9, 8, 64)),
    Case("dropout/odd", lambda s, x: dropped(s, x.softmax(-1)), seeded(9, 77)),
    Case("dropout/long", lambda s, x: dropped(s, x.softmax(-1)), seeded(2, 20000)),
    Case("dropout/columns", lambda s, x: dropped(s, x)[0].sum(0), seeded(70, 48)),
    Case("dropout/split", lambda s, x: dropped(s, x)[0].sum(0), seeded(5000, 32)),
    Case("dropout/all", lambda s, x: dropped(s, x)[0].sum(), seeded(300, 130)),
    Case("dropout/transposed", lambda s, x: x.t() + torch.ops.fuser.uniform_like(s, 0, x.t()), seeded(48, 64)),
    Case("dropout/channels", lambda s, x: x * dropped(s, x[:, :, :1])[0], seeded(3, 5, 70)),
    Case("dropout/one", lambda s, x: dropped(s, x), seeded(1)),
    Case("dropout/edges", at_the_edges, seeded(66)),
    Case("normal", lambda s, x: x + torch.ops.fuser.normal_like(s, 1 << 40, x), seeded(17, 65)),
    Case("normal/odd", lambda s, x: x.softmax(-1) * torch.ops.fuser.normal_like(s, 0, x), seeded(9, 77)),
    Case("normal/columns", lambda s, x: (x * torch.ops.fuser.normal_like(s, 0, x)).sum(0), seeded(70, 48)),
    Case("normal/wide", lambda s, x: torch.ops.fuser.normal_like(s, 0, x), seeded(4096, 1024)),
    Case("gather", gather_rows, lambda i: (i.normal(50, 20), i.below(50, 30))),
    Case("gather/along", lambda x, i: x.gather(1, i) + 1, lambda i: (i.normal(50, 20), i.below(20, 50, 33))),
    Case("gather/outer", lambda x, i: x.gather(0, i), lambda i: (i.normal(50, 20, dtype=BF16), i.below(50, 33, 20))),
    Case("index_select", lambda x, i: x.index_select(1, i) * 2, lambda i: (i.normal(9, 20), i.below(20, 300).int())),
)


def whole(inputs: Inputs, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: their sums are exact in any order."""
    return (inputs.below(17, *size) - 8).to(dtype)


def with_nan(t: torch.Tensor) -> torch.Tensor:
    """NaN of both signs in the first two places, -inf and inf in the next."""
    flat = t.flatten()
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32, device=t.device).view(torch.float32)
    return torch.cat([nan.to(t.dtype), torch.tensor([-torch.inf, torch.inf]).to(t), flat[4:]]).reshape(t.shape)


def two(op: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on x, an index and values, beside one that reads its result."""
    return lambda x, i, y: (lambda out: (out, out * 2))(op(x, i, y))


def reduced_into(how: str, include_self: bool = True) -> Callable[..., Any]:
    return lambda x, i, y: x.scatter_reduce(1, i, y, how, include_self=include_self)


def embedding_gradient(g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.embedding_dense_backward(g, i, 30, 3, False)


def put_rows(accumulate: bool) -> Callable[..., Any]:
    return lambda x, i, y: torch.ops.aten.index_put(x, [i], y, accumulate)


def put_apart(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.index_put(x, [i, None, i], y, True)


def different(inputs: Inputs, bound: int, n: int) -> torch.Tensor:
    """Places that are all different, counted from the end in part."""
    return (torch.arange(n, device=inputs.device) * 7) % bound - bound // 2


SCATTERS = (
    Case("index_add", two(lambda x, i, y: x.index_add(0, i, y)),
         lambda i: (whole(i, 50, 33), i.below(50, 200), whole(i, 200, 33))),
    Case("index_add/scaled", lambda x, i, y: torch.index_add(x, 1, i, y, alpha=2).relu(),
         lambda i: (whole(i, 20, 33), i.below(33, 50).int(), whole(i, 20, 50))),
    Case("index_add/bf16", lambda x, i, y: x.index_add(0, i, y) * 0.5,
         lambda i: (whole(i, 40, 60, dtype=BF16), i.below(40, 7), whole(i, 7, 60, dtype=BF16))),
    Case("index_add/one", lambda x, i, y: x.index_add(0, i.expand(9), y),
         lambda i: (whole(i, 12), i.below(12, 1), whole(i, 1).expand(9))),
    Case("index_add/int8", lambda x, i, y: x.index_add(0, i, y),
         lambda i: (whole(i, 12, 5, dtype=torch.int8), i.below(12, 90), whole(i, 90, 5, dtype=torch.int8))),
    Case("index_add/int64", lambda x, i, y: x.index_add(0, i, y),
         lambda i: (whole(i, 12, 5, dtype=torch.int64), i.below(12, 90), whole(i, 90, 5, dtype=torch.int64))),
    Case("index_copy", lambda x, i, y: x.index_copy(0, i, y) + 1,
         lambda i: (i.normal(50, 33), different(i, 50, 20) + 25, i.normal(20, 33))),
    Case("index_fill", lambda x, i: x.index_fill(1, i, 2.5) - x, lambda i: (i.normal(20, 33), different(i, 33, 9))),
    Case("index_put", put_rows(False), lambda i: (i.normal(50, 33), different(i, 50, 20), i.normal(20, 33))),
    Case("index_put/sum", put_rows(True), lambda i: (whole(i, 50, 33), i.below(99, 200) - 49, whole(i, 200, 33))),
    Case("index_put/apart", put_apart, lambda i: (whole(i, 9, 4, 9), i.below(9, 70), whole(i, 70, 4))),
    Case("scatter", lambda x, i, y: x.scatter(0, i, y), lambda i: (
        i.normal(30, 20), (different(i, 30, 10) + 15)[:, None].expand(10, 20), i.normal(10, 20))),
    Case("scatter_add", two(lambda x, i, y: x.scatter_add(1, i, y)),
         lambda i: (whole(i, 20, 33), i.below(33, 20, 90), whole(i, 20, 90))),
    Case("scatter_add/outer", lambda x, i, y: x.scatter_add(0, i, y),
         lambda i: (whole(i, 20, 33), i.below(20, 90, 33), whole(i, 90, 33))),
    Case("scatter_add/double", lambda x, i, y: x.scatter_add(0, i, y),
         lambda i: (whole(i, 20, dtype=torch.float64), i.below(20, 900), whole(i, 900, dtype=torch.float64))),
    Case("scatter_amax", reduced_into("amax"), lambda i: (
        with_nan(i.normal(20, 33)), i.below(33, 20, 90), with_nan(i.normal(20, 90)))),
    Case("scatter_amin", reduced_into("amin"), lambda i: (
        with_nan(i.normal(20, 33)), i.below(33, 20, 90), with_nan(i.normal(20, 90)))),
    Case("scatter_amin/new", reduced_into("amin", False), lambda i: (
        i.normal(20, 33, dtype=BF16), i.below(33, 20, 40), i.normal(20, 40, dtype=BF16))),
    Case("scatter_amax/int", reduced_into("amax"), lambda i: (
        whole(i, 20, 33, dtype=torch.int32), i.below(33, 20, 40), whole(i, 20, 40, dtype=torch.int32))),
    Case("put", lambda x, i, y: x.put(i, y, accumulate=True), lambda i: (
        whole(i, 20, 33), i.below(660, 5, 90), whole(i, 5, 90))),
    Case("embedding_backward", embedding_gradient, lambda i: (whole(i, 4, 50, 24), i.below(30, 4, 50))),
    Case("embedding_backward/f16", embedding_gradient, lambda i: (
        whole(i, 100, 64, dtype=torch.float16), i.below(30, 100).int())),
)  # fmt: skip


def sums_along(*dims: int) -> Callable[..., Any]:
    return lambda x: tuple(x.cumsum(d) for d in dims)


def extremes_along(dim: int) -> Callable[..., Any]:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        high, low = torch.cummax(x, dim), torch.cummin(x, dim)
        return high[0], high[1], low[0], low[1]

    return fn


def near_one(inputs: Inputs, *size: int) -> torch.Tensor:
    return 1 + inputs.normal(*size) / 64


# By name: the operation and its arguments, small (for the interpreter, which runs with small tiles) and not so small.
_SCANS: dict[str, tuple[Callable[..., Any], Make, Make | None]] = {
    "cumsum": (sums_along(0, 1), lambda i: (whole(i, 5, 30),), lambda i: (i.normal(300, 1300),)),
    "cumsum/middle": (lambda x: x.cumsum(1) * 2, lambda i: (whole(i, 2, 20, 9),), lambda i: (i.normal(8, 150, 400),)),
    "cumsum/bf16": (sums_along(-1), lambda i: (whole(i, 2, 40).bfloat16(),), lambda i: (i.normal(9, 700).bfloat16(),)),
    "cumsum/int": (lambda x: (x.cumsum(0), (x > 3).cumsum(1)), lambda i: (i.below(9, 5, 9).int(),), None),
    "cumsum/looped": (sums_along(-1), lambda i: (whole(i, 2, 150)[:, :140],), lambda i: (i.normal(300, 5000)[:, 1:],)),
    "cumsum/chunks": (sums_along(0), lambda i: (whole(i, 700),), lambda i: (i.normal(700000),)),
    "cumsum/columns": (sums_along(0), lambda i: (whole(i, 40, 5),), lambda i: (i.normal(3000, 300),)),
    "cumsum/few": (sums_along(0), lambda i: (whole(i, 3, dtype=torch.int8),), lambda i: (i.below(9, 40),)),
    "cumsum/inner": (sums_along(1), lambda i: (i.below(9, 2, 3, 8),), None),
    "cummax/int64": (extremes_along(0), lambda i: (i.below(9, 40) - 4,), lambda i: (i.below(99, 5000) - 50,)),
    "cummin/short": (extremes_along(1), lambda i: (i.below(9, 17, 3) - 4,), None),
    "cumsum/one": (lambda x: (x.cumsum(1), torch.cummax(x, 1)[1]), lambda i: (i.normal(33, 1),), None),
    "cumprod": (lambda x: x.cumprod(1), lambda i: (near_one(i, 4, 20),), lambda i: (near_one(i, 40, 60),)),
    "cumprod/double": (lambda x: x.cumprod(1), lambda i: (near_one(i, 4, 20).double(),), None),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), lambda i: (i.normal(4, 20),), lambda i: (i.normal(20, 900),)),
    "cummax/nan": (extremes_along(1), lambda i: (with_nan(i.normal(3, 9)),), lambda i: (with_nan(i.normal(9, 900)),)),
    "cummax/rows": (extremes_along(1), lambda i: (whole(i, 3, 50),), lambda i: (i.normal(40, 4000),)),
    "cummax/looped": (extremes_along(1), lambda i: (whole(i, 2, 150),), lambda i: (i.normal(300, 5000),)),
    "cummax/columns": (extremes_along(0), lambda i: (whole(i, 40, 5),), lambda i: (whole(i, 600, 33),)),
    "cummax/chunks": (extremes_along(0), lambda i: (whole(i, 300),), lambda i: (whole(i, 400000),)),
    "cummax/uint8": (extremes_along(1), lambda i: (i.below(200, 2, 20).to(torch.uint8),), None),
    "cummax/bool": (extremes_along(1), lambda i: (i.mask(2, 20),), None),
}
SCANS = tuple(Case(name, fn, small) for name, (fn, small, _) in _SCANS.items())
LONG_SCANS = tuple(Case(f"{name}/long", fn, large) for name, (fn, _, large) in _SCANS.items() if large is not None)

def quantised(dtype: torch.dtype) -> Callable[..., Any]:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = (x * 4).to(dtype)
        return q, q.float() * 0.5, q.float().sum(-1)

    return fn


def rescaled(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda q, s: ((q.to(BF16) * s).to(dtype), torch.cat([q, q], 1))


def far(inputs: Inputs, *size: int) -> torch.Tensor:
    """Numbers about the largest that 8 bits hold, NaN and infinities among them."""
    edges = torch.tensor([448, 464, 464.5, 480, 57344, 61439, 61440, 1e9], device=inputs.device) / 4
    x = with_nan(inputs.normal(*size) * 40)
    x[0, 8:16], x[1, 8:16] = edges, -edges
    return x


def all_roundings(inputs: Inputs, bits: int) -> torch.Tensor:
    """float32 about every number that keeps `bits` bits of its mantissa, and about the middle between two of them."""
    head = torch.arange(1 << (9 + bits), dtype=torch.int64) << (23 - bits)
    middle = 1 << (22 - bits)
    tails = torch.tensor([0, 1, middle - 1, middle, middle + 1, 2 * middle - 1])
    every = (head[:, None] + tails).flatten()
    return (every - ((every >> 31) << 32)).to(torch.int32).view(torch.float32).to(inputs.device)


def stored(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x: x.to(dtype)


def signs_of_zeros(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Negation and divisions that keep or make a zero below zero."""
    divided = (torch.div(x, d, rounding_mode=how) for d in (3.0, -2.0, y) for how in ("floor", "trunc"))
    below = torch.where(y < 0, -0.0, x)
    return -x, torch.sub(x, y, alpha=2.0), torch.rsub(x, 1.0), *divided, torch.fmod(x, y), torch.remainder(x, y), below


def signed_pairs(inputs: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Every pair of some numbers; zeros, infinities and NaN are among them."""
    some = torch.tensor([0.0, 1.0, 0.5, 2.0, 3.0, 49.0, 1e-30, math.inf, math.nan], dtype=torch.float64).to(dtype)
    some = torch.cat((some, -some)).to(inputs.device)
    return tuple(t.contiguous() for t in torch.meshgrid(some, some, indexing="ij"))


def largest(dims: int, *how: Any) -> Callable[..., Any]:
    pool = (torch.ops.aten.max_pool2d_with_indices, torch.ops.aten.max_pool3d_with_indices)[dims - 2]

    def pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = pool(x, *how)
        return found[0], found[1]

    return pooled


def largest_gradient(*how: Any) -> tuple[Callable[..., Any], Make]:
    """The gradient of the maxima of windows that overlap, in channels-last memory and not."""

    def make(inputs: Inputs) -> tuple[Any, ...]:
        x = inputs.normal(2, 3, 9, 16)
        values, indices = torch.ops.aten.max_pool2d_with_indices(x, *how)
        return inputs.normal(*values.shape), x, indices

    return lambda g, x, i: torch.ops.aten.max_pool2d_with_indices_backward(g, x, *how, [1, 1], False, i), make


def largest_in_windows(size: tuple[int, ...], kernel: list[int], *more: list[int]) -> tuple[Callable[..., Any], Make]:
    """A max pool, and its gradient, by offsets in the windows: without the largest element's index in the image."""
    n = len(kernel)

    def make(inputs: Inputs) -> tuple[Any, ...]:
        x = with_nan(inputs.normal(*size))
        x = x.to(memory_format=torch.channels_last) if n == 2 else x
        values, offsets = torch.ops.fuser.max_pool_offsets(x, kernel, *more, True)
        return x, inputs.normal(*values.shape), offsets

    def both(x: torch.Tensor, g: torch.Tensor, o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, offsets = torch.ops.fuser.max_pool_offsets(x * 1, kernel, *more, True)
        grad = torch.ops.fuser.max_pool_offsets_backward(g, o, x.shape, kernel, *more, True, n == 2)
        return values, offsets, grad

    return both, make


def channels_alone(length: int, stride: int) -> tuple[Callable[..., Any], Make]:
    """A depthwise convolution with what follows it in a mobile network, in channels-last memory."""

    def make(inputs: Inputs) -> tuple[Any, ...]:
        x = inputs.normal(2, 48, 9, 10, dtype=BF16).to(memory_format=torch.channels_last)
        return x, inputs.normal(length, length, 48), inputs.normal(48, 1, 1, dtype=BF16)

    def block(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sides = [stride] * 2, [length // 2] * 2, [1, 1]
        y = F.silu(torch.ops.fuser.depthwise(x, w, None, *sides) * scale)
        return y, y.mean([2, 3])

    return block, make


def average_gradient(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.avg_pool2d_backward(g, x, [3, 2], [2, 2], [1, 0], True, False, None)


def average_beside(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y + x


def average_gradient_beside(g: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.fuser.avg_pool2d_backward(g, y, [3, 3], [1, 1], [1, 1], False, False, None) + x


def images(count: int, *size: int) -> Make:
    return lambda i: tuple(last(i.normal(*size, dtype=BF16)) for _ in range(count))


# Windows: of the first three neighbours in memory, of the last in channels-last memory.
POOLS = (
    Case("pool/average", lambda x: F.avg_pool1d(x, 8, 1, 4), lambda i: (i.normal(2, 3, 64),)),
    Case("pool/average/edges", lambda x: F.avg_pool2d(x, 2, 2, 1, count_include_pad=False),
         lambda i: (i.normal(2, 4, 5, 6),)),
    Case("exact/pool/dilated", largest(2, [1, 5], [1, 1], [0, 2], [1, 3]),
         lambda i: (with_nan(i.normal(3, 2, 1, 48)),)),
    Case("exact/pool/bf16", largest(2, [3, 3], [2, 2], [1, 1]),
         lambda i: (with_nan(i.normal(2, 2, 9, 16, dtype=BF16)),)),
    Case("exact/pool/int", largest(2, [2, 3], [1, 2], [1, 1]), lambda i: (i.below(50, 2, 2, 9, 16) - 25,)),
    Case("exact/pool/last", largest(2, [3, 3], [2, 2], [1, 1]),
         lambda i: (with_nan(i.normal(2, 16, 6, 7)).contiguous(memory_format=torch.channels_last),)),
    Case("pool/average/gradient", average_gradient, lambda i: (i.normal(2, 3, 6, 8), i.normal(2, 3, 11, 16))),
    Case("pool/average/last/4", average_beside, images(2, 2, 16, 8, 6)),
    Case("pool/average/last/2", average_beside, images(2, 2, 16, 7, 6)),
    Case("pool/average/last/gradient", average_gradient_beside, images(3, 2, 16, 8, 12)),
    Case("pool/largest/gradient", *largest_gradient([3, 3], [2, 2], [1, 1])),
    Case("pool/largest/apart/gradient", *largest_gradient([2, 2], [3, 2], [0, 0])),
    Case("pool/offsets", *largest_in_windows((2, 3, 9, 16), [3, 2], [2, 1], [1, 1], [1, 1])),
    Case("pool/offsets/gaps", *largest_in_windows((2, 3, 9, 16), [3, 4], [2, 1], [1, 2], [2, 3])),
    Case("pool/offsets/apart", *largest_in_windows((2, 2, 5, 6, 7), [2, 3, 2], [2, 3, 2], [1, 0, 1], [1, 1, 1])),
    Case("depthwise/last", *channels_alone(3, 1)),
    Case("depthwise/strided", *channels_alone(5, 2)),
    Case("depthwise/rows", lambda x, w: torch.ops.fuser.depthwise(x, w, None, [1], [3], [1]).sigmoid(),
         lambda i: (i.normal(2, 16, 40), i.normal(4, 16))),
    Case("exact/quotient", lambda x: (x / 8.0, x.double() / 0.25, x / -2.0),
         lambda i: (signed_pairs(i, torch.float32)[0],)),
)  # fmt: skip
SIGNS = tuple(
    Case(f"exact/signs/{str(d).removeprefix('torch.')}", signs_of_zeros, lambda i, d=d: signed_pairs(i, d))
    for d in (torch.float32, torch.float64)
)
# Cases whose results are eager's to the bit.
EXACT = SIGNS + tuple(
    case
    for name, dtype, bits in (("e5m2", torch.float8_e5m2, 2), ("e4m3fn", torch.float8_e4m3fn, 3))
    for case in (
        Case(f"exact/{name}/store", stored(dtype), lambda i, b=bits: (all_roundings(i, b),)),
        Case(f"exact/{name}/load", lambda q: q.float(), lambda i, d=dtype: (
            torch.arange(256, device=i.device).to(torch.uint8).view(d),)),
    )
)  # fmt: skip
def clamped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * 4).clamp(-448, 448).to(torch.float8_e4m3fn), x.abs().amax(-1)


FLOAT8 = tuple(
    case
    for name, dtype in (("e5m2", torch.float8_e5m2), ("e4m3fn", torch.float8_e4m3fn))
    for case in (
        Case(f"float8/{name}/to", quantised(dtype), lambda i: (far(i, 9, 70),)),
        Case(f"float8/{name}/from", rescaled(dtype), lambda i, d=dtype: (
            i.normal(9, 70).to(d), torch.tensor(0.25, device=i.device).expand(9, 1).to(BF16).clone())),
    )
) + (Case("float8/e4m3fn/clamped", clamped, lambda i: (i.normal(9, 70) * 40,)),)  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers to the bit; of what is not a number eager's sign is not the same
    everywhere."""
    if a.dtype is not b.dtype:
        return False
    a, b = (t.float().where(~t.isnan(), float("nan")).view(torch.int32) for t in (a.float(), b.float()))
    return torch.equal(a, b)


def readable(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results with 8-bit floats as float32: torch compares no others."""
    return [t.float() if t.is_floating_point() and t.dtype.itemsize == 1 else t for t in results]


def reshaped(x: torch.Tensor) -> torch.Tensor:
    """A join of many pieces, in another shape."""
    a, b, c = x.unbind(-1)
    return torch.stack((a, b, c, a * b, b * c, c * a), -1).reshape(x.shape[0], 2, 3)


def rotated(x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """Pairs turned, as complex products are made of their parts."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * f[..., 0] - b * f[..., 1], a * f[..., 1] + b * f[..., 0]), -1).flatten(-2)


COMPONENTS = (
    Case("components/reshaped", reshaped, lambda i: (i.normal(37, 3),)),
    Case("components/rotated", rotated, lambda i: (i.normal(5, 7, 12), i.normal(7, 6, 2))),
)
_ROWS = (_row_case(r, size) for r in ROWS if not r.mutates for size in (0, 2))
_ALL = (*_ROWS, *EXTRA, *SCATTERS, *SCANS, *LONG_SCANS, *FLOAT8, *POOLS, *EXACT, *COMPONENTS)
CASES: dict[str, Case] = {c.name: c for c in _ALL}
# Each kind of kernel once or twice: the interpreter is slow.
INTERPRETED = (
    "relu_mul_add/0", "bias_gelu_mul/0", "sigmoid_silu/0", "softmax/0", "softmax_middle/0", "layer_norm/0",
    "group_norm/0", "cross_entropy/0", "swiglu/0", "rope/0", "adam/0", "transposed_add/0", "column_sum/0", "full_sum/0",
    "argmax/0", "embedding_layer_norm/0", "masked_softmax/0", "mixed_dtypes/0", "bf16_gelu/0", "bf16_rms_norm/0",
    "bool_masks/0", "softmax/odd", "softmax/bf16", "log_softmax/long", "mean_var/long", "mean_var/special",
    *(f"log_softmax/long/{n}" for n in (17001, 17002, 17004)), *(f"long_classes/{n}" for n in (17001, 17002)),
    "long_norm/odd",
    "mean_var/few", "mean_var/all", "exp_var/long", "shared/rows", "shared/some",
    "mean_var/columns", "mean_var/columns/odd", "batch_norm/columns", "long_norm/bf16", "extremes/odd",
    "extremes/bool", "argmax/split", "turned/cat", "turned/sums", "channels/groups",
    "sum_and_max/split", "sum_and_max/passing", "argmax/passing", "column_sum/bf16/passing",
    "var_columns/passing",
    "scalar", "broadcast/odd", "strided", "unaligned", "integers", "random", "gather",
    "dropout", "dropout/rows", "dropout/odd", "dropout/long", "dropout/columns", "dropout/split", "dropout/all",
    "dropout/transposed", "dropout/channels", "dropout/one", "dropout/edges", "normal",
    "normal/odd", "normal/columns",
    "norm_gradients", "norm_gradients/odd", "norm_gradients/summed", "norm_gradients/layer", "norm_gradients/softmax",
    "key_gradient",
    "gather/along", "gather/outer", "index_select", "padded_search",
    *(c.name for c in (*SCATTERS, *SCANS, *FLOAT8, *POOLS, *EXACT, *COMPONENTS)),
    "column_sum/many/passing",
)  # fmt: skip
# Of these, also with the tiles that races are about: the bits are the same.
TUNED = (
    "relu_mul_add/0", "transposed_add/0", "swiglu/0", "dropout", "softmax/odd", "softmax/bf16", "extremes/odd",
    "column_sum/0", "full_sum/0", "layer_norm/0", "norm_gradients", "cumsum", "cumsum/columns", "argmax/0",
    "column_sum/bf16/passing",
)  # fmt: skip
# Of these, also several calls in one launch.
BATCHED = ("adam/0", "softmax/odd", "scalar", "dropout", "norm_gradients", "mixed_dtypes/0", "bool_masks/0", "gather",
           "sum_and_max/passing", "column_sum/many/passing")
