"""Epilogues of convolutions: sequences of elementwise steps.

The operand of "times" and "plus" is a number per channel, that of "sum" a tensor of the same sizes. The other steps are
activations.
"""

from __future__ import annotations

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


def applied(epilogue: Epilogue, x: torch.Tensor, factors: torch.Tensor | None, *others: torch.Tensor) -> torch.Tensor:
    """The result of an epilogue for a tensor (n, columns, height, width), on ATen."""
    numbers, tensors = iter(() if factors is None else factors), iter(others)
    for step in epilogue:
        if step in PER_CHANNEL:
            operand = next(numbers).view(-1, 1, 1)
            x = x * operand if step == "times" else x + operand
        elif step == PER_ELEMENT:
            x = x + next(tensors)
        else:
            operator, arguments, named = ACTIVATIONS[step]
            x = operator(x, *arguments, **named)
    return x


__all__ = ["ACTIVATIONS", "PER_CHANNEL", "PER_ELEMENT", "Epilogue", "applied"]
