"""The rows of the `singles` suite: single operators, each at four sizes of its largest input.

`size` counts float32 elements; each `make` folds them into the shape that the operator needs. All sizes are multiples
of 16,384.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernel_rows import Inputs

SIZES = {"64 KB": 1 << 14, "1 MB": 1 << 18, "5 MB": 5 << 18, "64 MB": 1 << 24}
Make = Callable[[Inputs, int], tuple[Any, ...]]


@dataclass(frozen=True)
class Single:
    """One operator as a user calls it, and its inputs for a number of elements."""

    name: str
    fn: Callable[..., Any]
    make: Make
    random: bool = False  # its values are not eager's


def flat(count: int = 1, dtype: torch.dtype = torch.float32, positive: bool = False) -> Make:
    """Vectors."""
    return lambda i, n: tuple((i.uniform(n) if positive else i.normal(n)).to(dtype) for _ in range(count))


def matrix(count: int = 1, width: int = 1024) -> Make:
    """Matrices with rows of `width`."""
    return lambda i, n: tuple(i.normal(n // width, width) for _ in range(count))


def image(channels: int = 64, side: int = 32) -> Make:
    """Images: batch, channels, side, side."""
    c = lambda n: min(channels, n // (side * side))  # noqa: E731
    return lambda i, n: (i.normal(n // (c(n) * side * side), c(n), side, side),)


def sequence(length: int = 256) -> Make:
    """Sequences: batch, 64 channels, length."""
    return lambda i, n: (i.normal(n // (64 * length), 64, length),)


def middle(i: Inputs, n: int) -> tuple[Any, ...]:
    """Three dims of which the one in the middle is reduced."""
    side = 256 if n >= 1 << 20 else 128 if n >= 1 << 18 else 64
    return (i.normal(n // (side * side), side, side),)


def tall(i: Inputs, n: int) -> tuple[Any, ...]:
    """As (16, 256, 256): few outer, many inner."""
    return (i.normal(max(n // 65536, 1), min(n // 64, 256), 256 if n >= 65536 else 64),)


def with_channels(make: Make, *uniform: bool) -> Make:
    """An image and one vector over its channels for each of `uniform`, which tells positive ones."""

    def made(i: Inputs, n: int) -> tuple[Any, ...]:
        (x,) = make(i, n)
        return (x, *(i.uniform(x.shape[1]) if u else i.normal(x.shape[1]) for u in uniform))

    return made


def with_last(i: Inputs, n: int) -> tuple[Any, ...]:
    return i.normal(n // 1024, 1024), i.uniform(1024), i.normal(1024)


def classes(i: Inputs, n: int) -> tuple[Any, ...]:
    return i.normal(n // 1024, 1024), i.below(1024, n // 1024)


def log_classes(i: Inputs, n: int) -> tuple[Any, ...]:
    return torch.log_softmax(i.normal(n // 1024, 1024), -1), i.below(1024, n // 1024)


def distributions(i: Inputs, n: int) -> tuple[Any, ...]:
    return torch.log_softmax(i.normal(n // 1024, 1024), -1), torch.softmax(i.normal(n // 1024, 1024), -1)


def table(i: Inputs, n: int) -> tuple[Any, ...]:
    return i.normal(n // 128, 128), i.below(n // 128, 4096)


POINTWISE: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("relu", F.relu),
    ("leaky_relu", F.leaky_relu),
    ("mul_scalar", lambda x: x * 3.14),
    ("neg", torch.neg),
    ("abs", torch.abs),
    ("square", torch.square),
    ("clamp", lambda x: x.clamp(-1, 1)),
    ("exp", torch.exp),
    ("tanh", torch.tanh),
    ("sigmoid", torch.sigmoid),
    ("gelu", F.gelu),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("silu", F.silu),
    ("softplus", F.softplus),
    ("elu", F.elu),
    ("hardswish", F.hardswish),
    ("sin", torch.sin),
    ("erf", torch.erf),
    ("round", torch.round),
)
CASTS: tuple[tuple[str, torch.dtype, torch.dtype], ...] = (
    ("to_bfloat16", torch.float32, torch.bfloat16),
    ("to_float16", torch.float32, torch.float16),
    ("from_bfloat16", torch.bfloat16, torch.float32),
    ("to_float64", torch.float32, torch.float64),
    ("to_int32", torch.float32, torch.int32),
    ("from_int64", torch.int64, torch.float32),
)


def _cast(to: torch.dtype) -> Callable[..., Any]:
    return lambda x: x.to(to)


ROWS: tuple[Single, ...] = (
    *(Single(name, fn, flat()) for name, fn in POINTWISE),
    Single("log", torch.log, flat(positive=True)),
    Single("sqrt", torch.sqrt, flat(positive=True)),
    Single("rsqrt", torch.rsqrt, flat(positive=True)),
    Single("pow", lambda x: x.pow(2.5), flat(positive=True)),
    Single("add", torch.add, flat(2)),
    Single("div", torch.div, flat(2, positive=True)),
    Single("maximum", torch.maximum, flat(2)),
    Single("greater", torch.gt, flat(2)),
    Single("where", lambda x, y: torch.where(x > 0, x, y), flat(2)),
    Single("add_row", torch.add, lambda i, n: (i.normal(n // 1024, 1024), i.normal(1024))),
    Single("mul_column", torch.mul, lambda i, n: (i.normal(n // 1024, 1024), i.normal(n // 1024, 1))),
    Single("transpose", lambda x: x.t().contiguous(), matrix(width=128)),
    Single("cat", lambda x, y: torch.cat((x, y), -1), matrix(2, 128)),
    *(Single(name, _cast(to), flat(dtype=of)) for name, of, to in CASTS),
    Single("sum", torch.sum, flat()),
    Single("mean", torch.mean, flat()),
    Single("norm", torch.linalg.vector_norm, flat()),
    Single("std", torch.std, flat()),
    Single("sum_rows", lambda x: x.sum(-1), matrix()),
    Single("sum_columns", lambda x: x.sum(0), matrix()),
    Single("sum_middle", lambda x: x.sum(1), tall),
    Single("mean_middle", lambda x: x.mean(1), tall),
    Single("amax_rows", lambda x: x.amax(-1), matrix()),
    Single("amax_columns", lambda x: x.amax(0), matrix()),
    Single("argmax_rows", lambda x: x.argmax(-1), matrix()),
    Single("var_rows", lambda x: x.var(-1), matrix()),
    Single("any_rows", lambda x: (x > 3).any(-1), matrix()),
    Single("logsumexp_rows", lambda x: x.logsumexp(-1), matrix()),
    Single("cumsum_rows", lambda x: x.cumsum(-1), matrix()),
    Single("softmax_rows", lambda x: torch.softmax(x, -1), matrix()),
    Single("log_softmax_rows", lambda x: torch.log_softmax(x, -1), matrix()),
    Single("softmax_middle", lambda x: torch.softmax(x, 1), middle),
    Single("layer_norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), with_last),
    Single("rms_norm", lambda x, w, b: F.rms_norm(x, x.shape[-1:], w), with_last),
    Single("group_norm", lambda x, w, b: F.group_norm(x, 8, w, b), with_channels(image(), True, False)),
    Single(
        "batch_norm",
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        with_channels(image(), False, True, True, False),
    ),
    Single("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), with_channels(image(), True, False)),
    Single("normalize", F.normalize, matrix()),
    Single("max_pool1d", lambda x: F.max_pool1d(x, 2), sequence()),
    Single("max_pool1d_3", lambda x: F.max_pool1d(x, 3, 1, 1), sequence()),
    Single("avg_pool1d", lambda x: F.avg_pool1d(x, 2), sequence()),
    Single("avg_pool1d_3", lambda x: F.avg_pool1d(x, 3, 1, 1), sequence()),
    Single("max_pool2d", lambda x: F.max_pool2d(x, 2), image()),
    Single("max_pool2d_3", lambda x: F.max_pool2d(x, 3, 2, 1), image()),
    Single("avg_pool2d", lambda x: F.avg_pool2d(x, 2), image()),
    Single("avg_pool2d_3", lambda x: F.avg_pool2d(x, 3, 1, 1), image()),
    Single("avg_pool2d_11", lambda x: F.avg_pool2d(x, 11, 1, 5), image()),
    Single("global_avg_pool", lambda x: F.adaptive_avg_pool2d(x, 1), image()),
    Single("adaptive_avg_pool", lambda x: F.adaptive_avg_pool2d(x, 7), image()),
    Single("upsample_nearest", lambda x: F.interpolate(x, scale_factor=2.0), image(side=16)),
    Single("mse_loss", F.mse_loss, flat(2)),
    Single("l1_loss", F.l1_loss, flat(2)),
    Single("smooth_l1_loss", F.smooth_l1_loss, flat(2)),
    Single("bce_with_logits", F.binary_cross_entropy_with_logits, lambda i, n: (i.normal(n), i.uniform(n) - 0.5)),
    Single("cross_entropy", F.cross_entropy, classes),
    Single("nll_loss", F.nll_loss, log_classes),
    Single("kl_div", lambda x, y: F.kl_div(x, y, reduction="batchmean"), distributions),
    Single(
        "embedding", lambda x, at: F.embedding(at, x), lambda i, n: (i.normal(n // 128, 128), i.below(n // 128, 4096))
    ),
    Single("glu", F.glu, matrix()),
    Single("flip", lambda x: x.flip(-1), matrix()),
    Single("two_randn", lambda x: (torch.randn_like(x), torch.randn_like(x)), flat(), random=True),
)
