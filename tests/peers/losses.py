"""Losses as people write them."""

import math

import torch
import torch.nn.functional as F

from tests.peers.spec import b, f, i, p, peer, u


@peer(f("N", 10), i(10, "N"))
def cross_entropy(x, t):
    return F.cross_entropy(x, t)


@peer(f("N", 10), i(10, "N"))
def cross_entropy_by_hand(x, t):
    logp = x - x.logsumexp(-1, keepdim=True)
    return -logp.gather(1, t[:, None]).squeeze(1).mean()


@peer(f("N", 10), i(10, "N"))
def label_smoothing(x, t, eps=0.1):
    logp = F.log_softmax(x, -1)
    nll = -logp.gather(-1, t.unsqueeze(-1)).squeeze(-1)
    return ((1 - eps) * nll - eps * logp.mean(-1)).mean()


@peer(f("N", 10), i(10, "N"), p(10, grad=False))
def weighted_cross_entropy(x, t, w):
    return F.cross_entropy(x, t, weight=w, label_smoothing=0.05)


@peer(f("N", 10, 5), i(10, "N", 5))
def ignored_cross_entropy(x, t):
    t = torch.where(t > 7, -100, t)
    return F.cross_entropy(x, t, ignore_index=-100, reduction="sum")


@peer(f("N", 10), i(10, "N"))
def z_loss(x, t):
    lse = torch.logsumexp(x, -1)
    return F.cross_entropy(x, t) + 1e-4 * (lse**2).mean()


@peer(f("N", 8), u("N", 8, grad=False))
def focal(x, t, alpha=0.25, gamma=2.0):
    prob = torch.sigmoid(x)
    ce = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    p_t = prob * t + (1 - prob) * (1 - t)
    return ((alpha * t + (1 - alpha) * (1 - t)) * ce * (1 - p_t) ** gamma).mean()


@peer(f("N", 8), b("N", 8))
def asymmetric(x, t):
    y = t.to(x.dtype)
    pos, neg = torch.sigmoid(x), (1 - torch.sigmoid(x) + 0.05).clamp(max=1)
    loss = y * pos.clamp(min=1e-4).log() + (1 - y) * neg.clamp(min=1e-4).log()
    pt = pos * y + neg * (1 - y)
    return -(loss * (1 - pt) ** (1 * y + 4 * (1 - y))).sum()


@peer(f("N", 4, 8), u("N", 4, 8, grad=False))
def dice(x, t):
    prob = x.sigmoid().flatten(1)
    t = t.flatten(1)
    inter = (prob * t).sum(1)
    return (1 - (2 * inter + 1) / (prob.sum(1) + t.sum(1) + 1)).mean()


@peer(f("N", 4, 8), b("N", 4, 8))
def tversky(x, t):
    prob, t = torch.sigmoid(x), t.type_as(x)
    tp = (prob * t).sum((1, 2))
    fp = ((1 - t) * prob).sum((1, 2))
    fn = (t * (1 - prob)).sum((1, 2))
    return (1 - tp / (tp + 0.3 * fp + 0.7 * fn + 1e-3)).pow(0.75).mean()


@peer(f("N", 16), f("N", 16))
def smooth_l1(x, y):
    d = (x - y).abs()
    return torch.where(d < 1, 0.5 * d * d, d - 0.5).mean()


@peer(f("N", 16), f("N", 16))
def huber(x, y):
    return F.huber_loss(x, y, delta=0.7)


@peer(f("N", 16), f("N", 16))
def charbonnier(x, y):
    return torch.sqrt((x - y) ** 2 + 1e-3).mean()


@peer(f("N", 16), f("N", 16))
def log_cosh(x, y):
    d = y - x
    return (d + F.softplus(-2.0 * d) - math.log(2.0)).mean()


@peer(f("N", 16), f("N", 16), f("N", 16))
def triplet(a, pos, neg):
    return F.relu((a - pos).pow(2).sum(1) - (a - neg).pow(2).sum(1) + 0.2).mean()


