"""Fusion of a TorchScript graph: each fusible part is replaced by one call of an operator made for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx

from fuser import interface
from fuser.errors import FuserError
from fuser.frontends.script_groups import Group, Plan, plan_block
from fuser.frontends.script_memory import Memory, every_node
from fuser.frontends.script_nodes import Facts, Role, study
from fuser.frontends.script_operators import Operator, operator_for
from fuser.frontends.script_products import divert_products
from fuser.frontends.script_special import Specialised
from fuser.frontends.script_writes import Writes, without_writes, write_again, written_copy
from fuser.frontends.torchscript import Translator, line_of
from fuser.frontends.torchscript_python import spell_abs
from fuser.lazy_dataclasses import dataclass

_TYPES = {"TensorType": "Tensor", "IntType": "int", "FloatType": "float", "BoolType": "bool", "NumberType": "Scalar"}
_DROPOUTS = frozenset({"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"})


@dataclass(frozen=True)
class ScriptGroup:
    """One fused part: its operator, the calls in it, and their source lines."""

    operator: Operator
    calls: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def key(self) -> int:
        """The key of the registered fusion."""
        return self.operator.key


@dataclass(frozen=True)
class Unfused:
    """One node that the script runs itself, the reason, and its source line."""

    kind: str
    reason: str
    line: str


@dataclass
class Fused:
    """A fused copy of a TorchScript graph."""

    graph: Any
    groups: list[ScriptGroup] = field(default_factory=list)
    unfused: list[Unfused] = field(default_factory=list)


def fused_graph(inlined: Any, evaluating: bool) -> Fused:
    """A copy of an inlined graph with its fusible parts as operators. `evaluating`: for modules not in training."""
    graph = inlined.copy()
    written = _simplify(graph, evaluating)
    facts = study(graph)
    made = Fused(graph)
    _fuse_block(graph.block(), facts, made, written)
    kinds = ("prim::Constant", "prim::GetAttr", "prim::ListConstruct", "prim::TupleConstruct", "prim::TupleUnpack")
    for node in every_node(graph):
        fact = facts.of.get(node)
        if fact is not None and fact.reason and node.kind() not in kinds:
            made.unfused.append(Unfused(node.kind(), fact.reason, line_of(node)))
    write_again(graph, written)
    divert_products(graph)
    graph.lint()
    return made


# -- before ------------------------------------------------------------------------------------------------------------
def _simplify(graph: Any, evaluating: bool) -> Writes:
    """Simplify the graph. Shapes seen by a trace are dropped: they need not hold in other calls.

    Returns the nodes that wrote in place and now return a new tensor.
    """
    torch._C._jit_pass_erase_shape_information(graph)
    spell_abs(graph)
    if evaluating:
        _assume_evaluation(graph)
    torch._C._jit_pass_constant_propagation(graph)
    torch._C._jit_pass_peephole(graph, True)
    _drop_dropouts(graph)
    written = without_writes(graph) if not Memory(graph).is_silent else frozenset()
    _open_tuples(graph)
    torch._C._jit_pass_dce(graph)
    return written


def training_flags(graph: Any) -> list[Any]:
    """The nodes that read whether a module is in training."""
    flags = [n for n in every_node(graph) if n.kind() == "prim::GetAttr" and n.s("name") == "training"]
    return [n for n in flags if n.output().type().kind() == "BoolType"]


def _assume_evaluation(graph: Any) -> None:
    for node in training_flags(graph):
        node.output().replaceAllUsesWith(_constant_before(graph, node, False))


def _constant_before(graph: Any, node: Any, value: Any) -> Any:
    with graph.insert_point_guard(node):
        return graph.insertConstant(value)


def _open_tuples(graph: Any) -> None:
    """Replace reads of items from tuples that the graph itself constructs."""
    for node in list(every_node(graph)):
        made = node.inputsAt(0).node() if node.inputsSize() else None
        if made is None or made.kind() != "prim::TupleConstruct":
            continue
        items = list(made.inputs())
        if node.kind() == "prim::TupleUnpack":
            for output, item in zip(node.outputs(), items, strict=True):
                output.replaceAllUsesWith(item)
        elif node.kind() == "prim::TupleIndex" and node.inputsAt(1).node().kind() == "prim::Constant":
            node.output().replaceAllUsesWith(items[node.inputsAt(1).toIValue()])


def _drop_dropouts(graph: Any) -> None:
    """Remove dropouts outside training, which return their input."""
    for node in every_node(graph):
        if node.kind() in _DROPOUTS and node.inputsAt(2).toIValue() is False:
            node.output().replaceAllUsesWith(node.inputsAt(0))


# -- blocks ------------------------------------------------------------------------------------------------------------
def _fuse_block(block: Any, facts: Facts, made: Fused, written: Writes) -> None:
    """Fuse within the inner blocks, then in the block itself."""
    for node in block.nodes():
        for inner in node.blocks():
            _fuse_block(inner, facts, made, written)
    while True:
        plan = plan_block(block, facts)
        registered: list[ScriptGroup] = []
        for group in plan.groups:
            try:
                registered.append(_register(group, written))
            except (FuserError, RuntimeError, TypeError, ValueError, LookupError) as e:
                for node in group.members:
                    facts.refuse(node, f"its group was refused: {e}")
                break
        else:
            break
    _replace(block, plan, facts, [g.operator for g in registered])
    made.groups += registered


def _register(group: Group, written: Writes) -> ScriptGroup:
    """Register a group as a fusion, with an operator that runs it."""
    graph = group_to_fx(group, written)
    key, handle = _registered(graph)
    if group.values or group.presences:
        by_value = [i for i, v in enumerate(group.inputs) if v in group.values]
        by_presence = [i for i, v in enumerate(group.inputs) if v in group.presences]
        handle = Specialised(graph, handle, by_value, by_presence, _registered)
    types = tuple(_TYPES.get(v.type().kind()) or v.type().str() for v in group.inputs)
    lines = dict.fromkeys(line_of(n) for n in group.members)
    calls = tuple(n.kind() for n in group.members)
    return ScriptGroup(operator_for(key, handle, types, len(group.outputs)), calls, tuple(filter(None, lines)))


def _registered(graph: fx.Graph | fx.GraphModule) -> tuple[int, Any]:
    key, handle = interface.register_handle(graph)
    interface.set_gradients(key, _gradients)
    return key, handle


def _gradients(fallback: Callable[..., Any]) -> Callable[..., Any]:
    from fuser.frontends.script_gradients import Gradients  # it imports AOTAutograd, so only if gradients are needed

    return Gradients(fallback)


def group_to_fx(group: Group, written: Writes = frozenset()) -> fx.Graph | fx.GraphModule:
    """A group as a graph of its inputs; several results are a tuple. It is a module only if it holds tensors."""
    translator = Translator()
    for number, value in enumerate(group.inputs):
        translator.input(f"i{number}", value)
    for node in group.nodes:
        translator.step(node)
        if node in written:
            before = translator.value(node.inputsAt(0))
            translator.values[node.output()] = written_copy(translator.graph, before, translator.value(node.output()))
    results = tuple(translator.value(v) for v in group.outputs)
    translator.graph.output(results if len(results) > 1 else results[0])
    translator.graph.eliminate_dead_code()
    translator.graph.lint()
    holds = any(n.op == "get_attr" for n in translator.graph.nodes)
    return fx.GraphModule(translator.root, translator.graph) if holds else translator.graph


def _replace(block: Any, plan: Plan, facts: Facts, operators: Sequence[Operator]) -> None:
    """Replace groups by calls of their operators, and put the block's nodes in the required order."""
    graph, end = facts.graph, block.returnNode()
    calls = []
    for group, operator in zip(plan.groups, operators, strict=True):
        call = graph.create(operator.name, group.inputs, len(group.outputs))
        calls.append(call.insertBefore(end))
    for group, call in zip(plan.groups, calls, strict=True):
        for old, new in zip(group.outputs, call.outputs(), strict=True):
            old.replaceAllUsesWith(new)
    members = {n for g in plan.groups for n in g.members}
    free = {n for n in plan.keys if facts.of[n].role is Role.FREE}
    alive: list[Any] = []
    for node in reversed(list(block.nodes())):
        if node in members or (node in free and not any(o.uses() for o in node.outputs())):
            facts.of.pop(node)
            node.destroy()
        elif node not in calls:
            alive.append(node)
    keyed = [(plan.keys[n], n) for n in reversed(alive)]
    keyed += [(plan.key_of_group[i], call) for i, call in enumerate(calls)]
    for _, node in sorted(keyed, key=lambda pair: pair[0]):
        node.moveBefore(end)
    for operator, call in zip(operators, calls, strict=True):
        if operator.number is not None:
            call.addInput(_constant_before(graph, call, operator.number))
