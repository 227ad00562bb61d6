"""Programs that write: into their inputs, views of them, results of `out=`, and slices of what they return."""

import torch

from tests.peers.spec import b, f, i, p, peer


@peer(f("N", 6), grad=False)
def views_of_an_input(x):
    v = x[:, 1:3]
    v += 1
    x.t()[0] *= 2
    x[:, -1] = x[:, 0] + x[:, 1]
    x[x > 1] = 1
    x.view(-1)[::2].neg_()
    return v, x.sum()


@peer(f("N", 6), b("N", 6), i(1, 3), grad=False)
def every_indexed_write(x, mask, rows):
    x.masked_fill_(mask, 0.5)
    x.index_put_((rows, torch.tensor([0, 1, 2])), torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype))
    x.index_fill_(1, torch.tensor([4]), -1)
    x.index_add_(0, rows, torch.ones(3, 6, dtype=x.dtype), alpha=0.5)
    y = torch.empty_like(x)
    y.copy_(x)
    y[..., 0].fill_(3)
    return y, x[:, None]


@peer(f("N", 6), f("N", 6), grad=False)
def results_of_out(a, b):
    total = torch.empty_like(a)
    torch.add(a, b, out=total)
    twice = torch.empty(0, dtype=a.dtype)
    torch.mul(total, 2, out=twice)
    torch.sigmoid(a, out=a)
    joined = torch.empty(a.shape[0], 12, dtype=a.dtype)
    torch.cat([a, b], 1, out=joined)
    return total, twice, joined


@peer(f("N", 6))
def writes_under_autograd(x):
    y = x * 2
    y[:, 0] = 0
    y[:, 1:3].mul_(y[:, 3:5].detach().clone())
    z = y.clone()
    z[z < 0] *= 0.1
    z[:, 1] += x[:, 1]
    z.t()[2].mul_(3)
    z.clamp_(max=5).tanh_()
    return z, y.sum(1)


@peer(f("N", 6))
def slices_of_a_new_tensor(x):
    out = x.new_empty(x.shape[0], 8).fill_(1)
    out[:, 1:7] = x
    out[:, 0], out[:, -1] = x[:, -1], x[:, 0]
    out.narrow(1, 2, 2).copy_(x[:, :2] ** 2)
    return out, out[::2]


@peer(f("N", 6), grad=False)
def swapped_halves(x):
    first, second = x[:, :3].clone(), x[:, 3:].clone()
    x[:, :3], x[:, 3:] = second, first
    x[0:1], x[-1:] = x[-1:].clone(), x[0:1].clone()
    return x.relu()


@peer(f(7, 9), grad=False)
def heat_in_place(u):
    v = u.clone()
    for _ in range(3):
        around = v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2]
        v[1:-1, 1:-1] += 0.1 * (around - 4 * v[1:-1, 1:-1])
        v[0], v[-1] = v[1], v[-2]
        v[:, 0] = 0
        v[:, -1] = 1
    u[1:-1, 1:-1] = 0.25 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2])
    return v


@peer(f("N", 2, 3, 4, grad=False), f("N", 2, 9, 4, grad=False), f("N", 2, 9, 4, grad=False), grad=False)
def cached_keys(q, keys, values):
    keys[:, :, 4:7] = q * 0.5
    values[:, :, 4:7] = q
    seen = torch.arange(9)[None, :] <= torch.arange(4, 7)[:, None]
    return (q @ keys.mT * 0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ values


@peer(f("N", 20, grad=False), i(20, "N", 5), grad=False)
def penalised_logits(x, used):
    score = torch.gather(x, 1, used)
    x.scatter_(1, used, torch.where(score < 0, score * 1.2, score / 1.2))
    count = torch.zeros_like(x).scatter_add_(1, used, torch.ones_like(used, dtype=x.dtype))
    x[x < x.topk(5).values[:, [-1]]] = -1e4
    return x - 0.1 * count


@peer(f("N", 6, grad=False), f("N", 6, grad=False), p("N", grad=False), p(6, grad=False), grad=False)
def factored_moments(weight, grad, row, column):
    square = grad**2 + 1e-4
    row.mul_(0.9).add_(square.mean(-1), alpha=0.1)
    column.mul_(0.9).add_(square.mean(-2), alpha=0.1)
    update = (row / row.mean()).rsqrt_().unsqueeze(-1) * column.unsqueeze(-2).rsqrt() * grad
    update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
    weight.add_(update, alpha=-0.01)
    return update.pow(2).mean().sqrt()


@peer(f("N", 6), grad=False)
def aliases(x):
    z = x + 1
    return x, x.view(-1), z, z[:, 0], z.t(), x[:2], x.detach(), z.expand(2, *z.shape)
