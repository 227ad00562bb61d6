"""Which calls of a program are made together, and that the program still computes the same."""

from __future__ import annotations

import pytest
import torch

from fuser.frontends import batching
from fuser.frontends.dynamo import fuser_backend, last_compilation

pytestmark = pytest.mark.usefixtures("clean")


def call(each="F", inputs=2, elements=0):
    return batching.Call(each, ("a",) * inputs, ("r",), True, elements)


def runs(calls, needs, ranks=None):
    return batching.Order(calls, ranks or range(len(calls)), needs).runs


def test_calls_of_one_fusion_are_made_together():
    calls = [call(), call("G"), None, call(), call("G"), call()]
    assert runs(calls, [set()] * 6) == [[0, 3, 5], [1, 4], [2]]
    assert runs(calls, [set()] * 6, range(6, 0, -1)) == [[5, 3, 0], [4, 1], [2]]


def test_calls_wait_for_what_they_need():
    assert runs([call()] * 4, [set(), set(), {0}, {1}]) == [[0, 1], [2, 3]]
    assert runs([call(), None, call(), call()], [set(), {0}, {1}, set()]) == [[0, 3], [1], [2]]
    assert runs([call()] * 3, [set(), {0}, {1}]) == [[0], [1], [2]]


def test_a_circle_is_left_out():
    assert runs([call(), None, call()], [set(), {2}, {1}]) == [[0]]


def test_results_of_a_batch_are_bounded():
    big = call(elements=192 << 10)
    assert runs([big, big, call(), call()], [set()] * 4) == [[0], [1, 2, 3]]


def test_calls_that_differ_in_inputs_stay_apart():
    assert runs([call(inputs=2), call(inputs=3)], [set()] * 2) == [[0], [1]]


def compiled(fn, *args):
    got = torch.compile(fn, backend=fuser_backend)(*args)
    torch.testing.assert_close(got, fn(*args))
    return last_compilation().source


def test_results_that_others_read_are_kept():
    def fn(a, b, c, d):
        parts = [torch.tanh(x) * x for x in (a, b, c, d)]
        return torch.mm(parts[0], parts[1]), parts[2].sum(), parts[3]

    source = compiled(fn, *torch.randn(4, 8, 8))
    assert "_EACH_" in source and ", True," in source


def test_a_chain_through_products_is_called_step_by_step():
    def fn(x, w):
        for _ in range(4):
            x = torch.tanh(torch.mm(x, w)) * 2
        return x

    assert "_EACH_" not in compiled(fn, *torch.randn(2, 8, 8))


def test_writes_and_reads_of_one_tensor_keep_their_order():
    def fn(a, b, c):
        a.mul_(2).tanh_()
        b.mul_(2).tanh_()
        torch.mm(a, b, out=None)
        c.mul_(2).tanh_()
        return a + 0, torch.mm(b, c)

    def run(f):
        args = list(torch.linspace(-1, 1, 48).reshape(3, 4, 4).clone().unbind())
        args = [x.clone() for x in args]
        return f(*args), args

    want = run(fn)
    got = run(torch.compile(fn, backend=fuser_backend))
    torch.testing.assert_close(got, want)
