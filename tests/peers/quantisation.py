"""Quantisation and low precision, emulated and real."""

import torch
import torch.nn.functional as F

from tests.peers.spec import b, f, i, p, peer


@peer(f("N", 16), grad=False)
def symmetric_int8(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    q = torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)
    return q, q.to(x.dtype) * scale


@peer(f("N", 16), grad=False)
def affine_uint8(x):
    lo, hi = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (hi - lo) / 255
    zero = (-lo / scale).round().clamp(0, 255)
    q = ((x / scale).round() + zero).clamp(0, 255).to(torch.uint8)
    return q, (q.to(x.dtype) - zero) * scale


@peer(f("N", 16))
def fake_quant_ste(x):
    s = x.detach().abs().max() / 7
    q = (x / s).round().clamp(-8, 7) * s
    return x + (q - x).detach()


@peer(f("N", 16), p(1))
def learned_step(x, s):
    s = s.abs() + 0.1
    y = x / s
    bar = y.clamp(-8, 7)
    return ((bar.round() - bar).detach() + bar) * s


@peer(i(16, "N", 16), p("N", 2, grad=False), grad=False)
def unpack_int4(x, scale):
    packed = (x[:, ::2] | (x[:, 1::2] << 4)).to(torch.uint8)
    low, high = packed & 0xF, packed >> 4
    y = torch.stack([low, high], -1).flatten(1).to(torch.int8) - 8
    return (y.view(-1, 2, 8) * scale[..., None]).flatten(1)


@peer(i(2, "N", 16), grad=False, halves=False)
def pack_bits(x):
    weights = 2 ** torch.arange(8)
    byte = (x.view(-1, 2, 8) * weights).sum(-1).to(torch.uint8)
    back = (byte[..., None].long() >> torch.arange(8)) & 1
    return byte, back.flatten(1) == x


@peer(f("N", 32), grad=False)
def block_scaled(x):
    y = x.view(-1, 4, 8)
    e = torch.floor(torch.log2(y.abs().amax(-1, keepdim=True).clamp(min=1e-3)))
    s = torch.exp2(e - 2)
    return ((y / s).round().clamp(-7, 7) * s).view_as(x)


@peer(f("N", 16), f(8, 16), grad=False)
def int8_product(x, w):
    sx, sw = x.abs().amax(1, True) / 127, w.abs().amax(1, True) / 127
    qx, qw = (x / sx).round().to(torch.int32), (w / sw).round().to(torch.int32)
    return (qx[:, None] * qw[None]).sum(-1) * sx * sw.t()


@peer(f("N", 16))
def ternary(w):
    scale = w.abs().mean().clamp(min=1e-3)
    q = (w / scale).round().clamp(-1, 1) * scale
    return w + (q - w).detach()


@peer(f("N", 16))
def binary(w):
    alpha = w.abs().mean(1, keepdim=True)
    s = torch.sign(w)
    s = s + (w.clamp(-1, 1) - w.clamp(-1, 1).detach())
    return s * alpha


@peer(f("N", 16), grad=False)
def through_bfloat16(x):
    y = x.to(torch.bfloat16)
    return (y * 3).to(x.dtype) + (x - y.to(x.dtype))


@peer(f("N", 16), grad=False)
def split_float(x):
    x = x.float()
    hi = x.to(torch.bfloat16).float()
    return hi, (x - hi).to(torch.bfloat16)


@peer(f("N", 16), grad=False, halves=False)
def exponent_bits(x):
    bits = x.view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127, (bits & 0x7FFFFF), (bits < 0)


@peer(f("N", 16), grad=False, halves=False)
def stochastic_bits(x):
    noise = (torch.arange(16, dtype=torch.int32) * 40503) & 0xFFFF
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32)


@peer(f("N", 16), grad=False)
def histogram_codes(x):
    edges = torch.tensor([-1.0, -0.3, 0.3, 1.0], dtype=x.dtype)
    c = torch.bucketize(x, edges)
    return c, edges[c.clamp(max=3)]


@peer(f("N", 16), f(5, 4))
def vector_quantise(x, book):
    z = x.reshape(-1, 4)
    d = z.pow(2).sum(1, keepdim=True) + book.pow(2).sum(1) - 2 * z @ book.t()
    at = d.argmin(1)
    q = F.embedding(at, book).view_as(x)
    return x + (q - x).detach(), F.mse_loss(q, x.detach())


@peer(f("N", 8))
def finite_scalar(x):
    z = torch.tanh(x) * 3
    return z + (z.round() - z).detach()


@peer(f("N", 8), f("N", 8))
def gumbel_free_choice(x, y):
    soft = ((x + y) / 0.5).softmax(-1)
    at = soft.max(-1, keepdim=True)[1]
    hard = torch.zeros_like(soft).scatter_(-1, at, 1.0)
    return hard - soft.detach() + soft


@peer(f("N", 16), b("N", 16))
def mixed_autocast(x, m):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.float() @ x.float().t()
        z = y.softmax(-1)
    return z.to(x.dtype) + m.to(x.dtype).sum()


@peer(f("N", 16), grad=False)
def saturating_casts(x):
    y = x * 50
    return y.clamp(-128, 127).to(torch.int8), y.abs().clamp(max=255).to(torch.uint8), y.to(torch.int16), y.trunc()


@peer(f("N", 16), grad=False)
def double_rounding(x):
    y = (x * 1.7).half()
    return y.float() == y.half().float(), y * 2, (y + 1).to(x.dtype)
