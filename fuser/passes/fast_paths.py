"""The decomposition of the operator that `nn.TransformerEncoderLayer` calls in inference.

It is one call of several products, in which eager fuses nothing. Taken apart, its norms, activations, biases and
residuals become kernels, and attention is torch's fused one. Source: Vaswani et al. 2017, "Attention Is All You Need".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, width / heads)."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def _merged(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_heads`."""
    batch, heads, tokens, width = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads * width)


def encoder_layer(
    src: torch.Tensor, embed_dim: int, num_heads: int, qkv_weight: torch.Tensor, qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor, proj_bias: torch.Tensor, use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: torch.Tensor, norm_bias_1: torch.Tensor, norm_weight_2: torch.Tensor, norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor, ffn_bias_1: torch.Tensor, ffn_weight_2: torch.Tensor, ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """`aten._transformer_encoder_layer_fwd` as its parts.

    NotImplemented, so that it stays whole: with a mask; on a GPU, where eager's GELU is the one by tanh; and in 16-bit
    floats, where torch's fused attention takes longer than the written one.
    """
    if mask is not None or src.device.type != "cpu" or src.dim() != 3 or src.dtype.itemsize < 4:
        return NotImplemented

    def first(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    projected = F.linear(first(src) if norm_first else src, qkv_weight, qkv_bias)
    q, k, v = (_heads(x, num_heads) for x in projected.chunk(3, -1))
    attended = F.scaled_dot_product_attention(q, k, v)
    x = src + F.linear(_merged(attended), proj_weight, proj_bias)
    x = x if norm_first else first(x)
    inner = F.linear(second(x) if norm_first else x, ffn_weight_1, ffn_bias_1)
    inner = F.gelu(inner) if use_gelu else F.relu(inner)
    x = x + F.linear(inner, ffn_weight_2, ffn_bias_2)
    return x if norm_first else second(x)


TABLE = {torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer}
