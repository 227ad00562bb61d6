"""Splits a group without a kernel into several groups, with calls on ATen between them.

Every call has a level. On a path through the graph the level increases by one from an unfusible call to a fusible one.
No unfusible call is between two fusible calls of one level, so these are one group; the group of a level runs before
the level's other calls, and these run before the next group. A call that writes, or runs unknown Python, keeps its
position: calls before it have at most its level, fusible calls after it a higher one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.canonical import Ref, Registered, Row, refs_of
from fuser.canonical.graph import ROUNDED, map_refs
from fuser.canonical.schemas import Kind
from fuser.fallback import Fallback
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import COPIES_IF_NEEDED
from fuser.reasons import because
from fuser.refusals import Refusals

_PYTHON = ("call.", "method.", "attribute.")  # canonical calls of Python functions and methods
_SINGLE = (Kind.TENSOR, Kind.INPUT, Kind.NUMBER)  # kinds of values that a group accepts
_CROSSING = (*_SINGLE, Kind.ANY)  # kinds that may turn out to be accepted
# Calls that change a tensor's sizes or strides; and calls that may return their argument, which then has these, too.
_RESIZING = frozenset(
    "aten.as_strided_ aten.resize_ aten.resize_as_ aten.set_ aten.squeeze_ aten.swapaxes_ aten.swapdims_ aten.t_ "
    "aten.transpose_ aten.unsqueeze_".split()
)
_SAME = COPIES_IF_NEEDED.union(
    "aten.type_as aten.atleast_1d aten.atleast_2d aten.atleast_3d aten.broadcast_tensors".split()
)


@dataclass(frozen=True)
class Piece:
    """One group of a split: a graph of its own, and the rows that it reads and returns.

    `examples` are its inputs as meta tensors, None if unknown. `doubtful`: one may be neither tensor nor number.
    `calls` are the rows of the whole group of which its calls consist, in the order of its graph.
    """

    graph: fx.Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    examples: tuple[Any, ...]
    doubtful: bool
    calls: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unfused:
    """One call that runs on ATen, and why.

    `row` is its number in the graph as registered; `bytes` pass between it and other calls, as far as is known.
    """

    op: str
    reason: str
    row: int = -1
    bytes: int = 0


@dataclass(frozen=True, eq=False)
class Split:
    """A group in pieces. `function` runs it, bound tensors first; `keys` are the pieces' registrations."""

    function: Callable[..., Any]
    pieces: tuple[Piece, ...]
    keys: tuple[int, ...]
    unfused: tuple[Unfused, ...]


def split(
    registered: Registered, found: Refusals, register: Callable[[fx.Graph], tuple[int, Callable[..., Any]]]
) -> Split | None:
    """`registered` in pieces around the refused calls; None if no call would be fused, or all of them.

    `register(graph)` returns a key and a function for each piece.
    """
    rows = _Rows(registered, found)
    levels = _Levels(rows)
    plan = _Plan(rows, levels)
    if not plan.pieces or not _is_smaller(plan, registered):
        return None
    made = [register(p.graph) for p in plan.pieces]
    ordered = plan.order([_checked(f, p) for (_, f), p in zip(made, plan.pieces, strict=True)])
    whole = dataclasses.replace(registered, rows=tuple(ordered))
    unfused = tuple(Unfused(rows.op_of(i), why, i, rows.bytes_of(i)) for i, why in rows.reasons.items())
    return Split(Fallback(whole).function, tuple(plan.pieces), tuple(k for k, _ in made), unfused)


def is_hopeless(registered: Registered, found: Refusals) -> bool:
    """Whether no call of a group can be fused, according to `found`."""
    return not _Rows(registered, found).fusible


def _is_smaller(plan: _Plan, registered: Registered) -> bool:
    """Whether every piece has fewer calls than the whole, or as many and fewer results, so that repeated splits end."""
    size = sum(r.op in _CALLS for r in registered.rows), len(set(refs_of(registered.output)))
    return all((sum(n.op in _CALLS for n in p.graph.nodes), len(p.outputs)) < size for p in plan.pieces)


_CALLS = ("call_function", "call_method", "call_module")


