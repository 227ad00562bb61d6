"""Small pieces of models whose results and gradients are judged against float64, beside eager's.

`python -m tests.models.exactness [names]` runs every piece in every dtype, memory format and way of tracing.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

C = 32
DRAWS = 12  # of inputs: of a gradient that is zero by cancellation, one draw says nothing about the next
NOTHING = 1e-7  # of the largest result: what rounding leaves of a gradient that is zero
SIZES = (6, 11, 70)  # batches, of which the first is traced
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DYNAMIC = (None, True, False)
LAYOUTS = ("plain", "turned")


@dataclass(frozen=True)
class Piece:
    """`run(modules, weight, x)` on an input of size (batch, *shape)."""

    shape: tuple[int, ...]
    run: Callable[[Sequence[nn.Module], torch.Tensor, torch.Tensor], torch.Tensor]
    modules: Callable[[], Sequence[nn.Module]] = tuple


ROW, IMAGE, WORDS = (C,), (C, 6, 5), (7, C)


def _linear(*widths: int) -> Callable[[], Sequence[nn.Module]]:
    return lambda: [nn.Linear(C, n) for n in widths]


def _heads(m: Sequence[nn.Module], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return m[0](x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)


def _classes(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0]) % C


def _gated(pair: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.silu(pair[0]) * pair[1]


PIECES: dict[str, Piece] = {
    "normalised classes": Piece(
        ROW, lambda m, w, x: torch.softmax(m[1](m[0](x)) * w, -1), lambda: [nn.Linear(C, C), nn.BatchNorm1d(C)]
    ),
    "softmax over the batch": Piece(
        ROW, lambda m, w, x: torch.softmax(m[1](m[0](x)) * w, 0), lambda: [nn.Linear(C, C), nn.BatchNorm1d(C)]
    ),
    "relu network": Piece(ROW, lambda m, w, x: m[1](F.relu(m[0](x))), _linear(C, C)),
    "gelu network": Piece(WORDS, lambda m, w, x: x + m[0](F.gelu(x * w, approximate="tanh")), _linear(C)),
    "gated network": Piece(WORDS, lambda m, w, x: _gated(m[0](x).chunk(2, -1)), _linear(2 * C)),
    "layer norm": Piece(WORDS, lambda m, w, x: m[0](x * w).tanh(), lambda: [nn.LayerNorm(C)]),
    "layer norm far from 0": Piece(WORDS, lambda m, w, x: m[0](x + 100).sigmoid(), lambda: [nn.LayerNorm(C)]),
    "rms norm": Piece(WORDS, lambda m, w, x: m[0](x) * w, lambda: [nn.RMSNorm(C)]),
    "group norm": Piece(IMAGE, lambda m, w, x: F.silu(m[0](x)), lambda: [nn.GroupNorm(4, C)]),
    "instance norm": Piece(IMAGE, lambda m, w, x: F.gelu(m[0](x)), lambda: [nn.InstanceNorm2d(C, affine=True)]),
    "batch norm": Piece(IMAGE, lambda m, w, x: F.relu(m[0](x * 2 + 3)), lambda: [nn.BatchNorm2d(C)]),
    "convolution": Piece(
        IMAGE, lambda m, w, x: F.relu(m[1](m[0](x))), lambda: [nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C)]
    ),
    "convolution, group norm": Piece(
        IMAGE, lambda m, w, x: F.silu(m[1](m[0](x))), lambda: [nn.Conv2d(C, C, 3), nn.GroupNorm(4, C)]
    ),
    "attention": Piece(WORDS, lambda m, w, x: F.scaled_dot_product_attention(*_heads(m, x)), _linear(3 * C)),
    "attention by hand": Piece(
        WORDS,
        lambda m, w, x: (lambda q, k, v: torch.softmax(q @ k.mT / 8**0.5, -1) @ v)(*m[0](x).chunk(3, -1)),
        _linear(3 * C),
    ),
    "log softmax": Piece(WORDS, lambda m, w, x: torch.log_softmax(x * w, -1)),
    "cross entropy": Piece(
        ROW, lambda m, w, x: F.cross_entropy(m[0](x), _classes(x), label_smoothing=0.1), _linear(C)
    ),
    "binary cross entropy": Piece(
        ROW, lambda m, w, x: F.binary_cross_entropy_with_logits(m[0](x), (x.detach() > 0).to(x.dtype)), _linear(C)
    ),
    "divergence": Piece(
        ROW, lambda m, w, x: F.kl_div(F.log_softmax(x, -1), F.softmax(x.flip(0), -1), reduction="batchmean")
    ),
    "distances": Piece(
        ROW, lambda m, w, x: F.mse_loss(m[0](x), x) + F.huber_loss(x, m[0](x)) + F.smooth_l1_loss(x, x.flip(0)),
        _linear(C),
    ),
    "cosine": Piece(ROW, lambda m, w, x: F.cosine_similarity(m[0](x), x, -1), _linear(C)),
    "normalise": Piece(ROW, lambda m, w, x: F.normalize(x, dim=-1) + F.normalize(x, dim=0) * w),
    "spread": Piece(ROW, lambda m, w, x: (x - x.mean(0)) / (x.std(0) + 1e-3) * x.var(1, keepdim=True)),
    "spread far from 0": Piece(ROW, lambda m, w, x: (x + 50).var(1) + (x + 50).std()),
    "logsumexp": Piece(ROW, lambda m, w, x: torch.logsumexp(x * w, 1) - torch.logsumexp(x, 0).sum()),
    "running sums": Piece(ROW, lambda m, w, x: x.cumsum(1) * w + x.cumsum(0)),
    "running products": Piece(ROW, lambda m, w, x: (x.sigmoid() + 0.5).cumprod(1)),
    "products": Piece(ROW, lambda m, w, x: (x * 0.3 + 1).prod(1)),
    "norms": Piece(ROW, lambda m, w, x: x.norm(dim=1) + x.norm(1) + x.norm(3, dim=1)),
    "sums over dims": Piece(
        IMAGE, lambda m, w, x: x.sum((0, 2, 3)) * w + x.mean((2, 3)).sum(0) + x.square().sum((1, 2)).mean()
    ),
    "means": Piece(ROW, lambda m, w, x: (x * w).mean() + x.exp().mean(0).sum()),
    "embedding": Piece(
        (9,), lambda m, w, x: m[1](m[0]((x.detach().abs() * 9).long().clamp(0, C - 1)) * x[..., None]),
        lambda: [nn.Embedding(C, C), nn.LayerNorm(C)],
    ),
    "activations": Piece(
        ROW, lambda m, w, x: F.mish(x) + F.softplus(x) + F.elu(x) + F.selu(x) + F.logsigmoid(x) + F.hardswish(x)
    ),
    "special functions": Piece(
        ROW, lambda m, w, x: torch.lgamma(x.abs() + 0.5) + torch.atan2(x, x.flip(0) + 3) + torch.expm1(x) + torch.erf(x)
    ),
    "pools": Piece(IMAGE, lambda m, w, x: F.avg_pool2d(x, 2) + F.max_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 1)),
    "pairs": Piece(ROW, lambda m, w, x: (x[:, :, None] - x[:, None, :]).square().mean((1, 2)).sqrt()),
    "polynomial": Piece(ROW, lambda m, w, x: ((x * 1.1 + 0.3) * x - 2) * x + x**3),
}  # fmt: skip


class Model(nn.Module):
    """A piece with its parameters."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.run = piece.run
        self.parts = nn.ModuleList(piece.modules())
        self.weight = nn.Parameter(torch.randn(C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.parts, self.weight, x)


def results(model: nn.Module, function: Any, x: torch.Tensor, g: torch.Tensor | None) -> dict[str, Any]:
    """The result and every gradient of its sum, weighted by `g`, in float64."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = function(x)
    weight = torch.ones_like(out) if g is None else g[: out.numel()].reshape(out.shape).to(out.dtype)
    (out * weight).sum().backward()
    found = {"result": out, "input": x.grad, **{n: p.grad for n, p in model.named_parameters()}}
    return {n: t.detach().double() for n, t in found.items() if t is not None}


def worse(
    name: str, dtype: torch.dtype, dynamic: bool | None = None, layout: str = "plain", sizes: Sequence[int] = SIZES
) -> Iterator[str]:  # fmt: skip
    """Results and gradients further from float64 than twice eager's distance plus two units in the last place.

    A distance is the largest over all elements and draws: of one element it is a matter of chance. What is nothing but
    rounding, as the gradient of a bias before a norm, is measured by the largest result.
    """
    torch._dynamo.reset()
    torch.manual_seed(3)
    piece = PIECES[name]
    eager = Model(piece).to(dtype)
    own, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    compiled = torch.compile(own, backend="fuser", dynamic=dynamic)
    weights = torch.randn(1 << 16, generator=torch.Generator().manual_seed(5)).to(dtype)
    for n, weighted in itertools.product(sizes, (True, False)):
        seen: dict[str, list[float]] = {}
        for draw in range(DRAWS):
            x = torch.randn(n, *piece.shape, generator=torch.Generator().manual_seed(n * DRAWS + draw)).to(dtype)
            if layout == "turned":
                x = x.transpose(1, -1).contiguous().transpose(1, -1)
            g = weights if weighted else None
            mine = results(own, compiled, x, g)
            its, exact = results(eager, eager, x, g), results(wide, wide, x.double(), g)
            for key, e in exact.items():
                found = [(mine[key] - e).abs().max().item(), (its[key] - e).abs().max().item(), e.abs().max().item()]
                seen[key] = [a if a != a or a > b else b for a, b in zip(found, seen.get(key, [0.0] * 3))]
        largest = max(e for *_, e in seen.values())
        for key, (a, b, e) in seen.items():
            e = e if e > NOTHING * largest else largest
            if not a <= 2 * b + 2 * torch.finfo(dtype).eps * e and b == b:
                where = f"{dtype}, {dynamic=}, {layout}, batch {n}, {'weighted ' if weighted else ''}sum"
                yield f"{name}, {where}, {key}: {a:.2e}, eager {b:.2e} of {e:.2e}"


def main(names: Sequence[str]) -> int:
    """Every piece in every way; 1 if some result is worse than eager's."""
    count = 0
    for name in names or PIECES:
        for ways in itertools.product(DTYPES, DYNAMIC, LAYOUTS):
            for line in worse(name, *ways):
                print(line, flush=True)
                count += 1
        print(f"{name}: done", flush=True)
    print(f"{count} results worse than eager's")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
