"""Functions of tensors in the spellings that users write, each with inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

g = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=g)
Y = torch.randn(6, generator=g)
W = torch.randn(8, 6, generator=g)
IMG = torch.randn(2, 4, 8, 8, generator=g)
IDX = torch.randint(0, 4, (3,), generator=g)
T = torch.randint(0, 6, (4,), generator=g)
I = torch.randint(-8, 8, (4, 6), generator=g)
aten = torch.ops.aten

# Name → (inputs, spellings of one function).
SAME: dict[str, tuple[tuple[Any, ...], tuple[Callable[..., Any], ...]]] = {
    "add": (
        (X, Y),
        (
            lambda x, y: x + y,
            lambda a, b: torch.add(a, b),
            lambda a, b: a.add(b),
            lambda a, b: aten.add.Tensor(a, b),
            lambda a, b: aten.add(a, b),
            lambda a, b: operator.add(a, b),
            lambda a, b: torch.add(a, b, alpha=1),
            lambda a, b: torch.add(a, other=b),
            lambda a, b: (a + b, a * b)[0],
        ),
    ),
    "mul number": ((X,), (lambda x: x * 2, lambda x: 2 * x, lambda x: torch.mul(x, 2), lambda x: x.multiply(2))),
    "sub": ((X,), (lambda x: x - 1, lambda x: torch.sub(x, 1), lambda x: x.sub(1), lambda x: torch.subtract(x, 1))),
    "rsub": ((X,), (lambda x: 1 - x, lambda x: torch.rsub(x, 1))),
    "neg": ((X,), (lambda x: -x, lambda x: x.neg(), lambda x: torch.negative(x))),
    "abs": ((X,), (lambda x: abs(x), lambda x: torch.abs(x), lambda x: x.absolute())),
    "pow": ((X,), (lambda x: x**2, lambda x: torch.pow(x, 2), lambda x: x.pow(2))),
    "gt": ((X, Y), (lambda x, y: x > y, lambda x, y: torch.gt(x, y), lambda x, y: x.greater(y))),
    "clamp": (
        (X,),
        (
            lambda x: x.clamp(min=0),
            lambda x: torch.clamp(x, 0),
            lambda x: torch.clip(x, min=0, max=None),
        ),
    ),
    "float": ((I,), (lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.type(torch.float32))),
    "relu": ((X,), (lambda x: F.relu(x), lambda x: torch.relu(x), lambda x: x.relu())),
    "gelu": ((X,), (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none"))),
    "softmax": (
        (X,),
        (lambda x: F.softmax(x, -1), lambda x: torch.softmax(x, dim=-1), lambda x: x.softmax(-1)),
    ),
    "sum": (
        (X,),
        (
            lambda x: x.sum(0),
            lambda x: torch.sum(x, [0]),
            lambda x: x.sum((0,)),
            lambda x: torch.sum(x, dim=0, keepdim=False),
        ),
    ),
    "layer norm": ((X,), (lambda x: F.layer_norm(x, (6,)), lambda x: torch.layer_norm(x, [6], None, None, 1e-5))),
    "view": ((X,), (lambda x: x.view(2, -1), lambda x: x.view((2, -1)), lambda x: x.view([2, -1]))),
    "permute": ((X,), (lambda x: x.permute(1, 0), lambda x: torch.permute(x, (1, 0)), lambda x: x.permute([1, 0]))),
    "select": ((X,), (lambda x: x[0], lambda x: x.select(0, 0), lambda x: torch.select(x, 0, 0))),
    "slice": ((X,), (lambda x: x[:, 1:3], lambda x: aten.slice(x, 1, 1, 3))),
    "unsqueeze": ((X,), (lambda x: x[..., None], lambda x: x.unsqueeze(-1), lambda x: torch.unsqueeze(x, -1))),
    "cat": (
        (X,),
        (lambda x: torch.cat([x, x]), lambda x: torch.cat((x, x), 0), lambda x: torch.concat([x, x], dim=0)),
    ),
}

# Functions that look alike and differ.
DIFFERENT: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (lambda x: x * 2, lambda x: x * 2.0),
    (lambda x: x * 1, lambda x: x * True),
    (lambda x, y: x - y, lambda x, y: y - x),
    (lambda x, y: x + y, lambda x, y: torch.add(x, y, alpha=2)),
    (lambda x, y: x * y, lambda x, y: x * x),
    (lambda x, y: (x, y + 1), lambda x, y: (y + 1, x)),
    (lambda x: x + 1, lambda x: (x + 1,)),
    (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
    (lambda x: x.sum(), lambda x: x.sum(0)),
    (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
    (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
    (lambda x: x + 0.0, lambda x: x + -0.0),
)

# What the canonical form must mean the same as eager on.
MEANING: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "linear, gelu": ((X, W), lambda x, w: F.gelu(F.linear(x, w))),
    "layer norm": ((X, Y, Y), lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    "softmax cross entropy": ((X, T), lambda x, t: F.cross_entropy(x, t)),
    "chunks": ((X,), lambda x: x.chunk(2, -1)[0] * x.split([2, 4], -1)[1][:, 1:] + x.chunk(2, -1)[-1]),
    "max with indices": ((X,), lambda x: x.max(-1)[0] - x.max(-1).values),
    "sizes": ((X,), lambda x: x.reshape(x.shape[0] * x.size(1)) / x.shape[-1]),
    "index": ((X, IDX), lambda x, i: x[i, 1:, None] + x[:1, -1]),
    "reverse arithmetic": ((X,), lambda x: 1 / (2 - 3 * x) ** 2 + 2**x),
    "floor division": ((I,), lambda x: x // 3 + x % 4 - (x >> 1)),
    "bits": ((I,), lambda x: ~(x & 5 | 2 ^ x)),
    "where": ((X, Y), lambda x, y: torch.where(x > y, x, y.masked_fill(y < 0, 0.5))),
    "group norm": ((IMG,), lambda x: F.group_norm(x, 2).relu()),
    "batch norm": ((IMG, torch.ones(4)), lambda x, v: F.batch_norm(x, v - 1, v, training=False)),
    "transposes": ((X,), lambda x: x.T.mT.transpose(0, -1).contiguous().flatten()),
    "casts": ((X,), lambda x: x.double().half().float().int().bool().to(x.dtype)),
    "several results": ((X,), lambda x: (x.var(-1), [x.mean(0), x.std()], x.amax((0, 1)))),
    "activations": ((X,), lambda x: F.silu(x) + F.mish(x) + F.elu(x) + F.leaky_relu(x, 0.2) + F.softplus(x)),
    "embedding": ((IDX, W), lambda i, w: F.embedding(i, w) * 2),
}
