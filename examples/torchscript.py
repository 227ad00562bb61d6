"""TorchScript with a loop and a branch, run in fused groups: `python examples/torchscript.py`."""

from __future__ import annotations

import torch

import fuser
import fuser.debug


def settle(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The body of the loop and each branch are groups of their own."""
    for _ in range(steps):
        if bool(x.sum() > 0):
            x = torch.tanh(x * 0.5) - 0.1
        else:
            x = torch.relu(x + 0.3) * 0.9
    return x


def main() -> None:
    """Script, fuse, compare, look."""
    scripted = torch.jit.script(settle)
    fused = fuser.fuse_script(scripted)
    for steps in (0, 1, 7):
        x = torch.randn(16, 32)
        torch.testing.assert_close(fused(x, steps), scripted(x, steps))
    print(fuser.debug.graph_for(fused))


if __name__ == "__main__":
    main()
