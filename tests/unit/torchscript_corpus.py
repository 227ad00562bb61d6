# ruff: noqa: UP006, UP035, UP045 (TorchScript reads these annotations)
"""Scriptable programs with control flow and `torch.nn` modules, with inputs: what `fuse_script` has to give alike."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class State(NamedTuple):
    hidden: Tensor
    steps: int


# -- branches ----------------------------------------------------------------------------------------------------------
def branch_on_argument(x: Tensor, flag: bool):
    if flag:
        y = torch.relu(x * 2 + 1)
    else:
        y = torch.sigmoid(x - 1) * x
    return torch.tanh(y) * 3 + y


def branch_on_rank(x: Tensor):
    if x.dim() == 2:
        return (x * 2).softmax(-1) + 1
    return x.flatten().exp() - 1


def branch_on_data(x: Tensor):
    if bool((x * 2).sum() > 0):
        return x.exp() + x.sin()
    return x.cos() * x.tanh()


def branch_on_dtype(x: Tensor):
    y = x * 2 + 1
    if y.dtype == torch.float32:
        return y.to(torch.float64).exp() * 2
    return y


def branch_with_none(x: Tensor, y: Optional[Tensor] = None):
    z = x * 2 + 1
    if y is not None:
        z = (z + y) * y
    return z.relu() - 1


def nested_branches(x: Tensor, n: int, flag: bool):
    y = x + 1
    if n > 1:
        if flag:
            y = (y * 2).relu()
        else:
            y = y.sigmoid() + n
    elif n < 0:
        y = y.exp() - 1
    return y * 2 + y


def early_returns(x: Tensor, n: int):
    if n == 0:
        return x
    y = (x * n).tanh() + 1
    if n == 1:
        return y
    return y.exp() * y


def checked_first(x: Tensor, w: Tensor):
    y = x * 2 + 1
    if y.size(0) != w.size(0):
        raise ValueError("sizes differ")
    return (y + w).relu() * 2


def checked_before(x: Tensor, w: Tensor):
    if x.shape != w.shape:
        raise ValueError("shapes differ")
    return (x + w).relu() * 2


def printed(x: Tensor):
    y = x * 2 + 1
    print("a line")
    return y.relu() * 3


# -- loops -------------------------------------------------------------------------------------------------------------
def loop(x: Tensor, n: int):
    for i in range(n):
        x = torch.tanh(x * 0.5 + i) * x
    return x


def loop_while(x: Tensor):
    n = 0
    while bool(x.abs().sum() > 1) and n < 10:
        x = x * 0.5 - x * 0.1
        n += 1
    return x, n


def loop_break(x: Tensor, n: int):
    total = torch.zeros_like(x)
    for i in range(n):
        if i == 3:
            break
        if i == 1:
            continue
        total = total + (x * i).exp()
    return total


def loop_collect(x: Tensor, n: int):
    out: List[Tensor] = []
    for i in range(n):
        out.append((x + i).relu() * 2)
    return torch.stack(out).sum(0) + 1, out


def loop_unbind(x: Tensor):
    h = torch.zeros_like(x[0])
    for row in x.unbind(0):
        h = torch.tanh(row + h * 0.5) * 2
    return h


def loop_nested(x: Tensor, n: int):
    for i in range(n):
        for j in range(i):
            x = (x + j).sin() * (x - i).cos()
        if i > 1:
            x = x * 2 + 1
    return x


def loop_sizes(x: Tensor):
    total = x.new_zeros([x.size(1)])
    for i in range(x.size(0)):
        total = (total + x[i] * x[i]).sqrt()
    return total


def loop_with_list(x: Tensor, parts: List[Tensor]):
    for p in parts:
        x = (x * p + p).relu()
    return x


def loop_tuple_state(x: Tensor, state: Tuple[Tensor, Tensor], n: int):
    h, c = state
    for _ in range(n):
        gates = x + h
        c = torch.sigmoid(gates) * c + torch.tanh(gates)
        h = torch.sigmoid(gates) * torch.tanh(c)
    return h, (h, c)


def named_state(x: Tensor, state: State):
    return State((state.hidden * 2 + x).tanh() * x, state.steps + 1)


# -- writes ------------------------------------------------------------------------------------------------------------
def write_input(x: Tensor):
    y = x * 2 + 1
    x.add_(1)
    return y.relu() * 3, (x * 2).exp() * x


def write_view(x: Tensor):
    y = x + 1
    v = y[0]
    z = (y * 2).exp() * y
    v.mul_(0)
    return z, (y * 2).relu() + y, v


def write_in_branch(x: Tensor, flag: bool):
    y = x * 2 + 1
    z = y.relu() - 1
    if flag:
        y.add_(1)
    return (y * 3).relu() + 1, z


def write_in_loop(x: Tensor, n: int):
    cache = torch.zeros(4, 6)
    for i in range(n):
        cache[i] = (x[i] * 2).tanh() + i
        x = x + cache.sum() * 0.01
    return cache * 2 + 1, x


def write_fresh(x: Tensor):
    y = (x * 2).relu_()
    y += 1
    y *= x
    return y.sigmoid_()


def write_alias_of_input(x: Tensor, y: Tensor):
    a = x.exp() + y
    y.copy_(a)
    b = x.exp() + y
    return a, b * 2


def write_list(x: Tensor):
    parts = [x, x + 1]
    parts[0] = x * 2
    total = torch.cat(parts) * 2 + 1
    parts.append(total)
    return total.relu() - 1, len(parts)


def reshaped_in_place(x: Tensor):
    y = x * 2 + 1
    y.unsqueeze_(0)
    return y.size(0), (y + 1).relu() * 2


def views_of_one(x: Tensor):
    a = x[1:]
    b = x[:-1]
    return (a - b).abs() + 1, a, b


def result_is_argument(x: Tensor):
    return x, x.view(-1), x.to(torch.float32), (x + 1).relu()


def result_is_view(x: Tensor):
    y = (x * 2 + 1).relu()
    return y.t(), y.view(-1), y[0], y


# -- first fuser's ground ----------------------------------------------------------------------------------------------
def chunked(x: Tensor):
    a, b, c = (x * 2 + 1).chunk(3, 1)
    return a.sigmoid() * b.tanh() + c


def concatenated(x: Tensor, y: Tensor):
    return torch.cat([x * 2, y + 1], 1).relu() - 1


def broadcast(x: Tensor, y: Tensor, z: Tensor):
    return (x + y) * z - x[0] * y


def compared(x: Tensor, y: Tensor):
    return ((x > y) & (x < 2 * y)) | (x == y), torch.where(x >= y, x * 2, y - 1)


def zero_dim(x: Tensor):
    s = torch.tensor(2.0)
    return (x * s + s).relu(), s * 2 + 1


def scalars(x: Tensor, n: int, p: float, flag: bool):
    return (x * n + p).relu() - n / p, x * flag + n


def half_values(x: Tensor):
    y = x.to(torch.bfloat16)
    return (y * 2 + 1).tanh() * y, (x.half() + 1).sigmoid() * 3


def randomly(x: Tensor):
    return (torch.rand_like(x) + x).relu() * 2, F.dropout(x, 0.5, True) * 2 + 1


def integers(x: Tensor):
    i = (x * 10).to(torch.int64)
    return (i * 3 + 1) // 2, i % 4 + (i & 3)


def empty(x: Tensor):
    y = x[:0]
    return (y * 2 + 1).relu(), (y.sum(0) + 1) * 2


def transposed(x: Tensor):
    return (x.t() * 2 + 1).contiguous(), (x.t() + x.t().exp()).relu()


def reduced(x: Tensor):
    m = x.mean(-1, keepdim=True)
    v = ((x - m) * (x - m)).mean(-1, keepdim=True)
    return (x - m) / (v + 1e-5).sqrt(), x.amax(0) - x.amin(0)


def several_results(x: Tensor):
    v, i = (x * 2).max(1)
    return v * 2 + 1, i + 1


def norms_of(x: Tensor, w: Optional[Tensor] = None):
    return F.layer_norm(x, [6], w) * 2 + 1, F.normalize(x, dim=1) * 2


def sizes_between(x: Tensor):
    y = (x * 2).relu()
    b, n = y.size(0), y.size(1)
    return y.view(n, b) * n + b, (x.view(b * 2, -1) + 1).exp()


def lstm_cell(x: Tensor, hx: Tensor, cx: Tensor, w_ih: Tensor, w_hh: Tensor):
    gates = x.mm(w_ih) + hx.mm(w_hh)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


# -- arguments that change from call to call ---------------------------------------------------------------------------
def sum_over(x: Tensor, dim: int, keep: bool):
    return (x * 2).sum(dim, keepdim=keep) + 1


def cast_to(x: Tensor, dtype: int):
    return (x * 2).to(dtype) + 1, torch.zeros(3, dtype=dtype) + x.sum().to(dtype)


def soft_over(x: Tensor, dim: int):
    return (x * 2).softmax(dim) * 3, x.cumsum(dim) + x.unsqueeze(dim).sum()


def optional_weights(x: Tensor, w: Optional[Tensor], low: Optional[float]):
    return (F.layer_norm(x * 2, [6], w) + 1).clamp(low, 1.0) * 2


def sliced(x: Tensor, a: int, b: int):
    return (x[a:b] * 2 + 1).relu(), x[:, a] * x[:, b] + 1


def joined_along(x: Tensor, dim: int):
    return torch.cat([x * 2, x + 1], dim) * 3, torch.stack([x * 2, x + 1], dim) * 3


def turned(x: Tensor, a: int, b: int):
    return x.transpose(a, b) * 2 + 1, x.flip(a) * 3 + b


def numbers_in(x: Tensor, n: int, p: float, flag: bool):
    return (x * n + p).relu() - n / (p + 5), x * flag + n**2, x.clamp(min=-p) * (1 - p), x + (n if flag else -n)


def rounded_by(x: Tensor, text: str):
    return torch.div(x * 2 + 1, 0.3, rounding_mode=text) * 2


# -- longer ------------------------------------------------------------------------------------------------------------
def nms(boxes: Tensor, scores: Tensor, limit: float):
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order = scores.argsort(descending=True)
    keep: List[int] = []
    while order.numel() > 0:
        i = int(order[0])
        keep.append(i)
        rest = order[1:]
        low = torch.max(boxes[i, :2], boxes[rest, :2])
        high = torch.min(boxes[i, 2:], boxes[rest, 2:])
        size = (high - low).clamp(min=0.0)
        inter = size[:, 0] * size[:, 1]
        iou = inter / (area[i] + area[rest] - inter)
        order = rest[iou <= limit]
    return torch.tensor(keep)


def decode_boxes(anchors: Tensor, deltas: Tensor, scores: Tensor, height: int, width: int):
    w, h = anchors[:, 2] - anchors[:, 0], anchors[:, 3] - anchors[:, 1]
    cx, cy = anchors[:, 0] + 0.5 * w, anchors[:, 1] + 0.5 * h
    dw, dh = deltas[:, 2].clamp(max=math.log(1000.0 / 16)), deltas[:, 3].clamp(max=4.0)
    px, py = deltas[:, 0] * w + cx, deltas[:, 1] * h + cy
    pw, ph = dw.exp() * w, dh.exp() * h
    x0, x1 = (px - 0.5 * pw).clamp(min=0, max=width), (px + 0.5 * pw).clamp(min=0, max=width)
    y0, y1 = (py - 0.5 * ph).clamp(min=0, max=height), (py + 0.5 * ph).clamp(min=0, max=height)
    boxes = torch.stack([x0, y0, x1, y1], 1)
    keep = torch.where((x1 - x0 > 1) & (y1 - y0 > 1) & (scores.sigmoid() > 0.1))[0]
    return boxes[keep], scores.sigmoid()[keep]


def beam(x: Tensor, n: int):
    total = torch.zeros(x.size(0))
    found: Dict[str, Tensor] = {}
    for i in range(n):
        step = (x + i).log_softmax(-1)
        best, where = step.max(-1)
        total = total + best
        found[str(i)] = where * 2 + 1
    return total, found


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(11, 8), nn.GRUCell(8, 8), nn.Linear(8, 11)

    def forward(self, start: Tensor, steps: int = 5):
        token, out = start, torch.jit.annotate(List[Tensor], [])
        h = torch.zeros(start.size(0), 8)
        for _ in range(steps):
            h = self.cell(self.embed(token), h)
            logits = torch.log_softmax(self.head(torch.relu(h) * 2 + 0.1), -1)
            token = logits.argmax(-1)
            out.append(logits)
            if bool((token == 0).all()):
                break
        return torch.stack(out, 1), token


class Residual(nn.Module):
    def __init__(self, stride: int = 1):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, stride, 1), nn.Conv2d(4, 4, 3, 1, 1)
        self.norm_a, self.norm_b = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.down: Optional[nn.Module] = nn.Conv2d(4, 4, 1, stride) if stride > 1 else None

    def forward(self, x):
        y = torch.relu(self.norm_a(self.a(x)))
        y = self.norm_b(self.b(y))
        if self.down is not None:
            x = self.down(x)
        return torch.relu(x + y)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(8, 24), nn.Linear(8, 8), 2

    def forward(self, x, mask: Optional[Tensor] = None):
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.view(b, t, self.heads, -1).transpose(1, 2)
        k = k.view(b, t, self.heads, -1).transpose(1, 2)
        v = v.view(b, t, self.heads, -1).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -math.inf)
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c)) + x


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.total: Tensor = torch.zeros(3)
        self.many = 0

    def forward(self, x):
        self.calls += 1
        self.many += 1
        self.total = self.total * 0.5 + x.sum(0)[:3]
        return (x * self.calls + self.many).relu() * 2 + self.total[0]


class Exported(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.shifted(x).relu() * 2

    @torch.jit.export
    def shifted(self, x: Tensor):
        return x * self.scale + 1


class Within(nn.Module):
    """A module whose own `forward` has overloads, which only another module can call."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class WithinTwo(Within):
    def forward(self, x, state: Tuple[Tensor, Tensor]):
        return self.inner(x, state)


