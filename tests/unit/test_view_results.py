"""Results that are views of inputs, or of what is computed: values, strides, offsets and sharing of memory as in eager.

Every view of a table, of every layout, behind every kind of write, with symbolic sizes: torch's `aot_eager` gives wrong
values in some of them (24 of 864 with torch 2.13).
"""

from __future__ import annotations

import os

import pytest
import torch

from fuser.frontends.dynamo import fuser_backend

pytestmark = pytest.mark.usefixtures("clean")


def by_item(x):
    x[...] = torch.cumsum(x, -1)


def by_step(x):
    x[..., ::2].fill_(0)


def by_select(x):
    x[..., 0].add_(3)


WRITES = {
    "item": by_item,
    "copy": lambda x: x.copy_(x.flip(-1)),
    "mul": lambda x: x.mul_(2),
    "step": by_step,
    "select": by_select,
    "cumsum": lambda x: x.cumsum_(-1),
    "neg": lambda x: x.neg_(),
    "none": lambda x: x,
}
VIEWS = {
    "flatten": lambda x: x.flatten(),
    "view": lambda x: x.view(-1, x.shape[-1]),
    "unflatten": lambda x: x.unflatten(-1, (1, -1)),
    "chained": lambda x: x.flatten().unflatten(0, (-1, 5)),
    "slice": lambda x: x[..., 1:],
    "step": lambda x: x[..., ::2],
    "select": lambda x: x[..., 2],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "transpose": lambda x: x.transpose(0, -1),
    "same": lambda x: x,
    "alias": lambda x: x.view_as(x),
    "diagonal": lambda x: x.unsqueeze(0).diagonal(0, 0, -1),
    "split": lambda x: x.split(2, -1)[1],
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "detach": lambda x: x.detach(),
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "unbind": lambda x: x.unbind(-1)[1],
    "cut": lambda x: x[..., 1:].unsqueeze(0).flatten(0, 1)[..., :2],
}
SOURCES = {
    "offset": lambda: torch.arange(7.0)[1:6],
    "step": lambda: torch.arange(19.0)[3:18:3],
    "rows": lambda: torch.arange(42.0).view(6, 7)[1:5, 2:7],
    "transposed": lambda: torch.arange(42.0).view(6, 7).t()[1:5, 1:6],
    "row": lambda: torch.arange(40.0).view(8, 5)[3],
    "image": lambda: torch.arange(180.0).view(2, 3, 6, 5).to(memory_format=torch.channels_last)[1:, :, 2:],
}


# The others with FUSER_TEST_ALL=1: they take minutes. Of these two each write meets every ninth view, of the other
# layout another ninth; each view meets some. In training one layout has a share.
ALL = bool(os.environ.get("FUSER_TEST_ALL"))
SHARE = [*SOURCES] if ALL else ["offset", "transposed"]
ONE = SHARE if ALL else ["transposed"]


def views_behind(write, source, names):
    """The views of `names` that are made of a layout behind a write."""
    turn = [*WRITES].index(write) + 3 * SHARE.index(source)
    return [n for n in names if ALL or ([*VIEWS].index(n) + turn) % 9 == 0]


def fitting(source):
    """The names of the views that eager can make of a tensor."""
    out = []
    for name, view in VIEWS.items():
        try:
            view(source)
        except (RuntimeError, IndexError):
            continue
        out.append(name)
    return out


def differences(names, got, want, mine, theirs):
    """What differs of results and of the tensors they may share memory with, in words."""
    out = []
    for name, x, y in zip(names, got, want, strict=True):
        if not torch.equal(x, y):
            out.append(f"{name}: values")
        if x.stride() != y.stride() or x.storage_offset() != y.storage_offset():
            out.append(f"{name}: {x.stride()} at {x.storage_offset()} instead of {y.stride()} at {y.storage_offset()}")
        if is_view_of(x, mine) != is_view_of(y, theirs):
            out.append(f"{name}: shares other memory")
    return out


def is_view_of(x, of):
    return x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


@pytest.mark.parametrize("source", SHARE)
def test_views_of_inputs(source) -> None:
    names = fitting(SOURCES[source]())

    def program(*inputs):
        out = []
        for x, (name, write) in zip(inputs, WRITES.items(), strict=True):
            write(x)
            out.append([VIEWS[n](x) for n in views_behind(name, source, names)] + [x.sum() + 1])
        return out

    def elsewhere():
        return torch.cat((torch.zeros(3), SOURCES[source]().flatten()))[3:]

    compiled = torch.compile(program, backend=fuser_backend, dynamic=True)
    for make in (SOURCES[source], elsewhere) if SOURCES[source]().dim() == 1 else (SOURCES[source],):
        mine, theirs = ([make() for _ in WRITES] for _ in range(2))
        for write, got, want, a, b in zip(WRITES, compiled(*mine), program(*theirs), mine, theirs, strict=True):
            made = [*views_behind(write, source, names), "sum"]
            assert (write, differences(made, got, want, a, b)) == (write, [])
            assert torch.equal(a, b)


