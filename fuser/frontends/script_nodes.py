"""The role of each node of a TorchScript graph in its fusion: in a kernel, free inside one, or left to the script."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from dataclasses import field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fuser import interface
from fuser.errors import FuserError
from fuser.frontends.script_memory import SILENT, Memory, every_node
from fuser.frontends.torchscript import Translator
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import COPIES_IF_NEEDED, may_share
from fuser.passes.classify import op_name, schema_reason
from fuser.reasons import because

Node = Any  # torch._C.Node
Value = Any  # torch._C.Value


class Role(enum.Enum):
    """The role of a node."""

    COMPUTE = "compute"  # may be fused
    FREE = "free"  # a view, a size, a list: copied into each group that reads it
    PURE = "pure"  # never part of a group; runs anywhere between its inputs and its readers
    ORDERED = "ordered"  # keeps its position


@dataclass
class Fact:
    """One node: its role, why it is not fused, and what it must not be reordered with.

    `leaves` are the values that a group with this node takes as inputs; `copies` the free nodes between, in order.
    `exposed`: it reads or returns memory that the graph writes somewhere; `writes`: it writes memory; `raises`: it may
    raise; `fence`: nothing moves across it.
    """

    node: Node
    role: Role
    reason: str = ""
    leaves: tuple[Value, ...] = ()
    copies: tuple[Node, ...] = ()
    exposed: bool = False
    writes: bool = False
    raises: bool = False
    fence: bool = False
    operators: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()  # leaves whose values decide its code
    presences: tuple[Value, ...] = ()  # leaves that may be None, which also decides it


PASSED = frozenset({"TensorType", "IntType", "FloatType", "BoolType", "NumberType"})  # kinds of values a group takes
_NUMBERS = PASSED - {"TensorType"}
_METADATA = frozenset({"aten::size", "prim::dtype", "prim::device", "prim::layout", "prim::NumToTensor"})
_STRUCTURE = frozenset({"prim::ListConstruct", "prim::ListUnpack", "aten::__getitem__", "aten::len", "aten::slice"})
_ARITHMETIC = frozenset({"aten::add", "aten::sub", "aten::mul", "aten::floordiv", "aten::neg"})
# They return numbers, tuples or attributes, write nothing and never raise.
_PURE = frozenset(
    "prim::TupleConstruct prim::TupleUnpack prim::ListConstruct prim::Uninitialized prim::unchecked_cast "
    "prim::is_cuda prim::is_cpu prim::dtype prim::device aten::dim aten::numel aten::len aten::size "
    "aten::is_floating_point aten::__is__ aten::__isnot__ aten::__not__ aten::add aten::sub aten::mul aten::neg "
    "aten::eq aten::ne aten::lt aten::le aten::gt aten::ge aten::Float aten::ScalarImplicit prim::NumToTensor".split()
)
_PURE_OF_NUMBERS = frozenset("aten::div aten::pow aten::max aten::min aten::sqrt aten::exp aten::log".split())
_OPEN = frozenset({"Tensor", "SymInt", "Scalar", "number", "float"})  # types of arguments that do not decide code
_OPTIONAL = frozenset({"Tensor?", "int?", "float?", "bool?"})  # types of arguments that may be None
_DECISIVE = frozenset({"int", "bool", "float", "str", "int[]", "int?", "float?", "bool?", "str?", "int[]?"})
_CREATION = frozenset("aten.full aten.zeros aten.ones aten.arange aten.scalar_tensor".split())
_CASTS = COPIES_IF_NEEDED
FENCES = frozenset(
    "prim::Enter prim::Exit prim::CallMethod prim::CallFunction prim::fork aten::wait prim::rpc_async "
    "aten::set_grad_enabled prim::PythonOp prim::awaitable".split()
)
_RESHAPING = (
    "resize_ resize_as_ set_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ detach_ "
    "requires_grad_ set_data rename_".split()
)
_RESHAPING_NODES = frozenset(f"aten::{n}" for n in _RESHAPING)


@dataclass
class Facts:
    """The facts of a graph before anything in it changes."""

    graph: Any
    of: dict[Node, Fact] = field(default_factory=dict)
    maker: dict[Value, Fact] = field(default_factory=dict)

    def refuse(self, node: Node, reason: str) -> None:
        """Leave a node to the script."""
        fact = self.of[node]
        fact.role, fact.reason, fact.leaves, fact.copies = Role.ORDERED, reason, (), ()
        fact.values, fact.presences = (), ()


def read_by(node: Node) -> list[Value]:
    """The values that a node reads, including those read in its blocks."""
    found = list(node.inputs())
    for block in node.blocks():
        for inner in block.nodes():
            found += read_by(inner)
        found += block.outputs()
    return found


def study(graph: Any) -> Facts:
    """The facts of every node of a graph; the graph is not changed."""
    return _Study(graph).facts


class _Study:
    """Translates the graph node by node, as far as possible, and decides for each call whether it can be fused."""

    def __init__(self, graph: Any) -> None:
        self.facts = Facts(graph)
        self.memory = Memory(graph)
        self.reshapes = any(n.kind() in _RESHAPING_NODES for n in every_node(graph))
        self.sets = any(n.kind() == "prim::SetAttr" for n in every_node(graph))
        self.translator = Translator()
        self._open(graph.inputs())
        self._block(graph)

    def _open(self, values: Iterable[Value]) -> None:
        for value in values:
            self.translator.input("v", value)

    def _block(self, block: Any) -> Fact:
        """Determine the facts of a block's nodes; returns what the whole block must not be reordered with."""
        whole = Fact(None, Role.ORDERED)
        for node in block.nodes():
            fact = self._node(node)
            self.facts.of[node] = fact
            for value in node.outputs():
                self.facts.maker[value] = fact
            if fact.role is Role.ORDERED:
                self._open(node.outputs())
            elif fact.role is Role.PURE:
                self._open(v for v in node.outputs() if v not in self.translator.numbers)
            whole.writes |= fact.writes
            whole.raises |= fact.raises
            whole.fence |= fact.fence
            whole.exposed |= fact.exposed
        return whole

    def _node(self, node: Node) -> Fact:
        kind = node.kind()
        inner = []
        for block in node.blocks():
            self._open(block.inputs())
            inner.append(self._block(block))
        if inner or kind in FENCES:
            fence = kind in FENCES or any(b.fence for b in inner)
            return Fact(
                node, Role.ORDERED, f"{kind} runs in the script", exposed=any(b.exposed for b in inner),
                writes=any(b.writes for b in inner), raises=any(b.raises for b in inner), fence=fence,
            )  # fmt: skip
        if kind == "prim::Constant":
            self.translator.step(node)
            return self._free(node)
        exposed = any(map(self.memory.is_exposed, (*node.inputs(), *node.outputs())))
        if kind == "prim::GetAttr":
            return Fact(node, Role.ORDERED if self.sets else Role.PURE, "an attribute", exposed=exposed)
        if writes(node):
            return Fact(
                node,
                Role.ORDERED,
                because("writes", f"{kind} writes one of its arguments"),
                exposed=exposed,
                writes=True,
            )
        if kind in ("prim::RaiseException", "aten::_assert_async"):
            return Fact(node, Role.ORDERED, "it stops the script", raises=True)
        fact = self._translated(node, exposed)
        fact.exposed = exposed
        return fact

    def _translated(self, node: Node, exposed: bool) -> Fact:
        """The fact of a node that writes nothing."""
        before = next(iter(reversed(self.translator.graph.nodes)), None)
        try:
            free = self.translator.arithmetic(node)
            if not free:
                self.translator.values.update(zip(node.outputs(), self.translator.outputs(node), strict=False))
        except (FuserError, RuntimeError, ValueError, TypeError, LookupError, NotImplementedError) as e:
            return self._outside(node, exposed, str(e).partition("; trace the function")[0])
        made = _after(self.translator.graph, before)
        if free or node.kind() in _METADATA or (node.kind() in _STRUCTURE and not _gives_tensor(node)):
            return self._checked(self._free(node), exposed)
        if node.kind() in _ARITHMETIC and _kinds(node.outputs()) == {"IntType"}:
            return self._checked(self._free(node), exposed)
        if node.kind() in _STRUCTURE:
            return self._checked(self._free(node), exposed)
        if not _gives_tensor(node):
            return self._outside(node, exposed, because("no_tensor", f"{node.kind()} gives no tensor"))
        return self._call(node, made, exposed)

    def _call(self, node: Node, made: list[fx.Node], exposed: bool) -> Fact:
        """The fact of a node that calls an operator on tensors."""
        calls = [n for n in made if n.op == "call_function"]
        targets = [n.target for n in calls if isinstance(n.target, torch._ops.OpOverload)]
        if not calls:
            return self._outside(node, exposed, f"{node.kind()} is no operator")
        reason = next((r for r in map(schema_reason, targets) if r is not None), None)
        if reason is None:
            reason = next((f.reason for f in map(interface.is_fusible, calls) if not f), None)
        fact = self._free(node)
        reason = reason or self._decided(node, fact)
        if reason is not None:
            return self._outside(node, exposed, f"{node.kind()}: {reason}")
        fact.operators = tuple(map(op_name, targets))
        if not all(map(_is_free, targets)) or not targets:
            fact.role = Role.COMPUTE
        return self._checked(fact, exposed)

    def _decided(self, node: Node, fact: Fact) -> str | None:
        """Note the leaves whose values decide a call's code, such as a dim. Returns why that is impossible, or None."""
        values, presences = dict.fromkeys(fact.values), dict.fromkeys(fact.presences)
        for argument, value in zip(torch._C.parse_schema(node.schema()).arguments, node.inputs(), strict=True):
            maker = self.facts.maker.get(value)
            leaves = maker.leaves if maker is not None and maker.role is Role.FREE else (value,)
            if _element(argument.real_type) in _OPEN:
                presences.update(dict.fromkeys(v for v in leaves if v.type().kind() == "OptionalType"))
                continue
            found = [v for v in tree_leaves(self.translator.value(value)) if isinstance(v, fx.Node)]
            if all(v.target is getattr for v in found):  # the dtype or device of a tensor is known in time
                continue
            if not all(v.type().str() in _DECISIVE for v in leaves):
                return f"its argument {argument.name} is known at run time only"
            values.update(dict.fromkeys(leaves))
        fact.values, fact.presences = tuple(values), tuple(presences)
        return None

    def _checked(self, fact: Fact, exposed: bool) -> Fact:
        """The fact; an unfused one if a group cannot take what the node reads, or must not contain it."""
        node = fact.node
        special = (*fact.values, *(v for v in fact.presences if v.type().str() in _OPTIONAL))
        strange = next((v for v in fact.leaves if v.type().kind() not in PASSED and v not in special), None)
        if strange is not None:
            return self._outside(node, exposed, f"{node.kind()} reads a {strange.type().str()} made at run time")
        if fact.role is Role.COMPUTE:
            if exposed and (node.kind() in SILENT or any(op in _CASTS for op in fact.operators)):
                return self._outside(
                    node, exposed, f"{node.kind()} may give its very input, which is written elsewhere"
                )
            several = any(v.type().kind() != "TensorType" for v in node.outputs())
            return self._outside(node, exposed, f"{node.kind()} gives a list") if several else fact
        numbers = any(v.type().kind() in _NUMBERS for v in fact.leaves) and not _gives_tensor(node)
        if numbers and node.kind() != "prim::ListConstruct":
            return self._outside(node, exposed, "it computes with numbers of the script")
        if exposed and (self.reshapes or node.kind() not in _METADATA):
            return self._outside(node, exposed, "what it reads is written elsewhere")
        return fact

    def _outside(self, node: Node, exposed: bool, reason: str) -> Fact:
        pure = node.kind() in _PURE or _is_number_arithmetic(node)
        movable = pure and not exposed and not _takes_data(node)
        return Fact(node, Role.PURE if movable else Role.ORDERED, reason)

    def _free(self, node: Node) -> Fact:
        """The fact of a free node, with all its leaves and copies."""
        leaves: dict[Value, None] = {}
        copies: dict[Node, None] = {}
        values: dict[Value, None] = {}
        presences: dict[Value, None] = {}
        for value in node.inputs():
            maker = self.facts.maker.get(value)
            if maker is not None and maker.role is Role.FREE:
                leaves.update(dict.fromkeys(maker.leaves))
                copies.update(dict.fromkeys((*maker.copies, maker.node)))
                values.update(dict.fromkeys(maker.values))
                presences.update(dict.fromkeys(maker.presences))
            else:
                leaves[value] = None
        return Fact(
            node, Role.FREE, leaves=tuple(leaves), copies=tuple(copies), values=tuple(values),
            presences=tuple(presences),
        )  # fmt: skip


