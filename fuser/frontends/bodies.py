"""Operators on graphs, such as `cond`, `while_loop`, `scan` and `map`: each graph is compiled on its own.

AOTAutograd passes such a call with functional graphs as attributes of the module, the *bodies*. A body goes through
the passes, the grouping and the outer program like any graph. The loops here call the bodies' programs and compute
what torch's own loops compute. Under a mode or a transform the operator itself runs, on the original graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fuser.lazy_dataclasses import dataclass
from fuser.passes.checking import copied
from fuser.passes.classify import ON_GRAPHS, graphs_of, runs_graphs
from fuser.passes.registry import run_stage

if TYPE_CHECKING:
    from fuser.frontends.functional import Compiled
    from fuser.passes.runner import PassRecord
    from fuser.runtime.loops import Form

Function = Callable[..., Any]
# Operators in Dynamo's graphs that run a graph once, as if it were inlined.
_REGIONS = frozenset("cond invoke_subgraph hints_wrapper".split())


@dataclass(frozen=True)
class Body:
    """One graph that an operator runs: its attribute of the module, the operator's name, the compiled graph."""

    name: str
    operator: str
    compiled: Compiled
    forms: tuple[Form, ...] | None  # of the rows of results that it writes; see `rows_of_loops.store_rows`


@dataclass(frozen=True)
class Call:
    """The replacement of a call of an operator on graphs: a function, and its arguments without the graphs."""

    function: Function
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def compile_bodies(
    module: fx.GraphModule, compile_graph: Callable[[fx.GraphModule, bool], Compiled]
) -> tuple[tuple[Body, ...], dict[fx.Node, Call]]:
    """The compiled bodies of a module, each once, and the replacement call of each node that runs bodies.

    `compile_graph` takes a body, and whether the inputs it writes overlap no other memory.
    """
    bodies: dict[str, Body] = {}
    calls: dict[fx.Node, Call] = {}
    for node in module.graph.nodes:
        names = [str(a.target) for a in graphs_of(node)]
        if not names:
            continue
        from fuser.frontends.rows_of_loops import store_rows  # few graphs have bodies

        for name in names:
            if name not in bodies:
                body = _own_copy(getattr(module, name))
                forms = store_rows(node, body)
                bodies[name] = Body(name, runs_graphs(node), compile_graph(body, forms is not None), forms)
        calls[node] = _call(module, node, [bodies[name] for name in names])
    return tuple(bodies.values()), calls


