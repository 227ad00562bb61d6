"""Scripted programs that the suite `torchscript` times, with inputs. They branch and loop as users' scripts do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, List  # noqa: UP035  TorchScript reads it

import torch
from torch import Tensor, nn


def chain(x: Tensor, y: Tensor):
    return torch.relu(x * y + 1) * x


def small(x: Tensor, y: Tensor):
    return torch.relu(x * y + 1)


def lstm_cell(from_x: Tensor, from_h: Tensor, c: Tensor, bias: Tensor):
    i, f, g, o = (from_x + from_h + bias).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def lstm_cell_with_products(x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor):
    gates = torch.mm(x, w_ih.t()) + torch.mm(h, w_hh.t()) + b_ih + b_hh
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def lstm_layer(x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor):
    out: List[Tensor] = []  # noqa: UP006
    from_x = torch.matmul(x, w_ih)
    for t in range(x.size(0)):
        i, f, g, o = (from_x[t] + h.mm(w_hh) + bias).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return torch.stack(out), h, c


def box_processing(anchors: Tensor, deltas: Tensor, logits: Tensor, size: float, keep: int, overlap: float):
    w, h = anchors[:, 2] - anchors[:, 0], anchors[:, 3] - anchors[:, 1]
    cx, cy = anchors[:, 0] + 0.5 * w, anchors[:, 1] + 0.5 * h
    px, py = deltas[:, 0] / 10 * w + cx, deltas[:, 1] / 10 * h + cy
    pw = (deltas[:, 2] / 5).clamp(max=math.log(1000.0 / 16)).exp() * w
    ph = (deltas[:, 3] / 5).clamp(max=math.log(1000.0 / 16)).exp() * h
    boxes = torch.stack([px - 0.5 * pw, py - 0.5 * ph, px + 0.5 * pw, py + 0.5 * ph], 1).clamp(min=0.0, max=size)
    scores, order = logits.sigmoid().topk(keep)
    boxes = boxes[order]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    alive = (area > 1) & (scores > 0.05)
    for i in range(keep):
        if bool(alive[i]):
            low, high = torch.max(boxes[i, :2], boxes[:, :2]), torch.min(boxes[i, 2:], boxes[:, 2:])
            edges = (high - low).clamp(min=0.0)
            inter = edges[:, 0] * edges[:, 1]
            near = inter / (area[i] + area - inter) > overlap
            near[: i + 1] = False
            alive = alive & ~near
    return boxes[alive], scores[alive]


class Decoder(nn.Module):
    """A greedy decoder: a gated unit, attention over what was read, the best token until the end or a limit."""

    def __init__(self, words: int = 512, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.from_x, self.from_h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, read: Tensor, steps: int):
        token = torch.zeros(read.size(0), dtype=torch.int64)
        h = read.mean(1)
        tokens: List[Tensor] = []  # noqa: UP006
        total = torch.zeros(read.size(0))
        for _ in range(steps):
            a, b, c = self.from_x(self.embed(token)).chunk(3, 1)
            p, q, r = self.from_h(h).chunk(3, 1)
            gate = torch.sigmoid(b + q)
            h = (1 - gate) * torch.tanh(c + torch.sigmoid(a + p) * r) + gate * h
            scores = (read * h.unsqueeze(1)).sum(-1) / math.sqrt(float(h.size(1)))
            seen = (scores.softmax(1).unsqueeze(2) * read).sum(1)
            logits = torch.log_softmax(self.head(self.norm(seen + h) * 0.5 + h), 1)
            best, token = logits.max(1)
            total = total + best
            tokens.append(token)
            if bool((token == 1).all()):
                break
        return torch.stack(tokens, 1), total


@dataclass(frozen=True)
class Row:
    """One program: how it is made, its inputs for full and quick runs, and how much faster it is to become."""

    name: str
    make: Callable[[], Any]
    inputs: Callable[[bool], tuple[Any, ...]]
    target: float


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _chain(quick: bool) -> tuple[Any, ...]:
    n = 1 << (12 if quick else 22)
    return _rand(n), _rand(n)


def _cell(quick: bool) -> tuple[Any, ...]:
    b, n = (4, 8) if quick else (256, 1024)
    return _rand(b, 4 * n), _rand(b, 4 * n) + 1, _rand(b, n), _rand(4 * n)


def _whole_cell(quick: bool) -> tuple[Any, ...]:
    b, n = (4, 8) if quick else (256, 1024)
    w = _rand(4 * n, n) / n**0.5
    return _rand(b, n), _rand(b, n) + 1, _rand(b, n), w, w.flip(0), _rand(4 * n), _rand(4 * n)


def _layer(quick: bool) -> tuple[Any, ...]:
    t, b, n = (3, 2, 8) if quick else (100, 16, 64)
    return _rand(t, b, n), _rand(b, n), _rand(b, n), _rand(n, 4 * n) / 8, _rand(n, 4 * n) / 8, _rand(4 * n)


def _boxes(quick: bool) -> tuple[Any, ...]:
    n, keep = (50, 5) if quick else (20_000, 100)
    low = _rand(n, 2).abs() * 200
    return torch.cat([low, low + _rand(n, 3)[:, :2].abs() * 60 + 2], 1), _rand(n, 4), _rand(n), 800.0, keep, 0.5


def _read(quick: bool) -> tuple[Any, ...]:
    return (_rand(2, 3, 128), 3) if quick else (_rand(8, 32, 128), 30)


ROWS = (
    Row("4-op chain, 2^22 floats", lambda: chain, _chain, 3.0),
    Row("LSTM cell on its gates, 256×1024", lambda: lstm_cell, _cell, 3.0),
    Row("LSTM cell with its products, 256×1024", lambda: lstm_cell_with_products, _whole_cell, 3.0),
    Row("LSTM layer, 100 steps, 16×64", lambda: lstm_layer, _layer, 1.3),
    Row("greedy decoder, 30 steps, 8×128", Decoder, _read, 1.3),
    Row("box post-processing, 20,000 boxes", lambda: box_processing, _boxes, 1.3),
)


def scripted(row: Row) -> Any:
    """The row's script, the same at every call."""
    torch.manual_seed(0)
    made = row.make()
    return torch.jit.script(made.eval() if isinstance(made, nn.Module) else made)
