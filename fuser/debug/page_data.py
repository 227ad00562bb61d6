"""The report's data as plain values: an explanation, the user's lines, each group's stages, and times."""

from __future__ import annotations

import linecache
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fuser.debug.explained_text import headline, said, short
from fuser.debug.profile_report import ProfileReport
from fuser.debug.traffic import product_rate
from fuser.lazy_dataclasses import dataclass
from fuser.passes.sources import Source
from fuser.reasons import BY_CODE
from fuser.runtime.spans import Stage

if TYPE_CHECKING:
    from fuser.debug.explanation import Explanation, Graph, Group, Kernel, Operator

SCHEMA = 1
_AROUND = 2  # context lines before and after each of the user's lines
_LOWERING_SECONDS = 2.0  # for the IR and plans of all groups together


@dataclass(frozen=True)
class Times:
    """The times of a report. `stages`: those of compilations; `replayed`: the profile is of calls made for the report.

    `began` is the clock of `time.perf_counter` at the start. `frames` are Dynamo's compilations: name, begin, seconds.
    """

    profile: ProfileReport | None = None
    replayed: bool = False
    stages: tuple[Stage, ...] = ()
    frames: tuple[tuple[str, float, float], ...] = ()
    began: float = 0.0
    note: str = ""


def data_of(e: Explanation, title: str, times: Times | None = None) -> dict[str, Any]:
    """All data of the page in its script's form. Large keys are strings: JavaScript's numbers are too short."""
    times = Times() if times is None else times
    profile = times.profile
    lines = _Lines()
    spent = _seconds_of(profile)
    graphs = [_graph(g, lines, spent) for g in e.graphs]
    if e.others:
        graphs.append(_by_hand(e.others, lines, spent))
    return {
        "schema": SCHEMA, "title": title, "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": _machine(), "head": headline(e), "notes": [*e.notes, *filter(None, [times.note])],
        "graphs": graphs, "kinds": _kinds(e.groups, spent),
        "breaks": [[b.count, lines.at(b.source), said(b.reason)] for b in e.breaks],
        "again": [[r.function, short(r.at), said(r.reason)] for r in e.recompilations],
        "reasons": {c: [BY_CODE[c].means, BY_CODE[c].cure] for c in dict.fromkeys(o.code for o in e.not_fused)},
        "roof": _roof(profile), "profile": _profile(profile, times.replayed), "compiling": _compiling(times),
        "files": lines.files,
    }  # fmt: skip


def _machine() -> str:
    version = getattr(sys.modules.get("fuser"), "__version__", "")
    cuda = [torch.cuda.get_device_name(0)] if torch.cuda.is_available() else []
    processor = platform.processor() or platform.machine()
    parts = [f"fuser {version}", f"torch {torch.__version__}", f"Python {platform.python_version()}", *cuda, processor]
    return ", ".join([*parts, f"{torch.get_num_threads()} threads"])


