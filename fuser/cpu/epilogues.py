"""Epilogues of convolutions: sequences of elementwise steps. The epilogue of a product is one activation.

The operand of "times" and "plus" is a number per channel, that of "sum" a tensor of the same sizes. The other steps are
activations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

_aten = torch.ops.aten
Epilogue = tuple[str, ...]
ACTIVATIONS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {  # operator and arguments after the tensor
    "relu": (_aten.relu.default, (), {}),
    "relu6": (_aten.hardtanh.default, (0.0, 6.0), {}),
    "hardswish": (_aten.hardswish.default, (), {}),
    "hardsigmoid": (_aten.hardsigmoid.default, (), {}),
    "silu": (_aten.silu.default, (), {}),
    "sigmoid": (_aten.sigmoid.default, (), {}),
    "tanh": (_aten.tanh.default, (), {}),
    "gelu": (_aten.gelu.default, (), {}),
    "gelu_tanh": (_aten.gelu.default, (), {"approximate": "tanh"}),
}
PER_CHANNEL, PER_ELEMENT = ("times", "plus"), "sum"


def folded(
    epilogue: Epilogue, x: Any, numbers: Iterable[Any], tensors: Iterable[Any], times: Callable[[Any, Any], Any],
    plus: Callable[[Any, Any], Any], activated: Callable[[str, Any], Any],
) -> Any:  # fmt: skip
    """The result of the steps of an epilogue on `x`: in torch, in a loop body or in a graph, by the last three."""
    numbers, tensors = iter(numbers), iter(tensors)
    for step in epilogue:
        if step in PER_CHANNEL:
            x = (times if step == "times" else plus)(x, next(numbers))
        else:
            x = plus(x, next(tensors)) if step == PER_ELEMENT else activated(step, x)
    return x


def applied(epilogue: Epilogue, x: torch.Tensor, factors: torch.Tensor | None, *others: torch.Tensor) -> torch.Tensor:
    """The result of an epilogue for a tensor (n, columns, height, width), on ATen."""
    numbers = () if factors is None else factors.unsqueeze(-1).unsqueeze(-1)
    made: torch.Tensor = folded(epilogue, x, numbers, others, operator.mul, operator.add, activated)
    return made


def activated(step: str, x: torch.Tensor) -> torch.Tensor:
    """The result of an activation, on ATen."""
    function, arguments, named = ACTIVATIONS[step]
    made: torch.Tensor = function(x, *arguments, **named)
    return made


__all__ = ["ACTIVATIONS", "PER_CHANNEL", "PER_ELEMENT", "Epilogue", "activated", "applied", "folded"]
