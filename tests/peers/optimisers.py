"""Optimiser steps, clipping, averaging, and schedules, as functions of tensors."""

import math

import torch

from tests.peers.spec import f, p, peer

PAIR = (f("N", 8, grad=False), f("N", 8, grad=False))
STATE = (*PAIR, f("N", 8, grad=False), p("N", 8, grad=False))


@peer(*PAIR, grad=False)
def sgd(w, g):
    return w - 0.1 * (g + 1e-2 * w)


@peer(*PAIR, f("N", 8, grad=False), grad=False)
def nesterov(w, g, m):
    m = 0.9 * m + g
    return w - 0.1 * (g + 0.9 * m), m


@peer(*STATE, grad=False)
def adam(w, g, m, v):
    m = m * 0.9 + g * 0.1
    v = v * 0.99 + g * g * 0.01
    return w - 1e-2 * (m / 0.19) / ((v / 0.02).sqrt() + 1e-3), m, v


@peer(*STATE, grad=False)
def adamw_in_place(w, g, m, v):
    w, m, v = w.clone(), m.clone(), v.clone()
    w.mul_(1 - 1e-3)
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    denom = (v.sqrt() / math.sqrt(0.02)).add_(1e-3)
    w.addcdiv_(m, denom, value=-1e-2)
    return w, m, v


@peer(*STATE, grad=False)
def amsgrad(w, g, m, v):
    v2 = torch.maximum(v, v * 0.99 + 0.01 * g.pow(2))
    m = torch.lerp(m, g, 0.1)
    return torch.addcdiv(w, m, v2.sqrt().add(1e-3), value=-0.01), m, v2


@peer(*STATE, grad=False)
def nadam(w, g, m, v):
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g**2
    return w - 0.01 * (0.9 * m / 0.2 + 0.1 * g / 0.1) / (torch.sqrt(v / 0.002) + 1e-3)


@peer(*STATE, grad=False)
def rmsprop(w, g, m, v):
    v = v.mul(0.9).addcmul(g, g, value=0.1)
    return w.addcdiv(g, v.sqrt().add(1e-2), value=-0.01), v


@peer(*STATE, grad=False)
def adadelta(w, g, d, v):
    d = d.abs()
    v = 0.9 * v + 0.1 * g * g
    step = g * (d + 1e-3).sqrt() / (v + 1e-3).sqrt()
    return w - step, 0.9 * d + 0.1 * step.square()


@peer(*STATE, grad=False)
def adagrad(w, g, m, v):
    v = v + g * g
    return w - 0.05 * g / (v.sqrt() + 1e-3), v


@peer(*STATE, grad=False)
def adamax(w, g, m, u):
    u = torch.max(u * 0.99, g.abs() + 1e-3)
    return w - 0.02 * (0.9 * m + 0.1 * g) / u, u


@peer(*PAIR, f("N", 8, grad=False), grad=False)
def lion(w, g, m):
    update = torch.sign(m * 0.9 + g * 0.1)
    return w * (1 - 1e-3) - 1e-2 * update, m * 0.99 + g * 0.01


@peer(*STATE, grad=False)
def lamb(w, g, m, v):
    r = (0.9 * m + 0.1 * g) / ((0.99 * v + 0.01 * g * g).sqrt() + 1e-3) + 0.01 * w
    wn, rn = w.norm(), r.norm()
    ratio = torch.where((wn > 0) & (rn > 0), wn / rn, torch.ones_like(wn))
    return w - 0.01 * ratio * r


@peer(*PAIR, grad=False)
def lars(w, g):
    trust = 0.001 * w.norm(p=2) / (g.norm(p=2) + 1e-2 * w.norm(p=2) + 1e-3)
    return w.sub(trust * (g + 1e-2 * w))


@peer(*PAIR, p("N", grad=False), p(8, grad=False), grad=False)
def adafactor(w, g, r, c):
    sq = g * g + 1e-3
    r, c = r.lerp(sq.mean(-1), 0.1), c.lerp(sq.mean(0), 0.1)
    u = g * (r / r.mean()).rsqrt().unsqueeze(-1) * c.rsqrt()
    u = u / (u.pow(2).mean().sqrt() / 1.0).clamp(min=1.0)
    return w - 0.01 * u, r, c


@peer(*STATE, grad=False)
def sophia(w, g, m, h):
    return w - 0.01 * (m / (h * 0.04).clamp(min=1e-3)).clamp(-1, 1), h * 0.99 + 0.01 * g * g


@peer(*PAIR, grad=False)
def ema(w, avg):
    return avg.clone().mul_(0.999).add_(w, alpha=1 - 0.999)


@peer(f("N", 8, grad=False), f(5, grad=False), f(3, 4, grad=False), grad=False)
def clip_norm(a, b, c):
    total = torch.stack([x.norm() for x in (a, b, c)]).norm()
    scale = torch.clamp(1.0 / (total + 1e-3), max=1.0)
    return a * scale, b * scale, c * scale, total


@peer(*PAIR, grad=False)
def clip_adaptive(w, g):
    wn = w.norm(dim=1, keepdim=True).clamp_min(1e-2)
    gn = g.norm(dim=1, keepdim=True)
    return torch.where(gn > 0.1 * wn, g * (0.1 * wn / gn.clamp_min(1e-3)), g)


@peer(*STATE, grad=False)
def foreach_adam(w, g, m, v):
    ws, gs = list(w.clone().unbind(0)), list(g.unbind(0))
    ms = torch._foreach_lerp(list(m.unbind(0)), gs, 0.1)
    vs = torch._foreach_mul(list(v.unbind(0)), 0.99)
    vs = torch._foreach_addcmul(vs, gs, gs, value=0.01)
    den = torch._foreach_add(torch._foreach_sqrt(vs), 1e-2)
    return torch.stack(torch._foreach_addcdiv(ws, ms, den, value=-0.01))


@peer(f(8, 8, grad=False), grad=False)
def newton_schulz(g):
    x = g / (g.norm() + 1e-3)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@peer(*PAIR, grad=False)
def cautious(w, u):
    mask = (u * w > 0).to(u.dtype)
    return w - 0.01 * u * mask / mask.mean().clamp(min=1e-3)


@peer(f("N", grad=False), grad=False)
def cosine_schedule(step):
    s = step.abs() * 10
    warm = s / 5
    cos = 0.5 * (1 + torch.cos(math.pi * (s - 5) / 20))
    return torch.where(s < 5, warm, cos.clamp(min=0.1))
