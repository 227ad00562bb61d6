"""Random graphs of reductions whose inputs and results have different orders of dims in memory.

Loops along rows, along columns and turned tiles meet in one graph: images in channels-last memory beside others, norms
between them, and copies back.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from cuda_cases import Case

from benchmarks.kernel_rows import Inputs

NORMS = ("batch", "group", "softmax", "layer", "sums", "extremes")
ORDERS = tuple(f"order/{n}" for n in range(14))


def order_case(seed: int, scale: int = 1) -> Case:
    """The case of a number; two dims of its tensors are `scale` times as long."""
    rng = random.Random(f"{seed} order")
    shape = [rng.choice((2, 3)), rng.choice((4, 8, 20)), rng.choice((5, 16, 17)), rng.choice((6, 16, 33))]
    shape[2:] = [n * scale for n in shape[2:]]
    usual = [0, 1, 2, 3], [0, 2, 3, 1]
    orders = [rng.sample(range(4), 4) if rng.random() < 0.3 else rng.choice(usual) for _ in range(3)]
    norm, joined, affine = rng.choice(NORMS), rng.random() < 0.4, rng.random() < 0.5
    dims = sorted(rng.sample(range(4), rng.choice((1, 2, 3))))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    channels = shape[1] * (2 if joined else 1)

    def run(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = torch.cat([x.relu(), y], 1) if joined else x + y * 2
        if affine:
            value = torch.sigmoid(value * w[:, None, None])
        if norm == "batch":
            three = torch.ops.aten._native_batch_norm_legit.no_stats(value, w, b, True, 0.1, 1e-5)
            found = (three[0],)  # the statistics have another dtype on CUDA
        elif norm == "group":
            found = torch.ops.aten.group_norm(value, 2, w, b, 1e-5), value.sum()
        elif norm == "softmax":
            found = torch.softmax(value, dims[0]), value.amax(dims)
        elif norm == "layer":
            mean, var = value.mean(dims, keepdim=True), value.var(dims, correction=0, keepdim=True)
            found = (value - mean) * torch.rsqrt(var + 1e-5), mean
        elif norm == "sums":
            found = value - value.sum(dims, keepdim=True) / 8, value.sum(dims)
        else:
            found = value.amax(dims, keepdim=True) - value, value.amin(dims)
        order = orders[2]
        back = sorted(range(4), key=order.__getitem__)
        return (found[0].relu().permute(order).contiguous().permute(back), *found[1:])

    def make(i: Inputs) -> tuple[Any, ...]:
        images = []
        for order in orders[:2]:
            back = sorted(range(4), key=order.__getitem__)
            images.append(i.normal(*(shape[d] for d in order), dtype=dtype).permute(back))
        return (*images, i.uniform(channels).to(dtype), i.normal(channels, dtype=dtype))

    return Case(f"order/{seed}/{norm}", run, make)
