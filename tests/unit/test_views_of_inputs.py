"""Results that are views of an input: the caller gets the elements and the layout that eager gives, at symbolic sizes.

AOTAutograd makes such a view from the layout of the traced result, unless it replays the program's views, which it does
for numbers alone. Every backend of torch has some of these programs wrong.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fuser.frontends.dynamo import last_compilation
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("clean")

# Of a tensor with 4 rows of 8: lists of views.
VIEWS = {
    "split": lambda t: t.split(2, 1),
    "chunk": lambda t: t.chunk(2, 1),
    "sizes": lambda t: t.split([1, t.shape[1] - 1], 1),
    "tensor_split": lambda t: t.tensor_split(2, 1),
    "unbind": lambda t: t.unbind(0),
    "halves": lambda t: [t[:, : t.shape[1] // 2], t[:, t.shape[1] // 2 :]],
    "steps": lambda t: [t[::2], t[1::2]],
    "select": lambda t: [t[1], t[..., -1]],
    "diagonal": lambda t: [t.diagonal()],
    "unfold": lambda t: [t.unfold(1, 2, 2)],
    "t": lambda t: [t.t()],
    "expand": lambda t: [t.expand(2, *t.shape)],
    "unflatten": lambda t: [t.unflatten(1, (2, -1))],
    "swapped": lambda t: [t.unflatten(1, (2, -1)).transpose(0, 2)],
    "reshape": lambda t: [t.reshape(t.shape[0], 2, -1)],
    "strided": lambda t: [t.as_strided((2, 2), (t.stride(0), t.stride(1)), t.storage_offset() + t.stride(1))],
    "complex": lambda t: [torch.view_as_complex(t.unflatten(1, (-1, 2)))],
    "real": lambda t: [torch.view_as_complex(t.unflatten(1, (-1, 2))).real],
    "bits": lambda t: [t.view(torch.int32)],
    "narrower": lambda t: [t.view(torch.float16)],
    "wider": lambda t: [t.view(torch.float64)],
}
# Of these, what the views of all are seen through again: another pair in each family. The last two change the dtype.
AGAIN = [VIEWS[n] for n in ("sizes", "unfold", "unflatten", "bits", "narrower")]
PROGRAMS = {
    "first": lambda x, a: (lambda v: (v[-1].mul_(-2), v[0]))(a(x)),
    "whole": lambda x, a: (lambda v: (x.mul_(-2), *v))(a(x)),
    "after": lambda x, a: (x.fill_(7), a(x)[-1])[1:],
}


def numbers():
    return (torch.arange(60.0) - 30).reshape(6, 10)[1:5, 2:10]


def columns():
    return (torch.arange(88.0) - 30).reshape(8, 11).t()[2:6]


def write_between(x, inner, outer):
    """A write to the last of `inner` views, behind the first view of that one."""
    views = inner(x)
    seen_through = outer(views[-1])
    return views[-1].mul_(-2), seen_through[0], views[0]


def write_last(x, inner, outer):
    """A write to the last view of the last of `inner` views."""
    views = inner(x)
    last = outer(views[-1])[-1]
    return last.mul_(-2), views[0]


def seen(program, x):
    """What a program gives: layouts and places in the input's memory, with elements; and the input's afterwards."""
    with torch.no_grad():
        results = program(x)
    memory = x.untyped_storage().data_ptr()
    return [
        (t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().data_ptr() == memory, str(t.tolist()))
        for t in (*results, x)
    ]


def check(program, make=numbers, dynamic=True):
    try:
        want = seen(program, make())
    except (RuntimeError, IndexError):
        return False  # no view of that, or it cannot be written
    torch._dynamo.reset()

    def compiled(x):
        return program(x)

    assert seen(torch.compile(compiled, backend="fuser", dynamic=dynamic), make()) == want
    return True


INPUTS = ((numbers, True), (columns, True), (numbers, False))
MADE = pairwise(VIEWS, PROGRAMS, INPUTS)


@pytest.mark.sampled(9, also=("strided", "tensor_split"))
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_written_input(name):
    ran = [
        check(functools.partial(PROGRAMS[program], a=VIEWS[name]), make, dynamic)
        for view, program, (make, dynamic) in MADE if view == name
    ]  # fmt: skip
    assert sum(ran) >= len(ran) / 3


@pytest.mark.sampled(20, also=("narrower",))
@pytest.mark.parametrize("name", sorted(VIEWS.keys() - {"strided"}))  # Dynamo itself has no views of that one
def test_views_of_views_of_an_input(name):
    """Those of the input's dtype in one graph; a graph with another dtype is not compiled, so they are apart."""

    def through(outer):
        return lambda x: outer(VIEWS[name](x)[-1])[0]

    fit = [f for f in map(through, AGAIN[:3]) if is_possible(f)]
    check(lambda x: tuple(f(x) for f in fit))
    for f in map(through, AGAIN[3:]):
        check(lambda x, f=f: (f(x),))


