"""Attention whose mask leaves out keys at known places: which keys are left, results and gradients."""

from __future__ import annotations

import math
import os
import sys

import pytest
import torch
import torch.nn.functional as F

from fuser.attention import library
from fuser.attention.library import BACKWARD, FORWARD, attend, attend_backward
from fuser.attention.products import product_dtype
from fuser.attention.reach import BLOCK, Reach
from fuser.frontends.dynamo import compilations
from fuser.passes import attention_providers as providers
from fuser.passes import attention_reach
from fuser.passes.attention_providers import ATEN, PARTS
from tests import forked
from tests.unit.test_attention_by_parts import exact

pytestmark = pytest.mark.usefixtures("clean")
N = 300


def ordered(q, k=None):
    """The place of each query less that of each key."""
    keys = q.shape[-2] if k is None else k.shape[-2]
    return torch.arange(q.shape[-2])[:, None] - torch.arange(keys)


def window(q, k, v, pad):
    d = ordered(q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(d >= 0) & (d < 40))


def around(q, k, v, pad):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ordered(q).abs() < 30)


def padded(q, k, v, pad):
    mask = (ordered(q) >= 0) & pad[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def written(q, k, v, pad):
    d = ordered(q)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill((d < 0) | (d > 50), torch.finfo(q.dtype).min)
    return torch.softmax(scores, -1) @ v


def written_padded(q, k, v, pad):
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(ordered(q) < 0, -math.inf)
    return torch.softmax(scores.masked_fill(~pad[:, None, None, :], -math.inf), -1) @ v


def sloped(q, k, v, pad):
    """ALiBi in a window."""
    d = ordered(q)
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1)
    bias = (-slopes[:, None, None] * d.abs()).to(q.dtype).masked_fill((d < 0) | (d > 60), -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def triangular(q, k, v, pad):
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril() & pad[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def lost(q, k, v, pad):
    """Whole blocks of queries attend to nothing."""
    d = ordered(q)
    mask = (d >= 0) & (d < 40) & (torch.arange(q.shape[-2])[:, None] >= 2 * BLOCK)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def skewed(q, k, v, pad):
    """More keys than queries, of which the last belong to the queries."""
    return F.scaled_dot_product_attention(q[:, :, :70], k, v, attn_mask=ordered(q[:, :, :70], k).add(230).abs() < 20)


FUNCTIONS = (window, around, padded, written, sloped, triangular, lost, skewed)
# Rows of `written_padded` that attend to nothing are no numbers, and their gradients not those of eager.
CASES = [*((f, grad) for f in FUNCTIONS for grad in (False, True)), (written_padded, False)]


def operands(dtype, heads=2, n=N):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, heads, 16).to(dtype).transpose(1, 2) for _ in range(3))
    pad = torch.ones(2, n, dtype=torch.bool)
    pad[0, 170:] = False
    pad[1, :90] = False  # rows that attend to nothing
    return q, k, v, pad


@pytest.fixture
def noted(monkeypatch):
    """The shares of scores that were found, with contests that are won by parts."""
    found = []
    monkeypatch.setattr(providers, "is_faster_written", lambda a: False)
    monkeypatch.setattr(providers, "choose", lambda a: found.append(a) or (ATEN if a.reach is None else PARTS))
    return found


def run(function, args, grad):
    q, k, v, pad = args
    q, k, v = (t.detach().clone().requires_grad_(grad) for t in (q, k, v))
    out = function(q, k, v, pad)
    if not grad:
        return [out]
    return [out, *torch.autograd.grad(out, (q, k, v), torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))]


