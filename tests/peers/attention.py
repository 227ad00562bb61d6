"""Attention in the spellings of public models, and what surrounds it."""

import math

import torch
import torch.nn.functional as F

from tests.peers.spec import b, f, i, peer, u

QKV = (f("N", 2, 7, 8), f("N", 2, 7, 8), f("N", 2, 7, 8))


@peer(*QKV)
def library(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@peer(*QKV)
def library_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@peer(*QKV)
def by_hand(q, k, v):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return F.softmax(s, dim=-1) @ v


@peer(*QKV)
def by_einsum(q, k, v):
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1), v)


@peer(*QKV)
def causal_by_tril(q, k, v):
    t = q.size(-2)
    mask = torch.tril(torch.ones(t, t, device=q.device)).view(1, 1, t, t)
    s = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    s = s.masked_fill(mask[:, :, :t, :t] == 0, float("-inf"))
    return F.softmax(s, -1) @ v


@peer(*QKV)
def causal_by_triu(q, k, v):
    t = q.shape[-2]
    mask = torch.full((t, t), float("-inf"), dtype=q.dtype).triu(1)
    return torch.softmax(torch.matmul(q, k.mT) / 8**0.5 + mask, -1) @ v


@peer(*QKV)
def upcast_softmax(q, k, v):
    w = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5
    w = F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(w, v).transpose(1, 2).contiguous()


@peer(*QKV)
def scaled_both(q, k, v):
    s = 8**-0.25
    return ((q * s) @ (k * s).transpose(-1, -2)).softmax(-1) @ v


@peer(*QKV, b("N", 7))
def key_padding(q, k, v, keep):
    keep = keep | (torch.arange(7) == 0)
    s = q @ k.transpose(-1, -2) / 8**0.5
    s = s.masked_fill(~keep[:, None, None, :], torch.finfo(s.dtype).min)
    return s.softmax(-1) @ v


@peer(*QKV, b("N", 7))
def additive_padding(q, k, v, keep):
    mask = (1.0 - keep[:, None, None, :].to(q.dtype)) * -10000.0
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8) + mask, dim=-1) @ v


@peer(*QKV, b(7, 7))
def bool_mask_library(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask | torch.eye(7, dtype=torch.bool))


@peer(*QKV, f(2, 7, 7))
def bias_library(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@peer(*QKV)
def alibi(q, k, v):
    slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)
    pos = torch.arange(7, device=q.device)
    bias = -(pos[:, None] - pos[None]).abs().to(q.dtype) * slopes[:, None, None]
    return (q @ k.transpose(-1, -2) * 0.35 + bias).softmax(-1) @ v


@peer(*QKV, f(13, 2))
def relative_bias(q, k, v, table):
    pos = torch.arange(7)
    index = pos[:, None] - pos[None, :] + 6
    bias = table[index].permute(2, 0, 1)
    return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


@peer(*QKV)
def sliding_window(q, k, v):
    pos = torch.arange(q.shape[-2])
    d = pos[:, None] - pos[None, :]
    mask = (d >= 0) & (d < 3)
    s = torch.where(mask, q @ k.transpose(-1, -2) / 8**0.5, torch.tensor(float("-inf"), dtype=q.dtype))
    return s.softmax(-1) @ v


@peer(f("N", 4, 7, 8), f("N", 2, 7, 8), f("N", 2, 7, 8))
def grouped_query(q, k, v):
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, v)


@peer(f("N", 4, 7, 8), f("N", 2, 7, 8), f("N", 2, 7, 8))
def grouped_query_expand(q, k, v):
    n, h, t, d = k.shape
    k = k[:, :, None].expand(n, h, 2, t, d).reshape(n, h * 2, t, d)
    v = v[:, :, None].expand(n, h, 2, t, d).reshape(n, h * 2, t, d)
    return torch.softmax(q @ k.transpose(2, 3) * d**-0.5, -1) @ v


@peer(f("N", 4, 7, 8), f("N", 7, 8), f("N", 7, 8))
def multi_query(q, k, v):
    s = torch.einsum("bhqd,bkd->bhqk", q, k)
    return torch.einsum("bhqk,bkd->bhqd", (s / 8**0.5).softmax(-1), v)


