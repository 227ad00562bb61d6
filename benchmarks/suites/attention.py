"""`flex_attention` with the modifications and masks of public models: forward, and on a GPU with gradients, too.

Then attention as programs write it, beside one call of `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.attention_rows import ROWS
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.suites.contractions import run_rows
from benchmarks.written_attention import rows as written_rows

Function = Callable[..., Any]


def _with_gradients(module: nn.Module, forward: Function) -> Function:
    def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = forward(*leaves)
            return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out)))

    return step


def _without(module: nn.Module, forward: Function) -> Function:
    def call(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = forward(*inputs)
            return out

    return call


def run(options: Options) -> Report:
    """All rows; torch gives `flex_attention` no gradients on the CPU."""
    report = run_rows("attention", ROWS, options, _without)
    more = [run_rows("attention with gradients", ROWS, options, _with_gradients)] if options.device == "cuda" else []
    more.append(run_rows("written attention", written_rows(options.device), options, _without, by_hand=True))
    for other in more:
        report.tables += other.tables
        report.claims += other.claims
        report.records += other.records
        report.wrong += other.wrong
        report.notes += other.notes
    return report