@pytest.mark.sampled(19, also=("triangular-False-dtype2", "written-False-dtype0"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("function, grad", CASES)
def test_results(function, grad, dtype, noted):
    args = operands(dtype)
    eager = run(function, args, grad)
    wide = run(function, [t.double() if t.is_floating_point() else t for t in args], grad)
    got = run(torch.compile(function, backend="fuser"), args, grad)
    fast = dtype.itemsize < 4 and product_dtype(dtype) is dtype
    few = grad and function is written and fast  # its products are kept
    assert few or {a.backward for a in noted if a.reach is not None} == {False, *([True] if grad else [])}
    assert got[0].stride() == eager[0].stride()
    for a, b, c in zip(got, eager, wide):
        assert torch.equal(a.isnan(), b.isnan())
        far, near = ((t.double() - c).nan_to_num().abs().max() for t in (a, b))
        assert far <= 2 * near + 4 * torch.finfo(dtype).eps * c.nan_to_num().abs().max()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("function, grad", [c for c in CASES if c[0] not in (written, skewed)])
def test_every_length_has_its_own_keys(function, grad, noted, monkeypatch):
    """Of a graph for all lengths the mask is read again for each."""
    used = []
    monkeypatch.setattr(Reach, "of", lambda self, rows, of=Reach.of: used.append(self) or of(self, rows))
    compiled = torch.compile(function, backend="fuser")
    for n in (N, 420, 257):
        args = operands(torch.float32, n=n)
        torch.testing.assert_close(run(compiled, args, grad), run(function, args, grad), equal_nan=True)
        assert {r.keys for r in used if r.keys != N} <= {n}
        assert any(r.keys == n for r in used)
        used.clear()
    assert len(compilations()) == 2 * (1 + grad)  # of the first length, and of all others


def reach_in(function, n=N):
    """The reach that the compiler finds for the attention of a function."""
    found = []
    whole = attention_reach.reach_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "is_faster_written", lambda a: False)
        patch.setattr(attention_reach, "reach_of", lambda *args: found.append(whole(*args)) or found[-1])
        torch.compile(function, backend="fuser")(*operands(torch.float32, n=n))
    return found[0]


def test_the_keys_of_a_window():
    assert reach_in(window).ranges == ((0, 64), (0, 128), (64, 192), (128, 256), (192, 300))
    assert reach_in(around).ranges == ((0, 128), (0, 192), (64, 256), (128, 300), (192, 300))


def test_the_keys_of_a_causal_mask_with_padding():
    expected = ((0, 64), (0, 128), (0, 192), (0, 256), (0, 300))
    assert reach_in(padded).ranges == reach_in(triangular).ranges == reach_in(written_padded).ranges == expected


@pytest.mark.parametrize("grad", (False, True), ids=("inference", "training"))
def test_queries_that_are_masked_as_a_whole(grad, noted):
    """By a finite number: means of all values, known to the graph or not, beside queries that keep some keys."""

    def by_numbers(q, k, v, pad):
        scores = (q @ k.mT / 4).masked_fill((ordered(q) < 0) | (ordered(q) > 30), -1e30)
        return torch.softmax(scores.masked_fill((torch.arange(N) < 40)[:, None], -1e30), -1) @ v

    def by_padding(q, k, v, pad):
        bias = torch.where((ordered(q) >= 0) & pad[:, None, None, :], 0.0, torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def by_fills(q, k, v, pad):
        scores = (q @ k.mT / 4).masked_fill(~((ordered(q) >= 0) & pad[:, None, None, :]), -1e9)
        return torch.softmax(scores, -1) @ v

    def by_choice(q, k, v, pad):
        scores = torch.where((ordered(q) >= 0) & pad[:, None, None, :], q @ k.mT / 4, torch.finfo(q.dtype).min)
        return torch.softmax(scores, -1) @ v

    args = operands(torch.float32)
    alike = (by_numbers, by_fills, by_choice)
    for function in alike if grad else (*alike, by_padding):  # ATen's own gradient is wrong there
        torch.testing.assert_close(
            run(torch.compile(function, backend="fuser"), args, grad), run(function, args, grad)
        )
    assert all(a.reach.checked for a in noted if a.reach is not None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("grad", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("fill", (-1e30, -math.inf))
def test_masks_of_one_key(fill, grad, noted):
    """What such a mask says of a query holds for all keys."""

    def rows(q, k, v, pad):
        bias = torch.where(torch.arange(N)[:, None] >= 2 * BLOCK, fill, 0.0).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    args = operands(torch.float32)
    got, expected = (run(f, args, grad) for f in (torch.compile(rows, backend="fuser"), rows))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert any(a.reach is not None for a in noted)


def test_lost_rows_of_a_mask_of_fewer_dims(noted):
    """NaN in rows of each batch, put over a mask that all batches share."""

    def shared(q, k, v, pad):
        places = torch.arange(N)
        bias = torch.where(places[:, None] - places > 0, -math.inf, 0.0).t()
        bias = bias.masked_fill((pad.cumsum(1) < 1)[:, None, :, None], math.nan)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    args = operands(torch.float32)
    got, expected = torch.compile(shared, backend="fuser")(*args), shared(*args)
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert any(a.reach is not None for a in noted)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_queries_that_are_masked_by_finite_numbers(dtype, noted):
    """ATen's own, whose weights of such queries are 1 for each key: the numbers absorb the logarithms of sums."""

    def padded(q, k, v, pad):
        least = torch.finfo(q.dtype).min
        bias = torch.where((ordered(q) >= 0) & pad[:, None, None, :], 0.0, least).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    args = operands(dtype)
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-4
    got, expected = (run(f, args, True) for f in (torch.compile(padded, backend="fuser"), padded))
    for a, b in zip(got, expected):
        assert (a - b).abs().max() <= tolerance * b.abs().max()
    assert any(a.backward and a.reach is not None for a in noted)


def test_nothing_is_known_of_a_mask_from_outside():
    def given(q, k, v, pad):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=pad[:, None, None, :])

    assert reach_in(given) is None


def test_a_mask_of_numbers_that_may_not_be_numbers_leaves_every_key():
    """Minus infinity and NaN are NaN: a key that is masked so must be read."""
    torch.manual_seed(0)
    q, k, v, _ = operands(torch.float32)
    given = torch.zeros(N, N)
    given[5, N - 1] = math.nan

    def added(q, k, v, given):
        causal = torch.zeros(N, N).masked_fill(ordered(q) < 0, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal + given)

    expected = added(q, k, v, given)
    got = torch.compile(added, backend="fuser")(q, k, v, given)
    assert torch.equal(got.isnan(), expected.isnan()) and expected.isnan().any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", ((1, 4, 2, 200, 260), (2, 6, 1, 65, 500), (1, 2, 2, 64, 64), (3, 2, 2, 130, 70)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_by_parts_beside_float64(dtype, sizes, monkeypatch):
    """Ranges of every kind: overlapping, empty, of one block, behind the last."""
    batch, heads, groups, rows, keys = sizes
    monkeypatch.setattr(library, "SCORES", 1 << 15)  # several chunks
    torch.manual_seed(1)
    q, grad = (torch.randn(batch, heads, rows, 24).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, groups, keys, 24).to(dtype) for _ in range(2))
    blocks = -(-rows // BLOCK)
    kinds = [(0, 0), (BLOCK, min(3 * BLOCK, keys)), (0, keys), (keys // 2, keys), (0, 1)]
    ranges = tuple((min(a, b), b) for a, b in (kinds[n % len(kinds)] for n in range(blocks)))
    reach = Reach(ranges, rows, keys)
    mask = reach.masked(torch.randn(1, heads, rows, keys)).to(dtype)
    wanted = exact(q, k, v, False, mask, 0.2, grad)
    out, sums = attend(q, k, v, False, mask, 0.2, False, True, reach)
    gradients = attend_backward(grad, q, k, v, sums, False, mask, 0.2, False, reach)
    aten, logs = FORWARD(q, k, v, 0.0, False, attn_mask=mask, scale=0.2)
    of_aten = BACKWARD(grad, q, k, v, aten, logs, 0.0, False, attn_mask=mask, scale=0.2)
    torch.testing.assert_close(sums, logs, rtol=1e-2, atol=1e-2)
    for got, near, right in zip((out, *gradients), (aten, *of_aten), wanted):
        far, limit = ((t.double() - right).abs().max() for t in (got, near))
        assert far <= 2 * limit + 2 * torch.finfo(dtype).eps * right.abs().max()


def test_a_share_is_that_of_scores():
    assert Reach(((0, 10), (0, 0)), 100, 10).share == pytest.approx(0.64)


def test_the_first_graph_of_a_process():
    """Passes are imported when a graph first needs them, while its tensors are fake."""
    text = (
        "import torch, torch.nn.functional as F\n"
        "def f(q):\n"
        "    d = torch.arange(300)[:, None] - torch.arange(300)\n"
        "    bias = (torch.arange(1.0, 2.0)[:, None, None] * d).masked_fill((d < 0) | (d > 9), -float('inf'))\n"
        "    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias[None])\n"
        "q = torch.randn(1, 1, 300, 16)\n"
        "torch.testing.assert_close(torch.compile(f, backend='fuser')(q), f(q))\n"
    )
    done = forked.run(["-c", text], os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, dynamo=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_it_can_be_switched_off(noted):
    args = operands(torch.float32)
    torch.compile(window, backend="fuser", options={"disable_passes": "bound_attention"})(*args)
    assert all(a.reach is None for a in noted)

