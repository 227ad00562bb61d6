"""Recurrent cells, state-space models, scans, and mixers."""

import torch
import torch.nn.functional as F

from tests.peers.spec import f, peer, u


@peer(f("N", 8), f("N", 8), f("N", 8), f(32, 8), f(32, 8), f(32))
def lstm_cell(x, h, c, w, u, b):
    g = x @ w.t() + h @ u.t() + b
    i, fg, o, n = g.chunk(4, 1)
    c = torch.sigmoid(fg) * c + torch.sigmoid(i) * torch.tanh(n)
    return torch.sigmoid(o) * torch.tanh(c), c


@peer(f("N", 8), f("N", 8), f(24, 8), f(24, 8), f(24), f(24))
def gru_cell(x, h, w, u, a, b):
    gx, gh = F.linear(x, w, a), F.linear(h, u, b)
    rx, zx, nx = gx.chunk(3, -1)
    rh, zh, nh = gh.chunk(3, -1)
    r, z = (rx + rh).sigmoid(), (zx + zh).sigmoid()
    n = (nx + r * nh).tanh()
    return n + z * (h - n)


@peer(f("N", 5, 8), f(8, 8), f(8, 8))
def rnn_loop(x, w, u):
    h = x.new_zeros(x.shape[0], 8)
    out = []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w + h @ u)
        out.append(h)
    return torch.stack(out, 1)


@peer(f("N", 6, 8), f("N", 6, 8))
def gated_scan(x, g):
    a = g.sigmoid()
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(6):
        h = a[:, t] * h + (1 - a[:, t]) * x[:, t]
        out.append(h)
    return torch.stack(out, dim=1)


@peer(f("N", 6, 4), f("N", 6, 4), f(4, 3), f("N", 6, 3), f("N", 6, 3))
def selective_scan(x, dt, a, b, c):
    dt = F.softplus(dt)
    decay = torch.exp(dt[..., None] * -a.exp())
    inp = dt[..., None] * b[:, :, None] * x[..., None]
    h, ys = torch.zeros_like(inp[:, 0]), []
    for t in range(6):
        h = decay[:, t] * h + inp[:, t]
        ys.append((h * c[:, t, None]).sum(-1))
    return torch.stack(ys, 1) + x


@peer(u("N", 8, grad=True), f("N", 8))
def scan_by_cumsum(a, x):
    la = torch.log(a * 0.5 + 0.4).cumsum(-1)
    return torch.exp(la) * torch.cumsum(x * torch.exp(-la), -1)


@peer(u("N", 8), f("N", 8))
def scan_by_doubling(a, x):
    for k in (1, 2, 4):
        pa, px = F.pad(a[:, :-k], (k, 0), value=1.0), F.pad(x[:, :-k], (k, 0))
        a, x = a * pa, x + a * px
    return x


@peer(f("N", 6, 4), f("N", 6, 4), f("N", 6, 4), f(4), f(4))
def wkv(r, k, v, w, u):
    num = den = torch.zeros_like(k[:, 0])
    out = []
    for t in range(6):
        e = torch.exp(u + k[:, t].clamp(max=3))
        out.append((num + e * v[:, t]) / (den + e) * r[:, t].sigmoid())
        d = torch.exp(-w.exp())
        num = d * num + torch.exp(k[:, t].clamp(max=3)) * v[:, t]
        den = d * den + torch.exp(k[:, t].clamp(max=3))
    return torch.stack(out, 1)


@peer(f("N", 6, 4))
def token_shift(x):
    prev = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return x + (prev - x) * 0.3


@peer(f("N", 6, 4))
def token_shift_pad(x):
    return x * 0.4 + F.pad(x, (0, 0, 1, -1)) * 0.6


@peer(f("N", 6, 8), f(8, 4), f(8))
def causal_depthwise(x, w, b):
    y = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), w.unsqueeze(1), b, groups=8)
    return F.silu(y).transpose(1, 2)


