"""Fusible parts of a TorchScript graph, each replaced by one call of an operator made for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fuser import forks, interface
from fuser.errors import FuserError
from fuser.frontends.script_groups import Group, Plan, plan_block
from fuser.frontends.script_nodes import Facts, Role, every_node, study
from fuser.frontends.torchscript import Translator, line_of

NAMESPACE = "fuser_ts"
_TYPES = {"TensorType": "Tensor", "IntType": "int", "FloatType": "float", "BoolType": "bool", "NumberType": "Scalar"}
_DROPOUTS = frozenset({"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"})


@dataclass(frozen=True)
class ScriptGroup:
    """One fused part: the operator's name, the registration's key, the graph as text, the calls, the source lines."""

    operator: str
    key: int
    text: str
    calls: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Unfused:
    """One node that the script runs itself, why, and its source line."""

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
    """A copy of an inlined graph with its fusible parts as operators. `evaluating`: for modules outside of training."""
    graph = inlined.copy()
    _simplify(graph, evaluating)
    facts = study(graph)
    made = Fused(graph)
    _fuse_block(graph.block(), facts, made)
    kinds = ("prim::Constant", "prim::GetAttr", "prim::ListConstruct", "prim::TupleConstruct", "prim::TupleUnpack")
    for node in every_node(graph):
        fact = facts.of.get(node)
        if fact is not None and fact.reason and node.kind() not in kinds:
            made.unfused.append(Unfused(node.kind(), fact.reason, line_of(node)))
    graph.lint()
    return made


# -- before ------------------------------------------------------------------------------------------------------------
def _simplify(graph: Any, evaluating: bool) -> None:
    """Fewer nodes that mean the same. What a trace saw of shapes is forgotten: it need not hold in other calls."""
    torch._C._jit_pass_erase_shape_information(graph)
    if evaluating:
        _assume_evaluation(graph)
    torch._C._jit_pass_constant_propagation(graph)
    torch._C._jit_pass_peephole(graph, True)
    torch._C._jit_pass_remove_mutation(graph)
    _open_tuples(graph)
    _drop_dropouts(graph)
    torch._C._jit_pass_dce(graph)


def training_flags(graph: Any) -> list[Any]:
    """The nodes that ask whether a module is in training."""
    flags = [n for n in every_node(graph) if n.kind() == "prim::GetAttr" and n.s("name") == "training"]
    return [n for n in flags if n.output().type().kind() == "BoolType"]


def _assume_evaluation(graph: Any) -> None:
    for node in training_flags(graph):
        node.output().replaceAllUsesWith(_constant_before(graph, node, False))


def _constant_before(graph: Any, node: Any, value: Any) -> Any:
    with graph.insert_point_guard(node):
        return graph.insertConstant(value)


def _open_tuples(graph: Any) -> None:
    """Items of tuples that the graph itself makes."""
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
    """Dropout outside of training gives its very input."""
    for node in every_node(graph):
        if node.kind() in _DROPOUTS and node.inputsAt(2).toIValue() is False:
            node.output().replaceAllUsesWith(node.inputsAt(0))


# -- blocks ------------------------------------------------------------------------------------------------------------
def _fuse_block(block: Any, facts: Facts, made: Fused) -> None:
    """Fuse within the blocks inside, then in the block itself."""
    for node in block.nodes():
        for inner in node.blocks():
            _fuse_block(inner, facts, made)
    while True:
        plan = plan_block(block, facts)
        registered: list[tuple[ScriptGroup, Any]] = []
        for group in plan.groups:
            try:
                registered.append(_register(group))
            except (FuserError, RuntimeError, TypeError, ValueError, LookupError) as e:
                for node in group.members:
                    facts.refuse(node, f"its group was refused: {e}")
                break
        else:
            break
    _replace(block, plan, facts, [r for _, r in registered])
    made.groups += [g for g, _ in registered]


def _register(group: Group) -> tuple[ScriptGroup, str]:
    """A group as a registered fusion, and the operator that runs it."""
    module = group_to_fx(group)
    key = interface.register_fusion(module)
    types = [_TYPES[v.type().kind()] for v in group.inputs]
    name = operator_for(key, types, len(group.outputs), module)
    lines = dict.fromkeys(line_of(n) for n in group.members)
    text = str(module.graph).strip()
    calls = tuple(n.kind() for n in group.members)
    return ScriptGroup(name, key, text, calls, tuple(filter(None, lines))), name


def group_to_fx(group: Group) -> fx.GraphModule:
    """A group as a graph of its inputs; one result as it is, several as a tuple."""
    translator = Translator()
    for number, value in enumerate(group.inputs):
        translator.input(f"i{number}", value)
    for node in group.nodes:
        translator.step(node)
    results = tuple(translator.value(v) for v in group.outputs)
    translator.graph.output(results if len(results) > 1 else results[0])
    translator.graph.eliminate_dead_code()
    translator.graph.lint()
    return fx.GraphModule(translator.root, translator.graph)


def _replace(block: Any, plan: Plan, facts: Facts, names: Sequence[str]) -> None:
    """Put calls of operators where groups were, and the block in the order that they need."""
    graph, end = facts.graph, block.returnNode()
    calls = []
    for group, name in zip(plan.groups, names, strict=True):
        call = graph.create(name, group.inputs, len(group.outputs))
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


# -- operators ---------------------------------------------------------------------------------------------------------
_lock = forks.lock()
_library: Any = None
_defined: dict[tuple[int, tuple[str, ...], int], str] = {}


def operator_for(key: int, types: Sequence[str], results: int, module: fx.GraphModule) -> str:
    """The name of the operator that runs a registered fusion for arguments of these types."""
    global _library
    known = (key, tuple(types), results)
    with _lock:
        if known not in _defined:
            if _library is None:
                _library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
            name = f"group_{key}" if not any(k[0] == key for k in _defined) else f"group_{key}_{len(_defined)}"
            arguments = ", ".join(f"{t} i{n}" for n, t in enumerate(types))
            given = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
            _library.define(f"{name}({arguments}) -> {given}")
            handle: Callable[..., Any] = interface.fusion_handle(key)
            _library.impl(name, handle, "CompositeImplicitAutograd")
            _defined[known] = f"{NAMESPACE}::{name}"
        return _defined[known]
