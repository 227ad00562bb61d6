"""Memory that inputs and outputs have in common: as in eager, by a handle and through `torch.compile`.

Every case runs on its own inputs, made twice: values, dtypes, strides, the memory that outputs share with inputs and
with each other, whether an output is an input or a view of one, and what became of the inputs must all be eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx

from fuser import fusion_handle, register_fusion
from fuser.debug.reporting import report
from fuser.frontends.dynamo import fuser_backend
from fuser.frontends.overlaps import REASON
from fuser.frontends.records import compilations, forget_compilations
from tests import compare

Make = Callable[[], list[torch.Tensor]]


def numbers(*size: int) -> torch.Tensor:
    """1, 2, 3, …"""
    return torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)


# -- inputs: all in one memory, or not ---------------------------------------------------------------------------------
def apart() -> list[torch.Tensor]:
    return [numbers(4, 4), numbers(4, 4) / 8]


def same() -> list[torch.Tensor]:
    x = numbers(4, 4)
    return [x, x]


def alias() -> list[torch.Tensor]:
    x = numbers(4, 4)
    return [x, x[...]]


def turned() -> list[torch.Tensor]:
    x = numbers(4, 4)
    return [x, x.t()]


def halves() -> list[torch.Tensor]:
    """Neighbours in memory that do not overlap."""
    x = numbers(8, 4)
    return [x[:4], x[4:]]


def columns() -> list[torch.Tensor]:
    """Interleaved in memory, without a common element."""
    x = numbers(4, 8)
    return [x[:, ::2], x[:, 1::2]]


def windows() -> list[torch.Tensor]:
    """Overlapping by half."""
    x = numbers(6, 4)
    return [x[:4], x[2:]]


def strided_windows() -> list[torch.Tensor]:
    x = numbers(40)
    return [x.as_strided((4, 4), (4, 1)), x.as_strided((4, 4), (4, 2), 3)]


def base_and_row() -> list[torch.Tensor]:
    x = numbers(4, 4)
    return [x, x[1].expand(4, 4)]


def sides() -> list[torch.Tensor]:
    """The left and the right half of one matrix."""
    x = numbers(4, 8)
    return [x[:, :4], x[:, 4:]]


def wide_and_bits() -> list[torch.Tensor]:
    """The same bits as another dtype."""
    x = numbers(4, 4)
    return [x, x.view(torch.int32)]


READ_ONLY = [apart, halves, turned, columns]
LAYOUTS = [apart, same, alias, turned, halves, columns, windows, strided_windows, base_and_row, wide_and_bits]


# -- functions that write one input and read the other -----------------------------------------------------------------
def write_then_read(x, y):
    x.mul_(2)
    return y + 1


def read_write_read(x, y):
    before = y + 1
    x.add_(1)
    return before, y + 1, x


def write_from_the_other(x, y):
    x.copy_(y)
    return x.sum(0)


def write_row_read_base(x, y):
    row = x[1]
    row.zero_()
    return x + y


def write_slice_of_transposed(x, y):
    x.t()[1:3].add_(y[:2])
    return x * 1, y * 1


def write_column_return_view(x, y):
    x[:, 0].fill_(7)
    return x[:, 0], y.t()


def write_through_view_of_view(x, y):
    corner = x[1:].t()[1:]
    corner.neg_()
    return corner, x.view(-1), y * 2


def write_index(x, y):
    x.index_put_((torch.tensor([0, 2]),), y[1] * 1)
    return x, y + x


def write_masked(x, y):
    x.masked_fill_(y > 3, 0)
    return y * 1


def write_scattered(x, y):
    x.index_add_(0, torch.tensor([0, 0, 3, 1]), y * 1)
    return x.t(), y


WRITING = [
    write_then_read, read_write_read, write_from_the_other, write_row_read_base, write_slice_of_transposed,
    write_column_return_view, write_through_view_of_view, write_index, write_masked, write_scattered,
]  # fmt: skip


# -- functions that give views -----------------------------------------------------------------------------------------
def inputs_themselves(x, y):
    return y, x, x


def views_of_one_input(x, y):
    return x[1], x[1:3], x.t(), x.view(-1), x.unsqueeze(0), x[:, 0].expand(3, 4), x.diagonal(), x.view(2, 8)[1]


def views_and_values(x, y):
    z = x + y
    return z, z.t(), z[1], x.t(), z.view(-1), z.t()[1:]


def views_of_nothing_returned(x, y):
    z = x * y + 1
    return z[1:], z[0], z.t().reshape(-1), z.t().contiguous()


def copies_or_not(x, y):
    t = x.t()
    same = x.contiguous(), x.reshape(-1), x.flatten(), x.to(x.dtype), t.float()
    return *same, t.contiguous(), t.reshape(-1), x.clone()


def pieces(x, y):
    return x.chunk(2)[1], x.split(3, 1)[0], x.split(3, 1)[1], y.unbind(1)[2]


def expanded_twice(x, y):
    z = x.sum(0, keepdim=True)
    return z.expand(4, 4), z.expand(2, 4), z, x[None].expand(2, 4, 4)


def windows_of_results(x, y):
    z = (x * 2).contiguous()
    return z.as_strided((3, 2), (4, 1)), z.unfold(1, 2, 1), z




VIEWING = [
    inputs_themselves, views_of_one_input, views_and_values, views_of_nothing_returned, copies_or_not, pieces,
    expanded_twice, windows_of_results,
]  # fmt: skip


# -- comparing ---------------------------------------------------------------------------------------------------------
def bases(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[str]:
    """Whose view each output is, as autograd tells it."""
    found = []
    for o in outputs:
        at = [i for i, x in enumerate(inputs) if o._base is x or (o._base is not None and o._base is x._base)]
        found.append("no view" if o._base is None else f"of input {at[0]}" if at else "of a result")
    return found


def assert_same(function: Callable[..., Any], eager: Callable[..., Any], make: Make) -> None:
    """The same results, writes, views and errors."""
    mine, own = make(), make()
    try:
        want = as_tuple(eager(*own))
    except RuntimeError as e:
        assert str(e)[:30] in error_of(function, mine)
        return
    got = as_tuple(function(*mine))
    for a, b in zip((*got, *mine), (*want, *own), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, check_stride=True)
    assert compare.alias_pattern(mine, got) == compare.alias_pattern(own, want)
    assert bases(mine, got) == bases(own, want)


def error_of(function: Callable[..., Any], inputs: Sequence[Any]) -> str:
    try:
        function(*inputs)
    except RuntimeError as e:
        return str(e)
    return "no error"


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("f", [*VIEWING, *WRITING], ids=lambda f: f.__name__)
def test_by_a_handle(f):
    """One handle for all kinds of overlap, first for inputs that have none."""
    handle = fusion_handle(register_fusion(torch.fx.symbolic_trace(f)))
    for make in LAYOUTS if f in WRITING else READ_ONLY:
        assert_same(handle, f, make)


def differing(f: Callable[..., Any], backend: Any, layouts: Sequence[Make]) -> list[str]:
    """For which of the inputs the compiled function does not do what eager does."""
    torch._dynamo.reset()
    compiled, found = torch.compile(f, backend=backend), []
    for make in layouts:
        try:
            assert_same(compiled, f, make)
        except (AssertionError, IndexError, RuntimeError):
            found.append(make.__name__)
    return found


@pytest.mark.sampled(18, also=("views_and_values",))
@pytest.mark.parametrize("f", [*VIEWING, *WRITING], ids=lambda f: f.__name__)
def test_through_torch_compile(f):
    """As eager, however the inputs of later calls overlap."""
    assert not differing(f, fuser_backend, LAYOUTS if f in WRITING else READ_ONLY)


@pytest.mark.sampled(12, also=("strided_windows-write_column_return_view",))
@pytest.mark.parametrize("f", [write_from_the_other, write_column_return_view, write_scattered])
@pytest.mark.parametrize("first", LAYOUTS, ids=lambda f: f.__name__)
def test_compiled_for_inputs_that_overlap(first, f):
    """In whatever way the first call's inputs overlap."""
    assert not differing(f, fuser_backend, [first, apart, windows, columns])


