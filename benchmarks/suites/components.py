"""Tensors whose last dim holds a few components: points, colours, boxes, pairs, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.component_rows import rows
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.suites.contractions import run_rows

Function = Callable[..., Any]


def _without_gradients(module: nn.Module, forward: Function) -> Function:
    def call(*inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return forward(*inputs)

    return call


def run(options: Options) -> Report:
    """All rows."""
    return run_rows("components", list(rows()), options, _without_gradients)
