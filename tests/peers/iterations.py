"""Loops in Python whose steps read the last one several times: searches, recurrences over two indices, paths."""

import math

import torch
import torch.nn.functional as F

from tests.peers.spec import f, i, p, peer


@peer(f("N", 9), halves=False)
def entmax_by_bisection(x):
    x = x * 0.5
    top = x.amax(-1, keepdim=True)
    low, high = top - 1, top - (1 / x.shape[-1]) ** 0.5
    for _ in range(12):
        middle = (low + high) / 2
        over = torch.clamp(x - middle, min=0).pow(2).sum(-1, keepdim=True) >= 1
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    share = torch.clamp(x - low, min=0) ** 2
    return share / share.sum(-1, keepdim=True)


@peer(f("N", 5), f(7, 5), halves=False)
def sinkhorn(x, y):
    cost = ((x[:, None] - y[None]) ** 2).sum(-1) / 5
    a, b = x.new_zeros(x.shape[0]), y.new_zeros(7)
    for _ in range(4):
        a = -0.5 * torch.logsumexp((b[None] - cost) / 0.5, 1)
        b = -0.5 * torch.logsumexp((a[:, None] - cost) / 0.5, 0)
    plan = torch.exp((a[:, None] + b[None] - cost) / 0.5)
    return (plan * cost).sum(), plan


@peer(f("N", 4), f("N", 3), halves=False)
def soft_time_warping(x, y):
    cost = (x[:, :, None] - y[:, None]) ** 2
    far = torch.full_like(x[:, 0], 1e3)
    rows = [[torch.zeros_like(far), far, far, far]]
    for k in range(4):
        row = [far]
        for j in range(3):
            ways = torch.stack([-rows[-1][j], -rows[-1][j + 1], -row[j]])
            row.append(cost[:, k, j] - torch.logsumexp(ways, 0))
        rows.append(row)
    return rows[-1][-1]


@peer(f(5, "N", 4), i(3, "N", 3), halves=False)
def ctc_forward(x, targets):
    logp = x.log_softmax(-1)
    n, states = x.shape[1], 7
    symbols = torch.zeros(n, states, dtype=torch.long)
    symbols[:, 1::2] = targets + 1
    skips = torch.zeros(n, states, dtype=torch.bool)
    skips[:, 2:] = (symbols[:, 2:] != 0) & (symbols[:, 2:] != symbols[:, :-2])
    alpha = torch.full((n, states), -1e4)
    alpha[:, :2] = logp[0].gather(1, symbols)[:, :2]
    for t in range(1, 5):
        one = F.pad(alpha[:, :-1], (1, 0), value=-1e4)
        two = torch.where(skips, F.pad(alpha[:, :-2], (2, 0), value=-1e4), torch.full_like(alpha, -1e4))
        alpha = torch.logsumexp(torch.stack([alpha, one, two]), 0) + logp[t].gather(1, symbols)
    return -torch.logaddexp(alpha[:, -1], alpha[:, -2]).sum()


@peer(p("N"))
def american_put(share):
    n, up, down, chance = 6, 1.1, 1 / 1.1, 0.52
    steps = torch.arange(n + 1)
    value = torch.relu(1 - share[:, None] * up ** (n - steps) * down**steps)
    for k in range(n, 0, -1):
        steps = torch.arange(k)
        now = torch.relu(1 - share[:, None] * up ** (k - 1 - steps) * down**steps)
        value = torch.maximum((chance * value[:, :-1] + (1 - chance) * value[:, 1:]) * 0.99, now)
    return value[:, 0]


@peer(f("N", 6), f("N", 6), halves=False)
def heston_paths(first, second):
    share = torch.full((first.shape[0],), 100.0, dtype=first.dtype)
    variance = torch.full_like(share, 0.04)
    for t in range(6):
        kept = variance.clamp(min=0)
        share = share * torch.exp(-0.5 * kept / 6 + (kept / 6).sqrt() * first[:, t])
        shock = -0.7 * first[:, t] + math.sqrt(0.51) * second[:, t]
        variance = variance + 2 * (0.04 - kept) / 6 + 0.3 * torch.sqrt(kept / 6 + 1e-6) * shock
    return share.mean(), variance


@peer(f("N", 12))
def asian_option(z):
    path = torch.exp((0.03 / 12 + 0.2 * math.sqrt(1 / 12) * z).cumsum(1))
    alive = (path > 0.85).all(1)
    return torch.relu(path.mean(1) - 1).mean(), torch.where(alive, torch.relu(path[:, -1] - 1), 0.0).mean()


@peer(p("N", grad=False), p("N", grad=False), grad=False, halves=False)
def greeks_of_a_call(share, spread):
    def price(s, v):
        d = (torch.log(s) + 0.05 + v * v / 2) / v
        return (s * torch.special.ndtr(d) - math.exp(-0.05) * torch.special.ndtr(d - v)).sum()

    first = torch.func.grad(price)
    gamma = torch.func.grad(lambda s: first(s, spread).sum())(share)
    return first(share, spread), torch.func.grad(price, 1)(share, spread), gamma


@peer(f("N", 5), halves=False)
def draw_down(returns):
    wealth = (1 + 0.02 * returns).cumprod(0)
    fall = (wealth / wealth.cummax(0).values - 1).amin(0)
    return fall, returns.mean(0) / (returns.std(0, unbiased=False) + 1e-3) * 252**0.5


@peer(p("N", 8, 3), f("N", 8, 3), f("N", 8, 4), f("N", 8, 4), halves=False)
def state_space_in_chunks(decay, x, b, c):
    n, length, heads = x.shape
    decay, x, b, c = (z.reshape(n, 2, 4, *z.shape[2:]) for z in (-decay, x, b, c))
    total = decay.cumsum(2)
    gap = total[:, :, :, None] - total[:, :, None]
    within = gap.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril()[..., None], float("-inf")).exp()
    inside = torch.einsum("zcln,zcsn,zclsh,zcsh->zclh", c, b, within, x)
    states = torch.einsum("zcsn,zcsh,zcsh->zchn", b, torch.exp(total[:, :, -1:] - total), x)
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :1]], 1)
    return (inside + torch.einsum("zcln,zchn,zclh->zclh", c, before, total.exp())).reshape(n, length, heads)


@peer(f("N", 3, 6))
def averages_written_in_turn(x):
    out = torch.empty_like(x)
    s = x[..., 0]
    out[..., 0] = s
    for t in range(1, 6):
        s = s.lerp(x[..., t], 0.3)
        out[..., t] = s
    return out