def test_calls_with_overlapping_inputs_run_by_eager():
    """They are counted, with the reason; inputs that are only read, or lie side by side, run by kernels."""
    torch._dynamo.reset()
    forget_compilations()
    compiled = torch.compile(write_then_read, backend=fuser_backend)
    for make in (apart, windows, halves, alias, sides, apart):
        assert_same(compiled, write_then_read, make)
    assert sum(record.by_eager[REASON] for record in compilations()) == 2
    assert report().fallback_calls[REASON] == 2
    read = torch.compile(lambda x, y: x * 2 + y, backend=fuser_backend)
    for make in (apart, windows, turned):
        assert_same(read, lambda x, y: x * 2 + y, make)
    assert sum(record.by_eager[REASON] for record in compilations()) == 2


def test_gradients_where_a_written_input_overlaps():
    def f(weight, x, y):
        y.add_(1)
        return (weight * x * y).sum()

    torch._dynamo.reset()
    compiled = torch.compile(f, backend=fuser_backend)
    for make in (apart, windows, apart):
        grads = []
        for function in (f, compiled):
            x, y = make()
            weight = torch.ones(4, 4, requires_grad=True)
            function(weight, x, y).backward()
            grads.append((weight.grad, y))
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("copy", ("alias_copy", "detach_copy", "slice_copy", "clone", "the same again"))
def test_results_that_are_apart_in_eager_are_apart(copy):
    def function(x):
        a = torch.sigmoid(x) * 2
        return a, torch.sigmoid(x) * 2 if copy == "the same again" else getattr(torch.ops.aten, copy)(a), a

    handle = fusion_handle(register_fusion(torch.fx.symbolic_trace(function)))
    for _ in range(2):
        a, b, c = handle(torch.ones(3, 4))
        assert torch.equal(a, b) and b.data_ptr() != a.data_ptr() == c.data_ptr()
    assert handle.hits == 2


@pytest.mark.parametrize("form", ["turned", "expanded", "sliced", "whole"])
@pytest.mark.parametrize("name", ["ravel", "flatten", "contiguous", "reshape", "double"])
@pytest.mark.parametrize("view", [False, True])
def test_what_is_returned_twice_is_one_tensor(name, form, view):
    """Also where it is a copy of a view, which each result could be by itself."""
    x = {"turned": torch.randn(6, 5).t(), "expanded": torch.randn(1).expand(40), "sliced": torch.randn(6, 5)[::2],
         "whole": torch.randn(6, 5)}[form]  # fmt: skip

    def function(x):
        y = getattr(x, name)(*[-1] * (name == "reshape"))
        return (y, y, y.unsqueeze(0)) if view else (y, y)

    def shared(results):
        return [[a.data_ptr() == b.data_ptr() for b in (*results, x)] for a in results]

    handle = fusion_handle(register_fusion(torch.fx.symbolic_trace(function)))
    want, got = function(x), handle(x)
    assert shared(got) == shared(want)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
