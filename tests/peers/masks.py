"""Masks, ragged batches, bucketing, and segments."""

import torch
import torch.nn.functional as F

from tests.peers.spec import b, f, i, p, peer, u


@peer(f("N", 7, 4), i(7, "N"))
def masked_mean(x, n):
    mask = torch.arange(7)[None] <= n[:, None]
    return (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


@peer(f("N", 7, 4), i(7, "N"))
def masked_max(x, n):
    mask = torch.arange(7) > n[:, None]
    return x.masked_fill(mask[..., None], float("-inf")).max(1)[0]


@peer(f("N", 7), b("N", 7))
def masked_softmax(x, m):
    y = x.masked_fill(~m, -1e4).softmax(-1)
    return y * m


@peer(f("N", 7, 4), i(7, "N"))
def last_token(x, n):
    return x[torch.arange(x.size(0)), n]


@peer(f("N", 7, 4), b("N", 7), f(4))
def mask_tokens(x, m, token):
    w = m.unsqueeze(-1).type_as(x)
    return x * (1 - w) + token * w


@peer(f("N", 7, 4), b("N", 7))
def zero_where(x, m):
    x = x.clone()
    x[m] = 0
    return x * 2


@peer(f("N", 7, 4), b("N", 7))
def select_rows(x, m):
    return (x[m] * 2).sum(0)


@peer(f("N", 7, 4), u("N", 7, grad=False))
def random_masking(x, noise):
    order = torch.argsort(noise, dim=1)
    back = torch.argsort(order, dim=1)
    kept = torch.gather(x, 1, order[:, :3].unsqueeze(-1).repeat(1, 1, 4))
    mask = torch.ones_like(noise)
    mask[:, :3] = 0
    return kept, torch.gather(mask, 1, back)


@peer(f("N", 4), i(3, "N"))
def segment_sum(x, s):
    return torch.zeros(3, 4, dtype=x.dtype).index_add(0, s, x)


@peer(f("N", 4), i(3, "N"))
def segment_mean(x, s):
    total = x.new_zeros(3, 4).scatter_add(0, s[:, None].expand(-1, 4), x)
    count = torch.bincount(s, minlength=3).clamp(min=1)
    return total / count[:, None]


@peer(f("N"), i(3, "N"))
def segment_softmax(x, s):
    top = torch.full((3,), float("-inf"), dtype=x.dtype).scatter_reduce(0, s, x.detach(), "amax")
    e = (x - top[s]).exp()
    z = torch.zeros(3, dtype=x.dtype).index_add(0, s, e)
    return e / z[s]


@peer(f("N", 4), i(3, "N"))
def segment_max(x, s):
    index = s.view(-1, 1).expand_as(x)
    return x.new_full((3, 4), -10.0).scatter_reduce(0, index, x, reduce="amax", include_self=True)


@peer(f("N", 4), i(5, 8), i(5, 8))
def message_passing(x, src, dst):
    m = F.relu(x[src] - x[dst])
    out = torch.zeros_like(x)
    out.index_add_(0, dst, m)
    return x + out


@peer(f("N", 4), i(5, 8), i(5, 8), f(8))
def graph_attention(x, src, dst, e):
    a = F.leaky_relu((x[src] * x[dst]).sum(-1) + e, 0.2)
    a = torch.exp(a - a.max())
    z = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, dst, a)
    w = a / z[dst]
    return torch.zeros_like(x).index_add(0, dst, x[src] * w[:, None])


@peer(f("N", 4), i(5, 8), i(5, 8))
def graph_convolution(x, src, dst):
    deg = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add(0, dst, torch.ones(8, dtype=x.dtype)) + 1
    norm = deg.rsqrt()
    m = x[src] * (norm[src] * norm[dst]).unsqueeze(1)
    return x.new_zeros(x.shape).scatter_add(0, dst.unsqueeze(1).expand(-1, 4), m)


@peer(f("N", 4), i(10, "N", 3), f(10, 4))
def embedding_bag(x, ids, table):
    return x + F.embedding_bag(ids, table, mode="sum")


@peer(i(10, "N", 3), f(10, 4))
def embedding_mean(ids, table):
    e = F.embedding(ids, table, padding_idx=0)
    m = (ids != 0).unsqueeze(-1)
    return (e * m).sum(1) / m.sum(1).clamp(min=1)


@peer(f("N", 4), f(4, 8), grad=False)
def hash_buckets(x, planes):
    bits = (x @ planes > 0).long()
    return (bits * (1 << torch.arange(8))).sum(-1) % 97


@peer(p("N", 6), grad=False)
def log_buckets(x):
    return torch.floor(torch.log2(x * 8).clamp(0, 7)).to(torch.int64)


@peer(f("N", 6), grad=False)
def rank_of_each(x):
    return x.argsort(-1).argsort(-1), (x.unsqueeze(-1) > x.unsqueeze(-2)).sum(-1)


@peer(f("N", 6), u("N", grad=False))
def mixup(x, lam):
    return lam[:, None] * x + (1 - lam[:, None]) * x.flip(0)


@peer(f("N", 3, 6, 6), i(6, "N"))
def cutout(x, at):
    ys = torch.arange(6).view(1, 6, 1)
    inside = (ys >= at.view(-1, 1, 1)) & (ys < at.view(-1, 1, 1) + 2)
    return x.masked_fill(inside.unsqueeze(1), 0.0)


@peer(f("N", 6), b("N"), f("N", 6))
def drop_path(x, keep, r):
    return r + x.div(0.8) * keep.view(-1, *[1] * (x.ndim - 1))


@peer(f("N", 6), grad=False)
def nan_handling(x):
    y = torch.where(x > 1, float("nan"), x)
    return torch.nan_to_num(y, 0.5), y.isnan().sum(-1), torch.nanmean(y, -1), y.isfinite().all(-1)


@peer(b("N", 6), b("N", 6), i(100, "N", 6), grad=False, halves=False)
def bit_tricks(m, n, k):
    return m & n, m | n, m ^ n, ~m, k & 1, k >> 2, (k | 8) ^ 3, k & -k, (m & (k > 50)).sum(-1)


@peer(i(100, "N", 6), i(9, "N", 6), grad=False, halves=False)
def integer_arithmetic(a, b):
    b = b + 1
    return a // b, a % b, -a // b, -a % b, torch.div(-a, b, rounding_mode="trunc"), torch.fmod(-a, b), a**2 - b


@peer(i(5, "N", 6), grad=False, halves=False)
def one_hot_counts(x):
    hot = F.one_hot(x, 5)
    return hot.sum(1), hot.cumsum(1).gather(2, x.unsqueeze(-1)).squeeze(-1) - 1, hot.float().mean(0)


@peer(f("N", 6), i(6, "N", 2), f("N", 2))
def write_at(x, at, y):
    return x.scatter(1, at, y.detach()) * 2, x.clone().index_fill_(1, at[0], 0.5)


@peer(f("N", 6), b("N", 6))
def any_and_all(x, m):
    ok = m.any(dim=1, keepdim=True) & ~m.all(dim=1, keepdim=True)
    return torch.where(ok, x, x.detach() * 0.5), (x * m).sum() / (m.sum() + 1)
