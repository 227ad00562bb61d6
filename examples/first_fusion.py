"""A first fusion: one expression, its result, its speed, and the code that runs: `python examples/first_fusion.py`."""

from __future__ import annotations

import torch

import fuser
import fuser.debug


def gelu_of_sum(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What is fused: in eager three kernels, each with a pass over memory."""
    return torch.nn.functional.gelu(x + bias) * x


def main() -> None:
    """Register, run for several sizes, compare, time."""
    key = fuser.register_fusion(torch.fx.symbolic_trace(gelu_of_sum))
    call = fuser.fusion_handle(key)
    for rows in (1, 64, 1000):  # one kernel serves all sizes
        x, bias = torch.randn(rows, 256), torch.randn(256)
        torch.testing.assert_close(call(x, bias), gelu_of_sum(x, bias))
    print(f"{fuser.num_compiled_kernels()} kernels so far")
    print(fuser.debug.measure(key, [x, bias]))
    print(fuser.debug.trace(key))  # canonical graph, IR, plan and source


if __name__ == "__main__":
    main()
