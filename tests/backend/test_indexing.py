"""Reading at places that tensors hold, and what happens when a place is out of range."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fuser import config, machines, pipeline
from fuser.canonical import canonicalize
from fuser.compiler import find_backend
from tests.backend.fused import check, check_each, check_falls_back, compare, fuse, in_layouts, no_fallback, values

X = values(4, 5, 6)
I = torch.tensor([3, 0, 2])
J = torch.tensor([[1], [-2]])

READS = {
    "embedding": lambda x, i, j: F.embedding(i, x[:, 0]) * 2,
    "embedding_of_many": lambda x, i, j: F.embedding(i.reshape(3, 1, 1).int(), x[0]),
    "index_select": lambda x, i, j: x.index_select(1, i),
    "index_select_at_one_place": lambda x, i, j: x.index_select(2, i[1]) + 1,
    "gather": lambda x, i, j: x.gather(2, i.reshape(3, 1, 1).expand(3, 5, 1)),
    "gather_outer": lambda x, i, j: torch.gather(x, 0, i.reshape(1, 3, 1).repeat(7, 1, 6)),
    "take": lambda x, i, j: x.take(j * 7),
    "take_along_dim": lambda x, i, j: torch.take_along_dim(x, j.reshape(1, 1, 2) * 40, 2),
    "take_along_all": lambda x, i, j: torch.take_along_dim(x, i),
    "index": lambda x, i, j: x[i],
    "index_inner": lambda x, i, j: x[:, :, i] - 1,
    "index_two": lambda x, i, j: x[i, j],
    "index_two_apart": lambda x, i, j: x[i, :, j],
    "index_all": lambda x, i, j: x[i, j, j] * x[0, 0, 0],
    "index_new_dim": lambda x, i, j: x[:, None, i],
    "index_then_slice": lambda x, i, j: x[i, 1:4],
    "index_of_what_is_computed": lambda x, i, j: torch.relu(x)[i + 1 - 1] + x[:3],
    "one_hot": lambda x, i, j: F.one_hot(i, 5) + F.one_hot(j + 2, 5)[:, 0, None].sum(0),
    "unsafe_index": lambda x, i, j: torch.ops.aten._unsafe_index(x, [None, i]),
    "unsafe_masked_index": lambda x, i, j: torch.ops.aten._unsafe_masked_index(
        x, (i > 1).reshape(3, 1, 1), [i + 100 * (i <= 1)], 2.5
    ),
}


@pytest.mark.sampled(17, also=("take_along_all",))
@pytest.mark.parametrize("name", READS)
def test_reads(name):
    cases = [[x, I, J] for (x,) in in_layouts(X)]
    if name == "take_along_all":
        cases = cases[:1]  # eager takes contiguous tensors only
    check_each(READS[name], cases)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_dtypes(dtype):
    x = values(4, 6, dtype=dtype)
    check(lambda x, i: (x[i], x.gather(1, i[:, None]), F.embedding(i, x), x.take(i)), x, I)


NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_elements_of_less_than_a_word(dtype):
    """Taken by number from any address: each at every place of the word around it, first and last ones included."""
    base = (torch.arange(203) * 37 % 251).to(dtype)
    i = torch.cat([torch.arange(200), torch.arange(-200, 0)])
    for n in range(4):
        check(lambda x, i: (x[i], torch.take(x, i), x[i] != 0), base[n : n + 200], i)
    check(lambda x, i: torch.take(x, i), base[:200].view(4, 5, 10), i.view(20, 20))
    # With a second result: of this graph alone, other tests look at what it does where too few values are given.
    check(lambda x, m, s: (x.masked_scatter(m, s), x != 0), base, base[1:2].expand(203) != base, base.flip(0))


def test_small_sizes():
    number, one = torch.tensor(3.0), torch.tensor([7.0])
    zeros = torch.tensor([0, 0])
    check(lambda x, i: (x.gather(0, i), x.index_select(0, i[:1]), x.take(i)), number, zeros)
    check(lambda x, i: (x.gather(0, i[0]), x[i[0]] + 1, x.index_select(0, i[1])), one, zeros)
    none = torch.empty(0, dtype=torch.int64)
    check(lambda x, i: (x[i], x.index_select(1, i), x.take(i), F.embedding(i, x)), values(4, 6), none)
    deep = values(2, 1, 3, 1, 2, 1, 2, 1)
    check(lambda x, i: (x[:, :, i], x.index_select(4, i // 2), x[i // 2, :, i]), deep, torch.tensor([2, 0]))


def test_channels_last():
    x = values(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x, i: (x[:, i], x.index_select(1, i), x[i, :, i], x[:, :, i, i]), x, torch.tensor([1, 0]))


def test_other_sizes_need_no_other_kernel():
    fn = lambda x, i: x[i] * 2  # noqa: E731
    handle, spec = fuse(fn)
    for rows, width, n in ((4, 6, 3), (9, 2, 5), (3, 70, 20)):
        x, i = values(rows, width), torch.arange(n) % rows
        assert torch.equal(handle(x, i), fn(x, i))
    assert len(spec.store.kernels) == 1 and not spec.store.fallbacks


# Graphs of their own: equal graphs are one specification, whose fallbacks other tests look at.
BAD = {
    "embedding": (lambda x, i: F.embedding(i, x) - 9, (4, -1)),
    "index_select": (lambda x, i: x.index_select(0, i) - 9, (4, -1)),
    "gather": (lambda x, i: x.gather(0, i[:, None]) - 9, (4, -1)),
    "index": (lambda x, i: x[i] - 9, (4, -5)),
    "index_inner": (lambda x, i: x[:, i].sum(), (6, -7)),
    "take": (lambda x, i: x.take(i) - 9, (24, -25)),
    "take_along_all": (lambda x, i: torch.take_along_dim(x, i), (24, -1)),
    "one_hot": (lambda x, i: F.one_hot(i, 3), (3, -1)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_place_out_of_range_raises_what_eager_raises(name):
    fn, places = BAD[name]
    x = values(4, 6)
    handle, spec = fuse(fn)
    handle(x, torch.tensor([0, 1, 2]))
    for bad in (*places, 1 << 40, -(1 << 40)):
        for at in ([bad, 0, 1], [0, 1, bad]):
            with pytest.raises((IndexError, RuntimeError)) as eager:
                fn(x, torch.tensor(at))
            with pytest.raises(type(eager.value)) as fused:
                handle(x, torch.tensor(at))
            assert str(fused.value).splitlines()[0] == str(eager.value).splitlines()[0]
    assert spec.store.kernels and set(spec.store.fallbacks) == {"a kernel reported: index out of range"}
    assert torch.equal(handle(x, torch.tensor([2, 1, 0])), fn(x, torch.tensor([2, 1, 0])))


POOLED = {  # rows that are looked up, and reduced along the lookups
    "sum": lambda x, i: F.embedding(i, x).sum(1),
    "mean of weighted rows": lambda x, i: (x[i] * (i % 3).unsqueeze(-1)).mean(1),
    "largest": lambda x, i: torch.relu(x[i]).amax(1),
    "softmax": lambda x, i: F.embedding(i, x).softmax(1),
    "two tables": lambda x, i: (x[i] + x.flip(0)[i]).sum(1),
    "index_select": lambda x, i: x.index_select(0, i.flatten()).view(i.shape[0], i.shape[1], x.shape[1]).sum(1),
}


@pytest.mark.sampled(9, also=("softmax-torch.int32",))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64, torch.int32), ids=str)
@pytest.mark.parametrize("name", POOLED)
def test_rows_that_are_looked_up_are_reduced(name, dtype):
    if dtype is torch.int32 and name in ("softmax", "mean of weighted rows"):
        pytest.skip("floats alone")
    fn, tol = POOLED[name], {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    handle, spec = fuse(fn)
    for rows, width, places in ((9, 70, (5, 12)), (40, 16, (3, 1)), (7, 130, (2, 30)), (5, 3, (4, 0))):
        if 0 in places and name == "largest":
            continue
        x = (values(rows, width) * 3).to(dtype)
        i = torch.arange(places[0] * places[1]).view(places) * 5 % rows
        compare(handle(x, i), fn(x, i), tol=tol)
    no_fallback(spec)
    with pytest.raises((IndexError, RuntimeError)):
        handle(x, torch.full((4, 2), 1000))


@pytest.mark.parametrize("name", POOLED)
def test_lanes_take_neighbours_of_rows_that_are_looked_up(name):
    x, i = values(100, 64), torch.arange(1024).view(64, 16) % 100
    text = pipeline.generate(canonicalize(fx.symbolic_trace(POOLED[name])).graph, (x, i), find_backend("cpu")).text
    if machines.find(config.isa).vector_bytes:
        loops = text.split("#pragma omp simd")[1:]
        assert "bad |=" in text
        assert not any("bad |=" in loop.split("}")[0] for loop in loops), text


def test_reading_from_nothing_raises():
    fn = lambda x, i: x[i] * 2  # noqa: E731
    handle, _ = fuse(fn)
    handle(values(2, 3), torch.tensor([0]))
    with pytest.raises(IndexError):
        handle(torch.empty(0, 3), torch.tensor([0]))
    assert handle(torch.empty(0, 3), torch.empty(0, dtype=torch.int64)).shape == (0, 3)


def test_masks_are_left_to_aten():
    x = values(4, 6)
    check_falls_back(lambda x, m: x[m], x, x > 0, reason="depends on data")
    with pytest.raises(RuntimeError, match="long"):
        check(lambda x, i: x.take(i), x, I.int())
