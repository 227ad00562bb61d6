"""Matmuls by oneDNN: values within rounding of ATen's, special values kept, small ones left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fuser import config
from fuser.passes.onednn import fold_epilogues, linear_to_onednn
from fuser.passes.providers import linear_op
from fuser.runtime import products

pytestmark = pytest.mark.skipif(linear_op() is None, reason="this torch has no oneDNN")

X, W, B = torch.randn(96, 320), torch.randn(320, 448), torch.randn(448)


def rewrite(f, *args, mode="fake"):
    module = make_fx(f, tracing_mode=mode)(*args)
    changed = linear_to_onednn(module), fold_epilogues(module)
    module.graph.lint()
    module.recompile()
    return module, changed


def close(got, want, exact):
    """No further from float64 than a few times ATen's own distance."""
    assert got.shape == want.shape and got.stride() == want.stride() and got.dtype == want.dtype
    error, allowed = (got - exact).abs().max(), (want - exact).abs().max()
    assert error <= 4 * allowed + 1e-7


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [96, 1024])
def test_values(transposed, bias, rows):
    x = torch.randn(rows, 320)
    w = torch.randn(448, 320) if transposed else W

    def f(x, w, b):
        w = w.t() if transposed else w
        return torch.addmm(b, x, w) if bias else torch.mm(x, w)

    module, changed = rewrite(f, x, w, B)
    assert changed == (1, 0)
    close(module(x, w, B), f(x, w, B), f(x.double(), w.double(), B.double()))


ACTIVATIONS = {
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_epilogue(name):
    g = ACTIVATIONS[name]

    def f(x, w, b):
        return g(torch.addmm(b, x, w).view(8, 12, 448)) + 1

    module, changed = rewrite(f, X, W, B)
    assert changed == (1, 1)
    close(module(X, W, B), f(X, W, B), f(X.double(), W.double(), B.double()))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_epilogue_on_special_values(name):
    g = ACTIVATIONS[name]
    x = torch.zeros(96, 320)
    x[:6, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, -60.0])
    w = torch.zeros(320, 448)
    w[0] = 1

    def f(x, w):
        return g(x.mm(w))

    module, changed = rewrite(f, x, w)
    assert changed == (1, 1)
    torch.testing.assert_close(module(x, w)[:, 0], g(x[:, 0]), equal_nan=True)


@pytest.mark.parametrize("g", [torch.relu, F.gelu, F.hardtanh, F.hardsigmoid])
def test_what_onednn_gets_wrong_on_special_values_is_not_folded(g):
    _, changed = rewrite(lambda x, w: g(x.mm(w)), X, W)
    assert changed == (1, 0)


def test_an_activation_beside_another_reader_is_not_folded():
    _, changed = rewrite(lambda x, w: (torch.tanh(y := x.mm(w)), y * 2), X, W)
    assert changed == (1, 0)


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x, w: x[:4].mm(w[:, :64]), (X, W)),
        (lambda x, w: x.mm(w), (X.double(), W.double())),
        (lambda x, w: torch.addmm(x.mm(w).double(), x.double(), w.double()).float(), (X[:8], W[:, :8])),
        (lambda x, w: torch.addmm(x, x, w), (torch.randn(320, 320), torch.randn(320, 320))),
        (lambda x, w: torch.addmm(x[0], x, w, beta=2), (torch.randn(320, 320), torch.randn(320, 320))),
        (lambda x, w: x.new_empty(512, 0).mm(w[:0]), (X, W)),
    ],
    ids=["small", "float64", "mixed", "matrix bias", "scaled", "empty product"],
)
def test_left_alone(f, args):
    assert rewrite(f, *args)[1] == (0, 0) or "matrix bias" not in str(f)
    module, _ = rewrite(f, *args)
    torch.testing.assert_close(module(*args), f(*args))


@pytest.mark.parametrize(("rows", "columns", "taken"), [(2048, 512, 1), (600, 1024, 1), (66000, 16, 0)])
def test_a_transposed_left_operand_is_copied_unless_it_is_large(rows, columns, taken):
    torch.manual_seed(0)
    x, w = torch.randn(64, rows).t(), torch.randn(64, columns)
    module, changed = rewrite(lambda x, w: x.mm(w), x, w)
    assert changed == (taken, 0)
    copies = [n for n in module.graph.nodes if n.target is torch.ops.aten.clone.default]
    assert [n.meta["val"].is_contiguous() for n in copies] == [True] * taken
    close(module(x, w), x.mm(w), x.double().mm(w.double()))


def test_the_copy_of_an_operand_is_a_kernel_of_its_own():
    from fuser.frontends.dynamo import compilations, fuser_backend

    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randn(512, 256), torch.randn(512, 256, requires_grad=True)

    def f(x, w):
        return (x * w.exp()).t().mm(torch.sigmoid(x))

    got = torch.compile(f, backend=fuser_backend)(x, w.detach())
    close(got, f(x, w.detach()), f(x.double(), w.detach().double()))
    groups = [g.ops for g in compilations()[-1].groups]
    assert ("aten.t", "aten.clone") in groups, groups


def test_settings_switch_it_off():
    with config.override(linear_backend="aten"):
        assert rewrite(lambda x, w: x.mm(w), X, W)[1] == (0, 0)


def test_strided_operands_and_symbolic_rows():
    def f(x, w):
        return x.mm(w)

    x, w = torch.randn(640, 97).t(), torch.randn(600, 641)[:, 1:].t()
    module, changed = rewrite(f, x, w)
    assert changed == (1, 0)
    torch.testing.assert_close(module(x, w), f(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_through_compile(dynamic):
    from fuser.frontends.dynamo import fuser_backend, last_compilation

    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(320, 640), torch.nn.GELU("tanh"), torch.nn.Linear(640, 320)).eval()
    f = torch.compile(model, backend=fuser_backend, dynamic=dynamic)
    with torch.no_grad():
        for rows in (96, 64, 1, 0):
            x = torch.randn(rows, 320)
            torch.testing.assert_close(f(x), model(x), rtol=1e-4, atol=1e-5)
            if rows == 96:
                assert "LINEAR_POINTWISE" in last_compilation().source and "'gelu'" in last_compilation().source


@pytest.mark.parametrize(("columns", "bias"), [(65536, False), (65536, True), (1024, True)])
def test_results_that_malloc_would_map_anew(columns, bias):
    from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend

    torch._dynamo.reset()
    forget_compilations()
    torch.manual_seed(0)
    x, w = torch.randn(128, 16, requires_grad=True), torch.randn(columns, 16, requires_grad=True)

    row = torch.randn(columns) if bias else None

    def f(x, w):
        return F.linear(x.sin(), w, None if row is None else row.to(x.dtype)).exp().sum(1).log().sum()

    exact = torch.autograd.grad(f(x.double(), w.double()), (x, w))
    compiled = torch.compile(f, backend=fuser_backend)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(x, w), (x, w)), exact, rtol=1e-4, atol=1e-4)
    source = "".join(c.source for c in compilations())
    assert ("PRODUCT" in source) is (columns == 65536 and products.are_possible())
