"""Inputs that are written through views: eager's values, strides and aliases, and no copy of the whole input."""

from __future__ import annotations

import pytest
import torch

from fuser.frontends.dynamo import last_compilation
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("clean")
PLACES = torch.tensor([0, 2])

WHOLE = {
    "flat": lambda x: x.view(-1),
    "rows": lambda x: x.view(24, 64),
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1),
    "regrouped": lambda x: x.view(4, 6, 2, 32).transpose(1, 2),
    "turned": lambda x: x.view(4, 384).t(),
}
PARTS = {
    "slice": lambda x: x[1:4],
    "steps": lambda x: x[..., ::2],
    "row of rows": lambda x: x.view(24, 64)[5],
    "turned slice": lambda x: x[1:4].transpose(0, 2),
    "diagonal": lambda x: x.view(24, 64).diagonal(),
}
POINTWISE = {
    "mul": lambda v: v.mul_(1.5),
    "two": lambda v: v.exp_().add_(1),
    "norm": lambda v: v.sub_(v.mean(-1, keepdim=True)),
    "flip": lambda v: v.copy_(v.flip(0) * 2),
}
SCATTERS = {
    "set": lambda v: v.__setitem__(PLACES, 2.5),
    "index_add": lambda v: v.index_add_(0, PLACES, v[:2] * 2),
}
READERS = {
    "nobody": lambda x, v, old: (),
    "old content": lambda x, v, old: (old,),
    "new content": lambda x, v, old: (x.sum(0), x),
    "view": lambda x, v, old: (v, v * 2),
    "row": lambda x, v, old: (x[1], old),
}


def on_aten():
    return [u.op for u in last_compilation().unfused]


def compare(view, write, reader, dynamic=False):
    """Run a program in eager and fused, twice; write the results afterwards, which shows what they alias."""

    def program(x, y):
        old = torch.mm(x.view(4, -1), y) * 1
        v = view(x)
        write(v)
        return reader(x, v, old)

    fused = torch.compile(program, backend="fuser", dynamic=dynamic)
    for _ in range(2):
        x, y = torch.randn(4, 6, 64), torch.randn(384, 8)
        copy = x.clone()
        want, got = program(copy, y), fused(x, y)
        torch.testing.assert_close((*got, x), (*want, copy))
        assert [t.stride() for t in got] == [t.stride() for t in want]
        for a, b in zip(got, want):
            a.add_(1), b.add_(1)
        torch.testing.assert_close((*got, x), (*want, copy))


