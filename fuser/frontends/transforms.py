"""Graphs inside and around `torch.func` and forward-mode AD: which parts are left unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import fx
from torch.utils import _pytree as pytree

from fuser.reasons import because

FORWARD = because("mode", "it was captured inside a level of forward-mode AD")
_OF_DUALS = ("_make_dual", "make_dual")  # functions that start a forward-mode derivative


def is_in_forward_mode() -> bool:
    """Whether a graph is captured inside a level of forward-mode AD; Dynamo's guards then check the same.

    Eager runs then: passes and AOTAutograd create operators that have no forward-mode derivative.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None:
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.source import GlobalStateSource

        if hasattr(GuardBuilder, "DUAL_LEVEL"):
            context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
    return forward_ad._current_level >= 0


def hide_transformed(gm: fx.GraphModule) -> None:
    """Remove the values of nodes inside `vmap`, `grad`, forward-mode AD and similar, so that no pass rewrites them.

    Their values in Dynamo's graph belong to ended levels: no operator accepts them. Rewritten calls may lack the
    batching and forward-mode rules that the program's own calls have.
    """
    dual = any(getattr(n.target, "__name__", "") in _OF_DUALS for n in gm.graph.nodes if n.op == "call_function")
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op != "placeholder" and (dual or any(map(_is_wrapped, pytree.tree_leaves(value)))):
            node.meta.pop("example_value", None)


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


@contextlib.contextmanager
def levels_kept() -> Iterator[None]:
    """If the block raises, leave the levels of transforms and of forward-mode AD that it entered.

    Dynamo's graphs enter and leave them by calls, without the program's `with`. The same holds for what levels switch
    off and on: hooks of saved tensors, and forward-mode AD itself.
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    forward = torch._C._is_fwd_grad_enabled()
    try:
        yield
    except BaseException:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        with contextlib.suppress(RuntimeError):  # it entered none
            torch._C._exit_dual_level(level=forward_ad._current_level + 1)
        torch._C._set_fwd_grad_enabled(forward)
        if refused is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(refused)
        raise
