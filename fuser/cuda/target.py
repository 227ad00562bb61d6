"""NVIDIA GPUs' `Target`: all that lowering and scheduler know of them. `tiles.py` and `split.py` choose tiles."""

from __future__ import annotations

import torch

from fuser.targets import DTYPES, Target

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# `few_rows`: a multiprocessor of an H200 reads 70 GB/s, so 60 rows use all memory bandwidth. From 32 rows on, two
# further launches cost as much as they gain, unless the rows in flight are read from memory twice: 67108 rows of 1000
# columns took 2.8 times TorchInductor's time in 8 programs (bfloat16), 1.3 times in 32 (float32); 4096 columns took
# 1.1 times in 64 (bfloat16, H100), split 0.97; in 128 (float32) 0.98 to 1.01. `long_column`: a loop over several
# tensors has few loads in flight. A batch norm's gradients of 12544 rows of 1024 columns take 0.68 ms in one kernel
# (bfloat16), split 0.06; of 3136 rows of 8192 0.20 and 0.10; of 512 rows, which registers hold, 0.005 and 0.011.
# `cached`: norms of 64 to 512 rows of 0.4 to 16 Mi elements take 0.80 to 0.93 of the time if they are split, of 128
# rows of 256 Ki 1.15. `sums_by_dims`: averages of 11x11 windows took four times ATen's time; `window_dims`: poolings of
# 3x3x3 windows 1.7.
TARGET = Target(
    "cuda", empty_statistics=False, dtypes=DTYPES | {torch.float8_e4m3fn, torch.float8_e5m2}, ordered=False,
    unrolls=8, joins=True, joins_stored=1 << 20, sums_by_dims=False, window_dims=2, few_rows=32, long_row=1 << 17,
    long_column=513, rows_at_once=132, cached=40 << 20, column_bytes=128, square_tiles=True, neighbours=8, moments=True,
    apart=True, recompute_cost=64, write_worth=1, libraries=frozenset({"cublas", "cudnn", "flash"}), contracts=True,
    templates=_FLOATS, scores=_FLOATS, score_gradients=True,
)  # fmt: skip
