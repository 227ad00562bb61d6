"""Large outputs come from warm storages, and only from those that nobody else can reach."""

import copy
import io
import threading
import time

import pytest
import torch

import fuser
from fuser import config
from fuser.runtime import launcher, warm

N = warm.WARM_MIN // 4


def make(pool):
    return pool.empty_strided((N,), (1,), torch.float32)


class Launched:
    """Results that the native launcher makes. The first of a size, and those that it may not take, come from Python."""

    def __init__(self):
        assert launcher.wait(60), launcher.reason()
        self.handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: x * 2 + 1)))
        self.inputs = {dtype: torch.zeros(N, dtype=dtype) for dtype in (torch.float32, torch.int32)}
        self.stats = warm.outputs.stats
        for x in self.inputs.values():
            self.handle(x)
        warm.outputs.trim()
        make(self)  # the launcher takes what is held

    def empty_strided(self, size, stride, dtype):
        return self.handle(self.inputs[dtype])


@pytest.fixture
def pool():
    return warm.WarmOutputs()


@pytest.fixture
def launched(monkeypatch):
    """Its `asked` has the sizes that Python was asked for."""
    pool = Launched()
    pool.asked, take = [], warm.outputs._take
    monkeypatch.setattr(warm.outputs, "_take", lambda nbytes: pool.asked.append(nbytes) or take(nbytes))
    return pool


@pytest.fixture(params=["pool", "launched"])
def either(request):
    return request.getfixturevalue(request.param)


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
def test_memory_that_is_still_reachable_is_left_alone(either, hold):
    tensor = make(either)
    address = tensor.data_ptr()
    kept = hold(tensor)
    del tensor
    other = make(either)
    assert other.data_ptr() != address
    del other, kept


def test_the_launcher_finds_a_dropped_output_without_python(launched):
    hits, first = launched.stats()["hits"], make(launched)
    address = first.data_ptr()
    assert make(launched).data_ptr() != address and launched.asked == [4 * N]  # the first is still there
    del first
    launched.asked.clear()
    second = make(launched)
    assert launched.stats()["hits"] == hits + 2 and not launched.asked
    assert (second == 1).all() and second._version == 0 and not second._is_view() and second.grad_fn is None
    with config.override(output_limit_bytes=0):
        assert make(launched).data_ptr() != second.data_ptr() and launched.stats()["hits"] == hits + 2


def test_results_of_another_dtype_have_the_memory(launched):
    address = make(launched).data_ptr()
    for dtype in (torch.int32, torch.float32):
        launched.asked.clear()
        for asked in (1, 1):  # Python gives it the dtype, then the launcher takes it
            tensor = launched.empty_strided((N,), (1,), dtype)
            assert tensor.data_ptr() == address and tensor.dtype is dtype and len(launched.asked) == asked
            del tensor


def test_the_launcher_leaves_what_python_is_at(launched):
    tensor = make(launched)
    del tensor
    with warm.outputs._lock:
        taken = warm.outputs._held[-1]
        done = threading.Thread(target=make, args=(launched,))
        done.start()
        done.join(0.2)
        assert done.is_alive() and taken.is_free()
    done.join(60)
    assert not done.is_alive() and launched.asked


def test_the_storage_can_be_resized_and_is_forgotten_then(either):
    tensor = make(either)
    tensor.resize_(3 * N)
    tensor.fill_(1)
    del tensor
    assert make(either).untyped_storage().nbytes() == 4 * N
    stats = either.stats()
    assert (stats["held_bytes"], stats["held"]) == (4 * N, 1)


def test_shared_memory_is_forgotten(either):
    tensor = make(either)
    tensor.share_memory_()
    del tensor
    assert not make(either).is_shared()


def test_no_more_than_the_limit_is_held(pool):
    with config.override(output_limit_bytes=3 * 4 * N):
        tensors = [make(pool) for _ in range(5)]
        assert len({t.data_ptr() for t in tensors}) == 5
        assert pool.stats()["held"] == 3
        assert pool.trim() == 3 * 4 * N and pool.stats()["held"] == 0


def test_nothing_is_held_without_calls(pool):
    before = config.pool_idle_seconds
    config.set(pool_idle_seconds=0.05)  # for the process: another thread looks
    try:
        make(pool)
        deadline = time.monotonic() + 120
        while pool.stats()["held"] and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        config.set(pool_idle_seconds=before)
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


def test_results_of_inference_mode_are_inference_tensors(either):
    for _ in range(3):
        with torch.inference_mode():
            assert make(either).is_inference()
            assert make(either).is_inference()
        assert not make(either).is_inference()
        assert not make(either).is_inference()


def test_steps_that_take_long_find_what_they_left(pool):
    with config.override(pool_idle_seconds=0.2):
        pool._watch = lambda: None
        make(pool)
        pool.clock.last -= 0.5  # the call before was so long ago
        make(pool)
        make(pool)  # of the same step
        pool.clock.last -= 0.7
        pool._on_timer()
        assert pool.stats()["held"] == 1
        pool.clock.last -= 0.7
        pool._on_timer()
        assert pool.stats()["held"] == 0
