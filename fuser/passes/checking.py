"""Checks a graph after a pass: it is well-formed, and every value has the shape that it had."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from fuser.canonical.aliases import overloads_named
from fuser.passes.calls import writes

_VALUE_OF_STAGE = {"pre_grad": "example_value"}


class BrokenGraph(Exception):
    """The fault of a graph, and the name of the node concerned."""

    def __init__(self, reason: str, node: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with its own nodes and the same metadata."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
        if hasattr(node, "_dynamo_source"):  # the source of an input, which AOTAutograd needs
            env[node]._dynamo_source = node._dynamo_source
    new._codegen = graph._codegen
    return new


def node_at_fault(error: BaseException) -> str | None:
    """The name of the node that a failing pass worked on: the innermost local variable that is a node, `node` first."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        local = trace.tb_frame.f_locals
        candidate = local.get("node") or local.get("n")
        if not isinstance(candidate, fx.Node):
            candidate = next((v for v in local.values() if isinstance(v, fx.Node)), None)
        found = candidate.name if candidate is not None else found
        trace = trace.tb_next
    return found


class Snapshot:
    """A graph's state before a pass, to check the graph afterwards. Values are recomputed only for changed nodes."""

    def __init__(self, module: fx.GraphModule, stage: str) -> None:
        self.key = _VALUE_OF_STAGE.get(stage, "val")
        self.calls = {n: (n.target, n.args, n.kwargs) for n in module.graph.nodes}
        self.inputs = [n.target for n in module.graph.nodes if n.op == "placeholder"]
        self.outputs = [_look(v) for v in _outputs(module, self.key)]

    def check(self, module: fx.GraphModule) -> None:
        """Raise BrokenGraph if the graph is not well-formed or a value's shape changed. New nodes get their values."""
        try:
            module.graph.lint()
        except RuntimeError as error:
            said = str(error).partition("\ngraph():")[0]
            raise BrokenGraph(f"it left a graph that does not hold together: {said}") from error
        inputs = [n.target for n in module.graph.nodes if n.op == "placeholder"]
        if inputs != self.inputs:
            raise BrokenGraph(f"it changed the graph's inputs from {self.inputs} to {inputs}")
        self._refresh(module)
        outputs = _outputs(module, self.key)
        if len(outputs) != len(self.outputs):
            raise BrokenGraph(f"it changed the number of results from {len(self.outputs)} to {len(outputs)}", "output")
        for i, (value, look) in enumerate(zip(outputs, self.outputs)):
            if look != _look(value):
                raise BrokenGraph(f"result {i} was {_text(look)} and is {_text(_look(value))}", "output")

    def _refresh(self, module: fx.GraphModule) -> None:
        """Recompute the values of nodes that are new, changed, or depend on such nodes."""
        stale: set[fx.Node] = set()
        turned = any(map(_turns, module.graph.nodes))
        mode = None
        for node in module.graph.nodes:
            known = node.meta.get(self.key)
            mode = mode or getattr(known, "fake_mode", None)
            same = self.calls.get(node) == (node.target, node.args, node.kwargs)
            if node.op in ("placeholder", "output", "get_attr") or (
                same and known is not None and not any(a in stale for a in node.all_input_nodes)
            ):
                continue
            if not _is_computable(node, self.key) or (turned and known is not None):
                continue
            value = _computed(node, self.key, mode)
            if known is not None and node in self.calls and _shape(known) != _shape(value):
                raise BrokenGraph(f"it was {_text(_look(known))} and is {_text(_look(value))}", node.name)
            if known is None or _look(known) != _look(value):
                stale.add(node)
                node.meta[self.key] = value


def _outputs(module: fx.GraphModule, key: str) -> list[Any]:
    (result,) = module.graph.output_node().args
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [r.meta.get(key) if isinstance(r, fx.Node) else r for r in results]


def _turns(node: fx.Node) -> bool:
    """Whether a node may change a tensor's sizes or strides in place: its recorded value then differs among readers."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name == "setattr" or _gives_other_strides(name.partition(".")[0])


@functools.cache
def _gives_other_strides(name: str) -> bool:
    """Whether torch tags ATen's operator of this name as changing sizes or strides in place."""
    return name.endswith("_") and any(torch.Tag.inplace_view in o.tags for o in overloads_named(name))


def _is_computable(node: fx.Node, key: str) -> bool:
    """Whether the node's value can be recomputed on fake values without side effects.

    A node whose result has a data-dependent size would make a new symbol for it.
    """
    if node.meta.get("unbacked_bindings"):
        return False
    if key == "val" and not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        return False
    if node.op not in ("call_function", "call_method") or writes(node):
        return False
    return all(key in a.meta for a in node.all_input_nodes)


def _computed(node: fx.Node, key: str, mode: Any) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: a.meta[key])
    try:
        if mode is None:
            return _call(node, args, kwargs)
        with mode:
            return _call(node, args, kwargs)
    except Exception as error:
        raise BrokenGraph(f"it cannot be computed any more: {type(error).__name__}: {error}", node.name) from error


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _number(size: Any) -> str:
    """A size or stride as text; a symbol by its hint, since equal sizes may be spelled differently.

    Nothing is known of a data-dependent size, so any two such sizes are equal.
    """
    node = getattr(size, "node", None)
    hint = getattr(node, "hint", None)
    return "?" if node is not None and hint is None else str(size if hint is None else hint)


def _shape(value: Any) -> Any:
    """Shape and dtype of a value; adds no guard."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(map(_number, value.shape))
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape, value))
    return type(value)


def _look(value: Any) -> Any:
    """Shape and dtype, and the strides of dims with more than one element."""
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided
        sizes = zip(value.shape, value.stride()) if plain else ()
        strides = [_number(stride) for size, stride in sizes if _number(size) != "1"]
        return *_shape(value), tuple(strides)
    return _shape(value)


def _text(look: Any) -> str:
    if isinstance(look, tuple) and look and isinstance(look[0], torch.dtype):
        dtype, device, shape, *strides = look
        return f"{dtype} [{', '.join(shape)}] on {device}" + (f" strides [{', '.join(strides[0])}]" if strides else "")
    return str(look)
