"""Products of few rows by kernels of the package: right for all sizes, dtypes and machines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fuser
from fuser import config, machines
from fuser.contests.deciding import Decisions
from fuser.contests.race import Contestant
from fuser.errors import VerifyError
from fuser.ir.loop_body import ops, record
from fuser.ir.nodes import Buffer, Reduction
from fuser.ir.sizes import LOOP, expr, symbol
from fuser.ir.verifier import verify_buffers
from fuser.passes import onednn, providers

aten = torch.ops.aten
PRODUCT = providers.product_op()
# Rows, inner and columns: parts of a register and of a block of columns, long rows (taken in parts), as many as may be.
SIZES = [(1, 1027, 99), (2, 770, 200), (4, 512, 129), (5, 4100, 17), (8, 515, 130), (8, 2051, 67)]


@pytest.fixture(autouse=True)
def no_trials():
    with config.override(slowest=0.0):
        yield


def linear(activation: bool) -> fx.Graph:
    """`x @ w.t() + bias`, or with an activation and a tensor added."""
    graph = fx.Graph()
    x, w, bias, more = (graph.placeholder(n) for n in ("x", "w", "bias", "more"))
    out = graph.call_function(PRODUCT, (bias, x, graph.call_function(aten.t.default, (w,))))
    if activation:
        out = graph.call_function(aten.gelu.default, (out,))
    graph.output(graph.call_function(aten.add.Tensor, (out, more)))
    return graph


def arguments(rows, inner, columns, dtype):
    torch.manual_seed(rows * inner + columns)
    shapes = (rows, inner), (columns, inner), (columns,), (rows, columns)
    return [(torch.randn(s) * (0.1 if n == 1 else 1.0)).to(dtype) for n, s in enumerate(shapes)]


def run(graph: fx.Graph, *args):
    """The result, by one kernel."""
    key = fuser.register_fusion(graph)
    out = fuser.fusion_handle(key)(*args)
    text = str(fuser.debug.explain(key))
    assert "ran by ATen" not in text and "ran by kernels" in text, text
    return out


@pytest.mark.optimised  # without optimisation sums have another order
@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_linear_of_few_rows_is_as_exact_as_eager(size, dtype):
    x, w, bias, more = arguments(*size, dtype)
    exact = F.gelu(F.linear(x.double(), w.double(), bias.double())) + more.double()
    eager = F.gelu(F.linear(x, w, bias)) + more
    got = run(linear(True), x, w, bias, more)
    assert got.dtype is dtype and got.stride() == eager.stride()
    assert (got - exact).abs().max() <= 1.05 * (eager - exact).abs().max() + 1e-6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("isa", [row.name for row in machines.ROWS if machines.why_not(row) is None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_machine_gives_the_same_up_to_rounding(isa, dtype):
    with config.override(isa=isa):
        x, w, bias, more = arguments(3, 531, 131, dtype)
        exact = F.linear(x.double(), w.double(), bias.double()) + more.double()
        got = run(linear(False), x, w, bias, more)
        assert (got - exact).abs().max() <= (1e-4 if dtype is torch.float32 else 0.1)


def test_special_values_pass():
    x, w, bias, more = arguments(2, 400, 200, torch.float32)
    x[0, 3], w[7, 399], w[9, 1] = float("nan"), float("inf"), float("-inf")
    want = F.linear(x, w, bias) + more
    torch.testing.assert_close(run(linear(False), x, w, bias, more), want, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_gated_feed_forward_reads_its_input_once_and_rounds_once(rows):
    graph = fx.Graph()
    x, gate, up = (graph.placeholder(n) for n in ("x", "gate", "up"))
    x = graph.call_function(aten.mul.Tensor, (x, 2.0))
    both = [graph.call_function(PRODUCT, (None, x, graph.call_function(aten.t.default, (w,)))) for w in (gate, up)]
    graph.output(graph.call_function(aten.mul.Tensor, (graph.call_function(aten.silu.default, (both[0],)), both[1])))
    torch.manual_seed(0)
    args = [torch.randn(rows, 384), torch.randn(320, 384) * 0.1, torch.randn(320, 384) * 0.1]
    x, gate, up = (a.double() for a in args)
    exact = F.silu(2 * x @ gate.t()) * (2 * x @ up.t())
    got = run(graph, *args)
    assert (got - exact).abs().max() < 1e-4
    text = fuser.debug_get_fused_kernel_code(graph, args)
    assert text.count("fuser_dot_f32_") == 3 and text.count('extern "C"') == 2  # the helper, two calls in one loop


def test_heads_apart_from_one_product():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    out = graph.call_function(PRODUCT, (None, x, graph.call_function(aten.t.default, (w,))))
    out = graph.call_function(aten.view.default, (out, [2, 4, 80]))
    out = graph.call_function(aten.transpose.int, (out, 0, 1))
    graph.output(graph.call_function(aten.clone.default, (out,), {"memory_format": torch.contiguous_format}))
    x, w = torch.randn(2, 256), torch.randn(320, 256)
    torch.testing.assert_close(run(graph, x, w), (x @ w.t()).view(2, 4, 80).transpose(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.randn(9, 512), torch.randn(512, 512)),  # many rows
        (torch.randn(2, 32), torch.randn(64, 32)),  # a small weight
        (torch.randn(2, 512).double(), torch.randn(512, 512).double()),
        (torch.randn(512, 2).t(), torch.randn(512, 512)),  # rows in pieces
    ],
    ids=["rows", "small", "float64", "turned"],
)
def test_other_products_are_left_to_libraries(x, w):
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_function(PRODUCT, (None, a, graph.call_function(aten.t.default, (b,)))))
    key = fuser.register_fusion(graph)
    assert torch.equal(fuser.fusion_handle(key)(x, w), x @ w.t())
    assert "red_dot" not in str(fuser.debug.explain(key))


def test_offsets_are_checked_by_plain_loops():
    with config.override(check_bounds=True):
        x, w, bias, more = arguments(3, 300, 250, torch.float32)
        got = run(linear(False), x, w, bias, more)
    torch.testing.assert_close(got, F.linear(x, w, bias) + more, rtol=1e-4, atol=1e-4)


def test_a_contraction_of_no_product_is_refused():
    n = expr(8)
    body = record(lambda index: ops.load("in0", index, torch.float32), 2)
    loops = Reduction((n, n), body, (symbol("i0", LOOP),), 1, "dot")
    buffer = Buffer("buf0", torch.float32, (n,), (expr(1),), [loops])
    with pytest.raises(VerifyError, match="no product of two operands"):
        verify_buffers([buffer], {"in0": (torch.float32, 2)}, [], [])


@pytest.mark.skipif(providers.linear_op() is None, reason="this torch has no oneDNN")
def test_a_layer_whose_contest_a_kernel_won_is_one_group(monkeypatch):
    monkeypatch.setattr(onednn, "chosen", lambda *args: providers.OWN)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).eval()
    x = torch.randn(1, 256)
    with torch.no_grad():
        compiled = torch.compile(module, backend=fuser.backend, dynamic=False)
        torch.testing.assert_close(compiled(x), module(x))
        found = fuser.explain(module, x)
    assert len(found.groups) == 1, str(found)


def test_contests_run_outside_of_a_trace():
    seen = []

    def enter():
        include = str(torch._C._dispatch_tls_local_include_set())
        seen.append("PythonDispatcher" in include)
        return {"one": Contestant(lambda: torch.ones(3)), "two": Contestant(lambda: torch.ones(3))}

    with torch._dispatch.python.enable_python_dispatcher():
        Decisions("test of traces").choice(("k",), ("one", "two"), "", enter)
    assert seen == [False]
