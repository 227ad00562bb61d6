"""Small networks at batch 1, where the host decides: a forward, or with `--mode train` a step with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.step_models import ROWS
from benchmarks.suites.contractions import run_rows


def step(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A training step: gradients to None, forward, loss, backward. Returns the loss and all gradients."""
    parameters = list(module.parameters())

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for p in parameters:
            p.grad = None
        with torch.enable_grad():
            loss = forward(*inputs).square().mean()
            loss.backward()
        return loss.detach(), *(p.grad for p in parameters)

    return run


def run(options: Options) -> Report:
    """The rows of `step_models`."""
    return run_rows("steps", ROWS, options, step if options.mode == "train" else None)