@peer(f("N", 6, 8), f(8, 4))
def causal_by_shifts(x, w):
    y = torch.zeros_like(x)
    for k in range(4):
        y = y + F.pad(x, (0, 0, k, 0))[:, :6] * w[:, 3 - k]
    return y


@peer(f("N", 6), f("N", 6))
def interleave(p, u):
    y = torch.stack([p, u], -1).reshape(p.shape[0], -1)
    return torch.stack([torch.cat([p[:, :1], y[:, :-1] * 2], 1), y], 1)


@peer(f(8), f(8))
def odd_even_scan(p, u):
    y = torch.stack([p, u.reshape(-1)], 1).reshape(-1)
    return torch.stack([torch.cat([p[:1], y[:-1] * 2]), y])


@peer(f("N", 8))
def odd_and_even(x):
    even, odd = x[:, 0::2], x[:, 1::2]
    s = even + odd
    out = torch.empty_like(x)
    out[:, 0::2] = s
    out[:, 1::2] = odd - even
    return out


@peer(f("N", 6, 4), f("N", 6, 4), f("N", 6, 4))
def retention(q, k, v):
    t = torch.arange(6, dtype=q.dtype)
    d = torch.where(t[:, None] >= t, 0.9 ** (t[:, None] - t).clamp(min=0), torch.zeros((), dtype=q.dtype))
    return (q @ k.transpose(1, 2) * d) @ v


@peer(f("N", 6, 4), f("N", 6, 4), f("N", 6, 4))
def delta_rule(q, k, v):
    k = F.normalize(k, dim=-1)
    s, out = torch.zeros(q.shape[0], 4, 4, dtype=q.dtype), []
    for t in range(6):
        err = v[:, t] - torch.einsum("nij,nj->ni", s, k[:, t])
        s = s + 0.5 * err[:, :, None] * k[:, t][:, None]
        out.append(torch.einsum("nij,nj->ni", s, q[:, t]))
    return torch.stack(out, 1)


@peer(f("N", 6, 6))
def segment_sums(x):
    y = x.cumsum(-1)
    d = y[..., :, None] - y[..., None, :]
    mask = torch.tril(torch.ones(6, 6, dtype=torch.bool), diagonal=0)
    return d.masked_fill(~mask, -float("inf")).exp().sum(-1)


@peer(f("N", 6, 8), f(6, 6), f(8, 8))
def mlp_mixer(x, w, v):
    x = x + F.gelu(F.layer_norm(x, (8,)).transpose(1, 2) @ w).transpose(1, 2)
    return x + F.gelu(F.layer_norm(x, (8,)) @ v)


@peer(f("N", 8), f(8, 8), f(8), f(8))
def highway(x, w, b, t):
    gate = torch.sigmoid(x * t + b)
    return gate * F.relu(x @ w) + (1 - gate) * x


@peer(f("N", 8), f(8), f(8))
def cross_network(x, w, b):
    x0 = x
    for _ in range(3):
        x = x0 * (x @ w)[:, None] + b + x
    return x


@peer(f("N", 5, 4))
def factorization_machine(x):
    return 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1)).sum(-1, keepdim=True)


@peer(f("N", 6))
def running_extremes(x):
    return x.cummax(-1).values - x.cummin(-1).values, x.logcumsumexp(-1)


@peer(f("N", 6), grad=False)
def discounted_returns(r):
    g, out = torch.zeros_like(r[:, 0]), []
    for t in reversed(range(6)):
        g = r[:, t] + 0.99 * g
        out.insert(0, g)
    return torch.stack(out, 1)


@peer(f("N", 6, grad=False), f("N", 7, grad=False), grad=False)
def generalized_advantage(r, v):
    delta = r + 0.99 * v[:, 1:] - v[:, :-1]
    out = torch.zeros_like(r)
    last = torch.zeros_like(r[:, 0])
    for t in range(5, -1, -1):
        last = delta[:, t] + 0.95 * 0.99 * last
        out[:, t] = last
    return out, (out - out.mean()) / (out.std() + 1e-3)
