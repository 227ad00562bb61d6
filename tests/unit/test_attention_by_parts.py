"""Attention in 16-bit floats on the CPU by products and a kernel: results, gradients, and who is chosen when."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser.attention import library, products
from fuser.attention.library import attend, attend_backward
from fuser.contests.records import Choice
from fuser.cpu import attention as own
from fuser.frontends.dynamo import compilations
from fuser.passes import attention_providers as providers
from fuser.passes.attention_providers import ATEN, BACKWARD, FORWARD, PARTS, ROUNDED_PARTS, WRITTEN
from tests.attention_family import LAYOUTS
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("clean")

SIZES = {  # batch, heads, heads of keys, queries, keys, width
    "square": (2, 4, 4, 40, 40, 16),
    "grouped": (1, 4, 2, 60, 56, 32),
    "one head of keys": (3, 6, 1, 17, 33, 24),
    "more keys than queries": (2, 3, 3, 20, 50, 16),
    "more queries than keys": (2, 3, 3, 50, 20, 16),
    "one query": (2, 3, 3, 1, 50, 16),
    "one key": (2, 3, 3, 7, 1, 16),
    "long": (1, 2, 2, 300, 280, 16),
}
MASKS = {
    "none": None,
    "of all": lambda b, h, m, n: torch.randn(1, 1, m, n),
    "of each head": lambda b, h, m, n: torch.randn(b, h, m, n),
    "of keys": lambda b, h, m, n: torch.randn(b, 1, 1, n),
    "a row left out": lambda b, h, m, n: torch.zeros(1, 1, m, n).index_fill(2, torch.tensor(0), -math.inf),
    "keys left out": lambda b, h, m, n: torch.zeros(b, 1, 1, n).index_fill(3, torch.arange(n // 2), -math.inf),
}
DTYPES = (torch.bfloat16, torch.float16)


def exact(q, k, v, causal, mask, scale, grad):
    """The result and the gradients in float64; 0 where a query attends to nothing."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ keys.mT * scale
    if mask is not None:
        scores = scores + mask.double()
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    out = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0) @ values
    out.backward(grad.double())
    return [out.detach(), q.grad, k.grad, v.grad]


def written(q, k, v, causal, mask, scale, grad):
    """What products in 16 bits give."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ keys.mT * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    out = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0) @ values
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def by_aten(q, k, v, causal, mask, scale, grad):
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    named = {"attn_mask": mask, "scale": scale}
    out, sums = FORWARD(q, keys, values, 0.0, causal, **named)
    got = [out, *BACKWARD(grad, q, keys, values, out, sums, 0.0, causal, **named)]
    return got, sums


def operands(size, dtype, turned):
    b, h, g, m, n, d = SIZES[size]

    def heads(count, rows):
        shape = (b, rows, count, d) if turned else (b, count, rows, d)
        t = torch.randn(shape).to(dtype)
        return t.transpose(1, 2) if turned else t

    return heads(h, m), heads(g, n), heads(g, n), heads(h, m)


def distance(a, b):
    return float((a.double() - b).abs().max())


MADE = set(pairwise(SIZES, DTYPES, MASKS, (False, True), (False, True)))


@pytest.mark.sampled(8, also=("more keys than queries-torch.bfloat16",))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_results_and_gradients(size, dtype, monkeypatch):
    """No further from float64 than twice ATen's fused attention, or written products where scores may be rounded."""
    b, h, _, m, n, d = SIZES[size]
    for number, (name, causal, rounded) in enumerate(itertools.product(MASKS, (False, True), (False, True))):
        if (size, dtype, name, causal, rounded) not in MADE:
            continue
        monkeypatch.setattr(library, "SCORES", (1 << 21, 1 << 12)[number % 3 == 0])  # in one chunk, in many
        q, k, v, grad = operands(size, dtype, number % 2 == 1)
        mask = MASKS[name] and MASKS[name](b, h, m, n).to(dtype)
        scale = d**-0.5
        given = causal, mask, scale
        right = exact(q, k, v, *given, grad)
        beside, sums_beside = by_aten(q, k, v, *given, grad)
        allowed = written(q, k, v, *given, grad) if rounded else beside
        monkeypatch.setattr(products, "LEAST_PAIRED", (0, 1 << 62)[number % 4 < 2])  # scores as two tensors, as one
        out, sums = attend(q, k, v, *given, rounded, True)
        got = [out, *attend_backward(grad, q, k, v, sums, *given, rounded)]
        assert distance(sums, sums_beside.double()) < (0.1 if rounded else 1e-2)
        assert out.stride() == beside[0].stride() and got[1].stride() == beside[1].stride()
        for what, one, other, true in zip("oqkv", got, allowed, right):
            assert one.dtype is dtype
            if other.shape != true.shape:  # ATen's gradients of repeated heads
                other = other.double().unflatten(1, (true.shape[1], -1)).sum(2).to(dtype)
            far = max(2 * distance(other, true), 4 * torch.finfo(dtype).eps * float(true.abs().max()))
            assert distance(one, true) <= far, (what, name, causal, rounded)


