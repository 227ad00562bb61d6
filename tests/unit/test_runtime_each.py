"""`handle.each`: many calls at once give what the calls give one by one, on both launchers."""

from __future__ import annotations

import pytest
import torch

from fuser.ir.sizes import SLOT
from fuser.kernel_spec import Bind, Check, Step
from tests.unit import runtime_support as support
from tests.unit.test_runtime_launcher import bare, library, make, new_handle  # noqa: F401  fixtures


def vectors(sizes, inputs=1):
    torch.manual_seed(0)
    return [torch.randint(-9, 9, (n,)).float() for n in sizes for _ in range(inputs)]


SIZES = [0, 1, 2, 16, 1000, 70_000, 3, 200_000, 5] + [7] * 300 + [100_000, 33]


def test_every_call_is_answered(make):  # noqa: F811
    handle = make(support.mul_add())
    args = vectors(SIZES, 3)
    out = handle.each(3, True, *args)
    assert len(out) == len(SIZES)
    for got, x, y, z in zip(out, args[::3], args[1::3], args[2::3], strict=True):
        assert torch.equal(got, x * y + z)
    assert (handle.hits, handle.misses) == (len(SIZES), 0)
    assert handle.each(3, False, *args[:6]) is None
    assert handle.hits == len(SIZES) + 2


def test_steps_wait_for_each_other(make):  # noqa: F811
    handle = make(support.flipped_squares())
    args = vectors([200_000, 3, 100_000, 0, 1, 70_000])
    for _ in range(3):
        for got, x in zip(handle.each(1, True, *args), args, strict=True):
            assert torch.equal(got, (x * x).flip(0))


def test_kernels_of_several_classes_and_lengths(make):  # noqa: F811
    handle = make(support.temporaries(), support.add_one())
    a, b, c = torch.randn(1000), torch.randn(40, 50), torch.randn(100_000)
    got = handle.each(1, True, a, b, c, b.t())
    torch.testing.assert_close(got, (2 * a * a, b + 1, 2 * c * c, b.t() + 1), rtol=0, atol=0)
    assert handle.kernel_hits == (2, 2)


def test_inputs_are_written_and_given_back(make):  # noqa: F811
    other = support.vector(Check((SLOT, 0)))
    step = Step("mul_add", (SLOT, 0), (SLOT, 0), support.ZERO)
    handle = make(support.program([support.vector(Bind(0)), *[other] * 3], 1, [], [step], [("input", 3)]))
    args = vectors([100_000, 10, 65_536], 4)
    out = handle.each(4, True, *args)
    for i, got in enumerate(out):
        x, y, z, o = args[4 * i : 4 * i + 4]
        assert got is o and torch.equal(o, x * y + z)


def test_what_no_kernel_takes_is_slow(make):  # noqa: F811
    handle = make(support.mul_add())
    x, y = torch.ones(4), torch.ones(5)
    assert handle.each(3, True, x, x, y, x, x, x, None, x, x)[::2] == ("slow", "slow")
    assert [len(args) for args, _ in handle.slow.calls] == [3, 3] and (handle.hits, handle.misses) == (1, 2)
    assert handle.each(2, True, x, x) == ("slow",)
    assert make().each(1, True, x, y) == ("slow", "slow")


def test_a_status_is_one_calls_own(make):  # noqa: F811
    handle = make(support.gather())
    x, good, bad = torch.arange(10.0), torch.tensor([3, 0]), torch.tensor([3, 10])
    first, second, third = handle.each(2, True, x, good, x, bad, x, good)
    assert first.tolist() == third.tolist() == [3.0, 0.0] and second == "slow"
    assert [status for _, status in handle.slow.calls] == [1]


def test_threads_have_scratch_of_their_own(make):  # noqa: F811
    handle = make(support.who(work=1 << 20, scratch=100))
    args = vectors([64] * 8)
    seen = torch.cat(handle.each(1, True, *args))
    scratch_of = dict(seen[:, :2].tolist())
    assert len(set(scratch_of.values())) == len(scratch_of), "one scratch for each thread"
    assert all([thread, scratch_of[thread]] == row[:2] for row in seen.tolist() for thread in row[:1])


def test_wrong_counts_are_errors(make):  # noqa: F811
    handle = make(support.mul_add())
    x = torch.ones(3)
    for arity, args in ((3, (x, x)), (0, (x,)), (-1, (x,))):
        with pytest.raises(TypeError, match="how many inputs"):
            handle.each(arity, True, *args)
    assert handle.each(3, True) == () and handle.each(3, False) is None


def test_an_error_of_the_slow_way_comes_through(make):  # noqa: F811
    def fail(args, status):
        raise ValueError("no")

    handle = type(make())(fail)
    with pytest.raises(ValueError, match="no"):
        handle.each(1, True, torch.ones(2), torch.ones(2))
