"""Explanations as records: graphs, their groups and kernels, and each operator outside kernels.

`print` gives an overview that fits a terminal, `to_json` everything in the form of docs/explain.md, `to_html` a page.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from dataclasses import field
from typing import Any

from fuser.debug import explained_html, explained_text, page
from fuser.debug.opening import Trace
from fuser.lazy_dataclasses import dataclass
from fuser.passes.sources import Source

SCHEMA = 1  # of `to_json`; increased when a field changes its meaning or is removed


@dataclass(frozen=True)
class Operator:
    """One call. `code` and `reason` say why it runs on ATen; both are "" if a kernel computes it.

    `bytes` pass between it and other operators of the graph, in the sizes seen while tracing; one kernel for all would
    not move them. `reads` and `read_by` are the groups before and after it. `within` is the group that was split
    because of it.
    """

    op: str
    source: Source | None = None
    code: str = ""
    reason: str = ""
    bytes: int = 0
    node: str = ""
    reads: tuple[int, ...] = ()
    read_by: tuple[int, ...] = ()
    within: int | None = None


@dataclass(frozen=True)
class Kernel:
    """One kernel: its library, and the arguments that it accepts.

    `launches` is the number of its loop nests. `apart` says why two loop nests were not fused.
    """

    name: str
    library: str
    launches: int
    takes: tuple[str, ...]
    apart: tuple[tuple[str, str, str], ...]
    source: str = field(repr=False, default="")


@dataclass(frozen=True)
class Group:
    """One fusion group of a graph. Equal groups share a key, and with it kernels and counts.

    `hits` are calls that kernels answered, `misses` those that no kernel accepted at first, with `missed`, the guard
    that failed for each further kernel; `fallbacks` are calls that ran on ATen, by reason. `seconds` of compilation
    are measured by the first caller, `stages` are their parts. `apart`: the groups that read this one, and why they
    were not fused with it.
    """

    number: int
    key: int
    operators: tuple[Operator, ...]
    inputs: int
    outputs: int
    bytes: int
    kernels: tuple[Kernel, ...]
    hits: int
    misses: int
    missed: tuple[str, ...]
    fallbacks: dict[str, int]
    seconds: float
    stages: dict[str, float]
    apart: tuple[tuple[int, str], ...]
    code: str = ""
    reason: str = ""
    read_traces: Callable[[], tuple[Trace, ...]] = field(repr=False, compare=False, default=tuple)

    @property
    def fused(self) -> bool:
        """Whether kernels compute it, at least in part."""
        return not self.code

    def source(self) -> str:
        """The source of its kernels."""
        return "\n".join(k.source for k in self.kernels)

    def plan(self) -> str:
        """Its loops before and after scheduling, lowered again for the arguments of its first call."""
        return "\n".join("\n".join((t.ir, *t.plans)) for t in self.traces())

    def traces(self) -> tuple[Trace, ...]:
        """The stages of its compilation, lowered again; one `Trace` for each part of a group that was split."""
        return self.read_traces()


@dataclass(frozen=True)
class Graph:
    """One graph from Dynamo. `route` is "direct", "wrapped" or "eager"; `reason` says why it is not "direct".

    `function` and `at` name the user's function, `compile_id` Dynamo's compilation ("0/1" is frame 0, the second
    time). `traced` are the seconds of the whole compilation of that frame, with all its graphs; `seconds` are those of
    passes, grouping and registration of this graph. `passes` are those that changed something. `flows` are the values
    that pass between groups ("group 0") and operators on ATen (the names of their nodes): from, to, bytes. `body`: for
    a graph that an operator of a later graph runs, such as "true_graph_0 of cond".
    """

    number: int
    stage: str
    route: str
    reason: str
    code: str
    function: str
    at: str
    compile_id: str
    seconds: float
    traced: float
    passes: tuple[tuple[str, int, float], ...]
    groups: tuple[Group, ...]
    not_fused: tuple[Operator, ...]
    by_eager: dict[str, int]
    program: str = field(repr=False, default="")
    flows: tuple[tuple[str, str, int], ...] = field(repr=False, default=())
    body: str = ""

    @property
    def title(self) -> str:
        """Its stage; for a body also its name and operator."""
        return f"{self.stage}, {self.body}" if self.body else self.stage


@dataclass(frozen=True)
class Break:
    """One graph break: why and where Dynamo ended a graph, and how often."""

    reason: str
    source: Source | None
    count: int = 1


@dataclass(frozen=True)
class Recompilation:
    """A function that Dynamo compiled again, the guard that failed, and the compilation that had this guard."""

    function: str
    at: str
    reason: str
    failed: str = ""


@dataclass(frozen=True)
class Explanation:
    """The explanation of a function, or of all that this process compiled. `others` are groups outside graphs.

    It keeps its groups and their kernels alive.
    """

    graphs: tuple[Graph, ...]
    breaks: tuple[Break, ...] = ()
    recompilations: tuple[Recompilation, ...] = ()
    others: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all graphs, then `others`."""
        return (*(g for graph in self.graphs for g in graph.groups), *self.others)

    @property
    def not_fused(self) -> tuple[Operator, ...]:
        """Every operator that runs on ATen, sorted by the bytes that fusing it would save."""
        alone = [o for graph in self.graphs for o in graph.not_fused]
        return tuple(sorted([*alone, *(o for g in self.groups for o in g.operators if o.code)], key=lambda o: -o.bytes))

    @property
    def fused(self) -> tuple[Operator, ...]:
        """Every operator that a kernel computes."""
        return tuple(o for g in self.groups for o in g.operators if not o.code)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of all groups, each once."""
        found = {g.key: g.kernels for g in self.groups}
        return tuple(k for kernels in found.values() for k in kernels)

    def __str__(self) -> str:
        return explained_text.overview(self)

    def as_dict(self, source: bool = False) -> dict[str, Any]:
        """Everything as plain values, in the form of docs/explain.md; with `source`, the code of kernels and
        programs."""
        left_out = () if source else ("source", "program")
        return {"schema": SCHEMA, **_plain_fields(self, left_out)}

    def to_json(self, source: bool = False, indent: int | None = 1) -> str:
        """The same as JSON."""
        return json.dumps(self.as_dict(source), indent=indent)

    def to_html(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the page of docs/report.md, one self-contained file; returns its path."""
        path = pathlib.Path(path)
        path.write_text(page.page(self), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        return explained_html.fragment(self)


def _plain_fields(record: Any, left_out: tuple[str, ...]) -> dict[str, Any]:
    code = left_out if isinstance(record, (Kernel, Graph)) else ()  # elsewhere `source` is a line of the user's
    names = [f.name for f in dataclasses.fields(record) if f.name not in ("read_traces", *code)]
    return {name: _plain(getattr(record, name), left_out) for name in names}


def _plain(value: Any, left_out: tuple[str, ...]) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain_fields(value, left_out)
    if isinstance(value, (tuple, list)):
        return [_plain(v, left_out) for v in value]
    return {str(k): _plain(v, left_out) for k, v in value.items()} if isinstance(value, dict) else value


__all__ = ["SCHEMA", "Break", "Explanation", "Graph", "Group", "Kernel", "Operator", "Recompilation"]
