"""Fifty steps of models of some size: the losses follow eager's. Minutes long: `make stress` runs it, CI does not."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F

from benchmarks.models import ResNet
from examples.gpt2 import GPT2Config
from examples.gpt2 import build as build_gpt2
from fuser.frontends.dynamo import compilations, fuser_backend

pytestmark = pytest.mark.skipif(not os.environ.get("FUSER_STRESS"), reason="minutes long: make stress")
STEPS = 50


def gpt2():
    model, _ = build_gpt2(GPT2Config(2, 768, 12, 5000, 128), tokens=128)

    def loss(m, ids):
        return F.cross_entropy(m(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return model.train(), loss, [(torch.randint(64, (2, 128)),) for _ in range(STEPS)]


def resnet():
    model = ResNet((2, 2, 2, 2), 32, 10).train()
    colours = torch.randn(10, 3, 1, 1)  # what a class looks like: of noise alone nothing could be learnt
    classes = [torch.randint(10, (8,)) for _ in range(STEPS)]
    batches = [(torch.randn(8, 3, 96, 96) + colours[c], c) for c in classes]
    return model, lambda m, x, y: F.cross_entropy(m(x), y), batches


def losses(model, loss, batches, f, lr):
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        value = f(model, *batch)
        value.backward()
        optimizer.step()
        found.append(value.detach().double())
    return torch.stack(found)


@pytest.mark.parametrize(("make", "lr"), [(gpt2, 3e-4), (resnet, 1e-4)])
def test_losses_follow_eagers(make, lr):
    model, loss, batches = make()
    exact = [tuple(t.double() if t.is_floating_point() else t for t in b) for b in batches]
    want = losses(model, loss, batches, loss, lr)
    truth = losses(copy.deepcopy(model).double(), loss, exact, loss, lr)
    got = losses(model, loss, batches, torch.compile(loss, backend=fuser_backend), lr)
    assert truth[-5:].mean() < truth[:5].mean()
    assert (got - truth).abs().max() <= 4 * (want - truth).abs().max() + 1e-3 * truth.abs().max()
    assert len(compilations()) == 2, "one forward and one backward serve every step"
