"""Each operator knows the user's line from which it comes, through every pass and into every group."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

import fuser
from fuser.frontends import functional
from fuser.frontends.records import compilations, forget_compilations
from fuser.passes import registry, sources


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.drop = nn.LayerNorm(32), nn.Linear(32, 96), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wide(self.norm(x)).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.drop((q @ k.transpose(-1, -2) / 8**0.5).softmax(-1))
        return x + (weights @ v).transpose(1, 2).reshape(x.shape)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(64, 32), nn.ModuleList([Block()])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(x.flatten(0, 1), words.flatten() % 32)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.relu(self.norm(self.conv(x))).split(4, 1)
        y = torch.cat([left * right, left - right], 1).mean((2, 3))
        return self.head(y).log_softmax(-1).sum()


MODELS = {"words": (Words, (torch.zeros(2, 8, dtype=torch.int64),)), "pictures": (Pictures, (torch.rand(2, 3, 8, 8),))}


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that grouping sees."""
    seen = []
    group_nodes = functional.group_nodes
    monkeypatch.setattr(functional, "group_nodes", lambda graph: seen.append(graph) or group_nodes(graph))
    return seen


@pytest.mark.sampled(3, also=("words-True",))
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_operator_of_a_model_has_a_line(name, training, graphs):
    make, args = MODELS[name]
    model = make().train(training)
    torch._dynamo.reset()
    forget_compilations()
    with torch.set_grad_enabled(training):
        found = torch.compile(model, backend="fuser")(*args)
    if training:
        found.backward()
    calls = [n for g in graphs for n in g.nodes if n.op == "call_function"]
    assert len(graphs) == 1 + training and len(calls) > 10
    assert [n.name for n in calls if sources.source_of(n) is None] == []
    records = compilations()
    assert [g for r in records for g in r.groups if None in g.sources or len(g.notes) < len(g.ops)] == []
    assert [u for r in records for u in r.unfused if u.source is None] == []
    lines = {s.file for r in records for g in r.groups for s in g.sources if s is not None}
    assert lines == {__file__}, "the user's own lines, not torch's"


def test_the_line_is_the_users_and_the_module_is_named():
    torch._dynamo.reset()
    forget_compilations()
    with torch.no_grad():
        torch.compile(Words().eval(), backend="fuser")(*MODELS["words"][1])
    (record,) = compilations()
    products = [u for u in record.unfused if u.op in ("aten.mm", "aten.addmm", "mkldnn._linear_pointwise")]
    assert {u.source.text for u in products} == {
        "q, k, v = self.wide(self.norm(x)).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)"
    }
    assert [u.source.module for u in products] == ["blocks.0.wide"]
    assert all(u.bytes > 0 and u.code == "library" for u in products)


def test_a_pass_that_writes_calls_without_notes(graphs):
    """A user's pass need not know of lines: a replacement has that of the replaced, another that of its argument."""

    def careless(module: fx.GraphModule) -> int:
        graph = module.graph
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.relu.default:
                with graph.inserting_before(node):
                    new = graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 2))
                    again = graph.call_function(torch.ops.aten.neg.default, (new,))
                new.meta["val"] = again.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(again)
                graph.erase_node(node)
        return 1

    def f(x):
        y = x + 1
        z = torch.relu(y)
        return z - 3

    registry.register("post_grad", "careless", careless)
    try:
        torch._dynamo.reset()
        torch.compile(f, backend="fuser")(torch.rand(8))
    finally:
        registry.unregister("careless")
    lines = {n.target: sources.source_of(n).text for n in graphs[-1].nodes if n.op == "call_function"}
    assert lines[torch.ops.aten.neg.default] == "z = torch.relu(y)", "it took the place of the call on that line"
    assert lines[torch.ops.aten.mul.Tensor] == "y = x + 1", "it stands after that call"


def test_notes_of_a_graph_without_any():
    graph = fx.symbolic_trace(lambda x: operator.add(x, 1)).graph
    sources.complete(graph)
    assert [sources.source_of(n) for n in graph.nodes] == [None] * 3
    assert fuser.register_fusion(graph)
