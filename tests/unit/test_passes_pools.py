"""Max pools whose gradient a kernel makes: a byte is saved for each result, and nothing of the pool's input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fuser import targets
from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.passes import pools

pytestmark = pytest.mark.usefixtures("clean")
IMAGE, VOLUME = (2, 3, 12, 16), (2, 3, 7, 8, 9)


@pytest.fixture(autouse=True)
def gathered(monkeypatch):
    """As on a device where each element gathers its gradient; the CPU adds in order and keeps ATen's pools."""
    record = dataclasses.replace(targets.of("cpu"), ordered=False, window_dims=2)
    monkeypatch.setattr(pools.targets, "known", lambda device_type: record)
    yield
    torch._dynamo.reset()


def changed():
    return sum(p.changed for c in compilations() for p in c.passes if p.name == "pools_by_offsets")


def saved_bytes(f, own):
    found = {}

    def pack(t):
        found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = f()
    for t in own:
        found.pop(t.untyped_storage().data_ptr(), None)
    return result, sum(t.untyped_storage().nbytes() for t in found.values())


CASES = {
    "1d": ((2, 3, 40), lambda x: F.max_pool1d(x, 4)),
    "1d gaps": ((2, 3, 40), lambda x: F.max_pool1d(x, 5, 2, 2, 3)),
    "2d": (IMAGE, lambda x: F.max_pool2d(x, 2)),
    "2d overlaps": (IMAGE, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "2d ceil": (IMAGE, lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True)),
    "2d without a batch": (IMAGE[1:], lambda x: F.max_pool2d(x, 2)),
    "3d": (VOLUME, lambda x: F.max_pool3d(x, 2)),
    "3d ceil": (VOLUME, lambda x: F.max_pool3d(x, (2, 3, 2), ceil_mode=True)),
}  # fmt: skip


@pytest.mark.sampled(10, also=("1d gaps-dtype0-True", "2d-dtype1-True"))
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_offsets_are_saved(name, dtype, dynamic):
    size, pool = CASES[name]
    x = torch.randn(size).to(dtype)
    x.view(-1)[::7] = 0.5  # ties
    x.view(-1)[5] = float("nan")
    if len(size) == 4:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    f = torch.compile(lambda x: pool(x * 2), backend=fuser_backend, dynamic=dynamic)
    want = pool(x * 2)
    got, taken = saved_bytes(lambda: f(x), [x])
    assert changed() == 1 and taken <= want.numel()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    g = torch.randn_like(want)
    wide = x.detach().double().requires_grad_()  # eager adds bfloat16 up in bfloat16
    (expected,) = torch.autograd.grad(pool(wide * 2), wide, g.double())
    (found,) = torch.autograd.grad(got, x, g)
    assert found.stride() == torch.autograd.grad(want, x, g)[0].stride()
    torch.testing.assert_close(found, expected.to(dtype))


@pytest.mark.parametrize("f", [
    lambda x: F.max_pool2d(x * 2, 2, return_indices=True),
    lambda x: F.max_unpool2d(*F.max_pool2d(x * 2, 2, return_indices=True), 2),
    lambda x: F.max_pool2d(x * 2, 6),
    lambda x: F.max_pool3d(x[:, None] * 2, 3, 1),
])  # fmt: skip
def test_what_keeps_its_indices(f):
    """Those that others read, and those of windows that no kernel takes."""
    x = torch.randn(IMAGE, requires_grad=True)
    want = f(x)
    got = torch.compile(f, backend=fuser_backend)(x)
    torch.testing.assert_close(got, want)
    first = [r if isinstance(r, torch.Tensor) else r[0] for r in (got, want)]
    grads = [torch.autograd.grad(r.square().sum(), x)[0] for r in first]
    torch.testing.assert_close(*grads)
    assert changed() == 0


def test_two_pools_one_input():
    x = torch.randn(IMAGE, requires_grad=True)

    def f(x):
        y = torch.relu(x * 2)
        return F.max_pool2d(y, 2).sum() + F.max_pool2d(y, 3, 1, 1).square().sum()

    (want,) = torch.autograd.grad(f(x), x)
    (got,) = torch.autograd.grad(torch.compile(f, backend=fuser_backend)(x), x)
    assert changed() == 2
    torch.testing.assert_close(got, want)
