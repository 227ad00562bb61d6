"""Gradients of gradients: eager computes them, on the graph as dynamo gave it.

AOTAutograd's backward cannot be differentiated. A backward that is asked for a graph of itself (`create_graph=True`)
therefore runs the forward again by eager, on the inputs of that call, and has autograd differentiate that. Nothing is
kept for it but weak references to the inputs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_log = logging.getLogger(__name__)
_said = False
Function = Callable[..., Any]


def differentiable_twice(function: Function, gm: fx.GraphModule) -> Function:
    """A compiled function of `gm`'s inputs whose backward can itself be differentiated."""

    def call(*args: Any) -> Any:
        results = function(*args)
        node = next((r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None), None)
        made_by = getattr(type(node), "_forward_cls", None)
        if made_by is not None and hasattr(made_by, "compiled_fw"):
            if not hasattr(made_by, "fuser_backward"):
                _extend(made_by, gm)
            node.fuser_inputs = [_Input(a) for a in args]  # type: ignore[union-attr]
        return results

    return call


class _Input:
    """An input of one call, not kept alive; its version says whether it was written since."""

    __slots__ = ("_ref", "_version")

    def __init__(self, value: Any) -> None:
        tensor = isinstance(value, torch.Tensor) and not value.is_inference()
        self._ref = weakref.ref(value) if tensor else lambda: value
        self._version = value._version if tensor else None

    def get(self) -> Any:
        """The input; RuntimeError if it is gone or was written."""
        value = self._ref()
        if value is None:
            raise RuntimeError(
                "fuser: the gradient of a gradient needs the inputs of the compiled function, and one of them is gone: "
                "keep a reference to it until the second backward"
            )
        if self._version is not None and value._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input of a function compiled by fuser is at version {value._version}; expected {self._version}"
            )
        return value


def _extend(made_by: Any, gm: fx.GraphModule) -> None:
    """Have the class of AOTAutograd's function answer for backwards that are to be differentiated."""
    from torch._dynamo import disable

    compiled = made_by.backward

    @disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = getattr(ctx, "fuser_inputs", None)
        if not torch.is_grad_enabled() or inputs is None:
            return compiled(ctx, *grads)
        flat = grads[0] if len(grads) == 1 and isinstance(grads[0], list) else grads
        return _by_eager(gm, ctx, [i.get() for i in inputs], flat)

    made_by.fuser_backward = True
    made_by.backward = staticmethod(backward)


def _by_eager(gm: fx.GraphModule, ctx: Any, inputs: Sequence[Any], grads: Sequence[Any]) -> tuple[Any, ...]:
    """Gradients of the inputs, with a graph of their own."""
    global _said
    if not _said:
        _said = True
        _log.warning("a gradient is to be differentiated: its graph runs again, by eager")
    results = gm(*inputs)
    if len(ctx.needs_input_grad) != len(inputs) or len(results) != len(grads):
        raise RuntimeError(
            "fuser: this graph has inputs or results that its compiled form has not, so the gradient of its gradient "
            "cannot be computed: run the function without torch.compile"
        )
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if isinstance(r, torch.Tensor) and r.requires_grad]
    pairs = [(r, g) for r, g in pairs if g is not None]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
    found = torch.autograd.grad(
        [r for r, _ in pairs], [inputs[i] for i in wanted], [g for _, g in pairs], create_graph=True, allow_unused=True
    )
    by_place = dict(zip(wanted, found, strict=True))
    return tuple(by_place.get(i) for i in range(len(inputs)))
