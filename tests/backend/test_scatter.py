"""Writing at places that tensors hold: values, strides, order, chains in one memory, places out of range."""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser import config
from fuser.debug.reference import interpret_lowered, interpret_schedule, verify_lowered
from fuser.lowering.graph import lower_graph
from fuser.scheduler.schedule import schedule
from tests.backend.fused import check, check_each, check_falls_back, compare, fuse, in_layouts, no_fallback, values

aten = torch.ops.aten
X, Y = values(4, 5, 6), values(4, 5, 6).flip(0) * 2
I = torch.tensor([3, 0, 2])  # all different
J = torch.tensor([1, 1, 0])  # some the same
FULL = torch.stack([torch.stack([torch.tensor([2, 0, 3, 1]).roll(k)] * 5, 1) for k in range(6)], 2)  # (4, 5, 6)


def spread(j):
    return j[:, None, None].expand(3, 5, 6)


WRITES = {
    "scatter": lambda x, y: x.scatter(0, FULL, y),
    "scatter_part": lambda x, y: x.scatter(0, FULL[:2, :4], y),
    "scatter_number": lambda x, y: x.scatter(0, FULL[:2], 2.5) * 2 + y,
    "scatter_inner": lambda x, y: x.scatter(2, FULL[..., :1], y),
    "scatter_add": lambda x, y: x.scatter_add(1, FULL, y),
    "scatter_add_outer": lambda x, y: torch.scatter_add(x, 0, spread(J), y),
    "scatter_multiply": lambda x, y: torch.scatter(x, 1, FULL, y, reduce="multiply"),
    "index_add": lambda x, y: x.index_add(0, J, y[:3]),
    "index_add_scaled": lambda x, y: torch.index_add(x, 2, J, y[:, :, 3:], alpha=-2) + y,
    "index_copy": lambda x, y: x.index_copy(1, I, y[:, :3]),
    "index_fill": lambda x, y: x.index_fill(0, I - 4, 3) - y,
    "index_put": lambda x, y: x.index_put((I,), y[:3]),
    "index_put_two": lambda x, y: x.index_put((I, I + 1), y[0, 0, 0]),
    "index_put_apart": lambda x, y: aten.index_put(x, [I, None, J], y[:3, :, 0], True),
    "index_put_sum": lambda x, y: aten.index_put(x, [None, J - 5], y[:, :3], True),
    "index_put_where": lambda x, y: aten.index_put(x, [y > 3], torch.tensor(9.0)),
    "index_put_where_rows": lambda x, y: aten.index_put(x, [y[:, 0, 0] > 3], y[1, 1, 1]),
    "index_put_where_matrix": lambda x, y: aten.index_put(x, [y[:, 0, 0] > 3], y[1, :, :1]),
    "index_put_where_sum": lambda x, y: aten.index_put(x, [y[:, :, 0] > 3], y[0, :1], True),
    "put": lambda x, y: x.put(J * 7 - 2, y[0, 0, :3], accumulate=True),
    "of_what_is_computed": lambda x, y: torch.relu(x).index_add(0, J * 2 + 1, torch.abs(y[:3]) * 3).sum(1),
    "reads_after": lambda x, y: (lambda a: (a.index_add(0, I, y[:3] * 2), a.amax(), a + 1))(x.index_add(0, J, y[:3])),
}


@pytest.mark.sampled(15, also=("index_put_where_sum",))
@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    check_each(WRITES[name], in_layouts(X, Y, gaps=False))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
def test_reduce(reduce, include_self):
    x, y = values(4, 6), values(5, 7)
    y[1, 2] = float("nan")
    at = torch.tensor([[0, 1, 1], [5, 5, 5], [2, 0, 2]])

    def fn(x, y):
        a = x.scatter_reduce(1, at, y, reduce, include_self=include_self)
        if reduce == "sum":
            return a
        return a, x.index_reduce(0, J, y[:3, :6], reduce.replace("amax", "amax"), include_self=include_self)

    check(fn, x, y)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_dtypes(dtype):
    x, y = values(4, 6, dtype=dtype), values(4, 6, dtype=dtype).flip(1)

    def fn(x, y):
        kept = x.index_copy(0, I, y[:3]), x.scatter(1, J[None], y), x.index_fill(1, I, 1)
        return kept if dtype is torch.bool else (*kept, x.index_add(0, J, y[:3]), x.scatter_add(1, J[None], y))

    check(fn, x, y)


