"""What a plan says of its passes: what is before, in and after the loops; and that the interpreter needs all of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fuser import config
from fuser.debug.reference import interpret_schedule
from fuser.ir.sizes import ONE, coefficient
from fuser.scheduler.kernel_plan import KernelPlan, Passes
from fuser.scheduler.schedule import schedule
from tests.backend.test_reference import CASES, lowered_of

FUNCTIONS = {
    "softmax": (lambda x: x.softmax(-1), torch.randn(3, 40)),
    "columns": (lambda x: x / x.sum(0), torch.rand(40, 70)),
    "norm and mean": (lambda x, w: (torch.nn.functional.layer_norm(x, (40,)) * w, x.mean(-1) * w[0]),
                      torch.randn(5, 40), torch.randn(40)),
    "pointwise": (lambda x, w: (x * w).relu() + x, torch.randn(5, 40), torch.randn(40)),
    "looked up": (lambda x, i: x[i].sum(-1), torch.randn(9, 40), torch.tensor([1, 8, 3])),
    "scan": (lambda x: x.exp().cumsum(-1), torch.randn(3, 40)),
    "fill": (lambda x, i: x.index_fill(0, i, 2), torch.randn(9, 5), torch.tensor([1, 8, 3])),
    "scatter": (lambda x, i: torch.zeros(9).index_add(0, i, x * 2), torch.randn(4), torch.tensor([1, 1, 8, 3])),
}  # fmt: skip


@pytest.fixture(params=FUNCTIONS)
def case(request, monkeypatch):
    """A lowered graph, its schedule, arguments and eager's results."""
    monkeypatch.setitem(CASES, request.param, FUNCTIONS[request.param])
    lowered, args = lowered_of(request.param)
    fn, *own = FUNCTIONS[request.param]
    want = fn(*own)
    return lowered, schedule(lowered, config.max_body_rows), args, want if isinstance(want, tuple) else (want,)


NEAREST = torch.ops.aten.upsample_nearest2d, torch.ops.aten._upsample_nearest_exact2d


@pytest.mark.parametrize("operator", NEAREST, ids=str)
@pytest.mark.parametrize(("size", "out"), [(48, 96), (48, 144), (48, 192), (48, 240), (48, 16), (48, 24), (48, 36)])
def test_lanes_of_an_upsampling_are_many(operator, size, out, monkeypatch):
    """By a whole factor it looks nothing up, and no loop runs over the few copies of an element alone."""
    x = torch.randn(2, 3, size, size)
    fn = lambda x: operator(torch.relu(x), (out, out), None, None)  # noqa: E731
    monkeypatch.setitem(CASES, "upsampling", (fn, x))
    lowered, args = lowered_of("upsampling")
    found = schedule(lowered, config.max_body_rows)
    assert any(r.op == "indirect" for p in found.plans for r in p.rows) == (out == 36)
    for plan in found.plans:
        assert next(a.hint for a in plan.axes if a.sym == plan.vector) >= 16
    assert torch.equal(*interpret_schedule(lowered, found, args), fn(x))


def test_what_costs_much_is_computed_once_for_its_copies(monkeypatch):
    """A loop over two copies shares nothing worth the name."""
    x = torch.randn(2, 3, 48, 48)
    fn = lambda x: NEAREST[0](torch.nn.functional.softplus(x), (96, 96), None, None)  # noqa: E731
    monkeypatch.setitem(CASES, "copies", (fn, x))
    lowered, args = lowered_of("copies")
    found = schedule(lowered, config.max_body_rows)
    assert len(found.plans) == 2
    torch.testing.assert_close(*interpret_schedule(lowered, found, args), fn(x))


