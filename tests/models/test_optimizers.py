"""Compiled optimizer steps: the same parameters after several steps, one kind of group for all of them, no copies.

Compared with the same captured graph run by ATen: dynamo makes the step count a float32 tensor, from which it computes
the bias corrections that eager computes from Python numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.interface import kernel_spec

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
    step = torch.compile(lambda: made.step(), backend=fuser_backend) if compiled else made.step
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        step()
    state = [v for s in made.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return ([p.detach() for p in model.parameters()], state), step


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_follow_atens(name):
    optimizer, options = OPTIMIZERS[name]
    want, _ = train(optimizer, options, 6, False)
    got, _step = train(optimizer, options, 6, True)  # the function holds its fusions
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    last = compilations()[-1]
    assert last.route == "wrapped"
    assert not last.unfused, "every operation is in a kernel, no tensor is copied"
    assert len(last.keys) <= 3, "eight parameters share their fusions"
    assert last.source.count("FUSION_") <= 4, "and one call serves those that are alike"
    stores = [kernel_spec(k).store for k in last.keys]
    assert not [(s.fallbacks, s.entries) for s in stores if s.fallbacks or not s.kernels]


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


def stepped(prepare, steps=4, **options):
    """Parameters and states after Adam's steps by ATen and by kernels, from what `prepare` makes."""
    results = []
    for backend in ("aot_eager", fuser_backend):
        torch._dynamo.reset()
        torch.manual_seed(1)
        parameters, memory = prepare()
        made = torch.optim.Adam(parameters, lr=1e-2, **options)
        step = torch.compile(lambda made=made: made.step(), backend=backend)
        for _ in range(steps):
            torch.manual_seed(2)
            for p in parameters:
                p.grad = torch.randn_like(p)
            step()
        state = [v for p in parameters for v in made.state[p].values()]
        results.append((memory, [p.detach() for p in parameters], state))
    return results


def separate():
    parameters = [nn.Parameter(torch.randn(5 + i % 3, 7)) for i in range(4)]
    return parameters, parameters


def halves_of_one_storage():
    whole = torch.randn(40, 6)
    return [nn.Parameter(whole[:20]), nn.Parameter(whole[20:]), nn.Parameter(torch.randn(3))], whole


def overlapping():
    whole = torch.randn(100)
    return [nn.Parameter(whole[:60]), nn.Parameter(whole[40:]), nn.Parameter(torch.randn(3))], whole


def transposed_and_empty():
    parameters = [nn.Parameter(torch.randn(6, 4).t()), nn.Parameter(torch.randn(0, 3)), nn.Parameter(torch.randn(()))]
    parameters += [nn.Parameter(torch.randn(8)[::2]), nn.Parameter(torch.randn(70, 50)), nn.Parameter(torch.ones(1))]
    return parameters, parameters


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("prepare", "foreach"),
    [(separate, True), (halves_of_one_storage, False), (overlapping, True), (transposed_and_empty, False)],
)
def test_parameters_of_every_kind(prepare, foreach):
    want, got = stepped(prepare, foreach=foreach)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_step_counter_that_is_shared_counts_every_parameter():
    results = []
    for backend in ("aot_eager", fuser_backend):
        torch._dynamo.reset()
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(6)) for _ in range(3)]
        made = torch.optim.Adam(parameters, lr=1e-2)
        counter = torch.tensor(3.0)
        for p in parameters:
            p.grad = torch.randn_like(p)
            made.state[p] = {"step": counter, "exp_avg": torch.randn(6), "exp_avg_sq": torch.rand(6)}
        step = torch.compile(lambda made=made: made.step(), backend=backend)
        step()
        step()
        results.append((counter, [p.detach() for p in parameters]))
    want, got = results
    assert want[0] == 9.0
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_groups_of_parameters_have_their_own_numbers():
    def prepare():
        parameters = [nn.Parameter(torch.randn(6, 2)) for _ in range(4)]
        return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5, "weight_decay": 0.1}], parameters

    results = []
    for backend in ("aot_eager", fuser_backend):
        torch._dynamo.reset()
        torch.manual_seed(1)
        groups, parameters = prepare()
        made = torch.optim.AdamW(groups, lr=1e-2)
        step = torch.compile(lambda made=made: made.step(), backend=backend)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p)
            step()
        results.append([p.detach() for p in parameters])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert compilations()[-1].source.count("_EACH_") == 2
