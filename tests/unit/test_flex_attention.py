"""`flex_attention` on the CPU: right in every spelling, fused, and torch's own where it cannot be."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fuser
from fuser.attention import by_rows, served
from fuser.frontends.records import last_compilation
from fuser.reasons import code_of
from tests.flex_cases import CASES, FlexCase, causal, soft_cap

pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran for each call: "fused", or the reason for torch's own."""
    out: list[str] = []
    fused = served.Forward.fused

    def watched(self: Any, run: Any, *heads: Any) -> Any:
        found = fused(self, run, *heads)
        out.append("fused" if found is not None else str(self.reason))
        return found

    monkeypatch.setattr(served.Forward, "fused", watched)
    torch._dynamo.reset()
    return out


def compiled(case: FlexCase, **options: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, Any]]:
    """The compiled call, its arguments, and what is captured."""
    captured, masking = case.buffers()
    mod = None if case.mod is None else (lambda s, b, h, q, k: case.mod(s, b, h, q, k, *captured))
    blocks = case.block_mask(masking)

    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, mod, blocks, enable_gqa=q.shape[1] != k.shape[1], **options)

    return torch.compile(call, backend="fuser"), tuple(case.heads()), (captured, masking)


def in_eager(function: Any, *args: Any, **options: Any) -> Any:
    """The result of a function; torch's own operator in it takes no trace by Dynamo for each call."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch_flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
        return function(*args, **options)


def eager(case: FlexCase, args: Any, both: Any) -> torch.Tensor:
    """torch's own, by the graph that it runs without a compiler."""
    captured, masking = both
    mod = None if case.mod is None else (lambda s, b, h, q, k: case.mod(s, b, h, q, k, *captured))
    shared = args[0].shape[1] != args[1].shape[1]
    return in_eager(flex_attention, *args, mod, case.block_mask(masking), enable_gqa=shared)


def dtypes_of(number: int) -> tuple[torch.dtype, ...]:
    """One that cases take turns with."""
    return DTYPES if os.environ.get("FUSER_TEST_ALL") else (DTYPES[number % 4],)


@pytest.mark.sampled(10, also=("bias of the first-torch.float64", "nothing for some-torch.bfloat16"))
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(c, d) for i, c in enumerate(CASES) for d in dtypes_of(i)],
    ids=lambda v: v.name if isinstance(v, FlexCase) else str(v),
)
def test_no_further_from_float64_than_eager(
    case: FlexCase, dtype: torch.dtype, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """In one chunk, and in chunks of 16 and of 64 rows."""
    case = dataclasses.replace(case, dtype=dtype)
    with torch.no_grad():
        call, args, both = compiled(case)
        found = [call(*args)]
        for least in (16, 64):
            monkeypatch.setattr(by_rows, "SCORES", 1)
            monkeypatch.setattr(by_rows, "LEAST_ROWS", least)
            found.append(call(*args))
        exact, _ = case.exact(*(a.double() for a in args), *both)
        expected = eager(case, args, both)
    assert calls == ["fused"] * 3
    right = 2 * distance(expected, exact) + 4 * torch.finfo(dtype).eps * float(exact.abs().max())
    for out in found:
        assert out.dtype == expected.dtype and out.stride() == expected.stride()
        assert distance(out, exact) <= right
        if dtype is torch.float32:
            torch.testing.assert_close(out, expected, atol=3e-6, rtol=3e-6)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).abs().max())