@peer(*QKV)
def linear_attention(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    kv = k.transpose(-1, -2) @ v
    z = 1 / (q @ k.sum(-2).unsqueeze(-1) + 1e-3)
    return q @ kv * z


@peer(*QKV)
def soft_capped(q, k, v):
    s = torch.tanh(q @ k.transpose(-1, -2) / 5.0) * 5.0
    return s.softmax(-1) @ v


@peer(*QKV, f(2))
def sinks(q, k, v, sink):
    s = q @ k.transpose(-1, -2) / 8**0.5
    s = torch.cat([s, sink.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


@peer(f("N", 7, 16), f(48, 16), f(48), f(16, 16))
def packed_projection(x, w, bias, o):
    n, t, c = x.shape
    q, k, v = F.linear(x, w, bias).split(c, dim=2)
    q, k, v = (y.view(n, t, 2, c // 2).transpose(1, 2) for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).contiguous().view(n, t, c) @ o.t()


@peer(f("N", 7, 16), f(48, 16), f(48))
def packed_by_reshape(x, w, bias):
    n, t, c = x.shape
    qkv = F.linear(x, w, bias).reshape(n, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    return ((q * 8**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v


@peer(f("N", 2, 7, 8), f(7, 4, grad=False))
def rope_half(x, angle):
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    a, c = x[..., :4], x[..., 4:]
    return x * cos + torch.cat((-c, a), -1) * sin


@peer(f("N", 2, 7, 8), f(7, 4, grad=False))
def rope_interleaved(x, angle):
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@peer(f("N", 2, 7, 8), f(7, 4, grad=False), halves=False)
def rope_complex(x, angle):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turn = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(z * turn).flatten(3)


@peer(f("N", 2, 7, 8), f(7, 4, grad=False))
def rope_unbind(x, angle):
    a, c = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * angle.cos() - c * angle.sin(), c * angle.cos() + a * angle.sin()], -1).reshape(x.shape)


@peer(f("N", 2, 9, 8), f("N", 2, 9, 8), f("N", 2, 1, 8), f("N", 2, 1, 8), i(9))
def cache_update(ck, cv, k, v, at):
    ck, cv = ck.clone(), cv.clone()
    ck[:, :, at] = k[:, :, 0]
    cv.index_copy_(2, at.view(1), v)
    return ck, cv


@peer(f("N", 2, 1, 8), f("N", 2, 9, 8), f("N", 2, 9, 8), i(9, "N"))
def decode_one(q, k, v, lengths):
    mask = torch.arange(9)[None, :] <= lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])


@peer(f("N", 6, 6, 8))
def windows(x):
    n, h, w, c = x.shape
    y = torch.roll(x, shifts=(-1, -1), dims=(1, 2))
    y = y.view(n, h // 3, 3, w // 3, 3, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 9, c)
    y = (y @ y.transpose(1, 2) * c**-0.5).softmax(-1) @ y
    y = y.view(n, h // 3, w // 3, 3, 3, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(n, h, w, c)
    return torch.roll(y, shifts=(1, 1), dims=(1, 2))


@peer(f("N", 5, 8), f("N", 7, 8), f("N", 7, 8))
def cross_by_bmm(q, k, v):
    w = torch.bmm(q, k.transpose(1, 2)).div_(8**0.5).softmax(2)
    return torch.bmm(w, v), w.mean(1)


@peer(f("N", 7, 8), f("N", 7, 8), f(8))
def additive_attention(q, k, w):
    s = torch.tanh(q[:, :, None] + k[:, None]) @ w
    return s.softmax(-1) @ k


@peer(f("N", 7, 8), f(8))
def attention_pooling(x, w):
    a = (x @ w).softmax(1)
    return (a.unsqueeze(-1) * x).sum(1)


@peer(f("N", 7, 8))
def sinusoidal_positions(x):
    pos = torch.arange(x.size(1), dtype=torch.float32).unsqueeze(1)
    div = torch.exp(torch.arange(0, 8, 2).float() * (-math.log(10000.0) / 8))
    pe = torch.zeros(x.size(1), 8)
    pe[:, 0::2] = torch.sin(pos * div)
    pe[:, 1::2] = torch.cos(pos * div)
    return x + pe.to(x.dtype)


@peer(f("N", 8), f(4, 8), f(4, 8, 16), f(4, 16, 8))
def mixture_dense(x, gate, up, down):
    p = (x @ gate.t()).softmax(-1)
    h = F.silu(torch.einsum("nd,edh->neh", x, up))
    return torch.einsum("neh,ehd,ne->nd", h, down, p)


@peer(f("N", 8), f(8, 4), grad=False)
def mixture_router(x, gate):
    p = (x @ gate).softmax(-1, dtype=torch.float32)
    w, at = p.topk(2, dim=-1)
    w = w / w.sum(-1, keepdim=True)
    mask = F.one_hot(at, 4).permute(2, 1, 0)
    load = mask.float().mean((1, 2)) * p.mean(0)
    return w.to(x.dtype), at, load.sum() * 4


@peer(u("N", 7, grad=False), f("N", 2, 7, 8))
def dropped_keys(r, x):
    keep = (r > 0.2).to(x.dtype) / 0.8
    return (x @ x.transpose(-1, -2)).softmax(-1) * keep[:, None, None]