def test_gradient_of_an_embedding():
    grad, at = values(2, 3, 8), torch.tensor([[1, 2, 3], [3, 3, 0]])
    fn = lambda g, i: (aten.embedding_dense_backward(g, i, 7, -1, False), aten.embedding_dense_backward(g, i, 5, 3, False))  # noqa: E731, E501
    check(fn, grad, at)
    check(lambda g, i: aten.embedding_dense_backward(g, i, 7, 1, False), grad.bfloat16(), at.int())
    by_frequency = lambda g, i: aten.embedding_dense_backward(g, i, 7, 1, True)  # noqa: E731
    check_falls_back(by_frequency, grad, at, reason="frequency")


def test_small_sizes():
    number, one, none = torch.tensor(3.0), torch.tensor([7.0]), torch.empty(0, dtype=torch.int64)
    check(lambda x, y: (x.scatter(0, J[2:], y), x.scatter_add(0, J[2], y[0])), one, one * 2)
    check(lambda x, y: (x.scatter_add(0, J[2:], y), x + 1), number, one)
    check(lambda x, i: (x.index_add(0, i, x[:0]), x.index_fill(1, i, 2), x.index_copy(0, i, x[:0])), values(4, 6), none)
    empty = torch.empty(0, 3)
    check(lambda x, i: (x.index_fill(0, i, 2), x.index_add(0, i, x)), empty, none)
    deep = values(2, 1, 3, 1, 2, 1, 2, 1)
    check(lambda x: (x.index_add(2, J, x), x.index_fill(4, J[:1], 5)), deep)


def test_a_chain_goes_on_in_one_memory():
    def fn(x, y):
        return x.index_add(0, I, y).index_add(0, J, y * 2).index_copy(0, I, y).index_fill(1, J, 0.5) * 2

    spec = check(fn, values(4, 6), values(3, 6))
    (kernel,) = spec.store.kernels
    assert len(kernel.program.steps) == 6  # a copy, four scatters, and what reads them
    assert len(kernel.program.buffers) == 2


def test_the_last_of_several_values_for_one_place_stays():
    handle, spec = fuse(lambda x, i, y: x.index_copy(0, i, y))
    x, at, y = torch.zeros(4, 256), torch.arange(1000) % 3, torch.randn(1000, 256)
    for _ in range(3):
        assert torch.equal(handle(x, at, y)[:3], y[[999, 997, 998]])
    no_fallback(spec)


def test_same_bits_on_any_number_of_threads():
    fn = lambda x, i, y: x.index_add(0, i, y)  # noqa: E731
    handle, spec = fuse(fn)
    x, at, y = torch.zeros(50, 300), torch.randint(50, (5000,)), torch.randn(5000, 300)
    first = handle(x, at, y)
    torch.testing.assert_close(first, fn(x, at, y))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(handle(x, at, y), first)
    no_fallback(spec)


def test_other_sizes_need_no_other_kernel():
    fn = lambda x, i, y: x.index_add(1, i, y) + 1  # noqa: E731
    handle, spec = fuse(fn)
    for rows, width, n in ((4, 6, 3), (2, 9, 5), (70, 3, 20)):
        x, y = values(rows, width), values(rows, n)
        at = torch.arange(n) % width
        compare(handle(x, at, y), fn(x, at, y))
    no_fallback(spec)
    assert len(spec.store.kernels) == 1


BAD = {
    "scatter": (lambda x, i: x.scatter(0, i[:, None], 1.5) - 8, (4, -1)),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[:, None], x) - 8, (4, -1)),
    "index_add": (lambda x, i: x.index_add(1, i, x[:, :3]) - 8, (6, -1)),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:3]) - 8, (4, -1)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2) - 8, (4, -5)),
    "index_put": (lambda x, i: x.index_put((i,), x[0]) - 8, (4, -5)),
    "put": (lambda x, i: x.put(i, x[0, :3]) - 8, (24, -25)),
}


