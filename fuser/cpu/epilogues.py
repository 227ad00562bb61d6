"""What a kernel computes from each element of a convolution: a sequence of steps.

"times" and "plus" take a number for each channel, "sum" an element of another tensor of the same sizes. The others are
activations.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
Epilogue = tuple[str, ...]
ACTIVATIONS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {  # operators, and what follows their tensor
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
    """The steps of an epilogue on a tensor (n, columns, height, width), by ATen."""
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
