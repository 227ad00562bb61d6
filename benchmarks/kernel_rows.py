"""The rows of the `kernels` suite: plain torch functions and the inputs they are timed with.

A row's sizes are (small, medium, large) shapes that its `make` turns into arguments. Functions are written as a user
would write them; nothing here knows who is going to run them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]
SIZES = ("small", "medium", "large")
SQUARE: tuple[Shape, ...] = ((64, 64), (512, 512), (4096, 4096))
ROWWISE: tuple[Shape, ...] = ((32, 128), (512, 1024), (8192, 1024))
IMAGE: tuple[Shape, ...] = ((1, 32, 8, 8), (4, 64, 28, 28), (16, 128, 64, 64))
LOGITS: tuple[Shape, ...] = ((16, 512), (128, 8192), (2048, 32000))
HEADS: tuple[Shape, ...] = ((1, 4, 16, 32), (2, 8, 128, 64), (4, 16, 1024, 64))
SCORES: tuple[Shape, ...] = ((1, 2, 16, 16), (2, 4, 128, 128), (4, 8, 512, 512))
TOKENS: tuple[Shape, ...] = ((32, 100, 64), (512, 5000, 256), (8192, 30000, 768))
FLAT: tuple[Shape, ...] = ((4096,), (262144,), (8388608,))
MIDDLE: tuple[Shape, ...] = ((4, 16, 32), (16, 64, 256), (64, 256, 512))


@dataclass(frozen=True)
class Inputs:
    """Seeded inputs on a device."""

    device: str
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Values of 0.5 to 1.5, for scales, variances and sums that should not cancel."""
        return (torch.rand(shape, generator=self.generator) + 0.5).to(self.device)

    def below(self, high: int, *shape: int) -> Tensor:
        """int64 values of 0 to high - 1."""
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def mask(self, *shape: int, share: float = 0.5) -> Tensor:
        """Booleans, True with this share."""
        return (torch.rand(shape, generator=self.generator) < share).to(self.device)


Make = Callable[[Inputs, Shape], tuple[Any, ...]]


@dataclass(frozen=True)
class Row:
    """A function, its inputs, and what it must move at least.

    `mutates` are the positions of arguments it writes to. `reads` gives the bytes read where that is not each input
    once, as for an embedding. Rows that are not `memory_bound` are left out of the copy-rate target. `source` is the
    paper or the model and file that the function is taken from.
    """

    name: str
    fn: Callable[..., Any]
    make: Make
    sizes: tuple[Shape, ...]
    mutates: tuple[int, ...] = ()
    reads: Callable[[tuple[Any, ...]], int] | None = None
    memory_bound: bool = True
    source: str = ""


def like(count: int, dtype: torch.dtype = torch.float32) -> Make:
    """`count` normal tensors of the row's shape."""
    return lambda i, s: tuple(i.normal(*s, dtype=dtype) for _ in range(count))


def with_last(count: int, scale: bool = True) -> Make:
    """A normal tensor of the row's shape and `count` uniform or normal vectors of its last dimension."""
    return lambda i, s: (i.normal(*s), *((i.uniform if scale else i.normal)(s[-1]) for _ in range(count)))


def relu_mul_add(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * y + 1)


def bias_gelu_mul(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b, approximate="tanh") * x


def gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x)


def sigmoid_silu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(torch.sigmoid(x) * y) * x


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def softmax_middle(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 8, w, b)


def batch_norm_relu(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(F.batch_norm(x, mean, var, w, b, training=False))


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


def lstm_cell(gates: Tensor, hidden: Tensor, bias: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (gates + hidden + bias).chunk(4, 1)
    new = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new), new


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def adam_in_place(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)


def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def full_sum(x: Tensor) -> Tensor:
    return x.sum()


def mean_var(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1), x.var(-1)


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def embedding_layer_norm(index: Tensor, table: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(index, table), (table.shape[-1],), w, b)


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(mask, -1e9), -1)