def is_possible(view):
    """Whether eager has the view: of some dtypes and strides there is none."""
    try:
        view(numbers())
    except (RuntimeError, IndexError):
        return False
    return True


@pytest.mark.sampled(4, also=("write_last-reshape",))
@pytest.mark.parametrize("name", ("sizes", "reshape", "t"))
@pytest.mark.parametrize("program", (write_between, write_last))
def test_views_of_views_of_a_written_input(program, name):
    for outer in AGAIN:
        check(functools.partial(program, inner=VIEWS[name], outer=outer))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("write", (
    lambda x: x.expand(2, *x.shape).fill_(7), lambda x: x[:1].expand(4, 8).zero_(), lambda x: x.unfold(1, 2, 3).mul_(2),
    lambda x: x.t().unfold(0, 3, 2)[1].fill_(5), lambda x: x.broadcast_to(2, *x.shape)[1].mul_(3),
))  # fmt: skip
@pytest.mark.parametrize("dynamic", (False, True))
def test_writes_through_repeated_elements_and_windows(write, dynamic):
    def program(x):
        write(x)
        return x[1:], x * 2

    assert check(program, dynamic=dynamic)


@pytest.mark.parametrize("read", (
    lambda x: x.expand(2, *x.shape) * 2, lambda x: x.unfold(1, 2, 2).sum(-1), lambda x: x[:1].expand(4, 8).clone(),
))  # fmt: skip
def test_what_is_computed_from_repeated_elements_may_be_written(read):
    assert check(lambda x: (read(x).add_(1),))
    assert last_compilation().route != "eager"


def test_gradients_through_views_of_a_written_input():
    def program(x):
        half = x.shape[1] // 2
        first, second = x[:, :half], x[:, half:]
        second.mul_(-2)
        return first.unflatten(1, (2, -1)) * 3, first, second.t()

    found = []
    for run in (program, torch.compile(program, backend="fuser", dynamic=True)):
        leaf = torch.arange(60.0).reshape(6, 10).requires_grad_()
        results = run((leaf * 1)[1:5, 2:10])
        sum((r * r).sum() for r in results).backward()
        found.append([*results, leaf.grad])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride() and got.storage_offset() == want.storage_offset()


def test_a_result_by_another_dtype_runs_by_eager_and_says_so():
    assert check(lambda x: (x.view(torch.int32).chunk(2, 1)[1],))
    assert "another dtype" in last_compilation().reason


WRITES_AT_AN_OFFSET = {
    "mul_": lambda x: x.mul_(3),
    "a part": lambda x: x[0].add_(1),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1]), 5.0),
}
READS_BY_OFFSET = {
    "all of it": lambda x: x.as_strided((2, 2), (4, 1), 5) * 2,
    "what lies before": lambda x: torch.as_strided(x, (3,), (1,), 1) * 2,
    "of a view": lambda x: x[1:].as_strided((3,), (2,), 6) + 1,
    "its own offset": lambda x: x.as_strided((2, 2), (x.stride(0), 1)) + 1,
    "the view itself": lambda x: x.as_strided((2, 2), (4, 1), 5),
}


BY_OFFSETS = pairwise(WRITES_AT_AN_OFFSET, READS_BY_OFFSET, (True, False), (False, True))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("write", "read", "dynamic", "needs_gradient"), BY_OFFSETS)
def test_a_written_input_is_read_by_offsets_of_its_memory(write, read, dynamic, needs_gradient):
    """The input begins behind its memory. AOTAutograd takes the offset in the new content, which begins at 0."""

    def fn(x, y):
        WRITES_AT_AN_OFFSET[write](x)
        return READS_BY_OFFSET[read](x), y * 2

    torch._dynamo.reset()
    x = torch.randn(6, 4)[1:5]
    own = x._base.clone()[1:5]
    y = torch.randn(3, requires_grad=needs_gradient)
    got, want = torch.compile(fn, backend="fuser", dynamic=dynamic)(x, y)[0], fn(own, y)[0]
    assert torch.equal(got, want) and torch.equal(x._base, own._base)
