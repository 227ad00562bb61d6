"""Attention as programs write it: one row for each spelling, for tests and for measuring on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.peers.judge import widened

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Spelling:
    """`layout` names the dims of queries, keys and values; `others` makes further arguments.

    `trains`: whether it is one fused call where gradients are needed, too, in 16-bit floats.
    """

    fn: Function
    layout: str = "bhtd"
    groups: int = 1
    others: Callable[..., tuple[torch.Tensor, ...]] | None = None
    trains: bool = True

    @property
    def name(self) -> str:
        return self.fn.__name__

    def make(self, b: int, h: int, t: int, d: int, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
        """Queries, keys and values, and what else the function takes."""
        made = []
        for heads in (h, max(h // self.groups, 1), max(h // self.groups, 1)):
            sizes = {"b": b, "h": heads, "t": t, "d": d, "n": b * heads}
            made.append(torch.randn([sizes[c] for c in self.layout], device=device).to(dtype))
        others = self.others(b, h, t, device) if self.others else ()
        return [*made, *(o.to(dtype) if o.is_floating_point() else o for o in others)]

    def exact(self, *args: torch.Tensor) -> Any:
        """The result in float64."""
        return widened(self.fn, args)


SPELLINGS: list[Spelling] = []


def spelling(**fields: Any) -> Callable[[Function], Function]:
    """Register a function as a row."""

    def register(fn: Function) -> Function:
        SPELLINGS.append(Spelling(fn, **fields))
        return fn

    return register


def padding(b: int, h: int, t: int, device: str) -> tuple[torch.Tensor, ...]:
    """Which words of each sentence count: all, and one less in each further sentence."""
    return (torch.arange(t, device=device)[None, :] < t - torch.arange(b, device=device)[:, None].clamp(max=t // 2),)


def biases(b: int, h: int, t: int, device: str) -> tuple[torch.Tensor, ...]:
    """A number for each head, query and key."""
    return (torch.randn(h, t, t, device=device),)


@spelling()
def scale_divides(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), dim=-1) @ v


@spelling()
def queries_scaled(q, k, v):
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v


@spelling()
def both_scaled(q, k, v):
    s = q.shape[-1] ** -0.25
    return ((q * s) @ (k * s).mT).softmax(-1) @ v


@spelling()
def softmax_in_float32(q, k, v):
    w = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return torch.matmul(F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype), v)


@spelling()
def all_in_float32(q, k, v):
    w = torch.matmul(q.float() * q.shape[-1] ** -0.5, k.float().transpose(-2, -1))
    return torch.matmul(torch.softmax(w, -1), v.float()).to(q.dtype)


@spelling(trains=False)
def scores_in_float32(q, k, v):
    w = (q.float() @ k.float().transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return w.softmax(-1).type_as(v) @ v


@spelling()
def einsum_of_heads(q, k, v):
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1), v)


@spelling(layout="bthd")
def einsum_of_tokens(q, k, v):
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


@spelling()
def einsum_with_dots(q, k, v):
    s = torch.einsum("...qd,...kd->...qk", q * 0.125, k)
    return torch.einsum("...qk,...kd->...qd", s.softmax(-1), v)


@spelling(layout="ntd")
def batched_products(q, k, v):
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5, 2), v)


@spelling(layout="ntd", others=lambda b, h, t, device: (torch.randn(b * h, 1, t, device=device),))
def bias_by_baddbmm(q, k, v, alibi):
    s = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.125)
    return torch.bmm(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), v)


@spelling(layout="ntd")
def empty_by_baddbmm(q, k, v):
    room = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    return torch.bmm(torch.baddbmm(room, q, k.transpose(1, 2), beta=0.0, alpha=0.125).softmax(-1), v)


@spelling()
def causal_by_tril(q, k, v):
    t = q.size(-2)
    mask = torch.tril(torch.ones(t, t, device=q.device)).view(1, 1, t, t)
    s = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return F.softmax(s.masked_fill(mask[:, :, :t, :t] == 0, float("-inf")), dim=-1) @ v


@spelling()
def causal_by_triu(q, k, v):
    t = q.shape[-2]
    mask = torch.full((t, t), float("-inf"), device=q.device).triu(1)
    s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return torch.softmax(s.float() + mask, -1).to(q.dtype) @ v


@spelling()
def causal_by_places(q, k, v):
    at = torch.arange(q.shape[-2], device=q.device)
    s = torch.where(at[:, None] >= at, q @ k.transpose(-1, -2) * 0.125, torch.finfo(q.dtype).min)
    return s.softmax(-1) @ v


@spelling()
def sliding_window(q, k, v):
    at = torch.arange(q.shape[-2], device=q.device)
    apart = at[:, None] - at[None, :]
    s = (q @ k.transpose(-1, -2) * 0.125).masked_fill((apart < 0) | (apart >= 5), float("-inf"))
    return s.softmax(-1) @ v


@spelling()
def window_of_an_eighth(q, k, v):
    at = torch.arange(q.shape[-2], device=q.device)
    apart = at[:, None] - at[None, :]
    mask = (apart >= 0) & (apart < max(q.shape[-2] // 8, 4))
    s = torch.where(mask, q @ k.transpose(-1, -2) * 0.125, float("-inf"))
    return s.softmax(-1) @ v


@spelling(others=padding)
def padded_and_causal(q, k, v, keep):
    at = torch.arange(q.shape[-2], device=q.device)
    mask = (at[:, None] >= at) & keep[:, None, None, :]
    s = (q @ k.transpose(-1, -2) * 0.125).masked_fill(~mask, float("-inf"))
    return s.softmax(-1) @ v


@spelling(others=padding)
def padding_filled(q, k, v, keep):
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return s.masked_fill(~keep[:, None, None, :], torch.finfo(s.dtype).min).softmax(-1) @ v


@spelling(others=padding)
def padding_added(q, k, v, keep):
    mask = (1.0 - keep[:, None, None, :].to(q.dtype)) * -10000.0
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125 + mask, dim=-1) @ v


@spelling()
def alibi(q, k, v):
    at = torch.arange(q.shape[-2], device=q.device)
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, device=q.device)
    bias = (-(at[:, None] - at).abs() * slopes[:, None, None]).to(q.dtype)
    return (q @ k.transpose(-1, -2) * 0.125 + bias).softmax(-1) @ v


@spelling(others=biases)
def relative_positions(q, k, v, bias):
    return (q @ k.transpose(-1, -2) * 0.125 + bias).softmax(-1) @ v


@spelling(groups=2)
def groups_repeated(q, k, v):
    n = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
    return torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, -1) @ v


@spelling(groups=2)
def groups_expanded(q, k, v):
    b, h, t, d = k.shape
    n = q.shape[1] // h
    k = k[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)
    v = v[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)
    return torch.softmax(q @ k.transpose(2, 3) * d**-0.5, -1) @ v


@spelling(groups=1 << 20)
def one_head_of_keys(q, k, v):
    return torch.softmax(q @ k.transpose(2, 3) * 0.125, -1) @ v


@spelling()
def dropout_of_nothing(q, k, v):
    return F.dropout(torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1), 0.1, training=False) @ v
