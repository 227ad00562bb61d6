"""Graph networks, point clouds and experts: rows that are looked up, and sums over rows that are named."""

import math

import torch
import torch.nn.functional as F

from tests.peers.spec import f, i, p, peer, u

NODES, EDGES = 6, 14


@peer(f(NODES, 5), i(NODES, 2, EDGES))
def degree_normalised(x, edges):
    row, col = edges
    degree = torch.zeros(x.size(0), dtype=x.dtype).scatter_add_(0, col, torch.ones_like(col, dtype=x.dtype))
    scale = degree.pow(-0.5)
    scale.masked_fill_(scale == float("inf"), 0)
    return torch.zeros_like(x).index_add_(0, col, (scale[row] * scale[col]).view(-1, 1) * x[row])


@peer(f(NODES, 5), i(NODES, 2, EDGES), f(5, 2), f(5, 2, grad=False))  # what it adds to all of a row cancels
def attention_over_edges(x, edges, a, b):
    source, target = edges[0], edges[1]
    score = F.leaky_relu((x @ a)[source] + (x @ b)[target], 0.2)
    lowest = torch.full((NODES, 2), -1e4, dtype=x.dtype)
    largest = lowest.scatter_reduce(0, target[:, None].expand(-1, 2), score, "amax")
    score = (score - largest[target]).exp()
    total = torch.zeros(NODES, 2, dtype=x.dtype).index_add(0, target, score)
    share = score / (total[target] + 1e-6)
    heads = share[:, :, None] * x[source][:, None, :]
    return torch.zeros(NODES, 2, 5, dtype=x.dtype).index_add(0, target, heads).flatten(1)


@peer(f(NODES, 5), i(NODES, 2, EDGES))
def mean_of_neighbours(x, edges):
    source, target = edges
    total = x.new_zeros(x.shape).scatter_add(0, target.unsqueeze(-1).expand(-1, x.shape[1]), x[source])
    count = torch.bincount(target, minlength=x.shape[0]).clamp(min=1).unsqueeze(1)
    return torch.cat([x, total / count], 1)


@peer(f(NODES, 4), i(NODES, 2, EDGES))
def edge_features(x, edges):
    source, target = edges
    message = torch.cat([x[target], x[source] - x[target]], -1).relu()
    empty = torch.zeros(x.size(0), 8, dtype=x.dtype)
    return empty.scatter_reduce(0, target[:, None].expand_as(message), message, "amax", include_self=False)


@peer(f("N", 3), f("N", 4))
def equivariant_step(x, h):
    gap = x[:, None] - x[None]
    distance = (gap**2).sum(-1, keepdim=True)
    n = h.shape[0]
    pairs = torch.cat([h[:, None].expand(-1, n, -1), h[None].expand(n, -1, -1), distance], -1).tanh()
    weight = pairs.mean(-1, keepdim=True) / ((distance + 1e-3).sqrt() + 1)
    return x + (gap * weight).sum(1), h + pairs.sum(1)[:, :4]


@peer(f("N", 3))
def radial_cutoff(position):
    n = position.shape[0]
    i, j = torch.triu_indices(n, n, 1)
    d = (position[i] - position[j]).norm(dim=-1)
    basis = torch.exp(-10.0 * (d[:, None] - torch.linspace(0, 5, 8)) ** 2)
    return (basis * (0.5 * (torch.cos(d * math.pi / 5) + 1) * (d < 5))[:, None]).sum(0)


@peer(u("N", "N"), f("N", 5))
def laplacian(a, x):
    a = (a > 0.5).to(x.dtype) + torch.eye(a.shape[0], dtype=x.dtype)
    d = a.sum(-1).rsqrt()
    return (d[:, None] * a * d[None]) @ x, torch.diag(d.pow(-2)) - a


@peer(f("N", 4), i(3, "N"))
def pooled_graphs(x, graph):
    index = graph[:, None].expand(-1, 4)
    empty = x.new_zeros(3, 4)
    return empty.scatter_add(0, index, x), empty.scatter_reduce(0, index, x, "amax", include_self=False)


@peer(f(NODES, 4, grad=False), i(NODES, 2, EDGES), grad=False)
def page_rank(x, edges):
    source, target = edges
    rank = torch.full((NODES,), 1.0 / NODES, dtype=x.dtype)
    ones = torch.ones(EDGES, dtype=x.dtype)
    degree = torch.zeros(NODES, dtype=x.dtype).index_put_((source,), ones, accumulate=True).clamp_(min=1)
    for _ in range(3):
        rank = 0.15 / NODES + 0.85 * torch.zeros_like(rank).index_add_(0, target, rank[source] / degree[source])
    return rank


@peer(f("N", 8), f(8, 4), f(4, 8, 5))
def two_of_four_experts(x, gate, experts):
    share = (x @ gate).softmax(-1)
    weight, index = share.topk(2, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    chosen = torch.zeros_like(share).scatter(1, index, weight)
    load = F.one_hot(index, 4).to(x.dtype).sum(1).mean(0)
    result = torch.einsum("nef,ne->nf", torch.einsum("nd,edf->nef", x, experts), chosen)
    return result, (load * share.mean(0)).sum() * 4


@peer(f("N", 5), i(4, "N"))
def experts_with_places(x, expert):
    one_hot = F.one_hot(expert, 4)
    place = (one_hot.cumsum(0) * one_hot).sum(1) - 1
    slot = torch.where(place < 2, expert * 2 + place, torch.full_like(place, 8))
    queue = torch.zeros(9, 5, dtype=x.dtype).index_add(0, slot, x)[:8]
    return queue.view(4, 2, 5).tanh().view(8, 5)[slot.clamp(max=7)] * (place < 2)[:, None]


@peer(f(8, 4), f(3, 4))
def k_means_step(x, centres):
    distance = (x[:, None] - centres[None]).pow(2).sum(-1)
    nearest = distance.detach().argmin(1)
    count = torch.bincount(nearest, minlength=3).clamp(min=1)
    moved = torch.zeros_like(centres).index_add(0, nearest, x) / count[:, None]
    return moved, nearest, torch.softmax(-2 * distance, 1).t() @ x


@peer(p("N", 7, 4), p("N", 7))
def composited_samples(samples, steps):
    z = steps.cumsum(1)
    far = torch.full_like(z[:, :1], 1e4)
    alpha = 1 - torch.exp(-F.relu(samples[..., 3]) * torch.cat([z[:, 1:] - z[:, :-1], far], -1))
    through = torch.cumprod(torch.cat([torch.ones_like(far), 1 - alpha + 1e-4], -1), -1)[:, :-1]
    weight = alpha * through
    return (weight[..., None] * samples[..., :3]).sum(-2), weight.sum(-1)
