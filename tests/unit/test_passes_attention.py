"""Attention in the spellings of real models becomes one fused call; what only looks like it does not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.passes import attention
from fuser.passes.attention import fuse_attention

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def however_few(monkeypatch):
    """Attention is fused where gradients are needed, however few the keys are."""
    monkeypatch.setattr(attention, "_MANY_KEYS", {True: 0, False: 0})


B, H, T, D = 2, 3, 6, 8


def qkv(dtype=torch.float32, requires_grad=False):
    return [torch.randn(B, H, T, D, dtype=dtype).requires_grad_(requires_grad) for _ in range(3)]


CAUSAL = torch.tril(torch.ones(T, T)).view(1, 1, T, T)
PADDING = torch.zeros(B, 1, 1, T)
PADDING[1, ..., -2:] = -1e9
BIAS = torch.randn(1, H, T, T)


def nano_gpt(q, k, v):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(CAUSAL[:, :, :T, :T] == 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    att = F.dropout(att, 0.1, training=False)
    return att @ v


def hugging_gpt2(q, k, v):
    weights = torch.matmul(q, k.transpose(-1, -2))
    weights = weights / torch.full([], v.size(-1) ** 0.5, dtype=weights.dtype, device=weights.device)
    mask_value = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype, device=weights.device)
    weights = torch.where(CAUSAL.bool(), weights.to(weights.dtype), mask_value)
    weights = weights + PADDING
    weights = torch.nn.functional.softmax(weights, dim=-1)
    weights = weights.type(v.dtype)
    return torch.matmul(weights, v)


def hugging_bert(q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / math.sqrt(D)
    scores = scores + PADDING
    probs = torch.nn.Softmax(dim=-1)(scores)
    return torch.matmul(F.dropout(probs, p=0.1, training=False), v)


def hugging_t5(q, k, v):
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += BIAS + PADDING
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v)


def hugging_llama(q, k, v):
    weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D)
    weights = weights + PADDING
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def opt_with_bmm(q, k, v):
    q, k, v = (t.reshape(B * H, T, D) for t in (q * D**-0.5, k, v))
    weights = torch.bmm(q, k.transpose(1, 2))
    mask = (CAUSAL[0] - 1) * 1e9
    weights = torch.softmax(weights + mask, -1)
    return torch.bmm(weights, v).view(B, H, T, D)


def with_einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def keys_kept_transposed(q, k, v):
    return (q @ k.permute(0, 1, 3, 2)).mul(0.3).softmax(3).matmul(v)


def filled_in_place(q, k, v):
    scores = (q @ k.transpose(-2, -1)).div_(math.sqrt(D))
    scores.masked_fill_(CAUSAL == 0, -1e9)
    return scores.softmax(-1) @ v


def heads_swapped(q, k, v):
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    return torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1) @ v


def heads_swapped_and_merged(q, k, v):
    y = heads_swapped(q, k, v)
    return y.transpose(1, 2).contiguous().view(B, T, H * D)


SPELLINGS = [
    nano_gpt, hugging_gpt2, hugging_bert, hugging_t5, hugging_llama, opt_with_bmm, with_einsum, keys_kept_transposed,
    filled_in_place, heads_swapped, heads_swapped_and_merged,
]  # fmt: skip


def fused():
    return [r.changed for c in compilations() for r in c.passes if r.name == "fuse_attention"]


@pytest.mark.sampled(8, also=("hugging_gpt2",))
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_spelling_is_fused(spelling):
    args = qkv()
    got = torch.compile(spelling, backend=fuser_backend)(*args)
    torch.testing.assert_close(got, spelling(*args), rtol=1e-5, atol=1e-6)
    assert got.stride() == spelling(*args).stride()
    assert fused() == [1]
    assert [u.op for c in compilations() for u in c.unfused if "attention" in u.op]
    assert not [u.op for c in compilations() for u in c.unfused if u.op in ("aten.bmm", "aten.baddbmm")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spelling", [nano_gpt, hugging_bert, opt_with_bmm], ids=lambda f: f.__name__)
def test_gradients(spelling, however_few):
    args, same = qkv(requires_grad=True), [t.double() for t in qkv()]
    same = [a.detach().clone().requires_grad_() for a in args]
    torch.compile(spelling, backend=fuser_backend)(*args).sum().backward()
    spelling(*same).sum().backward()
    for a, b in zip(args, same):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert fused() == [1]
    ops = [u.op for c in compilations() for u in c.unfused]
    assert any(op.endswith("for_cpu_backward") for op in ops)


def test_half_precision_and_symbolic_sizes():
    def f(q, k, v):
        return torch.softmax(((q @ k.transpose(-2, -1)) / 3.0).float(), -1).to(q.dtype) @ v

    for tokens in (6, 9):
        args = [torch.randn(2, 2, tokens, 8, dtype=torch.bfloat16) for _ in range(3)]
        exact = f(*[a.double() for a in args])
        got = torch.compile(f, backend=fuser_backend, dynamic=True)(*args)
        assert (got.double() - exact).abs().max() <= 1.5 * (f(*args).double() - exact).abs().max() + 1e-6
    assert fused() == [1]


def test_row_masked_as_a_whole_is_nan_as_in_eager():
    mask = CAUSAL.clone()
    mask[..., 2, :] = 0

    def filled(q, k, v):
        return (q @ k.transpose(-2, -1)).masked_fill(mask == 0, float("-inf")).softmax(-1) @ v

    def added(q, k, v, bias):
        return (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v

    args = qkv()
    got = torch.compile(filled, backend=fuser_backend)(*args)
    torch.testing.assert_close(got, filled(*args), equal_nan=True, rtol=1e-5, atol=1e-6)
    assert got[:, :, 2].isnan().all() and not got[:, :, 3].isnan().any()
    bias = torch.zeros(T, T).masked_fill(mask[0, 0] == 0, -math.inf)
    got = torch.compile(added, backend=fuser_backend)(*args, bias)
    torch.testing.assert_close(got, added(*args, bias), equal_nan=True, rtol=1e-5, atol=1e-6)
    assert fused() == [1, 1]


def weights_are_returned(q, k, v):
    weights = torch.softmax(q @ k.transpose(-2, -1), -1)
    return weights @ v, weights


def scores_are_read_twice(q, k, v):
    scores = q @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v + scores.amax()


def another_dim(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), -2) @ v


def mask_is_scaled_too(q, k, v):
    return torch.softmax((q @ k.transpose(-2, -1) + BIAS) * 0.5, -1) @ v


def filled_with_a_mild_number(q, k, v):
    return (q @ k.transpose(-2, -1)).masked_fill(CAUSAL == 0, -1.0).softmax(-1) @ v


def dropout_is_on(q, k, v):
    return F.dropout(torch.softmax(q @ k.transpose(-2, -1), -1), 1.0, training=True) @ v


def written_in_between(q, k, v):
    v = v.clone()
    weights = torch.softmax(q @ k.transpose(-2, -1), -1)
    v.mul_(2)
    q.add_(0)
    return weights @ v



def rounded_to_integers(q, k, v):
    return torch.softmax((q @ k.transpose(-2, -1)).to(torch.int32).float(), -1) @ v


OTHERS = [
    weights_are_returned, scores_are_read_twice, another_dim, mask_is_scaled_too, filled_with_a_mild_number,
    dropout_is_on, written_in_between, rounded_to_integers,
]  # fmt: skip


@pytest.mark.sampled(4, also=("rounded_to_integers",))
@pytest.mark.parametrize("other", OTHERS, ids=lambda f: f.__name__)
def test_what_only_looks_like_attention_stays(other):
    args = qkv()
    want = other(*[a.clone() for a in args])
    torch.testing.assert_close(torch.compile(other, backend=fuser_backend)(*args), want)
    assert fused() == [0]


def test_bias_that_learns_stays():
    args, bias = qkv(requires_grad=True), BIAS.clone().requires_grad_()
    f = torch.compile(lambda q, k, v, b: torch.softmax(q @ k.transpose(-2, -1) + b, -1) @ v, backend=fuser_backend)
    f(*args, bias).sum().backward()
    assert sum(fused()) == 0 and bias.grad is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spelling", [nano_gpt, with_einsum, hugging_bert], ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(spelling, inside):
    """Products and fills are one fused call; a float32 bias, which that would round, stays apart."""
    args = qkv()

    def f(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return spelling(q, k, v)

    def run(g):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return g(*args)

    g = f if inside else spelling
    got, want = run(torch.compile(g, backend=fuser_backend)), run(g)
    exact = spelling(*[a.double() for a in args]) if spelling is not hugging_bert else want.double()
    assert got.dtype == want.dtype and got.stride() == want.stride()
    stays = spelling is hugging_bert
    assert (got.double() - exact).abs().max() <= 1.5 * (want.double() - exact).abs().max() + 2e-2 * stays
    assert sum(fused()) == (not stays)


@pytest.mark.parametrize("least", [-1e9, torch.finfo(torch.float32).min])
def test_masks_made_of_integers_are_fused_under_autocast(least):
    padding = torch.ones(B, T, dtype=torch.long)
    padding[1, -2:] = 0
    padding[0] = 0  # a sentence of nothing: eager looks at all words alike

    def f(q, k, v, padding):
        mask = (1.0 - padding[:, None, None, :].to(q.dtype)) * least
        return torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D) + mask, -1) @ v

    args = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = torch.compile(f, backend=fuser_backend)(*args, padding), f(*args, padding)
    exact = f(*[a.double() for a in args], padding)
    assert got.dtype == want.dtype and sum(fused()) == 1
    assert (got.double() - exact).abs().max() <= 1.5 * (want.double() - exact).abs().max()


def test_learned_slopes_are_no_mask():
    def f(q, k, v, at):
        return torch.softmax(q @ k.transpose(-1, -2) + at.to(q.dtype) * -0.5, -1) @ v

    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(f, backend=fuser_backend)(*qkv(), torch.arange(T))
    assert sum(fused()) == 0


def test_autocast_switched_in_between_stays():
    def f(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = q @ k.transpose(-2, -1)
        return torch.softmax(scores, -1).to(v.dtype) @ v

    args = qkv()
    torch.testing.assert_close(torch.compile(f, backend=fuser_backend)(*args), f(*args), rtol=2e-2, atol=2e-2)
    assert sum(fused()) == 0


def test_gradients_under_autocast(however_few):
    args = qkv(requires_grad=True)
    same = [a.detach().clone().requires_grad_() for a in args]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = torch.compile(nano_gpt, backend=fuser_backend)(*args), nano_gpt(*same)
    got.float().sum().backward()
    want.float().sum().backward()
    for a, b in zip(args, same, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=5e-2, atol=3e-2)
    assert sum(fused()) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(0, 2, 7, 8), (3, 0, 7, 8), (3, 2, 0, 8), (3, 2, 7, 0)])
def test_attention_of_nothing_stays(size):
    """Of some of these torch's own gives no tensor at all, on CUDA."""
    q = torch.randn(size)
    program = lambda q: torch.softmax(q @ q.transpose(-2, -1) * 0.5, -1) @ q  # noqa: E731
    got = torch.compile(program, backend=fuser_backend)(q)
    assert torch.equal(got, program(q)) and sum(fused()) == 0


