"""Compiled optimizer steps: the same parameters after several steps, one kind of group for all of them, no copies.

Compared with the same captured graph run by ATen: dynamo makes the step count a float32 tensor, from which it computes
the bias corrections that eager computes from Python numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend
from fuser.interface import kernel_spec


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    forget_compilations()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
    "adamw maximize": (torch.optim.AdamW, {"maximize": True}),
    "adam foreach": (torch.optim.Adam, {"foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def train(optimizer, options, steps, compiled):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8), nn.Linear(8, 1))
    made = optimizer(model.parameters(), lr=1e-2, **options)
    step = torch.compile(lambda: made.step(), backend=fuser_backend if compiled else "aot_eager")
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        step()
    state = [v for s in made.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [p.detach() for p in model.parameters()], state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_follow_atens(name):
    optimizer, options = OPTIMIZERS[name]
    want = train(optimizer, options, 6, False)
    got = train(optimizer, options, 6, True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    last = compilations()[-1]
    assert last.route == "wrapped"
    assert not last.unfused, "every operation is in a kernel, no tensor is copied"
    assert len(last.keys) <= 3, "eight parameters share their fusions"
    stores = [kernel_spec(k).store for k in last.keys]
    assert all(s.kernels and not s.fallbacks for s in stores)


def test_learning_rate_is_scheduled():
    def run(compiled):
        torch.manual_seed(1)
        p = nn.Parameter(torch.randn(8))
        made = torch.optim.Adam([p], lr=torch.tensor(0.1))
        schedule = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
        step = torch.compile(lambda: made.step(), backend=fuser_backend if compiled else "aot_eager")
        for _ in range(6):
            p.grad = torch.randn(8)
            step()
            schedule.step()
        return p.detach()

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)
