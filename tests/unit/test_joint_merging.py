"""Equal calls of a joint graph are merged before the cut as torch's own cut merges them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

from fuser.frontends import training
from fuser.frontends.dynamo import fuser_backend

pytestmark = pytest.mark.usefixtures("clean")


def repeated(x, y):
    return (torch.sin(x * y) + torch.sin(x * y)).sum(), torch.cos(x * y + 1.0), torch.cos(x * y + 1)


def results(x, y):
    return torch.sin(x), torch.sin(x), (torch.sin(x) * y).view(-1), (torch.sin(x) * y).view(-1)


def parts(x, y):
    return x.sort().values, x.sort().values, (x * y).sort().indices + (x * y).sort().indices


def written(x, y):
    z = torch.sin(y)
    y = y.detach().clone()
    first = torch.exp(y)
    y.add_(1)
    return z, first * torch.exp(y) * x, torch.exp(y)


def written_input(x, y, state):
    before = torch.exp(state)
    state.mul_(2)
    return before * x, torch.exp(state) * y


def drawn(x, y):
    return torch.rand_like(x) * x, torch.rand_like(x) * y, torch.nn.functional.dropout(x, 0.5) * y


def sized(x, y):
    return x.reshape(x.shape[0] * x.shape[1]) * (x.shape[0] * x.shape[1]), y.reshape(x.shape[0] * x.shape[1]) / 2.0


def unlike(x, y):
    return torch.clamp(x, 0, 1) + torch.clamp(x, 0.0, 1.0), x.sum(0, True) + x.sum(0, False), y.add(1) + y.add(True)


def merged_by_torch(joint: fx.GraphModule) -> Counter[str]:
    from torch._functorch.compile_utils import fx_graph_cse

    graph, copies = fx.Graph(), {}
    graph.output(graph.graph_copy(joint.graph, copies))
    for node, copy in (*copies.items(), (joint.graph.output_node(), graph.output_node())):
        copy.meta = dict(node.meta)
    graph.eliminate_dead_code()
    return calls(fx_graph_cse(graph))


def calls(graph: fx.Graph) -> Counter[str]:
    return Counter(str(n.target) for n in graph.nodes)


PROGRAMS = [repeated, results, parts, written, written_input, drawn, sized, unlike]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_equal_calls_are_merged_as_by_torch(program, dynamic, monkeypatch):
    found = []

    def merge(joint):
        want = merged_by_torch(joint)
        changed = training_merge(joint)
        found.append((calls(joint.graph), want, changed))
        return changed

    training_merge = training.merge_joint
    monkeypatch.setattr(training, "merge_joint", merge)
    x, y = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    extra = [torch.randn(4, 6)] if program is written_input else []
    got = torch.compile(program, backend=fuser_backend, dynamic=dynamic)(x, y, *(t.clone() for t in extra))
    ((mine, torchs, changed),) = found
    assert mine == torchs
    assert changed or program not in (repeated, parts)
    if program is not drawn:
        want = program(x, y, *extra)
        torch.testing.assert_close(got, want)
        floats = [(a, b) for a, b in zip(got, want) if b.requires_grad]
        sums = ([pair[i].sum() for pair in floats] for i in (0, 1))
        for a, b in zip(*(torch.autograd.grad(s, (x, y), allow_unused=True) for s in sums)):
            torch.testing.assert_close(a, b)
        assert len({t.data_ptr() for t in got}) == len({t.data_ptr() for t in want})


def test_a_user_who_wants_no_merging_gets_none(monkeypatch):
    monkeypatch.setattr(training, "merge_joint", lambda joint: pytest.fail("merged"))
    x = torch.randn(3, requires_grad=True)
    with torch._functorch.config.patch(cse=False):
        torch.compile(lambda x: torch.sin(x) * torch.sin(x), backend=fuser_backend)(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.sin(x.detach()) * torch.cos(x.detach()))
