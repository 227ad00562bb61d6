"""Norms, gates and activations between the products of public models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_rows import BF16, Inputs, Row, Shape, like


def convnext_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-6)
    return w[:, None, None] * x + b[:, None, None]


def convnext_grn(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
    nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
    return gamma * (x * nx) + beta + x


def llama_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def gemma_norm(x: Tensor, w: Tensor) -> Tensor:
    out = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + w.float())).type_as(x)


def resnet_block_norm(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.silu(F.group_norm(x + t[:, :, None, None], 32, w, b))


def nnunet_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.leaky_relu(F.instance_norm(x, weight=w, bias=b), 0.01)


def adain(content: Tensor, style: Tensor) -> Tensor:
    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        n, c = x.shape[:2]
        flat = x.view(n, c, -1)
        return flat.mean(2).view(n, c, 1, 1), (flat.var(2) + 1e-5).sqrt().view(n, c, 1, 1)

    mean, std = moments(content)
    style_mean, style_std = moments(style)
    return (content - mean) / std * style_std + style_mean


def resnet_train_norm(x: Tensor, w: Tensor, b: Tensor, identity: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, training=True) + identity)


def dit_modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=1e-6) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def mobilenet_excite(x: Tensor, s: Tensor) -> Tensor:
    return F.hardswish(x * F.hardsigmoid(s)[:, :, None, None])


def yolo_mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def mobilenet_hardswish(x: Tensor) -> Tensor:
    return x * F.relu6(x + 3) / 6


def llama_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def diffusers_geglu(x: Tensor) -> Tensor:
    h, gate = x.chunk(2, dim=-1)
    return h * F.gelu(gate)


def gpt2_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def t5_gated_gelu(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh") * y


def wavenet_gate(x: Tensor, skip: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return torch.tanh(a) * torch.sigmoid(b) + skip


def conformer_glu(x: Tensor) -> Tensor:
    return F.silu(F.glu(x, 1))


def gru_cell(gi: Tensor, gh: Tensor, h: Tensor) -> Tensor:
    i_r, i_z, i_n = gi.chunk(3, 1)
    h_r, h_z, h_n = gh.chunk(3, 1)
    z = torch.sigmoid(i_z + h_z)
    n = torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)
    return n + z * (h - n)


def highway(t: Tensor, h: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(t - 2.0)
    return gate * F.relu(h) + (1 - gate) * x


def layer_scale(x: Tensor, y: Tensor, gamma: Tensor, keep: Tensor) -> Tensor:
    return x + y * gamma * keep[:, None, None] / 0.9


def mamba_gate(y: Tensor, x: Tensor, z: Tensor, d: Tensor, dt: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return (y + x * d) * F.silu(z), F.softplus(dt + bias)


def esrgan_shuffle(x: Tensor, slope: Tensor) -> Tensor:
    return F.prelu(F.pixel_shuffle(x, 2), slope)


def shufflenet_shuffle(x: Tensor, y: Tensor) -> Tensor:
    out = torch.cat((x, F.relu(y)), 1)
    n, c, h, w = out.shape
    return out.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def temporal_shift(x: Tensor) -> Tensor:
    nt, c, h, w = x.shape
    x = x.view(nt // 8, 8, c, h, w)
    fold = c // 8
    left = F.pad(x[:, 1:, :fold], (0, 0, 0, 0, 0, 0, 0, 1))
    right = F.pad(x[:, :-1, fold : 2 * fold], (0, 0, 0, 0, 0, 0, 1, 0))
    return torch.cat((left, right, x[:, :, 2 * fold :]), 2).view(nt, c, h, w)


def _channels(i: Inputs, s: Shape) -> tuple[Tensor, ...]:
    return i.normal(*s), i.uniform(s[1]), i.normal(s[1])


def _last(i: Inputs, s: Shape) -> tuple[Tensor, ...]:
    return i.normal(*s), i.uniform(s[-1]), i.normal(s[-1])


def _shuffled(i: Inputs, s: Shape) -> tuple[Tensor, ...]:
    return i.normal(*s), i.normal(*s)


ROWS: tuple[Row, ...] = (
    Row("convnext_norm", convnext_norm, _channels, ((8, 96, 56, 56),), source="ConvNeXt, convnext.py: LayerNorm"),
    Row("convnext_grn", convnext_grn, _last, ((8, 28, 28, 384),), source="ConvNeXt V2, utils.py: GRN"),
    Row(
        "llama_norm",
        llama_norm,
        lambda i, s: (i.normal(*s, dtype=BF16), i.normal(s[-1], dtype=BF16)),
        ((8192, 8192),),
        source="transformers, modeling_llama.py: LlamaRMSNorm",
    ),
    Row(
        "gemma_norm",
        gemma_norm,
        lambda i, s: (i.normal(*s, dtype=BF16), i.normal(s[-1], dtype=BF16)),
        ((1024, 2304),),
        source="transformers, modeling_gemma2.py: Gemma2RMSNorm",
    ),
    Row(
        "resnet_block_norm",
        resnet_block_norm,
        lambda i, s: (*_channels(i, s), i.normal(*s[:2])),
        ((2, 320, 64, 64),),
        source="Stable Diffusion, resnet.py: ResnetBlock2D",
    ),
    Row("nnunet_norm", nnunet_norm, _channels, ((2, 32, 16, 64, 64),), source="nnU-Net: InstanceNorm3d, LeakyReLU"),
    Row("adain", adain, like(2), ((4, 512, 32, 32),), source="AdaIN style transfer, function.py"),
    Row(
        "resnet_train_norm",
        resnet_train_norm,
        lambda i, s: (*_channels(i, s), i.normal(*s)),
        ((32, 64, 28, 28),),
        source="ResNet, resnet.py: BasicBlock, training",
    ),
    Row(
        "dit_modulate",
        dit_modulate,
        lambda i, s: (i.normal(*s), i.normal(s[0], s[2]), i.normal(s[0], s[2])),
        ((8, 256, 1152),),
        source="DiT, models.py: modulate",
    ),
    Row(
        "mobilenet_excite",
        mobilenet_excite,
        lambda i, s: (i.normal(*s), i.normal(*s[:2])),
        ((16, 120, 28, 28),),
        source="MobileNetV3: squeeze and excitation",
    ),
    Row("yolo_mish", yolo_mish, like(1), ((8, 64, 64, 64),), memory_bound=False, source="YOLOv4: Mish"),
    Row("mobilenet_hardswish", mobilenet_hardswish, like(1), ((16, 16, 112, 112),), source="MobileNetV3: h-swish"),
    Row(
        "llama_gate",
        llama_gate,
        like(2, BF16),
        ((512, 11008),),
        memory_bound=False,
        source="transformers, modeling_llama.py: LlamaMLP",
    ),
    Row(
        "diffusers_geglu",
        diffusers_geglu,
        like(1),
        ((2, 1024, 2560),),
        memory_bound=False,
        source="diffusers, activations.py: GEGLU",
    ),
    Row("gpt2_gelu", gpt2_gelu, like(1), ((512, 3072),), memory_bound=False, source="GPT-2, activations.py: NewGELU"),
    Row("t5_gated_gelu", t5_gated_gelu, like(2), ((512, 2816),), memory_bound=False, source="T5 v1.1, modeling_t5.py"),
    Row(
        "wavenet_gate",
        wavenet_gate,
        lambda i, s: (i.normal(*s), i.normal(s[0], s[1] // 2, s[2])),
        ((8, 128, 4096),),
        memory_bound=False,
        source="WaveNet: gated activation",
    ),
    Row(
        "conformer_glu",
        conformer_glu,
        like(1),
        ((16, 512, 500),),
        memory_bound=False,
        source="Conformer, convolution.py",
    ),
    Row(
        "gru_cell",
        gru_cell,
        lambda i, s: (i.normal(s[0], 3 * s[1]), i.normal(s[0], 3 * s[1]), i.normal(*s)),
        ((256, 512),),
        memory_bound=False,
        source="Cho et al. 2014: GRU",
    ),
    Row("highway", highway, like(3), ((256, 1024),), memory_bound=False, source="Highway networks"),
    Row(
        "layer_scale",
        layer_scale,
        lambda i, s: (i.normal(*s), i.normal(*s), i.normal(s[-1]), i.mask(s[0]).float()),
        ((8, 257, 768),),
        source="DINOv2, layer_scale.py and drop_path.py",
    ),
    Row(
        "mamba_gate",
        mamba_gate,
        lambda i, s: (*(i.normal(*s) for _ in range(3)), i.normal(s[-1]), i.normal(*s), i.normal(s[-1])),
        ((1024, 1536),),
        memory_bound=False,
        source="Mamba, selective_scan_interface.py",
    ),
    Row(
        "esrgan_shuffle",
        esrgan_shuffle,
        lambda i, s: (i.normal(*s), i.uniform(s[1] // 4)),
        ((4, 256, 48, 48),),
        source="SRResNet: pixel shuffle, PReLU",
    ),
    Row(
        "shufflenet_shuffle",
        shufflenet_shuffle,
        _shuffled,
        ((16, 58, 28, 28),),
        source="ShuffleNet V2: channel shuffle",
    ),
    Row("temporal_shift", temporal_shift, like(1), ((32, 64, 28, 28),), source="TSM, temporal_shift.py"),
)
