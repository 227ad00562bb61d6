"""A group that no kernel takes whole loses only the calls that cannot be fused: the others are groups around them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F

import fuser
import fuser.debug
from fuser import interface
from fuser.kernel_cache import KernelSpec
from tests import compare


def both_sides(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`call` with elementwise operations before and after it."""
    return lambda x: torch.relu(call(torch.relu(x) * 2 + 1)) * 3 + 1


def opaque(x: torch.Tensor) -> torch.Tensor:
    """Python that depends on data."""
    return x.flip(0) if x.sum() > 0 else x


torch.fx.wrap("opaque")


def write(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    v = y.view(-1)
    z = v + 1  # before the write
    y.add_(5)
    return z + v * 3


def write_and_return(x: torch.Tensor) -> Any:
    y = torch.relu(x)
    row = y[1]
    y.mul_(2)
    return y, row * 2, row


def transpose_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    before = y.shape[0]
    y.t_()
    return (y + 1).reshape(-1) * before + y.shape[0]


def draw(x: torch.Tensor) -> torch.Tensor:
    a = torch.rand_like(torch.sort(x)[0] * 0 + 1)
    b = torch.rand_like(x * 2)
    return a * 2 + b + 1


def sizes(x: torch.Tensor) -> torch.Tensor:
    n, m = x.shape
    y = torch.relu(x) * 2
    t = torch.topk(y, 2)[0]
    return (t.reshape(2, n) + m).sum() + torch.mm(y, y.t()).view(n, n) * n


# A program, how many pieces it becomes, and which calls are left to ATen.
PROGRAMS = {
    "linear": (both_sides(lambda x: F.linear(x, x)), 2, ["aten.linear"]),
    "sort": (both_sides(lambda x: torch.sort(x, 1)[0]), 2, ["aten.sort"]),
    "read as a whole": (both_sides(lambda x: torch.stack(torch.topk(x, 3, 1)).sum(0)), 2, ["aten.topk", "aten.stack"]),
    "complex": (both_sides(lambda x: (torch.view_as_complex(x.view(-1, 3, 2)) * 2).abs()), 2,
                ["aten.view_as_complex", "aten.mul", "aten.abs"]),
    "bits": (both_sides(lambda x: x.view(torch.int32)), 2, ["aten.view"]),
    "python": (both_sides(lambda x: opaque(x)), 2, ["call.tests.unit.test_splitting.opaque"]),
    "two in a row": (both_sides(lambda x: torch.mm(torch.sort(x)[0].t(), x)), 2, ["aten.sort", "aten.mm"]),
    "two apart": (both_sides(lambda x: torch.mm((torch.sort(x)[0] * 2).t(), x)), 3, ["aten.sort", "aten.mm"]),
    "beside": (lambda x: torch.relu(x) * 2 + torch.sort(x)[1], 1, ["aten.sort"]),
    "side by side": (lambda x: (torch.sort(x * 2)[0] + 1) * (torch.mm(x.t() * 3, x)[0, 0] + 2), 2,
                     ["aten.sort", "aten.mm"]),
    "a view as a result": (lambda x: (lambda y: (y, y.view(-1), y[0]))(torch.relu(x) * 2), 1,
                           ["aten.view", "aten.select"]),
    "write": (write, 2, ["aten.add_"]),
    "write and return": (write_and_return, 2, ["aten.mul_", "aten.select"]),
    "transpose in place": (transpose_in_place, 2, ["aten.t_"]),
    "draw": (draw, 2, ["aten.sort", "aten.rand_like", "aten.rand_like"]),
    "sizes": (sizes, 2, ["aten.topk", "aten.mm"]),
    "several results": (lambda x: (lambda r: torch.sort(r[0])[0] + r[1])(torch.var_mean(x * 2, 1)), 2, ["aten.sort"]),
    "unbind": (lambda x: torch.stack(torch.mm(x.t(), x * 2).unbind(0), 1) * 2 + 1, 2, ["aten.mm"]),
    "split of a result of ATen": (lambda x: torch.cat(torch.mm(x.t(), x * 2).chunk(2), 1) * 2 + 1, 2, ["aten.mm"]),
}  # fmt: skip


def registered(program: Callable[..., Any]) -> tuple[Callable[..., Any], int]:
    key = fuser.register_fusion(torch.fx.symbolic_trace(program))
    return fuser.fusion_handle(key), key


def pieces_of(spec: KernelSpec) -> tuple[list[KernelSpec], collections.Counter[str]]:
    """The groups that a group was split into, those of pieces too; and the calls left to ATen."""
    if not spec.store.splits:
        return [spec], collections.Counter()
    (made,) = spec.store.splits
    found, left = [], collections.Counter(op.op for op in made.unfused)
    for key in made.keys:
        inner, more = pieces_of(interface.kernel_spec(key))
        found += inner
        left += more
    return found, left


@pytest.mark.sampled(10, also=("read as a whole",))
@pytest.mark.parametrize("name", PROGRAMS)
def test_only_the_calls_that_cannot_be_fused_are_left_to_aten(name, registry):
    program, pieces, left = PROGRAMS[name]
    handle, key = registered(program)
    for n in (1, 1, 2):  # the first call, one like it, and one of other sizes
        torch.manual_seed(1)
        x = torch.randn(4 * n, 6)
        want_input, got_input = x.clone(), x.clone()
        torch.manual_seed(2)
        want = program(want_input)
        torch.manual_seed(2)
        got = handle(got_input)
        assert not compare.differences(compare.leaves(got), compare.leaves(want), lambda w=want: compare.leaves(w))
        assert torch.equal(got_input, want_input)
        assert compare.alias_pattern([got_input], compare.leaves(got)) == compare.alias_pattern(
            [want_input], compare.leaves(want)
        )
    spec = interface.kernel_spec(key)
    groups, found = pieces_of(spec)
    assert sorted(found.elements()) == sorted(left)
    assert len(groups) == pieces and all(g.store.kernels and not g.store.fallbacks for g in groups)
    assert "split into the fusions" in fuser.debug.explain(key)


def test_reports_count_the_calls_between_pieces():
    _, key = registered(lambda x: torch.exp(torch.sort(torch.sin(x) * 2)[0]) + 1)
    fuser.run_fusion(key, [torch.randn(9)])
    report = fuser.debug.report([key])
    assert report.groups == 2 and report.ops_fused == 4 and sum(report.ops_unfused.values()) == 1, report


def test_errors_are_eagers():
    handle, _ = registered(lambda x: torch.mm(x * 2, x) + 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            handle(torch.randn(3, 4))
    torch.testing.assert_close(handle(torch.eye(3)), torch.eye(3) * 2 + 1)


def test_gradients_go_through_the_pieces():
    handle, key = registered(lambda x: (torch.sort(torch.relu(x))[0] * 2).sum())
    for n in (3, 3, 4):
        x = torch.randn(n)
        handle(x)
        x.requires_grad_()
        handle(x).backward()
        torch.testing.assert_close(x.grad, 2.0 * (x > 0))
    assert interface.kernel_spec(key).store.splits


def test_what_python_gives_may_be_anything():
    handle, _ = registered(lambda x: anything(x * 2) * 2 + 1)
    for n in (3, 4, 5):
        x = torch.ones(n)
        want = anything(x * 2) * 2 + 1
        torch.testing.assert_close(handle(x), want)


def anything(x: torch.Tensor) -> Any:
    return {3: x, 4: 4.5, 5: torch.nn.Parameter(x, requires_grad=False)}[len(x)]


torch.fx.wrap("anything")


def test_a_piece_is_the_same_fusion_as_the_graph_by_itself():
    _, whole = registered(lambda x: torch.sort(torch.sinh(x) * 7 + 2)[0])
    handle, alone = registered(lambda x: torch.sinh(x) * 7 + 2)
    fuser.run_fusion(whole, [torch.randn(4)])
    (piece,) = interface.kernel_spec(whole).store.splits[0].keys
    assert interface.kernel_spec(piece) is interface.kernel_spec(alone)


def test_only_the_classes_of_arguments_that_need_it_are_split():
    """The bits of a float are no integer's; an integer's own are a view, which a kernel reads through."""
    handle, key = registered(lambda x: (torch.relu(x * 2).view(torch.int32) + 1) * 3)
    store = interface.kernel_spec(key).store
    for dtype, splits in ((torch.int32, 0), (torch.float32, 1)):
        x = torch.arange(-3, 3, dtype=dtype)
        want = (torch.relu(x * 2).view(torch.int32) + 1) * 3
        assert torch.equal(handle(x), want) and torch.equal(handle(x), want)
        assert (len(store.kernels), len(store.splits)) == (1, splits)


def test_prepared_pieces_get_the_constants_that_are_bound_to_them(registry):
    """The second piece of a form takes its constants as inputs, whatever the graph around it."""

    def sliced(first: Callable[[torch.Tensor], torch.Tensor], start: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = first(x).view(torch.int32)
            return torch.cat([y[:, start : start + 20], y], 1) * 3

        return function

    x = torch.randn(4, 40)
    for first, start in ((torch.relu, 3), (torch.neg, 5), (torch.abs, 9)):
        handle, key = registered(sliced(first, start))
        assert fuser.prepare(key, [x]).result() is not None
        assert fuser.wait(60)
        (split,) = interface.kernel_spec(key).store.splits
        assert [r.bound for r in map(registry.find, split.keys)] == [(), () if start == 3 else (start, start + 20, 3)]
        stores = [interface.kernel_spec(piece).store for piece in split.keys]
        assert [(len(s.kernels), [e.reason for e in s.entries]) for s in stores] == [(1, [None])] * 2
        assert torch.equal(handle(x), sliced(first, start)(x))
    assert [len(s.kernels) for s in stores] == [1, 1]
