"""Aliasing in a TorchScript graph: which values may share memory that the graph writes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

Node = Any  # torch._C.Node
Value = Any  # torch._C.Value

# They may return their input, or a view of it, without declaring it: torch's alias analysis does not know that either.
SILENT = frozenset(
    "aten::type_as aten::dropout aten::feature_dropout aten::alpha_dropout aten::feature_alpha_dropout "
    "aten::atleast_1d aten::atleast_2d aten::atleast_3d aten::sum_to_size aten::to_dense aten::einsum "
    "aten::broadcast_tensors aten::cartesian_prod aten::chain_matmul aten::unsafe_chunk aten::unsafe_split "
    "aten::unsafe_split_with_sizes aten::_cast_Byte aten::_cast_Char aten::_cast_Double aten::_cast_Float "
    "aten::_cast_Half aten::_cast_Int aten::_cast_Long aten::_cast_Short aten::set aten::_foobar".split()
)
# TorchScript nodes whose results share memory only with what they read.
_PASSING = frozenset(
    "prim::ListConstruct prim::TupleConstruct prim::TupleUnpack prim::TupleIndex prim::TupleSlice prim::ListUnpack "
    "prim::GetAttr prim::If prim::Loop prim::unchecked_cast prim::NumToTensor".split()
)
_NO_MEMORY = frozenset({"IntType", "FloatType", "BoolType", "NumberType", "StringType", "NoneType", "DeviceObjType"})


def every_node(block: Any) -> Iterator[Node]:
    """The nodes of a block and of the blocks inside it, in order."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from every_node(inner)


class Memory:
    """The memory that a graph may write; the graph is not changed.

    torch's alias analysis answers for pairs of values. To avoid a query for every pair, values are first divided into
    parts of the graph between which no memory passes: its analysis never finds an alias between two parts.
    """

    def __init__(self, graph: Any) -> None:
        self._aliases = graph.alias_db()
        self._exposed: dict[Value, bool] = {}
        nodes = list(every_node(graph))
        self._parts = _Parts(graph, nodes)
        self._silent: dict[Value, list[Value]] = {}  # by part: values whose write the schema does not declare
        self._find_silent(nodes)

    @property
    def is_silent(self) -> bool:
        """Whether memory is written through a value that the graph's alias analysis takes for other memory."""
        return bool(self._silent)

    def is_exposed(self, value: Value) -> bool:
        """Whether a value's memory may be written anywhere in the graph."""
        found = self._exposed.get(value)
        if found is None:
            found = self._exposed[value] = bool(self._aliases.has_writers(value)) or self._meets(value)
        return found

    def _meets(self, value: Value) -> bool:
        others = self._silent.get(self._parts.of(value), ()) if self._silent else ()
        return any(self._aliases.may_contain_alias(value, v) for v in others)

    def _find_silent(self, nodes: list[Node]) -> None:
        pairs = [[*n.inputs(), *n.outputs()] for n in nodes if n.kind() in SILENT]
        # A loop without iterations returns its inputs; torch's analysis assumes that its results are those of an
        # iteration.
        pairs += [list(p) for n in nodes if n.kind() == "prim::Loop" for p in zip([*n.inputs()][2:], n.outputs())]
        pairs = [[v for v in pair if "Tensor" in v.type().str()] for pair in pairs]
        more = pairs
        while more:
            more = [p for p in pairs if any(self._aliases.has_writers(v) or self._meets(v) for v in p)]
            pairs = [p for p in pairs if p not in more]
            for value in (v for p in more for v in p):
                self._silent.setdefault(self._parts.of(value), []).append(value)


class _Parts:
    """The part of a graph to which each value belongs."""

    def __init__(self, graph: Any, nodes: Iterable[Node]) -> None:
        self._parent: dict[Value, Value] = {}
        self._unknown: Value = None  # represents unknown memory, including that of all inputs
        self._join([self._unknown, *graph.inputs()])
        for node in nodes:
            kind = node.kind()
            blocks = list(node.blocks())
            around = (*node.inputs(), *node.outputs(), *(v for b in blocks for v in (*b.inputs(), *b.outputs())))
            if kind in _PASSING or kind in SILENT:
                self._join(around)
            elif kind != "prim::Constant":
                passes, unknown = _memory_of(node.schema()) if not kind.startswith("prim::") else (True, True)
                self._join([*([self._unknown] if unknown else []), *around] if passes else [])

    def of(self, value: Value) -> Value:
        """The value that represents the part of another value."""
        while (above := self._parent.get(value, value)) is not value:
            self._parent[value] = self._parent.get(above, above)
            value = above
        return value

    def _join(self, values: Iterable[Value]) -> None:
        kept = [v for v in values if v is None or v.type().kind() not in _NO_MEMORY]
        for value in kept[1:]:
            one, other = self.of(kept[0]), self.of(value)
            if one is not other:
                self._parent[other] = one


@functools.cache
def _memory_of(schema: str) -> tuple[bool, bool]:
    """(whether an operator's results may share memory with what it reads, whether with any memory)."""
    if schema == "(no schema)":
        return True, True
    parsed = torch._C.parse_schema(schema)
    if any(r.type.kind() not in _NO_MEMORY | {"TensorType"} for r in parsed.returns):  # a list of any type
        return True, True
    named = [a.alias_info for a in (*parsed.arguments, *parsed.returns) if a.alias_info is not None]
    return bool(named), any("*" in {*i.before_set, *i.after_set} for i in named)
