"""The block mask of an attention: which blocks of scores are computed, as torch's `BlockMask` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """The tensors of a block mask: counts are [batch, heads, rows], indices [batch, heads, rows, blocks].

    For each row of blocks along queries: the blocks of keys to which `mask_mod` applies (`partial`), and those without
    masked scores (`full`); for the backward direction, the same for each column (`partial_q`, `full_q`). Without
    `partial`, one block covers all scores.
    """

    partial: tuple[torch.Tensor, torch.Tensor] | None
    full: tuple[torch.Tensor, torch.Tensor] | None
    partial_q: tuple[torch.Tensor, torch.Tensor] | None
    full_q: tuple[torch.Tensor, torch.Tensor] | None
    query_size: int
    key_size: int


def blocks_of(given: Sequence[Any]) -> Blocks:
    """The block mask from the operator's argument without its last element, `mask_mod`."""

    def pair(at: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if given[at] is None or given[at + 1] is None else (given[at], given[at + 1])

    return Blocks(pair(2), pair(4), pair(6), pair(8), int(given[-2]), int(given[-1]))


def key_ranges(blocks: Blocks) -> list[tuple[int, int]]:
    """For each row of blocks, the first block of keys listed for any batch and head, and the one after the last."""
    lists = [pair for pair in (blocks.partial, blocks.full) if pair is not None]
    rows = lists[0][1].shape[-2]
    least, most = [1 << 62] * rows, [0] * rows
    for count, index in lists:
        number = torch.arange(index.shape[-1]).lt(count.unsqueeze(-1))
        low = torch.where(number, index, 1 << 30).amin((0, 1, 3)).tolist()
        high = torch.where(number, index, -1).amax((0, 1, 3)).tolist()
        for row, (a, b) in enumerate(zip(low, high)):
            least[row], most[row] = min(least[row], a), max(most[row], b + 1)
    return [(min(a, b), b) for a, b in zip(least, most)]


def block_map(blocks: Blocks) -> torch.Tensor:
    """Whether each block is computed: bool, [batch, heads, rows, columns]."""
    lists = [pair for pair in (blocks.partial, blocks.full) if pair is not None]
    columns = max(index.shape[-1] for _, index in lists)
    out = torch.zeros((*lists[0][1].shape[:-1], columns + 1), dtype=torch.bool)
    for count, index in lists:
        listed = torch.arange(index.shape[-1]).lt(count.unsqueeze(-1))
        out.scatter_(-1, torch.where(listed, index, columns).long(), True)
    return out[..., :columns]
