"""Symbolic sizes through `torch.compile`: eager's results for all of them, from few graphs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from fuser import debug, fusion_handle, register_fusion
from fuser.debug.guarding import program_text
from fuser.frontends.dynamo import fuser_backend
from fuser.interface import kernel_spec
from fuser.ir.sizes import Expr, Sym, floordiv, maximum, minimum, program, relation_program, run_program
from tests import compare


class Counted:
    """The backend, with the number of graphs that it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return fuser_backend(module, inputs)


def halves(x):
    """Sizes in arithmetic: the rows in pairs."""
    pairs = x.view(x.shape[0] // 2, -1)
    return torch.softmax(pairs * 2, -1) + pairs.shape[1]


def padded(x):
    """Columns filled up to a multiple of 8."""
    missing = -x.shape[1] % 8
    return F.pad(x.relu() + 1, (0, missing)).sum(0)


def flattened(x):
    return (x.reshape(-1, 2) * x.shape[0]).flatten().cos()


def joined(x):
    return torch.cat([x, x[: x.shape[0] // 2] * 2]).mean(1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("f", [halves, padded, flattened, joined])
def test_sizes_in_arithmetic(f):
    torch._dynamo.reset()
    backend = Counted()
    g = torch.compile(f, backend=backend, dynamic=True)
    for rows, columns in ((4, 6), (10, 6), (6, 14), (12, 10), (8, 32)):
        x = torch.linspace(-1, 1, rows * columns).reshape(rows, columns)
        torch.testing.assert_close(g(x), f(x))
    assert backend.graphs <= 2, backend.graphs


def test_a_dimension_marked_unbacked():
    torch._dynamo.reset()
    backend = Counted()
    f = lambda x: torch.tanh(x * 3).sum(-1)  # noqa: E731
    g = torch.compile(f, backend=backend)
    for rows in (5, 1, 9, 2):
        x = torch.linspace(0, 1, rows * 4).reshape(rows, 4)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.testing.assert_close(g(x), f(x))
    assert backend.graphs == 1


def test_a_size_that_depends_on_data():
    torch._dynamo.reset()
    backend = Counted()

    def f(x):
        kept = x[x > 0]
        return (kept * 2 + 1).exp(), kept.sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        g = torch.compile(f, backend=backend)
        for x in (torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-1.0, 3.0, -2.0]), torch.tensor([-1.0, -3.0, -2.0])):
            for a, b in zip(g(x), f(x)):
                torch.testing.assert_close(a, b)
    assert backend.graphs == 1


# -- sizes that depend on numbers in tensors ---------------------------------------------------------------------------
def first_ones(x, n):
    """The first rows, as many as a tensor says."""
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return x[:k].exp() * 2, torch.full((k,), 2.0) + 1


def places(x, n):
    where = torch.nonzero(x[:, 0] > n).squeeze(1)
    return where * 2, x[where].relu().sum(1), torch.zeros_like(where, dtype=x.dtype) + 1


@pytest.mark.parametrize("f", [first_ones, places])
def test_sizes_that_a_tensor_holds(f):
    torch._dynamo.reset()
    backend = Counted()
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        g = torch.compile(f, backend=backend)
        x = torch.linspace(-2, 5, 24).reshape(6, 4)
        for n in (3, 1, 6, 0, 4, 5):
            for a, b in zip(g(x, torch.tensor(n)), f(x, torch.tensor(n)), strict=True):
                torch.testing.assert_close(a, b)
    assert backend.graphs <= 3  # dynamo may tell 0, 1 and many apart


# -- none, one, and many -----------------------------------------------------------------------------------------------
def rows_and_columns(x):
    return x / (x.abs().sum(0, keepdim=True) + 1), (x + x.shape[0]).amax(1), x.t().contiguous() * x.shape[1]


def shifted(x):
    return torch.cat([x[1:], x[:1]]) - x, x.roll(1, 0) + 1, F.pad(x, (1, 0, 0, 2)).cumsum(0)


SIZES = ((6, 4), (1, 4), (6, 1), (1, 1), (0, 4), (9, 7), (2, 2), (31, 5))


@pytest.mark.sampled(5, also=("padded",))
@pytest.mark.parametrize("f", [rows_and_columns, shifted, padded, joined, flattened])
def test_a_handle_takes_all_sizes(f):
    """With the results of eager, or its error; from few kernels."""
    key = register_fusion(torch.fx.symbolic_trace(f))
    handle = fusion_handle(key)
    for size in SIZES:
        x = torch.linspace(-1, 1, size[0] * size[1]).reshape(size)
        try:
            want = f(x)
        except RuntimeError as e:
            with pytest.raises(RuntimeError, match=re.escape(str(e)[:20])):
                handle(x)
            continue
        got = handle(x)
        assert not compare.differences(*((v if isinstance(v, tuple) else (v,)) for v in (got, want)))
    assert len(kernel_spec(key).store.kernels) <= 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("f", [rows_and_columns, shifted, halves])
def test_a_dimension_marked_dynamic(f):
    """One graph for all sizes from which nothing of one row is made; 0 and 1 have graphs of their own."""
    torch._dynamo.reset()
    backend = Counted()
    g = torch.compile(f, backend=backend)
    for rows in (4, 8, 30, 6):
        x = torch.linspace(-1, 1, rows * 4).reshape(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(g(x), f(x))
    assert backend.graphs == 1
    for rows in (1, 0):
        x = torch.linspace(-1, 1, rows * 4).reshape(rows, 4)
        if f is not halves:
            torch.testing.assert_close(g(x), f(x))


# -- what a kernel needs of sizes --------------------------------------------------------------------------------------
def needs(f, *inputs):
    key = register_fusion(torch.fx.symbolic_trace(f))
    fusion_handle(key)(*inputs)
    (found,) = debug.guards(key)
    assert all(line in debug.explain(key) for line in (*found.inputs, *found.relations))
    return [line.partition(": ")[2] for line in found.inputs], list(found.relations)


def test_guards_can_be_read():
    """The constants make these graphs no other test's, so that each has one kernel."""
    x, y = torch.ones(4, 6), torch.ones(6)
    assert needs(lambda x, y, n: (x + y) * n - 0.1875, x, y, 3) == (
        ["float32[x0_0, x0_1] strides [x0_1, 1] on cpu", "float32[x0_1] strides [1] on cpu", "int x2"],
        ["min(x0_0*x0_1 // 4096, 1) + min(x0_1 // 8, 1) <= 1"],  # fewer than 4096 elements, or than 8 of each row
    )
    assert needs(lambda x: x.view(-1, 8).sum(1) - 0.1875, x)[0] == ["float32[4, 6] strides [6, 1] on cpu"]
    inputs, relations = needs(lambda x: x[1:3] * 0.1875, torch.ones(9, 9)[:, ::2])
    assert inputs == ["float32[x0_0, x0_1] strides [x0_s0, x0_s1] on cpu"] and "x0_s1 < x0_s0" in relations
    assert "3 <= x0_0" in relations


def test_every_operation_of_a_guard_can_be_read():
    a, b, c = (Expr({(Sym(n),): 1}) for n in "abc")
    slots = {Sym("a"): 0, Sym("b"): 1, Sym("c"): 2}
    names = {0: "a", 1: "b", 2: "c"}
    exprs = (a + 1) * (b - 3), floordiv(a, b + 2) * 3, (a * 7 + b) % (c + 1) + a % 4, minimum(a, b) * maximum(b, c) + 1
    codes = [program(e, slots) for e in exprs]
    codes += [relation_program(r, e, a * b, slots) for r in ("eq", "ne", "lt", "le") for e in exprs]
    for code in codes:
        for values in ((7, 3, 5), (2, 9, 4), (12, 1, 3)):
            found = eval(program_text(code, names), {"min": min, "max": max}, dict(zip("abc", values)))
            assert found == run_program(code, list(values)), program_text(code, names)


# -- elements more than 32 bits apart ----------------------------------------------------------------------------------
FAR = 2**32


@pytest.fixture(scope="module")
def far():
    """Five GiB of addresses, of which the tests touch a few pages."""
    return torch.empty(FAR + 4096, dtype=torch.uint8)


def test_strides_beyond_32_bits(far):
    """Reads, reductions, gathers and copies of a few elements that lie 2 GiB and more apart."""
    for stride in (2**30, 2**31 - 1, 2**31, FAR // 2 + 5):
        count = FAR // stride + 1
        x = far.as_strided((count, 8), (stride, 1))
        x.copy_(torch.arange(8 * count).reshape(count, 8))
        last = torch.tensor([count - 1, 0])
        for f in (lambda x, i: x * 2 + 1, lambda x, i: x.sum(0), lambda x, i: x.t().contiguous(), lambda x, i: x[i]):
            key = register_fusion(torch.fx.symbolic_trace(f))
            assert torch.equal(fusion_handle(key)(x, last), f(x, last))
            assert kernel_spec(key).store.kernels


def test_offsets_beyond_32_bits(far):
    row = far[-4096:].view(torch.float32)
    row.copy_(torch.linspace(-1, 1, 1024))
    key = register_fusion(torch.fx.symbolic_trace(lambda x: (x * 2).cos()))
    torch.testing.assert_close(fusion_handle(key)(row), (row * 2).cos())


def test_places_beyond_32_bits(far):
    """An index into a dim of more than 2 ** 32 elements."""
    where = torch.tensor([0, FAR - 1, -1, 2**31, -FAR])
    far[where] = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    key = register_fusion(torch.fx.symbolic_trace(lambda x, i: x[i] + 1))
    assert torch.equal(fusion_handle(key)(far, where), far[where] + 1) and kernel_spec(key).store.kernels




@pytest.mark.sampled(2)
@pytest.mark.parametrize("last", (torch.flatten, torch.ravel, lambda y: y.view(3, 2, 3), lambda y: y * 2))
def test_gradients_where_the_trace_fixes_sizes(last):
    """Symbols of the graphs stand for numbers: a kernel that gives a view by such sizes takes no sizes for it."""

    def program(x):
        y = x.flatten(0, 1).unflatten(0, (3, 6))
        t = torch.linspace(-1, 1, y.numel()).view(y.shape).sigmoid()
        return F.binary_cross_entropy_with_logits(last(y), last(t))

    x = torch.randn(3, 6, requires_grad=True)
    torch._dynamo.reset()
    (got,) = torch.autograd.grad(torch.compile(program, backend="fuser", dynamic=True)(x), x)
    (want,) = torch.autograd.grad(program(x), x)
    torch.testing.assert_close(got, want)


def test_joins_of_many_sizes():
    """Each size would have a kernel of its own: of many, ATen joins the tensors, and what follows is fused."""
    for n, why in ((40, None), (300, "more than 64 tensors of different sizes to be joined")):
        graph = torch.fx.Graph()
        parts = [graph.placeholder(f"x{i}") for i in range(n)]
        joined = graph.call_function(torch.cat, (parts,))
        graph.output(graph.call_function(torch.mul, (graph.call_function(torch.sin, (joined,)), 2)))
        key = register_fusion(graph)
        given = [torch.randn(i + 2) for i in range(n)]
        torch.testing.assert_close(fusion_handle(key)(*given), torch.cat(given).sin() * 2)
        store = kernel_spec(key).store
        assert list(store.fallbacks) == ([] if why is None else [why])
        assert (why is None) != bool(store.splits)
