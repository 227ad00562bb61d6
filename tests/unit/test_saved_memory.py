"""The setting `memory`: less is saved for the backward, more is computed again, gradients stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuser
from fuser.errors import ConfigError


class Blocks(nn.Module):
    """Residual blocks of a norm, two linears, an activation and a dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2),
                          nn.Linear(4 * width, width))
            for _ in range(2)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def step(model: nn.Module, x: torch.Tensor, memory: float) -> tuple[int, list[torch.Tensor]]:
    """The bytes saved by a forward, and the gradients."""
    torch._dynamo.reset()
    saved: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    compiled = torch.compile(model, backend=fuser.backend, dynamic=False, options={"memory": memory})
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = compiled(x)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return sum(saved.values()), gradients


def test_less_memory_gives_the_same_gradients():
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(64, 32)
    (most, want), *others = (step(model, x, share) for share in (1.0, 0.4, 0.0))
    least = sum(p.nbytes for p in model.parameters())
    for nbytes, gradients in others:
        assert least < nbytes < most
        most = nbytes
        torch.testing.assert_close(gradients, want)


@pytest.mark.parametrize("value", [-0.1, 1.5, "much", True])
def test_a_share_is_a_number_from_0_to_1(value):
    with pytest.raises(ConfigError, match="from 0 to 1"), fuser.config.override(memory=value):
        pass


def test_logits_that_a_caller_writes_are_not_saved_where_their_logarithms_are_results():
    """Seed 23063544: eager's backward reads the logarithms alone."""

    def fn(x):
        logits = x * 2
        return logits.log_softmax(-1), logits

    x = torch.randn(4, 5, requires_grad=True)
    want = torch.autograd.grad(fn(x)[0].square().sum(), x)[0]
    logs, logits = torch.compile(fn, backend="fuser")(x)
    with torch.no_grad():
        logits.zero_()
    torch.testing.assert_close(torch.autograd.grad(logs.square().sum(), x)[0], want)
