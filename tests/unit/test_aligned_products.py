"""Products of matrices with unaligned rows, made of padded matrices: on the CPU here, without a race."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser.passes import aligned_products, runner, sliced_products
from fuser.passes.aligned_products import Product, runs_of

# rows, inner, columns: each odd or a multiple of 8, one even
SIZES = ((24, 16, 31), (13, 21, 30), (24, 21, 40), (13, 21, 31))
FUNCTIONS = (lambda a, b, c: a @ b, lambda a, b, c: torch.addmm(c, a, b), lambda a, b, c: (a @ b).relu() + 1)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """The pass takes products of all sizes on the CPU; `asked` has those that it would race."""
    asked: list[Product] = []

    def is_faster(product, device):
        asked.append(product)
        return True

    monkeypatch.setattr(runner, "has_device", lambda graph, device_type: True)
    monkeypatch.setattr(aligned_products, "DEVICE", "cpu")
    monkeypatch.setattr(aligned_products, "LEAST_WORK", 0)
    monkeypatch.setattr(aligned_products, "is_faster", is_faster)
    return asked


def compiled(f, **options):
    torch._dynamo.reset()
    return torch.compile(f, backend="fuser", options=options)


def check(found, f, args):
    """A result is as near to float64 as eager's, and has eager's strides and a memory of its own size."""
    want = f(*args)
    exact = f(*(a.double() for a in args))
    for mine, eager, true in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, want, exact))):
        assert mine.dtype is eager.dtype and mine.stride() == eager.stride() and mine.shape == eager.shape
        assert mine.untyped_storage().nbytes() == eager.untyped_storage().nbytes()
        scale = true.abs().max()
        assert (mine.double() - true).abs().max() <= (eager.double() - true).abs().max() + 0.01 * scale


def matrix(rows, columns, turned, dtype):
    return torch.randn(columns, rows).to(dtype).t() if turned else torch.randn(rows, columns).to(dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)), ids=str)
def test_results(turned, everywhere):
    for i, (m, k, n) in enumerate(SIZES):
        dtype, f = (torch.bfloat16, torch.float16)[i % 2], FUNCTIONS[i % 3]
        args = matrix(m, k, turned[0], dtype), matrix(k, n, turned[1], dtype), torch.randn(n).to(dtype)
        everywhere.clear()
        with torch.no_grad():
            check(compiled(f)(*args), f, args)
        steps = (m if turned[0] else k), (k if turned[1] else n), n
        assert bool(everywhere) == any(s % 8 for s in steps)


def loss(x, w, target):
    return F.cross_entropy((x @ w.t()).float(), target)


def test_a_head_with_an_odd_vocabulary(everywhere):
    """Logits and their gradient are padded once, and the loss reads the padded logits."""
    x, w = torch.randn(32, 16).bfloat16().requires_grad_(), torch.randn(101, 16).bfloat16().requires_grad_()
    target = torch.randint(101, (32,))
    found = torch.autograd.grad(compiled(loss)(x, w, target), (x, w))
    wide = x.double(), w.double()
    want = torch.autograd.grad(loss(x, w, target), (x, w))
    exact = torch.autograd.grad(loss(*wide, target), (x, w))
    for mine, eager, true in zip(found, want, exact):
        assert mine.stride() == eager.stride() and mine.untyped_storage().nbytes() == eager.untyped_storage().nbytes()
        assert (mine - true).abs().max() <= 2 * (eager - true).abs().max() + 1e-4
    assert [p.more for p in everywhere] == [(0, 0, 3), (3, 0, 0), (0, 3, 0)] or [p.more for p in everywhere] == [
        (0, 0, 3), (0, 3, 0), (3, 0, 0)
    ]  # fmt: skip
    text = fuser.explain(compiled(loss), x.detach(), w.detach(), target)
    assert str(text)


def test_nan_and_infinity_stay_where_they_are(everywhere):
    """Zeros that are added meet zeros alone."""
    a, b = torch.randn(16, 21).bfloat16(), torch.randn(21, 31).bfloat16()
    a[3], b[:, 5] = float("inf"), float("nan")
    with torch.no_grad():
        found = compiled(torch.mm)(a, b)
    assert everywhere and torch.equal(found.isnan(), (a @ b).isnan()) and torch.equal(found.isinf(), (a @ b).isinf())


def test_symbolic_rows(everywhere):
    f = torch.compile(lambda a, b: (a @ b).relu(), backend="fuser", dynamic=True)
    torch._dynamo.reset()
    b = torch.randn(16, 31).bfloat16()
    for m in (8, 24, 40):
        a = torch.randn(m, 16).bfloat16()
        torch._dynamo.mark_dynamic(a, 0)
        with torch.no_grad():
            check(f(a, b), lambda a, b: (a @ b).relu(), (a, b))


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(16, 21), torch.randn(21, 32)),  # float32
        (torch.randn(16, 24).bfloat16(), torch.randn(24, 40).bfloat16()),  # aligned
        (torch.randn(16, 48).bfloat16()[:, :21], torch.randn(40, 21).bfloat16()[:, :21].t()[:, :40]),
    ],
    ids=["float32", "aligned", "slices"],
)
def test_left_alone(args, everywhere):
    with torch.no_grad():
        check(compiled(torch.mm)(*args), torch.mm, args)
    if args[0].dtype is torch.float32 or args[0].shape[1] == 24:
        assert not everywhere


@pytest.mark.parametrize("settings", [{"numerics": "eager"}, {"deterministic": "yes"}], ids=str)
def test_settings(settings, everywhere):
    a, b = torch.randn(16, 21).bfloat16(), torch.randn(21, 31).bfloat16()
    with torch.no_grad(), fuser.config.override(**settings):
        check(compiled(torch.mm)(a, b), torch.mm, (a, b))
    assert not everywhere


@pytest.mark.parametrize("bias", [False, True])
def test_returned_slices_are_made_in_parts(bias, monkeypatch):
    """Logits that the graph returns take the memory of eager's and of one part; those that a kernel reads do not."""
    made = []

    def sliced_product(*args):
        made.append(args)
        return plain(*args)

    plain = sliced_products.sliced_product
    monkeypatch.setattr(sliced_products, "sliced_product", sliced_product)
    monkeypatch.setattr(sliced_products, "DEVICE", "cpu")
    monkeypatch.setattr(sliced_products, "PART_BYTES", 256 * 1008 * 2)
    a, w, b = torch.randn(2, 300, 64).half(), torch.randn(1001, 64).half(), torch.randn(1001).half()

    def head(a, w, b):
        return F.linear(a, w, b if bias else None)

    no_onednn = {"disable_passes": "products_in_float32,large_products,linear_to_onednn"}
    with torch.no_grad():
        check(compiled(head, **no_onednn)(a, w, b), head, (a, w, b))
        assert len(made) == 1 and made[0][0] == 1001 and made[0][2].shape == (64, 1008)
        compiled(lambda a, w, b: head(a, w, b).relu(), **no_onednn)(a, w, b)
    assert len(made) == 1


def test_contestants():
    """What races has the product's sizes; padding both operands and slicing the result counts as copies."""
    product = Product(13, 21, 31, torch.bfloat16, True, False, True, (3, 3, 1))
    runs = runs_of(product, torch.device("cpu"))
    assert runs["as it is"]().shape == (13, 31) and runs["padded"]().shape == (16, 32)
