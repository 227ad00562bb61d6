"""The page with plots of the benchmarks: which tables become charts, and that ours do."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("benchmark_plots", ROOT / "tools" / "benchmark_plots.py")
plots = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = plots
_spec.loader.exec_module(plots)

TEXT = """### kernels

`python -m benchmarks kernels`  
AMD, 2 cores; torch 2.13.0; 2026-11-21T17:17:10+00:00

| what | target |
| --- | --- |
| untitled | 1 |

**kernels: median**

| row | eager | fuser × inductor | fuser × eager |
| --- | ---: | ---: | ---: |
| softmax | 240 ms [1–2] | 3.50 | – |

- a remark
"""  # noqa: W291


def test_titled_tables_are_read():
    (table,) = plots.tables(TEXT)
    assert (table.suite, table.title, table.rows[0][0]) == ("kernels", "kernels: median", "softmax")
    assert table.run == "AMD, 2 cores; torch 2.13.0; 2026-11-21"
    assert table.columns(r"fuser × \w+") == [2, 3]


def test_cells_are_numbers_in_seconds():
    cells = ("240 ms [0.2–0.3]", "1.5 s", "2 µs", "–", "3.5")
    assert [plots.seconds(c) for c in cells] == [0.24, 1.5, 2e-6, None, None]
    assert [plots.number(c) for c in ("3.50", "0.712 ×", "–", "1,024")] == [3.5, 0.712, None, 1024.0]


def test_our_tables_become_charts(monkeypatch):
    """Every table with ratios, and those of first calls and graph sizes; numbers are legible as text. Drawn is one of
    each kind: each takes a second, and `make site` draws all."""
    pytest.importorskip("matplotlib", reason="there is no matplotlib: pip install fuser[docs]")
    kinds, charts = (plots.bars, plots.curves), []
    for kind in kinds:
        monkeypatch.setattr(plots, kind.__name__, lambda *args, kind=kind: charts.append((kind, args)) or "a chart")
    found = list(plots.plots((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")))
    titles = [table.title for table, _ in found]
    assert len(found) >= 8 and any("steady" in t for t in titles) and any("scaling" in t for t in titles)
    assert len(charts) == len(found) == plots.page(found).count("](plots/") and {k for k, _ in charts} == {*kinds}
    table, (draw, args) = next((t, c) for (t, _), c in zip(found, charts) if t.title.startswith("kernels, large"))
    curves = next(curve(*given) for curve, given in charts if curve is not draw)
    drawn = draw(*args)
    assert all(f">{row[0]}</text>" in drawn for row in table.rows)
    assert drawn.startswith("<?xml") and curves.startswith("<?xml")