class WithinThree(Within):
    def forward(self, x, state: Tensor):
        return self.inner(x, state)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.by_name = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Sigmoid()})

    def forward(self, x, which: int = 1):
        for i, layer in enumerate(self.layers):
            if i != which:
                x = F.gelu(layer(x)) * 0.5 + x
        for name, layer in self.by_name.items():
            x = layer(x) * 2 + 1 if name == "a" else layer(x)
        return x


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def boxes(n: int) -> Tensor:
    low = rand(n, 2).abs() * 10
    return torch.cat([low, low + rand(n, 3)[:, :2].abs() * 10 + 1], 1)


_X, _SQUARE, _IMAGE, _SEQUENCE = rand(4, 6), rand(4, 8), rand(2, 4, 6, 6), rand(3, 5, 8)
_VOLUME, _LINE, _TOKENS = rand(2, 4, 4, 4, 4), rand(2, 4, 9), torch.tensor([[1, 2, 0], [3, 4, 5]])

# program, inputs
FUNCTIONS = [
    (branch_on_argument, (_X, True)), (branch_on_argument, (_X, False)), (branch_on_rank, (_X,)),
    (branch_on_rank, (_X[0],)), (branch_on_data, (_X,)), (branch_on_data, (-_X.abs(),)), (branch_on_dtype, (_X,)),
    (branch_on_dtype, (_X.double(),)), (branch_with_none, (_X,)), (branch_with_none, (_X, _X + 1)),
    (nested_branches, (_X, 2, True)), (nested_branches, (_X, 2, False)), (nested_branches, (_X, -1, True)),
    (early_returns, (_X, 0)), (early_returns, (_X, 1)), (early_returns, (_X, 3)), (checked_first, (_X, _X * 2)),
    (checked_first, (_X, _X[:3])), (checked_before, (_X, _X * 2)), (checked_before, (_X, _X[:, :5])),
    (printed, (_X,)), (loop, (_X, 5)), (loop, (_X, 0)), (loop_while, (_X,)), (loop_break, (_X, 6)),
    (loop_collect, (_X, 4)), (loop_unbind, (_X,)), (loop_nested, (_X, 4)), (loop_sizes, (_X,)),
    (loop_with_list, (_X, [_X + 1, _X * 2])), (loop_tuple_state, (_X, (_X + 1, _X * 2), 4)),
    (named_state, (_X, State(_X, 3))), (write_input, (_X,)), (write_view, (_X,)), (write_in_branch, (_X, True)),
    (write_in_branch, (_X, False)), (write_in_loop, (_X, 4)), (write_fresh, (_X,)),
    (write_alias_of_input, (_X, _X * 2)), (write_list, (_X,)), (reshaped_in_place, (_X,)), (views_of_one, (_X,)),
    (result_is_argument, (_X,)), (result_is_view, (_X,)), (chunked, (_X,)), (concatenated, (_X, _X * 2)),
    (broadcast, (_X, _X[0], _X[:, :1])), (compared, (_X, _X.abs())), (zero_dim, (_X,)), (scalars, (_X, 3, 2.5, True)),
    (half_values, (_X,)), (randomly, (_X,)), (integers, (_X,)), (empty, (_X,)), (transposed, (_X,)),
    (transposed, (_X.t(),)), (reduced, (_X,)), (several_results, (_X,)), (norms_of, (_X,)), (norms_of, (_X, _X[0])),
    (sizes_between, (_X,)), (lstm_cell, (_X, _SQUARE, _SQUARE + 1, rand(6, 32), rand(8, 32))),
    (nms, (boxes(30), rand(30), 0.3)), (decode_boxes, (boxes(30), rand(30, 4) * 0.3, rand(30), 20, 20)),
    (beam, (_X, 3)),
]  # fmt: skip

