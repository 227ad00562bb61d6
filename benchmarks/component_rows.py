"""The rows of the `components` suite: tensors whose last dim holds a few components, as public programs have them.

Boxes of detectors, quaternions and rotations of avatars and robots, points and rays, colours, rotary embeddings by
pairs and by complex numbers, gates of interleaved columns, spectra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contraction_rows import Built, Row

MANY, IMAGE, QUICK = 100_000, 512, 50
Shape = tuple[int, ...]
Function = Callable[..., Any]
HALF = torch.bfloat16


class Plain(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


# -- boxes -------------------------------------------------------------------------------------------------------------
def corners(b: Tensor) -> Tensor:
    cx, cy, w, h = b.unbind(-1)
    return torch.stack((cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h), dim=-1)


def centres(b: Tensor) -> Tensor:
    return torch.cat([(b[:, :2] + b[:, 2:]) / 2, b[:, 2:] - b[:, :2]], -1)


def areas(b: Tensor) -> Tensor:
    return (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    size = (high - low).clamp(min=0)
    shared = size[..., 0] * size[..., 1]
    return shared / (areas(a)[:, None] + areas(b) - shared + 1e-3)


def generalised(a: Tensor, b: Tensor) -> Tensor:
    x1, y1, x2, y2 = a.unbind(-1)
    u1, v1, u2, v2 = b.unbind(-1)
    shared = (torch.min(x2, u2) - torch.max(x1, u1)).clamp(0) * (torch.min(y2, v2) - torch.max(y1, v1)).clamp(0)
    union = (x2 - x1).abs() * (y2 - y1).abs() + (u2 - u1).abs() * (v2 - v1).abs() - shared + 1
    hull = (torch.max(x2, u2) - torch.min(x1, u1)) * (torch.max(y2, v2) - torch.min(y1, v1))
    return 1 - shared / union + (hull - union) / (hull.abs() + 1)


def decoded(anchors: Tensor, rel: Tensor) -> Tensor:
    w, h = anchors[:, 2] - anchors[:, 0], anchors[:, 3] - anchors[:, 1]
    x, y = rel[:, 0] * w + anchors[:, 0], rel[:, 1] * h + anchors[:, 1]
    wide, high = 0.5 * rel[:, 2].exp() * w, 0.5 * rel[:, 3].exp() * h
    return torch.stack((x - wide, y - high, x + wide, y + high), 1)


def keypoints(k: Tensor) -> Tensor:
    return torch.cat((k[:, :2] * 2 - 0.5, k[:, 2:].sigmoid()), -1)


# -- rotations, points -------------------------------------------------------------------------------------------------
def hamilton(a: Tensor, b: Tensor) -> Tensor:
    s, x, y, z = a.unbind(-1)
    t, u, v, w = b.unbind(-1)
    parts = (s * t - x * u - y * v - z * w, s * u + x * t + y * w - z * v,
             s * v - x * w + y * t + z * u, s * w + x * v - y * u + z * t)  # fmt: skip
    return torch.stack(parts, -1)


def rotation(q: Tensor) -> Tensor:
    r, i, j, k = q.unbind(-1)
    s = 2.0 / (q * q).sum(-1)
    rows = (1 - s * (j * j + k * k), s * (i * j - k * r), s * (i * k + j * r), s * (i * j + k * r),
            1 - s * (i * i + k * k), s * (j * k - i * r), s * (i * k - j * r), s * (j * k + i * r),
            1 - s * (i * i + j * j))  # fmt: skip
    return torch.stack(rows, -1).reshape((*q.shape[:-1], 3, 3))


def of_six(x: Tensor) -> Tensor:
    first = F.normalize(x[:, :3], dim=-1)
    second = F.normalize(x[:, 3:] - (first * x[:, 3:]).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack((first, second, torch.linalg.cross(first, second)), -2)


def mirrored(n: Tensor, d: Tensor) -> Tensor:
    n = F.normalize(n, dim=-1)
    return d - 2 * (d * n).sum(-1, keepdim=True) * n


def spherical(p: Tensor) -> Tensor:
    x, y, z = p[..., 0], p[..., 1], p[..., 2]
    r = torch.sqrt(x * x + y * y + z * z)
    return torch.stack([r, torch.acos(z / (r + 1e-6)), torch.atan2(y, x)], -1)


def cartesian(p: Tensor) -> Tensor:
    return torch.stack([p[:, 0] * p[:, 1].cos(), p[:, 0] * p[:, 1].sin()], 1)


def homogeneous(p: Tensor) -> Tensor:
    return torch.cat([p, torch.ones_like(p[:, :1])], -1)


def distances(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(-1).sqrt()


def all_distances(a: Tensor, b: Tensor) -> Tensor:
    return ((a[:, None] - b[None]) ** 2).sum(-1)


# -- colours -----------------------------------------------------------------------------------------------------------
def grey(im: Tensor) -> Tensor:
    return 0.299 * im[..., 0] + 0.587 * im[..., 1] + 0.114 * im[..., 2]


def yuv(im: Tensor) -> Tensor:
    r, g, b = im.unbind(-1)
    y = 0.299 * r + 0.587 * g + 0.114 * b
    return torch.stack([y, (b - y) * 0.492, (r - y) * 0.877], -1)


def saturation(im: Tensor) -> Tensor:
    most, least = im.amax(-1), im.amin(-1)
    return torch.stack([(most - least) / (most.abs() + 1), most], -1)


# -- rotary embeddings, gates ------------------------------------------------------------------------------------------
def by_pairs(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = q.float().reshape(*q.shape[:-1], -1, 2).unbind(-1)
    c, s = c[:, None], s[:, None]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(3).type_as(q)


def every_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos[:, None] + turned * sin[:, None]


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def by_complex(q: Tensor, f: Tensor) -> Tensor:
    z = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(z * torch.view_as_complex(f)[:, None]).flatten(3).type_as(q)


def gated(x: Tensor) -> Tensor:
    gate, linear = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


def positions(t: Tensor, d: Tensor) -> Tensor:
    p = t[..., :1] * d
    return torch.stack((p[..., 0::2].sin(), p[..., 1::2].cos()), -1).flatten(-2)


# -- complex numbers, spectra ------------------------------------------------------------------------------------------
def product(x: Tensor, y: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y))


def magnitudes(x: Tensor) -> Tensor:
    return torch.log1p(torch.view_as_complex(x).abs())


def kernel_of_states(a: Tensor, c: Tensor, t: Tensor) -> Tensor:
    """Of a diagonal state-space model."""
    rates = torch.complex(-a[:, 0].abs(), a[:, 1])
    return 2 * (torch.view_as_complex(c)[:, None] * torch.exp(rates[:, None] * t)).sum(0).real


def whitened(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    return torch.fft.irfft(spectrum / (spectrum.abs() + 1e-3), n=x.shape[-1])


def butterfly(x: Tensor) -> Tensor:
    a, b = x.view(x.shape[0], -1, 2).unbind(-1)
    return torch.stack([a + b, a - b], -1).view(x.shape)


_TOKENS: tuple[Shape, Shape, Shape] = ((2, 512, 16, 64), (512, 32), (512, 32))
_WHOLE: tuple[Shape, Shape, Shape] = ((2, 512, 16, 64), (512, 64), (512, 64))
_PAIRS: Shape = (1024, 512, 2)
_POINTS: Shape = (MANY, 3)
_PROBLEMS: tuple[tuple[str, Function, tuple[Shape, ...], torch.dtype], ...] = (
    ("box corners", corners, ((MANY, 4),), torch.float32),
    ("box centres", centres, ((MANY, 4),), torch.float32),
    ("box areas", areas, ((MANY, 4),), torch.float32),
    ("box overlaps", overlaps, ((300, 4), (300, 4)), torch.float32),
    ("generalised overlap loss", generalised, ((MANY, 4), (MANY, 4)), torch.float32),
    ("box decoding", decoded, ((MANY, 4), (MANY, 4)), torch.float32),
    ("keypoints", keypoints, ((MANY, 4),), torch.float32),
    ("quaternion product", hamilton, ((MANY, 4), (MANY, 4)), torch.float32),
    ("quaternions to matrices", rotation, ((MANY, 4),), torch.float32),
    ("six numbers to matrices", of_six, ((MANY, 6),), torch.float32),
    ("reflected rays", mirrored, (_POINTS, _POINTS), torch.float32),
    ("cross product", torch.linalg.cross, (_POINTS, _POINTS), torch.float32),
    ("normalised points", lambda p: p / (p.norm(dim=-1, keepdim=True) + 1e-6), (_POINTS,), torch.float32),
    ("spherical coordinates", spherical, (_POINTS,), torch.float32),
    ("polar to cartesian", cartesian, ((MANY, 2),), torch.float32),
    ("homogeneous coordinates", homogeneous, (_POINTS,), torch.float32),
    ("distances", distances, (_POINTS, _POINTS), torch.float32),
    ("all distances", all_distances, ((1000, 3), (1000, 3)), torch.float32),
    ("cosine similarity", lambda a, b: F.cosine_similarity(a, b, dim=-1), (_POINTS, _POINTS), torch.float32),
    ("softmax of three", lambda x: x.softmax(-1), (_POINTS,), torch.float32),
    ("grey image", grey, ((IMAGE, IMAGE, 3),), torch.float32),
    ("image to YUV", yuv, ((IMAGE, IMAGE, 3),), torch.float32),
    ("saturation and value", saturation, ((IMAGE, IMAGE, 3),), torch.float32),
    ("rotary, pairs", by_pairs, _TOKENS, torch.float32),
    ("rotary, pairs, bfloat16", by_pairs, _TOKENS, HALF),
    ("rotary, every two", every_two, _WHOLE, torch.float32),
    ("rotary, half by half", by_halves, _WHOLE, torch.float32),
    ("rotary, complex", by_complex, ((2, 512, 16, 64), (512, 32, 2)), torch.float32),
    ("rotary, complex, bfloat16", by_complex, ((2, 512, 16, 64), (512, 32, 2)), HALF),
    ("gate of interleaved columns", gated, ((1024, 1024),), torch.float32),
    ("sines of positions", positions, ((8, 100, 80, 2), (80,)), torch.float32),
    ("complex product", product, (_PAIRS, _PAIRS), torch.float32),
    ("log magnitudes", magnitudes, (_PAIRS,), torch.float32),
    ("kernel of a state-space model", kernel_of_states, ((64, 2), (64, 2), (2048,)), torch.float32),
    ("whitened signal", whitened, ((64, 4096),), torch.float32),
    ("butterfly", butterfly, ((1024, 1024),), torch.float32),
)  # fmt: skip


def _built(function: Function, shapes: tuple[Shape, ...], dtype: torch.dtype) -> Callable[[bool], Built]:
    def make(quick: bool) -> Built:
        sizes = [[min(n, QUICK) if quick and n >= MANY else n for n in shape] for shape in shapes]
        first, *rest = (torch.randn(size) for size in sizes)
        return Plain(function), (first.to(dtype), *rest)

    return make


def rows() -> Iterator[Row]:
    """All of them."""
    return (Row(name, _built(function, shapes, dtype)) for name, function, shapes, dtype in _PROBLEMS)
