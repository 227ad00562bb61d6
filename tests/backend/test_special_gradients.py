"""Gradients of activations at NaN, infinities, zeros and kinks: those of eager's vectors."""

from __future__ import annotations

import pytest
import torch

from fuser import fusion_handle, register_fusion
from fuser.frontends.dynamo import forget_compilations, fuser_backend, last_compilation

aten = torch.ops.aten
SPECIAL = [
    float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 6.0, -2.0, 20.0, -20.0,
]  # fmt: skip
GRADIENTS = {
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -2, 1),
    "relu6": lambda g, x: aten.hardtanh_backward(g, x, 0, 6),
    "hardshrink": lambda g, x: aten.hardshrink_backward(g, x, 0.5),
    "softshrink": lambda g, x: aten.softshrink_backward(g, x, 0.5),
    "hardswish": lambda g, x: aten.hardswish_backward(g, x),
    "hardsigmoid": lambda g, x: aten.hardsigmoid_backward(g, x),
    "elu": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "elu of its result": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, True, x),
    "celu": lambda g, x: aten.elu_backward(g, 2.0, 1.0, 0.5, False, x),
    "selu": lambda g, x: aten.elu_backward(g, 1.6732632423543772, 1.0507009873554805, 1.0, False, x),
    "leaky_relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.01, False),
    "threshold": lambda g, x: aten.threshold_backward(g, x, 0),
    "softplus": lambda g, x: aten.softplus_backward(g, x, 1, 20),
    "log_sigmoid": lambda g, x: aten.log_sigmoid_backward(g, x, torch.exp(-torch.abs(x))),
    "silu": lambda g, x: aten.silu_backward(g, x),
    "mish": lambda g, x: aten.mish_backward(g, x),
    "sigmoid": lambda g, x: aten.sigmoid_backward(g, x),
    "tanh": lambda g, x: aten.tanh_backward(g, x),
    "logit": lambda g, x: aten.logit_backward(g, x, 0.1),
}
INFINITE = {"mish", "silu", "softplus"}  # infinity times nothing: which of the two eager gives depends on its formula


def kinds(x):
    """NaN, infinities with their sign, zeros and other numbers."""
    infinite = torch.where(x.isinf(), 2 * x.sign(), (x != 0).to(x.dtype))
    return torch.where(x.isnan(), 3, infinite)


@pytest.mark.sampled(
    22,
    also=(
        "elu of its result-torch.float64", "hardshrink-torch.float32", "logit-torch.float32",
        "softplus-torch.float32",
    ),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_at_special_values(name, dtype):
    """Each value fills whole vectors of eager: elements left over compare a NaN in the opposite way."""
    x = torch.tensor(SPECIAL, dtype=dtype).repeat_interleave(64)
    if name in INFINITE:
        x = x[~x.isinf()]
    g = torch.linspace(1, 2, x.numel(), dtype=dtype)
    f = GRADIENTS[name]
    try:
        want = f(g, x)
    except (RuntimeError, NotImplementedError):
        pytest.skip(f"eager has no gradient of {name} for {dtype}")
    got = fusion_handle(register_fusion(torch.fx.symbolic_trace(lambda g, x: f(g, x))))(g, x)
    assert torch.equal(kinds(got), kinds(want))
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("name", ["hardtanh", "leaky_relu", "threshold"])
def test_gradients_that_a_program_calls_itself_stay_whole(name):
    """A graph that no cut divides saves nothing: a kernel is timed beside ATen's operator."""
    torch._dynamo.reset()
    forget_compilations()
    grad, x = torch.randn(40, 50), torch.randn(40, 50)
    found = torch.compile(GRADIENTS[name], backend=fuser_backend)(grad, x)
    assert torch.equal(found, GRADIENTS[name](grad, x))
    (group,) = last_compilation().groups
    assert list(group.ops) == [f"aten.{name}_backward"]
