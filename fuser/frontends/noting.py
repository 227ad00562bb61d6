"""Records of a graph's operators: those of each group, and those outside groups, with their source lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from fuser import logs
from fuser.frontends.records import CompiledGraph, GroupRecord, UnfusedOp
from fuser.logs import LOG
from fuser.passes.classify import Kind, op_name
from fuser.passes.extract import GroupPlan, Plan
from fuser.passes.grouping import Grouping
from fuser.passes.hints import bytes_hint
from fuser.passes.sources import notes_of


def group_records(plan: Plan, keys: Sequence[int], grouping: Grouping) -> tuple[GroupRecord, ...]:
    """A record for each group of a plan, in its order."""
    number = _numbers(plan, grouping)
    apart: dict[int, list[tuple[int, str]]] = {}
    for (first, second), reason in grouping.apart.items():
        if first in number and second in number:
            apart.setdefault(number[first], []).append((number[second], reason))
    return tuple(
        GroupRecord(
            k, g.ops, len(g.inputs), len(g.outputs), tuple(notes_of(n) for n in _calls(g.graph)), _bytes(g),
            tuple(apart.get(i, ())),
        )
        for i, (k, g) in enumerate(zip(keys, plan.groups, strict=True))
    )  # fmt: skip


def _numbers(plan: Plan, grouping: Grouping) -> dict[int, int]:
    """The index in the plan of each group of the grouping."""
    return {grouping.group_of[g.outputs[0]]: i for i, g in enumerate(plan.groups) if g.outputs[0] in grouping.group_of}


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (n for n in graph.nodes if n.op == "call_function")


def _bytes(group: GroupPlan) -> int:
    return sum(bytes_hint(n.meta.get("val")) for n in (*group.inputs, *group.outputs))


def unfused_ops(plan: Plan, grouping: Grouping) -> tuple[UnfusedOp, ...]:
    """A record for each operator outside groups, in the graph's order."""
    why = grouping.reasons
    made_by = {o: i for i, g in enumerate(plan.groups) for o in g.outputs}
    readers: dict[fx.Node, dict[int, None]] = {}
    for i, g in enumerate(plan.groups):
        for n in g.inputs:
            readers.setdefault(n, {})[i] = None
    return tuple(
        _record(n, why[n.name], grouping, made_by, readers) for n in plan.outside if n.name in why
    )  # fmt: skip


def flows(plan: Plan, grouping: Grouping) -> tuple[tuple[str, str, int], ...]:
    """The values between the groups of a plan and the operators outside: from, to, bytes; see `CompiledGraph`."""
    maker = {o: group_name(i) for i, g in enumerate(plan.groups) for o in g.outputs}
    maker.update({n: n.name for n in plan.outside if n.name in grouping.reasons})
    readers: list[tuple[str, Sequence[fx.Node]]] = [(group_name(i), g.inputs) for i, g in enumerate(plan.groups)]
    readers += [(n.name, n.all_input_nodes) for n in plan.outside if n.name in grouping.reasons]
    found: dict[tuple[str, str], int] = {}
    for reader, given in readers:
        for n in dict.fromkeys(s for a in given for s in ((a,) if a in maker else _behind(a, grouping))):
            if n in maker:
                found[maker[n], reader] = found.get((maker[n], reader), 0) + _bytes_of(n, given)
    return tuple((a, b, size) for (a, b), size in found.items())


def group_name(number: int) -> str:
    """The name of a group in `flows`."""
    return f"group {number}"


def _bytes_of(node: fx.Node, given: Sequence[fx.Node]) -> int:
    """The bytes of a value; for a tuple, those of the items that are read."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return sum(bytes_hint(n.meta.get("val")) for n in given if n in node.users) or bytes_hint(value)
    return bytes_hint(value)


def _record(
    node: fx.Node, reason: str, grouping: Grouping, made_by: dict[fx.Node, int], readers: dict[fx.Node, dict[int, None]]
) -> UnfusedOp:  # fmt: skip
    given = dict.fromkeys(s for a in node.all_input_nodes for s in _behind(a, grouping))
    taken = list(_through(node, grouping))
    shared = [n for n in given if n.op != "placeholder" and n.op != "get_attr"]
    shared += [node] if any(u.op != "output" for n in taken for u in n.users) else []
    return UnfusedOp(
        node.name, op_name(node.target), reason, notes_of(node),
        sum(bytes_hint(n.meta.get("val")) for n in shared),
        tuple(dict.fromkeys(made_by[n] for n in given if n in made_by)),
        tuple(dict.fromkeys(i for n in taken for i in readers.get(n, ()))),
    )  # fmt: skip


def _behind(node: fx.Node, grouping: Grouping) -> Iterator[fx.Node]:
    """The nodes of which a value is a view or an item, or the node itself."""
    free = grouping.kinds.get(node) is Kind.FREE or (grouping.kinds.get(node) is Kind.ITEM and node.all_input_nodes)
    if not free or node in grouping.group_of or not node.all_input_nodes:
        yield node
        return
    yield from _behind(node.all_input_nodes[0], grouping)


def _through(node: fx.Node, grouping: Grouping) -> Iterator[fx.Node]:
    """A node, and its views and items."""
    yield node
    for user in node.users:
        if grouping.kinds.get(user) in (Kind.FREE, Kind.ITEM) and user not in grouping.group_of:
            yield from _through(user, grouping)


def log_graph(record: CompiledGraph) -> None:
    """Log one line about a graph, and on request one for each operator on ATen."""
    LOG.info("%s", _Line(record))
    logs.say("fuser_why", lambda: "\n".join(_why(record)))
    logs.trace(f"fuser_{record.stage}_groups", lambda: "\n".join([str(_Line(record)), *_groups(record), *_why(record)]))
    logs.trace(f"fuser_{record.stage}_program", lambda: record.source)


class _Line:
    """A record as one line, formatted when it is read."""

    def __init__(self, record: CompiledGraph) -> None:
        self.record = record

    def __str__(self) -> str:
        r = self.record
        if r.route == "eager":
            return f"graph {r.compile_id} {r.stage} runs in eager: {r.reason}"
        return (
            f"graph {r.compile_id} {r.stage}: {r.ops_fused} operators in {len(r.groups)} groups of {len(r.keys)} kinds"
            f", {len(r.unfused)} on ATen, {r.seconds:.3f} s"
        )


def _why(r: CompiledGraph) -> list[str]:
    told = [f"graph {r.compile_id} {r.stage}: {f'{len(r.unfused)} operators on ATen' if r.groups else r.reason}"]
    told += [f"  {u.op} at {u.source or '?'} [{u.code}] {u.bytes} bytes: {u.reason}" for u in r.unfused]
    return told + [f"  groups {i} and {n} are apart: {why}" for i, g in enumerate(r.groups) for n, why in g.apart]


def _groups(r: CompiledGraph) -> list[str]:
    said = []
    for i, g in enumerate(r.groups):
        lines = ", ".join(dict.fromkeys(str(s) for s in g.sources if s is not None))
        said.append(f"  group {i}, fusion {g.key}: {' '.join(g.ops)} at {lines or '?'}")
    return said


__all__ = ["flows", "group_name", "group_records", "log_graph", "unfused_ops"]
