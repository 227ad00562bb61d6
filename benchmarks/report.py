"""What a suite hands back, and how it is printed, stored and drawn."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.runner import Timing


@dataclass(frozen=True)
class Table:
    """Aligned text: cells are strings already."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def text(self) -> str:
        """The table, first column left-aligned, the others right-aligned."""
        grid = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]
        lines = []
        for row in grid:
            cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        rule = "  ".join("-" * w for w in widths)
        return "\n".join([self.title, lines[0], rule, *lines[1:]])


@dataclass(frozen=True)
class Claim:
    """One promise of the project beside what this run reached. `met` is None where it could not be judged."""

    what: str
    target: str
    reached: str
    met: bool | None

    def text(self) -> str:
        """One line: met, missed or open."""
        word = {True: "met", False: "MISSED", None: "open"}[self.met]
        return f"{word:<7} {self.what}: target {self.target}, reached {self.reached}"


@dataclass(frozen=True)
class Bars:
    """A bar chart: for each label, one bar per contestant."""

    title: str
    unit: str
    groups: dict[str, dict[str, float]]


@dataclass
class Report:
    """A suite's result. Anything in `wrong` makes the exit status non-zero."""

    suite: str
    tables: list[Table] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def text(self) -> str:
        """Everything, for a terminal."""
        parts = [t.text() for t in self.tables]
        if self.claims:
            parts.append("\n".join([f"{self.suite}: targets", *(c.text() for c in self.claims)]))
        if self.wrong:
            parts.append("\n".join(f"WRONG   {w}" for w in self.wrong))
        if self.notes:
            parts.append("\n".join(f"note: {n}" for n in dict.fromkeys(self.notes)))
        return "\n\n".join(parts)


def at_most(what: str, value: float | None, limit: float, unit: str = "s") -> Claim:
    """A claim that `value` is at most `limit`."""
    reached = "not measured" if value is None else f"{value:.3g} {unit}".strip()
    return Claim(what, f"≤ {limit:g} {unit}".strip(), reached, None if value is None else value <= limit)


def at_least(what: str, value: float | None, limit: float, unit: str = "×", detail: str = "") -> Claim:
    """A claim that `value` is at least `limit`."""
    reached = "not measured" if value is None else f"{value:.3g} {unit}{detail}".strip()
    return Claim(what, f"≥ {limit:g} {unit}".strip(), reached, None if value is None else value >= limit)


def seconds(value: float | None) -> str:
    """A time with a unit that fits, three digits."""
    if value is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:.0f} {unit}"
    return f"{value * 1e9:.0f} ns"


def spread(timing: Timing) -> str:
    """Median and [p10–p90] in the median's unit."""
    median = seconds(timing.median)
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[median.split()[1]]
    return f"{median} [{timing.quantile(0.1) / scale:.3g}–{timing.quantile(0.9) / scale:.3g}]"


def ratio(value: float | None) -> str:
    """A ratio for a cell."""
    return "–" if value is None else f"{value:.2f}"


def _cpu_model() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine(device: str) -> dict[str, Any]:
    """The machine and versions that a figure belongs to."""
    info: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if device == "cuda":
        info["gpu"] = torch.cuda.get_device_name()
    return info


def heading(info: dict[str, Any]) -> str:
    """One line on the machine."""
    gpu = f", {info['gpu']}" if "gpu" in info else ""
    return (
        f"{info['cpu']}, {info['cores']} cores, {info['capability']}{gpu}; torch {info['torch']}, "
        f"Python {info['python']}; {info['date']}"
    )


def write_json(path: str, reports: Sequence[Report], info: dict[str, Any], command: str = "") -> None:
    """All reports, the machine and the command in one file."""
    data = {"machine": info, "command": command, "suites": [asdict(r) for r in reports]}
    pathlib.Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def plot(path: str, reports: Sequence[Report], info: dict[str, Any]) -> str | None:
    """Draw the bars of all reports into one picture; a sentence if that is not possible."""
    charts = [bars for r in reports for bars in r.bars if bars.groups]
    if not charts:
        return "nothing to plot: the suites that ran have no charts"
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    widest = max(len(c.groups) for c in charts)
    figure, axes = pyplot.subplots(
        len(charts), 1, figsize=(max(8, 0.6 * widest), 4.5 * len(charts)), squeeze=False, layout="constrained"
    )
    for axis, chart in zip(axes[:, 0], charts, strict=True):
        names = list(dict.fromkeys(name for group in chart.groups.values() for name in group))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            heights = [group.get(name, 0.0) for group in chart.groups.values()]
            axis.bar([x + i * width for x in range(len(heights))], heights, width, label=name)
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(chart.groups))], list(chart.groups), rotation=60)
        for label in axis.get_xticklabels():
            label.set_horizontalalignment("right")
        axis.set_ylabel(chart.unit)
        axis.set_title(chart.title)
        axis.legend()
    figure.supxlabel(heading(info), fontsize="x-small")
    figure.savefig(path, dpi=120)
    return None
