"""Refusals: why a group has no kernel for some arguments, and how to split it. They are kept for other processes.

A process that finds a refusal lowers nothing: it has the reason, and splits the group by the facts kept here. Entries
have the key of the plan in whose place they are (see `plans`), are trusted and checked like plans, and are distributed
as plans are, in bundles and through the remote store.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import torch

from fuser import config, plans
from fuser.canonical import CanonicalGraph
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import as_json, from_json
from fuser.runtime.memory import Recent

settings: Any = config  # its attributes are made from a table

_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@dataclass(frozen=True)
class Refusals:
    """Facts about the nodes of a canonical graph, for some arguments.

    `refused` are calls that no kernel computes, with reasons. `free` are calls that compute nothing (sizes, views,
    creation from numbers). A decision depends on the values of `rounded`. `metas` are examples of the values, as meta
    tensors or numbers; other values are unknown.
    """

    refused: Mapping[int, str] = field(default_factory=dict)
    free: frozenset[int] = frozenset()
    rounded: frozenset[int] = frozenset()
    metas: Sequence[Any] = ()


@dataclass(frozen=True)
class Refusal:
    """`reason`: why the whole group has no kernel; None if that is known only after a compilation."""

    reason: str | None
    found: Refusals


# -- entries -----------------------------------------------------------------------------------------------------------
_asked: Any = Recent()  # keys that the remote store is known not to have, by cache and store


def find(key: str, graph: CanonicalGraph, keeper: plans.Keeper) -> Refusal | None:
    """The refusal kept under a plan's key, here or elsewhere; None if there is none, or it has another form."""
    known = settings.cache_dir, settings.remote_cache, key
    with config.override(remote_cache="") if known in _asked else contextlib.nullcontext():
        for kept, _ in plans.entries(key, "refusal", keeper):
            try:
                if kept is not None:
                    return _decode(kept, graph)
            except (KeyError, TypeError, ValueError, RuntimeError):  # of another form: it is made again
                pass
    _asked[known] = True
    return None


def keep(key: str, refusal: Refusal, about: Mapping[str, Any]) -> None:
    """Keep a refusal for other processes. `about` is for people."""
    found = refusal.found
    plans.write(
        f"{key}.refusal",
        {
            "reason": None if refusal.reason is None else as_json(refusal.reason),
            "refused": [[i, as_json(why)] for i, why in found.refused.items()],
            "free": sorted(found.free), "rounded": sorted(found.rounded),
            "metas": [_encode_meta(m) for m in found.metas], "about": dict(about),
        },
        shared=True,
    )  # fmt: skip


def _decode(kept: Any, graph: CanonicalGraph) -> Refusal:
    reason, size = kept["reason"], len(graph.nodes)
    refused = {int(i): from_json(why) for i, why in kept["refused"]}
    free, rounded = frozenset(map(int, kept["free"])), frozenset(map(int, kept["rounded"]))
    if not all(0 <= i < size for i in (*refused, *free, *rounded)) or len(kept["metas"]) > size:
        raise ValueError("a node that the graph does not have")
    metas = [_decode_meta(m) for m in kept["metas"]]
    return Refusal(None if reason is None else from_json(reason), Refusals(refused, free, rounded, metas))


def _encode_meta(meta: Any) -> Any:
    if isinstance(meta, torch.Tensor):
        return [str(meta.dtype), list(meta.shape), list(meta.stride())]
    plain = type(meta) in (bool, int) or type(meta) is float and math.isfinite(meta)
    return meta if plain else None


def _decode_meta(kept: Any) -> Any:
    if not isinstance(kept, list):
        return kept if isinstance(kept, (bool, int, float)) else None
    dtype, size, stride = kept
    return torch.empty_strided(tuple(size), tuple(stride), dtype=_DTYPES[dtype], device="meta")


# -- answers to single questions ---------------------------------------------------------------------------------------
_answers: Any = Recent()


def recall(question: str) -> str | None:
    """The answer of an earlier process to a question about operators; None if there is none."""
    key = plans.question_key(question)
    if key is None:
        return None
    known = settings.cache_dir, settings.prebuilt_cache, key
    if known not in _answers:
        kept = plans.everywhere(f"{key}.refusal")
        _answers[known] = next((a for entry in kept if (a := _answer(entry, question))), None)
    found = _answers[known]
    return found if isinstance(found, str) else None


def _answer(kept: Any, question: str) -> Any:
    if not isinstance(kept, dict) or kept.get("question") != question:
        return None
    try:
        return from_json(kept["answer"]) if kept["answer"] else ""
    except (KeyError, TypeError, ValueError):  # of another form: it is made again
        return None


def remember(question: str, answer: str) -> None:
    """Keep an answer for other processes."""
    key = plans.question_key(question)
    if key is not None:
        _answers[settings.cache_dir, settings.prebuilt_cache, key] = answer
        plans.write(f"{key}.refusal", {"question": question, "answer": as_json(answer) if answer else ""}, shared=True)


__all__ = ["Refusal", "Refusals", "find", "keep", "recall", "remember"]