def _after(graph: fx.Graph, before: fx.Node | None) -> list[fx.Node]:
    nodes = []
    for node in reversed(graph.nodes):
        if node is before:
            break
        nodes.append(node)
    return nodes[::-1]


def _element(kind: Any) -> str:
    """The name of a schema type without its list and optional parts."""
    text: str = kind.str()
    return text.split("[")[0].rstrip("?")


def _kinds(values: Iterable[Value]) -> set[str]:
    return {v.type().kind() for v in values}


def _gives_tensor(node: Node) -> bool:
    return any("Tensor" in v.type().str() for v in node.outputs())


def _is_number_arithmetic(node: Node) -> bool:
    """Whether a node computes with numbers and cannot raise: a division by zero gives infinity, some powers raise."""
    if node.kind() not in _PURE_OF_NUMBERS or not _kinds([*node.inputs(), *node.outputs()]) <= _NUMBERS:
        return False
    exponent = node.inputsAt(1).toIValue() if node.kind() == "aten::pow" else 1
    return exponent is not None and exponent >= 0


def _takes_data(node: Node) -> bool:
    """Whether a node reads a number from a tensor's data."""
    reads = node.kind() in ("aten::Float", "aten::ScalarImplicit", "aten::eq", "aten::ne", "aten::lt", "aten::gt")
    return reads and "TensorType" in _kinds(node.inputs()) | _kinds(node.outputs())


def _is_free(target: Any) -> bool:
    name = op_name(target)
    return name in _CREATION or (name not in _CASTS and may_share(name))


def writes(node: Node) -> bool:
    """Whether a node writes a tensor or a list, or changes an attribute."""
    kind = node.kind()
    if kind in ("aten::batch_norm", "aten::instance_norm"):
        has_statistics = node.inputsAt(3).type().kind() != "NoneType"
        return has_statistics and node.inputsAt(5).toIValue() is not False
    if kind.startswith("prim::"):
        return kind in ("prim::SetAttr",)
    schema = node.schema()
    return schema != "(no schema)" and _schema_writes(schema)


@functools.cache
def _schema_writes(text: str) -> bool:
    schema = torch._C.parse_schema(text)
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
