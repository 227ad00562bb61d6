"""Tensor subclasses, corners of autograd, modules that change, threads: a few programs of each family, beside eager."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytestmark = pytest.mark.usefixtures("clean")
aten = torch.ops.aten
SIZES = (4, 7)


class Scaled(torch.Tensor):
    """A quantised weight: integers, and a scale for each row."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, strides=data.stride())

    def __init__(self, data, scale):
        self.data_, self.scale_ = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale_"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Scaled(inner["data_"], inner["scale_"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.detach.default:
            return Scaled(args[0].data_.detach(), args[0].scale_.detach())
        plain = pytree.tree_map_only(Scaled, lambda t: t.data_.to(t.dtype) * t.scale_, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Doubling(torch.Tensor):
    """A subclass with `__torch_function__` alone."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.sigmoid else result


def drawn(*size, requires_grad=True):
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).requires_grad_(requires_grad)


def jagged(n):
    parts = [drawn(k, 8, requires_grad=False) for k in (n, n + 3, 2)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def attention(x, w):
    q = (x @ w).unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2) + x


def kept(policy, x, w):
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *args, **kwargs: policy)
    return checkpoint(base, x, w, use_reentrant=False, context_fn=contexts) * 2


def base(x, w):
    return (F.gelu(x @ w) * torch.softmax(x, -1)).sin()


def doubled(x):
    return torch.sigmoid(x.as_subclass(Doubling) * 2).as_subclass(torch.Tensor)


def nested_grad_modes(x, w):
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = base(x, w)
    return z * y


FUNCTIONS = {
    "jagged: pointwise": (lambda x, w: torch.relu(x * 2 + 1).sigmoid(), jagged),
    "jagged: layer norm": (lambda x, w: F.layer_norm(x @ w, (8,)) * 2, jagged),
    "jagged: softmax": (lambda x, w: F.softmax(x * 2, dim=-1) + 1, jagged),
    "jagged: attention": (attention, jagged),
    "jagged: made inside": (
        lambda x, w: torch.nested.nested_tensor_from_jagged(x.values().sin() * 3 + 1, x.offsets()) * x, jagged
    ),
    "torch function": (lambda x, w: doubled(x @ w) + 1, lambda n: drawn(n, 8)),
    "checkpoint": (lambda x, w: checkpoint(base, x, w, use_reentrant=False) * 2, lambda n: drawn(n, 8)),
    "checkpoint that saves": (lambda x, w: kept(CheckpointPolicy.MUST_SAVE, x, w), lambda n: drawn(n, 8)),
    "checkpoint that computes": (lambda x, w: kept(CheckpointPolicy.MUST_RECOMPUTE, x, w), lambda n: drawn(n, 8)),
    "nested grad modes": (nested_grad_modes, lambda n: drawn(n, 8)),
}  # fmt: skip


def values_of(t):
    return t.values() if t.is_nested else t


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_with_gradients(name):
    f, make = FUNCTIONS[name]
    compiled = torch.compile(f, backend="fuser")
    for n in SIZES:
        found = []
        for g in (compiled, f):
            x, w = make(n), drawn(8, 8)
            y = g(x, w)
            values_of(y).sin().sum().backward()
            found.append((type(y), *(values_of(t.detach()) for t in (y, x.grad)), w.grad))
        assert found[0][0] is found[1][0]
        for result, expected in zip(found[0][1:], found[1][1:], strict=True):
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_quantised_weight(requires_grad):
    def f(x, w):
        return F.gelu(F.linear(x, w)) + 1, w.sum() * 2

    compiled = torch.compile(f, backend="fuser")
    for n in SIZES:
        w = Scaled((drawn(n, 8, requires_grad=False) * 50).to(torch.int8), drawn(n, 1, requires_grad=False))
        found = []
        for g in (compiled, f):
            x = drawn(3, 8, requires_grad=requires_grad)
            y, total = g(x, w)
            if requires_grad:
                y.sum().backward()
            found.append([y, total, *([x.grad] if requires_grad else [])])
        for result, expected in zip(*found, strict=True):
            torch.testing.assert_close(result, expected)


def made():
    """A module with a batch norm, whose weights are computed from others."""
    torch.manual_seed(0)
    layers = [parametrizations.weight_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8)]
    layers[3] = parametrizations.spectral_norm(layers[3])
    module = nn.Sequential(*layers, nn.Linear(8, 8))
    prune.l1_unstructured(module[4], "weight", 0.3)
    return module


def rescaled(module):
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()}, assign=True)


CHANGES = {
    "evaluated": lambda module: module.eval(),
    "loaded": lambda module: module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()}),
    "assigned": rescaled,
    "float64": lambda module: module.double(),
    "frozen": lambda module: module.requires_grad_(False),
    "given data": lambda module: [setattr(p, "data", p.data * 3) for p in module.parameters()],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_change_after_compilation(change):
    eager, other = made(), made()
    dynamic = None if [*CHANGES].index(change) % 2 else True  # else each step compiles twice, at one size first
    compiled = torch.compile(other, backend="fuser", dynamic=dynamic)
    for step in range(2):
        for n in SIZES:
            x = drawn(n, 8, requires_grad=False).to(next(eager.parameters()).dtype)
            pair = [(compiled, other), (eager, eager)]
            results = [call(x) for call, _ in pair]
            for result in results:
                if result.requires_grad:
                    (result.sum() * result.mean()).backward()
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
            for left, right in zip(other.parameters(), eager.parameters(), strict=True):
                assert (left.grad is None) == (right.grad is None)
                if right.grad is not None:
                    torch.testing.assert_close(left.grad, right.grad, rtol=1e-3, atol=1e-4)
            for left, right in zip(other.buffers(), eager.buffers(), strict=True):
                torch.testing.assert_close(left, right)
        if step == 0:
            for module in (other, eager):
                module.zero_grad()
                CHANGES[change](module)


def test_threads_with_sizes_and_modes_of_their_own():
    def f(x, w):
        return torch.softmax(x @ w, -1).sin()

    compiled = torch.compile(f, backend="fuser")
    found, failed = {}, []

    def call(i):
        try:
            for turn in range(6):
                n = 2 + (i + turn) % 4
                x, w = drawn(n, 8, requires_grad=i % 2 == 0), drawn(8, 8, requires_grad=False)
                with torch.set_grad_enabled(i % 2 == 0):
                    y = compiled(x, w)
                if i % 2 == 0:
                    y[:, 0].sum().backward()
                found[i, turn] = (n, y.detach(), x.grad)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failed
    assert len(found) == 24
    for n, y, gradient in found.values():
        x, w = drawn(n, 8), drawn(8, 8, requires_grad=False)
        expected = f(x, w)
        torch.testing.assert_close(y, expected.detach())
        if gradient is not None:
            expected[:, 0].sum().backward()
            torch.testing.assert_close(gradient, x.grad)
