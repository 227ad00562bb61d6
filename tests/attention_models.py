"""Attention as public models write it; `tests.attention_spellings` has the plain spellings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.attention_spellings import Function, Spelling, biases, padding

MODELS: list[Spelling] = []


def model(*makers, **fields):
    """Register a function as a row; the makers make its arguments after queries, keys and values."""
    if makers:
        fields["others"] = lambda *sizes: tuple(t for make in makers for t in make(*sizes))

    def register(fn: Function) -> Function:
        MODELS.append(Spelling(fn, **fields))
        return fn

    return register


def keep_some(b, h, t, device):
    """Which keys each query sees: some see none."""
    seen = torch.rand(b, 1, t, t, device=device) < 0.7
    seen[0, :, t // 2] = False
    return (seen,)


def numbers_of_keys(b, h, t, device):
    """Zero, or a huge number, for each key of a sentence."""
    keep = padding(b, h, t, device)[0][:, None, None, :]
    return (torch.where(keep, 0.0, -3.4028234663852886e38),)


def unseen(b, h, t, device):
    """Which keys each query does not see."""
    return (~keep_some(b, h, t, device)[0],)


def infinities(b, h, t, device):
    """Zero, or minus infinity, for each query and key."""
    return (torch.zeros(t, t, device=device).masked_fill_(torch.rand(t, t, device=device) < 0.3, -math.inf),)


def of_sizes(*sizes):
    """A maker of random numbers; sizes by letters, n for all heads."""
    names = lambda b, h, t: {"b": b, "h": h, "t": t, "n": b * h, "s": t // 2}  # noqa: E731
    return lambda b, h, t, device: (torch.randn([names(b, h, t).get(s, s) for s in sizes], device=device),)


@model()
def gpt_j(q, k, v):
    t = q.shape[-2]
    causal = torch.tril(torch.ones((t, t), dtype=torch.bool, device=q.device)).view(1, 1, t, t)
    w = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2))
    w = torch.where(causal, w, torch.tensor(torch.finfo(w.dtype).min, dtype=w.dtype))
    w = w / torch.sqrt(torch.tensor(q.shape[-1], dtype=torch.float32)).to(w.dtype)
    return torch.matmul(F.dropout(F.softmax(w, dim=-1).to(v.dtype), 0.0), v)


@model()
def gpt_neo_local(q, k, v):
    t = q.shape[-2]
    bias = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
    bias = torch.bitwise_xor(bias, torch.tril(bias, -4)).view(1, 1, t, t)
    w = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2))
    w = torch.where(bias, w, torch.tensor(torch.finfo(w.dtype).min, dtype=w.dtype, device=w.device))
    return torch.matmul(F.softmax(w, dim=-1).to(v.dtype), v)


@model(of_sizes("n", 1, "t"), numbers_of_keys)
def bloom(q, k, v, alibi, mask):
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))
    s = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=d**-0.5).view(b, h, t, -1)
    p = F.softmax(s + mask.clamp(min=torch.finfo(q.dtype).min), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(p.view(b * h, t, -1), v).view(b, h, t, d)


@model(of_sizes("b", "h", 1, "t"), numbers_of_keys)
def falcon_alibi(q, k, v, alibi, mask):
    s = q @ k.transpose(-1, -2)
    p = F.softmax((s + alibi) * (1.0 / math.sqrt(q.shape[-1])) + mask, dim=-1, dtype=q.dtype)
    return (p @ v).flatten(2).view(q.shape)


@model(biases, unseen)
def mpt(q, k, v, bias, gone):
    s = torch.matmul(q, k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1])) + bias
    s = s.masked_fill(gone, torch.finfo(q.dtype).min)
    return torch.matmul(F.softmax(s.float(), dim=-1).to(v.dtype), v)


@model(of_sizes(1, "h", "t", "t"), numbers_of_keys)
def t5(q, k, v, bias, mask):
    s = torch.matmul(q, k.transpose(3, 2))
    s += bias + mask.to(bias.dtype)
    p = F.softmax(s.float(), dim=-1).type_as(s)
    return torch.matmul(F.dropout(p, p=0.1, training=False), v)


@model(biases)
def swin_bias(q, k, v, bias):
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return F.softmax(s + bias.unsqueeze(0), -1) @ v


@model(biases, keep_some)
def swin_shifted(q, k, v, bias, keep):
    b, h, t, d = q.shape
    mask = torch.zeros(b, t, t, dtype=q.dtype).masked_fill(~keep[:, 0], -100.0)
    s = (q * d**-0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
    s = s.view(b // b, b, h, t, t) + mask.unsqueeze(1).unsqueeze(0)
    return F.softmax(s.view(-1, h, t, t), dim=-1) @ v


@model()
def swin_v2(q, k, v):
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return F.softmax(s * 10.0, -1) @ v


@model()
def cvt(q, k, v):
    s = torch.einsum("bhlk,bhtk->bhlt", [q, k]) * 0.3
    return torch.einsum("bhlt,bhtv->bhlv", [F.dropout(F.softmax(s, dim=-1), 0.0), v])


@model(biases, layout="bhdt")
def levit(q, k, v, bias):
    s = q.transpose(-2, -1) @ k * 0.25 + bias
    return (v @ s.softmax(dim=-1).transpose(-2, -1)).transpose(-2, -1)


@model(biases, layout="bhdt")
def levit_keys_last(q, k, v, bias):
    s = q.transpose(-2, -1) @ k * 0.25 + bias
    return s.softmax(dim=-1) @ v.transpose(-2, -1)


@model()
def visformer(q, k, v):
    s = (q * 0.5) @ k.transpose(-2, -1)
    x = s.softmax(dim=-1) @ v
    return x.permute(0, 1, 3, 2).reshape(q.shape[0], -1, 2, q.shape[2] // 2)


@model(of_sizes("b", "h", "t", "t"), unseen, layout="tbhd")
def xlnet(q, k, v, bd, gone):
    s = (torch.einsum("ibnd,jbnd->bnij", q + 0.5, k) + bd) * q.shape[-1] ** -0.5
    s = s - (65500 if s.dtype == torch.float16 else 1e30) * gone.to(s.dtype)
    return torch.einsum("bnij,jbnd->ibnd", F.softmax(s, dim=3), v)


@model(of_sizes("n", "t", "t"), lambda b, h, t, device: (keep_some(b * h, h, t, device)[0][:, 0],), layout="ntd")
def deberta(q, k, v, relative, keep):
    s = torch.bmm(q, k.transpose(-1, -2) / torch.sqrt(torch.tensor(q.size(-1) * 2, dtype=torch.float)).to(q.dtype))
    s = (s + relative).masked_fill(~keep, torch.finfo(q.dtype).min)
    return torch.bmm(s.softmax(-1), v)


@model(of_sizes("b", "h", "t", "t"))
def halonet(q, k, v, bias):
    s = (q @ k.transpose(-1, -2)) * 0.25 + bias
    return s.softmax(dim=-1) @ v


@model(of_sizes("b", "h", "t", 2, 1), of_sizes("b", "h", "t", 1, "s"))
def sam_relative(q, k, v, of_rows, of_columns):
    b, h, t, d = q.shape
    s = (q * d**-0.5) @ k.transpose(-2, -1)
    s = (s.view(b, h, t, 2, t // 2) + of_rows + of_columns).view(b, h, t, t)
    return F.softmax(s, dtype=torch.float32, dim=-1).to(q.dtype) @ v


@model()
def esm_rotary(q, k, v):
    t, d = q.shape[-2:]
    angle = torch.arange(t, device=q.device)[:, None] * 0.1 ** torch.arange(d // 2, device=q.device)
    angle = torch.cat([angle, angle], -1)
    cos, sin = angle.cos()[None, None].to(q.dtype), angle.sin()[None, None].to(q.dtype)

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    q = q * d**-0.5
    return F.softmax(turned(q) @ turned(k).transpose(-1, -2), -1) @ v


@model(numbers_of_keys, groups=2)
def llama(q, k, v, mask):
    n = q.shape[1] // k.shape[1]
    b, g, t, d = k.shape
    k = k[:, :, None, :, :].expand(b, g, n, t, d).reshape(b, g * n, t, d)
    v = v[:, :, None, :, :].expand(b, g, n, t, d).reshape(b, g * n, t, d)
    w = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask[:, :, :, :t].clamp(min=torch.finfo(q.dtype).min)
    w = F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.matmul(F.dropout(w, p=0.0, training=True), v)
    return out.transpose(1, 2).contiguous()


@model(groups=2)
def gemma_capped(q, k, v):
    n = q.shape[1] // k.shape[1]
    w = torch.matmul(q, k.repeat_interleave(n, 1).transpose(2, 3)) * 0.3
    w = torch.tanh(w / 5.0) * 5.0
    return torch.matmul(F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype), v.repeat_interleave(n, 1))


@model()
def grouped_by_einsum(q, k, v):
    b, h, t, d = q.shape
    k, v = k[:, ::2], v[:, ::2]
    q = q.view(b, h // 2, 2, t, d)
    s = torch.einsum("bgnqd,bgkd->bgnqk", q, k) * 0.25
    return torch.einsum("bgnqk,bgkd->bgnqd", s.softmax(-1), v).flatten(1, 2)


@model()
def one_key_head_by_einsum(q, k, v):
    s = torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]) * 0.25
    return torch.einsum("bhqk,bkd->bhqd", s.softmax(-1), v[:, 0])


@model(keep_some)
def whisper_bool(q, k, v, keep):
    s = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3))
    return torch.matmul(F.softmax(s.masked_fill(keep.logical_not(), -math.inf), dim=-1), v)


@model(keep_some)
def where_of_infinity(q, k, v, keep):
    s = torch.where(keep, (q / 4) @ k.transpose(-1, -2), torch.full((), -torch.inf, dtype=q.dtype))
    return torch.nan_to_num(F.softmax(s, -1)) @ v


@model(keep_some)
def where_filled(q, k, v, keep):
    s = torch.where(~keep, -1e9 if q.dtype != torch.float16 else -1e4, (q @ k.mT) / 4)
    return F.softmax(s, -1) @ v


@model(keep_some)
def filled_in_place(q, k, v, keep):
    s = q @ k.transpose(-1, -2)
    s *= 0.25
    s.masked_fill_(~keep, float("-inf"))
    return s.softmax(-1) @ v


@model(infinities)
def added_infinity(q, k, v, mask):
    n = q.shape[0] * q.shape[1]
    s = torch.baddbmm(mask.expand(n, -1, -1), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.25)
    return torch.softmax(s, -1).view(*q.shape[:2], *mask.shape) @ v


@model(layout="bthd")
def perceiver(q, k, v):
    q = q[:, ::2]
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    w = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1]), -1)
    return torch.matmul(w, v).permute(0, 2, 1, 3).flatten(2)


@model(layout="bhdt")
def xcit(q, k, v):
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return ((q @ k.transpose(-2, -1)) * 1.5).softmax(-1) @ v


@model()
def talking_heads(q, k, v):
    h = q.shape[1]
    mix = (torch.arange(h * h, device=q.device).view(h, h) % 3).to(q.dtype)
    s = torch.einsum("bhqk,hg->bgqk", (q * 0.25) @ k.mT, mix)
    return torch.einsum("bhqk,hg->bgqk", s.softmax(-1), mix) @ v


@model()
def weights_returned(q, k, v):
    w = torch.softmax((q * 0.25) @ k.transpose(-2, -1), -1)
    return (w @ v) + w.mean(-1, keepdim=True)


@model()
def softmax_of_keys(q, k, v):
    return torch.softmax((q @ k.mT) * 0.25, -2) @ v


@model()
def max_subtracted(q, k, v):
    s = (q * 0.25) @ k.mT
    s = s - s.amax(-1, keepdim=True).detach()
    return torch.softmax(s, -1) @ v


@model()
def negative_scale(q, k, v):
    return torch.softmax((q @ k.mT) * -0.25, -1) @ v


@model()
def values_scaled(q, k, v):
    return torch.softmax((q @ k.mT) * 0.25, -1) @ (v * 0.5)


@model(layout="ntd")
def values_by_einsum(q, k, v):
    w = torch.softmax(torch.einsum("nqd,nkd->nqk", q, k) * 0.25, dim=2)
    return torch.einsum("nqk,nkd->nqd", w, v)


@model(layout="bthd")
def einsum_to_tokens_first(q, k, v):
    s = torch.einsum("bqhd,bkhd->hbqk", q, k) * 0.25
    return torch.einsum("hbqk,bkhd->qbhd", s.softmax(-1), v)


@model()
def dropout_p0(q, k, v):
    return F.dropout(F.softmax((q @ k.mT) * 0.25, -1), p=0.0, training=True) @ v
