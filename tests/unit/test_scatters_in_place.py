"""Scatters into inputs: made in place where nobody needs the old content, with eager's results and aliases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends.dynamo import forget_compilations, fuser_backend, last_compilation
from tests import compare

I = torch.tensor([3, 0, 7])
V = torch.arange(600.0).reshape(3, 200) / 100


def chain(x):
    for k in range(3):
        x.index_add_(0, I + k, V * k)
        x.index_copy_(1, I, torch.full((200, 3), float(k)))
    return x.index_put_((I,), V, accumulate=True).sum(0)


def reads_before_and_after(x):
    y = torch.relu(x) * 2
    x[I] += V
    return y + x


def parts(x):
    x[3:9] = torch.abs(x[4:10]) + 1
    x[10] = 1.5
    x[:, 2:4] = V[0, :2] * 2
    return x * 2


def part_then_places(x):
    x[50:60] = V[:1] * 3
    x.scatter_add_(0, I[:, None].expand(3, 200), V)
    return x.amax()


def part_of_itself(x):
    x[0:5].copy_(x[1:6].clone())
    x[:4] = x[4:8]
    return x[:2]


def reads_between(x):
    x.index_add_(0, I, V)
    y = x.cumsum(1)
    x.index_add_(0, I, V)
    z = y + x
    x[:, 9] = z[:, 0]
    return x.cumsum(0) - z


def returns_an_older_view(x):
    y = x[:2]
    x.index_add_(0, I, V)
    return y, y + 1


def returns_what_it_wrote(x):
    x.index_add_(0, I, V)
    return x.scatter_add_(0, I[:, None].expand(3, 200), V)


def then_all(x):
    x.index_add_(0, I, V)
    x.mul_(2)
    return x.view(-1)


def from_itself(x):
    x.index_copy_(0, I, x[20:23] * 2)
    x.index_copy_(0, I + 1, x[I])


IN_PLACE = {  # how many calls of ATen write into a part
    chain: 7, reads_before_and_after: 1, parts: 3, part_then_places: 2, part_of_itself: 0, reads_between: 3,
    returns_an_older_view: 1, returns_what_it_wrote: 2, then_all: 0, from_itself: 2,
}  # fmt: skip


@pytest.mark.sampled(10, also=("part_of_itself", "parts"))
@pytest.mark.parametrize("fn", IN_PLACE, ids=lambda f: f.__name__)
def test_scatters_into_an_input(fn):
    torch._dynamo.reset()
    forget_compilations()
    start = torch.randn(200, 200, generator=torch.Generator().manual_seed(1))
    mine, own = start.clone(), start.clone()
    with torch.no_grad():
        got, want = torch.compile(fn, backend=fuser_backend, fullgraph=True)(mine), fn(own)
    assert torch.equal(mine, own)
    if want is not None:
        torch.testing.assert_close(got, want)
        pair = compare.leaves(got), compare.leaves(want)
        assert compare.alias_pattern([mine], pair[0]) == compare.alias_pattern([own], pair[1])
    record = last_compilation()
    assert record.route != "eager", record.reason
    writes = [u.op for u in record.unfused if u.reason == "it writes one of its arguments"]
    assert len(writes) == (IN_PLACE[fn] or writes.count("aten.copy_")), writes


def test_small_parts_stay_in_kernels():
    def fn(x):
        x[1:3] = torch.relu(x[1:3]) + 1

    torch._dynamo.reset()
    x = torch.randn(8, 16)
    want = x.clone()
    fn(want)
    torch.compile(fn, backend=fuser_backend)(x)
    assert torch.equal(x, want) and not last_compilation().unfused


def test_a_place_out_of_range_is_eagers_error():
    def fn(x, i):
        x.index_add_(0, i, V)

    compiled = torch.compile(fn, backend=fuser_backend)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        compiled(torch.zeros(10, 200), torch.tensor([0, 10, 1]))


GAPS = {
    "rows cut": lambda: torch.randn(40, 90)[:, 3:70],
    "every second": lambda: torch.randn(40, 134)[:, ::2],
    "turned": lambda: torch.randn(70, 40)[:67].t()[:, :67].t()[:, :30].t(),
}
TWINS = {
    "relu_": lambda x, y: x.relu_(), "mul_": lambda x, y: x.mul_(y), "add_": lambda x, y: x.add_(y, alpha=2),
    "copy_": lambda x, y: x.copy_(y), "clamp_": lambda x, y: x.clamp_(-0.5, 0.5),
    "hardtanh_": lambda x, y: F.hardtanh_(x),
    "lerp_": lambda x, y: x.lerp_(y, 0.25), "scatter_add_": lambda x, y: x.scatter_add_(1, (y > 0).long(), y),
    "_index_put_impl_": lambda x, y: torch.ops.aten._index_put_impl_(x, [I], y[:3], True, True),
}  # fmt: skip


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", GAPS)
@pytest.mark.parametrize("name", TWINS)
def test_one_operator_writes_an_input_with_gaps_itself(name, layout):
    """No kernel writes such an input: what it made would be copied."""
    torch._dynamo.reset()
    forget_compilations()
    fn = TWINS[name]
    x = GAPS[layout]()
    y, whole = torch.randn(x.shape), x._base.clone()
    own = whole.as_strided(x.shape, x.stride(), x.storage_offset())
    got, want = torch.compile(fn, backend=fuser_backend, fullgraph=True)(x, y), fn(own, y)
    assert got is x and torch.equal(x._base, whole) and torch.equal(got, want)
    record = last_compilation()
    assert [u.op for u in record.unfused if u.reason == "it writes one of its arguments"] == [f"aten.{name}"]


BY_OFFSETS = {  # readers of a contiguous copy, which nothing but its strides tells from what was written
    "view": lambda y: y.view(-1) * 2,
    "as_strided": lambda y: y.as_strided((9, 3), (5, 1), 60) + 1,
    "as_strided_scatter": lambda y: y.as_strided_scatter(y[0, :3], (3,), (50,), 1),
    "view as int": lambda y: y.view(torch.int32) + 1,
    "view as complex": lambda y: torch.view_as_complex(y.view(-1, 2)).abs(),
}
WRITTEN_BY = {
    "mul_": lambda x: x.mul_(3), "index_fill_": lambda x: x.index_fill_(0, I, 2.0),
    "scatter_": lambda x: x.scatter_(1, I[None], 4.0),
}  # fmt: skip


@pytest.mark.sampled(8, also=("mul_-view as complex-rows cut",))
@pytest.mark.parametrize("layout", ("rows cut", "every second"))
@pytest.mark.parametrize("reader", BY_OFFSETS)
@pytest.mark.parametrize("write", WRITTEN_BY)
def test_readers_by_offset_do_not_read_the_gaps_of_an_input(write, reader, layout):
    """Eager reads a contiguous copy; a pass drops the copy, and the functional write was contiguous."""
    torch._dynamo.reset()
    x = GAPS[layout]()
    own = x.clone()

    def fn(x):
        WRITTEN_BY[write](x)
        return BY_OFFSETS[reader](x.clone(memory_format=torch.contiguous_format))

    got, want = torch.compile(fn, backend=fuser_backend)(x), fn(own)
    assert torch.equal(got, want) and got.stride() == want.stride() and torch.equal(x, own)


def test_readers_by_index_leave_the_write_in_place():
    torch._dynamo.reset()
    forget_compilations()
    x = GAPS["rows cut"]()
    own = x.clone()

    def fn(x):
        x.mul_(3)
        y = x.contiguous()
        return y[1:, 1] + 1, y.t()[1] * 2, y.unfold(1, 2, 1).amax(-1), y.diagonal() + 3, y.split(2, 1)[1] - 1

    got, want = torch.compile(fn, backend=fuser_backend)(x), fn(own)
    assert all(torch.equal(g, w) for g, w in zip(got, want)) and torch.equal(x, own)
    assert "aten.mul_" in [u.op for u in last_compilation().unfused]


def test_a_scatter_writes_a_turned_input_itself():
    torch._dynamo.reset()
    forget_compilations()
    x = torch.randn(67, 30).t()
    y, own = torch.randn(x.shape), x.clone()
    got, want = torch.compile(TWINS["scatter_add_"], backend=fuser_backend)(x, y), TWINS["scatter_add_"](own, y)
    assert got is x and torch.equal(got, want) and x.stride() == (1, 30)
    assert [u.op for u in last_compilation().unfused] == ["aten.scatter_add_"]


def test_random_numbers_go_into_an_input_with_gaps_from_kernels_own_generator():
    torch._dynamo.reset()
    x = GAPS["rows cut"]()
    torch.compile(lambda x: x.uniform_(2, 3), backend=fuser_backend)(x)
    assert bool(((x >= 2) & (x < 3)).all())
    assert "aten.uniform_" not in [u.op for u in last_compilation().unfused]
