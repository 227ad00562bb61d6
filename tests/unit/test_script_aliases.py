"""Operators that may give their very input, which no schema says: a write under either name is seen under both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fuser
from fuser.frontends.script_memory import SILENT, Memory, every_node
from tests.unit import torchscript_corpus as corpus
from tests.unit.test_fuse_script import assert_alike

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")


def written_input(x: Tensor, y: Tensor, flag: bool):
    v = y.type_as(x)
    if flag:
        y[1:].sub_(x[1:])
        x = v + 0.5
    return torch.where(y > 0, y, x) * 2 + 1


def written_result(x: Tensor, y: Tensor, flag: bool):
    v = y.type_as(x)
    a = y * 2 + 1
    v.add_(1)
    return a, y * 2 + 1, (y * x).tanh() + v


def written_dropout(x: Tensor, y: Tensor, flag: bool):
    v = torch.dropout(y, 0.5, flag)
    a = v * 2 + x
    v.mul_(3.0)  # TorchScript itself drops it if nothing reads `v` after it
    return a, (y * 2 + x).relu(), v


def written_through_two(x: Tensor, y: Tensor, flag: bool):
    v = torch.atleast_2d(y.sum_to_size([3, 4]))
    a = (y + x) * 2
    v[0].zero_()
    return a, (y + x) * 2, v.t() * 2 + 1


def written_in_a_loop(x: Tensor, y: Tensor, flag: bool):
    v = y.type_as(x)
    for _ in range(3):
        x = (v * x).tanh() + 1
        y += 1
    return x, v * 2 + 1


def written_cast(x: Tensor, y: Tensor, flag: bool):
    z = torch.tanh(y) + 1
    v = z.float()
    w = v.expand_as(z)
    a = w.exp() * 2
    w[1:].zero_()
    return a, z * 2 + 1


def written_after_no_turn(x: Tensor, y: Tensor, flag: bool):
    v = torch.relu(x) + 1
    w = v * 2
    z = v.to(torch.float64)
    for _ in range(0 if flag else 2):
        v = torch.cat([w[:1], x[1:]])
    v.neg_()
    return z.float() * 3 + 1, v, w + v


PROGRAMS = (
    written_after_no_turn, written_cast, written_input, written_result, written_dropout, written_through_two,
    written_in_a_loop,
)  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_writes_that_no_schema_shows(program):
    fused = fuser.fuse_script(torch.jit.script(program))
    x, y = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(2, -1, 12).view(3, 4)
    for other, flag in ((x, True), (x, False), (x.double(), True), (x.double(), False)):
        given, passed = y.clone(), y.clone()
        torch.manual_seed(0)
        want = program(other, given, flag)
        torch.manual_seed(0)
        assert_alike(fused(other, passed, flag), want)
        assert passed.equal(given)


def test_without_a_write_they_are_fused():
    def f(x: Tensor, y: Tensor):
        z = torch.relu(x * y)
        z.add_(1)
        return (z.type_as(y) * 2 + x).tanh()

    fused = fuser.fuse_script(torch.jit.script(f))
    x = torch.randn(3, 4)
    assert_alike(fused(x, x), f(x, x))
    assert sum(len(g.calls) for g in fused.fusion.groups) >= 3


# -- what is written, without asking about all pairs ------------------------------------------------------------------
class Asked:
    """A graph whose alias analysis counts questions about pairs of values."""

    def __init__(self, graph):
        self.graph, self.asked = graph, 0

    def __getattr__(self, name):
        return getattr(self.graph, name)

    def alias_db(self):
        self.aliases = self.graph.alias_db()
        return self

    def may_contain_alias(self, a, b):
        self.asked += 1
        return self.aliases.may_contain_alias(a, b)

    def has_writers(self, value):
        return self.aliases.has_writers(value)


class Layers(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        layer = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.ReLU(True))  # noqa: E731
        self.layers = torch.nn.ModuleList([layer() for _ in range(n)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_is_asked_of_layers_in_place_grows_with_their_number():
    counts = []
    for n in (10, 20, 40):
        graph = Asked(torch.jit.script(Layers(n)).inlined_graph)
        memory = Memory(graph)
        assert memory.is_silent and sum(memory.is_exposed(v) for node in every_node(graph) for v in node.outputs())
        counts.append(graph.asked)
    assert counts[2] - counts[1] <= 2.2 * (counts[1] - counts[0]) < 2000, counts


def pairwise(graph):
    """The values that may be written, by asking about all pairs."""
    aliases, nodes = graph.alias_db(), list(every_node(graph))
    values = [*graph.inputs(), *(v for n in nodes for v in n.outputs())]
    values += [v for n in nodes for b in n.blocks() for v in b.inputs()]
    found = {v for v in values if aliases.has_writers(v)}
    pairs = [(*n.inputs(), *n.outputs()) for n in nodes if n.kind() in SILENT]
    pairs += [p for n in nodes if n.kind() == "prim::Loop" for p in zip([*n.inputs()][2:], n.outputs())]
    pairs = [[v for v in pair if "Tensor" in v.type().str()] for pair in pairs]
    silent = []
    while True:
        meets = {v for v in values if any(aliases.may_contain_alias(v, s) for s in silent)} | found
        more = [p for p in pairs if meets & set(p)]
        if not more:
            return values, meets
        pairs = [p for p in pairs if p not in more]
        silent += [v for p in more for v in p]


@pytest.mark.parametrize("program", [*PROGRAMS, *(p for p, _ in corpus.FUNCTIONS[::5])], ids=lambda p: p.__name__)
def test_parts_hide_no_alias(program):
    graph = torch.jit.script(program).inlined_graph
    values, written = pairwise(graph)
    memory = Memory(graph)
    assert {v for v in values if memory.is_exposed(v)} == written
    aliases, part = graph.alias_db(), memory._parts.of
    tensors = [v for v in values if "Tensor" in v.type().str()]
    for n, a in enumerate(tensors):
        assert all(part(a) is part(b) for b in tensors[:n] if aliases.may_contain_alias(a, b))
