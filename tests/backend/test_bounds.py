"""`config.check_bounds`: kernels that reach outside of a buffer raise an error; all others give the same results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuser import config, errors, fusion_handle, register_fusion
from fuser.interface import kernel_spec
from tests import compare, device

pytestmark = pytest.mark.skipif(device.test_device() != "cpu", reason="kernels in Triton check no bounds")


def shifted(p, u, h):
    """An interleaving that is read one element earlier."""
    y = torch.stack([p, u.reshape(-1)], 1).reshape(-1)
    return torch.stack([torch.cat([h, y[:-1] * 2]), y], 1)


SHIFTED = (torch.randn(6), torch.randn(2, 3), torch.randn(1))


def test_an_offset_outside_of_a_buffer_is_an_error(monkeypatch):
    """With every quotient taken for one that is not negative, remainders of -1 are -1, and so is an offset."""
    hopeful = lambda e, extents: all(c >= 0 for _, c in e.terms)  # noqa: E731
    monkeypatch.setattr("fuser.cpu.text.is_nonnegative", hopeful)
    with config.override(check_bounds=True):
        call = fusion_handle(register_fusion(torch.fx.symbolic_trace(shifted), functional=True))
        with pytest.raises(errors.BoundsError, match=r"k0_pw_\w+ uses offset -\d+ of in\d, which has \d+ elements"):
            call(*SHIFTED)
        with pytest.raises(errors.BoundsError):  # in every call
            call(*SHIFTED)


def long_and_short(x, y):
    return torch.softmax(x * 2, -1) + y.t(), (x + y.t()).sum(0), torch.cat([x, y.t()[:, 1:]], 1).flip(1)


def halves(x, y):
    return F.pad(x.relu(), (1, 2)), x.to(torch.float32).sum(1), x.roll(3, 1), y.flip(1) + 1


def scans(x, y):
    return x.cumsum(1), (x * y).cumsum(0), x.cummax(1)[0], y.logcumsumexp(1)


def gathers(x, index):
    return x[index], x.index_add(0, index, x[index] * 2), F.embedding(index, x).sum(1), x.gather(0, index[:, None])


def extremes(x, y):
    return x.argmax(1), x.amax(0), (x + y).amin(1), (x * y).mean(1), (x - y).argmin(0)


def matrix(rows, columns, dtype=torch.float32):
    return torch.randn(rows, columns).to(dtype)


CASES = {
    "long_and_short": (long_and_short, lambda n: (matrix(n, 700), matrix(700, n))),
    "float16": (halves, lambda n: (matrix(n, 600, torch.float16), matrix(n, 600, torch.float16))),
    "bfloat16": (halves, lambda n: (matrix(n, 33, torch.bfloat16), matrix(n, 33, torch.bfloat16))),
    "scans": (scans, lambda n: (matrix(n, 600), matrix(n, 600))),
    "gathers": (gathers, lambda n: (matrix(n + 3, 40), torch.arange(n))),
    "extremes": (extremes, lambda n: (matrix(n, 530), matrix(n, 530))),
    "long sum": (lambda x: (x.sum(), x.argmax(), (x * 2).sum(0)), lambda n: (matrix(n, 70_000),)),
    "bytes": (lambda x: (x.flip(1), F.pad(x, (3, 1)), ~x), lambda n: (torch.randint(0, 9, (n, 30)).byte(),)),
}


@pytest.mark.parametrize("name", CASES)
def test_checked_kernels_give_eagers_results(name):
    """All kinds of nests, in one kernel for several sizes, without vectors but with every offset checked."""
    f, make = CASES[name]
    with config.override(check_bounds=True):
        key = register_fusion(torch.fx.symbolic_trace(f), functional=True)
        call = fusion_handle(key)
        for n in (5, 17, 2):
            args = make(n)
            got = compare.leaves(call(*args))
            for a, b in zip(got, compare.leaves(f(*args)), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    spec = kernel_spec(key)
    assert spec.store.kernels and not spec.store.fallbacks
    assert all("fuser_checked<" in k.source for k in spec.store.kernels)
    assert not any("* __restrict in" in k.source or "prefetch(" in k.source for k in spec.store.kernels)


def test_checks_are_part_of_a_kernels_identity():
    graph = torch.fx.symbolic_trace(shifted)
    plain = register_fusion(graph)
    with config.override(check_bounds=True):
        checked = register_fusion(graph)
    assert plain != checked
    fusion_handle(plain)(*SHIFTED)
    assert "fuser_checked" not in kernel_spec(plain).store.kernels[0].source


def test_an_index_out_of_range_is_still_eagers_error():
    with config.override(check_bounds=True):
        call = fusion_handle(register_fusion(torch.fx.symbolic_trace(gathers), functional=True))
        with pytest.raises(IndexError):
            call(matrix(4, 40), torch.tensor([0, 9, 1]))