def mixed_dtypes(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    return x * y + n


def bool_masks(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    return ((x > y) & keep) | ~(x < 0)


def clamp_where(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, x.clamp(-1, 1), (y * 0.5).clamp(min=0))


def residual_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.layer_norm(total, (x.shape[-1],), w, b), total


def bias_residual(x: Tensor, r: Tensor, b: Tensor) -> Tensor:
    return x + b + r


def _lstm_inputs(i: Inputs, s: Shape) -> tuple[Any, ...]:
    rows, width = s[0], s[1] // 4
    return i.normal(rows, 4 * width), i.normal(rows, 4 * width), i.normal(4 * width), i.normal(rows, width)


def _rope_inputs(i: Inputs, s: Shape) -> tuple[Any, ...]:
    angles = torch.outer(torch.arange(s[2]), 10000.0 ** (-torch.arange(0, s[3], 2) / s[3])).repeat(1, 2)
    return i.normal(*s), angles.cos().to(i.device), angles.sin().to(i.device)


def _adam_inputs(i: Inputs, s: Shape) -> tuple[Any, ...]:
    return i.normal(*s), i.normal(*s), i.normal(*s), i.uniform(*s)


def _norm_inputs(i: Inputs, s: Shape) -> tuple[Any, ...]:
    return i.normal(*s), i.uniform(s[1]), i.normal(s[1])


def _batch_norm_inputs(i: Inputs, s: Shape) -> tuple[Any, ...]:
    c = s[1]
    return i.normal(*s), i.normal(c), i.uniform(c), i.uniform(c), i.normal(c)


def _embedding_inputs(i: Inputs, s: Shape) -> tuple[Any, ...]:
    tokens, words, width = s
    return i.below(words, tokens), i.normal(words, width), i.uniform(width), i.normal(width)


def _embedding_reads(args: tuple[Any, ...]) -> int:
    index, table = args[0], args[1]
    return int(index.nbytes + index.numel() * table.shape[1] * table.element_size())


BF16 = torch.bfloat16
ROWS: tuple[Row, ...] = (
    Row("relu_mul_add", relu_mul_add, like(2), SQUARE),
    Row("bias_gelu_mul", bias_gelu_mul, with_last(1, scale=False), SQUARE),
    Row("gelu_erf", gelu_erf, like(1), SQUARE),
    Row("sigmoid_silu", sigmoid_silu, like(2), SQUARE),
    Row("softmax", softmax, like(1), ROWWISE),
    Row("log_softmax", log_softmax, like(1), ROWWISE),
    Row("softmax_middle", softmax_middle, like(1), MIDDLE),
    Row("layer_norm", layer_norm, with_last(2), ROWWISE),
    Row("rms_norm", rms_norm, with_last(1), ROWWISE),
    Row("group_norm", group_norm, _norm_inputs, IMAGE),
    Row("batch_norm_relu", batch_norm_relu, _batch_norm_inputs, IMAGE),
    Row("cross_entropy", cross_entropy, lambda i, s: (i.normal(*s), i.below(s[1], s[0])), LOGITS),
    Row("lstm_cell", lstm_cell, _lstm_inputs, ((16, 256), (128, 2048), (2048, 4096))),
    Row("swiglu", swiglu, like(1), ((16, 256), (256, 2048), (2048, 11008))),
    Row("rope", rope, _rope_inputs, HEADS),
    Row("adam", adam, _adam_inputs, FLAT),
    Row("adam_in_place", adam_in_place, _adam_inputs, FLAT, mutates=(0, 2, 3)),
    Row("transposed_add", transposed_add, like(2), SQUARE),
    Row("column_sum", column_sum, like(1), SQUARE),
    Row("full_sum", full_sum, like(1), SQUARE),
    Row("mean_var", mean_var, like(1), ROWWISE),
    Row("argmax", argmax, like(1), ROWWISE),
    Row("embedding_layer_norm", embedding_layer_norm, _embedding_inputs, TOKENS, reads=_embedding_reads),
    Row("masked_softmax", masked_softmax, lambda i, s: (i.normal(*s), i.mask(*s[-2:], share=0.3)), SCORES),
    Row(
        "mixed_dtypes",
        mixed_dtypes,
        lambda i, s: (i.normal(*s, dtype=BF16), i.normal(*s), i.below(100, *s).to(torch.int32)),
        SQUARE,
    ),
    Row("bf16_gelu", gelu_erf, like(1, BF16), SQUARE),
    Row("bf16_rms_norm", rms_norm, lambda i, s: (i.normal(*s, dtype=BF16), i.normal(s[-1], dtype=BF16)), ROWWISE),
    Row("bool_masks", bool_masks, lambda i, s: (i.normal(*s), i.normal(*s), i.mask(*s)), SQUARE),
    Row("clamp_where", clamp_where, like(2), SQUARE),
    Row(
        "residual_layer_norm",
        residual_layer_norm,
        lambda i, s: (i.normal(*s), i.normal(*s), i.uniform(s[-1]), i.normal(s[-1])),
        ROWWISE,
    ),
    Row("bias_residual", bias_residual, lambda i, s: (i.normal(*s), i.normal(*s), i.normal(s[-1])), ROWWISE),
)


def seeded(row: str, size: str, device: str) -> Inputs:
    """The same inputs for a row in every process."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(f"{row}/{size}")) % 2**31
    return Inputs(device, torch.Generator().manual_seed(seed))


def moved_bytes(row: Row, args: tuple[Any, ...], outputs: list[Tensor]) -> int:
    """Bytes that must move: each input read once, each output written once. `outputs` include the mutated inputs."""
    read = row.reads(args) if row.reads else sum(a.nbytes for a in args if isinstance(a, Tensor))
    return read + sum(o.nbytes for o in outputs)
