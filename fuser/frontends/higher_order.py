"""Gradients of gradients: computed in eager, on the graph that Dynamo captured.

AOTAutograd's backward cannot be differentiated. If a backward is called with `create_graph=True`, or for many gradients
at once (`is_grads_batched=True`), eager runs the forward again on the inputs of that call, and autograd differentiates
this run. `replay.Replay` stores what a call has to note for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser import notices
from fuser.frontends.replay import Replay
from fuser.frontends.unused_results import leaving_none, untold_when_traced

_log = logging.getLogger(__name__)
Function = Callable[..., Any]
# AOTAutograd's kinds of results: those that its function does not compute, and those whose base it returns.
_OF_INPUTS = ("alias_of_input", "is_input")
_OF_BASES = ("alias_of_intermediate", "alias_of_intermediate_save_as_output")
_MOST_VIEWS = 64  # most view nodes between a result and its base


def differentiable_twice(
    function: Function, replay: Replay, outputs: Sequence[Any] = (), changed: Sequence[int] = (),
    reached: Sequence[int] = (), gradients: Sequence[int] = (),
) -> Function:  # fmt: skip
    """A compiled function whose backward can be differentiated, by the graph of `replay`.

    `outputs`: AOTAutograd's record of each result, which may be a view; empty if none is. `changed`: the inputs whose
    new content is the first results of AOTAutograd's function. `reached`: for each input the results that depend on
    it, as bits. `gradients`: the results whose gradients AOTAutograd's backward reads.
    """
    note = replay.note
    own = [i for i, info in enumerate(outputs) if _type_of(info) not in _OF_INPUTS]
    bases: dict[int, int] = {}  # a view of each base that AOTAutograd returns after the results
    for i, info in enumerate(outputs):
        if _type_of(info) in _OF_BASES:
            bases.setdefault(info.base_idx, i)
    views = tuple(bases[i] for i in sorted(bases))

    def call(*args: Any) -> Any:
        noted = note(*args)
        results = function(*args)
        for result in (*([results[i] for i in own] if outputs else results), *(args[i] for i in changed)):
            node = _compiled_node(getattr(result, "grad_fn", None))
            if node is not None:
                made_by = type(node)._forward_cls
                if not hasattr(made_by, "fuser_backward"):
                    _extend(made_by, replay, views, changed, reached, gradients)
                node.fuser_inputs = noted
                if gradients:
                    node.set_materialize_grads(False)
                break
        return results

    return call


def _type_of(info: Any) -> str:
    return str(getattr(getattr(info, "output_type", None), "name", ""))


def _compiled_node(node: Any) -> Any:
    """The autograd node of AOTAutograd's function that computed a result, or the base of a view; or None."""
    for _ in range(_MOST_VIEWS):
        if node is None or hasattr(getattr(type(node), "_forward_cls", None), "compiled_fw"):
            return node
        node = node.next_functions[-1 if "Copy" in node.name() else 0][0] if node.next_functions else None
    return None


def _extend(
    made_by: Any, replay: Replay, views: Sequence[int], changed: Sequence[int],
    reached: Sequence[int], gradients: Sequence[int],
) -> None:  # fmt: skip
    """Let the class of AOTAutograd's function handle backwards that are to be differentiated, and missing gradients."""
    from torch._dynamo import disable

    compiled = made_by.backward
    boxed = bool(getattr(made_by, "boxed_grads_call", False))

    def once(ctx: Any, grads: Any) -> Any:
        return compiled(ctx, grads) if boxed else compiled(ctx, *grads)

    if gradients:
        once = leaving_none(once, reached, gradients, lambda _: False)
        untold_when_traced(made_by)

    @disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = getattr(ctx, "fuser_inputs", None)
        flat = grads[0] if len(grads) == 1 and isinstance(grads[0], list) else grads
        if inputs is None or not (torch.is_grad_enabled() or any(map(is_batched, flat))):
            return once(ctx, flat)
        return by_eager(replay, ctx, inputs, flat, views, changed)

    made_by.fuser_backward = True
    made_by.backward = staticmethod(backward)


def has_own_gradients(gm: fx.GraphModule) -> bool:
    """Whether a graph calls functions with their own gradients, as Dynamo captures `torch.autograd.Function`.

    Their backward runs without gradients on values without history, so autograd would take these for constants.
    """
    return any(
        str(node.target) == "autograd_function_apply"
        for part in gm.modules() if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes if node.op == "call_function"
    )  # fmt: skip


def is_batched(grad: Any) -> bool:
    """Whether a gradient is one of a batch, of `torch.autograd.grad(..., is_grads_batched=True)`.

    Some operators of a compiled backward, such as copies to channels-last, have no batching rule; eager's have.
    """
    return isinstance(grad, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(grad)


def by_eager(
    replay: Replay, ctx: Any, noted: Any, grads: Sequence[Any], views: Sequence[int] = (), changed: Sequence[int] = ()
) -> tuple[Any, ...]:
    """Gradients of the inputs, with a graph of their own if gradients are enabled.

    `grads`: those of the new content of the inputs `changed`, of the results, and of the bases of the results `views`.
    """
    again = torch.is_grad_enabled()
    if again and notices.is_first("gradients of gradients"):
        _log.warning("a gradient is to be differentiated: its graph runs again, by eager")
    inputs = replay.inputs(noted, ctx.needs_input_grad)
    with torch.enable_grad():  # one input may be computed from another, whose gradient here counts only its own uses
        pairs = zip(inputs, ctx.needs_input_grad, strict=True)
        inputs = [value.view_as(value) if required else value for value, required in pairs]
    with replay.drawing(noted):
        results, written = replay.run(inputs)
        bases = [results[i]._base for i in views]
        results = [*(written[i] for i in changed), *results, *bases]
        lost = any(base is None for base in bases)  # eager has made a copy
        if len(ctx.needs_input_grad) != len(inputs) or len(results) != len(grads) or lost:
            raise RuntimeError(
                "fuser: this graph has inputs or results that its compiled form has not, so the gradient of its "
                "gradient cannot be computed: run the function without torch.compile"
            )
        pairs = zip(results, grads, strict=True)
        given = [g is not None and isinstance(r, torch.Tensor) and r.requires_grad for r, g in pairs]
        roots, grads = ([v for v, is_given in zip(every, given, strict=True) if is_given] for every in (results, grads))
        wanted = [i for i, required in enumerate(ctx.needs_input_grad) if required]
        leaves = [inputs[i] for i in wanted]
        found = torch.autograd.grad(roots, leaves, grads, create_graph=again, allow_unused=True)
    by_place = dict(zip(wanted, found, strict=True))
    return tuple(by_place.get(i) for i in range(len(inputs)))
