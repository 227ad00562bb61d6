"""Gradients that are None: those of inputs that only results without a gradient depend on.

A graph is one autograd node. Autograd calls its backward for all inputs, even if only some results are differentiated,
and gives zeros for the others. In eager an input that no differentiated result depends on has no gradient, so that an
optimiser with momentum or weight decay skips it. Here the node is told which gradients are missing, and its backward
leaves out what depends on these alone.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Function = Callable[..., Any]
_aten = torch.ops.aten
_CUT = (_aten.detach.default, _aten.detach_.default)


def reached_results(joint: fx.GraphModule, forward: int) -> tuple[int, ...]:
    """For each input of a joint graph, its first `forward` results that depend on it, as the bits of a number.

    Integers and detached values pass nothing on. A result that depends on an input without a gradient counts, too.
    """
    results: Any = joint.graph.output_node().args[0]
    found: dict[fx.Node, int] = {}
    for number, result in enumerate(results[:forward]):
        if isinstance(result, fx.Node):
            found[result] = found.get(result, 0) | 1 << number
    for node in reversed(joint.graph.nodes):
        if (mask := found.get(node, 0)) and node.target not in _CUT and _is_differentiable(node.meta.get("val")):
            for each in node.all_input_nodes:
                found[each] = found.get(each, 0) | mask
    inputs = joint.graph.find_nodes(op="placeholder")  # with the results' gradients behind them
    return tuple(found.get(p, 0) for p in inputs[: len(results) - forward])


def read_gradients(joint: fx.GraphModule, forward: int) -> tuple[int, ...]:
    """For each input of a joint graph, the results' gradients that its gradient is computed from, as bits by position.

    A detached view may be written: then results depend on the view, and their gradients pass by it.
    """
    results: Any = joint.graph.output_node().args[0]
    inputs = joint.graph.find_nodes(op="placeholder")
    found = {p: 1 << n for n, p in enumerate(inputs[len(results) - forward :])}
    for node in joint.graph.nodes:
        if mask := functools.reduce(operator.or_, (found.get(a, 0) for a in node.all_input_nodes), 0):
            found[node] = mask
    return tuple(found.get(r, 0) if isinstance(r, fx.Node) else 0 for r in results[forward:])


def reaching(reached: Sequence[int], read: Sequence[int], gradients: Sequence[int]) -> tuple[int, ...]:
    """`reached_results` and `read_gradients` as one: for each input the numbers of results, as bits.

    `gradients`: the numbers of the results that have gradients, in order.
    """
    if len(read) != len(reached) or max(read, default=0) >> len(gradients):
        return tuple(reached)
    numbers = [sum(1 << g for j, g in enumerate(gradients) if mask >> j & 1) for mask in read]
    return tuple(a | b for a, b in zip(reached, numbers))


def _is_differentiable(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_differentiable, value))
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, (int, torch.SymInt, bool, torch.SymBool))


def leaving_none(function: Function, reached: Sequence[int], gradients: Sequence[int], passed: Function) -> Function:
    """The backward `function(ctx, grads)` of a node that is told of missing gradients: None among the `gradients`.

    Zeros take the place of these. Inputs that depend on no result with a gradient get None. `passed(grads)` says
    whether `function` handles missing gradients itself.
    """

    def backward(ctx: Any, grads: Any) -> Any:
        missing = [i for i in gradients if grads[i] is None]
        if not missing or passed(grads):
            return function(ctx, grads)
        given = sum(1 << i for i in gradients if grads[i] is not None)
        inputs = len(ctx.needs_input_grad)
        if not given:
            return (None,) * inputs
        made = list(grads)
        for i in missing:
            form = ctx._input_metadata[i]
            made[i] = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
        if isinstance(grads, list):  # to be emptied by the one that is called
            grads.clear()
        found = function(ctx, made)
        if inputs != len(reached):
            return found
        return tuple(g if mask & given else None for g, mask in zip(found, reached, strict=True))

    return backward


def differentiated(meta: Any) -> list[int]:
    """The numbers of the results of AOTAutograd's node, by its analysis `meta`, whose gradients its backward reads."""
    changed, outputs = meta.mutated_inp_runtime_indices, meta.output_info
    written = [meta.input_info[i] for i in changed]
    found = [i for i, info in enumerate(written) if info.mutates_data and info.requires_grad]
    found += [i for i, info in enumerate(outputs, len(changed)) if _is_own(info) and has_gradient(info)]
    every = len(changed) + len(outputs)
    return [*found, *range(every, every + meta.num_intermediate_bases)]


def _is_own(info: Any) -> bool:
    return str(getattr(info.output_type, "name", "")) in ("non_alias", "unsafe_view_alias", "custom_function_view")


def has_gradient(info: Any) -> bool:
    """Whether a result's gradient is an input of the backward."""
    needed = getattr(info, "requires_grad_for_backward", info.requires_grad)
    return bool(needed) and issubclass(info.raw_type, torch.Tensor)


def untold_when_traced(cls: Any) -> None:
    """Let compiled autograd, which traces the backward in other ways, get zeros."""
    key = cls._compiled_autograd_key

    def with_zeros(ctx: Any) -> Any:
        ctx.set_materialize_grads(True)
        return key(ctx)

    cls._compiled_autograd_key = staticmethod(with_zeros)
