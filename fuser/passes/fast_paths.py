"""Decomposes the operator that `nn.TransformerEncoderLayer` calls in inference.

It is one call of several products, in which eager fuses nothing. Decomposed, its norms, activations, biases and
residuals become kernels, and attention is torch's fused one. Source: Vaswani et al. 2017, "Attention Is All You Need".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fuser import targets
from fuser.attention.products import product_dtype


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, width / heads)."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def _merged(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_heads`."""
    batch, heads, tokens, width = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads * width)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention; as products if 16-bit products are fast, as in the whole operator."""
    if q.dtype.itemsize >= 4 or product_dtype(q.dtype) is not q.dtype:
        return F.scaled_dot_product_attention(q, k, v)
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def encoder_layer(
    src: torch.Tensor, embed_dim: int, num_heads: int, qkv_weight: torch.Tensor, qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor, proj_bias: torch.Tensor, use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: torch.Tensor, norm_bias_1: torch.Tensor, norm_weight_2: torch.Tensor, norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor, ffn_bias_1: torch.Tensor, ffn_weight_2: torch.Tensor, ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """`aten._transformer_encoder_layer_fwd`, decomposed.

    NotImplemented, so that the operator stays whole, for a mask, and on a GPU, where eager's GELU is the tanh form.
    """
    if mask is not None or not targets.like_host(src.device) or src.dim() != 3:
        return NotImplemented

    def first(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    projected = F.linear(first(src) if norm_first else src, qkv_weight, qkv_bias)
    q, k, v = (_heads(x, num_heads) for x in projected.chunk(3, -1))
    attended = _attended(q, k, v)
    x = src + F.linear(_merged(attended), proj_weight, proj_bias)
    x = x if norm_first else first(x)
    inner = F.linear(second(x) if norm_first else x, ffn_weight_1, ffn_bias_1)
    inner = F.gelu(inner) if use_gelu else F.relu(inner)
    x = x + F.linear(inner, ffn_weight_2, ffn_bias_2)
    return x if norm_first else second(x)

