"""Boxes, anchors, and what detectors do after the network."""

import math

import torch
import torch.nn.functional as F

from tests.peers.spec import b, f, i, p, peer, u


def corners(x):
    """Centre and size to two corners."""
    c, s = x[..., :2], x[..., 2:].abs() + 0.1
    return torch.cat([c - s / 2, c + s / 2], -1)


@peer(f("N", 4), f(5, 4))
def box_iou(x, y):
    x, y = corners(x), corners(y)
    area = lambda z: (z[:, 2] - z[:, 0]) * (z[:, 3] - z[:, 1])  # noqa: E731
    lt, rb = torch.max(x[:, None, :2], y[:, :2]), torch.min(x[:, None, 2:], y[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    return inter / (area(x)[:, None] + area(y) - inter)


@peer(f("N", 4), f("N", 4))
def giou_loss(x, y):
    x, y = corners(x), corners(y)
    x1, y1, x2, y2 = x.unbind(-1)
    a1, b1, a2, b2 = y.unbind(-1)
    iw = (torch.min(x2, a2) - torch.max(x1, a1)).clamp(min=0)
    ih = (torch.min(y2, b2) - torch.max(y1, b1)).clamp(min=0)
    union = (x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - iw * ih
    hull = (torch.max(x2, a2) - torch.min(x1, a1)) * (torch.max(y2, b2) - torch.min(y1, b1))
    return (1 - (iw * ih / union - (hull - union) / hull)).mean()


@peer(f("N", 4), f("N", 4))
def ciou_loss(x, y):
    x, y = corners(x), corners(y)
    w1, h1 = x[:, 2] - x[:, 0], x[:, 3] - x[:, 1]
    w2, h2 = y[:, 2] - y[:, 0], y[:, 3] - y[:, 1]
    inter = (x[:, 2:].minimum(y[:, 2:]) - x[:, :2].maximum(y[:, :2])).clamp(0).prod(1)
    iou = inter / (w1 * h1 + w2 * h2 - inter + 1e-3)
    v = 4 / math.pi**2 * (torch.atan(w2 / h2) - torch.atan(w1 / h1)).pow(2)
    with torch.no_grad():
        a = v / (v - iou + 1 + 1e-3)
    return (1 - iou + v * a).sum()


@peer(f("N", 4), f("N", 4))
def encode_boxes(x, anchor):
    w, h = anchor[:, 2].abs() + 0.5, anchor[:, 3].abs() + 0.5
    dx, dy = (x[:, 0] - anchor[:, 0]) / w, (x[:, 1] - anchor[:, 1]) / h
    return torch.stack((dx, dy, torch.log((x[:, 2].abs() + 0.5) / w), torch.log((x[:, 3].abs() + 0.5) / h)), dim=1)


@peer(f("N", 8), f("N", 4))
def decode_boxes(d, a):
    d = d.reshape(d.size(0), -1, 4)
    ctr = d[..., :2] * a[:, None, 2:].abs() + a[:, None, :2]
    wh = d[..., 2:].clamp(max=math.log(1000.0 / 16)).exp() * a[:, None, 2:].abs()
    return torch.cat([ctr - 0.5 * wh, ctr + 0.5 * wh], -1).flatten(1)


@peer(f("N", 4), grad=False)
def clip_boxes(x):
    x = corners(x) * 10
    x[..., 0::2] = x[..., 0::2].clamp(min=0, max=20)
    x[..., 1::2] = x[..., 1::2].clamp(min=0, max=12)
    return x


@peer(f("N", 4))
def flip_boxes(x):
    return torch.stack([1 - x[..., 2], x[..., 1], 1 - x[..., 0], x[..., 3]], -1)


@peer(f("N", 3, 10, 4, 4))
def yolo_head(x):
    x = x.permute(0, 1, 3, 4, 2).contiguous()
    gy, gx = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    grid = torch.stack((gx, gy), 2).view(1, 1, 4, 4, 2).to(x.dtype)
    xy = (x[..., 0:2].sigmoid() * 2 - 0.5 + grid) * 8
    wh = (x[..., 2:4].sigmoid() * 2) ** 2 * 16
    return torch.cat((xy, wh, x[..., 4:].sigmoid()), -1).view(x.shape[0], -1, 10)


@peer(f("N", 4, 4, 16))
def distribution_focal_decode(x):
    return F.softmax(x, -1) @ torch.arange(16, dtype=x.dtype)


@peer(u("N", 5, grad=False), f("N", 5, 4, grad=False), grad=False)
def best_per_class(score, box):
    s, c = score.max(1)
    chosen = box[torch.arange(len(box)), c]
    order = s.argsort(descending=True, stable=True)
    return s[order], c[order], chosen[order]


@peer(u("N", grad=False), f("N", 4, grad=False), grad=False)
def keep_over_threshold(score, box):
    keep = score > 0.3
    return box[keep] * 2, score[keep] + 1


@peer(u("N", grad=False), f("N", 4, grad=False), grad=False)
def nms_matrix(score, box):
    order = score.argsort(descending=True, stable=True)
    x = corners(box[order])
    lt, rb = torch.max(x[:, None, :2], x[None, :, :2]), torch.min(x[:, None, 2:], x[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = (x[:, 2:] - x[:, :2]).prod(-1)
    iou = (inter / (area[:, None] + area - inter)).triu(1)
    decay = (1 - iou).clamp(min=0).amin(0)
    return score[order] * decay, order


@peer(u("N", grad=False), f("N", 4, grad=False), grad=False)
def nms_loop(score, box):
    x = corners(box)
    area = (x[:, 2:] - x[:, :2]).prod(-1)
    left = score.clone()
    kept = []
    for _ in range(3):
        at = left.argmax()
        kept.append(at)
        inter = (torch.min(x[at, 2:], x[:, 2:]) - torch.max(x[at, :2], x[:, :2])).clamp(min=0).prod(-1)
        left = torch.where(inter / (area + area[at] - inter) > 0.5, torch.full_like(left, -1), left)
        left[at] = -1
    return torch.stack(kept)


@peer(f("N", 4, grad=False), f(3, 4, grad=False), grad=False)
def assign_anchors(anchor, truth):
    d = (anchor[:, None, :2] - truth[None, :, :2]).pow(2).sum(-1)
    value, at = d.min(1)
    label = torch.full_like(at, -1)
    label[value < 1.0] = 0
    label = torch.where(value < 0.3, at + 1, label)
    return label, truth[at]


@peer(f("N", 3, 6, 6), f("N", 5, 2))
def sample_points(x, at):
    return F.grid_sample(x, at.tanh().unsqueeze(2), align_corners=False).squeeze(3)


@peer(f("N", 3, 6, 6), f("N", 2, 3))
def spatial_transformer(x, theta):
    grid = F.affine_grid(theta, [x.shape[0], 3, 6, 6], align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


@peer(f("N", 3, 6, 6), f("N", 2, 6, 6))
def warp_by_flow(x, flow):
    n, c, h, w = x.shape
    ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    gx = 2 * (xs + flow[:, 0]) / (w - 1) - 1
    gy = 2 * (ys + flow[:, 1]) / (h - 1) - 1
    return F.grid_sample(x, torch.stack((gx, gy), -1).to(x.dtype), padding_mode="border", align_corners=True)


@peer(f("N", 3, 4, 4), f("N", 3, 8, 8))
def pyramid_merge(top, side):
    return F.interpolate(top, scale_factor=2, mode="nearest") + side


@peer(f("N", 3, 4, 4))
def heatmap_peaks(x):
    x = x.sigmoid()
    peak = F.max_pool2d(x, 3, stride=1, padding=1)
    return x * (x == peak).to(x.dtype)


@peer(f("N", 5, 4, 4))
def soft_argmax(x):
    prob = x.flatten(2).softmax(-1)
    ys = torch.arange(16, dtype=x.dtype) // 4
    xs = torch.arange(16, dtype=x.dtype) % 4
    return torch.stack([(prob * xs).sum(-1), (prob * ys).sum(-1)], -1)


@peer(i(3, "N", 8), i(3, "N", 8), grad=False)
def confusion_matrix(pred, true):
    index = true.flatten() * 3 + pred.flatten()
    m = torch.bincount(index, minlength=9).view(3, 3).float()
    return m.diag() / (m.sum(0) + m.sum(1) - m.diag()).clamp(min=1)


@peer(b("N", 6, 6), b("N", 6, 6), grad=False)
def mask_iou(x, y):
    inter = (x & y).sum((1, 2))
    union = (x | y).sum((1, 2))
    return inter / union.clamp(min=1), (x ^ y).any(-1), (~x).all(-1)


@peer(p("N", 2), f("N", 2), f("N"))
def rotated_corners(size, centre, angle):
    cos, sin = angle.cos(), angle.sin()
    rot = torch.stack([cos, -sin, sin, cos], -1).view(-1, 2, 2)
    unit = torch.tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]], dtype=size.dtype)
    return (unit * size[:, None]) @ rot.transpose(1, 2) + centre[:, None]


@peer(f("N", 6), f("N", 6))
def matching_cost(x, y):
    cost_class = -x.softmax(-1)[:, [0, 2, 5]]
    cost_box = torch.cdist(x.double(), y.double(), p=1).to(x.dtype)
    return cost_class.sum(1)[:, None] + cost_box


@peer(f("N", 4, 6), f("N", 4, 6))
def points_in_frustum(x, y):
    inside = (x[..., 0] > -1) & (x[..., 0] < 1) & (x[..., 1].abs() <= 1)
    return torch.where(inside[..., None], y, y.new_zeros(())).sum(1) / inside.sum(1, keepdim=True).clamp(min=1)
