"""An explanation as plain text: the most important first, lines cut to the terminal's width, long lists cut."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fuser.debug.units import bytes_text
from fuser.passes.sources import Source
from fuser.reasons import BY_CODE

if TYPE_CHECKING:
    from fuser.debug.explanation import Explanation, Graph, Group, Operator

_MOST = 16  # lines of one list
_LEAST_WIDTH, _WIDTH = 60, 120


def overview(e: Explanation) -> str:
    """The whole explanation in some dozens of lines."""
    width = max(_LEAST_WIDTH, min(shutil.get_terminal_size((_WIDTH, 0)).columns, 160))
    lines = [headline(e), *(line for g in e.graphs for line in _graph(g))]
    if e.others:
        lines += ["groups registered by hand", *_cut([_group(g, 1) for g in e.others])]
    lines += [*_breaks(e), *_recompilations(e), *_reasons(e), *(f"note: {n}" for n in e.notes)]
    return "\n".join(_fit(line, width) for line in lines)


def headline(e: Explanation) -> str:
    """The first lines: counts of graphs, groups, kernels and operators, and times."""
    groups, kernels = e.groups, e.kernels
    fused, left = len(e.fused), len(e.not_fused)
    compiling = sum({g.key: g.seconds for g in groups}.values())
    traced = sum({(g.compile_id, g.at): g.traced for g in e.graphs}.values())
    kinds = len({g.key for g in groups})
    graphs = sum(not g.body for g in e.graphs)
    return (
        f"{_count(graphs, 'graph')}, {_count(sum(b.count for b in e.breaks), 'graph break')}, "
        f"{_count(len(e.recompilations), 'recompilation')}; {fused} of {fused + left} operators in "
        f"{_count(len(groups), 'group')} of {kinds} kinds with {_count(len(kernels), 'kernel')}; "
        f"{traced:.2f} s tracing, {compiling:.2f} s making kernels"
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _graph(g: Graph) -> Iterator[str]:
    where = f" of {g.function} ({short(g.at)})" if g.function else ""
    yield f"graph {g.number}: {g.title}{where}, {g.route}{f': {g.reason}' if g.reason else ''}"
    yield from _cut(_equal_groups(g.groups))
    if g.not_fused:
        size = sum(o.bytes for o in g.not_fused)
        yield f"  on ATen: {_count(len(g.not_fused), 'operator')}, which move {bytes_text(size)} from and to others"
        yield from _cut(_equal_operators(g.not_fused), "    ")
    for reason, n in g.by_eager.items():
        yield f"  {_count(n, 'call')} ran in eager: {reason}"


def _equal_groups(groups: Sequence[Group]) -> list[str]:
    """A line for each kind of equal groups."""
    kinds: dict[int, list[Group]] = {}
    for g in groups:
        kinds.setdefault(g.key, []).append(g)
    return [_group(found[0], len(found)) for found in kinds.values()]


def _group(g: Group, times: int) -> str:
    ops = Counter(o.op.removeprefix("aten.") for o in g.operators if o.op != "getitem")
    names = " ".join(f"{n}*{op}" if n > 1 else op for op, n in ops.items())
    lines = lines_of([o.source for o in g.operators])
    calls = f"{g.hits} hits, {g.misses} misses" + "".join(f", {n} on ATen" for n in [sum(g.fallbacks.values())] if n)
    made = ", ".join(f"{k.name} ({_count(k.launches, 'loop')})" for k in g.kernels) or g.reason or "in parts"
    head = f"  group {g.number}{f' ({times} times)' if times > 1 else ''}"
    return f"{head}: {names} | {lines} | {made} | {bytes_text(g.bytes)} | {calls} | {g.seconds:.2f} s"


def _equal_operators(found: Sequence[Operator]) -> list[str]:
    """A line for each operator and reason, most bytes first, with its source lines."""
    alike: dict[tuple[str, str], list[Operator]] = {}
    for o in found:
        alike.setdefault((o.op, o.reason), []).append(o)
    rows = sorted(alike.values(), key=lambda same: -sum(o.bytes for o in same))
    return [
        f"    {len(same)} {same[0].op.removeprefix('aten.')} [{same[0].code}] {bytes_text(sum(o.bytes for o in same))} "
        f"at {lines_of([o.source for o in same])}{f': {same[0].reason}' if BY_CODE[same[0].code].details else ''}"
        for same in rows
    ]


def _breaks(e: Explanation) -> list[str]:
    if not e.breaks:
        return []
    rows = [f"  {b.count} at {short(str(b.source)) if b.source else '?'}: {said(b.reason)}" for b in e.breaks]
    return ["graph breaks", *_cut(rows)]


def _recompilations(e: Explanation) -> list[str]:
    if not e.recompilations:
        return []
    rows = [f"  {r.function} ({short(r.at)}): {said(r.reason)}" for r in e.recompilations]
    return ["recompilations", *_cut(rows)]


def _reasons(e: Explanation) -> list[str]:
    codes = Counter(o.code for o in e.not_fused)
    return ["reasons", *(f"  {c}: {BY_CODE[c].means}; {BY_CODE[c].cure}" for c in codes)] if codes else []


def said(reason: str) -> str:
    """Dynamo's text about a break or a guard in one line, without its hints."""
    plain = re.split(r"\s*(?:Hint:|Developer debug context:)", reason, maxsplit=1)[0]
    return " ".join(plain.split()) or "no reason is known"


def _cut(rows: Sequence[str], indent: str = "  ") -> list[str]:
    left = len(rows) - _MOST
    return list(rows) if left <= 1 else [*rows[:_MOST], f"{indent}and {left} more: to_json() has all"]


def _fit(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def short(at: str) -> str:
    """`file:line` with the file relative to the working directory, or with its last two folders."""
    here = os.getcwd() + os.sep
    return at.removeprefix(here) if at.startswith(here) else os.sep.join(at.split(os.sep)[-2:])


def lines_of(sources: Sequence[Source | None]) -> str:
    """The source lines of operators: `model.py:12,14`, several files separated by spaces."""
    found: dict[str, dict[int, None]] = {}
    for s in sources:
        if s is not None:
            found.setdefault(short(s.file), {})[s.line] = None
    return (
        " ".join(f"{file}:{','.join(map(str, sorted(lines)))}" for file, lines in found.items()) or "no line is known"
    )


__all__ = ["headline", "lines_of", "overview", "short"]
