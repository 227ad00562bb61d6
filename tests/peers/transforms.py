"""Programs with derivatives of their own: functions with a backward, transforms, regions without gradients."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.peers.spec import b, f, i, peer


class _Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward(x)
        ctx.ends = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        low, high = ctx.ends
        return grad * ((x >= low) & (x <= high)).to(grad.dtype), None, None


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        s = torch.sigmoid(ctx.saved_tensors[0])
        return grad * (s * (1 + ctx.saved_tensors[0] * (1 - s)))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() * ctx.factor, None


@peer(f("N", 5))
def functions_with_a_backward(x):
    return _Clamp.apply(x, -0.5, 0.5), _Swish.apply(x) * 2, _Reversed.apply(x, 0.3).tanh()


def _layer(x, w):
    return torch.tanh(x @ w).relu() + x


@peer(f("N", 5), f(5, 5))
def checkpointed_layers(x, w):
    for _ in range(2):
        x = checkpoint(_layer, x, w, use_reentrant=False)
    return x


@peer(f("N", 5, grad=False), f(5, grad=False), grad=False)
def gradients_per_sample(x, w):
    def loss(w, x):
        return ((w * x).tanh().sum() - 1) ** 2

    along = torch.func.jvp(lambda t: t.sin() * w, (x,), (torch.ones_like(x),))
    return torch.vmap(torch.func.grad(loss), (None, 0))(w, x), along, torch.vmap(lambda a: a.softmax(0))(x)


@peer(f(4, grad=False), grad=False, halves=False)
def second_derivatives(w):
    def energy(t):
        return (t**3).sum() + t[0] * t[1].sin()

    return torch.func.hessian(energy)(w), torch.func.jacfwd(lambda t: t.cumsum(0))(w)


@peer(f("N", 5))
def step_downhill(x):
    with torch.enable_grad():
        z = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad((z**3).sum(), z)
    return x - 0.1 * slope


@peer(f("N", 5), f(5, 3))
def regions_without_gradients(x, w):
    with torch.no_grad():
        target = (x @ w).argmax(-1)
    y = x @ w
    with torch.no_grad():
        spread = y.std(unbiased=False) + 1
    return F.cross_entropy((y / spread).float(), target), y.detach().abs()


@peer(f("N", 6))
def safe_branches(x):
    safe = torch.where(x > 0, x, torch.ones_like(x))
    return torch.where(x > 0, safe.log(), 0.0), torch.where(x > 0, x.sqrt(), -x)


@peer(f("N", 5), f("N", 5))
def gradients_at_ties(x, y):
    x, y = x.round(), y.round()
    x, y = x + (y - y.detach()), y + (x - x.detach())
    return torch.max(x, y), x.amax(1), x.max(1).values, torch.minimum(x, y), x.clamp(0, 1), x.cummax(1).values, x.abs()


@peer(f("N", 5))
def gradients_at_zero(x):
    z = x * 0
    return z.norm(dim=1), z.abs().sum(), F.normalize(z, dim=1), z.pow(2).sum(1).add(1e-6).sqrt()


@peer(f("N", 3, 4, 4), f("N", 3, 8, 8))
def merged_pyramid(top, side):
    wide = F.interpolate(top, size=side.shape[-2:], mode="bilinear", align_corners=False)
    return wide * side.sigmoid() + F.interpolate(top, scale_factor=2, mode="nearest")


@peer(f("N", 3), i(9, "N", 3), b("N", 3), grad=False)
def mixed_kinds(x, n, flag):
    scalar, count = torch.tensor(2.5), torch.tensor(3)
    return (
        x + n, x * flag, n + flag, x * scalar, n * scalar, n + count, n / 2, n * 2.0, flag + 1, flag * 1.5,
        torch.cat([x.float(), n.float()], 1), torch.where(flag, x, scalar), torch.where(flag, n, count),
        x + scalar.double(), x.float() + x,
    )  # fmt: skip