@pytest.mark.parametrize("groups", [4, 8, 32])
def test_lanes_of_a_group_norm_run_over_neighbours_in_memory(groups, monkeypatch):
    """Whatever the number of channels to a group: no loop over the data takes every fourth or eighth element."""
    x = torch.randn(2, 32, 9, 9).to(memory_format=torch.channels_last)
    fn = lambda x, w: torch.nn.functional.silu(torch.nn.functional.group_norm(x, groups, w, w))  # noqa: E731
    monkeypatch.setitem(CASES, "groups", (fn, x, torch.randn(32)))
    lowered, args = lowered_of("groups")
    plans = schedule(lowered, config.max_body_rows).plans
    reads = [(p, r.attr[1][0]) for p in plans for r in p.rows if r.op == "load" and r.attr[0] == "in0"]
    assert reads and all(coefficient(address, p.vector) == ONE for p, address in reads)
    (got,) = interpret_schedule(lowered, schedule(lowered, config.max_body_rows), args)
    torch.testing.assert_close(got, fn(x, args[1]))


def same(found, want) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, want))


def test_every_row_store_and_reduction_is_in_a_pass(case):
    _, found, _, _ = case
    for plan in found.plans:
        rows = {n for p in plan.passes for n in (*p.before, *p.inner, *p.results, *p.outer)}
        assert rows == set(range(len(plan.rows)))
        stored = [s.buffer for p in plan.passes for s in p.stores + p.after]
        assert sorted(stored) == sorted(s.buffer for s in plan.stores)
        folds = [r.number for p in plan.passes for r in p.folds]
        assert sorted(folds) == [r.number for r in plan.reductions]


def test_inner_rows_are_those_along_the_inner_loops(case):
    _, found, _, _ = case
    for plan in found.plans:
        for p in plan.passes:
            assert all(plan.varies[n] & plan.inside for n in p.inner)
            assert not any(plan.varies[n] & plan.inside for n in (*p.before, *p.outer))


def test_passes_of_a_softmax(monkeypatch):
    monkeypatch.setitem(CASES, "softmax", FUNCTIONS["softmax"])
    lowered, _ = lowered_of("softmax")
    (plan,) = schedule(lowered, config.max_body_rows).plans
    ops = [[plan.rows[n].op for n in p.inner] for p in plan.passes]
    assert ops[0] == ["load"] and ops[1][0] == ops[2][0] == "load"  # recomputed in each pass
    assert [len(p.folds) for p in plan.passes] == [1, 1, 0]
    assert [len(p.stores) for p in plan.passes] == [0, 0, 1] and not any(p.after for p in plan.passes)


FIELDS = ("before", "inner", "stores", "results", "outer", "after")


def test_the_interpreter_runs_what_passes_say_and_nothing_else(case, monkeypatch):
    """A pass without one of its rows or stores gives no result or another: nothing is there by another way."""
    lowered, found, args, want = case
    assert same(interpret_schedule(lowered, found, args), want)
    tried = 0
    for at, plan in enumerate(found.plans):
        for number, p in enumerate(plan.passes):
            for field in FIELDS:
                for k, left in enumerate(getattr(p, field)):
                    if field in ("before", "outer") and _named_elsewhere(plan, number, field, left):
                        continue
                    less = dataclasses.replace(p, **{field: getattr(p, field)[:k] + getattr(p, field)[k + 1 :]})
                    passes = [less if n == number else other for n, other in enumerate(plan.passes)]
                    plans = list(found.plans)
                    plans[at] = dataclasses.replace(plan)
                    monkeypatch.setitem(plans[at].__dict__, "passes", passes)
                    changed = dataclasses.replace(found, plans=tuple(plans))
                    tried += 1
                    assert not _runs(lowered, changed, args, want), f"{field} without {left}"
    assert tried


def _named_elsewhere(plan: KernelPlan, number: int, field: str, row: int) -> bool:
    """Whether the row outside the loops is there by another pass, or before, already."""
    named = [(n, f) for n, p in enumerate(plan.passes) for f in ("before", "outer") if row in getattr(p, f)]
    return named != [(number, field)]


def _runs(lowered, found, args, want) -> bool:
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        return same(interpret_schedule(lowered, found, args), want)
    except KeyError:
        return False
    finally:
        torch.use_deterministic_algorithms(False)


def test_constant_rows_are_outside(case):
    _, found, _, _ = case
    for plan in found.plans:
        inner = [n for p in plan.passes for n in p.inner]
        held = Passes(plan, frozenset(inner[:1]))
        assert inner[0] not in held.full and inner[0] in held.outside([inner[0]])
