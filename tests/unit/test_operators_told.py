"""Every operator of a graph has a group or a reason, and a line; `tools/operators_told.py` runs more of the same."""

from __future__ import annotations

import importlib.util
import pathlib

import torch

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "operators_told.py"


def loaded():
    found = importlib.util.spec_from_file_location("operators_told", TOOL)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = torch.nn.Linear(8, 24), torch.nn.BatchNorm1d(8)

    def forward(self, x):
        a, b, c = self.inner(torch.nn.functional.dropout(self.norm(x), 0.1)).chunk(3, -1)
        kept, places = (a.sigmoid() * b).topk(4)
        return torch.cat([kept.cumsum(-1), c[:, :4]], -1).masked_fill(x > 0.5, 0.0) + places.sum() / len(x)


def test_every_operator_is_told():
    tool = loaded()
    with tool.watched():
        tool.random_programs(6)
        tool.one("a training step", Model(), (torch.rand(16, 8),))
    assert tool.UNTOLD == []
    assert tool.COUNTS["graphs"] >= 6 and tool.COUNTS["in a group"] > 30 and tool.COUNTS["with a reason"] > 3


def test_what_is_not_told_is_found():
    """A node without a note among others with notes, and one without group and reason."""
    tool = loaded()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    known, other = graph.call_function(torch.ops.aten.relu.default, (x,)), graph.call_function(torch.relu, (x,))
    known.meta["stack_trace"] = '  File "a.py", line 3, in f\n    torch.relu(x)'
    graph.output((known, other))

    class Grouping:
        kinds = {known: tool.Kind.EXTERN, other: tool.Kind.EXTERN}
        group_of = {known: 0}
        reasons: dict[str, str] = {}

    tool.count(graph, Grouping)
    assert [u.split(": ")[1] for u in tool.UNTOLD] == ["no group and no reason", "no line"]
