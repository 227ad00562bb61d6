"""Large outputs come from warm storages, and only from those that nobody else can reach."""

import copy
import io
import time

import pytest
import torch

from fuser import config
from fuser.runtime import warm

N = warm.WARM_MIN // 4


def make(pool):
    return pool.empty_strided((N,), (1,), torch.float32)


@pytest.fixture
def pool():
    return warm.WarmOutputs()


def test_a_dropped_output_is_used_again(pool):
    first = make(pool)
    address = first.data_ptr()
    del first
    assert make(pool).data_ptr() == address
    assert pool.stats()["hits"] == 1


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[5:7],
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: t.view(torch.int32),
        lambda t: torch.from_dlpack(t),
        lambda t: torch._lazy_clone(t),
        lambda t: memoryview(t.numpy())[3:9],
    ],
    ids=["tensor", "view", "detached", "numpy", "storage", "dtype", "dlpack", "lazy-clone", "buffer"],
)
def test_memory_that_is_still_reachable_is_left_alone(pool, hold):
    tensor = make(pool)
    address = tensor.data_ptr()
    kept = hold(tensor)
    del tensor
    other = make(pool)
    assert other.data_ptr() != address
    del other, kept


def test_the_storage_can_be_resized_and_is_forgotten_then(pool):
    tensor = make(pool)
    tensor.resize_(3 * N)
    tensor.fill_(1)
    del tensor
    assert make(pool).untyped_storage().nbytes() == 4 * N
    assert pool.stats() == {"held_bytes": 4 * N, "held": 1, "hits": 0, "misses": 2}


def test_shared_memory_is_forgotten(pool):
    tensor = make(pool)
    tensor.share_memory_()
    del tensor
    assert not make(pool).is_shared()


def test_no_more_than_the_limit_is_held(pool):
    with config.override(output_limit_bytes=3 * 4 * N):
        tensors = [make(pool) for _ in range(5)]
        assert len({t.data_ptr() for t in tensors}) == 5
        assert pool.stats()["held"] == 3
        assert pool.trim() == 3 * 4 * N and pool.stats()["held"] == 0


def test_nothing_is_held_without_calls(pool):
    with config.override(pool_idle_seconds=0.05):
        make(pool)
        deadline = time.monotonic() + 120
        while pool.stats()["held"] and time.monotonic() < deadline:
            time.sleep(0.02)
    assert pool.stats()["held"] == 0


def test_size_stride_and_copies_are_those_of_an_ordinary_tensor(pool):
    size, stride = (N // 64, 2, 32), (32, N // 2, 1)
    tensor = pool.empty_strided(size, stride, torch.float32)
    assert tensor.shape == size and tensor.stride() == stride and tensor.untyped_storage().nbytes() == 4 * N
    tensor.fill_(2)
    assert torch.equal(copy.deepcopy(tensor), tensor)
    file = io.BytesIO()
    torch.save(tensor, file)
    assert len(file.getvalue()) < 4 * N + 10_000
    with torch.inference_mode():
        assert make(pool).is_inference()
    assert not make(pool).is_inference()


def test_steps_that_take_long_find_what_they_left(pool):
    with config.override(pool_idle_seconds=0.2):
        pool._watch = lambda: None
        make(pool)
        pool._last -= 0.5  # the call before was so long ago
        make(pool)
        make(pool)  # of the same step
        pool._last -= 0.7
        pool._on_timer()
        assert pool.stats()["held"] == 1
        pool._last -= 0.7
        pool._on_timer()
        assert pool.stats()["held"] == 0
