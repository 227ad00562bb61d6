"""The models of the `models` suite: plain torch, random weights from a seed, nothing downloaded.

GPT-2 is examples/gpt2.py. Each builder returns (module in eval mode, inputs); `quick` shrinks everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt2 import GPT2Config
from examples.gpt2 import build as build_gpt2

Built = tuple[nn.Module, tuple[Tensor, ...]]


def _heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, width / heads)."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    """The inverse of `_heads`."""
    return x.transpose(1, 2).flatten(2)


class RMSNorm(nn.Module):
    """Scale by the root mean square of the last dimension, as Llama and T5 do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class BertLayer(nn.Module):
    """Attention and MLP with the norm behind each residual, as in BERT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (_heads(f(x), self.heads) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(self.out(_merge(attended)) + x)
        return self.norm2(self.down(F.gelu(self.up(x))) + x)


class Bert(nn.Module):
    """Ids, segments and a padding mask (batch, tokens) to masked-word logits."""

    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.words, self.positions, self.segments = (nn.Embedding(n, width) for n in (words, 512, 2))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.head_bias = nn.Parameter(torch.zeros(words))

    def forward(self, ids: Tensor, segments: Tensor, padding: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.segments(segments) + self.positions(positions))
        mask = (1.0 - padding[:, None, None, :].to(x.dtype)) * -1e9
        for layer in self.layers:
            x = layer(x, mask)
        x = self.head_norm(F.gelu(self.transform(x)))
        return F.linear(x, self.words.weight, self.head_bias)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class LlamaLayer(nn.Module):
    """RMSNorm, rotary grouped-query attention, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, each = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * each, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention, each of `groups` keys and values shared by several heads."""
        q = _rotate(_heads(self.query(x), self.heads), cos, sin)
        k = _rotate(_heads(self.key(x), self.groups), cos, sin)
        v = _heads(self.value(x), self.groups)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        return self.out(_merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Ids (batch, tokens) to logits."""

    def __init__(self, layers: int, width: int, heads: int, groups: int, hidden: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, groups, hidden) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, words, bias=False)
        each = width // heads
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, each, 2) / each))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), self.frequencies)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def relative_buckets(tokens: int, buckets: int, furthest: int, device: torch.device) -> Tensor:
    """T5's bucket of each (query, key) distance, both directions (Raffel et al. 2020, section 2.1)."""
    at = torch.arange(tokens, device=device)
    distance = at[None, :] - at[:, None]
    half = buckets // 2
    side = (distance > 0).to(torch.long) * half
    distance = distance.abs()
    exact = half // 2
    scaled = torch.log(distance.clamp(min=1).float() / exact) / math.log(furthest / exact) * (half - exact)
    far = (exact + scaled.to(torch.long)).clamp(max=half - 1)
    return side + torch.where(distance < exact, distance, far)


