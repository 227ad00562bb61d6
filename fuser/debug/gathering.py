"""Explanations from the records of compilations: graphs and groups, and Dynamo's own records."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from fuser.debug.explanation import Break, Explanation, Graph, Group, Kernel, Operator, Recompilation
from fuser.debug.guarding import guards_of, refusal_of
from fuser.debug.opening import Trace, trace_of
from fuser.debug.reporting import why_unfused
from fuser.errors import UnknownKeyError
from fuser.frontends.records import CompiledGraph, GroupRecord
from fuser.kernel_cache import REGISTRY, KernelSpec, Registration
from fuser.kernel_spec import LaunchProgram
from fuser.passes.sources import Notes, Source
from fuser.reasons import code_of

_FREE = ("host.", "sizes.", "prim.")
_GONE = "the program that held this group is gone"


def explanation_of(
    records: Sequence[CompiledGraph], breaks: Sequence[Break], again: Sequence[Recompilation],
    others: Iterable[Registration] = (), notes: tuple[str, ...] = (),
) -> Explanation:  # fmt: skip
    """The explanation of compiled graphs, and of groups outside graphs."""
    metrics = _metrics()
    graphs = tuple(_graph(n, r, metrics.get(r.compile_id)) for n, r in enumerate(records))
    own = tuple(_registered(n, r) for n, r in enumerate(others))
    return Explanation(graphs, tuple(breaks), tuple(again), own, notes)


# -- graphs ------------------------------------------------------------------------------------------------------------
def _graph(number: int, r: CompiledGraph, frame: Any) -> Graph:
    eager = r.route == "eager"
    return Graph(
        number, r.stage, r.route, r.reason, code_of(r.reason) if eager else "",
        getattr(frame, "co_name", None) or "", _at(frame), r.compile_id, r.seconds,
        float(getattr(frame, "entire_frame_compile_time_s", 0.0) or 0.0),
        tuple((p.name, p.changed, p.seconds) for p in r.passes if p.changed),
        tuple(_group(n, g) for n, g in enumerate(r.groups)),
        tuple(
            Operator(u.op, u.source, u.code, u.reason, u.bytes, u.node, u.reads, u.read_by) for u in r.unfused
        ),
        dict(r.by_eager), r.source, r.flows, r.body,
    )  # fmt: skip


def _at(frame: Any) -> str:
    file = getattr(frame, "co_filename", None)
    return f"{file}:{frame.co_firstlineno}" if file else ""


def _group(number: int, g: GroupRecord) -> Group:
    try:
        found = REGISTRY.find(g.key)
    except UnknownKeyError:
        ops = tuple(Operator(op, n.source(), "not_run", _GONE) for op, n in zip(g.ops, g.notes))
        return Group(
            number, g.key, ops, g.inputs, g.outputs, g.bytes, (), 0, 0, (), {}, 0.0, {}, g.apart, "not_run", _GONE
        )
    ops = _operators(number, g.ops, g.notes, found.spec, g.inputs)
    return _of_spec(number, found, ops, g.inputs, g.outputs, g.bytes, g.apart)


def _registered(number: int, found: Registration) -> Group:
    graph = found.spec.graph
    names = tuple(n.op for n in graph.calls if not n.op.startswith(_FREE))
    outputs = len(graph.output) if isinstance(graph.output, tuple) else 1
    ops = _operators(number, names, (), found.spec, -1)
    return _of_spec(number, found, ops, graph.n_inputs - len(found.bound), outputs, 0, ())


def _of_spec(
    number: int, found: Registration, ops: tuple[Operator, ...], inputs: int, outputs: int, size: int,
    apart: tuple[tuple[int, str], ...],
) -> Group:  # fmt: skip
    spec, handle = found.spec, found.runner.handle
    specs = list(_with_pieces(spec))
    reason = why_unfused(spec) if not any(s.store.kernels for s in specs) else None
    fallbacks: dict[str, int] = dict(spec.store.fallbacks)
    stages: dict[str, float] = {}
    for s in specs:
        for entry in s.store.entries:
            for name, seconds in entry.stages.items():
                stages[name] = stages.get(name, 0.0) + seconds
    return Group(
        number, found.key, ops, inputs, outputs, size,
        tuple(k for s in specs for k in _kernels(s)), getattr(handle, "hits", 0), getattr(handle, "misses", 0),
        _missed(spec), fallbacks, sum(s.store.compile_seconds for s in specs), stages, apart,
        code_of(reason) if reason is not None else "", reason or "", functools.partial(_traces, found),
    )  # fmt: skip


def _traces(found: Registration) -> tuple[Trace, ...]:
    """The stages of a group's first class of arguments, or of its pieces'; they keep the specifications alive."""
    made = []
    for spec in _with_pieces(found.spec):
        entry = next((e for e in spec.store.entries if e.example and e.kernels), None)
        if entry is not None:
            made.append(trace_of(spec.key, spec, entry))
    return tuple(made)


def _with_pieces(spec: KernelSpec) -> Iterable[KernelSpec]:
    yield spec
    for piece in _pieces(spec):
        yield from _with_pieces(piece)


def _pieces(spec: KernelSpec) -> list[KernelSpec]:
    splits = spec.store.splits
    return [REGISTRY.find(key).spec for key in splits[-1].keys] if splits and not spec.store.kernels else []


# -- operators ---------------------------------------------------------------------------------------------------------
def _operators(
    number: int, names: Sequence[str], notes: Sequence[Notes], spec: KernelSpec, inputs: int
) -> tuple[Operator, ...]:  # fmt: skip
    """The operators of a group; those that still run on ATen have a reason. `inputs` is -1 if there are no notes."""
    told = list(notes) + [Notes()] * (len(names) - len(notes))
    refused = _refused(spec, {row: row - inputs for row in range(inputs, inputs + len(names))} if inputs >= 0 else None)
    whole = why_unfused(spec) if not any(s.store.kernels for s in _with_pieces(spec)) else None
    found = []
    for n, (op, note) in enumerate(zip(names, told)):
        reason, size = refused.get(n, (whole or "", 0))
        reason = "" if op == "getitem" and n not in refused else reason
        code = code_of(reason) if reason else ""
        found.append(Operator(op, note.source(), code, reason, size, within=number if code else None))
    placed = {n for n in refused if 0 <= n < len(names)}
    others = [why for n, why in refused.items() if n not in placed]  # in a group whose calls cannot be identified
    return (*found, *(Operator("?", None, code_of(r), r, size, within=number) for r, size in others))


def _refused(spec: KernelSpec, place: dict[int, int] | None) -> dict[int, tuple[str, int]]:
    """The reason and the bytes of each call that a split left to ATen, by its number among the group's calls."""
    splits = spec.store.splits
    if not splits or spec.store.kernels:
        return {}
    made, found = splits[-1], {}
    for n, op in enumerate(made.unfused):
        at = place.get(op.row, -1 - n) if place is not None else -1 - n
        found[at] = op.reason, op.bytes
    for piece, key in zip(made.pieces, made.keys):
        inner = REGISTRY.find(key).spec
        first = len(piece.inputs)
        rows = None if place is None else {first + i: place.get(row, -1) for i, row in enumerate(piece.calls)}
        found.update(_refused(inner, rows))
        whole = why_unfused(inner) if not inner.store.kernels and not inner.store.splits else None
        if whole is not None and rows is not None:
            found.update({at: (whole, 0) for at in rows.values() if at >= 0})
    return found


