"""Recognises sums of squared differences, of which a variance is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fuser.ir.loop_body import Row, loads_in, prune_with
from fuser.ops import REDUCTIONS
from fuser.scheduler.nodes import Node


def squared_difference(rows: Sequence[Row], kind: str, row: int) -> tuple[int, int] | None:
    """The two float32 rows whose squared difference a reduction `kind` of `row` adds up; None for other reductions."""
    square = rows[row]
    if not REDUCTIONS[kind].adds or square.traits.sign != "*" or square.dtype is not torch.float32:
        return None
    if square.args[0] != square.args[1] or rows[square.args[0]].traits.sign != "-":
        return None
    a, b = rows[square.args[0]].args
    return a, b


def spreads_from_sum(node: Node, others: Iterable[Node], after: set[str]) -> bool:
    """Whether `node` adds up the squared differences between a value and a centre that depends on the value's sum.

    The sum is one of `others`. `after` are the buffers of a kernel that depend on its reductions.
    """
    pair = squared_difference(node.rows, node.kind, node.result) if node.is_reduction else None
    if pair is None:
        return False
    for value, centre in (pair, pair[::-1]):
        one, _ = prune_with(node.rows, value, ())
        if _reads(one.rows) & after or not _reads(prune_with(node.rows, centre, ())[0].rows) & after:
            continue
        for other in others:
            same = other.is_reduction and REDUCTIONS[other.kind].adds and other.domain == node.domain
            if same and prune_with(other.rows, other.result, ())[0].rows == one.rows:
                return True
    return False


def _reads(rows: Iterable[Row]) -> set[str]:
    return {r.buffer for r in loads_in(rows)}
