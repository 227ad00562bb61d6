"""Depthwise convolutions: the operator, its kernels on the CPU, and the pass on graphs of fake tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
import fuser.ops
from fuser import config
from fuser.interface import kernel_spec
from fuser.passes import conv_orders, depthwise, depthwise_gradients
from fuser.passes.conv_tensor_cores import tensor_cores_channels_last
from fuser.passes.depthwise import depthwise_by_kernels
from fuser.passes.grouping import group_nodes
from tests.unit.test_conv_tensor_cores import as_by_cudnn

aten = torch.ops.aten


def inputs(dims: int, kernel: int, last: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    size = (2, 24, 13, 10)[: 2 + dims]
    x = torch.randn(size, dtype=dtype)
    if last and dims == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    elif last:
        x = torch.randn(2, 13, 24, dtype=dtype).transpose(1, 2)
    return x, torch.randn(*(kernel,) * dims, 24, dtype=dtype), torch.randn(24, dtype=dtype)


def plain(x, w, b, stride, padding, dilation):
    """The convolution by ATen."""
    n = x.dim() - 2
    behind = [stride] * n, [padding] * n, [dilation] * n, False, [0] * n, x.shape[1]
    return aten.convolution.default(x, w.movedim(-1, 0).unsqueeze(1), b, *behind)


def own(x, w, b, stride, padding, dilation):
    n = x.dim() - 2
    return torch.ops.fuser.depthwise(x, w, b, [stride] * n, [padding] * n, [dilation] * n)


WINDOWS = (1, 1, 1, 0), (3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), (5, 1, 1, 2), (4, 1, 1, 3), (3, 3, 1, 0), (2, 2, 1, 0)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dims, last", list(itertools.product((1, 2), (False, True))))
@pytest.mark.parametrize("kernel, stride, dilation, padding", WINDOWS)
def test_kernels_give_atens_results(
    dims: int, last: bool, kernel: int, stride: int, dilation: int, padding: int
) -> None:  # fmt: skip
    how = stride, padding, dilation
    for dtype, bias in ((torch.float32, True), (torch.bfloat16, False)):
        x, w, b = inputs(dims, kernel, last, dtype)
        given = (x, w, b) if bias else (x, w)
        f = (lambda x, w, b: own(x, w, b, *how) * 2) if bias else (lambda x, w: own(x, w, None, *how) * 2)
        graph = make_fx(f, tracing_mode="fake")(*given)
        key = fuser.register_fusion(graph)
        (got,) = fuser.run_fusion(key, given)
        assert not kernel_spec(key).blocked
        exact = (plain(*(t.double() for t in (x, w)), b.double() if bias else None, *how) * 2)
        tolerance = 1e-5 if dtype is torch.float32 else 8e-3
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=10 * tolerance)
        assert got.stride() == (own(x, w, b if bias else None, *how) * 2).stride()


def test_the_operator_agrees_with_its_own_shapes() -> None:
    for dims, last, window in itertools.product((1, 2), (False, True), WINDOWS):
        kernel, stride, dilation, padding = window
        x, w, b = inputs(dims, kernel, last, torch.float32)
        real = own(x, w, b, stride, padding, dilation)
        fake = own(*(t.to("meta") for t in (x, w, b)), stride, padding, dilation)
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def traced(f, *shapes, dtype=torch.bfloat16, device="cuda", form=torch.contiguous_format):
    with FakeTensorMode():
        made = (torch.empty(s, device=device, dtype=dtype, memory_format=form) for s in shapes[:1])
        return make_fx(f)(*made, *(torch.empty(s, device=device, dtype=dtype) for s in shapes[1:]))


def conv(x, w, b, groups, stride=1, padding=1, transposed=False):
    n = x.dim() - 2
    return aten.convolution.default(x, w, b, [stride] * n, [padding] * n, [1] * n, transposed, [0] * n, groups)


FOUND: dict[str, Any] = {
    "images": (lambda x, w, b: conv(x, w, b, 8).relu(), ((2, 8, 12, 12), (8, 1, 3, 3), (8,))),
    "strided": (lambda x, w, b: conv(x, w, b, 8, 2, 2).sigmoid(), ((2, 8, 12, 12), (8, 1, 5, 5), (8,))),
    "rows": (lambda x, w, b: conv(x, w, b, 8, 1, 3) * 2, ((2, 8, 12), (8, 1, 4), (8,))),
    "no bias": (lambda x, w, b: conv(x, w, None, 8) + 1, ((2, 8, 12, 12), (8, 1, 3, 3), (8,))),
}


@pytest.mark.parametrize("name", FOUND)
def test_graphs_get_the_operator(name: str) -> None:
    f, shapes = FOUND[name]
    module = traced(f, *shapes)
    before = module.graph.output_node().all_input_nodes[0].meta["val"].stride()
    assert depthwise_by_kernels(module) == 1
    module.graph.lint()
    assert not [n for n in module.graph.nodes if n.target is aten.convolution.default]
    assert module.graph.output_node().all_input_nodes[0].meta["val"].stride() == before
    args = [torch.randn(s) for s in shapes]
    torch.testing.assert_close(torch.fx.Interpreter(module).run(*args), f(*args), rtol=1e-4, atol=1e-4)


def test_what_comes_before_is_a_group_of_its_own() -> None:
    """Its kernel would not be the same one, and its input would be alive beside two more tensors."""

    def block(x, w, b):
        return conv(conv(x, torch.stack([w.squeeze(1)] * 8, 1), b, 1).sigmoid(), w, b, 8).relu() * 2

    module = traced(block, (2, 8, 32, 32), (8, 1, 3, 3), (8,))
    assert depthwise_by_kernels(module) == 1
    grouping = group_nodes(module.graph)
    at = {str(n.target): grouping.group_of.get(n) for n in module.graph.nodes}
    assert at["fuser.depthwise.default"] == at["aten.relu.default"] == at["aten.mul.Tensor"]
    assert at["aten.sigmoid.default"] not in (None, at["fuser.depthwise.default"])


LEFT: dict[str, Any] = {
    "one group": (lambda x, w: conv(x, w, None, 1) * 2, ((2, 8, 12, 12), (8, 8, 3, 3)), {}),
    "groups of two": (lambda x, w: conv(x, w, None, 4) * 2, ((2, 8, 12, 12), (8, 2, 3, 3)), {}),
    "two filters": (lambda x, w: conv(x, w, None, 8) * 2, ((2, 8, 12, 12), (16, 1, 3, 3)), {}),
    "large windows": (lambda x, w: conv(x, w, None, 8) * 2, ((2, 8, 12, 12), (8, 1, 7, 7)), {}),
    "transposed": (lambda x, w: conv(x, w, None, 8, transposed=True) * 2, ((2, 8, 12, 12), (8, 1, 3, 3)), {}),
    "volumes": (lambda x, w: conv(x, w, None, 8) * 2, ((2, 8, 4, 4, 4), (8, 1, 2, 2, 2)), {}),
    "cpu": (lambda x, w: conv(x, w, None, 8) * 2, ((2, 8, 12, 12), (8, 1, 3, 3)), {"device": "cpu"}),
    "no reader": (lambda x, w: conv(x, w, None, 8), ((2, 8, 12, 12), (8, 1, 3, 3)), {}),
    "double": (lambda x, w: conv(x, w, None, 8) * 2, ((2, 8, 12, 12), (8, 1, 3, 3)), {"dtype": torch.float64}),
}


def test_symbols_get_no_guards(monkeypatch) -> None:
    """A graph of free sizes gets the operator, and nothing is asked of its sizes."""
    monkeypatch.setattr(depthwise, "DEVICE", "cpu")
    f, args = (lambda x, w: conv(x, w, None, 8).relu()), (torch.randn(4, 8, 12, 12), torch.randn(8, 1, 3, 3))
    module = make_fx(f, tracing_mode="symbolic")(*args)
    env = next(iter(module.graph.nodes)).meta["val"].fake_mode.shape_env
    before = len(env.guards)
    assert depthwise_by_kernels(module) == 1 and len(env.guards) == before
    assert depthwise_by_kernels(make_fx(f, tracing_mode="fake")(*args)) == 1
    other = torch.randn(3, 8, 10, 9), args[1]
    torch.testing.assert_close(torch.fx.Interpreter(module).run(*other), f(*other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    f, shapes, how = LEFT[name]
    assert depthwise_by_kernels(traced(f, *shapes, **how)) == 0


def test_other_groups_are_timed(monkeypatch) -> None:
    """A graph goes to channels-last memory if its grouped convolutions take less time there, all together."""
    as_by_cudnn(monkeypatch)
    asked = []
    times = {2: (("contiguous", 3.0), ("channels-last", 1.0)), 4: (("contiguous", 1.0), ("channels-last", 2.5))}

    def timed(node):
        asked.append(node.args[8])
        return times[node.args[8]]

    monkeypatch.setattr(conv_orders, "_times", timed)
    shapes = (2, 8, 12, 12), (8, 4, 3, 3), (8, 2, 3, 3), (8, 1, 3, 3)
    fast = traced(lambda x, a, b, c: conv(conv(x, a, None, 2).relu(), c, None, 8).relu(), *shapes)
    mixed = traced(lambda x, a, b, c: conv(conv(x, a, None, 2).relu(), b, None, 4).relu(), *shapes)
    slow = traced(lambda x, a, b, c: conv(conv(x, b, None, 4).relu(), b, None, 4).relu(), *shapes)
    assert [tensor_cores_channels_last(m) for m in (fast, mixed, slow)] == [2, 2, 0]
    assert asked == [2, 2, 4, 4, 4]
    odd = traced(lambda x, w: conv(conv(x, w, None, 1).relu(), w, None, 1).relu(), (2, 6, 9, 9), (6, 6, 3, 3))
    times[1] = times[4]
    assert tensor_cores_channels_last(odd) == 0 and asked.pop() == asked.pop() == 1  # cuDNN would add channels
    again = traced(lambda x, a, b, c: conv(conv(x, a, None, 2).relu(), c, None, 8).relu(), *shapes)
    with config.override(deterministic="yes"):
        assert tensor_cores_channels_last(again) == 0 and len(asked) == 5


@pytest.mark.parametrize("last, converted", [(1.05, 6), (1e6, 0)])
def test_groups_that_are_a_small_share_of_the_bytes_are_timed_too(last, converted, monkeypatch) -> None:
    """As two filters a channel, for which cuDNN starts a kernel for each group: seconds beside the others' gain."""
    as_by_cudnn(monkeypatch)
    monkeypatch.setattr(conv_orders, "_times", lambda node: (("contiguous", 1.0), ("channels-last", last)))

    def f(x, w, grouped):
        for _ in range(5):
            x = conv(x, w, None, 1).relu()
        return conv(x, grouped, None, 4).relu()

    module = traced(f, (2, 64, 64, 64), (64, 64, 3, 3), (8, 16, 3, 3))
    assert tensor_cores_channels_last(module) == converted