@peer(f("N", 16), f("N", 16), f("N", 16))
def triplet_library(a, pos, neg):
    return F.triplet_margin_loss(a, pos, neg, margin=1.0, p=2)


@peer(f("N", 16), f("N", 16), i(2, "N"))
def contrastive(x, y, same):
    d = (x - y).norm(dim=1)
    return (same * d**2 + (1 - same) * (1 - d).clamp(min=0) ** 2).mean()


@peer(f("N", 16), f("N", 16))
def info_nce(x, y):
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    logits = x @ y.T / 0.07
    return F.cross_entropy(logits, torch.arange(x.shape[0], device=x.device))


@peer(f("N", 16), f("N", 16), f())
def clip_loss(x, y, scale):
    x = x / x.norm(dim=-1, keepdim=True)
    y = y / y.norm(dim=-1, keepdim=True)
    logits = scale.exp() * x @ y.t()
    labels = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@peer(f("N", 16), f("N", 16), f(), f())
def siglip(x, y, t, bias):
    logits = F.normalize(x) @ F.normalize(y).T * t.exp() + bias
    sign = 2 * torch.eye(x.size(0), device=x.device, dtype=x.dtype) - 1
    return -F.logsigmoid(sign * logits).sum() / x.size(0)


@peer(f("N", 16), f("N", 16))
def nt_xent(x, y):
    z = F.normalize(torch.cat([x, y]), dim=1)
    sim = z @ z.t() / 0.5
    sim = sim.masked_fill(torch.eye(z.shape[0], dtype=torch.bool, device=z.device), -1e4)
    n = x.shape[0]
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


@peer(f("N", 16), f("N", 16))
def barlow_twins(x, y):
    x = (x - x.mean(0)) / (x.std(0) + 1e-3)
    y = (y - y.mean(0)) / (y.std(0) + 1e-3)
    c = x.T @ y / x.shape[0]
    on = (torch.diagonal(c) - 1).pow(2).sum()
    off = c.flatten()[:-1].view(15, 17)[:, 1:].pow(2).sum()
    return on + 5e-3 * off


@peer(f("N", 16), f("N", 16))
def vicreg(x, y):
    sim = F.mse_loss(x, y)
    std = torch.sqrt(x.var(dim=0) + 1e-4)
    x = x - x.mean(dim=0)
    cov = (x.T @ x) / (x.shape[0] - 1)
    off = cov - torch.diag(torch.diag(cov))
    return 25 * sim + 25 * F.relu(1 - std).mean() + off.pow(2).sum() / 16


@peer(f("N", 10), f("N", 10))
def distillation(s, t, temp=3.0):
    return F.kl_div(F.log_softmax(s / temp, 1), F.softmax(t / temp, 1), reduction="batchmean") * temp * temp


@peer(f("N", 10), f("N", 10))
def jensen_shannon(x, y):
    px, py = x.softmax(-1), y.softmax(-1)
    m = ((px + py) / 2).log()
    return 0.5 * (F.kl_div(m, px, reduction="batchmean") + F.kl_div(m, py, reduction="batchmean"))


@peer(f("N", 16), f("N", 16))
def gaussian_kl(mu, logvar):
    return -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()


@peer(f("N", 16), f("N", 16), f("N", 16, grad=False))
def gaussian_nll(mu, logvar, x):
    return 0.5 * (logvar + (x - mu) ** 2 / logvar.exp() + math.log(2 * math.pi)).sum(-1).mean()


@peer(p("N", 8), i(5, "N", 8))
def poisson_nll(rate, k):
    return (rate - k * torch.log(rate + 1e-2)).mean()


@peer(f("N", 9), u("N", grad=False))
def quantile(x, t):
    q = torch.linspace(0.1, 0.9, 9, dtype=x.dtype)
    e = t[:, None] - x
    return torch.maximum(q * e, (q - 1) * e).mean()


