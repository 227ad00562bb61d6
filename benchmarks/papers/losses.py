"""Losses, as papers and their repositories write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_rows import Inputs, Row, Shape, like


def focal(x: Tensor, t: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    ce = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    p_t = p * t + (1 - p) * (1 - t)
    loss = ce * ((1 - p_t) ** 2)
    return ((0.25 * t + 0.75 * (1 - t)) * loss).mean()


def smooth_l1(x: Tensor, t: Tensor) -> Tensor:
    return F.smooth_l1_loss(x, t, beta=1 / 9, reduction="sum") / x.shape[0]


def dice(x: Tensor, t: Tensor) -> Tensor:
    p = torch.sigmoid(x).flatten(1)
    t = t.flatten(1)
    both, all_ = (p * t).sum(1), (p * p).sum(1) + (t * t).sum(1)
    return (1 - (2 * both + 1) / (all_ + 1)).mean()


def clip(logits: Tensor) -> Tensor:
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def triplet(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    near, far = (anchor - positive).pow(2).sum(1), (anchor - negative).pow(2).sum(1)
    return F.relu(near - far + 0.2).mean()


def label_smoothing(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, label_smoothing=0.1)


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    s, t = F.log_softmax(student / 4.0, dim=1), F.softmax(teacher / 4.0, dim=1)
    return F.kl_div(s, t, reduction="batchmean") * 16.0


def vae(recon: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def multilabel(x: Tensor, t: Tensor, weight: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, t, pos_weight=weight)


def giou(a: Tensor, b: Tensor) -> Tensor:
    x1, y1, x2, y2 = a.unbind(-1)
    u1, v1, u2, v2 = b.unbind(-1)
    w = (torch.min(x2, u2) - torch.max(x1, u1)).clamp(min=0)
    h = (torch.min(y2, v2) - torch.max(y1, v1)).clamp(min=0)
    both = w * h
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - both
    hull = (torch.max(x2, u2) - torch.min(x1, u1)) * (torch.max(y2, v2) - torch.min(y1, v1))
    return (1 - both / (union + 1e-7) + (hull - union) / (hull + 1e-7)).mean()


def charbonnier(x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt((x - y) ** 2 + 1e-6).mean()


def total_variation(x: Tensor) -> Tensor:
    across = torch.abs(x[:, :, :, 1:] - x[:, :, :, :-1]).sum()
    return across + torch.abs(x[:, :, 1:, :] - x[:, :, :-1, :]).sum()


def ppo(logp: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    ratio = torch.exp(logp - old)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    return -torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv).mean()


def z_loss(x: Tensor, t: Tensor) -> Tensor:
    lse = torch.logsumexp(x, -1)
    return (lse - x.gather(-1, t[:, None])[:, 0] + 1e-4 * lse * lse).mean()


def arcface(cosine: Tensor, label: Tensor) -> Tensor:
    sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(0, 1))
    phi = cosine * 0.8775825619 - sine * 0.4794255386
    phi = torch.where(cosine > -0.8775825619, phi, cosine - 0.2397127693)
    hot = F.one_hot(label, cosine.shape[1])
    return (hot * phi + (1.0 - hot) * cosine) * 64.0


def barlow(c: Tensor) -> Tensor:
    n = c.shape[0]
    on = torch.diagonal(c).add(-1).pow(2).sum()
    off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow(2).sum()
    return on + 0.0051 * off


def gan_hinge(real: Tensor, fake: Tensor) -> Tensor:
    return F.relu(1.0 - real).mean() + F.relu(1.0 + fake).mean()


def _binary(i: Inputs, s: Shape) -> tuple[Tensor, ...]:
    return i.normal(*s), i.mask(*s, share=0.1).float()


def _boxes(i: Inputs, n: int) -> Tensor:
    corner = i.uniform(n, 2)
    return torch.cat((corner, corner + i.uniform(n, 2)), 1)


ROWS: tuple[Row, ...] = (
    Row("focal", focal, _binary, ((8, 8000, 20),), memory_bound=False, source="RetinaNet; torchvision, focal_loss.py"),
    Row("smooth_l1", smooth_l1, like(2), ((65536, 4),), source="Fast R-CNN; torchvision, roi_heads.py"),
    Row("dice", dice, _binary, ((8, 512, 512),), memory_bound=False, source="V-Net: Dice loss"),
    Row("clip", clip, like(1), ((1024, 1024),), memory_bound=False, source="CLIP: contrastive loss"),
    Row("triplet", triplet, like(3), ((4096, 256),), source="FaceNet: triplet loss"),
    Row(
        "label_smoothing",
        label_smoothing,
        lambda i, s: (i.normal(*s), i.below(s[1], s[0])),
        ((256, 10000),),
        source="Inception v3: label smoothing",
    ),
    Row("distillation", distillation, like(2), ((256, 10000),), memory_bound=False, source="Hinton et al. 2015"),
    Row(
        "vae",
        vae,
        lambda i, s: (i.uniform(*s) * 0.6, i.mask(*s).float(), i.normal(s[0], 64), i.normal(s[0], 64)),
        ((512, 784),),
        memory_bound=False,
        source="pytorch/examples, vae/main.py",
    ),
    Row(
        "multilabel",
        multilabel,
        lambda i, s: (*_binary(i, s), i.uniform(s[-1])),
        ((1024, 1000),),
        memory_bound=False,
        source="torch.nn.BCEWithLogitsLoss, multi-label",
    ),
    Row(
        "giou", giou, lambda i, s: (_boxes(i, s[0]), _boxes(i, s[0])), ((100000,),), source="torchvision, giou_loss.py"
    ),
    Row("charbonnier", charbonnier, like(2), ((4, 3, 256, 256),), source="LapSRN: Charbonnier loss"),
    Row("total_variation", total_variation, like(1), ((4, 3, 512, 512),), source="Johnson et al. 2016"),
    Row(
        "ppo", ppo, lambda i, s: (i.normal(*s) * 0.1, i.normal(*s) * 0.1, i.normal(*s)), ((65536,),), source="PPO, ppo2"
    ),
    Row(
        "z_loss",
        z_loss,
        lambda i, s: (i.normal(*s), i.below(s[1], s[0])),
        ((256, 128256),),
        source="PaLM: z-loss, with Llama 3's vocabulary",
    ),
    Row(
        "arcface",
        arcface,
        lambda i, s: (torch.tanh(i.normal(*s)), i.below(s[1], s[0])),
        ((256, 10000),),
        source="ArcFace, metrics.py: ArcMarginProduct",
    ),
    Row("barlow", barlow, like(1), ((2048, 2048),), source="Barlow Twins, main.py: off_diagonal"),
    Row("gan_hinge", gan_hinge, like(2), ((8192,),), source="SAGAN, loss.py: hinge"),
)