# -- the user's lines --------------------------------------------------------------------------------------------------
class _Lines:
    """The source lines of operators, with some lines around them; each line once."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, str]] = {}

    def at(self, source: Source | None) -> list[Any] | None:
        """[short name of the file, line, function, module] of a line, which is added to the page."""
        if source is None:
            return None
        name = short(source.file)
        kept = self.files.setdefault(name, {})
        for n in range(max(1, source.line - _AROUND), source.line + _AROUND + 1):
            if str(n) not in kept and (text := linecache.getline(source.file, n).rstrip()):
                kept[str(n)] = text
        kept.setdefault(str(source.line), source.text)
        return [name, source.line, source.function, source.module]


# -- graphs ------------------------------------------------------------------------------------------------------------
def _graph(g: Graph, lines: _Lines, spent: dict[int, float]) -> dict[str, Any]:
    return {
        "number": g.number, "stage": g.title, "route": g.route, "reason": g.reason, "code": g.code,
        "function": g.function, "at": short(g.at) if g.at else "", "seconds": g.seconds, "traced": g.traced,
        "passes": [[name, changed, seconds] for name, changed, seconds in g.passes], "program": g.program,
        "groups": [_group(group, lines, spent) for group in g.groups],
        "alone": [_operator(o, lines) for o in g.not_fused],
        "eager": [[n, reason] for reason, n in g.by_eager.items()],
        "flows": [list(flow) for flow in g.flows],
    }  # fmt: skip


def _by_hand(groups: Sequence[Group], lines: _Lines, spent: dict[int, float]) -> dict[str, Any]:
    """Groups outside graphs, in the form of a graph."""
    empty = dict.fromkeys(("reason", "code", "function", "at", "program"), "")
    return {
        **empty, "number": -1, "stage": "registered by hand", "route": "", "seconds": 0.0, "traced": 0.0, "passes": [],
        "groups": [_group(g, lines, spent) for g in groups], "alone": [], "eager": [], "flows": [],
    }  # fmt: skip


def _group(g: Group, lines: _Lines, spent: dict[int, float]) -> dict[str, Any]:
    names = Counter(o.op.removeprefix("aten.") for o in g.operators if o.op != "getitem")
    return {
        "number": g.number, "key": str(g.key), "label": [[op, n] for op, n in names.items()],
        "operators": [_operator(o, lines) for o in g.operators], "inputs": g.inputs, "outputs": g.outputs,
        "bytes": g.bytes, "apart": [list(a) for a in g.apart], "code": g.code, "reason": g.reason,
        "time": spent.get(g.key),
    }  # fmt: skip


def _operator(o: Operator, lines: _Lines) -> dict[str, Any]:
    found = {"op": o.op, "at": lines.at(o.source), "node": o.node}
    told = {"code": o.code, "reason": o.reason, "bytes": o.bytes, "reads": list(o.reads), "readBy": list(o.read_by)}
    return {**found, **told} if o.code else found


# -- kinds of groups ---------------------------------------------------------------------------------------------------
def _kinds(groups: Iterable[Group], spent: dict[int, float]) -> dict[str, Any]:
    """The data that equal groups share, by key. The costliest groups are lowered again first, while time remains."""
    kinds = list({g.key: g for g in groups}.values())
    kinds.sort(key=lambda g: (-spent.get(g.key, 0.0), -g.bytes))
    end = time.monotonic() + _LOWERING_SECONDS
    return {str(g.key): _kind(g, time.monotonic() < end) for g in kinds}


def _kind(g: Group, lowered: bool) -> dict[str, Any]:
    traces = g.traces() if lowered else ()
    late = "" if lowered else f"left out for the report's own time: print(fuser.debug.trace({g.key}))\n"
    return {
        "hits": g.hits, "misses": g.misses, "missed": list(g.missed), "seconds": g.seconds, "stages": g.stages,
        "fallbacks": [[n, why] for why, n in g.fallbacks.items()],
        "kernels": [_kernel(k) for k in g.kernels], "canonical": "\n".join(t.canonical for t in traces),
        "ir": "\n".join(t.ir for t in traces) or late, "plan": "\n".join(p for t in traces for p in t.plans) or late,
    }  # fmt: skip


def _kernel(k: Kernel) -> dict[str, Any]:
    language = "python" if "@triton" in k.source else "cpp"
    return {
        "name": k.name, "library": os.path.basename(k.library), "launches": k.launches, "takes": list(k.takes),
        "apart": [" ".join(a) for a in k.apart], "source": k.source, "language": language,
    }  # fmt: skip


# -- times -------------------------------------------------------------------------------------------------------------
def _seconds_of(profile: ProfileReport | None) -> dict[int, float]:
    """Seconds of each fusion's kernels in a median step, or in the whole block if it has no steps."""
    found: dict[int, float] = {}
    for row in profile.kernels if profile is not None else ():
        for key in row.keys:
            found[key] = found.get(key, 0.0) + row.seconds / max(len(profile.steps) if profile else 1, 1)
    return found


def _roof(profile: ProfileReport | None) -> dict[str, Any] | None:
    if profile is None or not profile.kernels:
        return None
    rows = [
        {"name": r.name, "keys": list(map(str, r.keys)), "bytes": r.bytes, "operations": r.operations,
         "median": r.median, "calls": r.calls, "apart": r.apart}
        for r in profile.kernels
    ]  # fmt: skip
    return {
        "copy": profile.copy_rate, "product": product_rate(profile.device, profile.threads), "kernels": rows,
        "threads": profile.threads,
    }  # fmt: skip


def _profile(profile: ProfileReport | None, replayed: bool) -> dict[str, Any] | None:
    if profile is None:
        return None
    return {
        "seconds": profile.seconds, "steps": list(profile.steps), "parts": profile.parts, "noise": profile.noise,
        "replayed": replayed,
        "events": [[e.name, e.kind, e.begin, e.seconds, e.thread] for e in profile.timeline],
        "beside": [[str(b.key), b.seconds, b.aten_seconds, b.why] for b in profile.beside],
        "others": [[o.name, o.kind, o.calls, o.seconds] for o in profile.others],
    }  # fmt: skip


def _compiling(times: Times) -> list[list[Any]]:
    """Rows of stage, label, begin, seconds, thread; the earliest begins at 0."""
    rows: list[list[Any]] = [[s.name, s.label, s.begin - times.began, s.seconds, s.thread] for s in times.stages]
    rows += [["Dynamo", name, begin - times.began, seconds, "MainThread"] for name, begin, seconds in times.frames]
    first = min((r[2] for r in rows), default=0.0)
    for row in rows:
        row[2] = row[2] - first if math.isfinite(row[2]) else 0.0
    return sorted(rows, key=lambda r: r[2])


__all__ = ["Times", "data_of"]