# program, several inputs after x for one script
CHANGING = [
    (sum_over, ((0, True), (1, False), (-1, True), (0, False))),
    (cast_to, ((7,), (15,), (3,), (11,))),
    (soft_over, ((0,), (1,), (-1,))),
    (optional_weights, ((None, None), (_X[0], 0.1), (None, 0.5), (_X[1], None))),
    (sliced, ((0, 2), (1, 3), (2, -1), (3, 1), (0, 9))),
    (joined_along, ((0,), (1,), (-1,))),
    (turned, ((0, 1), (1, 0), (-1, 0), (0, 0))),
    (numbers_in, ((3, 2.5, True), (0, -1.0, False), (-2, 0.0, True), (1, math.inf, True), (1 << 40, math.nan, False))),
    (rounded_by, (("trunc",), ("floor",))),
]

# a constructor, inputs
MODULES = [
    (Decoder, (torch.tensor([1, 2, 3]),)),
    (Decoder, (torch.tensor([4]), 2)),
    (Residual, (_IMAGE,)),
    (lambda: Residual(2), (_IMAGE,)),
    (Attention, (_SEQUENCE,)),
    (Attention, (_SEQUENCE, torch.ones(5, 5).tril())),
    (Counting, (_X,)),
    (Exported, (_X,)),
    (Experts, (_X,)),
    (Experts, (_X, 0)),
    (lambda: nn.Linear(6, 3), (_X,)),
    (lambda: nn.Bilinear(6, 6, 3), (_X, _X)),
    (nn.Identity, (_X,)),
    (lambda: nn.BatchNorm1d(6), (_X,)),
    (lambda: nn.BatchNorm2d(4), (_IMAGE,)),
    (lambda: nn.BatchNorm3d(4), (_VOLUME,)),
    (lambda: nn.BatchNorm2d(4, affine=False), (_IMAGE,)),
    (lambda: nn.BatchNorm2d(4, track_running_stats=False), (_IMAGE,)),
    (lambda: nn.BatchNorm2d(4, momentum=None), (_IMAGE,)),
    (lambda: nn.GroupNorm(2, 4), (_IMAGE,)),
    (lambda: nn.LayerNorm(6), (_X,)),
    (lambda: nn.LayerNorm([6, 6]), (_IMAGE,)),
    (lambda: nn.InstanceNorm1d(4), (_LINE,)),
    (lambda: nn.InstanceNorm2d(4, affine=True), (_IMAGE,)),
    (lambda: nn.InstanceNorm2d(4, track_running_stats=True), (_IMAGE,)),
    (lambda: nn.LocalResponseNorm(2), (_IMAGE,)),
    (lambda: nn.RMSNorm(6), (_X,)),
    (lambda: Within(nn.LSTM(8, 5)), (_SEQUENCE,)),
    (lambda: Within(nn.LSTM(8, 5, 2)), (_SEQUENCE,)),
    (lambda: Within(nn.LSTM(8, 5, bidirectional=True, batch_first=True)), (_SEQUENCE,)),
    (lambda: WithinTwo(nn.LSTM(8, 5)), (_SEQUENCE, (rand(1, 5, 5), rand(1, 5, 5)))),
    (lambda: Within(nn.LSTM(8, 5, proj_size=3)), (_SEQUENCE,)),
    (lambda: Within(nn.GRU(8, 5)), (_SEQUENCE,)),
    (lambda: WithinThree(nn.GRU(8, 5, 2)), (_SEQUENCE, rand(2, 5, 5))),
    (lambda: Within(nn.RNN(8, 5)), (_SEQUENCE,)),
    (lambda: Within(nn.RNN(8, 5, nonlinearity="relu")), (_SEQUENCE[0],)),
    (lambda: nn.LSTMCell(8, 5), (_SQUARE,)),
    (lambda: nn.LSTMCell(8, 5), (_SQUARE, (rand(4, 5), rand(4, 5)))),
    (lambda: nn.GRUCell(8, 5), (_SQUARE,)),
    (lambda: nn.RNNCell(8, 5), (_SQUARE,)),
    (lambda: nn.MultiheadAttention(8, 2), (_SEQUENCE, _SEQUENCE, _SEQUENCE)),
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (_SEQUENCE, _SEQUENCE, _SEQUENCE, None, False)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16), (_SEQUENCE,)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), (_SEQUENCE,)),
    (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), (_SEQUENCE,)),
    (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"), 2),
        (_SEQUENCE, torch.zeros(3, 3)),
    ),
    (lambda: nn.TransformerDecoderLayer(8, 2, 16), (_SEQUENCE, _SEQUENCE)),
    (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2), (_SEQUENCE, _SEQUENCE)),
    (lambda: nn.Conv1d(4, 3, 3), (_LINE,)),
    (lambda: nn.Conv2d(4, 3, 3, padding="same"), (_IMAGE,)),
    (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), (_IMAGE,)),
    (lambda: nn.Conv3d(4, 3, 2), (_VOLUME,)),
    (lambda: nn.ConvTranspose2d(4, 3, 3), (_IMAGE,)),
    (lambda: nn.MaxPool2d(2), (_IMAGE,)),
    (lambda: nn.MaxPool2d(2, return_indices=True), (_IMAGE,)),
    (lambda: nn.AvgPool2d(2), (_IMAGE,)),
    (lambda: nn.LPPool2d(2, 2), (_IMAGE,)),
    (lambda: nn.AdaptiveAvgPool2d(3), (_IMAGE,)),
    (lambda: nn.AdaptiveMaxPool2d((2, 3)), (_IMAGE,)),
    (lambda: nn.ReflectionPad2d(1), (_IMAGE,)),
    (lambda: nn.ZeroPad2d(1), (_IMAGE,)),
    (lambda: nn.ConstantPad1d(2, 3.5), (_LINE,)),
    (lambda: nn.Embedding(7, 3), (_TOKENS,)),
    (lambda: nn.Embedding(7, 3, padding_idx=0, max_norm=1.0), (_TOKENS,)),
    (lambda: nn.EmbeddingBag(7, 3), (_TOKENS,)),
    (lambda: nn.Upsample(scale_factor=2.0), (_IMAGE,)),
    (lambda: nn.Upsample(size=(5, 7), mode="bilinear"), (_IMAGE,)),
    (lambda: nn.PixelShuffle(2), (_IMAGE,)),
    (lambda: nn.PixelUnshuffle(2), (_IMAGE,)),
    (lambda: nn.ChannelShuffle(2), (_IMAGE,)),
    (nn.Flatten, (_IMAGE,)),
    (lambda: nn.Unflatten(1, (2, 2)), (_IMAGE,)),
    (lambda: nn.Unfold(2), (_IMAGE,)),
    (lambda: nn.Fold((3, 3), 2), (rand(2, 8, 4),)),
    (lambda: nn.Dropout(0.5), (_X,)),
    (lambda: nn.AlphaDropout(0.5), (_X,)),
    (lambda: nn.CosineSimilarity(1), (_X, _X + 1)),
    (nn.PairwiseDistance, (_X, _X + 1)),
    (lambda: nn.Softmax(1), (_X,)),
    (lambda: nn.LogSoftmax(1), (_X,)),
    (nn.Softmax2d, (_IMAGE,)),
    (lambda: nn.Softmin(1), (_X,)),
    (lambda: nn.GLU(1), (_X,)),
    (lambda: nn.PReLU(6), (_X,)),
    (lambda: nn.Threshold(0.1, 2.0), (_X,)),
    (nn.RReLU, (_X,)),
    *[
        (kind, (_X,))
        for kind in (
            nn.ReLU,
            nn.ReLU6,
            nn.ELU,
            nn.SELU,
            nn.CELU,
            nn.GELU,
            nn.SiLU,
            nn.Mish,
            nn.Sigmoid,
            nn.LogSigmoid,
            nn.Tanh,
            nn.Tanhshrink,
            nn.Hardtanh,
            nn.Hardsigmoid,
            nn.Hardswish,
            nn.Hardshrink,
            nn.Softshrink,
            nn.Softplus,
            nn.Softsign,
            nn.LeakyReLU,
        )
    ],
    (lambda: nn.GELU("tanh"), (_X,)),
    *[(kind, (_X, _X * 2 + 1)) for kind in (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.SoftMarginLoss)],
    (lambda: nn.MSELoss(reduction="none"), (_X, _X * 2)),
    (nn.BCELoss, (_X.sigmoid(), _X.abs().clamp(max=1))),
    (nn.BCEWithLogitsLoss, (_X, _X.abs().clamp(max=1))),
    (nn.CrossEntropyLoss, (_X, torch.tensor([0, 1, 2, 5]))),
    (lambda: nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1), (_X, torch.tensor([0, 1, 2, 5]))),
    (nn.NLLLoss, (_X.log_softmax(1), torch.tensor([0, 1, 2, 5]))),
    (nn.PoissonNLLLoss, (_X, _X.abs())),
    (nn.KLDivLoss, (_X.log_softmax(1), _X.softmax(1))),
    (nn.HingeEmbeddingLoss, (_X, _X.sign())),
    (nn.MarginRankingLoss, (_X[0], _X[1], _X[2].sign())),
    (nn.CosineEmbeddingLoss, (_X, _X + 1, torch.tensor([1, -1, 1, 1]))),
    (nn.TripletMarginLoss, (_X, _X + 1, _X * 2)),
    (nn.MultiMarginLoss, (_X, torch.tensor([0, 1, 2, 5]))),
    (nn.MultiLabelSoftMarginLoss, (_X, (_X > 0).float())),
    (
        nn.CTCLoss,
        (rand(6, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), torch.tensor([6, 6]), torch.tensor([2, 2])),
    ),
    (
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        (_IMAGE,),
    ),
    (
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 6), nn.Softmax(1)
        ),
        (_X,),
    ),
]