def test_two_products_of_16_bits_are_as_good_as_one_in_float32():
    """What the product in bfloat16 loses, the product less that gives: the library subtracts before it rounds."""
    if not products._adds_unrounded(torch.bfloat16):
        pytest.skip("this machine's library rounds a product before it adds to it")
    a, b = (torch.randn(6, n, 64).to(torch.bfloat16) for n in (128, 96))
    high, rest = products.Ways(torch.bfloat16, torch.bfloat16, True).scores(a, b)
    exact = a.double() @ b.double().mT
    assert distance(high.double() + rest.double(), exact) < 2**-15 * float(exact.abs().max()) < distance(high, exact)


@pytest.mark.parametrize("adds", [False, True])
def test_exact_scores_never_rely_on_a_library_that_rounds(adds, monkeypatch):
    monkeypatch.setattr(products, "_adds_unrounded", lambda dtype: adds)
    monkeypatch.setattr(products, "product_dtype", lambda dtype: dtype)
    q = torch.randn(1, 4, 64, 32, dtype=torch.bfloat16)
    assert not products.Ways.of(q.to(torch.float16), 64, False).paired
    ways = [products.Ways.of(q, keys, rounded) for keys, rounded in ((64, False), (2, False), (64, True))]
    first = [(w.first, w.paired) for w in ways]
    exact = (torch.bfloat16, True) if adds else (torch.float32, False)
    assert first == [exact, (torch.float32, False), (torch.bfloat16, False)]


def test_infinite_scores():
    """A key of infinite elements: no NaN comes of the two products that others would not give."""
    q, k, v = (torch.rand(1, 2, 64, 32).to(torch.bfloat16) + 0.5 for _ in range(3))
    k[:, :, 5] = -math.inf
    out, sums = attend(q, k, v, False, None, 0.25, False, True)
    want, sums_beside = FORWARD(q, k, v, 0.0, False, scale=0.25)
    assert not want.isnan().any()
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sums, sums_beside, rtol=1e-3, atol=1e-3)


def test_a_library_that_is_switched_off():
    """Products of 16-bit floats are then slow, and are rounded before anything is added."""
    q, k, v, _ = (t * 4 for t in operands("long", torch.bfloat16, False))
    attend(q, k, v, False, None, 0.25, False, False)  # what is asked once has been
    with torch.backends.mkldnn.flags(enabled=False):
        assert products.product_dtype(torch.bfloat16) is torch.float32
        out, _ = attend(q, k, v, False, None, 0.25, False, False)
    right = exact(q, k, v, False, None, 0.25, torch.zeros_like(q))[0]
    assert distance(out, right) <= torch.finfo(torch.bfloat16).eps * float(right.abs().max())


@pytest.mark.parametrize("shape", [(2000, 1, 5, 64), (400, 3, 2, 64), (1, 200, 3, 300), (300, 1, 300, 2)], ids=str)
def test_two_products_of_small_matrices(shape):
    """A library may make these in another way."""
    units, rows, keys, width = shape
    if not products._adds_unrounded(torch.bfloat16):
        pytest.skip("this machine's library rounds a product before it adds to it")
    a, b = (torch.randn(units, n, width).to(torch.bfloat16) for n in (rows, keys))
    high, rest = products.Ways(torch.bfloat16, torch.bfloat16, True).scores(a, b)
    exact = a.double() @ b.double().mT
    assert distance(high.double() + rest.double(), exact) < 2**-14 * float(exact.abs().max())


def test_nan_of_a_mask_stays():
    q, k, v, _ = operands("square", torch.bfloat16, False)
    mask = torch.zeros(1, 1, 40, 1).index_fill(2, torch.tensor(3), math.nan).to(torch.bfloat16)
    out, _ = attend(q, k, v, False, mask, 0.25, False, False)
    assert out[:, :, 3].isnan().all() and not out[:, :, 4:].isnan().any()


def chosen(monkeypatch, name):
    """Every attention is given to one candidate."""
    monkeypatch.setattr(providers, "choose", lambda attention: name)


def calls():
    return [u.op for c in compilations() for u in c.unfused if "attend" in u.op or "attention" in u.op]


PROGRAMS = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
    "bool mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(2)
    ),
    "of groups": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "turned": lambda q, k, v: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled(name, dtype, dynamic, monkeypatch):
    chosen(monkeypatch, PARTS)
    fn = PROGRAMS[name]
    compiled = torch.compile(fn, backend="fuser", dynamic=dynamic)
    for length, width in ((24, 16), (37, 16), (37, 24)):
        args = [torch.randn(2, 4, length, width).to(dtype).requires_grad_() for _ in range(3)]
        same = [a.detach().clone().requires_grad_() for a in args]
        got, want = compiled(*args), fn(*same)
        assert got.stride() == want.stride()
        grad = torch.randn_like(want)
        got.backward(grad)
        want.backward(grad)
        for a, b in [(got, want), *((x.grad, y.grad) for x, y in zip(args, same))]:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), fn(*args), rtol=2e-2, atol=2e-2)
    assert set(calls()) == {"attend", "attend_backward"}


