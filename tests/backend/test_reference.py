"""Eager, the interpreter on lowered buffers, the interpreter on kernel plans and the kernels: all give the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.fx

from fuser import config, debug, fusion_handle, register_fusion
from fuser.canonical import canonicalize
from fuser.debug.reference import interpret_lowered, interpret_schedule, print_lowered, verify_lowered
from fuser.errors import VerifyError
from fuser.ir.loop_body import LoopBody, Row
from fuser.ir.nodes import Pointwise
from fuser.ir.sizes import expr, indirect, symbol
from fuser.kernel_cache import REGISTRY
from fuser.lowering.graph import Lowered, lower_graph
from fuser.pipeline import why_not_lowered, with_numbers
from fuser.scheduler.schedule import schedule
from tests.backend.reference_cases import CASES


def lowered_of(name: str) -> tuple[Lowered, tuple]:
    """A case's graph, lowered, and all its arguments, tensors that the graph holds first."""
    fn, *args = CASES[name]
    registered = canonicalize(torch.fx.symbolic_trace(fn), False)
    missing = why_not_lowered(n.op for n in registered.graph.calls)
    assert missing is None, missing
    args = (*registered.bound, *args)
    numbers = frozenset(i for i, a in enumerate(args) if not isinstance(a, torch.Tensor))
    return lower_graph(with_numbers(registered.graph, numbers), args), args


def as_list(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def assert_same(got, want, args=()) -> None:
    """Equal dtypes, sizes and strides; values as close as the least precise dtype in play allows."""
    low = any(isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 for a in args)
    close = {"rtol": 1.6e-2, "atol": 1e-2} if low else {}
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, **close)


@pytest.mark.sampled(36, also=("index", "scalar_inputs"))
@pytest.mark.parametrize("name", CASES)
def test_interpreters_and_kernel_agree_with_eager(name):
    fn, *args = CASES[name]
    want = as_list(fn(*args))
    lowered, every = lowered_of(name)
    verify_lowered(lowered)
    assert_same(interpret_lowered(lowered, every), want, args)
    plan = schedule(lowered, config.max_body_rows)
    verify_lowered(lowered, plan)
    assert_same(interpret_schedule(lowered, plan, every), want, args)
    text = print_lowered(lowered, plan)
    assert all(b.name in text for b in lowered.ctx.buffers) and "return" in text

    key = register_fusion(torch.fx.symbolic_trace(fn))
    got = as_list(fusion_handle(key)(*args))
    spec = REGISTRY.find(key).spec
    assert not spec.store.fallbacks, spec.store.fallbacks
    assert_same(got, want, args)


def test_interpreter_runs_other_sizes_than_the_example():
    lowered, _ = lowered_of("softmax")
    x = torch.randn(3, 17)
    assert_same(interpret_lowered(lowered, (x,)), [x.softmax(-1)])
    assert_same(interpret_schedule(lowered, schedule(lowered, 256), (x,)), [x.softmax(-1)])


def test_an_index_of_the_graph_out_of_range_is_reported():
    lowered, (x, i) = lowered_of("index_select")
    with pytest.raises(VerifyError, match="out of range"):
        interpret_lowered(lowered, (x, i + 100))


def broken(change) -> Lowered:
    """The lowered chain with its first body, of three rows, changed by `change(rows)`."""
    lowered, _ = lowered_of("chain")
    buffer = lowered.ctx.buffers[0]
    loops = buffer.loops[0]
    body = loops.body
    buffer.loops[0] = dataclasses.replace(loops, body=LoopBody(tuple(change(list(body.rows))), body.result))
    return lowered


def replaced(rows: list[Row], n: int, **changes) -> list[Row]:
    rows[n] = dataclasses.replace(rows[n], **changes)
    return rows


BROKEN = {
    "unknown op": (lambda rows: replaced(rows, len(rows) - 1, op="frobnicate"), "no such op"),
    "forward reference": (lambda rows: replaced(rows, 1, op="relu", args=(3,), attr=None), "refers to row 3"),
    "unknown buffer": (lambda rows: replaced(rows, 0, attr=("buf9", rows[0].attr[1])), "read before it is written"),
    "wrong rank": (lambda rows: replaced(rows, 0, attr=("in0", (expr(0),))), "1 indices"),
    "wrong dtype": (lambda rows: replaced(rows, 0, dtype=torch.int64), "loaded as"),
    "low precision value": (lambda rows: replaced(rows, 0, dtype=torch.float16), "storage dtype"),
    "unknown symbol": (
        lambda rows: replaced(rows, 0, attr=("in0", (symbol("nobody"), expr(0)))), "neither a loop variable",
    ),
    "index by a value": (
        lambda rows: replaced(rows, 1, attr=("in1", (expr(indirect(0)), expr(0)))), "which is no index",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_verifier_refuses(name):
    change, message = BROKEN[name]
    with pytest.raises(VerifyError, match=message):
        verify_lowered(broken(change))


def test_verifier_refuses_a_buffer_read_before_it_is_written():
    lowered, _ = lowered_of("softmax")
    lowered.ctx.buffers.reverse()
    with pytest.raises(VerifyError, match="read before it is written"):
        verify_lowered(lowered)


def test_verifier_refuses_a_plan_whose_value_comes_after_its_store():
    lowered, _ = lowered_of("softmax")
    plan = schedule(lowered, 256)
    first = plan.plans[0]
    stores = tuple(dataclasses.replace(s, phase=0) for s in first.stores)
    changed = dataclasses.replace(plan, plans=(dataclasses.replace(first, stores=stores),))
    with pytest.raises(VerifyError, match="before its value is there"):
        verify_lowered(lowered, changed)


def test_interpreter_sees_a_store_outside_of_its_buffer():
    lowered, args = lowered_of("chain")
    buffer = lowered.ctx.buffers[-1]
    loops = buffer.loops[0]
    assert isinstance(loops, Pointwise)
    buffer.loops[0] = dataclasses.replace(loops, store_index=(loops.store_index[0] + 1, loops.store_index[1]))
    with pytest.raises(VerifyError, match="written outside"):
        interpret_lowered(lowered, args)


def test_dump_has_the_ir(tmp_path):
    fn, *args = CASES["layer_norm"]
    key = register_fusion(torch.fx.symbolic_trace(fn))
    fusion_handle(key)(*args)
    paths = {p.name: p for p in debug.dump(key, tmp_path)}
    ir = next(p.read_text() for name, p in paths.items() if name.endswith(".ir.txt"))
    assert "reducing" in ir and "kernel " in ir
