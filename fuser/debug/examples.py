"""Arguments of a class: tensors that an `ArgSpec` describes, with sizes of our choice and no memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.kernel_spec import ArgSpec, TensorSpec

_NUMBERS = {"int": 3, "float": 0.5, "bool": True}


def example_of(spec: ArgSpec) -> tuple[Any, ...]:
    """Fake tensors and numbers of the class `spec`. Sizes that differ in the class differ here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return tuple(_one(a) for a in spec.args)


def _one(a: Any) -> Any:
    if not isinstance(a, TensorSpec):
        return _NUMBERS[a]
    size = [s if isinstance(s, int) else 8 * (2 + int(s[1:])) for s in a.sizes]
    return torch.empty_strided(size, _strides(size, a.strides), dtype=a.dtype, device=a.device_type)


def _strides(size: list[int], tokens: Iterable[Any]) -> list[int]:
    """Numbers for the tokens of `executor.arg_spec`: "d<k>" is the span of dim k, "t" larger than any span."""
    known: dict[int, int] = {d: t for d, t in enumerate(tokens) if isinstance(t, int)}
    waiting = {d: t for d, t in enumerate(tokens) if not isinstance(t, int)}
    while waiting:
        ready = [d for d, t in waiting.items() if t[0] == "d" and int(t[1:]) in known]
        for d in ready:
            k = int(waiting.pop(d)[1:])
            known[d] = size[k] * known[k]
        if not ready:
            d, _ = waiting.popitem()
            known[d] = 1 + max((size[k] * s for k, s in known.items()), default=1)
    return [known[d] for d in range(len(size))]


__all__ = ["example_of"]
