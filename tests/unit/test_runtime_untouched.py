"""Zeros whose pages nobody has written: zeros in any case, and memory only where something is added."""

import mmap
import resource

import pytest
import torch

from fuser.runtime import untouched

ROWS, WIDTH = 16384, 512  # 32 MiB, which malloc maps anew


def zeros(rows, size=(ROWS, WIDTH), dtype=torch.float32):
    return untouched.zeros(size, dtype, torch.tensor(rows))


@pytest.mark.parametrize("size", [(ROWS, WIDTH), (1000, 300), (3, 5), (1, 1), (7, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16])
def test_recycled_memory_is_zero(size, dtype):
    for _ in range(3):
        dirty = [torch.full(size, 7, dtype=dtype) for _ in range(3)]
        del dirty
        out = zeros([0], size, dtype)
        assert out.shape == size and out.dtype is dtype and out.is_contiguous() and not out.any()


@pytest.mark.parametrize("answer", [0, -1])
def test_memory_that_the_system_does_not_forget_is_filled(monkeypatch, answer):
    monkeypatch.setattr(untouched, "_madvise", lambda: lambda address, nbytes, advice: answer)
    dirty = torch.ones(100_000)
    del dirty
    assert not zeros([1], (100, 1000)).any()
    monkeypatch.setattr(untouched, "_madvise", lambda: None)
    assert not zeros([1], (100, 1000)).any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="another system")
def test_pages_are_taken_up_where_rows_are():
    zeros([0])  # whatever the first call brings along
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    out = zeros(list(range(0, ROWS, 256)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < ROWS * WIDTH * 4 // mmap.PAGESIZE // 4
    out.untyped_storage().resize_(16)
    assert out.untyped_storage().nbytes() == 16, "an ordinary storage"
