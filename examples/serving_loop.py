"""A server: requests of any size, answered by several threads from the first on: `python examples/serving_loop.py`.

ATen answers while kernels are compiled in the background; sizes are dynamic, so new ones compile nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import fuser


class Scorer(nn.Module):
    """What is served."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(48, 48), nn.LayerNorm(48), nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A score for each row."""
        return torch.sigmoid(self.last(self.norm(nn.functional.silu(self.first(x)))))


def main() -> None:
    """Serve, wait for kernels, serve again."""
    model = Scorer().eval()
    served = torch.compile(model, backend="fuser", dynamic=True, options={"compile_mode": "background"})

    @torch.no_grad()
    def answer(rows: int) -> None:
        x = torch.randn(rows, 48)
        torch.testing.assert_close(served(x), model(x))

    answer(3)  # traced here; ATen computes
    fuser.wait(60)  # a server would not wait; this one wants to show the difference
    compiled = fuser.num_compiled_kernels()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(answer, range(2, 34)))
    fuser.wait(60)
    more = fuser.num_compiled_kernels() - compiled
    print(f"{compiled + more} kernels, {more} of them for 32 more sizes")
    print(fuser.prometheus().splitlines()[0], "…")  # for a monitor: docs/metrics.md


if __name__ == "__main__":
    main()
