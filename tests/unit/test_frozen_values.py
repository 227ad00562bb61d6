"""What frozen weights alone decide is computed once, and again after each change that can be seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuser
from fuser.passes import frozen_values
from fuser.runtime import packing


class Scaled(nn.Module):
    """A product with a computed weight, a table that is computed, and one result that depends on weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(64, 1))
        self.register_buffer("steps", torch.randn(16))

    def forward(self, x):
        table = torch.outer(torch.arange(x.shape[0]).float(), self.steps).sin().repeat(1, 4)
        return x @ (self.weight * self.scale.exp()).t() + table, self.scale * 2


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The names of the values that were computed, in order."""
    names: list[str] = []

    def noting(make, name):
        return packing.folded_call(lambda *tensors: names.append(name) or make(*tensors), name)

    monkeypatch.setattr(frozen_values, "folded_call", noting)
    return names


def compiled(module: nn.Module, freeze: bool = True):
    torch._dynamo.reset()
    return torch.compile(module, backend=fuser.backend, dynamic=False, options={"freeze": freeze})


def test_they_are_computed_once_and_again_after_a_change(made):
    model, x = Scaled().eval(), torch.randn(8, 32)
    call = compiled(model)
    changes = (
        lambda: None,
        lambda: model.scale.add_(0.5),
        lambda: model.steps.mul_(2),
        lambda: setattr(model.weight, "data", torch.randn(64, 32)),
        lambda: setattr(model, "steps", torch.randn(16)),
    )
    counts = []
    with torch.no_grad():
        for change in changes:
            change()
            for _ in range(2):
                for got, want in zip(call(x), model(x), strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            counts.append(len(made))
    assert counts == [2, 3, 4, 5, 6]


def test_a_result_of_the_graph_is_new_in_each_call(made):
    model, x = Scaled().eval(), torch.randn(8, 32)
    call = compiled(model)
    with torch.no_grad():
        call(x)[1].zero_()
        torch.testing.assert_close(call(x)[1], model.scale * 2)


def test_casts_of_autocast_are_made_once(made):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(16, 64)
    call = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(call(x), model(x), rtol=5e-2, atol=5e-2)
        assert len(made) >= 2
        count = len(made)
        call(x)
    assert len(made) == count


@pytest.mark.parametrize("mode", ["not asked for", "gradients"])
def test_nothing_is_kept_otherwise(made, mode):
    model, x = Scaled().eval(), torch.randn(8, 32)
    call = compiled(model, freeze=mode == "gradients")
    with torch.set_grad_enabled(mode == "gradients"):
        torch.testing.assert_close(call(x)[0], model(x)[0], rtol=1e-5, atol=1e-5)
    assert not made


def test_a_value_much_larger_than_its_weights_is_computed_in_each_call(made):
    module = nn.Linear(4, 4)

    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = module.bias

        def forward(self, x):
            return x + (self.scale.repeat(1 << 19) + 1)

    with torch.no_grad():
        compiled(Grown())(torch.randn(1 << 21))
    assert not made


def test_kept_values_are_found_by_each_of_their_tensors():
    calls = []
    folded = packing.Folded(lambda a, b: calls.append(1) or a + b)
    a, b = torch.ones(3), torch.ones(3)
    first = folded.of(a, b)
    assert folded.of(a, b) is first and len(calls) == 1
    assert folded.of(a, a) is not first and len(calls) == 2
    with torch.inference_mode():
        c = torch.ones(3)
    assert folded.of(a, c) is not folded.of(a, c) and len(calls) == 4
