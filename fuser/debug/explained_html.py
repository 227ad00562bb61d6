"""An explanation as HTML for notebooks: tables and folds, light or dark as the system. `page.py` has the report."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fuser.debug import explained_text
from fuser.debug.explained_text import short
from fuser.debug.units import bytes_text
from fuser.reasons import BY_CODE

if TYPE_CHECKING:
    from fuser.debug.explanation import Explanation, Graph, Group, Operator

_STYLE = """
:root { color-scheme: light dark; }
.fuser { font: 14px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 0 auto; padding: 0 1rem; }
.fuser table { border-collapse: collapse; margin: .5rem 0; }
.fuser td, .fuser th { border-bottom: 1px solid #8885; padding: .15rem .6rem; text-align: left; vertical-align: top; }
.fuser td.n { text-align: right; white-space: nowrap; }
.fuser details { margin: .2rem 0 .2rem 1rem; } .fuser summary { cursor: pointer; }
.fuser .off { color: #c60; }
"""


def fragment(e: Explanation) -> str:
    """The explanation as a part of a document, without scripts, as a notebook shows it."""
    return f"<style>{_STYLE}</style>{_body(e)}"


def _body(e: Explanation) -> str:
    parts = [f"<p><b>{_text(explained_text.overview(e).splitlines()[0])}</b></p>"]
    parts += [_graph(g) for g in e.graphs]
    parts += [_group(g) for g in e.others]
    if e.breaks:
        rows = ((b.count, short(str(b.source)) if b.source else "", b.reason) for b in e.breaks)
        parts.append("<h3>Graph breaks</h3>" + _table(("times", "at", "reason"), rows))
    if e.recompilations:
        again = ((r.function, short(r.at), r.reason) for r in e.recompilations)
        parts.append("<h3>Recompilations</h3>" + _table(("function", "at", "guard that failed"), again))
    codes = dict.fromkeys(o.code for o in e.not_fused)
    if codes:
        meanings = ((c, BY_CODE[c].means, BY_CODE[c].cure) for c in codes)
        parts.append("<h3>Reasons</h3>" + _table(("code", "meaning", "what to do"), meanings))
    return f'<div class="fuser">{"".join(parts)}{"".join(f"<p>{_text(n)}</p>" for n in e.notes)}</div>'


def _graph(g: Graph) -> str:
    title = f"Graph {g.number}: {g.title} {g.function} {short(g.at) if g.at else ''}"
    why = f" ({g.reason})" if g.reason else ""
    told = [f"<h3>{_text(title)}</h3><p>{_text(g.route + why)}, {g.seconds:.3f} s</p>"]
    told += [_group(group) for group in g.groups]
    if g.not_fused:
        told.append(_operators("On ATen", sorted(g.not_fused, key=lambda o: -o.bytes), why=True))
    return "".join(told)


def _group(g: Group) -> str:
    names = " ".join(o.op.removeprefix("aten.") for o in g.operators if o.op != "getitem")
    state = "" if g.fused else f' <span class="off">[{g.code}]</span>'
    facts = [
        ("key", g.key), ("bytes in and out", bytes_text(g.bytes)), ("hits", g.hits), ("misses", g.misses),
        ("seconds of compiling", f"{g.seconds:.3f}"), *((f"… {s}", f"{t:.3f}") for s, t in g.stages.items()),
        *(("missed", m) for m in g.missed), *((f"{n} calls on ATen", why) for why, n in g.fallbacks.items()),
        *((f"apart from group {n}", why) for n, why in g.apart), *([("why not fused", g.reason)] if g.reason else []),
    ]  # fmt: skip
    told = _table((), facts) + _operators("operators", g.operators, not g.fused)
    for k in g.kernels:
        rows = [("library", k.library), *(("takes", t) for t in k.takes), *(("apart", " ".join(a)) for a in k.apart)]
        told += _folded(f"kernel {k.name}", _table((), rows))
    return f"<details><summary>group {g.number}: {_text(names[:160])}{state}</summary>{told}</details>"


def _operators(title: str, found: Sequence[Operator], why: bool) -> str:
    head = ("operator", "line", "", "module", *(("code", "reason", "bytes") if why else ()))
    rows = []
    for o in found:
        s = o.source
        own = (short(str(s)), s.text, s.module) if s is not None else ("", "", "")
        rows.append((o.op, *own, *((o.code, o.reason, bytes_text(o.bytes)) if why else ())))
    return _folded(f"{title} ({len(found)})", _table(head, rows))


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{inside}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = f"<tr>{''.join(f'<th>{_text(h)}</th>' for h in head)}</tr>" if head else ""
    cells = (f"<tr>{''.join(_cell(c) for c in row)}</tr>" for row in rows)
    return f"<table>{top}{''.join(cells)}</table>"


def _cell(value: Any) -> str:
    return f"<td{' class=n' if isinstance(value, int) else ''}>{_text(value)}</td>"


def _text(value: Any) -> str:
    return html.escape(str(value))


__all__ = ["fragment"]