def test_logarithms_of_sums() -> None:
    some = FlexCase("", None, lambda b, h, q, k: (q >= k) & (q > 70), (1, 2, 2, 90, 90, 16, 16), block=32)
    for case in (CASES[0], some):
        with torch.no_grad():
            call, args, both = compiled(case, return_lse=True)
            out, sums = call(*args)
            exact = case.exact(*(a.double() for a in args), *both)
        torch.testing.assert_close(out.double(), exact[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(sums.double(), exact[1], atol=1e-5, rtol=1e-5)


def test_a_new_size_compiles_nothing() -> None:
    counter = CompileCounterWithBackend("fuser")
    call = torch.compile(lambda q, k, v: flex_attention(q, k, v, soft_cap), backend=counter, dynamic=True)
    with torch.no_grad():
        for n in (33, 50, 64):
            args = [torch.randn(2, 3, n, 16) for _ in range(3)]
            torch.testing.assert_close(call(*args), in_eager(flex_attention, *args, soft_cap), atol=1e-5, rtol=1e-5)
            kernels = fuser.num_compiled_kernels() if n == 33 else kernels  # noqa: F821
    assert counter.frame_count == 1 and fuser.num_compiled_kernels() == kernels


def test_blocks_that_a_user_lists_are_those_that_count() -> None:
    """Without `mask_mod` the lists alone say what is attended to."""
    count = torch.tensor([[[1, 2]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=64)
    args = [torch.randn(1, 2, 128, 16) for _ in range(3)]
    with torch.no_grad():
        out = torch.compile(flex_attention, backend="fuser")(*args, block_mask=blocks)
    case = FlexCase("", None, lambda b, h, q, k: (q >= 64) | (k < 64))
    torch.testing.assert_close(out.double(), case.exact(*(a.double() for a in args), (), ())[0], atol=1e-5, rtol=1e-5)


def test_a_block_mask_as_an_argument_at_symbolic_sizes() -> None:
    """The sizes of its blocks are symbols then, too."""

    def call(q: Any, k: Any, v: Any, blocks: Any) -> Any:
        return flex_attention(q, k, v, soft_cap, blocks)

    fused = torch.compile(call, backend="fuser", dynamic=True)
    with torch.no_grad():
        for n in (12, 20, 300, 500):
            args = [torch.randn(2, 2, n, 16) for _ in range(3)]
            blocks = create_block_mask(causal, None, None, n, n, device="cpu")
            torch.testing.assert_close(fused(*args, blocks), in_eager(call, *args, blocks), atol=1e-5, rtol=1e-5)


def test_captured_numbers() -> None:
    def call(q: Any, k: Any, v: Any, n: int, x: float) -> Any:
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i - j < n, s * x, -1.0))

    args = [torch.randn(1, 2, 40, 16) for _ in range(3)]
    fused = torch.compile(call, backend="fuser", dynamic=True)
    with torch.no_grad():
        for n, x in ((3, 0.5), (7, 1.5)):
            torch.testing.assert_close(fused(*args, n, x), in_eager(call, *args, n, x), atol=1e-5, rtol=1e-5)


FUNCTIONS: dict[str, Any] = {
    **{n: getattr(torch, n) for n in "abs exp expm1 sigmoid tanh sin atan erf square sgn floor round frac".split()},
    **{n: getattr(F, n) for n in "relu6 gelu silu mish softplus softsign hardswish hardtanh leaky_relu elu".split()},
    **{n: getattr(F, n) for n in "logsigmoid softshrink tanhshrink".split()},
}
OF_TWO: dict[str, Any] = {
    "maximum": lambda s, i: torch.maximum(s, i * 0.05), "remainder": lambda s, i: torch.remainder(s, i + 1.5),
    "pow": lambda s, i: torch.pow(s.abs() + 0.1, i * 0.1), "clamp": lambda s, i: torch.clamp(s, max=i * 0.1),
    "floor_divide": lambda s, i: s + i // 3, "shift": lambda s, i: s + (i >> 1), "bits": lambda s, i: s + ((i & 3) ^ 1),
    "truncated": lambda s, i: s + torch.div(i, 3, rounding_mode="trunc"), "reversed": lambda s, i: 1 - s,
    "buckets": lambda s, i: s + torch.log(i.float() + 1).to(torch.int32) * 0.1,
    "masked": lambda s, i: torch.where(i == 4, -float("inf"), s), "lerp": lambda s, i: torch.lerp(s, s * 2, 0.3),
}  # fmt: skip


NAMES = (*FUNCTIONS, *OF_TWO)
TOGETHER = 1 if os.environ.get("FUSER_TEST_ALL") else 9


@pytest.mark.sampled(5, also=("softsign hardswish hardtanh leaky_relu elu logsigmoid softshrink tanhshrink maximum",))
@pytest.mark.parametrize("names", [NAMES[i : i + TOGETHER] for i in range(0, len(NAMES), TOGETHER)], ids=" ".join)
def test_elementwise_functions_are_fused(names: tuple[str, ...], calls: list[str]) -> None:
    """Whether torch tags them as elementwise or not. Some together: the sum shows each that is wrong or not fused."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        one = [FUNCTIONS[n](s) if n in FUNCTIONS else OF_TWO[n](s, (q - k).abs()) for n in names]
        return sum(one[1:], one[0])

    torch.manual_seed(3)
    args = [torch.randn(1, 2, n, 16) for n in (20, 24, 24)]
    with torch.no_grad():
        out = torch.compile(flex_attention, backend="fuser")(*args, mod)
        torch.testing.assert_close(out, in_eager(flex_attention, *args, mod), atol=1e-5, rtol=1e-5)
    assert calls == ["fused"]


def test_what_no_kernel_knows_is_torchs_own(calls: list[str]) -> None:
    table = torch.randn(40, 3)

    def rows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q].sum()

    args = [torch.randn(1, 2, 40, 16) for _ in range(3)]
    with torch.no_grad():
        out = torch.compile(flex_attention, backend="fuser")(*args, rows)
        torch.testing.assert_close(out, in_eager(flex_attention, *args, rows))
    assert not calls  # the graph kept torch's operator
    told = [u.reason for u in last_compilation().unfused if u.op == "flex_attention"]
    assert told == ["a score modification reads a captured tensor by aten.sum.default"]


def test_a_call_says_what_it_runs_by() -> None:
    args = [torch.randn(1, 2, 40, 16) for _ in range(3)]
    with torch.no_grad():
        torch.compile(flex_attention, backend="fuser")(*args, soft_cap)
    (told,) = [u.reason for u in last_compilation().unfused if u.op == "flex_attention"]
    assert told.startswith("it has kernels of its own") and code_of(told) == "library"


def test_in_a_model_with_its_neighbours() -> None:
    """Between products and other fused operators, under autocast, in memory of any order."""
    torch.manual_seed(0)
    project, back = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
    blocks = FlexCase("", None, causal, (1, 4, 4, 64, 64, 8, 8)).block_mask(())

    def model(x: torch.Tensor) -> torch.Tensor:
        q, k, v = project(x).view(2, 64, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return back(flex_attention(q, k, v, soft_cap, blocks).transpose(1, 2).reshape(2, 64, 32)).relu()

    x = torch.randn(2, 64, 32)
    with torch.no_grad():
        out = torch.compile(model, backend="fuser")(x)
        torch.testing.assert_close(out, in_eager(model, x), atol=1e-5, rtol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.compile(model, backend="fuser")(x)
            torch.testing.assert_close(out, in_eager(model, x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dynamic", (False, True))
def test_its_gradient_called_by_itself_runs_on_aten(dynamic: bool) -> None:
    """On the CPU there are kernels for the result alone. Autograd refuses gradients there; the operator does not."""
    masked = lambda b, h, q, k: q >= k  # noqa: E731
    scored = lambda score, b, h, q, k: score  # noqa: E731
    blocks = create_block_mask(masked, 1, 2, 40, 40, device="cpu", BLOCK_SIZE=16).as_tuple()
    q, k, v, grad = (torch.randn(1, 2, 40, 16) for _ in range(4))
    out, sums, _ = torch.ops.higher_order.flex_attention(q, k, v, scored, blocks, 0.25, {}, (), ())

    def gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        called = torch.ops.higher_order.flex_attention_backward
        return called(q, k, v, out, sums, grad, None, scored, None, blocks, 0.25, {}, (), ())[:3]

    try:
        want = gradient(q, k, v)
    except TypeError:
        pytest.skip("this torch's operator wants a joint graph")
    got = torch.compile(gradient, backend=fuser.backend, dynamic=dynamic)(q, k, v)
    for found, expected in zip(got, want):
        torch.testing.assert_close(found, expected)
    assert "flex_attention_backward" in str([u for u in last_compilation().unfused if "CPU" in u.reason])
