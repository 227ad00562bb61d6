"""Grouping on small functional graphs: which nodes end up together, what stays outside, and in what time."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser import interface
from fuser.frontends.dynamo import fuser_backend
from fuser.passes import classify
from fuser.passes.classify import Kind
from fuser.passes.cleanup import drop_dead, merge_equal, remove_noops, split_to_slices
from fuser.passes.extract import extract
from fuser.passes.grouping import describe, group_nodes


def trace(f, *args, mode: str = "fake") -> fx.GraphModule:
    module = make_fx(f, tracing_mode=mode)(*args)
    drop_dead(module)
    return module


def plan_of(f, *args, mode: str = "fake"):
    module = trace(f, *args, mode=mode)
    grouping = group_nodes(module.graph)
    return module, grouping, extract(module.graph, grouping)


def shapes(plan) -> list[tuple[str, ...]]:
    return [g.ops for g in plan.groups]


X, Y, W = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)


def test_pointwise_chain_is_one_group():
    _, grouping, plan = plan_of(lambda x, y: torch.relu(x * y + 1), X, Y)
    assert shapes(plan) == [("aten.mul", "aten.add", "aten.relu")]
    assert not plan.outside and not grouping.reasons


def test_matmul_splits_and_says_why():
    _, grouping, plan = plan_of(lambda x, w: torch.relu(x).mm(w) + x.relu(), X, W)
    assert [n.name for n in plan.outside] == ["mm"]
    assert "library" in grouping.reasons["mm"]


def test_group_through_a_matmul_would_not_be_convex():
    # relu feeds mm and the last add; the add needs mm: the two cannot be one group.
    _, _, plan = plan_of(lambda x, w: (a := torch.relu(x)).mm(w) + a, X, W)
    assert shapes(plan) == [("aten.relu",), ("aten.add",)]


def test_matmul_beside_the_group_does_not_split_it():
    _, _, plan = plan_of(lambda x, y, w: torch.relu(x) + y.mm(w) + torch.sin(x), X, Y, W)
    assert len(plan.groups) == 1


def test_group_waits_for_a_matmul_it_does_not_feed():
    # c needs mm(sin(y)), which needs nothing of a: {a, c, d} is convex although a could have run before the matmul.
    def f(x, y, w):
        a = torch.relu(x)
        return a + torch.sin(y).mm(w), a * 2

    _, _, plan = plan_of(f, X, Y, W)
    assert sorted(map(sorted, shapes(plan))) == [["aten.add", "aten.mul", "aten.relu"], ["aten.sin"]]


def test_readers_of_one_tensor_are_one_group():
    _, _, plan = plan_of(lambda x: (x.sum(1), x.exp()), X)
    assert len(plan.groups) == 1


def test_strangers_are_two_groups():
    _, _, plan = plan_of(lambda x, y: (torch.relu(x), torch.sin(y)), X, Y)
    assert len(plan.groups) == 2


def test_view_between_members_is_inside_and_doubled_for_an_extern():
    def f(x, w):
        v = (x + 1).t()
        return v * 2, v.mm(w)

    _, _, plan = plan_of(f, X, W)
    assert shapes(plan) == [("aten.add", "aten.t", "aten.mul")]
    assert [str(n.target) for n in plan.outside] == ["aten.t.default", "aten.mm.default"]
    assert len(plan.groups[0].outputs) == 2


def test_view_that_only_feeds_externs_stays_outside():
    _, _, plan = plan_of(lambda x, w: x.mm(w.t()), X, W)
    assert not plan.groups and len(plan.outside) == 2


def test_a_group_gives_the_view_of_a_result_that_nobody_else_reads():
    _, grouping, plan = plan_of(lambda x: (x + 1).view(64), X)
    (group,) = plan.groups
    assert not plan.outside and [grouping.kinds[o] for o in group.outputs] == [Kind.FREE]
    assert [tuple(o.meta["val"].shape) for o in group.outputs] == [(64,)]


@pytest.mark.parametrize("f", [
    lambda x: ((y := x + 1).view(64), y),
    lambda x: (x + 1).view(64)[:3],
    lambda x: (x + 1).t(),
], ids=["read twice", "part", "transposed"])  # fmt: skip
def test_other_views_of_results_stay_outside(f):
    _, grouping, plan = plan_of(f, X)
    assert plan.outside
    assert all(isinstance(o.meta["val"], torch.Tensor) for g in plan.groups for o in g.outputs)


def test_a_view_that_must_stay_outside_separates_its_readers_from_its_base():
    def f(x, y):
        a = torch.relu(x)
        return torch.as_strided(a, (8, 1, 8), (8, 3, 1)) * 2, a + 1, y * a

    module = trace(f, X, Y)
    (view,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    view.meta["outside"] = True
    grouping = group_nodes(module.graph)
    assert grouping.group_of[view.args[0]] != grouping.group_of[next(iter(view.users))]
    assert [n.name for n in extract(module.graph, grouping).outside] == [view.name]


def test_several_results():
    def f(x, w):
        y, mean, rstd = torch.ops.aten.native_layer_norm(x + 1, [8], None, None, 1e-5)
        return y.mm(w), mean

    _, _, plan = plan_of(f, X, W)
    (group,) = plan.groups
    assert group.ops.count("getitem") == 2 and len(group.outputs) == 2, group.ops


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (lambda x: x + torch.rand_like(x), "random"),
        (lambda x: torch.nonzero(x), "depends on data"),
        (lambda x: x.to(torch.complex64) + 1, "complex"),
        (lambda x: torch.linalg.inv(x), "no lowering"),
        (lambda x: torch.ops.aten.relu_(x.clone()), "writes"),
    ],
)
def test_reasons(f, says):
    grouping = group_nodes(trace(f, X, mode="symbolic").graph)
    assert any(says in r for r in grouping.reasons.values()), grouping.reasons


def test_a_tried_lowering_is_remembered_by_what_symbolic_sizes_are(monkeypatch):
    monkeypatch.setattr(classify, "_tried", {})
    for rows in (3, 5, 3):
        plan_of(lambda x, n: x.as_strided((n.shape[0], 2), (4, 1)).sin(), X, torch.ones(rows), mode="symbolic")
    assert len(classify._tried) == 2


def test_one_operator_on_numbers_alone_is_not_a_group():
    _, grouping, plan = plan_of(lambda x: (x.mm(x), torch.eye(8), torch.arange(8) * 2), X)
    (group,) = plan.groups
    assert group.ops == ("aten.arange", "aten.mul")
    assert "numbers alone" in grouping.reasons["eye"]


def test_dead_code_is_dropped():
    def f(x):
        x.mm(x)
        return torch.relu(x)

    module = make_fx(f, tracing_mode="fake")(X)
    plan = extract(module.graph, group_nodes(module.graph))
    assert not plan.outside


def test_equal_layers_give_equal_graphs():
    def f(x, w):
        for _ in range(4):
            x = torch.nn.functional.gelu(x.mm(w)) + 1
        return x

    _, _, plan = plan_of(f, X, W)
    assert len(plan.groups) == 4
    assert len({interface.register_fusion(g.graph) for g in plan.groups}) == 1


def test_whole_graph_group_returns_results_in_order():
    _, _, plan = plan_of(lambda x: ((y := x + 1) * 2, y), X)
    (group,) = plan.groups
    names = [n.name for n in group.graph.output_node().args[0]]
    assert names == ["mul", "add"] and [o.name for o in group.outputs] == names


def test_fake_values_are_kept():
    _, _, plan = plan_of(lambda x: x.t() + 1, X)
    assert all("val" in n.meta for n in plan.groups[0].graph.nodes if n.op != "output")


def _is_convex(module, grouping) -> bool:
    """Brute force: no path leaves a group and comes back, by walking all nodes reachable from its exits."""
    from fuser.passes.extract import is_inlined

    for i, group in enumerate(grouping.groups):
        members = set(group.nodes)
        stack = [u for m in members for u in m.users if grouping.group_of.get(u) != i]
        seen = set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if grouping.group_of.get(node) == i and not all(is_inlined(grouping, a) for a in node.all_input_nodes):
                return False
            if not is_inlined(grouping, node):
                stack.extend(u for u in node.users)
    return True


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_are_partitioned_into_convex_groups(seed):
    """Any view may have to stay outside of groups."""
    pick = random.Random(seed).randrange
    steps = [
        torch.add, torch.mm, torch.mul, lambda a, b: torch.relu(a), lambda a, b: a - 1, lambda a, b: a.t(),
        lambda a, b: a[None].squeeze(0), lambda a, b: a[:, None].expand(8, 2, 8).select(1, 1),
    ]  # fmt: skip

    def f(x, w):
        values = [x, w]
        for _ in range(60):
            a, b = values[pick(len(values))], values[pick(len(values))]
            values.append(steps[pick(len(steps))](a, b))
        return values[-3:]

    module = trace(f, X, W)
    for node in module.graph.nodes:
        if classify.classify(node).kind is Kind.FREE and pick(2):
            node.meta["outside"] = True
    grouping = group_nodes(module.graph)
    plan = extract(module.graph, grouping)
    assert not any(n.meta.get("outside") for n in grouping.group_of)
    assert _is_convex(module, grouping), describe(module.graph, grouping)
    # The condensed graph has no circle: the program can be put into an order.
    from fuser.frontends.program import Program

    functions = [(f"g{i}", fx.GraphModule(torch.nn.Module(), g.graph)) for i, g in enumerate(plan.groups)]
    program = Program(module, plan, functions)
    expected = module(X / 8, X / 8)
    for got, want in zip(program.function(X / 8, X / 8), expected):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_two_thousand_nodes_group_quickly():
    def f(x, w):
        for i in range(500):
            x = torch.relu(x * 2 + 1)
            x = x.mm(w) if i % 3 == 0 else x - 1
        return x

    module = trace(f, X, W)
    assert len(module.graph.nodes) >= 2000
    start = time.thread_time()
    grouping = group_nodes(module.graph)
    seconds = time.thread_time() - start  # of this thread: a busy machine must not count
    extract(module.graph, grouping)
    assert seconds < 0.5


def test_split_becomes_slices():
    module = trace(lambda x: (x + 1).split(4, dim=1)[1] * 2, X)
    assert split_to_slices(module) == 1
    assert "split" not in module.graph.python_code("self").src.replace("slice", "")
    module.recompile()
    torch.testing.assert_close(module(X), (X + 1)[:, 4:] * 2)


def test_equal_calls_are_merged_but_results_stay_apart():
    module = trace(lambda x: (torch.sin(x) + torch.sin(x), x.cos(), x.cos()), X)
    assert merge_equal(module) == 1
    module.recompile()
    _, b, c = module(X)
    assert b is not c


def test_noops_are_removed_but_not_from_results():
    module = trace(lambda x: ((x + 1).clone() * 2, (x * 3).clone()), X)
    assert remove_noops(module) == 1
    module.recompile()
    torch.testing.assert_close(module(X)[0], (X + 1) * 2)


PLACES = {
    "of a row": lambda: torch.zeros(3, 10)[1:2, 1:9],
    "of rows": lambda: torch.zeros(4, 10)[:2, :8],
    "of columns": lambda: torch.zeros(6, 4)[::2],
    "whole": lambda: torch.zeros(3, 8),
    "turned": lambda: torch.zeros(8, 3).t(),
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_what_as_strided_reads_lies_where_eager_puts_it(make):
    """The copy of a written slice keeps the gaps of its memory; a kernel's result has none."""

    def program(x):
        x.copy_(torch.where(x.as_strided(x.size(), x.stride(), x.storage_offset()) > 0, 1, x + 1))
        return x.as_strided(x.size(), x.stride(), x.storage_offset()).sum(-1), x + 1

    graph = torch.fx.symbolic_trace(program)
    with torch.no_grad():
        given, wanted = make(), make()
        got, want = fuser_backend(graph, [make()])(given), program(wanted)
    for a, b in zip((*got, given), (*want, wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_a_group_that_reads_no_tensor_is_told_its_device():
    """On the host there is one device; on others an input of the graph says which."""

    def masked(x, w):
        places = torch.arange(8)
        return torch.where(places[:, None] >= places, 0.0, -1.0).mm(w) + x.mm(w).sum()

    def devices(kind: str):
        module = trace(masked, X[None].expand(2, -1, -1)[0], W)
        with FakeTensorMode():
            for node in module.graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=kind)
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": torch.device(kind)}
        plan = extract(module.graph, group_nodes(module.graph))
        (group,) = (g for g in plan.groups if "aten.where" in g.ops)
        return [n.name for n in group.inputs]

    assert devices("cpu") == []
    assert devices("cuda") == ["x_1"]
