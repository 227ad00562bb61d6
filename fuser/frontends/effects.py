"""Calls with an effect, such as the error checks of `torch.linalg`: AOTAutograd orders them by tokens.

A token is an input and a result of the graph, and of each such call, `with_effects(token, operator, …)`. The
statements of a program are ordered anyway, so they call the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

Function = Callable[..., Any]


def drop_tokens(module: fx.GraphModule, count: int) -> None:
    """Remove the tokens, which come first, from a graph's inputs and results. The chain of calls is kept."""
    if not count:
        return
    graph = module.graph
    for token in [n for n in graph.nodes if n.op == "placeholder"][:count]:
        for user in list(token.users):
            user.args = tuple(None if a is token else a for a in user.args)
        graph.erase_node(token)
    output = graph.output_node()
    (results,) = output.args
    output.args = (tuple(results)[count:],)  # type: ignore[arg-type]
    module.recompile()


def with_tokens(function: Function, count: int) -> Function:
    """A boxed function for callers that pass tokens and expect them back."""
    if not count:
        return function

    def call(inputs: list[Any]) -> tuple[Any, ...]:
        tokens = tuple(inputs[:count])
        del inputs[:count]
        return *tokens, *function(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
