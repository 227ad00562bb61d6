"""Every spelling of attention is one fused call, as near to float64 as eager is, with its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.passes import attention
from fuser.passes import attention_providers as providers
from fuser.passes.attention import fuse_attention
from fuser.passes.registry import run_stage
from tests.attention_spellings import SPELLINGS
from tests.peers.judge import problem, widened

pytestmark = pytest.mark.usefixtures("clean")

DTYPES = (torch.float32, torch.bfloat16)
TABLE = {s.name: s for s in SPELLINGS}
OPERATORS = ("matmul", "bmm", "baddbmm", "einsum", "softmax")


class Rewritten:
    """A backend of the passes alone; `calls` are those of fused attention, `left` the products and softmaxes."""

    def __call__(self, gm, inputs):
        run_stage("pre_grad", gm)
        self.calls = [n for n in gm.graph.nodes if n.target is F.scaled_dot_product_attention]
        names = [getattr(n.target, "__name__", n.target) for n in gm.graph.nodes]
        self.left = [n for n in names if n in OPERATORS]
        gm.recompile()
        return gm.forward


def with_gradients(fn, args):
    args = [a.detach().clone().requires_grad_(i < 3) for i, a in enumerate(args)]
    out = fn(*args)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out))
    return [out.detach(), *(a.grad for a in args[:3])]


def check(spelling, dtype, backend):
    args = spelling.make(2, 4, 12, 16, dtype)
    fn = torch.compile(spelling.fn, backend=backend, dynamic=False)
    assert problem(spelling.name, fn(*args), spelling.fn(*args), spelling.exact(*args)) is None


def check_training(spelling, dtype, backend):
    args = spelling.make(2, 4, 12, 16, dtype)
    got = with_gradients(torch.compile(spelling.fn, backend=backend, dynamic=False), args)
    want = with_gradients(spelling.fn, args)
    exact = widened(lambda *a: with_gradients(spelling.fn, a), args)
    for k, (a, b, e) in enumerate(zip(got, want, exact, strict=True)):
        assert problem(f"{spelling.name} {k}", a, b, e, strides=k == 0) is None


@pytest.mark.sampled(
    27,
    also=(
        "all_in_float32-torch.bfloat16", "bias_by_baddbmm-torch.float32", "causal_by_triu-torch.bfloat16",
        "einsum_of_tokens-torch.float32", "one_head_of_keys-torch.float32", "padding_filled-torch.bfloat16",
        "padding_filled-torch.float32", "scores_in_float32-torch.bfloat16",
    ),
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_spelling(name, dtype, monkeypatch):
    monkeypatch.setattr(attention, "_MANY_KEYS", {True: 0, False: 0})
    spelling, backend = TABLE[name], Rewritten()
    check(spelling, dtype, backend)
    assert len(backend.calls) == 1 and not backend.left
    assert bool(backend.calls[0].kwargs.get("is_causal")) == name.startswith("causal")
    torch._dynamo.reset()
    check_training(spelling, dtype, backend)
    assert len(backend.calls) == (spelling.trains or dtype is torch.float32)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_products_stay_where_they_train_faster(dtype, monkeypatch):
    """Of few keys on the CPU; not where the machine has no fast products of the dtype, nor without gradients."""
    monkeypatch.setattr(attention, "product_dtype", lambda d: torch.float32 if d is torch.float16 else d)
    fn = TABLE["scale_divides"].fn
    args = [torch.randn(1, 2, 255, 16, dtype=dtype) for _ in range(3)]
    rows = (True, 255, dtype is torch.float16), (False, 255, True), (True, 256, dtype.itemsize != 2)
    for grad, keys, fused in rows:
        if dtype is torch.float16 and keys == 256:
            continue
        torch._dynamo.reset()
        backend = Rewritten()
        q, k, v = (a.requires_grad_(grad) for a in args)
        more = [torch.cat([t, t[:, :, : keys - 255]], 2) for t in (k, v)]
        torch.compile(fn, backend=backend, dynamic=False)(q, *more)
        assert bool(backend.calls) == fused, (grad, keys)


@pytest.mark.parametrize("winner", [providers.ATEN, providers.PARTS])
def test_between_few_and_many_keys_the_machine_decides(winner, monkeypatch):
    """Products wait for memory from 1,024 keys on, where ATen's fused attention of 16-bit floats is fast."""
    asked = []
    monkeypatch.setattr(attention, "product_dtype", lambda d: d)
    monkeypatch.setattr(providers, "choose", lambda a: asked.append(a) or winner)
    args = [torch.randn(1, 2, 1024, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    backend = Rewritten()
    torch.compile(TABLE["scale_divides"].fn, backend=backend, dynamic=False)(*args)
    assert bool(backend.calls) == (winner == providers.ATEN)
    assert [(a.heads, a.keys, a.backward) for a in asked] == [(2, 1024, True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["scale_divides", "einsum_of_tokens"])
@pytest.mark.parametrize("written", [False, True])
def test_few_scores_in_inference(written, name, dtype, monkeypatch):
    """A contest of ATen's calls says whether they stay products."""
    asked = []
    monkeypatch.setattr(attention, "product_dtype", lambda d: d)
    monkeypatch.setattr(providers, "is_faster_written", lambda a: asked.append(a) or written)
    backend = Rewritten()
    with torch.no_grad():
        torch.compile(TABLE[name].fn, backend=backend, dynamic=False)(*TABLE[name].make(3, 2, 40, 16, dtype))
    assert bool(backend.calls) != written
    (a,) = asked
    assert (a.batch, a.heads, a.rows, a.keys, a.width, a.dtype, a.backward) == (3, 2, 40, 40, 16, dtype, False)


@pytest.mark.parametrize("name", ["both_scaled", "einsum_of_tokens", "causal_by_triu", "padding_filled"])
def test_compiled(name):
    check(TABLE[name], torch.bfloat16, fuser_backend)
    ops = [u.op for c in compilations() for u in c.unfused]
    assert any("attention" in op for op in ops) and "aten.bmm" not in ops


def test_rows_without_keys_are_means():
    """A finite fill in 16 bits: eager looks at all keys alike where none is left, and so does the fused call."""

    def f(q, k, v, keep):
        return (q @ k.mT).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v

    keep = torch.rand(2, 1, 12, 12) < 0.7
    keep[1, :, 3] = False
    backend = Rewritten()
    args = [torch.randn(2, 3, 12, 16, dtype=torch.bfloat16) for _ in range(3)]
    got, exact = torch.compile(f, backend=backend)(*args, keep), widened(f, (*args, keep))
    assert problem("means", got, f(*args, keep), exact) is None and len(backend.calls) == 1
    torch.testing.assert_close(got[1, :, 3].float(), args[2][1].float().mean(1), rtol=1e-2, atol=1e-2)


def bias_then_fill(q, k, v):
    t = q.shape[-2]
    s = q @ k.mT + torch.ones(t, t).tril()
    return s.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf")).softmax(-1) @ v


def causal_of_the_last(q, k, v):
    t = q.shape[-2]
    seen = torch.ones(t, t, dtype=torch.bool).tril(-1)
    seen[0, 0] = True
    return (q @ k.mT).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def fewer_queries(q, k, v):
    q = q[:, :, :5]
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT).masked_fill(~seen, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("f", [bias_then_fill, causal_of_the_last, fewer_queries], ids=lambda f: f.__name__)
def test_masks_that_only_look_causal(f):
    args, backend = [torch.randn(2, 3, 12, 16) for _ in range(3)], Rewritten()
    got = torch.compile(f, backend=backend)(*args)
    assert not any(c.kwargs.get("is_causal") for c in backend.calls)
    torch.testing.assert_close(got, f(*args), equal_nan=True, rtol=1e-4, atol=1e-5)


def test_mask_of_the_library_call():
    def f(q, k, v):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().repeat(2, 1, 1, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(-1, 3, -1, -1))

    args, backend = [torch.randn(2, 3, 12, 16) for _ in range(3)], Rewritten()
    torch.testing.assert_close(torch.compile(f, backend=backend)(*args), f(*args))
    assert [c.kwargs for c in backend.calls] == [{"is_causal": True}]


def test_mask_that_masks_nothing():
    """As libraries make it under Dynamo, where they cannot look at values."""

    def f(q, k, v):
        at = torch.arange(q.shape[-2]) + 0
        seen = at.new_ones((), dtype=torch.bool) & (at[None, None, :, None] >= 0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(q.shape[0], -1, q.shape[-2], k.shape[-2]))

    args, backend = [torch.randn(2, 3, 12, 16) for _ in range(3)], Rewritten()
    torch.testing.assert_close(torch.compile(f, backend=backend)(*args), f(*args))
    assert [c.kwargs for c in backend.calls] == [{"is_causal": False}]


@pytest.mark.parametrize(
    ("dtype", "tokens", "fires"),
    [(torch.float32, 64, 0), (torch.float32, 512, 1), (torch.bfloat16, 64, 1), (torch.float64, 64, 0)],
)
def test_float32_on_cuda_keeps_products_of_few_keys(dtype, tokens, fires):
    graph = torch.fx.Graph()
    q, k, v = (graph.placeholder(n) for n in "qkv")
    with FakeTensorMode(allow_non_fake_inputs=True):
        for n in (q, k, v):
            n.meta["example_value"] = torch.empty(1, 2, tokens, 8, device="cuda", dtype=dtype)

        def call(f, *args):
            node = graph.call_function(f, args)
            values = [a.meta["example_value"] if isinstance(a, torch.fx.Node) else a for a in args]
            node.meta["example_value"] = f(*values)
            return node

        weights = call(torch.softmax, call(torch.matmul, q, call(torch.transpose, k, -2, -1)), -1)
        graph.output((call(torch.matmul, weights, v),))
    assert fuse_attention(torch.fx.GraphModule({}, graph)) == fires


def test_queries_written_after_they_were_scaled():
    def f(q, k, v):
        q = q.clone()
        scaled = q * 0.25
        q.add_(1)
        return (scaled @ k.mT).softmax(-1) @ v + q

    args = [torch.randn(2, 3, 12, 16) for _ in range(3)]
    torch.testing.assert_close(torch.compile(f, backend=Rewritten())(*args), f(*args))


def test_results_that_stay_wide_are_not_rounded():
    def f(q, k, v):
        return ((q.float() @ k.float().mT).softmax(-1) @ v.float()) * 1.5

    args = [torch.randn(2, 3, 12, 16, dtype=torch.bfloat16) for _ in range(3)]
    torch.testing.assert_close(torch.compile(f, backend=Rewritten())(*args), f(*args), rtol=1e-5, atol=1e-5)


def weights_rounded(q, k, v):
    """As in GPT-J: scores in float32, weights and result in 16 bits, the result copied behind a transpose."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) / 8.0
    return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v).permute(0, 2, 1, 3).contiguous()


def products_of_columns(q, k, v):
    """As in convolutional transformers: heads whose last dim is not the one with stride 1."""
    q, k, v = (t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v))
    return ((q @ k.transpose(-1, -2)) * 0.125).softmax(-1) @ v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("f", [weights_rounded, products_of_columns], ids=lambda f: f.__name__)
def test_any_spelling_runs_by_the_fused_kernel_and_keeps_its_dtype(f, dtype, monkeypatch):
    monkeypatch.setattr(providers, "choose", lambda a: providers.ATEN)
    q, k, v = (torch.randn(1, 2, 512, 64, dtype=dtype) for _ in range(3))
    fused = torch.compile(f, backend="fuser", dynamic=False)
    with torch.no_grad():
        result, expected = fused(q, k, v), f(q, k, v)
        assert problem(f.__name__, result, expected, widened(f, (q, k, v))) is None
        assert "_scaled_dot_product_flash_attention_for_cpu" in str(fuser.explain(f, q, k, v))