class T5Layer(nn.Module):
    """RMSNorm before attention with a position bias, and before a ReLU MLP."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (_heads(f(h), self.heads) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) + bias
        weights = torch.softmax(scores.float(), -1).to(scores.dtype)
        x = x + self.out(_merge(weights @ v))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class T5Encoder(nn.Module):
    """Ids and a padding mask (batch, tokens) to hidden states."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, words: int) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(words, width), nn.Embedding(32, heads)
        self.layers = nn.ModuleList(T5Layer(width, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.words(ids)
        bias = self.bias(relative_buckets(ids.shape[1], 32, 128, ids.device)).permute(2, 0, 1)[None]
        bias = bias + (1.0 - padding[:, None, None, :].to(x.dtype)) * -1e9
        for layer in self.layers:
            x = layer(x, bias)
        return self.norm(x)


class ViTLayer(nn.Module):
    """Layer norms before attention, whose queries, keys and values are one product, and before a GELU MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.together, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(t, self.heads) for t in self.together(self.norm1(x)).chunk(3, -1))
        x = x + self.out(_merge(F.scaled_dot_product_attention(q, k, v)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Images (batch, 3, size, size) to logits, by patches and a token for the class (Dosovitskiy et al. 2020)."""

    def __init__(self, layers: int, width: int, heads: int, size: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(ViTLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch norms and a shortcut (He et al. 2015)."""

    def __init__(self, channels: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = F.relu(self.norm2(self.conv2(out)))
        return F.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to logits."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            for i in range(depth):
                blocks.append(Bottleneck(channels, inner, 4 * inner, 2 if stage and not i else 1))
                channels = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def _settle(model: nn.Module) -> nn.Module:
    """Random but tame weights, eval mode: small normal matrices, batch norms with statistics of their own."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.0)
    return model.eval()


def _padding(batch: int, tokens: int) -> Tensor:
    """1 for words, 0 for padding: each later sentence a little shorter."""
    lengths = tokens - torch.arange(batch) * (tokens // 8)
    return (torch.arange(tokens)[None, :] < lengths[:, None]).to(torch.long)


def gpt2(quick: bool) -> Built:
    """12 layers of 768, 12 heads, 2 x 256 tokens, 50,257 words."""
    config = GPT2Config(2, 64, 4, 500, 64) if quick else GPT2Config()
    model, ids = build_gpt2(config, tokens=32 if quick else 256)
    return model, (ids,)


def bert(quick: bool) -> Built:
    """12 layers of 768, 12 heads, 2 x 256 tokens, 30,522 words."""
    torch.manual_seed(0)
    layers, width, heads, words, tokens = (2, 64, 4, 500, 32) if quick else (12, 768, 12, 30522, 256)
    ids, segments = torch.randint(words, (2, tokens)), torch.arange(tokens).expand(2, tokens) // (tokens // 2)
    return _settle(Bert(layers, width, heads, words)), (ids, segments.contiguous(), _padding(2, tokens))


def llama(quick: bool) -> Built:
    """6 layers of 512, 8 heads on 4 groups, SwiGLU of 1,376, 2 x 256 tokens, 32,000 words."""
    torch.manual_seed(0)
    sizes, tokens = ((2, 64, 4, 2, 176, 500), 32) if quick else ((6, 512, 8, 4, 1376, 32000), 256)
    return _settle(Llama(*sizes)), (torch.randint(sizes[-1], (2, tokens)),)


def t5(quick: bool) -> Built:
    """The encoder: 6 layers of 512, 8 heads, MLP of 2,048, 2 x 256 tokens, 32,128 words."""
    torch.manual_seed(0)
    sizes, tokens = ((2, 64, 4, 128, 500), 32) if quick else ((6, 512, 8, 2048, 32128), 256)
    return _settle(T5Encoder(*sizes)), (torch.randint(sizes[-1], (2, tokens)), _padding(2, tokens))


def vit(quick: bool) -> Built:
    """ViT-B/16 cut to 6 layers of 768, 12 heads: 4 images of 224 x 224, 197 tokens each."""
    torch.manual_seed(0)
    model, size = (ViT(2, 64, 4, 32, 8, 10), 32) if quick else (ViT(6, 768, 12, 224, 16, 1000), 224)
    return _settle(model), (torch.randn(2 if quick else 4, 3, size, size),)


def resnet50(quick: bool) -> Built:
    """ResNet-50, 4 images of 224 x 224."""
    torch.manual_seed(0)
    model = ResNet((1, 1, 1, 1), 8, 10) if quick else ResNet((3, 4, 6, 3), 64, 1000)
    return _settle(model), (torch.randn(2, 3, 64, 64) if quick else torch.randn(4, 3, 224, 224),)


MODELS: dict[str, Callable[[bool], Built]] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "resnet50": resnet50,
}


def build(name: str, quick: bool, device: str) -> Built:
    """A model and its inputs on a device, the same in every process."""
    model, inputs = MODELS[name](quick)
    return model.to(device), tuple(t.to(device) for t in inputs)