@peer(f("N"), f("N"), u("N", grad=False))
def evidential(x, v, y):
    v = F.softplus(v) + 1e-2
    return (torch.log(math.pi / v) * 0.5 + (y - x).square() * v).mean()


@peer(f("N", 7), i(7, "N"))
def ordinal(x, t):
    levels = (torch.arange(7, device=x.device)[None] < t[:, None]).to(x.dtype)
    return -(F.logsigmoid(x) * levels + (F.logsigmoid(x) - x) * (1 - levels)).sum(1).mean()


@peer(f("N", 10), i(10, "N"))
def arcface(x, t, s=16.0, m=0.3):
    cos = torch.tanh(x) * 0.99
    theta = torch.acos(cos)
    hot = F.one_hot(t, 10).to(x.dtype)
    return F.cross_entropy(s * torch.cos(theta + m * hot), t)


@peer(f("N", 10), i(10, "N"))
def hinge(x, t):
    correct = x.gather(1, t[:, None])
    margin = (x - correct + 1).clamp_min(0)
    margin = margin.scatter(1, t[:, None], 0)
    return margin.sum() / x.shape[0]


@peer(f("N", 10), i(10, "N"))
def poly_loss(x, t):
    ce = F.cross_entropy(x, t, reduction="none")
    pt = (x.softmax(1) * F.one_hot(t, x.shape[1])).sum(1)
    return (ce + 1.0 * (1 - pt)).mean()


@peer(f("N", 4), f("N", 4), f("N", grad=False))
def ppo(logits, old, adv):
    ratio = (logits.log_softmax(-1) - old.log_softmax(-1)).sum(-1).exp()
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()


@peer(f("N", 12), f("N", 12), f("N", 12, grad=False), f("N", 12, grad=False))
def dpo(pc, pr, rc, rr):
    chosen, rejected = (pc - rc).sum(-1), (pr - rr).sum(-1)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@peer(f("N", 6), f("N", 6), i(6, "N"), f("N", grad=False), b("N"))
def dqn(q, target, action, reward, done):
    now = q.gather(1, action.unsqueeze(1)).squeeze(1)
    nxt = target.max(1)[0].detach()
    return F.smooth_l1_loss(now, reward + 0.99 * nxt * (~done).to(q.dtype))


@peer(f("N", 8, 8))
def total_variation(x):
    dh = (x[:, 1:] - x[:, :-1]).abs().mean()
    dw = (x[:, :, 1:] - x[:, :, :-1]).abs().mean()
    return dh + dw


@peer(f("N", 5), f("N", 5))
def ranking(x, y):
    s = torch.sign(y[:, :, None] - y[:, None, :])
    d = x[:, :, None] - x[:, None, :]
    return F.softplus(-s * d).mul(s != 0).mean()


@peer(f("N", 5), f("N", 5))
def list_net(x, y):
    return -(y.softmax(1) * torch.log(x.softmax(1) + 1e-4)).sum(1).mean()


@peer(f("N", 3, 16))
def center(x):
    c = x.mean(1, keepdim=True)
    return ((x - c) ** 2).sum(-1).mean() - 0.1 * torch.cdist(c[:, 0].double(), c[:, 0].double()).to(x.dtype).mean()


@peer(f("N", 16), f("N", 16))
def cosine_embedding(x, y):
    return (1 - F.cosine_similarity(x, y, dim=-1)).mean()


@peer(f("N", 10), i(10, "N"))
def entropy_bonus(x, a):
    logp = x.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return -(logp[torch.arange(x.shape[0]), a] + 0.01 * entropy).mean()


@peer(f("N", 8), u("N", 8, grad=False))
def bce_weighted(x, t):
    return F.binary_cross_entropy_with_logits(x, t, pos_weight=torch.full((8,), 2.0, dtype=x.dtype))