@pytest.mark.parametrize("source", ONE)
def test_views_of_inputs_in_training(source) -> None:
    names = fitting(SOURCES[source]())

    def program(weight, *inputs):
        out = []
        for x, (name, write) in zip(inputs, WRITES.items(), strict=True):
            y = weight * weight + x
            write(x)
            out.append([VIEWS[n](x) for n in views_behind(name, source, names)] + [y.sum() + 1])
        return out

    mine, theirs = ([SOURCES[source]() for _ in WRITES] for _ in range(2))
    one, two = (torch.full((5,), 2.0, requires_grad=True) for _ in range(2))
    found = torch.compile(program, backend=fuser_backend, dynamic=True)(one, *mine)
    wanted = program(two, *theirs)
    for write, got, want, a, b in zip(WRITES, found, wanted, mine, theirs, strict=True):
        made = [*views_behind(write, source, names), "sum"]
        assert (write, differences(made, got, want, a, b)) == (write, [])
    sum(f[-1] for f in found).backward()
    sum(f[-1] for f in wanted).backward()
    torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("source", SHARE)
def test_views_of_what_is_computed(source) -> None:
    names = fitting(SOURCES[source]() + 1)

    def program(x):
        out = []
        for name, write in WRITES.items():
            y = x + 1
            write(y)
            out.append([y] + [VIEWS[n](y) for n in views_behind(name, source, names)])
        return out

    x = SOURCES[source]()
    found, wanted = torch.compile(program, backend=fuser_backend, dynamic=True)(x), program(x)
    for write, got, want in zip(WRITES, found, wanted, strict=True):
        made = ["y", *views_behind(write, source, names)]
        assert (write, differences(made, got, want, got[0], want[0])) == (write, [])


# Methods that write in place, whose operator may have other strides than what it writes.
IN_PLACE = {
    "cumsum": lambda x, o: x.cumsum_(-1),
    "cumprod": lambda x, o: x.cumprod_(0),
    "masked_fill": lambda x, o: x.masked_fill_(o > 0, 2.0),
    "masked_scatter": lambda x, o: x.masked_scatter_(o > 0, o),
    "index_copy": lambda x, o: x.index_copy_(0, torch.tensor([2, 0]), o[:2]),
    "index_add": lambda x, o: x.index_add_(0, torch.tensor([2, 0]), o[:2]),
    "index_fill": lambda x, o: x.index_fill_(0, torch.tensor([2, 0]), 3.0),
    "scatter": lambda x, o: x.scatter_(0, torch.zeros_like(o, dtype=torch.int64), o),
    "scatter_add": lambda x, o: x.scatter_add_(0, torch.zeros_like(o, dtype=torch.int64), o),
    "scatter_reduce": lambda x, o: x.scatter_reduce_(0, torch.zeros_like(o, dtype=torch.int64), o, "amax"),
    "index_reduce": lambda x, o: x.index_reduce_(0, torch.tensor([2, 0]), o[:2], "amax"),
    "renorm": lambda x, o: x.renorm_(2, 0, 1.0),
    "tril": lambda x, o: x.tril_(),
    "triu": lambda x, o: x.triu_(1),
    "addmm": lambda x, o: x.addmm_(o, o),
    "lerp": lambda x, o: x.lerp_(o, 0.5),
    "clamp": lambda x, o: x.clamp_(o),
    "function": lambda x, o: torch.relu_(x),
    "t": lambda x, o: x.t_(),
    "transpose": lambda x, o: x.transpose_(0, 1).add_(o),
    "unsqueeze": lambda x, o: x.unsqueeze_(1).squeeze_(1).mul_(2),
}


@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_keep_the_layout_of_what_they_write(dynamic) -> None:
    """Half of the writes at fixed sizes, the others at symbolic ones; all at both with FUSER_TEST_ALL=1."""
    writes = {name: write for n, (name, write) in enumerate(IN_PLACE.items()) if ALL or n % 2 == dynamic}

    def program(x, o, *inputs):
        out = []
        for write, given in zip(writes.values(), inputs, strict=True):
            y = x.t() * 2
            write(y, o)
            write(given, o)
            out += [y, y + 1, given * 2]
        return out

    def inputs():
        return [torch.arange(25.0).view(5, 5).t() for _ in writes]

    x, o = torch.arange(25.0).view(5, 5), torch.randn(5, 5)
    mine, theirs = inputs(), inputs()
    found = torch.compile(program, backend=fuser_backend, dynamic=dynamic)(x, o, *mine)
    wanted = program(x, o, *theirs)
    for n, (got, want) in enumerate(zip([*found, *mine], [*wanted, *theirs], strict=True)):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride(), [*writes][n // 3 % len(writes)]
