"""The bias of a convolution on CUDA: a kernel that reads the result adds it; on fake tensors, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.passes.conv_bias import bias_behind_convolution, bias_gradients_apart

aten = torch.ops.aten


def traced(f, *shapes, device="cuda", dtype=torch.float32):
    with FakeTensorMode():
        args = [torch.empty(s, device=device, dtype=dtype) for s in shapes]
        return make_fx(f)(*args)


def conv(x, w, b):
    return aten.convolution.default(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


SHAPES = (2, 3, 8, 8), (5, 3, 3, 3), (5,)


def run(module, *args):
    return torch.fx.Interpreter(module).run(*args)


def test_a_kernel_adds_the_bias():
    module = traced(lambda x, w, b: conv(x, w, b).relu() * 2, *SHAPES)
    assert bias_behind_convolution(module) == 1
    module.graph.lint()
    calls = [n for n in module.graph.nodes if n.target is aten.convolution.default]
    assert [n.args[2] for n in calls] == [None]
    args = [torch.randn(s) for s in SHAPES]
    torch.testing.assert_close(run(module, *args), conv(*args).relu() * 2)


@pytest.mark.parametrize(
    ("f", "device"),
    [
        (conv, "cuda"),
        (lambda x, w, b: conv(x, w, b).relu(), "cpu"),
        (lambda x, w, b: conv(x, w, None).relu(), "cuda"),
    ],
    ids=["nobody reads it", "cpu", "no bias"],
)
def test_left_alone(f, device):
    assert bias_behind_convolution(traced(f, *SHAPES, device=device)) == 0


def gradients(mask, grad, x, w):
    found = aten.convolution_backward.default(grad, x, w, [5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
    return [g for g, wanted in zip(found, mask, strict=True) if wanted]


@pytest.mark.parametrize("mask", ([True, True, True], [False, True, True], [False, False, True]), ids=str)
def test_the_gradient_of_a_bias_is_a_sum(mask):
    shapes = (2, 5, 6, 6), *SHAPES[:2]
    module = traced(lambda *args: gradients(mask, *args), *shapes)
    assert bias_gradients_apart(module) == 1
    module.graph.eliminate_dead_code()
    module.graph.lint()
    masks = [n.args[10] for n in module.graph.nodes if n.target is aten.convolution_backward.default]
    assert masks == ([[*mask[:2], False]] if any(mask[:2]) else [])
    args = [torch.randn(s) for s in shapes]
    torch.testing.assert_close(run(module, *args), gradients(mask, *args))
    assert bias_gradients_apart(traced(lambda *args: gradients(mask, *args), *shapes, device="cpu")) == 0