@pytest.mark.parametrize("write", [
    lambda x, i, y: x.index_add(0, i, y), lambda x, i, y: x.index_copy(0, i, y),
    lambda x, i, y: torch.index_put(x, (i,), y * 2, True),
])  # fmt: skip
def test_a_row_looks_its_place_up_once(write):
    """An index that each element of a row checks keeps the loop along the row from being vectorised."""
    handle, spec = fuse(write)
    x, y, i = torch.zeros(32, 40), torch.arange(2400.0).view(60, 40), torch.arange(60) * 7 % 32
    compare(handle(x, i, y), write(x, i, y))
    no_fallback(spec)
    source = spec.store.kernels[-1].source
    assert source.count("bad |=") == 1 and "reduction(|:bad)" not in source


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BAD)
def test_a_place_out_of_range_raises_what_eager_raises(name):
    fn, places = BAD[name]
    x = values(4, 6)
    before = x.clone()
    handle, spec = fuse(fn)
    handle(x, torch.tensor([0, 1, 2]))
    for bad in (*places, 1 << 40, -(1 << 40)):
        with pytest.raises((IndexError, RuntimeError)) as eager:
            fn(x, torch.tensor([0, bad, 1]))
        with pytest.raises(type(eager.value)) as fused:
            handle(x, torch.tensor([0, bad, 1]))
        assert str(fused.value).splitlines()[0] == str(eager.value).splitlines()[0]
    assert torch.equal(x, before)
    assert spec.store.kernels and set(spec.store.fallbacks) == {"a kernel reported: index out of range"}


@pytest.mark.parametrize("name", ["scatter", "scatter_add", "index_put_apart", "of_what_is_computed", "put"])
def test_the_interpreters_agree(name):
    fn = WRITES[name]
    _, spec = fuse(fn)
    args = (*spec.registered.bound, X, Y)
    lowered = lower_graph(spec.graph, args)
    plan = schedule(lowered, config.max_body_rows)
    verify_lowered(lowered, plan)
    want = fn(X, Y)
    compare(interpret_lowered(lowered, args), [want])
    compare(interpret_schedule(lowered, plan, args), [want])


def test_what_is_left_to_aten():
    x = values(4, 6)
    check_falls_back(lambda x, y: aten.index_put(x, [y > 0], y[y > 0]), x, x.flip(0), reason="depends on data")
    one = torch.tensor([[[2.0]]])
    check_falls_back(lambda x, y: aten.index_put(x, [y[:, 0] > 0], one), x, x.flip(0), reason="more dims")
    check_falls_back(lambda x, y: x.scatter_reduce(1, J[None], y, "mean"), x, x.flip(0), reason="mean")


OF_A_SLICE = {
    "index_fill": lambda x, i: x.index_fill(0, i, 1),
    "index_add": lambda x, i: x.index_add(0, i, torch.ones(2, 8)),
    "index_copy": lambda x, i: x.index_copy(0, i, torch.ones(2, 8)),
    "index_put": lambda x, i: x.index_put((i,), torch.ones(2, 8)),
    "index_reduce": lambda x, i: x.index_reduce(0, i, torch.ones(2, 8), "amax"),
    "scatter": lambda x, i: x.scatter(0, torch.zeros(3, 8, dtype=torch.long), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, torch.zeros(3, 8, dtype=torch.long), torch.ones(3, 8)),
    "masked_fill": lambda x, i: x.masked_fill(torch.ones(3, 8, dtype=torch.bool), 1),
    "select_scatter": lambda x, i: x.select_scatter(torch.ones(8), 0, 1),
    "slice_scatter": lambda x, i: x.slice_scatter(torch.ones(2, 8), 0, 0, 2),
    "diagonal_scatter": lambda x, i: x.diagonal_scatter(torch.ones(3)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("write", OF_A_SLICE.values(), ids=OF_A_SLICE)
def test_a_slice_with_gaps_has_eagers_strides(write):
    """Some of eager's operators copy a slice in its order of dims, others row-major."""
    x, index = torch.randn(8, 3, 2).permute(2, 1, 0)[0], torch.tensor([0, 1])
    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x, i: write(x, i))))
    got, want = handle(x, index), write(x, index)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
