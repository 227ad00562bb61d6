"""Passes made of two functions: calls of the pattern are replaced by calls of the replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.passes.checking import BrokenGraph


def compile_pattern(
    stage: str, pattern: Callable[..., Any], replacement: Callable[..., Any], example_inputs: Sequence[Any]
) -> Callable[[fx.GraphModule], int]:
    """A pass that replaces each match of `pattern`. Both are traced on `example_inputs` when first needed."""
    traced: list[fx.GraphModule] = []

    def replace(module: fx.GraphModule) -> int:
        from torch.fx.subgraph_rewriter import replace_pattern_with_filters

        if not traced:
            traced.extend(_trace(stage, f, example_inputs) for f in (pattern, replacement))
        return len(replace_pattern_with_filters(module, traced[0], traced[1]))

    return replace


def _trace(stage: str, function: Callable[..., Any], example_inputs: Sequence[Any]) -> fx.GraphModule:
    """The traced function, with calls as in the stage's graphs: torch functions before autograd, ATen after it."""
    if stage == "pre_grad":
        return fx.symbolic_trace(function)
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import make_fx

    from fuser.passes.decompositions import decomposition_table
    from fuser.passes.dispatched import in_fast_forms

    try:
        with torch.no_grad(), unset_fake_temporarily(), in_fast_forms():
            module: fx.GraphModule = make_fx(function, decomposition_table())(*example_inputs)
    except Exception as error:
        name = getattr(function, "__name__", "a function")
        raise BrokenGraph(f"{name} cannot be traced on its example inputs: {type(error).__name__}: {error}") from error
    module.graph.eliminate_dead_code()
    module.recompile()
    return module
