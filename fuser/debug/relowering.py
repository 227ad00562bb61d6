"""The IR and the kernel plans of a registered group, lowered again for arguments like those it was compiled for."""

from __future__ import annotations

from typing import Any

import torch

from fuser import config, examples, pipeline
from fuser.errors import GraphError
from fuser.kernel_cache import REGISTRY, KernelSpec
from fuser.kernel_store import KernelEntry
from fuser.lowering.graph import Lowered, lower_graph
from fuser.scheduler.schedule import Schedule, schedule


def lowered_of(spec: KernelSpec, described: tuple[Any, ...]) -> tuple[Lowered, Schedule]:
    """The lowered graph and its plans for arguments like `described`, a `KernelEntry.example`. FuserError if none."""
    example = tuple(_stand_in(a) for a in described)
    numbers = frozenset(i for i, a in enumerate(example) if not isinstance(a, torch.Tensor))
    with config.override(**dict(spec.config)):
        lowered = lower_graph(pipeline.with_numbers(spec.graph, numbers), example, config.numerics)
        return lowered, schedule(lowered, config.max_body_rows)


def _stand_in(a: Any) -> Any:
    if not isinstance(a, tuple):
        return a
    dtype, device_type, size, stride = a
    return examples.stand_in((size, stride, dtype, torch.device(device_type)))


def entry_of(key: int, number: int = 0) -> tuple[KernelSpec, KernelEntry]:
    """The specification of the fusion `key`, and the entry of its class `number`, in the order of arrival.

    UnknownKeyError for an unknown key. GraphError if the fusion was not called with arguments that kernels take.
    """
    spec = REGISTRY.find(key).spec
    entries = [e for e in spec.store.entries if e.example]
    if number not in range(len(entries)):
        raise GraphError(
            f"fusion {key} was compiled for {len(entries)} classes of arguments, and class {number} was asked for: "
            "call it with such arguments first"
        )
    return spec, entries[number]


__all__ = ["entry_of", "lowered_of"]
