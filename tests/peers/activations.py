"""Activations and gates, in the spellings that models use."""

import math

import torch
import torch.nn.functional as F

from tests.peers.spec import f, peer


@peer(f("N", 32))
def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@peer(f("N", 32))
def gelu_tanh_pow(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@peer(f("N", 32))
def gelu_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@peer(f("N", 32))
def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


@peer(f("N", 32))
def squared_relu(x):
    return torch.square(F.relu(x))


@peer(f("N", 32))
def relu_times_relu(x):
    return F.relu(x) * F.relu(x + 1)


@peer(f("N", 32))
def mish(x):
    return x * torch.tanh(F.softplus(x))


@peer(f("N", 32))
def mish_by_exp(x):
    e = torch.exp(x.clamp(max=4))
    n = e * e + 2 * e
    return x * n / (n + 2)


@peer(f("N", 32))
def swish_in_place(x):
    y = x.clone()
    return y.mul_(y.sigmoid())


@peer(f("N", 32), f())
def swish_beta(x, beta):
    return x * torch.sigmoid(beta * x)


@peer(f("N", 32))
def hard_swish(x):
    return x * F.relu6(x + 3) / 6


@peer(f("N", 32))
def hard_sigmoid(x):
    return F.hardtanh(x + 3, 0.0, 6.0) * (1 / 6)


@peer(f("N", 32))
def swiglu(x):
    a, g = x.chunk(2, dim=-1)
    return F.silu(g) * a


@peer(f("N", 32))
def geglu(x):
    a, g = x.split(16, -1)
    return a * F.gelu(g)


@peer(f("N", 32))
def reglu(x):
    return x[..., :16] * x[..., 16:].relu()


@peer(f("N", 32))
def glu_channel_first(x):
    return F.glu(x.view(x.shape[0], 4, 8), dim=1)


@peer(f("N", 8, 4), f(8))
def prelu(x, a):
    return torch.where(x >= 0, x, a[:, None] * x)


@peer(f("N", 8, 4), f(8))
def prelu_library(x, a):
    return F.prelu(x, a)


@peer(f("N", 32))
def leaky_in_max(x):
    return torch.max(x, 0.1 * x)


@peer(f("N", 32))
def selu(x):
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return scale * (torch.clamp(x, min=0) + torch.clamp(alpha * (torch.exp(x) - 1), max=0))


@peer(f("N", 32))
def celu_library(x):
    return F.celu(x, 0.7) + F.elu(x, 1.3)


@peer(f("N", 32), f(32), f(32))
def snake(x, a, b):
    return x + torch.sin(x * a.exp()).pow(2) / (b.exp() + 1e-3)


@peer(f("N", 32))
def sine_layer(x):
    return torch.sin(30 * x / 10)


@peer(f("N", 32))
def gaussian(x):
    return (-0.5 * x**2 / 0.1**1).exp()


@peer(f("N", 32))
def softsign_and_softshrink(x):
    return x / (1 + x.abs()) + F.softshrink(x, 0.4) - F.hardshrink(x, 0.4) + F.tanhshrink(x)


@peer(f("N", 32))
def log_sigmoid_stable(x):
    return torch.clamp(x, max=0) - torch.log1p(torch.exp(-x.abs()))


@peer(f("N", 32))
def softplus_stable(x):
    return torch.maximum(x, torch.zeros_like(x)) + torch.log1p((-x.abs()).exp())


@peer(f("N", 8, 4))
def maxout(x):
    return x.view(x.shape[0], 2, 4, 4).max(2).values


@peer(f("N", 16))
def softmax_temperature(x):
    return F.softmax(x / 0.7, dim=-1)


@peer(f("N", 16))
def softmax_by_hand(x):
    e = torch.exp(x - x.max(dim=1, keepdim=True)[0])
    return e / e.sum(dim=1, keepdim=True)


@peer(f("N", 16))
def softmax_off_by_one(x):
    m = x.amax(-1, keepdim=True).clamp(min=0)
    e = (x - m).exp()
    return e / (e.sum(-1, keepdim=True) + (-m).exp())


@peer(f("N", 16))
def sparsemax(x):
    z, _ = torch.sort(x, dim=-1, descending=True)
    k = torch.arange(1, 17, device=x.device, dtype=x.dtype)
    cum = z.cumsum(-1) - 1
    size = (k * z > cum).sum(-1, keepdim=True)
    tau = cum.gather(-1, size - 1) / size.to(x.dtype)
    return (x - tau).clamp(min=0)


@peer(f("N", 16))
def straight_through(x):
    hard = (x > 0).to(x.dtype)
    soft = torch.sigmoid(x)
    return hard - soft.detach() + soft


@peer(f("N", 4, 8))
def concatenated_relu(x):
    return torch.cat([x.relu(), (-x).relu()], dim=1)


@peer(f("N", 8), f(8, 8), f(8))
def squeeze_excite_gate(x, w, b):
    s = x.mean(0, keepdim=True)
    return x * (s @ w + b).sigmoid()


@peer(f("N", 16), f(16), f(16), f(16))
def dynamic_tanh(x, a, w, b):
    return torch.tanh(a * x) * w + b


@peer(f("N", 24))
def gated_three(x):
    i, g, o = x.unbind(-1) if x.shape[-1] == 3 else x.tensor_split(3, dim=-1)
    return o.sigmoid() * torch.tanh(i.sigmoid() * g.tanh())


@peer(f("N", 32))
def xielu(x):
    below = torch.expm1(torch.minimum(x, torch.tensor(-1e-3, dtype=x.dtype))) - x
    return torch.where(x > 0, 0.8 * x * x + 0.5 * x, below * 0.8 + 0.5 * x)


@peer(f("N", 32))
def stable_tanh_atan(x):
    return torch.atan2(x, 1 + x * x) + torch.asinh(x) * torch.rsqrt(1 + x.square())
