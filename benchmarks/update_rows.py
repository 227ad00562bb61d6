"""The rows of the `updates` suite: states that public models and optimisers write in place, as they write them.

Every row names its source. `mutates` are the arguments that are written; all of them are compared after a call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_rows import Inputs, Make, Row, Shape


# -- caches of keys and values -----------------------------------------------------------------------------------------
def static_cache(k: Tensor, v: Tensor, q: Tensor, new_k: Tensor, new_v: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    k.index_copy_(2, at, new_k)
    v.index_copy_(2, at, new_v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def indexed_cache(k: Tensor, v: Tensor, q: Tensor, new_k: Tensor, new_v: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    k[:, :, at] = new_k
    v[:, :, at] = new_v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sliced_cache(k: Tensor, v: Tensor, q: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    k[:2, 500:501] = new_k
    v[:2, 500:501] = new_v
    keys, values = k[:2, :501].transpose(1, 2), v[:2, :501].transpose(1, 2)
    scores = torch.matmul(q.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(64)
    scores = F.softmax(scores.float(), dim=-1).type_as(q)
    return torch.matmul(scores, values).transpose(1, 2).contiguous().view(2, 1, -1)


def paged_cache(kc: Tensor, vc: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    kc.view(-1, 8, 64)[slots] = k
    vc.view(-1, 8, 64)[slots] = v


def paged_write_and_read(kc: Tensor, k: Tensor, slots: Tensor) -> Tensor:
    kc[slots // 16, slots % 16] = k
    return kc[slots // 16].sum((1, 2, 3))


def rolling_cache(k: Tensor, new: Tensor) -> Tensor:
    k.copy_(torch.cat([k[:, :, 1:], new], 2))
    return k.mean(2)


# -- queues, buffers, running statistics -------------------------------------------------------------------------------
def moco_queue(queue: Tensor, keys: Tensor, q: Tensor) -> Tensor:
    k = F.normalize(keys, dim=1)
    logits = torch.einsum("nc,ck->nk", F.normalize(q, dim=1), queue.clone().detach()) / 0.07
    queue[:, 640:704] = k.t()
    return logits


def stream_buffer(buffer: Tensor, x: Tensor, w: Tensor) -> Tensor:
    y = torch.cat([buffer, x], -1)
    buffer.copy_(y[..., -512:])
    return F.conv1d(y[..., -72:], w, groups=64)


def ring_buffer(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    buffer[100:104] = x
    return buffer.mean(0), (buffer * buffer).sum(1)


def running_statistics(mean: Tensor, var: Tensor, count: Tensor, x: Tensor) -> Tensor:
    m, v = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    count.add_(1)
    mean.mul_(0.9).add_(m * 0.1)
    var.mul_(0.9).add_(v * 0.1)
    return (x - m[None, :, None, None]) / torch.sqrt(v[None, :, None, None] + 1e-5)


def confusion_by_bincount(counts: Tensor, p: Tensor, t: Tensor) -> None:
    counts.add_(torch.bincount((t * 19 + p).view(-1), minlength=361))


def confusion_by_scatter(counts: Tensor, p: Tensor, t: Tensor) -> None:
    at = (t * 19 + p).view(-1)
    counts.scatter_add_(0, at, torch.ones_like(at, dtype=counts.dtype))


def power_iteration(w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    v.copy_(F.normalize(torch.mv(w.t(), u), dim=0, eps=1e-12))
    u.copy_(F.normalize(torch.mv(w, v), dim=0, eps=1e-12))
    return w / torch.dot(u, torch.mv(w, v))


def vq_codebook(size: Tensor, average: Tensor, codes: Tensor, x: Tensor) -> Tensor:
    distance = x.pow(2).sum(1, keepdim=True) - 2 * x @ codes + codes.pow(2).sum(0, keepdim=True)
    chosen = distance.argmin(1)
    hot = F.one_hot(chosen, 1024).type(x.dtype)
    size.mul_(0.99).add_(hot.sum(0), alpha=0.01)
    average.mul_(0.99).add_(x.t() @ hot, alpha=0.01)
    n = size.sum()
    scaled = (size + 1e-5) / (n + 1024 * 1e-5) * n
    codes.copy_(average / scaled.unsqueeze(0))
    return F.embedding(chosen, codes.t())


# -- moving averages of parameters -------------------------------------------------------------------------------------
def _halves(tensors: tuple[Tensor, ...]) -> zip[tuple[Tensor, Tensor]]:
    half = len(tensors) // 2
    return zip(tensors[:half], tensors[half:])


def momentum_encoder(*tensors: Tensor) -> None:
    for a, b in _halves(tensors):
        a.copy_(a * 0.999 + b * 0.001)


def average_by_lerp(*tensors: Tensor) -> None:
    for a, b in _halves(tensors):
        a.lerp_(b, 0.001)


def average_by_mul_add(*tensors: Tensor) -> None:
    for a, b in _halves(tensors):
        a.mul_(0.999).add_(b, alpha=0.001)


def average_by_foreach(*tensors: Tensor) -> None:
    half = len(tensors) // 2
    torch._foreach_mul_(tensors[:half], 0.999)
    torch._foreach_add_(tensors[:half], tensors[half:], alpha=0.001)


def soft_update(*tensors: Tensor) -> None:
    for a, b in _halves(tensors):
        a.data.copy_(0.005 * b.data + (1 - 0.005) * a.data)


# -- optimisers --------------------------------------------------------------------------------------------------------
def clip_gradients(*gradients: Tensor) -> Tensor:
    norm = torch.stack([g.norm() for g in gradients]).norm()
    by = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(by)
    return norm


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    p.mul_(1 - 1e-4)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, (v.sqrt() / 0.9).add_(1e-8), value=-1e-3)


def lion(p: Tensor, g: Tensor, m: Tensor) -> None:
    p.mul_(1 - 1e-4)
    update = m.clone().mul_(0.9).add(g, alpha=0.1).sign_()
    p.add_(update, alpha=-1e-3)
    m.mul_(0.99).add_(g, alpha=0.01)


def sparse_rows(w: Tensor, at: Tensor, x: Tensor) -> None:
    w.index_add_(0, at, x, alpha=-0.1)


# -- recurrent states --------------------------------------------------------------------------------------------------
def mamba_conv(state: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    state.copy_(torch.roll(state, shifts=-1, dims=-1))
    state[:, :, -1] = x
    return F.silu((state * w).sum(-1) + b)


def mamba_ssm(s: Tensor, dt: Tensor, a: Tensor, b: Tensor, x: Tensor, c: Tensor) -> Tensor:
    da = torch.exp(torch.einsum("bd,dn->bdn", dt, a))
    db = torch.einsum("bd,bn->bdn", dt, b)
    s.copy_(s * da + x.unsqueeze(-1) * db)
    return torch.einsum("bdn,bn->bd", s, c)


def rwkv(aa: Tensor, bb: Tensor, pp: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    ww = u + k
    p = torch.maximum(pp, ww)
    e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
    out = (e1 * aa + e2 * v) / (e1 * bb + e2)
    ww = pp + w
    p = torch.maximum(ww, k)
    e1, e2 = torch.exp(ww - p), torch.exp(k - p)
    aa.copy_(e1 * aa + e2 * v)
    bb.copy_(e1 * bb + e2)
    pp.copy_(p)
    return out


def elman_state(h: Tensor, x: Tensor) -> Tensor:
    new = torch.tanh(h * 0.5 + x)
    h.copy_(new)
    return new


def lstm_states(h: Tensor, c: Tensor, i: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    new_c = c * torch.sigmoid(i) + torch.tanh(o)
    new_h = torch.tanh(new_c) * torch.sigmoid(o)
    h.copy_(new_h)
    c.copy_(new_c)
    return new_h.sum(-1), new_h, new_c


# -- activations in place ----------------------------------------------------------------------------------------------
def masked_scores(s: Tensor, mask: Tensor) -> Tensor:
    s.masked_fill_(mask, float("-inf"))
    return s.softmax(-1)


def residual_and_norm(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x += y
    return F.rms_norm(x, (768,), w)


def fused_add_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    residual.add_(x)
    x.copy_(F.rms_norm(residual, (768,), w))
    return x, residual


def merged_tokens(x: Tensor, source: Tensor, at: Tensor) -> Tensor:
    x.scatter_add_(1, at.expand(8, 64, 384), source)
    return x / 2


def clamped_view(x: Tensor, w: Tensor) -> Tensor:
    y = x.view(8, 8, 1024)
    y.clamp_(-1, 1)
    return y @ w


def transposed_bias(x: Tensor, b: Tensor) -> None:
    x.t().add_(b)


def two_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.add_(y), y.mul_(2)


def old_and_new(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    old = x * 1
    return old, x.add_(y)


def row_and_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.add_(y)[0], y.relu_().sum()


def swapped(a: Tensor, b: Tensor) -> None:
    old = a * 1.0
    a.copy_(b * 2)
    b.copy_(old + 1)


def crossed(a: Tensor, b: Tensor) -> Tensor:
    update = (a - b).sum(0, keepdim=True).relu()
    product = torch.mm(a, b)
    a.add_(update)
    b.sub_(update)
    return product


def _normal(*shapes: Shape) -> Make:
    return lambda i, s: tuple(i.normal(*shape) for shape in shapes)


def _many(count: int, *shape: int) -> Make:
    return lambda i, s: tuple(i.normal(*shape) for _ in range(count))


def _cache(tokens: int, boolean: bool) -> Make:
    def make(i: Inputs, s: Shape) -> tuple[Any, ...]:
        tensors = [i.normal(1, 8, n, 64) for n in (tokens, tokens, 1, 1, 1)]
        mask = i.mask(1, 1, 1, tokens, share=1.0) if boolean else i.normal(1, 1, 1, tokens) * 0
        return (*tensors, i.below(tokens, 1), mask)

    return make


def _slots(count: int) -> Make:
    def make(i: Inputs, s: Shape) -> tuple[Any, ...]:
        slots = torch.randperm(4096, generator=i.generator)[:32].to(i.device)
        return (*(i.normal(256, 16, 8, 64) for _ in range(count)), *(i.normal(32, 8, 64) for _ in range(count)), slots)

    return make


def _labels(i: Inputs) -> tuple[Tensor, Tensor]:
    return i.below(19, 8, 256, 256), i.below(19, 8, 256, 256)


def _row(name: str, fn: Any, make: Make, mutates: tuple[int, ...], source: str) -> Row:
    return Row(name, fn, make, ((),), mutates, memory_bound=False, source=source)


_WIDE, _TOKENS, _SQUARE = (256, 1024), (1024, 768), (512, 512)
ROWS: tuple[Row, ...] = (
    _row("static cache", static_cache, _cache(1024, False), (0, 1), "transformers, cache_utils.py, StaticCache"),
    _row("indexed cache", indexed_cache, _cache(2048, True), (0, 1), "gpt-fast, model.py, KVCache"),
    _row("sliced cache", sliced_cache,
         _normal((2, 1024, 8, 64), (2, 1024, 8, 64), *[(2, 1, 8, 64)] * 3), (0, 1), "Llama, model.py, Attention"),
    _row("paged cache", paged_cache, _slots(2), (0, 1), "vLLM, reshape_and_cache"),
    _row("paged write and read", paged_write_and_read, _slots(1), (0,), "vLLM, paged attention"),
    _row("rolling cache", rolling_cache, _normal((2, 8, 512, 64), (2, 8, 1, 64)), (0,), "Mistral, rolling cache"),
    _row("moco queue", moco_queue, _normal((128, 65536), (64, 128), (64, 128)), (0,), "MoCo, builder.py"),
    _row("stream buffer", stream_buffer, _normal((4, 64, 512), (4, 64, 64), (64, 1, 9)), (0,),
         "EnCodec, streaming convolution"),
    _row("ring buffer", ring_buffer, _normal((1024, 512), (4, 512)), (0,), "replay buffers of reinforcement learning"),
    _row("running statistics", running_statistics,
         lambda i, s: (i.normal(256), i.uniform(256), i.below(1), i.normal(64, 256, 14, 14)), (0, 1, 2),
         "SyncBatchNorm written out"),
    _row("confusion, bincount", confusion_by_bincount, lambda i, s: (i.below(1, 361), *_labels(i)), (0,),
         "torchvision references, segmentation utils.py"),
    _row("confusion, scatter", confusion_by_scatter, lambda i, s: (i.normal(361) * 0, *_labels(i)), (0,),
         "torchmetrics, confusion_matrix.py"),
    _row("power iteration", power_iteration, _normal((512, 4608), (512,), (4608,)), (1, 2),
         "torch, utils/parametrizations.py, spectral_norm"),
    _row("vq codebook", vq_codebook,
         lambda i, s: (i.uniform(1024), i.normal(64, 1024), i.normal(64, 1024), i.normal(4096, 64)), (0, 1, 2),
         "VQ-VAE-2, vqvae.py, Quantize"),
    _row("momentum encoder", momentum_encoder, _many(16, *_SQUARE), tuple(range(8)), "MoCo, builder.py"),
    _row("average, lerp", average_by_lerp, _many(16, *_SQUARE), tuple(range(8)), "torch, optim/swa_utils.py"),
    _row("average, mul and add", average_by_mul_add, _many(16, *_SQUARE), tuple(range(8)), "timm, ModelEma"),
    _row("average, foreach", average_by_foreach, _many(16, *_SQUARE), tuple(range(8)), "timm, ModelEmaV3"),
    _row("soft update", soft_update, _many(12, 300, 200), tuple(range(6)), "CleanRL, ddpg_continuous_action.py"),
    _row("clip gradients", clip_gradients, _many(8, *_SQUARE), tuple(range(8)), "torch, nn/utils/clip_grad.py"),
    _row("adamw", adamw, lambda i, s: (*(i.normal(1024, 1024) for _ in range(3)), i.uniform(1024, 1024)), (0, 2, 3),
         "torch, optim/adamw.py"),
    _row("lion", lion, _many(3, 1024, 1024), (0, 2), "lion-pytorch, update_fn"),
    _row("sparse rows", sparse_rows, lambda i, s: (i.normal(30000, 128), i.below(30000, 256), i.normal(256, 128)), (0,),
         "word2vec, rows of an embedding"),
    _row("mamba convolution", mamba_conv, _normal((8, 2048, 4), (8, 2048), (2048, 4), (2048,)), (0,),
         "mamba, mamba_simple.py, step"),
    _row("mamba state", mamba_ssm,
         lambda i, s: (i.normal(8, 2048, 16), i.uniform(8, 2048), -i.uniform(2048, 16),
                       *(i.normal(8, n) for n in (16, 2048, 16))), (0,), "mamba, mamba_simple.py, step"),
    _row("rwkv", rwkv, lambda i, s: (*(i.normal(4, 2048) for _ in range(5)), -i.uniform(2048), i.normal(2048)),
         (0, 1, 2), "RWKV-4, model_run.py, time_mixing"),
    _row("elman state", elman_state, _normal(_WIDE, _WIDE), (0,), "torch, nn/modules/rnn.py, RNNCell"),
    _row("lstm states", lstm_states, _normal(*[_WIDE] * 4), (0, 1), "torch, nn/modules/rnn.py, LSTMCell"),
    _row("masked scores", masked_scores,
         lambda i, s: (i.normal(8, 12, 256, 256), torch.ones(256, 256, device=i.device).triu(1) > 0), (0,),
         "nanoGPT, model.py, in place"),
    _row("residual and norm", residual_and_norm, _normal(_TOKENS, _TOKENS, (768,)), (0,), "Llama, model.py, in place"),
    _row("fused add norm", fused_add_norm, _normal(_TOKENS, _TOKENS, (768,)), (0, 1), "vLLM, fused_add_rms_norm"),
    _row("merged tokens", merged_tokens, lambda i, s: (i.normal(8, 196, 384), i.normal(8, 64, 384),
         i.below(196, 8, 64, 1)), (0,), "ToMe, merge.py"),
    _row("clamped view", clamped_view, _normal((64, 1024), (1024, 1024)), (0,), "writes through a view"),
    _row("transposed bias", transposed_bias, _normal(_TOKENS, (1024,)), (0,), "writes through a transpose"),
    _row("two results", two_results, _normal(_TOKENS, _TOKENS), (0, 1), "two writes, both returned"),
    _row("old and new", old_and_new, _normal(_TOKENS, _TOKENS), (0,), "the old content returned, too"),
    _row("row and sum", row_and_sum, _normal(_TOKENS, _TOKENS), (0, 1), "a view of what is written returned"),
    _row("swapped", swapped, _normal(_SQUARE, _SQUARE), (0, 1), "two states from each other"),
    _row("crossed", crossed, _normal(_SQUARE, _SQUARE), (0, 1), "two states from each other and a product"),
)  # fmt: skip

__all__ = ["ROWS"]