def for_eager(module: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph in a form that eager can differentiate: `invoke_subgraph` has no gradient outside a trace.

    The graphs of such calls are called as modules. Returns `module` itself if there are none.
    """
    found = with_bodies(module, for_eager, _is_region)
    if found is not module:
        for node in list(found.graph.nodes):
            if _is_region(node):
                put_call(node, node.args[2:])
        found.recompile()
    return found


def with_bodies(
    module: fx.GraphModule, change: Callable[[fx.GraphModule], fx.GraphModule], marked: Callable[[fx.Node], bool]
) -> fx.GraphModule:
    """A copy of a module with its inner graphs changed; `module` itself if none changes and it has no marked node."""
    inner = {n: m for n, m in module.named_children() if isinstance(m, fx.GraphModule)}
    made = {n: change(m) for n, m in inner.items()}
    if not any(map(marked, module.graph.nodes)) and all(made[n] is m for n, m in inner.items()):
        return module
    found = fx.GraphModule(module, copied(module.graph))
    for name, body in made.items():
        if hasattr(found, name):
            setattr(found, name, body)
    return found


def put_call(node: fx.Node, operands: Sequence[Any]) -> None:
    """Replace a call of an operator on graphs by a call of its first graph as a module."""
    region: Any = node.args[0]
    with node.graph.inserting_before(node):
        call = node.graph.call_module(region.target, tuple(operands))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def _is_region(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and str(node.target) == "invoke_subgraph"


def passed_bodies(module: fx.GraphModule) -> tuple[PassRecord, ...]:
    """Run the passes before autograd on the bodies of Dynamo's graph; the records of the passes that changed one.

    A body that changes is replaced by a copy. The gradient of a loop passes only tensors from step to step, so bodies
    of loops are unchanged if a gradient may be needed.
    """
    found: list[PassRecord] = []
    known = _REGIONS if torch.is_grad_enabled() else _REGIONS | ON_GRAPHS
    names = [
        str(a.target)
        for node in module.graph.nodes
        if str(node.target) in known and isinstance(node.target, torch._ops.HigherOrderOperator)
        for a in node.all_input_nodes
        if a.op == "get_attr" and isinstance(getattr(module, str(a.target), None), fx.GraphModule)
    ]
    for name in dict.fromkeys(names):
        body = fx.GraphModule(getattr(module, name), copied(getattr(module, name).graph))
        if not isinstance(body.graph.output_node().args[0], (tuple, list)):
            continue
        records = [r for r in (*passed_bodies(body), *run_stage("pre_grad", body)) if r.changed]
        if records:
            body.recompile()
            setattr(module, name, body)
            found += records
    return tuple(found)


def all_of(bodies: Sequence[Body]) -> Iterator[Body]:
    """The bodies and the bodies inside them, inner ones first."""
    for body in bodies:
        yield from all_of(body.compiled.bodies)
        yield body


def _own_copy(body: fx.GraphModule) -> fx.GraphModule:
    """A copy of a body that passes may rewrite; its result is a tuple."""
    made = fx.GraphModule(body, copied(body.graph))
    output = made.graph.output_node()
    (results,) = output.args
    output.args = (tuple(results) if isinstance(results, (tuple, list)) else (results,),)
    made.recompile()
    return made


def _function_of(compiled: Compiled) -> Function:
    """A function from a body's inputs to the tuple of its results."""
    if compiled.program is None:
        return compiled.module.forward
    return compiled.alone or compiled.program.function


def _call(module: fx.GraphModule, node: fx.Node, bodies: Sequence[Body]) -> Call:
    """The call that replaces a node's; `bodies` are those of its graphs, in order."""
    operator: Any = node.target
    graphs: dict[Any, str] = {a: str(a.target) for a in graphs_of(node)}
    functions = {b.name: _function_of(b.compiled) for b in bodies}
    whole = {name: getattr(module, name) for name in graphs.values()}
    args = tuple(a for a in node.args if not (isinstance(a, fx.Node) and a in graphs))
    given = {k: graphs[v] for k, v in node.kwargs.items() if isinstance(v, fx.Node) and v in graphs}
    own: Function
    if given:  # of a call around another operator, which runs these as they are
        own = partial(operator, **{k: _as_written(functions[name], whole[name]) for k, name in given.items()})
    else:
        from fuser.runtime.loops import LOOPS  # few graphs have bodies

        own = LOOPS[str(operator)](*(functions[b.name] for b in bodies), bodies[0].forms)

    def call(*rest: Any, **named: Any) -> Any:
        if not _are_modes_on():
            return own(*rest, **named)
        values = iter(rest)
        every = [whole[graphs[a]] if isinstance(a, fx.Node) and a in graphs else next(values) for a in node.args]
        return operator(*every, **{k: whole[name] for k, name in given.items()}, **named)

    return Call(call, args, {k: v for k, v in node.kwargs.items() if k not in given})


def _as_written(function: Function, graph: fx.GraphModule) -> Function:
    """`function` with its results in the form that `graph` returns: a tuple or a single value."""
    if isinstance(graph.graph.output_node().args[0], (tuple, list)):
        return function
    return lambda *args: function(*args)[0]


def _are_modes_on() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()

__all__ = ["Body", "Call", "all_of", "compile_bodies", "for_eager", "passed_bodies"]
