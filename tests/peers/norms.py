"""Normalisations, by hand and by library."""

import torch
import torch.nn.functional as F

from tests.peers.spec import f, p, peer


@peer(f("N", 16), f(16), f(16))
def layer_norm(x, w, b):
    return F.layer_norm(x, (16,), w, b)


@peer(f("N", 16), f(16), f(16))
def layer_norm_by_hand(x, w, b):
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + 1e-5) * w + b


@peer(f("N", 16), f(16), f(16))
def layer_norm_by_var(x, w, b):
    u = x.mean(-1, True)
    s = (x - u).pow(2).mean(-1, True)
    return w * ((x - u) * torch.rsqrt(s + 1e-6)) + b


@peer(f("N", 16), f(16))
def layer_norm_std(x, w):
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)


@peer(f("N", 16), f(16))
def rms_norm(x, w):
    dtype = x.dtype
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * x.to(dtype)


@peer(f("N", 16), f(16))
def gemma_norm(x, w):
    out = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + w.float())).type_as(x)


@peer(f("N", 16), f(16))
def rms_norm_library(x, w):
    return F.rms_norm(x, (16,), w, 1e-5)


@peer(f("N", 16), f("N", 16), f(16), f(16))
def add_norm(x, r, w, b):
    h = x + r
    return F.layer_norm(h, [16], w, b), h


@peer(f("N", 16), f("N", 16), f(16))
def add_rms_norm_gate(x, z, w):
    x = x * F.silu(z)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w


@peer(f("N", 8, 5, 5), f(8), f(8))
def batch_norm_train(x, w, b):
    return F.batch_norm(x, None, None, w, b, training=True)


@peer(f("N", 8, 5, 5), f(8, grad=False), p(8, grad=False), f(8), f(8))
def batch_norm_eval(x, m, v, w, b):
    return F.relu(F.batch_norm(x, m, v, w, b, training=False))


@peer(f("N", 8, 5, 5), f(8, grad=False), p(8, grad=False), f(8), f(8))
def batch_norm_running(x, m, v, w, b):
    m, v = m.float().clone(), v.float().clone()
    y = F.batch_norm(x.float(), m, v, w.float(), b.float(), training=True, momentum=0.1)
    return y, m, v


@peer(f("N", 8, 5, 5), f(8), f(8))
def frozen_batch_norm(x, w, b):
    return x * w.reshape(1, -1, 1, 1) + b.reshape(1, -1, 1, 1)


@peer(f("N", 8, 5, 5), f(8), f(8))
def group_norm(x, w, b):
    return F.group_norm(x, 4, w, b)


@peer(f("N", 8, 5, 5), f(8), f(8))
def group_norm_by_hand(x, w, b):
    n, c, h, k = x.shape
    y = x.view(n, 4, c // 4, h, k)
    var, mean = torch.var_mean(y, dim=(2, 3, 4), keepdim=True, correction=0)
    y = ((y - mean) * (var + 1e-5).rsqrt()).view(n, c, h, k)
    return y * w[None, :, None, None] + b[None, :, None, None]


@peer(f("N", 8, 5, 5))
def instance_norm(x):
    return F.instance_norm(x)


@peer(f("N", 8, 5, 5), f("N", 8, 3, 3))
def adain(x, style):
    mx, sx = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True).add(1e-3).sqrt()
    ms, ss = style.mean((2, 3), keepdim=True), style.var((2, 3), keepdim=True).add(1e-3).sqrt()
    return (x - mx) / sx * ss + ms


@peer(f("N", 8, 5, 5), f(8), f(8))
def channels_first_layer_norm(x, w, b):
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-6)
    return w[:, None, None] * x + b[:, None, None]


@peer(f("N", 8, 5, 5), f(8), f(8))
def permuted_layer_norm(x, w, b):
    return F.layer_norm(x.permute(0, 2, 3, 1), (8,), w, b).permute(0, 3, 1, 2)


@peer(f("N", 5, 5, 8), f(8), f(8))
def global_response_norm(x, g, b):
    gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
    nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
    return g * (x * nx) + b + x


@peer(f("N", 8, 5, 5))
def local_response_norm(x):
    return F.local_response_norm(x, 3)


@peer(f("N", 8, 5, 5))
def pixel_norm(x):
    return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-4)


@peer(f(12, 16), f(12, 1))
def weight_norm(v, g):
    return g * v / v.norm(dim=1, keepdim=True)


@peer(f(12, 16), f(16, grad=False))
def spectral_norm_step(w, v):
    u = F.normalize(w.detach() @ v, dim=0, eps=1e-4)
    v = F.normalize(w.detach().t() @ u, dim=0, eps=1e-4)
    return w / torch.dot(u, w @ v)


@peer(f(8, 4, 3, 3))
def weight_standardization(w):
    m = w.mean(dim=[1, 2, 3], keepdim=True)
    s = w.std(dim=[1, 2, 3], keepdim=True, unbiased=False)
    return (w - m) / (s + 1e-3)


@peer(f("N", 7, 16), f("N", 16), f("N", 16))
def modulated_norm(x, shift, scale):
    return F.layer_norm(x, (16,)) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@peer(f("N", 4, 16), f(16), f(16))
def query_key_norm(x, a, b):
    q = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * a
    k = F.normalize(x, dim=-1) * b
    return q @ k.transpose(-1, -2)


@peer(f("N", 16))
def scale_norm_in_two_dtypes(x):
    y = x.to(torch.float32)
    n = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return (y / n.clamp(min=1e-3) * 4.0).to(x.dtype)


@peer(f("N", 16))
def standardize_then_clip(x):
    z = (x - x.mean()) / (x.std() + 1e-3)
    return z.clamp(-2, 2)
