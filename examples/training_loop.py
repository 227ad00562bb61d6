"""A training loop: model, loss and optimiser compiled; the losses are eager's: `python examples/training_loop.py`."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fuser

STEPS = 3


class Classifier(nn.Module):
    """A small perceptron with dropout, so that random numbers are part of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.layers(x), wanted)


def train(model: nn.Module, compiled: bool) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of = torch.compile(model, backend="fuser") if compiled else model
    step = torch.compile(optimizer.step, backend="fuser") if compiled else optimizer.step
    torch.manual_seed(0)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(torch.randn(64, 32), torch.randint(10, (64,)))
        optimizer.zero_grad()
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train twice from the same weights and compare."""
    torch.manual_seed(1)
    model = Classifier()
    other = copy.deepcopy(model)
    with fuser.config.override(random="eager"):  # eager's own random numbers, to compare; the default draws in kernels
        fused, eager = train(model, compiled=True), train(other, compiled=False)
    torch.testing.assert_close(fused, eager, rtol=1e-3, atol=1e-4)
    print(f"losses {', '.join(f'{n:.4f}' for n in fused)}, as in eager")


if __name__ == "__main__":
    main()