# -- kernels -----------------------------------------------------------------------------------------------------------
def _kernels(spec: KernelSpec) -> list[Kernel]:
    found = []
    for k in spec.store.kernels:
        program = getattr(k, "program", None)
        takes: tuple[str, ...] = ()
        if isinstance(program, LaunchProgram):
            said = guards_of(k.name, program)
            takes = (*said.inputs, *(f"where {r}" for r in said.relations))
        apart = tuple((str(a), str(b), str(why)) for a, b, why in getattr(k, "reasons", ()))
        launches = len(program.steps) if isinstance(program, LaunchProgram) else 1
        found.append(Kernel(k.name, str(k.library), launches, takes, apart, str(k.source)))
    return found


def _missed(spec: KernelSpec) -> tuple[str, ...]:
    """For each class of arguments after the first: why the kernels before did not accept it."""
    said: list[str] = []
    before: list[Any] = []
    for entry in spec.store.entries:
        if entry.example:
            refusals = [r for k in before if (r := refusal_of(k.program, entry.example)) is not None]
            said += [f"{k.name}: {r}" for k, r in zip(before[-1:], refusals[-1:])]
        before += [k for k in entry.kernels if isinstance(getattr(k, "program", None), LaunchProgram)]
    return tuple(said)


# -- Dynamo's records --------------------------------------------------------------------------------------------------
def _metrics() -> dict[str, Any]:
    """Dynamo's metrics of its latest compilations, by their names."""
    utils = sys.modules.get("torch._dynamo.utils")
    read = getattr(utils, "get_compilation_metrics", None)
    return {str(m.compile_id): m for m in read() if getattr(m, "co_name", None)} if read is not None else {}


def frames() -> dict[str, str]:
    """The file and first line of the function of each of Dynamo's latest compilations, by the compilation's name."""
    return {name: _at(m) for name, m in _metrics().items()}


def graph_breaks(begin: int = 0) -> list[Break]:
    """The graph breaks that Dynamo recorded in this process, from number `begin` on."""
    found: dict[tuple[str, Source | None], int] = {}
    for item in _of_dynamo("graph_break_reasons")[begin:]:
        stack = list(getattr(item, "user_stack", ()) or ())
        at = Source(stack[-1].filename, stack[-1].lineno or 0, stack[-1].name, stack[-1].line or "") if stack else None
        found[str(item.reason), at] = found.get((str(item.reason), at), 0) + 1
    return [Break(reason, at, n) for (reason, at), n in found.items()]


def graph_break_count() -> int:
    """The number of graph breaks that Dynamo has recorded."""
    return len(_of_dynamo("graph_break_reasons"))


def _of_dynamo(name: str) -> list[Any]:
    return list(getattr(sys.modules.get("torch._dynamo.utils"), name, None) or ())


def guard_failures() -> dict[Any, tuple[str, ...]]:
    """The failed guards that led to a recompilation, by code object."""
    made = getattr(sys.modules.get("torch._dynamo.utils"), "guard_failures", None) or {}
    return {code: tuple(map(str, reasons)) for code, reasons in list(made.items())}


def recompilations(before: dict[Any, tuple[str, ...]] | None = None) -> list[Recompilation]:
    """Dynamo's recompilations, except those in `before`. An entry of another backend is not counted as a cause."""
    found = []
    for code, reasons in guard_failures().items():
        for reason in reasons[len((before or {}).get(code, ())) :]:
            if "BACKEND_MATCH" not in reason:
                at, name = f"{code.co_filename}:{code.co_firstlineno}", getattr(code, "co_qualname", code.co_name)
                failed, named, guard = reason.strip().partition(": ")  # "0/1: tensor 'x' size mismatch …"
                found.append(Recompilation(name, at, guard if named else reason.strip(), failed if named else ""))
    return found


__all__ = ["explanation_of", "frames", "graph_break_count", "graph_breaks", "guard_failures", "recompilations"]
