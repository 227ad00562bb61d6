"""The buffer pool, native and in Python: bounded, warm, given back when idle."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time

import pytest
import torch

from fuser import config
from fuser.runtime import launcher, pool, python_pool

MIB = 1 << 20


@pytest.fixture(params=["native", "python"])
def clean(request, monkeypatch):
    """An empty pool of one kind, with the default limits."""
    assert launcher.wait(60), launcher.reason()
    if request.param == "python":
        monkeypatch.setattr(launcher, "_native", None)
    gc.collect()
    pool.trim()
    limits = {name: getattr(config, name) for name in ("pool_limit_bytes", "pool_idle_seconds")}
    config.set(pool_limit_bytes=256 * MIB, pool_idle_seconds=60.0)
    yield pool.stats()
    config.set(**limits)
    pool.trim()
    pool.stats()


def floats(n: int) -> torch.Tensor:
    return pool.empty_strided((n,), (1,), torch.float32)


def resident_mib() -> float:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4 / 1024


def test_layouts_and_dtypes(clean):
    x = pool.empty_strided((300, 400), (1, 300), torch.float64)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((300, 400), (1, 300), torch.float64, "cpu")
    x.fill_(3)
    assert x.sum() == 3 * 300 * 400 and x.data_ptr() % 64 == 0
    assert pool.stats()["used_blocks"] == clean["used_blocks"] + 1
    for dtype in (torch.bfloat16, torch.bool, torch.int8, torch.complex64):
        assert pool.empty_strided((1 << 20,), (1,), dtype).dtype == dtype
    expanded = pool.empty_strided((1000, 1 << 20), (0, 1), torch.int8)
    assert expanded.fill_(1).shape == (1000, 1 << 20)


def test_small_and_empty_tensors_are_torch_own(clean):
    for size, stride in (((), ()), ((0, 1 << 30), (1, 1)), ((100,), (1,))):
        x = pool.empty_strided(size, stride, torch.float32)
        assert (x.shape, x.stride()) == (size, stride)
        if x.numel():
            x.resize_(1000)
    assert pool.stats()["hits"] + pool.stats()["misses"] == clean["hits"] + clean["misses"]


def test_blocks_are_used_again(clean):
    address = floats(MIB).data_ptr()
    stats = pool.stats()
    assert stats["idle_blocks"] == 1 and stats["idle_bytes"] == 4 * MIB
    assert floats(MIB - 1000).data_ptr() == address  # the same class of size
    assert pool.stats()["hits"] == clean["hits"] + 1
    held = floats(MIB)
    assert floats(MIB).data_ptr() != held.data_ptr() == address


def test_one_block_of_the_largest_size_serves_temporaries_that_come_one_by_one(clean):
    floats(MIB)
    large = floats(2 * MIB).data_ptr()
    assert pool.stats()["idle_bytes"] == 8 * MIB  # the smaller one made room
    assert [floats(n).data_ptr() for n in (MIB, MIB // 2, 2 * MIB)] == [large] * 3
    held = floats(MIB), floats(MIB)
    del held
    assert pool.stats()["idle_bytes"] == 12 * MIB and floats(MIB).data_ptr() != large  # the smallest that fits


def test_views_keep_the_block(clean):
    view = floats(MIB).fill_(7)[5:9]
    floats(MIB).fill_(1)
    assert view.tolist() == [7] * 4 and pool.stats()["used_blocks"] == clean["used_blocks"] + 1
    del view
    assert pool.stats()["used_blocks"] == clean["used_blocks"]


def test_idle_bytes_are_bounded_oldest_first(clean):
    config.set(pool_limit_bytes=10 * MIB)
    tensors = [floats(MIB) for _ in range(4)]
    addresses = [t.data_ptr() for t in tensors]
    while tensors:
        del tensors[0]
    stats = pool.stats()
    assert (stats["idle_bytes"], stats["idle_blocks"]) == (8 * MIB, 2)
    assert stats["returned"] == clean["returned"] + 2
    assert [floats(MIB).data_ptr() for _ in range(1)] == addresses[-1:]
    floats(16 * MIB)  # larger than the limit: never kept
    assert pool.stats()["idle_bytes"] <= 10 * MIB
    config.set(pool_limit_bytes=0)
    assert pool.stats()["idle_bytes"] == 0


def test_large_blocks_lie_on_huge_pages(clean):
    assert floats(MIB).data_ptr() % (2 * MIB) == 0


def advised_mib(first: int, nbytes: int) -> float:
    """How much of some memory is asked onto huge pages, by the flags of its mappings."""
    last, inside, found = first + nbytes, 0, 0
    with open("/proc/self/smaps") as f:
        for line in f:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(x, 16) for x in head.split("-"))
                inside = max(min(end, last) - max(begin, first), 0)
            elif head == "VmFlags:" and "hg" in line.split():
                found += inside
    return found / MIB


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="no flags of mappings here")
@pytest.mark.parametrize("slow, most", [(1 << 62, 38), (-1, 2)], ids=["fast", "slow"])
def test_huge_pages_are_asked_for_while_they_are_fast(slow, most):
    assert launcher.wait(60), launcher.reason()
    memory = mmap.mmap(-1, 40 * MIB)  # malloc's may have been asked onto huge pages before
    t = torch.frombuffer(memory, dtype=torch.float32)
    asked = launcher.native().advise_huge(t.data_ptr(), t.nbytes, slow) / MIB
    assert asked == advised_mib(t.data_ptr(), t.nbytes) and (asked == 2 if slow < 0 else asked >= most)
    t.fill_(1)
    assert float(t.sum()) == t.numel()


def test_idle_blocks_go_back_to_the_system(clean):
    config.set(pool_idle_seconds=0.2)
    before = resident_mib()
    floats(16 * MIB).fill_(1)
    assert pool.stats()["idle_bytes"] == 64 * MIB and resident_mib() > before + 50
    for _ in range(100):
        time.sleep(0.05)
        if not pool.stats()["idle_bytes"] and not pool.stats()["trimmer"]:
            break
    stats = pool.stats()
    assert (stats["idle_bytes"], stats["trimmer"]) == (0, 0) and resident_mib() < before + 20


def test_trim(clean):
    both = floats(MIB).fill_(1), floats(2 * MIB).fill_(1)
    del both
    assert pool.trim() == 12 * MIB
    assert pool.stats()["idle_blocks"] == 0 and pool.trim() == 0


def test_many_threads(clean):
    wrong = []

    def work(k: int) -> None:
        for i in range(50):
            x = floats(MIB // 8 + 1000 * (i % 7)).fill_(k)
            if not bool((x == k).all()):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    stats = pool.stats()
    assert not wrong and stats["used_blocks"] == clean["used_blocks"] and stats["used_bytes"] == clean["used_bytes"]


def test_autograd_and_copy_on_pool_tensors(clean):
    x = floats(MIB).fill_(2).requires_grad_()
    (x * x).sum().backward()
    assert bool((x.grad == 4).all()) and torch.equal(x.detach().clone(), x)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_a_working_pool(clean):
    config.set(pool_idle_seconds=0.1)
    floats(MIB).fill_(1)  # the parent's trimmer is at work
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)
            before = pool.stats()["idle_blocks"]
            floats(2 * MIB).fill_(1)
            deadline = time.monotonic() + 10
            while pool.stats()["idle_blocks"] and time.monotonic() < deadline:
                time.sleep(0.02)
            code = 0 if before == 1 and not pool.stats()["idle_blocks"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_python_pool_is_the_one_used_before_the_native_one(clean, monkeypatch):
    """A tensor of one pool outlives the change to the other."""
    monkeypatch.setattr(launcher, "_native", None)
    old = floats(MIB).fill_(5)
    used = python_pool.pool.stats()["used_blocks"]
    monkeypatch.undo()
    assert old[0] == 5
    del old
    assert python_pool.pool.stats()["used_blocks"] == used - 1
