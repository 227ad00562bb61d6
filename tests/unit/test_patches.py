"""Convolutions of patches as products: what the pass makes of graphs on fake tensors, without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.passes import patches, rounded_factors
from fuser.passes.patches import patches_of, patches_to_products, runs_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """Products win their races, which no machine without a GPU can hold."""
    monkeypatch.setattr(patches, "is_faster", lambda p, device: True)


def conv(x, w, b, stride, padding=0, dilation=1, groups=1):
    n = x.dim() - 2
    return aten.convolution.default(x, w, b, [stride] * n, [padding] * n, [dilation] * n, False, [0] * n, groups)


def gradients(g, x, w, stride, mask):
    n = x.dim() - 2
    behind = [stride] * n, [0] * n, [1] * n, False, [0] * n, 1
    return tuple(t for t in aten.convolution_backward.default(g, x, w, [w.shape[0]], *behind, mask) if t is not None)


def traced(f, args, dtype=torch.bfloat16, device="cuda"):
    """The graph of a function for tensors like `args` on a device."""
    with FakeTensorMode():
        fake = [
            torch.empty(a.untyped_storage().size() // a.element_size(), device=device, dtype=dtype)
            .as_strided(a.shape, a.stride())
            for a in args
        ]  # fmt: skip
        return make_fx(f)(*fake)


def compare(f, args, number=1):
    module = traced(f, args)
    before = [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes]
    assert patches_to_products(module) == number
    module.graph.lint()
    assert not [n for n in module.graph.nodes if "convolution" in str(n.target)]
    assert [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes] == before
    got, want = torch.fx.Interpreter(module).run(*args), f(*args)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


SIZES = {
    "image": ((2, 3, 8, 12), (5, 3, 4, 4)),
    "tokens": ((2, 6, 4, 6), (7, 6, 2, 2)),
    "video": ((1, 3, 4, 4, 6), (5, 3, 2, 2, 2)),
}
FORMS = ("contiguous", "channels last")


def arranged(shape, form):
    t = torch.randn(shape, dtype=torch.float64)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return t.contiguous(memory_format=last) if form == "channels last" else t


@pytest.mark.parametrize("name, form, bias", list(itertools.product(SIZES, FORMS, (True, False))))
def test_a_convolution_is_a_product(name: str, form: str, bias: bool) -> None:
    x, w = SIZES[name]
    args: list[Any] = [arranged(x, form), torch.randn(w, dtype=torch.float64), torch.randn(w[0], dtype=torch.float64)]
    compare(lambda x, w, b: (conv(x * 2, w, b if bias else None, w.shape[2]).relu().flatten(2).transpose(1, 2),), args)


@pytest.mark.parametrize("name, form", list(itertools.product(SIZES, FORMS)))
@pytest.mark.parametrize("mask", ([True] * 3, [False, True, True], [True, False, False]), ids=str)
def test_gradients_are_products(name: str, form: str, mask: list[bool]) -> None:
    x, w = SIZES[name]
    args = [arranged(x, form), torch.randn(w, dtype=torch.float64), torch.randn(w[0], dtype=torch.float64)]

    def step(x, w, b):
        y = conv(x, w, b, w.shape[2])
        return y.sin(), *gradients(y.cos(), x, w, w.shape[2], mask)

    compare(step, args, 2)


LEFT = {
    "windows overlap": lambda x, w: conv(x, w, None, 1),
    "gaps": lambda x, w: conv(x, w, None, 3),
    "edges": lambda x, w: conv(x, w, None, 2, padding=2),
    "dilated": lambda x, w: conv(x, w, None, 2, dilation=2),
    "groups": lambda x, w: conv(x, aten.slice.Tensor(w, 1, 0, 3), None, 2, groups=2),
    "points": lambda x, w: conv(x, aten.slice.Tensor(aten.slice.Tensor(w, 2, 0, 1), 3, 0, 1), None, 1),
    "a rest": lambda x, w: conv(aten.slice.Tensor(x, 2, 0, 7), w, None, 2),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    module = traced(LEFT[name], [torch.randn(2, 6, 8, 8), torch.randn(4, 6, 2, 2)])
    assert patches_to_products(module) == 0


def test_left_alone_elsewhere() -> None:
    args = [torch.randn(2, 6, 8, 8), torch.randn(4, 6, 2, 2)]
    plain = lambda x, w: conv(x, w, None, 2)  # noqa: E731
    assert patches_to_products(traced(plain, args, device="cpu")) == 0


@pytest.mark.parametrize(
    "convolutions, products, fits", [(True, True, 1), (True, False, 1), (False, False, 1), (False, True, 0)]
)
def test_factors_are_rounded_no_more_than_by_a_convolution(monkeypatch, convolutions, products, fits) -> None:
    monkeypatch.setattr(rounded_factors, "convolutions_take_tf32", lambda: convolutions)
    monkeypatch.setattr(rounded_factors, "_of_products", lambda: products)
    args = [torch.randn(2, 6, 8, 8), torch.randn(4, 6, 2, 2)]
    module = traced(lambda x, w: conv(x, w, None, 2), args, dtype=torch.float32)
    assert patches_to_products(module) == fits


def test_contestants_do_the_same_work() -> None:
    module = traced(lambda x, w: conv(x, w, None, 2), [torch.randn(2, 6, 8, 8), torch.randn(4, 6, 2, 2)])
    (node,) = (n for n in module.graph.nodes if n.target is aten.convolution.default)
    p = patches_of(node)
    assert (p.rows, p.inner, p.filters) == (32, 24, 4)
    found = {name: run() for name, run in runs_of(p, "cpu").items()}
    assert found["product"].numel() == found["convolution"].numel() == 2 * 4 * 16


@pytest.mark.parametrize("last", [True, False])
def test_images_for_groups_that_are_faster_in_row_major_memory(last, monkeypatch):
    """All that follows would be in channels-last memory otherwise."""
    monkeypatch.setattr(patches, "are_faster_last", lambda nodes: last)

    def f(x, w, v, b):
        return conv(conv(x, w, b, 4).relu(), v, None, 1, 1, groups=2)

    args = [torch.randn(s) for s in ((2, 3, 32, 32), (16, 3, 4, 4), (16, 8, 3, 3), (16,))]
    module = traced(f, args)
    assert patches_to_products(module) == 1
    (value,) = (n.meta["val"] for n in module.graph.nodes if n.target is aten.relu.default)
    assert value.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    torch.testing.assert_close(module(*args), f(*args), rtol=1e-4, atol=1e-4)
