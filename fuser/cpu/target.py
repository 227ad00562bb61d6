"""The CPU's `Target`: all that lowering and scheduler know of it."""

from __future__ import annotations

import torch

from fuser.targets import Target

# A line is read before it is written, and new pages are cleared, so a write costs as much as two reads. This changes
# no kernel of ResNet-50's training step, one of BERT's and eight of Llama's, whose steps take the same time with and
# without it.
TARGET = Target(
    "cpu", wide_sums=True, empty_statistics=True, masks_kinks=True, races=True, vector_bytes=64, dearly_folded=32,
    column_block=128, sums_by_channel=True, few_rows=8, long_row=1 << 16, split_units=16, split_work=1 << 16,
    lane_block=256, scans_alone=True, joins=True, recompute_cost=8, write_worth=2, table_work=1 << 18, product_rows=8,
    components=4, written_out=8, libraries=frozenset({"onednn"}),
    scores=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
)  # fmt: skip
