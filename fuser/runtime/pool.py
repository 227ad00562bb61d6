"""The buffer pool: warm blocks of huge pages for temporaries, bounded in size, returned to the system when idle.

Writing a page for the first time costs more than the arithmetic on it. Temporaries of kernels and of compiled graphs
therefore use blocks that stay warm between calls: at most `config.pool_limit_bytes` of idle ones, each for at most
`config.pool_idle_seconds`. The process-wide settings count, from the pool's next use. Results of a graph use torch's
own memory instead, so that they can be resized (see `warm`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fuser.runtime import launcher, python_pool, warm
from fuser.runtime.torch_abi import DTYPE_WORDS


def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor (sizes and strides in elements) in a warm block, for use inside a graph.

    Its storage cannot be resized. Small and empty tensors come from torch's own allocator.
    """
    if math.prod(size) * dtype.itemsize < python_pool.POOL_MIN:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    nbytes = (1 + sum((s - 1) * st for s, st in zip(size, stride))) * dtype.itemsize
    if nbytes < python_pool.POOL_MIN or dtype not in DTYPE_WORDS:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    native = launcher.native()
    make = python_pool.tensor if native is None else native.pool_tensor
    out: torch.Tensor = make(tuple(size), tuple(stride), DTYPE_WORDS[dtype], nbytes)
    return out


def stats() -> dict[str, int]:
    """idle_bytes, idle_blocks, used_bytes, used_blocks, peak_bytes; hits, misses, blocks returned; trimmer active."""
    out = python_pool.pool.stats()
    native = launcher.native()
    if native is not None:
        out = {k: out[k] + v for k, v in native.pool_stats().items()}
    return out


def trim() -> int:
    """Return every idle block to the system now. The result is the number of bytes."""
    native = launcher.native()
    return warm.outputs.trim() + python_pool.pool.trim() + (native.pool_trim() if native is not None else 0)