def test_the_race_runs_one_convolution() -> None:
    behind = [1, 1], [1, 1], [1, 1], False, [0, 0], 2
    found = conv_orders.runs_of((2, 8, 6, 6), (4, 4, 3, 3), torch.float32, True, behind, device="cpu")
    first, second = (run() for run in found.values())
    torch.testing.assert_close(first, second)
    behind = *behind, [True, True, True]
    found = conv_orders.runs_of((2, 8, 6, 6), (4, 4, 3, 3), torch.float32, True, behind, (2, 4, 6, 6), "cpu")
    assert [[g.shape[0] for g in run()] for run in found.values()] == [[2, 4, 4]] * 2

def with_gradients(padding, mask=(True, True, False)):
    def f(g, x, w):
        how = None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], x.shape[1], list(mask)
        found = aten.convolution_backward.default(g, x, w, *how)
        return [t.sin() for t in found if t is not None]

    return f


IMAGES, FILTERS = "images", "filters"
GRADIENTS = {
    "halves": (3, torch.bfloat16, {}, IMAGES),
    "halves, long windows": (7, torch.float16, {}, IMAGES),
    "float32": (3, torch.float32, {}, IMAGES),
    "float32, windows of 5x5": (5, torch.float32, {}, ""),
    "float32, windows of 7x7": (7, torch.float32, {}, FILTERS),
    "float32, filters alone": (7, torch.float32, {"mask": (False, True, False)}, FILTERS),
    "double": (3, torch.float64, {}, ""),
    "no padding": (3, torch.bfloat16, {"padding": 0}, ""),
    "images alone": (3, torch.bfloat16, {"mask": (True, False, False)}, IMAGES),
    "filters alone": (3, torch.bfloat16, {"mask": (False, True, False)}, ""),
    "row-major": (3, torch.bfloat16, {"last": False}, ""),
    "odd channels": (3, torch.bfloat16, {"channels": 20}, ""),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_by_faster_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k, dtype, more, changed = GRADIENTS[name]
    monkeypatch.setattr(depthwise_gradients, "_LEAST", 1)
    channels, padding = more.get("channels", 24), more.get("padding", k // 2)
    form = torch.channels_last if more.get("last", True) else torch.contiguous_format
    f = with_gradients(padding, more.get("mask", (True, True, False)))
    grown = 2 * padding - k + 1
    sizes = (2, channels, 9 + grown, 10 + grown), (2, channels, 9, 10), (channels, 1, k, k)
    with FakeTensorMode():
        module = make_fx(f)(*(torch.empty(s, device="cuda", dtype=dtype, memory_format=form) for s in sizes))
    strides = [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes]
    assert depthwise_gradients.depthwise_gradients(module) == bool(changed)
    module.graph.lint()
    assert [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes] == strides
    targets = [n.target for n in module.graph.nodes]
    assert (aten.convolution.default in targets) == (changed == IMAGES)
    assert targets.count(aten.clone.default) == 2 * (changed == FILTERS)
    args = [torch.randn(s, dtype=torch.float32).contiguous(memory_format=form) for s in sizes]
    for got, want in zip(torch.fx.Interpreter(module).run(*args), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
