"""Kernels of every kind, few to compile: what each machine's row has to get right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_g = torch.Generator().manual_seed(5)


def _floats(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=_g).to(dtype)


def _ints(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-100, 100, size, generator=_g).to(dtype)


def pointwise(x, y, d, i8, u8, i16, i32, i64, m):
    floats = torch.tanh(x) * y.exp() + x.abs().sqrt(), torch.where(m, d.sin(), d.log1p()), torch.fmod(x, y)
    small = i8 * 3 + i8, u8 ^ 77, (i16 << 2) - i16, m & (i8 > 3), x.to(torch.int32), d.to(torch.uint8)
    return *floats, *small, i32.abs() + i8, i64 * i32, torch.erf(y), x.clamp(-0.5, 0.7), torch.round(x * 3)


def halves(h, b, v):
    rounded = (h * h).sigmoid() + h, (b - v).tanh(), h.to(torch.bfloat16)
    return *rounded, torch.cat((h[:, 5:], h[:, :5]), -1), torch.softmax(h, -1), b.sum(-1)


def reductions(x, d, i32, m):
    sums = x.sum(-1), x.sum(0), d.sum(), i32.sum(-1), x.prod(0), x.var(-1), m.any(-1), m.all(0)
    high, low = x.max(-1), d.min(0)
    places = x.argmax(-1), x.argmin(0), i32.argmax(-1), high[0], high[1], low[0], low[1]
    return *sums, x.amax(-1), x.amin(0), i32.amax(), *places


def rows(x, w):
    norms = F.layer_norm(x, x.shape[-1:], w, w), F.rms_norm(x, x.shape[-1:], w), F.group_norm(x[:, :40], 4)
    return torch.softmax(x, -1), torch.log_softmax(x, 0), *norms, torch.logsumexp(x, -1)


def scans(x, i64):
    high = x.cummax(-1)
    return x.cumsum(-1), i64.cumsum(-1), x.cumsum(0), x.cumprod(-1), high[0], high[1], x.logcumsumexp(-1)


def indexing(x, u8, h, at, to):
    read = x[at], x[:, at], u8[:, at], h[at], x.gather(0, to), F.embedding(at.abs(), x)
    written = torch.zeros_like(x).index_add(0, at.abs(), x[:17]), x.scatter(0, to, 1.0)
    return *read, *written, x.scatter_add(0, to, x[:20])


def layouts(x, h, d, u8):
    transposed = x.t() + 1, h.t().contiguous() * 2, d.t().exp(), u8.t().contiguous() ^ 1
    return *transposed, torch.roll(x, 3, -1) * 2, torch.cat((x, x[:, :3]), -1).relu(), torch.tril(x), x.flip(0) - x


def gradients(dy, x, w, h):
    y = torch.softmax(x, -1)
    dx = y * (dy * w - (y * dy * w).sum(-1, keepdim=True))
    return dx, (dy * y).sum(0), dy.sum(0), (h * dy).sum(-1), (h * dy).sum(0)


def windows(p, h, b):
    largest = F.max_pool2d(p, 3, 1, 1) * 2, F.max_pool2d(p, (1, 5), 1, (0, 2)) + 1, F.max_pool2d(h, 3, 1, 1) * 2
    moved = F.pad(p, (1, 1, 1, 1))[:, :, 1:-1, 2:] + F.pad(p, (1, 1, 1, 1))[:, :, 1:-1, :-2] - 2 * p
    second = F.max_pool2d(p, 3, 2, 1) * 2, F.max_pool2d(h, 3, 2, 1) * 2, F.max_pool2d(b, 3, 2, 1) * 2
    return *largest, *second, F.avg_pool2d(p, 3, 1, 1), F.avg_pool2d(h, 3, 1, 1, False, False), moved


def integers(i8, i32, i64, n32, n64):
    whole = i32 // n32, i32 % n32, torch.div(i64, n64, rounding_mode="trunc"), torch.remainder(i64, n64)
    return *whole, i64 // 7, i8 // 3, torch.fmod(i32, n32), torch.gcd(i32, n32), i64 >> 3


_X, _Y, _D = _floats(45, 131), _floats(45, 131), _floats(45, 131, dtype=torch.float64)
_H, _B = _floats(45, 131, dtype=torch.float16), _floats(45, 131, dtype=torch.bfloat16)
_I8, _I16 = _ints(45, 131, dtype=torch.int8), _ints(45, 131, dtype=torch.int16)
_U8 = torch.randint(0, 256, (45, 131), generator=_g).to(torch.uint8)
_I32, _I64 = _ints(45, 131, dtype=torch.int32) * 10007, _ints(45, 131, dtype=torch.int64) * (10**9 + 7)
_M, _AT = _X > 0, torch.randint(-45, 45, (17,), generator=_g)
_N32 = _ints(45, 131, dtype=torch.int32).abs() + 1
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "pointwise": (pointwise, (_X, _Y, _D.abs(), _I8, _U8, _I16, _I32, _I64, _M)),
    "halves": (halves, (_H, _B, _floats(131))),
    "reductions": (reductions, (_X, _D, _I32, _M)),
    "rows": (rows, (_X, _floats(131))),
    "scans": (scans, (_X, _I64)),
    "indexing": (indexing, (_X, _U8, _H, _AT, torch.randint(0, 45, (20, 131), generator=_g))),
    "layouts": (layouts, (_X, _H, _D, _U8)),
    "windows": (windows, tuple(t[:, :126].reshape(3, 5, 18, 21) for t in (_X, _H, _B))),
    "integers": (integers, (_I8, _I32, _I64, _N32, _N32.long() * -3)),
}