@pytest.mark.sampled(35, also=("permuted-norm-nobody",))
@pytest.mark.parametrize("view, write, reader", pairwise(WHOLE | PARTS, POINTWISE | SCATTERS, READERS))
def test_as_in_eager(view, write, reader):
    compare((WHOLE | PARTS)[view], (POINTWISE | SCATTERS)[write], READERS[reader], dynamic=write in ("mul", "set"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("view, write", [*((v, "mul") for v in WHOLE), *(("flat", w) for w in POINTWISE if w != "mul")])
def test_a_kernel_writes_the_input(view, write):
    compare(WHOLE[view], POINTWISE[write], READERS["nobody"])
    assert "aten.copy_" not in on_aten()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("view", WHOLE | PARTS)
def test_a_scatter_is_made_in_place(view):
    def program(x):
        SCATTERS["set"]((WHOLE | PARTS)[view](x))

    torch.compile(program, backend="fuser")(torch.randn(4, 6, 64))
    assert "aten.copy_" not in on_aten()


PIECES = {
    "split": lambda x: x.split(2)[0],
    "sizes": lambda x: x.split([1, 3], 1)[1],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "unbind": lambda x: x.unbind(1)[0],
}


@pytest.mark.sampled(2, also=("split",))
@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_a_list_are_written(name):
    """By a copy of themselves, whose source is a list in the graph: the other elements of the input stay."""

    def program(x):
        v = PIECES[name](x)
        v.copy_(v)
        return x, v

    x = torch.randn(4, 6).t()
    copy = x.clone()
    got, want = torch.compile(program, backend="fuser", dynamic=True)(x), program(copy)
    torch.testing.assert_close((got, x), (want, copy))


def _half(x):
    return x.chunk(2)[1]


# Of an input x that is written later: a piece of it is written into y, or read by a kernel that reads the new content.
READ_PIECES = {
    "rows": lambda x, y: (y[1:].copy_(_half(x)[1:]), x.mul_(2)),
    "transposed": lambda x, y: (y.t().copy_(_half(x).t()), x.mul_(2)),
    "product": lambda x, y: (y.t().mul_(_half(x).t()), x.t().mul_(2)),
    "a place": lambda x, y: (y.t()[:, 0].copy_(_half(x)[0]), x.mul_(2)),
    "places": lambda x, y: (y.view(-1).index_put_((PLACES,), _half(x)[0, :2]), x.mul_(2)),
    "a list": lambda x, y: (y.t().copy_(x.unbind(0)[1][:, None]), x.mul_(2)),
    "kernel": lambda x, y: (s := _half(x).sin(), x.__setitem__(PLACES, 7.0), y.copy_(s + x.sum())),
    "two pieces": lambda x, y: (s := x.split(3)[0].exp(), x.split(3)[1].mul_(s), y.copy_(x[:3] + s)),
}


@pytest.mark.sampled(3, also=("transposed",))
@pytest.mark.parametrize("name", READ_PIECES)
def test_pieces_of_a_list_are_read_before_their_tensor_is_written(name):
    """With symbolic sizes a piece is an item of a list in the graph, not a view of the input."""

    def program(x, y):
        READ_PIECES[name](x, y)
        return y[0]

    compiled = torch.compile(program, backend="fuser", dynamic=True)
    for wide in (False, True):
        x, y = torch.randn(6, 8), torch.randn(8, 3).t() if wide else torch.randn(3, 8)
        if name == "places" and wide:
            continue
        copies = x.clone(), y.clone()
        got, want = compiled(x, y), program(*copies)
        torch.testing.assert_close((got, x, y), (want, *copies))


# Of a tensor with gaps that was written: a reshape of a part, which copies, and which is written or read later.
COPIES = {
    "rows": lambda x: x[:4].reshape(-1).add_(1),
    "flat": lambda x: x[2:].flatten().mul_(3),
    "ravel": lambda x: x[1:3].ravel().zero_(),
    "windows": lambda x: x[:4].reshape(-1, 2)[0].add_(1),
    "a block": lambda x: x.chunk(2)[1].contiguous().add_(1),
    "turned": lambda x: x[1:].t().reshape(-1).add_(1),
    "as another": lambda x: x[:2].reshape_as(torch.empty(8)).fill_(2),
    "read": lambda x: (r := x[:4].reshape(-1), x.add_(1), x[0].copy_(r[:4])),
    "read as a whole": lambda x: (r := x[1:5].flatten(), x.neg_(), x[0].add_(r.sum())),
}


@pytest.mark.sampled(3, also=("rows-sizes",))
@pytest.mark.parametrize("dynamic", [False, True], ids=["sizes", "symbols"])
@pytest.mark.parametrize("name", COPIES)
def test_a_reshape_of_a_written_part_copies_as_in_eager(name, dynamic):
    """The new content of a tensor with gaps has none in the graph, so that a reshape of a part would be a view."""

    def program(x):
        x.mul_(2)
        COPIES[name](x)
        return x.sum()

    x = torch.arange(40.0).view(8, 5)[:, :4]
    copy = x.clone(memory_format=torch.contiguous_format)
    copy = torch.cat([copy, copy[:, :1]], 1)[:, :4]
    got, want = torch.compile(program, backend="fuser", dynamic=dynamic)(x), program(copy)
    torch.testing.assert_close((got, x), (want, copy))


def test_paged_cache():
    """Keys of new tokens into slots of a cache of blocks, as inference servers keep it."""

    def store(cache, keys, slots):
        cache.view(-1, 8, 64)[slots] = keys

    cache, keys, slots = torch.randn(256, 16, 8, 64), torch.randn(32, 8, 64), torch.randperm(4096)[:32]
    want = cache.clone()
    store(want, keys, slots)
    torch.compile(store, backend="fuser")(cache, keys, slots)
    assert torch.equal(cache, want)
    assert on_aten() == ["aten.index_put_"]


ORDERS = {
    "each reads the other": lambda x, y: (x.add_(y.sum()), y.mul_(2))[0].sum(),
    "swapped": lambda x, y: (x * 1, x.copy_(y * 2), y.copy_(x + 1))[0],
    "a product between": lambda x, y: (u := (x - y).sum(0).relu(), v := x @ y, x.add_(u), y.sub_(u))[1] * v,
    "old and new": lambda x, y: (old := x.softmax(0), x.add_(y), old @ x)[2],
    "behind a sort": lambda x, y: (s := x.sort()[0], x.copy_(s * 2), y.add_(s))[0],
    "through a view": lambda x, y: (p := x.t() @ y, x.view(-1).mul_(2), y.t().add_(p))[0],
    "result and state": lambda x, y: (n := torch.tanh(x + y), x.copy_(n))[0],
    "result, view and state": lambda x, y: (n := torch.tanh(x + y), x.copy_(n), n[1:3])[2],
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ORDERS)
def test_who_reads_the_old_content_comes_first(name):
    program = ORDERS[name]
    x, y = torch.randn(32, 32), torch.randn(32, 32)
    copies = x.clone(), y.clone()
    want, got = program(*copies), torch.compile(program, backend="fuser")(x, y)
    torch.testing.assert_close((got, x, y), (want, *copies))
    got.add_(1), want.add_(1)
    torch.testing.assert_close((got, x, y), (want, *copies))


@pytest.mark.parametrize("name", ["result and state", "through a view"])
def test_states_are_written_by_kernels(name):
    torch.compile(ORDERS[name], backend="fuser")(torch.randn(64, 64), torch.randn(64, 64))
    assert "aten.copy_" not in on_aten()


BIG = torch.linspace(-2, 2, 256 * 128).view(256, 128)
ALONE = {
    "rows": lambda x: x[::2].mul_(0.5).add_(1),
    "columns": lambda x: x[:, 1::2].exp_().add_(1).tanh_(),
    "one row": lambda x: x[3].mul_(0.5).add_(x[3].sum()),
    "one operator": lambda x: x[:, ::2].mul_(3),
    "most columns": lambda x: x[:, 1:].sigmoid_(),
    "first rows": lambda x: x[:200].mul_(2).add_(1),
    "diagonal": lambda x: x[:, :128].diagonal().add_(1).exp_(),
    "part of a part": lambda x: x[::2][:, 3].mul_(2).sub_(1),
    "turned": lambda x: x.t()[::2].mul_(2).add_(x.t()[::2]),
}
TOGETHER = {
    "overlapping": lambda x: (a := x[2:50, ::2] * 2, x[0:40].copy_(x[1:41].relu()), x[2:50, ::2].copy_(a)),
    "one of the other": lambda x: (x[::2].mul_(2), x[1::2].add_(x[::2])),
    "shifted": lambda x: (x[1::2].add_(x[:-1:2]), x[::2].mul_(3).add_(1)),
    "written again": lambda x: (x[::2].mul_(2), x[5].fill_(1), x[::2].add_(1), x[5].add_(x[4])),
    "back": lambda x: (x[:, ::2].mul_(2), x[:, 1:3].add_(1), x[:, ::2].mul_(0.5)),
    "read between": lambda x: (x[::2].mul_(2), s := x.amax(0), x[::2].add_(s)),
    "an input": lambda x: (x[::2].copy_(BIG[::2]), x[::2].mul_(2).add_(BIG[1::2])),
    "wider": lambda x: (x[::2].copy_(torch.arange(128)), x[::2].add_(1)),
}


DYNAMIC = ("rows", "one row", "diagonal", "overlapping", "shifted", "back")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ALONE | TOGETHER)
def test_parts_are_written_as_in_eager(name):
    function, dynamic = (ALONE | TOGETHER)[name], name in DYNAMIC

    def program(x):
        function(x)
        return x[:3].sum(0), x[1]

    x, copy = BIG.clone(), BIG.clone()
    got, want = torch.compile(program, backend="fuser", dynamic=dynamic)(x), program(copy)
    torch.testing.assert_close((*got, x), (*want, copy))
    got[1].add_(1), want[1].add_(1)
    torch.testing.assert_close((*got, x), (*want, copy))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALONE)
def test_no_kernel_computes_elements_that_are_not_written(name):
    def program(x):
        ALONE[name](x)

    torch.compile(program, backend="fuser")(BIG.clone())
    record = last_compilation()
    assert not [op for g in record.groups for op in g.ops if op.endswith("_scatter")]
    assert len(record.unfused) <= 1  # an operator in place, or the copy of a kernel's result into a part with gaps
