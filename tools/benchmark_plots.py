"""The page with plots of docs/benchmarks.md: a hook of mkdocs, which makes it whenever the site is built.

A table with a column "fuser × RIVAL" becomes a chart of these ratios, a table of first calls one of seconds, and that
of graph sizes one of seconds over nodes. Nothing is measured here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = "benchmark_plots.md"
COLOURS = {"fuser": "#0072B2", "inductor": "#D55E00", "eager": "#999999", "aot_eager": "#999999", "dynamo": "#999999"}
OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SECONDS = re.compile(r"([\d.,e+-]+) (ns|µs|ms|s|min)\b")
_HEAD = """# Benchmarks in plots

Drawn from the tables of [Benchmarks](benchmarks.md) whenever this site is built. Commands, targets and spreads stand
there. A ratio above 1 means that `fuser` takes less time. Each chart names the machine and the day of its run.
"""


@dataclass(frozen=True)
class Table:
    """A table of the page: its suite's heading, the line about machine and day, its title, and its cells."""

    suite: str
    run: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def columns(self, pattern: str) -> list[int]:
        """The numbers of the columns whose names match."""
        return [n for n, name in enumerate(self.header) if re.fullmatch(pattern, name)]


def tables(text: str) -> Iterator[Table]:
    """The tables of a page's measured part that have a title in bold."""
    suite = run = title = ""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
            continue
        if title and len(lines) > 2:
            cells = [tuple(c.strip() for c in row.strip("|").split("|")) for row in lines]
            yield Table(suite, run, title, cells[0], tuple(cells[2:]))
        if lines:
            title, lines = "", []
        if line.startswith("### "):
            suite, run = line[4:], ""
        elif re.search(r"; \d{4}-\d\d-\d\d", line):
            run = re.sub(r"T\d\d:.*", "", line)
        elif line.startswith("**"):
            title = line.strip("*")


def number(cell: str) -> float | None:
    """A ratio; None for a cell without one."""
    try:
        return float(cell.replace("×", "").replace(",", "").strip())
    except ValueError:
        return None


def seconds(cell: str) -> float | None:
    """The seconds that a cell begins with; None for a cell without."""
    found = _SECONDS.match(cell)
    return float(found[1].replace(",", "")) * _UNITS[found[2]] if found else None


def _figure(rows: int) -> Any:
    """An empty chart that is legible on light and dark pages."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fuser", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.1 + 0.26 * rows), layout="constrained")
    for part in (axes.xaxis, axes.yaxis):
        part.set_tick_params(colors="#808080")
        part.label.set_color("#808080")
    axes.spines[:].set_color("#808080")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    held = io.StringIO()
    figure.savefig(held, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return held.getvalue()


def bars(names: list[str], series: dict[str, list[float | None]], label: str, start: float = 0.0) -> str:
    """An SVG of horizontal bars from `start`, one for each series beside each name.

    Ratios, which start at 1, are on a logarithmic axis where they go beyond 5.
    """
    figure, axes = _figure(len(names) * len(series))
    width, spare = 0.8 / len(series), iter(OTHERS * len(series))
    for n, (said, values) in enumerate(series.items()):
        known = [(k, v) for k, v in enumerate(values) if v]
        made = axes.barh(
            [k + n * width for k, _ in known], [v - start for _, v in known], width * 0.9, left=start, label=said,
            color=COLOURS.get(said.split(" × ")[-1]) or next(spare),
        )  # fmt: skip
        axes.bar_label(made, [f"{v:.3g}" for _, v in known], padding=2, color="#808080", fontsize=7)
    axes.set_yticks([k + width * (len(series) - 1) / 2 for k in range(len(names))], names)
    axes.set_ylim(len(names) - 0.5 * width, -width)
    axes.set_xlabel(label)
    highest = max(v for values in series.values() for v in values if v)
    if start and highest > 5:
        ticks = [x for x in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100) if x < highest * 2]
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    axes.axvline(start, color="#808080", linewidth=0.8)
    axes.margins(x=0.08)
    if len(series) > 1:
        figure.legend(loc="outside upper right", ncols=len(series), frameon=False, labelcolor="#808080")
    return _svg(figure)


def curves(sizes: list[float], series: dict[str, list[float | None]], x: str, y: str) -> str:
    """An SVG of one curve for each series, on logarithmic axes."""
    figure, axes = _figure(10)
    for said, values in series.items():
        known = [(s, v) for s, v in zip(sizes, values) if v is not None]
        axes.plot([s for s, _ in known], [v for _, v in known], marker="o", label=said, color=COLOURS.get(said))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{s:.0f}" for s in sizes], minor=False)
    axes.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, labelcolor="#808080")
    return _svg(figure)


def chart(table: Table) -> str | None:
    """The SVG of a table; None for one that has no chart."""
    names = [row[0] for row in table.rows]
    ratios = table.columns(r"fuser × \w+")
    if ratios:
        series = {table.header[c]: [number(row[c]) for row in table.rows] for c in ratios}
        return bars(names, series, "times faster than the rival", 1.0)
    nodes = table.columns(r"\d+ nodes")
    if nodes:
        sizes = [float(table.header[c].split()[0]) for c in nodes]
        by_contestant = {row[0]: [seconds(row[c]) for c in nodes] for row in table.rows}
        return curves(sizes, by_contestant, "nodes of the graph", "seconds to the first result")
    if "first call" in table.title:
        columns = [c for c in range(1, len(table.header)) if "," not in table.header[c]]
        series = {table.header[c]: [seconds(row[c]) for row in table.rows] for c in columns}
        return bars(names, {k: v for k, v in series.items() if any(v)}, "seconds of the first call")
    return None


def plots(text: str) -> Iterator[tuple[Table, str]]:
    """Each table of the page that has a chart, and the chart."""
    for table in tables(text):
        drawn = chart(table)
        if drawn is not None:
            yield table, drawn


def page(found: list[tuple[Table, str]]) -> str:
    """The page's Markdown; chart n lies in `plots/n.svg`."""
    parts, suite = [_HEAD], ""
    for n, (table, _) in enumerate(found):
        if table.suite != suite:
            suite = table.suite
            parts.append(f"## {suite}\n")
        what = table.title.partition(":")[0] if table.title.startswith(table.suite.partition(",")[0]) else table.title
        parts.append(f"![{what}: bars or curves of the table below it on the page Benchmarks](plots/{n}.svg)\n")
        parts.append(f"{table.title}. {table.run}.\n")
    return "\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """What mkdocs calls with all files of the site: the page and its charts are added."""
    from mkdocs.structure.files import File

    found = list(plots((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")))
    files.append(File.generated(config, PAGE, content=page(found)))
    for n, (_, drawn) in enumerate(found):
        files.append(File.generated(config, f"plots/{n}.svg", content=drawn))
    return files
