"""Steps of optimisers, and gradients of norms and activations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_rows import Inputs, Row, Shape, like

aten = torch.ops.aten


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    p.mul_(1 - 1e-5)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    denom = (v.sqrt() / 0.5).add_(1e-8)
    p.addcdiv_(m, denom, value=-1e-3)


def adam_functional(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * (g * g)
    return p - 1e-3 * (m / 0.9) / (torch.sqrt(v / 0.5) + 1e-8), m, v


def lion(p: Tensor, g: Tensor, m: Tensor) -> None:
    p.mul_(1 - 1e-4)
    p.add_(torch.sign(m * 0.9 + g * 0.1), alpha=-1e-4)
    m.mul_(0.99).add_(g, alpha=0.01)


def sgd_nesterov(p: Tensor, g: Tensor, buf: Tensor) -> None:
    g = g.add(p, alpha=1e-4)
    buf.mul_(0.9).add_(g)
    p.add_(g.add(buf, alpha=0.9), alpha=-0.1)


def adafactor(g: Tensor, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = g.pow(2) + 1e-30
    row = row * 0.99 + square.mean(-1) * 0.01
    col = col * 0.99 + square.mean(-2) * 0.01
    update = g * (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * col.rsqrt().unsqueeze(-2)
    return update, row, col


def lamb(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    step = m / (v.sqrt() + 1e-6) + 0.01 * p
    ratio = p.pow(2).sum().sqrt().clamp(0, 10) / step.pow(2).sum().sqrt()
    return p - 1e-3 * ratio * step


def mean_teacher(teacher: Tensor, student: Tensor) -> None:
    teacher.mul_(0.999).add_(student, alpha=0.001)


def clip_grad_norm(g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.sqrt(g.pow(2).sum() + h.pow(2).sum())
    scale = torch.clamp(1.0 / (total + 1e-6), max=1.0)
    return g * scale, h * scale


def layer_norm_grad(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor) -> Any:
    return aten.native_layer_norm_backward(dy, x, [x.shape[-1]], mean, rstd, w, b, [True, True, True])


def rms_norm_grad(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    m = dy * w
    dx = rstd * m - rstd.pow(3) / x.shape[-1] * (m * x).sum(-1, keepdim=True) * x
    return dx, (dy * (x * rstd)).sum(0)


def group_norm_grad(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    n, c, h, width = x.shape
    return aten.native_group_norm_backward(dy, x, mean, rstd, w, n, c, h * width, 32, [True, True, True])


def batch_norm_grad(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    dy = torch.where(x > 0, dy, 0.0)
    return aten.native_batch_norm_backward(dy, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True])


def softmax_grad(dy: Tensor, y: Tensor) -> Tensor:
    return (aten._softmax_backward_data(dy, y, -1, torch.float32)) * 0.125


def gelu_grad(dy: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(dy, x, approximate="tanh")


def swiglu_grad(dc: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    sig = torch.sigmoid(a)
    silu = a * sig
    return dc * (silu * (1 - sig) + sig) * b, dc * silu


def cross_entropy_grad(x: Tensor, t: Tensor) -> Tensor:
    p = torch.softmax(x, -1)
    places = torch.arange(x.shape[1], device=x.device)
    return (p - (places == t[:, None]).float()) / x.shape[0]


def _adam(i: Inputs, s: Shape) -> tuple[Any, ...]:
    return i.normal(*s), i.normal(*s), i.normal(*s), i.uniform(*s)


def _layer(i: Inputs, s: Shape) -> tuple[Any, ...]:
    x = i.normal(*s)
    var, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return i.normal(*s), x, mean, (var + 1e-5).rsqrt(), i.uniform(s[-1]), i.normal(s[-1])


def _group(i: Inputs, s: Shape) -> tuple[Any, ...]:
    x = i.normal(*s)
    var, mean = torch.var_mean(x.view(s[0], 32, -1), -1, correction=0)
    return i.normal(*s), x, mean, (var + 1e-5).rsqrt(), i.uniform(s[1])


def _batch(i: Inputs, s: Shape) -> tuple[Any, ...]:
    x = i.normal(*s)
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return i.normal(*s), x, mean, (var + 1e-5).rsqrt(), i.uniform(s[1])


ROWS: tuple[Row, ...] = (
    Row("adamw", adamw, _adam, ((2359296,),), mutates=(0, 2, 3), source="torch.optim, adamw.py: _single_tensor_adamw"),
    Row("adam_functional", adam_functional, _adam, ((1 << 20,),), source="optax, transform.py: scale_by_adam"),
    Row("lion", lion, like(3), ((589824,),), mutates=(0, 2), source="Lion, lion_pytorch.py"),
    Row("sgd_nesterov", sgd_nesterov, like(3), ((262144,),), mutates=(0, 2), source="torch.optim, sgd.py"),
    Row(
        "adafactor",
        adafactor,
        lambda i, s: (i.normal(*s), i.uniform(s[0]), i.uniform(s[1])),
        ((1024, 1024),),
        source="transformers, optimization.py: Adafactor",
    ),
    Row("lamb", lamb, lambda i, s: (*like(2)(i, s), i.uniform(*s)), ((1 << 20,),), source="LAMB, pytorch-lamb"),
    Row("mean_teacher", mean_teacher, like(2), ((4 << 20,),), mutates=(0,), source="Mean Teacher: EMA of weights"),
    Row("clip_grad_norm", clip_grad_norm, like(2), ((1024, 768),), source="torch.nn.utils, clip_grad.py"),
    Row("layer_norm_grad", layer_norm_grad, _layer, ((1024, 768),), source="BERT: gradients of LayerNorm"),
    Row(
        "rms_norm_grad",
        rms_norm_grad,
        lambda i, s: (i.normal(*s), i.normal(*s), i.uniform(s[-1]), i.uniform(s[0], 1)),
        ((1024, 2048),),
        source="Liger, rms_norm.py: backward",
    ),
    Row(
        "group_norm_grad",
        group_norm_grad,
        _group,
        ((4, 128, 32, 32),),
        source="Stable Diffusion: GroupNorm's gradients",
    ),
    Row("batch_norm_grad", batch_norm_grad, _batch, ((16, 64, 32, 32),), source="ResNet: gradients of ReLU, BatchNorm"),
    Row(
        "softmax_grad",
        softmax_grad,
        lambda i, s: (i.normal(*s), torch.softmax(i.normal(*s), -1)),
        ((4, 12, 256, 256),),
        source="attention: gradient of scores",
    ),
    Row("gelu_grad", gelu_grad, like(2), ((512, 3072),), memory_bound=False, source="GPT-2: gradient of GELU"),
    Row("swiglu_grad", swiglu_grad, like(3), ((512, 4096),), memory_bound=False, source="Liger, swiglu.py: backward"),
    Row(
        "cross_entropy_grad",
        cross_entropy_grad,
        lambda i, s: (i.normal(*s) * math.sqrt(2), i.below(s[1], s[0])),
        ((64, 32000),),
        source="Liger, cross_entropy.py: gradient of logits",
    ),
)
