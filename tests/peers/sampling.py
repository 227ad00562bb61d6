"""Decoding: samplers, penalties, beam search, and tokens' bookkeeping."""

import torch

from tests.peers.spec import b, f, i, p, peer, u


@peer(f("N", 16), grad=False)
def greedy(x):
    return x.argmax(-1), x.log_softmax(-1).amax(-1)


@peer(f("N", 16), grad=False)
def top_k_filter(x):
    v, _ = torch.topk(x, 4)
    return x.masked_fill(x < v[:, [-1]], float("-inf")).softmax(-1)


@peer(f("N", 16), grad=False)
def top_p_filter(x):
    s, at = torch.sort(x, descending=True)
    cum = s.softmax(-1).cumsum(-1)
    drop = cum > 0.8
    drop[..., 1:] = drop[..., :-1].clone()
    drop[..., 0] = False
    return x.masked_fill(drop.scatter(1, at, drop), float("-inf"))


@peer(f("N", 16), grad=False)
def min_p_filter(x):
    prob = x.softmax(-1)
    return torch.where(prob < 0.1 * prob.amax(-1, keepdim=True), torch.finfo(x.dtype).min, x)


@peer(f("N", 16), grad=False)
def typical_filter(x):
    logp = x.log_softmax(-1)
    ent = -(logp.exp() * logp).nansum(-1, keepdim=True)
    return ((-logp) - ent).abs()


@peer(f("N", 16), i(16, "N", 5), grad=False)
def repetition_penalty(x, ids):
    score = torch.gather(x, 1, ids)
    score = torch.where(score < 0, score * 1.2, score / 1.2)
    return x.scatter(1, ids, score)


@peer(f("N", 16), i(16, "N", 5), grad=False)
def frequency_penalty(x, ids):
    count = torch.zeros_like(x).scatter_add_(1, ids, torch.ones_like(ids, dtype=x.dtype))
    return x - 0.3 * count - 0.5 * (count > 0).to(x.dtype)


@peer(f("N", 16), u("N", 16, grad=False), grad=False)
def gumbel_max(x, r):
    g = -torch.log(-torch.log(r.clamp(1e-2, 0.99)))
    return (x / 0.8 + g).argmax(dim=-1, keepdim=True)


@peer(f("N", 16), u("N", 1, grad=False), grad=False)
def inverse_cdf(x, r):
    c = x.softmax(-1).cumsum(-1)
    return (c < r).sum(-1).clamp(max=15)


@peer(f("N", 3, 8), f("N", 3), grad=False)
def beam_step(x, score):
    total = (x.log_softmax(-1) + score[..., None]).flatten(1)
    best, at = total.topk(3, dim=-1)
    return best, torch.div(at, 8, rounding_mode="floor"), at % 8


@peer(f("N", 3, 5, 4), i(3, "N", 3), grad=False)
def beam_reorder(cache, beam):
    n = cache.shape[0]
    flat = cache.flatten(0, 1)
    index = (beam + torch.arange(n)[:, None] * 3).view(-1)
    return flat.index_select(0, index).view_as(cache)


@peer(i(6, "N", 8), grad=False, halves=False)
def finished(ids):
    done = (ids == 2).cumsum(1) > 0
    length = (~done).sum(-1)
    return ids.masked_fill(done, 0), length, done.any(1)


@peer(i(6, "N", 8), grad=False, halves=False)
def shift_right(ids):
    out = ids.new_zeros(ids.shape)
    out[..., 1:] = ids[..., :-1].clone()
    out[..., 0] = 1
    return out.masked_fill_(out == 5, 0)


@peer(f("N", 7, 11), i(11, "N", 7), b("N", 7))
def masked_next_token_loss(x, ids, keep):
    logp = x[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    m = keep[:, 1:].to(logp.dtype)
    return -(logp * m).sum() / m.sum().clamp(min=1)


@peer(i(6, "N", 8), grad=False, halves=False)
def positions_from_padding(ids):
    mask = ids.ne(1).int()
    return (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1


@peer(f("N", 9), f("N", 9), u("N", grad=False), grad=False)
def speculative_accept(p, q, r):
    p, q = p.softmax(-1), q.softmax(-1)
    at = q.argmax(-1)
    ratio = p.gather(1, at[:, None]).squeeze(1) / q.gather(1, at[:, None]).squeeze(1)
    rest = (p - q).clamp(min=0)
    return r < ratio.clamp(max=1), rest / rest.sum(-1, keepdim=True).clamp(min=1e-3)


@peer(f("N", 4, grad=False), f("N", 4, grad=False), p("N", 1, grad=False), grad=False)
def ddpm_step(x, eps, alpha):
    a = alpha.clamp(0.2, 0.95)
    return (x - (1 - a) / (1 - a * a).sqrt() * eps) / a.sqrt()


@peer(f("N", 4), f("N", 4), f("N", 4))
def guidance(x, cond, free):
    e = free + 7.5 * (cond - free)
    std = cond.std(-1, keepdim=True) / (e.std(-1, keepdim=True) + 1e-2)
    e = 0.7 * e * std + 0.3 * e
    return x + 0.05 * e


@peer(i(1000, "N"), grad=False, halves=False)
def timestep_embedding(t):
    half = 8
    freq = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(half, dtype=torch.float32) / half)
    a = t[:, None].float() * freq[None]
    return torch.cat([torch.cos(a), torch.sin(a)], dim=-1)


@peer(f("N", 6, 5), grad=False)
def viterbi(x):
    trans = torch.linspace(-1, 1, 25, dtype=x.dtype).view(5, 5)
    score, back = x[:, 0], []
    for t in range(1, 6):
        best, at = (score.unsqueeze(2) + trans).max(1)
        score = best + x[:, t]
        back.append(at)
    tag = score.argmax(1)
    path = [tag]
    for at in reversed(back):
        tag = at.gather(1, tag[:, None])[:, 0]
        path.append(tag)
    return torch.stack(path[::-1], 1)


@peer(f("N", 6, 5))
def crf_forward(x):
    trans = torch.linspace(-1, 1, 25, dtype=x.dtype).view(5, 5)
    a = x[:, 0]
    for t in range(1, 6):
        a = torch.logsumexp(a.unsqueeze(2) + trans, dim=1) + x[:, t]
    return a.logsumexp(1).mean()


@peer(f("N", 10), grad=False)
def entropy_and_margin(x):
    top = x.softmax(-1).topk(2).values
    return torch.special.entr(x.softmax(-1)).sum(-1), top[:, 0] - top[:, 1]
