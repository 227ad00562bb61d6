"""Images, boxes, sound and quantised weights before and after the products."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_rows import Inputs, Row, Shape, like


def normalize_image(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    x = x.permute(0, 3, 1, 2).contiguous().float() / 255
    return (x - mean[:, None, None]) / std[:, None, None]


def to_image(x: Tensor) -> Tensor:
    x = (x / 2 + 0.5).clamp(0, 1)
    return (x.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).contiguous()


def rgb_to_ycbcr(image: Tensor) -> Tensor:
    r, g, b = image[:, 0], image[:, 1], image[:, 2]
    y = 0.299 * r + 0.587 * g + 0.114 * b
    return torch.stack((y, (b - y) * 0.564 + 0.5, (r - y) * 0.713 + 0.5), 1)


def adjust_contrast(image: Tensor) -> Tensor:
    gray = 0.2989 * image[:, 0] + 0.587 * image[:, 1] + 0.114 * image[:, 2]
    mean = gray.mean(dim=(-2, -1), keepdim=True).unsqueeze(1)
    return (0.7 * image + 0.3 * mean).clamp(0, 1)


def decode_boxes(rel: Tensor, boxes: Tensor) -> Tensor:
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    x, y = boxes[:, 0] + 0.5 * widths, boxes[:, 1] + 0.5 * heights
    dw, dh = (rel[:, i].clamp(max=math.log(1000.0 / 16)) for i in (2, 3))
    cx, cy = rel[:, 0] * widths + x, rel[:, 1] * heights + y
    w, h = torch.exp(dw) * widths * 0.5, torch.exp(dh) * heights * 0.5
    return torch.stack((cx - w, cy - h, cx + w, cy + h), dim=1)


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    area_a, area_b = ((t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1]) for t in (a, b))
    lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    return inter / (area_a[:, None] + area_b - inter)


def centernet_peaks(heat: Tensor) -> Tensor:
    heat = torch.sigmoid(heat)
    return heat * (F.max_pool2d(heat, 3, stride=1, padding=1) == heat).float()


def resnet_stem(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(F.batch_norm(x, mean, var, w, b)), 3, stride=2, padding=1)


def global_pool(x: Tensor) -> Tensor:
    return F.relu(x).mean((2, 3))


def fpn_merge(lateral: Tensor, top: Tensor) -> Tensor:
    return lateral + F.interpolate(top, scale_factor=2.0, mode="nearest")


def segmentation(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, place = F.softmax(logits, dim=1).max(1)
    return best, place.to(torch.uint8)


def ddim_step(x: Tensor, eps: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    a = alpha[:, None, None, None]
    start = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-1, 1)
    return (a * 0.98).sqrt() * start + (1 - a * 0.98).sqrt() * eps, start


def mixup(x: Tensor, order: Tensor, lam: Tensor) -> Tensor:
    lam = lam[:, None, None, None]
    return lam * x + (1 - lam) * x[order]


def stft_power(real: Tensor, imag: Tensor) -> Tensor:
    return torch.sqrt(real.pow(2) + imag.pow(2) + 1e-9)


def whisper_log_mel(mel: Tensor) -> Tensor:
    spec = torch.clamp(mel, min=1e-10).log10()
    spec = torch.maximum(spec, spec.max() - 8.0)
    return (spec + 4.0) / 4.0


def mu_law(x: Tensor) -> Tensor:
    y = torch.sign(x) * torch.log1p(255.0 * torch.abs(x)) / math.log1p(255.0)
    return ((y + 1) / 2 * 255 + 0.5).to(torch.int64)


def spec_augment(x: Tensor, start: Tensor, width: Tensor) -> Tensor:
    places = torch.arange(x.shape[-1], device=x.device)
    mask = (places >= start[:, None, None]) & (places < (start + width)[:, None, None])
    return x.masked_fill(mask, 0.0)


def fake_quant(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale[:, None]), -128, 127) * scale[:, None]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127.0
    return torch.round(x / scale).to(torch.int8), scale


def dequantize_int4(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    q = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float()
    groups = q.view(q.shape[0], -1, 128)
    return ((groups - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2)


def _boxes(i: Inputs, n: int) -> Tensor:
    corner = i.uniform(n, 2)
    return torch.cat((corner, corner + i.uniform(n, 2)), 1)


def _bytes(i: Inputs, s: Shape) -> tuple[Tensor, ...]:
    return i.below(256, *s).to(torch.uint8), i.uniform(3), i.uniform(3)


def _stem(i: Inputs, s: Shape) -> tuple[Tensor, ...]:
    c = s[1]
    return i.normal(*s), i.uniform(c), i.normal(c), i.normal(c), i.uniform(c)


def _packed(i: Inputs, s: Shape) -> tuple[Tensor, ...]:
    groups = s[1] * 2 // 128
    return i.below(256, *s).to(torch.uint8), i.uniform(s[0], groups), i.below(16, s[0], groups).float()


ROWS: tuple[Row, ...] = (
    Row("normalize_image", normalize_image, _bytes, ((8, 224, 224, 3),), source="torchvision: ToTensor, Normalize"),
    Row("to_image", to_image, like(1), ((4, 3, 512, 512),), source="diffusers, image_processor.py"),
    Row("rgb_to_ycbcr", rgb_to_ycbcr, like(1), ((8, 3, 256, 256),), source="kornia, ycbcr.py"),
    Row("adjust_contrast", adjust_contrast, like(1), ((8, 3, 224, 224),), source="torchvision, _functional_tensor.py"),
    Row(
        "decode_boxes",
        decode_boxes,
        lambda i, s: (i.normal(s[0], 4), _boxes(i, s[0])),
        ((65536,),),
        source="torchvision, _utils.py: BoxCoder",
    ),
    Row(
        "box_iou", box_iou, lambda i, s: tuple(_boxes(i, n) for n in s), ((256, 4096),), source="torchvision, boxes.py"
    ),
    Row(
        "centernet_peaks",
        centernet_peaks,
        like(1),
        ((4, 80, 64, 64),),
        memory_bound=False,
        source="CenterNet, decode.py",
    ),
    Row("resnet_stem", resnet_stem, _stem, ((8, 64, 112, 112),), source="ResNet: stem, inference"),
    Row("global_pool", global_pool, like(1), ((16, 512, 14, 14),), source="ResNet: global average pooling"),
    Row(
        "fpn_merge",
        fpn_merge,
        lambda i, s: (i.normal(*s), i.normal(s[0], s[1], s[2] // 2, s[3] // 2)),
        ((2, 256, 64, 64),),
        source="FPN, feature_pyramid_network.py",
    ),
    Row(
        "segmentation", segmentation, like(1), ((2, 21, 256, 256),), memory_bound=False, source="DeepLabV3: prediction"
    ),
    Row(
        "ddim_step",
        ddim_step,
        lambda i, s: (i.normal(*s), i.normal(*s), i.uniform(s[0]) * 0.6),
        ((4, 4, 128, 128),),
        source="diffusers, scheduling_ddim.py",
    ),
    Row(
        "mixup",
        mixup,
        lambda i, s: (i.normal(*s), torch.randperm(s[0], generator=i.generator).to(i.device), i.uniform(s[0])),
        ((32, 3, 160, 160),),
        source="mixup, train.py",
    ),
    Row("stft_power", stft_power, like(2), ((8, 513, 256),), source="VITS, mel_processing.py: spectrogram"),
    Row(
        "whisper_log_mel",
        whisper_log_mel,
        lambda i, s: (i.uniform(*s),),
        ((80, 3000),),
        memory_bound=False,
        source="Whisper, audio.py: log_mel_spectrogram",
    ),
    Row(
        "mu_law",
        mu_law,
        lambda i, s: (torch.tanh(i.normal(*s)),),
        ((8, 32768),),
        memory_bound=False,
        source="WaveNet; torchaudio, functional.py: mu_law_encoding",
    ),
    Row(
        "spec_augment",
        spec_augment,
        lambda i, s: (i.normal(*s), i.below(800, s[0]), i.below(100, s[0])),
        ((16, 80, 1000),),
        source="SpecAugment: time masks",
    ),
    Row(
        "fake_quant",
        fake_quant,
        lambda i, s: (i.normal(*s), i.uniform(s[0])),
        ((768, 3072),),
        source="Jacob et al. 2018",
    ),
    Row("quantize_rows", quantize_rows, like(1), ((512, 4096),), source="LLM.int8(): row-wise absmax"),
    Row("dequantize_int4", dequantize_int4, _packed, ((2048, 1024),), source="AWQ, quantizer.py: groups of 128"),
)
