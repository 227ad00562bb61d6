"""Functions of tensors in the spellings that users write, each with inputs: what canonical graphs must mean."""

from __future__ import annotations

import torch

g = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=g)
Y = torch.randn(6, generator=g)
W = torch.randn(8, 6, generator=g)
IMG = torch.randn(2, 4, 8, 8, generator=g)
IDX = torch.randint(0, 4, (3,), generator=g)
T = torch.randint(0, 6, (4,), generator=g)
I = torch.randint(-8, 8, (4, 6), generator=g)
B = X > 0
ONES = torch.ones(3, 4, 3, 3)