def _checked(function: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
    """A piece's function. Calls with an argument that is neither tensor nor number run on ATen."""
    if not piece.doubtful:
        return function
    module = fx.GraphModule(torch.nn.Module(), piece.graph)

    def call(*args: Any) -> Any:
        fit = all(isinstance(a, (torch.Tensor, int, float)) for a in args)
        return function(*args) if fit else module.forward(*args)

    return call


# -- kinds of rows
# -----------------------------------------------------------------------------------------------------
class _Rows:
    """A group's rows by kind: given, free (sizes, views, creation from numbers), items, fusible, or left to ATen."""

    def __init__(self, registered: Registered, found: Refusals) -> None:
        self.registered = registered
        self.rows = {r.index: r for r in registered.rows}
        self.nodes: dict[int, list[Any]] = {i: [] for i in self.rows}
        for node, row in zip(registered.graph.nodes, registered.origins, strict=True):
            self.nodes.setdefault(row, []).append(node)
        self.found = found
        self.defaults = {r.index: r.args[0] for r in registered.rows if r.op == "placeholder" and r.args}
        self.free: set[int] = set()
        self.items: dict[int, int] = {}  # items, with the row from whose result they are taken
        self.fusible: set[int] = set()
        self.reasons: dict[int, str] = {}  # why the others are left to ATen
        self.readers: dict[int, list[int]] = {i: [] for i in self.rows}
        self.resizes = any(n.op in _RESIZING for n in registered.graph.nodes)
        for each in registered.rows:
            self._add(each)
        self._drop_bundles()

    def refs(self, row: Row) -> list[int]:
        """The rows that a row reads."""
        return [] if row.op in ("placeholder", "get_attr") else list(dict.fromkeys(refs_of((row.args, row.kwargs))))

    def op_of(self, index: int) -> str:
        """A readable name of a row's call."""
        nodes, target = self.nodes[index], self.rows[index].target
        return str(nodes[-1].op if nodes else getattr(target, "__name__", target))

    def example_of(self, index: int) -> Any:
        """An example of a row's value; None if unknown."""
        node = self.registered.results[index]
        meta = self.found.metas[node] if 0 <= node < len(self.found.metas) else None
        return meta if isinstance(meta, (torch.Tensor, int, float)) else None

    def bytes_of(self, index: int) -> int:
        """The bytes that pass between a row and other calls, as far as is known."""
        read = [i for i in self.refs(self.rows[index]) if self.rows[i].op not in ("placeholder", "get_attr")]
        shared = [*read, *([index] if self.readers[index] else [])]
        known = (self.example_of(i) for i in shared)
        return sum(t.numel() * t.element_size() for t in known if isinstance(t, torch.Tensor))

    def is_rounded(self, index: int) -> bool:
        """Whether a decision depends on a row's value, in any piece."""
        return any(n.index in self.found.rounded for n in self.nodes[index])

    def is_doubtful(self, index: int) -> bool:
        """Whether a row's value may be neither tensor nor number."""
        opaque = any(n.op.startswith(_PYTHON) for n in self.nodes[index])
        return opaque or index in self.defaults or self.registered.kinds[index] not in _SINGLE

    def _add(self, row: Row) -> None:
        for i in self.refs(row):
            self.readers[i].append(row.index)
        if row.op in ("placeholder", "get_attr"):
            return
        reason = self._reason(row)
        source = self._picked(row)
        if source is not None and source not in self.free and reason is None:
            self.items[row.index] = self.items.get(source, source)
        elif reason is not None:
            self.reasons[row.index] = reason
        elif all(node.index in self.found.free for node in self.nodes[row.index]):
            self.free.add(row.index)
        else:
            self.fusible.add(row.index)

    def _picked(self, row: Row) -> int | None:
        nodes = self.nodes[row.index]
        refs = self.refs(row)
        return refs[0] if len(nodes) == 1 and nodes[0].op == "getitem" and len(refs) == 1 else None

    def _reason(self, row: Row) -> str | None:
        """The reason why this call runs on ATen; None if a kernel may compute it."""
        for node in self.nodes[row.index]:
            if node.index in self.found.refused:
                return self.found.refused[node.index]
            if self.resizes and node.op in _SAME:
                return because("writes", "its result may be its argument, and the group changes a tensor's sizes")
        if row.index in self.registered.impure:
            return because("random", "it writes into a tensor, draws random numbers or runs Python")
        for i in self.refs(row):
            whole = self.registered.kinds[i] not in _CROSSING and self._picked(row) is None
            if i in self.reasons and whole:
                return because("follows", f"it takes all results of {self.op_of(i)}, which runs on ATen")
        return None

    def _drop_bundles(self) -> None:
        """Leave calls to ATen whose several results are not read one by one: a group returns single tensors."""
        returned = set(refs_of(self.registered.output))
        for index in [i for i in self.fusible if self.registered.kinds[i] not in _CROSSING]:
            if index in returned or any(self.items.get(r) != index for r in self.readers[index]):
                self.fusible.discard(index)
                self.reasons[index] = because("several_views", "its results are read together")


# -- the order of rows
# -------------------------------------------------------------------------------------------------
class _Levels:
    """The level of each row, and its epoch: the number of earlier calls that may write."""

    def __init__(self, rows: _Rows) -> None:
        self.level: dict[int, int] = {}
        self.epoch: dict[int, int] = {}
        behind: dict[int, tuple[int, ...]] = {}  # for each row: the call, or the calls of which it is a view
        floor, drawn, top, epoch = -1, -1, -1, 0  # fusible calls are above `floor`, others at or above it
        for row in rows.registered.rows:
            index, sources = row.index, dict.fromkeys(s for i in rows.refs(row) for s in behind[i])
            fusible = index in rows.fusible
            if index in rows.items or index in rows.free:
                behind[index] = tuple(sources)
            else:
                behind[index] = (index,) if fusible or index in rows.reasons else ()
            above = [self.level[s] + (fusible and s in rows.reasons) for s in sources]
            level = max(above) if index in rows.items else max([floor + fusible, *above])
            self.epoch[index] = epoch
            if index in rows.registered.impure:
                level = drawn = max(level, drawn)
            if index in rows.registered.writing:
                level = floor = max(level, top)
                epoch += 1
            self.level[index] = level
            top = max(top, level)


# -- the pieces --------------------------------------------------------------------------------------------------------
class _Plan:
    """The pieces of a group, and the execution order of pieces and other rows."""

    def __init__(self, rows: _Rows, levels: _Levels) -> None:
        self.rows, self.levels = rows, levels
        self.outside: set[int] = set()  # rows that run outside of all pieces
        self.needed: set[int] = set()  # members of pieces that are read outside of their piece
        members: dict[int, list[int]] = {}
        for index in rows.rows:
            if self._is_member(index):
                members.setdefault(levels.level[index], []).append(index)
        self._need(refs_of(rows.registered.output))
        for index in rows.reasons:
            self._need([index])
        inputs = {level: self._inputs(found) for level, found in members.items()}
        self._need(i for found in inputs.values() for i in found)
        self.levels_of: list[int] = []
        self.pieces: list[Piece] = []
        for level, found in sorted(members.items()):
            outputs = tuple(i for i in found if i in self.needed)
            if outputs:
                self.levels_of.append(level)
                self.pieces.append(self._piece(found, inputs[level], outputs))

    def _is_member(self, index: int) -> bool:
        return self.rows.items.get(index, index) in self.rows.fusible

    def _need(self, indices: Iterable[int]) -> None:
        """Mark rows that are read outside of their pieces."""
        stack = list(indices)
        while stack:
            index = stack.pop()
            if index in self.outside or index in self.needed:
                continue
            if self._is_member(index):
                self.needed.add(index)
            else:
                self.outside.add(index)
                stack += self.rows.refs(self.rows.rows[index])

    def _is_copied(self, index: int, epoch: int) -> bool:
        """Whether a row is copied into the pieces of its epoch that read it."""
        row = self.rows.rows[index]
        constant = row.op == "get_attr" and not isinstance(row.target, Ref)
        return constant or (index in self.rows.free and self.levels.epoch[index] == epoch)

    def _inputs(self, members: Sequence[int]) -> tuple[int, ...]:
        """The inputs of a piece, including those of rows copied into it, in the order of first use."""
        found: dict[int, None] = {}
        inside = set(members)
        epoch = self.levels.epoch[members[0]]

        def visit(index: int) -> None:
            for i in self.rows.refs(self.rows.rows[index]):
                if i in inside:
                    continue
                if self._is_copied(i, epoch):
                    visit(i)
                else:
                    found[i] = None

        for member in members:
            visit(member)
        return tuple(found)

    def _piece(self, members: Sequence[int], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Piece:
        graph = fx.Graph()
        env: dict[int, Any] = {}
        calls: list[int] = []
        kinds = self.rows.registered.kinds
        for i in inputs:
            env[i] = graph.placeholder(f"v{i}")
            if kinds[i] is Kind.NUMBER:
                env[i].meta["val"] = 0

        def node(index: int) -> Any:
            if index not in env:
                row = self.rows.rows[index]
                if row.op == "get_attr":
                    env[index] = row.target
                else:
                    args, kwargs = map_refs((row.args, row.kwargs), lambda r: node(r.index))
                    env[index] = graph.create_node(row.op, row.target, args, kwargs)
                    calls.append(index)
                    if self.rows.is_rounded(index):
                        env[index].meta[ROUNDED] = True
            return env[index]

        for member in members:
            node(member)
        results = tuple(env[i] for i in outputs)
        graph.output(results if len(results) > 1 else results[0])
        examples = tuple(map(self.rows.example_of, inputs))
        return Piece(graph, inputs, outputs, examples, any(map(self.rows.is_doubtful, inputs)), tuple(calls))

    def order(self, functions: Sequence[Callable[..., Any]]) -> list[Row]:
        """The rows of the whole: each piece's call, and the rows outside."""
        size = max(self.rows.rows) + 1
        steps: list[tuple[tuple[int, int], int, list[Row]]] = []
        for index in self.rows.rows:
            row = self.rows.rows[index]
            if row.op in ("placeholder", "get_attr"):
                steps.append(((-2, 0), index, [row]))
            elif index in self.outside:
                steps.append(((self.levels.level[index], 1), index, [row]))
        for n, (piece, level, function) in enumerate(zip(self.pieces, self.levels_of, functions, strict=True)):
            steps.append(((level, 0), n, _call(piece, function, size + n)))
        return [row for _, _, made in sorted(steps, key=lambda s: s[:2]) for row in made]


def _call(piece: Piece, function: Callable[..., Any], index: int) -> list[Row]:
    """The rows that call a piece and take its results."""
    args = tuple(map(Ref, piece.inputs))
    if len(piece.outputs) == 1:
        return [Row(piece.outputs[0], "call_function", function, args, {})]
    picked = [Row(o, "call_function", operator.getitem, (Ref(index), n), {}) for n, o in enumerate(piece.outputs)]
    return [Row(index, "call_function", function, args, {}), *picked]
