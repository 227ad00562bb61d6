"""Gradients of scripts that run in fused groups, beside those of the script itself."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.utils import _pytree as pytree

import fuser
from fuser.kernel_cache import REGISTRY
from tests.unit import torchscript_corpus as corpus
from tests.unit.test_fuse_script import assert_alike, scripted
from tests.unit.torchscript_corpus import rand

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")

_SKIPPED = (corpus.Counting, corpus.half_values)  # state that holds a graph; values rounded to 16 bits in eager
_OVERWRITES = (corpus.write_fresh,)  # what a backward of the script's needs: it raises; fused, nothing is overwritten
_FEW = (corpus.branch_with_none, corpus.loop_tuple_state, corpus.Residual)
_CASES = [c for c in (*corpus.FUNCTIONS, *corpus.MODULES) if c[0] not in _SKIPPED]
_ALL = bool(os.environ.get("FUSER_TEST_ALL"))
if not _ALL:
    _CASES = [next(c for c in _CASES if c[0] is program) for program in _FEW]


def leaves(value):
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def differentiated(function, args, parameters=()):
    """Results and gradients; None in place of gradients where nothing has any."""
    torch.manual_seed(1)
    args = pytree.tree_map_only(Tensor, lambda t: t.clone().requires_grad_(t.is_floating_point()), args)
    for p in parameters:
        p.grad = None
    results = function(*args)
    parts = [r for r in leaves(results) if r.requires_grad]
    if not parts:
        return results, None
    sum((r * torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in parts).backward()
    return results, [t.grad for t in (*leaves(args), *parameters)]


def routes(fused):
    """For each group, how many forms of it were compiled with a backward, and why calls were left to ATen."""
    found = [REGISTRY.find(g.key).runner.gradients._made for g in fused.fusion.groups]
    return [(sum(map(len, f._programs.values())), f.reasons) for f in found if f is not None]


@pytest.mark.sampled(3, also=("1-loop_tuple_state",))
@pytest.mark.parametrize(("program", "args"), _CASES, ids=[f"{i}-{c[0].__name__}" for i, c in enumerate(_CASES)])
def test_as_the_script(program, args):
    script = scripted(program)
    modules = isinstance(script, nn.Module)
    fused = fuser.fuse_script(script.train() if modules else script)
    for _ in range(2):
        try:
            want, grads = differentiated(script, args, list(script.parameters()) if modules else ())
        except Exception as e:
            if program not in _OVERWRITES:
                with pytest.raises((type(e), torch.jit.Error)):  # a check that TorchScript dropped
                    differentiated(fused, args, list(fused.parameters()) if modules else ())
            return
        got, found = differentiated(fused, args, list(fused.parameters()) if modules else ())
        assert_alike(*(pytree.tree_map_only(Tensor, Tensor.detach, r) for r in (got, want)))
        assert (found is None) == (grads is None)
        for a, b in zip(found or (), grads or (), strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not any(reasons for _, reasons in routes(fused)), routes(fused)


def test_floats_share_a_backward():
    def f(x: Tensor, p: float):
        return (x * p).tanh() * p + x / p

    def powers(x: Tensor, p: float):
        return (x * 2 + 1).abs() ** p

    for function in (f, powers):
        script = torch.jit.script(function)
        fused = fuser.fuse_script(script)
        for p in (0.5, 3.25, -1.5, 0.5):
            found = []
            for g in (fused, script):
                x = torch.linspace(0.5, 2, 24).view(4, 6).requires_grad_()
                found.append(torch.autograd.grad(g(x, p).sum(), x)[0])
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        assert routes(fused) == [(1, {})]


@pytest.mark.skipif(len(_CASES) == len(_FEW), reason="slow")
def test_what_the_script_overwrites_is_kept_for_a_backward():
    def whole(x: Tensor):
        return (((x * 2).relu() + 1) * x).sigmoid()

    want, grads = differentiated(whole, (rand(4, 6),))
    got, found = differentiated(fuser.fuse_script(torch.jit.script(corpus.write_fresh)), (rand(4, 6),))
    torch.testing.assert_close((got.detach(), found), (want.detach(), grads))


def test_sizes_share_a_backward():
    script = torch.jit.script(corpus.lstm_cell)
    fused = fuser.fuse_script(script)
    for batch, width in ((4, 8), (5, 8), (6, 16), (64, 12)):
        shapes = ((batch, width + 1), (batch, width), (batch, width), (width + 1, 4 * width), (width, 4 * width))
        args = [rand(*s) for s in shapes]
        want, grads = differentiated(script, args)
        got, found = differentiated(fused, args)
        for a, b in zip((*got, *found), (*want, *grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert routes(fused) == [(1, {})]


def test_powers_of_floats_share_a_backward():
    def f(x: Tensor, p: float):
        return (x * 2 + 3).abs() ** p * torch.pow(p, x) + 1

    fused = fuser.fuse_script(torch.jit.script(f))
    for p in (0.5, 1.5, 2.0, 0.0, 3.25, 1.0):
        want, grads = differentiated(f, (rand(4, 6), p))  # the script's own gradient of 0.0 ** x is NaN, eager's is not
        got, found = differentiated(fused, (rand(4, 6), p))
        torch.testing.assert_close((got, found), (want, grads), rtol=1e-5, atol=1e-5)
    assert routes(fused) == [(1, {})]


def test_some_need_gradients_and_twice():
    def f(x: Tensor, y: Tensor):
        return (x * y + 1).tanh() * x

    script = torch.jit.script(f)
    fused = fuser.fuse_script(script)
    for call in (fused, fused):
        found = []
        for g in (call, script):
            x, y = rand(3, 4).requires_grad_(), rand(3, 4) * 2
            (first,) = torch.autograd.grad(g(x, y).sum(), x, create_graph=True)
            found.append((first, *torch.autograd.grad((first * y).sum(), x)))
        torch.testing.assert_close(found[0], found[1])
    x = rand(3, 4).requires_grad_()
    with torch.no_grad():
        assert not fused(x, x).requires_grad


def once(results, x):
    return torch.autograd.grad(sum(r.sum() for r in results), x)


def in_turn(results, x):
    return [torch.autograd.grad(r.sum(), x, retain_graph=True)[0] for r in results]


def kept_then_freed(results, x):
    total = sum(r.sum() for r in results)
    total.backward(retain_graph=True)
    total.backward()
    return x.grad


def differentiated_again(results, x):
    (first,) = torch.autograd.grad(sum(r.sum() for r in results), x, create_graph=True)
    return first, *torch.autograd.grad(first.square().sum(), x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ask", [in_turn, kept_then_freed, differentiated_again], ids=lambda f: f.__name__)
def test_a_backward_keeps_what_another_one_reads(ask):
    def shares(x: Tensor, y: Tensor):
        part = torch.clamp(x + y, -1.0, 1.0)  # the backward reads where x + y lies between, which no result tells
        return part, torch.softmax(x, -1) * part

    script = torch.jit.script(shares)
    fused = fuser.fuse_script(script)
    for way in (once, ask):  # the first backward compiles it
        x, y = torch.randn(4, 5), torch.randn(4, 5)
        want, got = (way(f(z := x.clone().requires_grad_(), y), z) for f in (script, fused))
        torch.testing.assert_close(got, want)
    assert [count for count, _ in routes(fused)] == [1]


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x: Tensor):
        return torch.softmax((x * self.weight).relu() + 1, -1)


def weighted(x: Tensor):
    return torch.softmax((x * 2).relu() + 1, -1) * x


def weighted_twice(x: Tensor, times: int = 2):
    for _ in range(times):
        x = torch.softmax((x * 3).relu() + 1, -1) * x
    return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [weighted, weighted_twice, Weighted], ids=["function", "loop", "module"])
def test_dynamo_traces_nothing_that_makes_kernels(program):
    """A compiled function calls scripts behind a graph break, where Dynamo offers to trace whatever Python runs."""
    script = torch.jit.script(program() if isinstance(program, type) else program)
    fused = fuser.fuse_script(script)
    torch._dynamo.reset()
    clear_compilation_metrics()
    compiled = torch.compile(lambda x: fused(x) * 2, backend="eager")
    for gradients in (False, True, True):
        x, found = rand(3, 5), []
        for function in (compiled, lambda x: script(x) * 2):
            result = function(z := x.clone().requires_grad_(gradients))
            found.append([result, *(torch.autograd.grad(result.square().sum(), z) if gradients else ())])
        torch.testing.assert_close(*found)
    package = os.path.dirname(fuser.__file__)
    assert not [m.co_name for m in get_compilation_metrics() if (m.co_filename or "").startswith(package)]
    assert all(not reasons for _, reasons in routes(fused))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["add_", "mul_", "sub_", "div_"])
def test_writes_in_place_have_gradients(name):
    """A residual block, as torchvision writes it: the write becomes an operator of the group."""
    text = f"def f(x, y):\n    z = torch.relu(x * 2) + 1\n    z.{name}(torch.sigmoid(y))\n    return torch.tanh(z)\n"
    script = torch.jit.CompilationUnit(text).f
    fused = fuser.fuse_script(script)
    found = []
    for function in (fused, script):
        x, y = (torch.linspace(-1, 2, 12).view(3, 4).requires_grad_() for _ in range(2))
        found.append(torch.autograd.grad(function(x, y).square().sum(), (x, y)))
    assert fused.fusion.groups and not any("gradient" in str(u) for u in fused.fusion.unfused)
    torch.testing.assert_close(*found)
