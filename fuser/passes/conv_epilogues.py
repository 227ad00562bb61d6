"""Finds the epilogue of a frozen convolution: bias, batch norms, sums and activations that its kernel can include.

A step is included if it is the only reader of the step before it, its result has the same sizes, dtype and strides, and
its weights are frozen. The per-channel numbers of biases and norms are computed once.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from fuser.cpu.epilogues import ACTIVATIONS, PER_ELEMENT, Epilogue
from fuser.lazy_dataclasses import dataclass
from fuser.passes.hints import are_numbers
from fuser.passes.onednn import FROZEN

aten = torch.ops.aten
_NORM = aten._native_batch_norm_legit_no_training.default
_MOST_SUMS = 2  # tensors that an epilogue adds


@dataclass(frozen=True)
class Following:
    """The epilogue of a convolution, the nodes that the kernel replaces, and the epilogue's operands.

    nodes: from the convolution to the node whose result the kernel returns. vectors: in the order of the steps, a bias
    as (bias,), a norm as (weight, bias, mean, variance, eps). others: a tensor for each "sum".
    """

    steps: Epilogue
    nodes: tuple[fx.Node, ...]
    vectors: tuple[tuple[Any, ...], ...]
    others: tuple[fx.Node, ...]

    @property
    def tensors(self) -> tuple[fx.Node, ...]:
        """The frozen weights, which are the arguments of `factors_of`."""
        return tuple(v for vector in self.vectors for v in vector if isinstance(v, fx.Node))


def following(conv: fx.Node) -> Following | None:
    """The epilogue that the kernel of a convolution can include; None if the convolution's bias is not frozen."""
    bias: Any = conv.args[2]
    if not (bias is None or _are_frozen((bias,))):
        return None
    steps, nodes = ["plus"] * (bias is not None), [conv]
    others: list[fx.Node] = []
    vectors: list[tuple[Any, ...]] = [(bias,)] if bias is not None else []
    while len(nodes[-1].users) == 1:
        (user,) = nodes[-1].users
        found = _activation(user)
        if user.target is _NORM:
            result = _norm_of(user, nodes[-1])
            if result is None or not _is_like(result, conv):
                break
            steps += ["times", "plus"]
            vectors.append((*user.args[1:5], user.args[6]))
            nodes += [user, result]
            continue
        if not _is_like(user, conv):
            break
        if found is not None:
            steps.append(found)
        elif _is_sum(user, nodes[-1], conv) and len(others) < _MOST_SUMS:
            others += [a for a in user.all_input_nodes if a is not nodes[-1]]
            steps.append(PER_ELEMENT)
        else:
            break
        nodes.append(user)
    return Following(tuple(steps), tuple(nodes), tuple(vectors), tuple(others))


def _are_frozen(nodes: Any) -> bool:
    """Whether each node is a frozen vector of static size, or None."""
    given = [n for n in nodes if n is not None]
    return all(FROZEN in n.meta and n.meta["val"].dim() == 1 and are_numbers(*n.meta["val"].shape) for n in given)


def _is_like(node: fx.Node, conv: fx.Node) -> bool:
    value, like = node.meta.get("val"), conv.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype is not like.dtype:
        return False
    return bool(value.shape == like.shape and value.stride() == like.stride())


def _norm_of(norm: fx.Node, x: fx.Node) -> fx.Node | None:
    """The normalised result of a norm of `x`, if nothing reads the others and weights and statistics are frozen."""
    if norm.kwargs or norm.args[0] is not x or not _are_frozen(norm.args[1:5]) or len(norm.users) != 1:
        return None
    (result,) = norm.users
    return result if result.target is operator.getitem and result.args[1] == 0 else None


def _is_sum(node: fx.Node, value: fx.Node, conv: fx.Node) -> bool:
    """Whether a node adds a tensor like the convolution's result to `value`, computed before it.

    Of two convolutions that are added, the later one includes the sum.
    """
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    if any(value < a for a in node.all_input_nodes):
        return False
    values = [a.meta.get("val") for a in node.all_input_nodes]
    like = conv.meta["val"]
    return all(isinstance(v, torch.Tensor) and v.dtype is like.dtype and v.shape == like.shape for v in values)


def _activation(node: fx.Node) -> str | None:
    """The step of an activation node; None for other nodes."""
    for name, (target, arguments, named) in ACTIVATIONS.items():
        if node.target is target and tuple(node.args[1:]) == arguments and _stated(node) == named:
            return name
    return None


def _stated(node: fx.Node) -> dict[str, Any]:
    """The keyword arguments of an activation that differ from the defaults."""
    return {k: v for k, v in node.kwargs.items() if (k, v) != ("approximate", "none")}


def factors_of(vectors: tuple[tuple[Any, ...], ...], *tensors: torch.Tensor) -> torch.Tensor:
    """The per-channel numbers, a row per step, in float32; computed in float64.

    vectors: as in `Following`, with a node's index in `tensors` in its place.
    """
    rows: list[torch.Tensor] = []
    for vector in vectors:
        held = [tensors[v].double() if type(v) is int else None for v in vector[:4]]
        if len(vector) == 1:
            rows += [t for t in held if t is not None]
            continue
        weight, bias, mean, variance = held
        assert mean is not None and variance is not None
        scale = (variance + vector[4]).rsqrt()
        scale = scale if weight is None else scale * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        rows += [scale, shift]
    return torch.stack(rows).float()


def numbered(vectors: tuple[tuple[Any, ...], ...]) -> Any:
    """`factors_of` for these vectors, as a function of the frozen weights."""
    count = iter(range(5 * len(vectors)))
    places = tuple(tuple(next(count) if isinstance(v, fx.Node) else v for v in vector) for vector in vectors)
    return functools.partial(factors_of, places)


__all__ = ["Following", "factors_of", "following", "numbered"]
