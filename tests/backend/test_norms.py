"""Softmax, norms and losses, forward and backward, against eager and float64; dtypes and strides of every result."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import register_fusion, run_fusion
from tests.backend.fused import fuse, no_fallback
from tests.backend.support import check_all, fused, graph_of
from tests.device import test_device

aten = torch.ops.aten
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LIKE = {"floor": True, "zeros": False}
# Roundings more than eager; where there is no wider reference than eager itself, more than none.
SLACK = {torch.float64: 8, torch.float32: 2, torch.bfloat16: 1}


def drawn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64).to(dtype)


SOFTMAXES: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax0": lambda x: F.softmax(x, 0),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log_softmax1": lambda x: F.log_softmax(x, 1),
    "to_float": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "safe": lambda x: aten._safe_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, (0, 2)),
    "backward": lambda x: aten._softmax_backward_data(x.cos(), x.sin(), -1, x.dtype),
    "log_backward": lambda x: aten._log_softmax_backward_data(x.cos(), x.sin(), 1, x.dtype),
}


@pytest.mark.skipif(test_device() != "cpu", reason="a GPU converts to the dtype of the input")
@pytest.mark.parametrize("op", [aten._softmax_backward_data, aten._log_softmax_backward_data], ids=str)
def test_gradients_of_softmax_for_input_in_another_dtype(op):
    """ATen's result has the dtype of the gradient, whatever torch's shape function says."""
    for own, other in itertools.permutations((torch.float32, torch.float64, torch.bfloat16), 2):
        x = drawn(3, 37, dtype=own)
        torch._dynamo.reset()
        compiled = torch.compile(lambda g, y, op=op, other=other: op(g * 2, y, 1, other), backend="fuser")
        want, got = op(x * 2, x, 1, other), compiled(x, x)
        assert got.dtype is want.dtype is own
        torch.testing.assert_close(got, want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax(dtype):
    names = [n for n in SOFTMAXES if not (n == "to_float" and dtype is torch.float64)]
    names = [n for n in names if "backward" not in n or dtype.itemsize > 2]
    exact = {**SOFTMAXES, "to_float": SOFTMAXES["softmax"]}  # which itself rounds to float32, also of float64
    functions = [SOFTMAXES[n] for n in names]
    x = drawn(3, 5, 37, dtype=dtype) * 4
    check_all(names, functions, x, exact=[exact[n] for n in names], slack=SLACK[dtype], **LIKE)


def test_softmax_of_infinities():
    """A row of -inf gives NaN, or zeros from the safe one; a row with +inf gives NaN."""
    x = drawn(5, 8)
    x[0], x[1, 3], x[2, 2], x[3, 1] = -torch.inf, -torch.inf, torch.inf, torch.nan
    functions = [lambda x: F.softmax(x, -1), lambda x: F.log_softmax(x, -1), lambda x: aten._safe_softmax(x, -1)]
    check_all(["softmax", "log_softmax", "safe"], [*functions], x, slack=2, **LIKE)


def test_logsumexp_of_infinities():
    x = drawn(5, 8)
    x[0], x[1, 3], x[2, 2], x[3, 1] = -torch.inf, -torch.inf, torch.inf, torch.nan
    check_all(["logsumexp"], [lambda x: torch.logsumexp(x, -1)], x, **LIKE)


def parts(results: Any, n: int) -> list[Any]:
    """The first `n` of several results, of tensors or of a trace."""
    return [results[i] for i in range(n)]


def layer_norms(x, w, b) -> list[Any]:
    return [
        *parts(aten.native_layer_norm(x, [7, 16], w, b, 1e-5), 3),
        *parts(aten.native_layer_norm(x, [7, 16], None, None, 1e-5), 3), F.layer_norm(x, [7, 16], w),
    ]  # fmt: skip


def norms_of_one_dtype(x, w, b) -> list[Any]:
    return [F.layer_norm(x, [5, 7, 16]), F.rms_norm(x, [16], w[0]), F.rms_norm(x, [7, 16])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtypes", [*((d, d) for d in DTYPES), (torch.bfloat16, torch.float32)], ids=str)
def test_layer_norm(dtypes):
    x, w, b = drawn(5, 7, 16, dtype=dtypes[0]), drawn(7, 16, dtype=dtypes[1]), drawn(7, 16, dtype=dtypes[1])

    functions = [layer_norms, *([norms_of_one_dtype] if dtypes[0] is dtypes[1] else [])]
    check_all([str(n) for n in range(4 + 3 * len(functions))], functions, x, w, b, slack=SLACK[dtypes[0]], **LIKE)


def channel_norms(x, w, b, m, v) -> list[Any]:
    return [
        *parts(aten.native_group_norm(x, w, b, 3, 6, 20, 2, 1e-5), 3), F.group_norm(x, 3),
        *parts(aten._native_batch_norm_legit(x, w, b, True, 0.1, 1e-5), 3), F.instance_norm(x, weight=w),
        *parts(aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5), 5),
        *parts(aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5), 3), F.batch_norm(x, m, v, w, b),
    ]  # fmt: skip


@pytest.mark.sampled(4, also=("torch.float32-torch.channels_last",))
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channel_norms(dtype, layout):
    x = drawn(3, 6, 4, 5, dtype=dtype).contiguous(memory_format=layout)
    w, b, m = (drawn(6, dtype=dtype) for _ in range(3))
    check_all([str(n) for n in range(17)], [channel_norms], x, w, b, m, m.abs() + 0.5, slack=SLACK[dtype], **LIKE)


def last_gradients(g, x, w, b) -> list[Any]:
    _, mean, rstd = parts(aten.native_layer_norm(x, [16], w, b, 1e-5), 3)
    return [
        *parts(aten.native_layer_norm_backward(g, x, [16], mean, rstd, w, b, [True, True, True]), 3),
        aten.native_layer_norm_backward(g, x, [16], mean, rstd, None, None, [True, False, False])[0],
    ]


def channel_gradients(g, x, w, mean, rstd) -> list[Any]:
    every = [True, True, True]
    group = mean.view(3, 2), rstd.view(3, 2)
    return [
        *parts(aten.native_batch_norm_backward(g, x, w, None, None, mean, rstd, True, 1e-5, every), 3),
        *parts(aten.native_batch_norm_backward(g, x, w, mean, rstd, None, None, False, 1e-5, every), 3),
        *parts(aten.native_group_norm_backward(g, x, *group, w, 3, 6, 20, 2, every), 3),
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_norms(dtype, layout):
    g, x, w, b = (drawn(*size, dtype=dtype) for size in ((9, 5, 16), (9, 5, 16), (16,), (16,)))
    check_all([f"last {n}" for n in range(4)], [last_gradients], g, x, w, b, slack=2 * SLACK[dtype], **LIKE)
    g, x = (drawn(3, 6, 4, 5, dtype=dtype).contiguous(memory_format=layout) for _ in range(2))
    w, m, r = drawn(6, dtype=dtype), x.mean((0, 2, 3)), 1 / x.std((0, 2, 3))
    check_all([f"channel {n}" for n in range(9)], [channel_gradients], g, x, w, m, r, slack=SLACK[dtype], **LIKE)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rest", [(5, 7), (1, 1), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("groups", [1, 3, 20, 60])
def test_group_norms_of_neighbouring_channels(groups, rest):
    """Of any number of channels to a group, between loops that fuse with them."""
    layout = torch.channels_last if len(rest) == 2 else torch.channels_last_3d
    x = drawn(2, 60, *rest).contiguous(memory_format=layout)
    w, b = drawn(60), drawn(60)

    def norms(x, w, b) -> list[Any]:
        n = 2 * 60 * math.prod(rest)
        by_hand = aten.native_group_norm(x * 2 + 1, w, b, 2, 60, n // 120, groups, 1e-5)
        return [F.silu(F.group_norm(F.relu(x), groups, w, b)), *parts(by_hand, 3), F.group_norm(x, groups) + x]

    check_all([str(n) for n in range(5)], [norms], x, w, b, slack=2 * SLACK[torch.float32], **LIKE)


def large_batch_norm(x, g, w, b) -> list[Any]:
    out, mean, rstd = parts(aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5), 3)
    back = aten.native_batch_norm_backward(torch.relu(g), x, w, None, None, mean, rstd, True, 1e-5, [True] * 3)
    return [out, mean, rstd, *parts(back, 3)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_large_batch_norms(layout):
    """Few channels side by side: sums over rows that several threads share, and what follows them."""
    g, x = (torch.randn(3, 37, 53, 71).contiguous(memory_format=layout) for _ in range(2))
    w, b = torch.rand(37) + 0.5, torch.randn(37)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(fused(graph_of([large_batch_norm], 4), [x, g, w, b]))
    assert all(torch.equal(*pair) for pair in zip(*results))
    # Sums of n numbers of size 1 are as exact as numbers of size sqrt(n) can be.
    expected = large_batch_norm(*(t.double() for t in (x, g, w, b)))
    for out, wide, size in zip(results[0], expected, (1, 1, 1, 1, 106, 106)):
        assert (out - wide).abs().max() < 8 * torch.finfo(out.dtype).eps * (size + wide.abs().max())


PAIRED: dict[str, Callable[..., Any]] = {
    name: getattr(F, name)
    for name in (
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits kl_div"
    ).split()
}
PAIRED |= {
    "poisson": lambda x, y: aten.poisson_nll_loss(x, y, True, True, 1e-8, 1),
    "soft": lambda x, y: aten.soft_margin_loss(x, y.sign()),
    "bce": lambda x, y: aten.binary_cross_entropy(x.sigmoid(), y),
    "log_target": lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True),
    "none": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth_0": lambda x, y: F.smooth_l1_loss(x, y, beta=0.0),
    "huber_3": lambda x, y: F.huber_loss(x, y, delta=0.3, reduction="sum"),
    "hinge": lambda x, y: aten.hinge_embedding_loss(x, y.sign()),
    "mse_backward": lambda x, y: aten.mse_loss_backward(x.sum(), x, y, 1),
    "smooth_backward": lambda x, y: aten.smooth_l1_loss_backward(x.cos(), x, y, 0, 0.3),
    "huber_backward": lambda x, y: aten.huber_loss_backward(x.sum(), x, y, 2, 0.3),
    "soft_backward": lambda x, y: aten.soft_margin_loss_backward(x.sum(), x, y, 1),
    "bce_backward": lambda x, y: aten.binary_cross_entropy_backward(y, x.sigmoid(), y, None, 0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_losses_of_pairs(dtype):
    x, y = drawn(6, 11, dtype=dtype), torch.rand(6, 11, dtype=torch.float64).to(dtype)
    check_all(list(PAIRED), list(PAIRED.values()), x, y, slack=SLACK[dtype], **LIKE)


def class_losses(x, t, p, w) -> list[Any]:
    logs = F.log_softmax(x, 1)
    return [
        F.cross_entropy(x, t), F.cross_entropy(x, t, reduction="sum"), F.cross_entropy(x, t, w, reduction="none"),
        F.cross_entropy(x, t, w, ignore_index=2), F.cross_entropy(x, t, w, label_smoothing=0.2),
        F.cross_entropy(x, t, label_smoothing=0.2, ignore_index=1, reduction="sum"), F.cross_entropy(x, p, w),
        F.cross_entropy(x, p, label_smoothing=0.1, reduction="none"), F.nll_loss(logs, t, w, ignore_index=3),
        *parts(aten.nll_loss_forward(logs, t, w, 1, 4), 2), aten.nll_loss_backward(x[0, 0], logs, t, w, 1, 4, w[0]),
        aten.nll_loss_backward(x[:, 0], logs, t, None, 0, -100, w[0]),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_losses_of_classes(dtype):
    x, t, p = drawn(23, 9, dtype=dtype), torch.randint(0, 9, (23,)), torch.rand(23, 9, dtype=torch.float64).to(dtype)
    w = torch.rand(9, dtype=torch.float64).to(dtype) + 0.1
    check_all([str(n) for n in range(13)], [class_losses], x, t, p, w, slack=SLACK[dtype], **LIKE)


def test_cross_entropy_of_images():
    x, t = drawn(3, 5, 4, 6), torch.randint(0, 5, (3, 4, 6))
    t[0, 0] = -100
    functions = [F.cross_entropy, lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1)]
    check_all(["mean", "none"], functions, x, t, slack=2, **LIKE)


def test_a_class_out_of_range_raises_as_eager():
    graph = graph_of([F.cross_entropy], 2)
    x, t = drawn(4, 5), torch.tensor([0, 1, 2, 3])
    torch.testing.assert_close(fused(graph, [x, t])[0], F.cross_entropy(x, t))
    with pytest.raises(IndexError):
        run_fusion(register_fusion(graph), [x, torch.tensor([0, 1, 2, 5])])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["softmax", "amax", "argmax"])
def test_long_rows_have_a_kernel_of_their_own(name):
    """Lanes that run across short rows read long ones with steps; which lengths count as short is a guard."""
    fn = {"softmax": lambda x: torch.softmax(x, -1), "amax": lambda x: x.amax(-1), "argmax": lambda x: x.argmax(-1)}
    handle, spec = fuse(fn[name], functional=True)
    for n in (12, 10, 2, 3, 300, 1000, 64, 12, 9):
        x = torch.randn(2048, n)
        torch.testing.assert_close(handle(x), fn[name](x))
    # Rows of 2 and of 3 are written out; those of 9 to 15, of 32 to 127 and longer ones have a loop each.
    assert len(spec.store.kernels) == 5, [k.name for k in spec.store.kernels]
    no_fallback(spec)


@pytest.mark.parametrize("channels, wide", [(8, False), (4, False), (8, True)])
def test_gradients_of_norms_of_few_halves(channels, wide):
    """Statistics are of the rounded values that the backward reads (seeds 20019375 and 31002351)."""

    def fn(x):
        pooled = F.adaptive_avg_pool1d(x * 1.7, 1)
        return F.group_norm(pooled.float() if wide else pooled, 4).to(x.dtype)

    for seed in range(8):
        x = torch.randn(3, channels, 4, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()
        weights = torch.linspace(-1, 1, 3 * channels).view(3, channels, 1).bfloat16()
        torch._dynamo.reset()
        got, want = (torch.autograd.grad(f(x), x, weights)[0] for f in (torch.compile(fn, backend="fuser"), fn))
        assert torch.allclose(got, want, rtol=0.05, atol=0.02 * float(want.abs().max()) + 1e-6)


# By name, how it is called with the norm's input of shape (rows, 4, n), and with weights and biases of 4 and of n.
FEW: dict[str, Callable[..., Any]] = {
    "layer norm": lambda x, w, v: F.layer_norm(x, x.shape[-1:], v, v),
    "bare layer norm": lambda x, w, v: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x, w, v: F.rms_norm(x, x.shape[-1:], v),
    "group norm": lambda x, w, v: F.group_norm(x, 2, w, w),
    "instance norm": lambda x, w, v: F.instance_norm(torch.cat((x, x * 1.1), 2), None, None, w, w),
    "batch norm": lambda x, w, v: F.batch_norm(x[:3, :, :1], None, None, w, w, training=True),
    "batch norm of two": lambda x, w, v: F.batch_norm(x[:2, :, :1], None, None, *_wide(w), training=True),
    "running batch norm": lambda x, w, v: F.batch_norm(x, *_wide(w), training=True),
    "normalize": lambda x, w, v: F.normalize(x, dim=-1),
    "logsumexp": lambda x, w, v: x - x.logsumexp(-1, keepdim=True),
    "log softmax": lambda x, w, v: F.log_softmax(x, -1),
    "softmax": lambda x, w, v: torch.softmax(x, -1),
    "by hand": lambda x, w, v: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 0.1),
}


def _wide(w: torch.Tensor) -> list[torch.Tensor]:
    """Ones with which a batch norm keeps statistics in float32, not in 16-bit floats."""
    return [w.new_ones(4, dtype=torch.promote_types(w.dtype, torch.float32)) for _ in range(2)]


FEW_CASES = [
    (torch.bfloat16, 1, 30.0), (torch.bfloat16, 2, 0.0), (torch.bfloat16, 5, 30.0), (torch.float16, 1, 8.0),
    (torch.float16, 2, 30.0),
]  # fmt: skip
EVERY = 1 if os.environ.get("FUSER_TEST_ALL") else 4  # of so many norms a case has one


@pytest.mark.sampled(5, also=("dtype2-5-30.0",))
@pytest.mark.parametrize("dtype, n, mean", FEW_CASES)
def test_gradients_of_norms_of_few_16_bit_floats(dtype, n, mean):
    """What is saved for the backward is computed from the rounded values that the backward reads."""
    norms = dict(list(FEW.items())[FEW_CASES.index((dtype, n, mean)) % EVERY :: EVERY])

    def fn(xs, w, v):
        return [norm(F.gelu(x) * 1.7, w, v) * 1.3 for norm, x in zip(norms.values(), xs, strict=True)]

    def gradients(f, to):
        made = [x.to(to).requires_grad_() for x in xs]
        out = f(made, w.to(to), v.to(to))
        torch.manual_seed(5)
        return torch.autograd.grad(out, made, [torch.randn(y.shape).to(dtype).to(to) for y in out])

    torch.manual_seed(3)
    xs = [(torch.randn(6, 4, n) + mean).to(dtype) for _ in norms]
    w, v = (torch.rand(size).add(0.5).to(dtype) for size in (4, n))
    torch._dynamo.reset()
    found = zip(norms, gradients(torch.compile(fn, backend="fuser"), dtype), gradients(fn, dtype),
                gradients(fn, torch.float64), strict=True)  # fmt: skip
    far = {}
    for name, got, want, exact in found:
        error, eagers = ((g.double() - exact).abs().max() for g in (got, want))
        if error > 2 * eagers + 2 * torch.finfo(dtype).eps * exact.abs().max():
            far[name] = float(error), float(eagers)
    assert not far, far