def on_fakes(device, size=(B, H, T, D), p=0.0, dtype=torch.float32, trained=False):
    """Written attention with dropout of fake operands, as Dynamo gives it."""
    graph = torch.fx.Graph()
    q, k, v = (graph.placeholder(n) for n in "qkv")
    with FakeTensorMode(allow_non_fake_inputs=True):
        for n in (q, k, v):
            n.meta["example_value"] = torch.empty(size, device=device, dtype=dtype, requires_grad=trained)

        def call(f, *args, **kwargs):
            node = graph.call_function(f, args, kwargs)
            values = [a.meta["example_value"] if isinstance(a, torch.fx.Node) else a for a in args]
            with torch.no_grad():  # autograd would ask for a GPU
                node.meta["example_value"] = f(*values, **kwargs)
            return node

        weights = call(torch.softmax, call(torch.matmul, q, call(torch.transpose, k, -2, -1)), -1)
        graph.output((call(torch.matmul, call(F.dropout, weights, p, True) if p else weights, v),))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize(("device", "p", "fires"), [("cuda", 0.1, 1), ("cpu", 0.1, 0), ("cuda", 1.0, 0)])
def test_live_dropout_becomes_the_fused_calls_own_on_cuda(device, p, fires):
    module = on_fakes(device, p=p)
    assert fuse_attention(module) == fires
    calls = [n for n in module.graph.nodes if n.target is F.scaled_dot_product_attention]
    assert [n.kwargs["dropout_p"] for n in calls] == [p] * fires


@pytest.mark.parametrize(("width", "trained", "fires"), [(256, True, 1), (257, True, 0), (257, False, 1)])
def test_wide_heads_are_trained_by_products_on_cuda(width, trained, fires):
    module = on_fakes("cuda", (2, 3, 64, width), dtype=torch.bfloat16, trained=trained)
    assert fuse_attention(module) == fires


def test_mild_fills_stay():
    args = qkv()

    def f(q, k, v):
        return (q @ k.transpose(-2, -1)).masked_fill(CAUSAL == 0, -1e4).softmax(-1) @ v

    torch.testing.assert_close(torch.compile(f, backend=fuser_backend)(*args), f(*args))
    assert fused() == [0]
