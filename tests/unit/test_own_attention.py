"""Attention on the CPU by one kernel: results for all sizes, masks and orders, and that it competes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fuser import config, machines
from fuser.cpu import attention, attention_cpp
from fuser.passes import attention_providers as providers
from fuser.passes.attention_providers import ATEN, FORWARD, OWN
from tests.unit import test_attention_by_parts as by_parts
from tests.unit.test_attention_by_parts import MASKS, PROGRAMS, SIZES, distance, exact, operands

pytestmark = pytest.mark.usefixtures("clean")
DTYPES = (torch.float32, torch.bfloat16)
MACHINES = ["", *(m for m in ("avx512", "avx2") if machines.why_not(machines.find(m)) is None)]
LARGER = {  # around blocks of rows, of keys and panels of values
    "more rows than a unit": (1, 1, 1, attention_cpp.ROWS + 1, 30, 64),
    "more keys than a block": (1, 2, 1, 9, 2 * attention_cpp.KEYS + 3, 66),
    "both": (1, 2, 2, attention_cpp.ROWS + 70, attention_cpp.KEYS + 70, 8),
    "wide": (1, 1, 1, 13, 21, 200),
    "two elements": (1, 1, 1, 13, 21, 2),
}


def skip_unless_made(dtype):
    why = attention.why_not(dtype, 8)
    if why is not None:
        pytest.skip(why)


def checked(dtype, q, k, v, causal, mask, scale):
    """No further from float64 than twice ATen's, in its strides, and computed by the kernel."""
    handle = attention.ATTENTION.handle(config.isa, dtype, None, causal, None if mask is None else mask.dtype)
    hits, misses = handle.hits, handle.misses
    out, sums = attention.attend(q, k, v, causal, mask, scale)
    assert (handle.hits, handle.misses) == (hits + 1, misses)
    right = exact(q, k, v, causal, mask, scale, torch.zeros_like(q))[0]
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    beside, sums_beside = FORWARD(q, keys, values, 0.0, causal, attn_mask=mask, scale=scale)
    assert out.stride() == beside.stride() and out.dtype is dtype
    far = max(2 * distance(beside, right), 4 * torch.finfo(dtype).eps * float(v.abs().max()))
    assert distance(out, right) <= far
    assert distance(sums, sums_beside.double()) < 1e-2


@pytest.mark.parametrize("isa", MACHINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [SIZES, LARGER], ids=["small", "larger"])
def test_results(sizes, dtype, isa, monkeypatch):
    monkeypatch.setattr(by_parts, "SIZES", sizes)
    with config.override(isa=isa):
        skip_unless_made(dtype)
        for number, (size, name, causal) in enumerate(itertools.product(sizes, MASKS, (False, True))):
            b, h, _, m, n, d = sizes[size]
            q, k, v, _ = operands(size, dtype, number % 2 == 1)
            mask = MASKS[name] and MASKS[name](b, h, m, n).to(dtype)
            checked(dtype, q, k, v, causal, mask, (d**-0.5, 0.3)[number % 3 == 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_and_masks_in_any_order(dtype):
    skip_unless_made(dtype)
    q, k, v = torch.randn(2, 40, 3, 3, 16).to(dtype).unbind(2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    for mask in (torch.randn(40, 40).t(), torch.randn(40, 80)[:, ::2], torch.randn(2, 1, 1, 40)):
        checked(dtype, q, k, v, False, mask.to(dtype), 0.25)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(dtype):
    """A row that attends to nothing is 0, NaN of a query or of a mask stays in its rows, infinite keys are left out."""
    skip_unless_made(dtype)
    q, k, v = (torch.rand(1, 2, 40, 16).to(dtype) + 0.5 for _ in range(3))
    mask = torch.zeros(1, 1, 40, 1).index_fill(2, torch.tensor(3), math.nan)
    mask[:, :, 5] = -math.inf
    q[:, :, 7, 2] = math.nan
    k[:, :, 9] = -math.inf
    out, sums = attention.attend(q, k, v, False, mask.to(dtype), 0.25)
    want, _ = FORWARD(q, k, v, 0.0, False, attn_mask=mask.to(dtype), scale=0.25)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert (out[:, :, 5] == 0).all() and (sums[:, :, 5] == 0).all()


def test_no_keys_and_no_rows():
    skip_unless_made(torch.float32)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 0, 8)
    out, sums = attention.attend(q, k, k, False, None, None)
    assert out.shape == q.shape and not out.any() and not sums.any()
    assert attention.attend(k, q, q, True, None, None)[0].shape == k.shape


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled(dtype, dynamic, monkeypatch):
    """The winner of a contest serves inference and the forward of training, whose gradients stay with others."""
    skip_unless_made(dtype)
    monkeypatch.setattr(providers, "choose", lambda a: ATEN if a.backward else OWN)
    for fn in PROGRAMS.values():
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="fuser", dynamic=dynamic)
        for length in (24, 37):
            args = [torch.randn(2, 4, length, 16).to(dtype).requires_grad_() for _ in range(3)]
            same = [a.detach().clone().requires_grad_() for a in args]
            got, want = compiled(*args), fn(*same)
            assert got.stride() == want.stride()
            got.sum().backward()
            want.sum().backward()
            for a, b in [(got, want), *((x.grad, y.grad) for x, y in zip(args, same))]:
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
            with torch.no_grad():
                torch.testing.assert_close(compiled(*args), fn(*args), rtol=2e-2, atol=2e-2)
    assert set(by_parts.calls()) <= {"attend", "aten._scaled_dot_product_flash_attention_for_cpu_backward"}


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16, torch.float64), ids=str)
def test_it_competes_where_a_kernel_can_be_made(dtype, monkeypatch):
    """Forward in dtypes that this machine has products of; nowhere else."""
    asked = []

    class Choice:
        winner = ATEN

    monkeypatch.setattr(providers._attentions, "choice", lambda key, names, *rest: asked.append(names) or Choice)
    made = attention.why_not(dtype, 64) is None
    for backward in (False, True):
        one = providers.Attention(1, 4, 4, 200, 200, 64, dtype, False, None, None, backward, False)
        providers.choose(one)
    assert made == any(OWN in names for names in asked)
    assert not asked or OWN not in asked[-1] or len(asked) == 1