def test_reason_and_choice():
    fn = PROGRAMS["plain"]
    args = [torch.randn(1, 2, 150, 16, dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad():
        torch.compile(fn, backend="fuser", dynamic=False)(*args)
    assert any("attention of 1×2×150×150×16 bfloat16" in str(c) for c in fuser.debug.choices())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["deterministic", "few", "float64", "dropout", "eager numerics"])
def test_aten_stays(how, monkeypatch):
    chosen_of = []
    monkeypatch.setattr(providers._attentions, "choice", lambda *a, **k: chosen_of.append(a))
    dtype = torch.float64 if how == "float64" else torch.bfloat16
    length = 8 if how == "few" else 200
    args = [torch.randn(1, 2, length, 16, dtype=dtype) for _ in range(3)]
    share = 0.1 if how == "dropout" else 0.0

    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=share)

    settings = {"deterministic": {"deterministic": "yes"}, "eager numerics": {"numerics": "eager"}}.get(how, {})
    with torch.no_grad(), fuser.config.override(**settings):
        torch.compile(fn, backend="fuser", dynamic=False)(*args)
    assert not chosen_of and "attend" not in calls()


def test_only_written_attention_may_round_its_scores(monkeypatch):
    seen = []
    monkeypatch.setattr(providers, "product_dtype", lambda dtype: dtype)
    monkeypatch.setattr(providers, "choose", lambda attention: seen.append(attention.rounded) or ATEN)
    args = [torch.randn(1, 2, 150, 16, dtype=torch.bfloat16) for _ in range(3)]
    written_in_16_bits = lambda q, k, v: torch.softmax(q @ k.mT * 0.25, -1) @ v  # noqa: E731
    wider = lambda q, k, v: (torch.softmax(q.float() @ k.float().mT * 0.25, -1) @ v.float()).to(q.dtype)  # noqa: E731
    with torch.no_grad():
        for fn in (PROGRAMS["plain"], written_in_16_bits, wider):
            torch.compile(fn, backend="fuser", dynamic=False)(*args)
    assert seen == [False, True, False]


def test_contest_gives_all_candidates(monkeypatch):
    """Every candidate of every kind of class runs, and gives ATen's result."""
    for backward, causal, mask in itertools.product((False, True), (False, True), (None, (True, True, False, False))):
        for dtype in DTYPES:
            a = providers.Attention(1, 4, 2, 96, 96, 16, dtype, causal, mask, 0.25, backward, True)
            names = [ATEN, PARTS, ROUNDED_PARTS, *([WRITTEN] if not (backward or causal or mask) else [])]
            with torch.no_grad():
                first, *others = (c.result() for c in providers._contestants(a, names).values())
            for other in others:
                torch.testing.assert_close(other, first, rtol=3e-2, atol=3e-2)


def test_few_scores_are_raced_as_written(monkeypatch):
    raced = []
    monkeypatch.setattr(providers._written, "choice", lambda *a: raced.append(a[1]) or Choice(WRITTEN, "", (), ""))
    few, some, many = (
        providers.Attention(1, 2, 2, n, n, 16, torch.bfloat16, False, None, None, False, True) for n in (8, 128, 2048)
    )
    assert [providers.is_faster_written(a) for a in (few, some, many)] == [False, True, False]
    assert raced == [[ATEN, WRITTEN]]
    with fuser.config.override(deterministic="yes"):
        assert not providers.is_faster_written(some)


def test_large_contests_have_fewer_heads():
    a = providers.Attention(64, 32, 8, 2048, 2048, 16, torch.bfloat16, False, None, 0.25, False, False)
    q, k, *_ = providers._operands(a)
    assert q.shape[0] == 1 and k.shape[1] < 8 and q.shape[1] == 4 * k.shape[1]


def test_files_hold_the_call_of_aten(tmp_path, monkeypatch):
    chosen(monkeypatch, PARTS)

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v) * 2

    args = tuple(torch.randn(1, 2, 40, 16, dtype=torch.bfloat16) for _ in range(3))
    fuser.aot.compile(torch.export.export(Module(), args), tmp_path / "attention")
    torch.testing.assert_close(fuser.aot.load(tmp_path / "attention")(*args), Module()(*args))


@pytest.mark.parametrize("shape", [(2, 4, 12, 16), (1, 4, 12, 16), (2, 1, 12, 16), (2, 4, 1, 16)], ids=str)
def test_strides_of_results_are_those_of_atens_kernel(shape):
    """A graph is traced with ATen's kernel, whichever computes."""
    k, v = torch.randn(shape), torch.randn(shape)
    for name, layout in LAYOUTS.items():
        made, view = layout(torch.randn(shape))
        q = view(made)
        if q.stride(-1) != 1:
            continue
        want = FORWARD(q, k, v, 0.0, False)[0].stride()
        results = [attend(q, k, v, False, None, None, False, False)[0]]
        if own.why_not(q.dtype, shape[-1]) is None:
            results.append(own.attend(q, k, v, False, None, None)[0])
        for got in results:
            assert all(a == b or n == 1 for a, b, n in zip(got.stride(), want, shape)), (name, got.stride(), want)
