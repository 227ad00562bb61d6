"""Positions, masks and scores of attention, and what samples from logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_rows import BF16, Inputs, Row, Shape


def gptj_rope(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    sin, cos = sin[None, :, None, :].repeat_interleave(2, 3), cos[None, :, None, :].repeat_interleave(2, 3)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def llama_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate_half(x: Tensor) -> Tensor:
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def bloom_scores(scores: Tensor, slopes: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1], dtype=torch.float32, device=scores.device)
    biased = scores * 0.125 + slopes[:, None, None] * places
    return torch.softmax(biased.masked_fill(mask, torch.finfo(torch.float32).min), dim=-1)


def swin_scores(scores: Tensor, table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    windows, heads, n, _ = scores.shape
    bias = table[index.view(-1)].view(n, n, heads).permute(2, 0, 1)
    scores = scores + bias.unsqueeze(0)
    few = mask.shape[0]
    scores = scores.view(windows // few, few, heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
    return torch.softmax(scores.view(-1, heads, n, n), dim=-1)


def t5_scores(scores: Tensor, bias: Tensor) -> Tensor:
    return F.softmax((scores + bias).float(), dim=-1).type_as(scores)


def gpt2_scores(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    causal = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
    scores = torch.where(causal, scores / 8.0, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1)


def linear_attention_map(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q, k, k.sum(dim=-2)


def performer_map(dash: Tensor, data: Tensor) -> Tensor:
    diagonal = (data**2).sum(-1, keepdim=True) / 16.0
    return 0.0625 * (torch.exp(dash - diagonal - dash.amax(dim=-1, keepdim=True)) + 1e-4)


def ddpm_positions(t: Tensor, freqs: Tensor) -> Tensor:
    angles = t[:, None].float() * freqs[None]
    return torch.cat((torch.cos(angles), torch.sin(angles)), dim=-1)


def nerf_positions(x: Tensor) -> Tensor:
    parts = [x]
    for k in range(6):
        parts += [torch.sin(x * 2.0**k), torch.cos(x * 2.0**k)]
    return torch.cat(parts, -1)


def bert_embeddings(words: Tensor, kinds: Tensor, *w: Tensor) -> Tensor:
    places = torch.arange(words.shape[1], device=words.device)
    total = F.embedding(words, w[0]) + F.embedding(kinds, w[1]) + F.embedding(places, w[2])
    return F.layer_norm(total, (total.shape[-1],), w[3], w[4], 1e-12)


def swin_windows(x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    x = torch.roll(x, shifts=(-3, -3), dims=(1, 2))
    return x.view(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)


def sbert_pooling(x: Tensor, mask: Tensor) -> Tensor:
    wide = mask.unsqueeze(-1).float()
    pooled = (x * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
    return F.normalize(pooled, p=2.0, dim=1)


def top_p(ordered: Tensor) -> Tensor:
    remove = ordered.softmax(dim=-1).cumsum(dim=-1) <= 0.1
    return ordered.masked_fill(remove, -float("inf"))


def min_p(scores: Tensor) -> Tensor:
    probs = torch.softmax(scores / 0.7, dim=-1)
    least = 0.02 * probs.amax(dim=-1, keepdim=True)
    return scores.masked_fill(probs < least, -1e30)


def switch_router(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    probs = torch.softmax(logits, dim=-1)
    gate, expert = probs.max(dim=-1)
    used = F.one_hot(expert, logits.shape[-1]).float()
    return gate, expert, (used.mean(0) * probs.mean(0)).sum() * logits.shape[-1]


def _angles(i: Inputs, rows: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(rows), 10000.0 ** (-torch.arange(0, width, 2) / width))
    return angles.sin().to(i.device), angles.cos().to(i.device)


def _llama(i: Inputs, s: Shape) -> tuple[Any, ...]:
    sin, cos = (t.repeat(1, 2)[None].to(BF16) for t in _angles(i, s[2], s[3]))
    return i.normal(*s, dtype=BF16), i.normal(s[0], s[1] // 4, *s[2:], dtype=BF16), cos, sin


def _bloom(i: Inputs, s: Shape) -> tuple[Any, ...]:
    slopes = 2.0 ** -torch.linspace(0.5, 8, s[1])
    return i.normal(*s), slopes.to(i.device), torch.ones(s[-2:], dtype=torch.bool, device=i.device).triu(1)


def _swin(i: Inputs, s: Shape) -> tuple[Any, ...]:
    mask = torch.where(i.mask(16, *s[2:]), -100.0, 0.0)
    return i.normal(*s), i.normal(169, s[1]), i.below(169, *s[2:]), mask


def _bert(i: Inputs, s: Shape) -> tuple[Any, ...]:
    rows, tokens, width = s
    tables = (i.normal(n, width) for n in (30522, 2, 512))
    return i.below(30522, rows, tokens), i.below(2, rows, tokens), *tables, i.uniform(width), i.normal(width)


def _bert_reads(args: tuple[Any, ...]) -> int:
    words = args[0]
    return int(2 * words.nbytes + 4 * args[2].shape[1] * (words.numel() + words.shape[1]))


ROWS: tuple[Row, ...] = (
    Row(
        "gptj_rope",
        gptj_rope,
        lambda i, s: (i.normal(*s), *_angles(i, s[1], s[3])),
        ((1, 512, 16, 64),),
        source="transformers, modeling_gptj.py: apply_rotary_pos_emb",
    ),
    Row("llama_rope", llama_rope, _llama, ((1, 32, 1024, 128),), source="transformers, modeling_llama.py"),
    Row("bloom_scores", bloom_scores, _bloom, ((1, 16, 512, 512),), source="ALiBi; transformers, modeling_bloom.py"),
    Row("swin_scores", swin_scores, _swin, ((256, 3, 49, 49),), source="Swin, swin_transformer.py: WindowAttention"),
    Row(
        "t5_scores",
        t5_scores,
        lambda i, s: (i.normal(*s, dtype=BF16), i.normal(1, *s[1:], dtype=BF16)),
        ((8, 8, 256, 256),),
        source="transformers, modeling_t5.py: T5Attention",
    ),
    Row(
        "gpt2_scores", gpt2_scores, lambda i, s: (i.normal(*s),), ((1, 12, 384, 384),), source="GPT-2, modeling_gpt2.py"
    ),
    Row(
        "linear_attention_map",
        linear_attention_map,
        lambda i, s: (i.normal(*s), i.normal(*s)),
        ((4, 8, 512, 64),),
        source="Katharopoulos et al. 2020",
    ),
    Row(
        "performer_map",
        performer_map,
        lambda i, s: (i.normal(*s), i.normal(*s[:-1], 64)),
        ((2, 8, 512, 256),),
        source="Performer, performer_pytorch.py: softmax_kernel",
    ),
    Row(
        "ddpm_positions",
        ddpm_positions,
        lambda i, s: (i.below(1000, s[0]), i.uniform(s[1] // 2) * 0.1),
        ((4096, 320),),
        memory_bound=False,
        source="DDPM, nn.py: timestep_embedding",
    ),
    Row(
        "nerf_positions",
        nerf_positions,
        lambda i, s: (i.normal(*s),),
        ((65536, 3),),
        memory_bound=False,
        source="NeRF, run_nerf_helpers.py: Embedder",
    ),
    Row(
        "bert_embeddings", bert_embeddings, _bert, ((8, 128, 768),), reads=_bert_reads, source="BERT, modeling_bert.py"
    ),
    Row("swin_windows", swin_windows, lambda i, s: (i.normal(*s),), ((8, 56, 56, 96),), source="Swin: shifted windows"),
    Row(
        "sbert_pooling",
        sbert_pooling,
        lambda i, s: (i.normal(*s), i.mask(*s[:2], share=0.8).long()),
        ((32, 128, 384),),
        source="Sentence-BERT, Pooling.py",
    ),
    Row(
        "top_p",
        top_p,
        lambda i, s: (i.normal(*s).sort(-1).values,),
        ((16, 32000),),
        source="transformers, logits_process.py: TopPLogitsWarper",
    ),
    Row("min_p", min_p, lambda i, s: (i.normal(*s),), ((16, 32000),), source="transformers: MinPLogitsWarper"),
    Row("switch_router", switch_router, lambda i, s: (i.normal(*s),), ((8192, 64),), source="Switch Transformer"),
)
