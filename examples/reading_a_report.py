"""From a model to what hinders it: `python examples/reading_a_report.py [report.html]`; docs/report.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import fuser


class Ranker(nn.Module):
    """A model with a sort between two parts that fuse well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sorted features, weighted."""
        x = self.norm(nn.functional.gelu(self.inner(x)))
        x = x.sort(-1).values
        return torch.softmax(x * 0.5, -1)


def main(page: str = "") -> None:
    """Explain, say what is not fused, write the page, time some steps."""
    model, x = Ranker().eval(), torch.randn(32, 64)
    with torch.no_grad():
        explained = fuser.explain(model, x)
    print(explained)
    for op in explained.not_fused:  # by the bytes that fusing it would save
        print(f"{op.op} [{op.code}] moves {op.bytes} bytes at {op.source}: {op.reason}")
    path = Path(page) if page else Path(tempfile.mkdtemp()) / "report.html"
    print(f"open {explained.to_html(path)}")
    compiled = torch.compile(model, backend="fuser")
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        with fuser.profile() as found:
            for _ in range(5):
                compiled(x)
                found.step()
    print(found)


if __name__ == "__main__":
    main(*sys.argv[1:2])
