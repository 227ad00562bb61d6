"""What lowering and scheduler know of NVIDIA's GPUs. Tiles and cuts are in `tiles.py` and `split.py`."""

from __future__ import annotations

import torch

from fuser.targets import DTYPES, Target

TARGET = Target(
    "cuda", empty_statistics=False, dtypes=DTYPES | {torch.float8_e4m3fn, torch.float8_e5m2}, ordered=False,
    unrolls=True, joins=True, recompute_cost=64, write_worth=1,
)  # fmt: skip
