"""Convolutions of single points in groups as products: what the pass makes of graphs on fake tensors, without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fuser.passes import grouped_points
from fuser.passes.grouped_points import Points, _call, _unstacked, grouped_points_to_products, runs_of

aten = torch.ops.aten
GROUPS = 2
SIDES = {"sequence": (7,), "image": (3, 5), "volume": (2, 3, 2)}


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """Products win their races, which no machine without a GPU can hold."""
    monkeypatch.setattr(grouped_points, "is_faster", lambda p, device: True)


def behind(n, groups=GROUPS):
    return [1] * n, [0] * n, [1] * n, False, [0] * n, groups


def conv(x, w, b, **how):
    return aten.convolution.default(x, w, b, *behind(x.dim() - 2, **how))


def images(sides, channels, form):
    """Row-major, with channels innermost, or with gaps between rows."""
    if form == "last":
        return torch.randn(2, *sides, channels, dtype=torch.float64).movedim(-1, 1)
    if form == "apart":
        return torch.randn(2, 2 * channels, *sides, dtype=torch.float64)[:, :channels]
    return torch.randn(2, channels, *sides, dtype=torch.float64)


def operands(sides, form):
    ones = (1,) * len(sides)
    x, w, b = images(sides, 6, form), torch.randn(8, 3, *ones, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    return [x, w, b]


def traced(f, args, device="cuda"):
    """The graph of a function for tensors in bfloat16 like `args` on a device.

    It is traced for the CPU: a build of torch without CUDA makes no sequences of other order for a convolution there.
    """
    with FakeTensorMode():
        module = make_fx(f)(*(torch.empty_strided(a.shape, a.stride(), dtype=torch.bfloat16) for a in args))

        def there(t):
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

        for node in module.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(torch.Tensor, there, node.meta["val"])
    return module


def compare(f, args: list[Any], number=1):
    module = traced(f, args)
    before = [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes]
    assert grouped_points_to_products(module) == number
    module.graph.lint()
    assert not [n for n in module.graph.nodes if "convolution" in str(n.target)]
    assert [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes] == before
    got, want = torch.fx.Interpreter(module).run(*args), f(*args)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name, form, bias", list(itertools.product(SIDES, ("rows", "last", "apart"), (True, False))))
def test_a_convolution_is_a_product(name: str, form: str, bias: bool) -> None:
    def f(x, w, b):
        y = conv(x, w, b if bias else None)
        return y.relu(), y.flatten(2).transpose(1, 2).softmax(-1)

    compare(f, operands(SIDES[name], form))


@pytest.mark.parametrize("name, form", list(itertools.product(SIDES, ("rows", "last", "apart"))))
@pytest.mark.parametrize("mask", ([True] * 3, [False, True, True], [True, False, False]), ids=str)
def test_gradients_are_products(name: str, form: str, mask: list[bool]) -> None:
    def f(x, w, b):
        y = conv(x, w, b)
        found = aten.convolution_backward.default(y.cos(), x, w, [8], *behind(x.dim() - 2), mask)
        return y.sin(), *(t for t in found if t is not None)

    compare(f, operands(SIDES[name], form), 2)


def test_a_result_keeps_the_order_of_points_for_what_follows() -> None:
    module = traced(lambda x, w, v: conv(conv(x, w, None).relu(), v, None), [
        *operands((7,), "last")[:2], torch.randn(8, 4, 1, dtype=torch.float64)
    ])  # fmt: skip
    assert grouped_points_to_products(module) == 2
    (relu,) = (n for n in module.graph.nodes if n.target is aten.relu.default)
    assert relu.meta["val"].stride(1) == 1


LEFT = {
    "one group": lambda x, w: conv(x, torch.cat([w, w], 1), None, groups=1),
    "windows": lambda x, w: conv(x, torch.cat([w, w], 2), None),
    "padded": lambda x, w: aten.convolution.default(x, w, None, [1], [1], [1], False, [0], GROUPS),
    "strided": lambda x, w: aten.convolution.default(x, w, None, [2], [0], [1], False, [0], GROUPS),
    "transposed": lambda x, w: aten.convolution.default(
        x, aten.slice.Tensor(w, 0, 0, 6), None, [1], [0], [1], True, [0], GROUPS
    ),
    "depthwise": lambda x, w: conv(x, aten.slice.Tensor(aten.slice.Tensor(w, 0, 0, 6), 1, 0, 1), None, groups=6),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    assert grouped_points_to_products(traced(LEFT[name], operands((7,), "rows")[:2])) == 0


def test_left_alone_elsewhere() -> None:
    plain, args = lambda x, w: conv(x, w, None), operands((7,), "rows")[:2]
    assert grouped_points_to_products(traced(plain, args, device="cpu")) == 0


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("backward", (False, True))
def test_contestants_give_the_same(last: bool, backward: bool) -> None:
    p = Points(2, GROUPS, 3, 4, (3, 5), torch.float64, last, backward)
    runs = {name: run() for name, run in runs_of(p, "cpu").items()}
    wanted, found = ((t if backward else (t,)) for t in (runs["convolution"], runs["products"]))
    each = (p.channels, 0) if backward else (p.filters,)
    images = [_unstacked(_call, t, p, n).flatten() if n else t.flatten() for t, n in zip(found, each, strict=True)]
    for mine, theirs in zip(images, wanted, strict=True):
        torch.testing.assert_close(mine, theirs.flatten())
