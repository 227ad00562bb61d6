"""Tensors filled piece by piece become one `cat`: the same bits as eager, once for each row."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.frontends.dynamo import fuser_backend, last_compilation
from fuser.passes.cleanup import drop_dead
from fuser.passes.written_pieces import join_writes

aten = torch.ops.aten
X = torch.linspace(-2, 2, 60).view(6, 10)


def returns(x):
    """What estimators of advantages do: rows of a new tensor, the last first."""
    out, last = torch.zeros_like(x), torch.zeros_like(x[0])
    for t in range(5, -1, -1):
        last = x[t] + 0.5 * last
        out[t] = last
    return out.sum(0), out


def some_rows(x):
    out = x * 2
    for t in (1, 2, -1):
        out[t] = x[t] + out[0]
    return out


def columns(x):
    out = torch.empty_like(x)
    for k in range(10):
        out[:, k] = x[:, 9 - k] * k
    return out.exp()


def slices(x):
    out = x.clone()
    out[:, 0:2] = x[:, 2:4].sin()
    out[:, 2:4] = x[:, 0:2] * 2
    out[:, 6:9] = x[:, 2:5]
    return out


def written_twice(x):
    out = torch.zeros_like(x)
    for t in (0, 1, 0, 2, 1):
        out[t] = out[t] + x[t] * (t + 2)
    return out


def overlapping(x):
    out = torch.zeros_like(x)
    out[0:3] = x[0:3]
    out[2:5] = x[1:4] * 2
    out[4] = out[3] + 1
    out[5] = out[2]
    return out


def older_content(x):
    out, sums = x * 1, []
    for t in range(4):
        sums.append(out.sum())
        out[t] = out[t + 1] * 2
    return out, torch.stack(sums)


def two_dims(x):
    out = torch.zeros_like(x)
    for t in range(3):
        out[t] = x[t] * 2
        out[:, t] = x[:, t]
    return out


def cast(x):
    out = torch.zeros(6, 10, dtype=torch.float64)
    for t in range(6):
        out[t] = x[t] * 2
    return out


JOINED = {returns: True, some_rows: True, columns: True, slices: True, written_twice: True, overlapping: False,
          older_content: False, two_dims: False, cast: True}  # fmt: skip


def results(value):
    return (value,) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("f", JOINED, ids=lambda f: f.__name__)
def test_the_pass(f):
    module = make_fx(torch.func.functionalize(f), tracing_mode="fake")(X)
    drop_dead(module)
    join_writes(module)
    drop_dead(module)
    module.graph.lint()
    module.recompile()
    targets = [n.target for n in module.graph.nodes]
    assert (torch.ops.aten.cat.default in targets) is JOINED[f]
    assert not JOINED[f] or torch.ops.aten.select_scatter.default not in targets
    for a, b in zip(results(module(X)), results(f(X)), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype is b.dtype


def test_writes_of_nothing_are_passed():
    """A part of no elements is apart from itself: behind a write into it there may be a write that matters."""
    graph = fx.Graph()
    x, nothing = graph.placeholder("x"), graph.placeholder("nothing")
    x.meta["val"], nothing.meta["val"] = X, X[2:2]
    written = graph.call_function(aten.slice_scatter.default, (x, nothing, 0, 2, 2))
    part = graph.call_function(aten.slice.Tensor, (written, 0, 2, 2))
    written.meta["val"], part.meta["val"] = X, X[2:2]
    graph.output(graph.call_function(aten.add.Tensor, (part, 1)))
    join_writes(fx.GraphModule({}, graph))
    assert part.args[0] is x


@pytest.mark.sampled(4, also=("False-slices",))
@pytest.mark.parametrize("f", [returns, slices, older_content], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(f, dynamic):
    compiled = torch.compile(f, backend=fuser_backend, dynamic=dynamic)
    for a, b in zip(results(compiled(X)), results(f(X)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_each_row_is_computed_once():
    """The last of n scatters, computed element by element, took n times the operations."""
    torch.compile(returns, backend=fuser_backend)(X)
    assert next(p.changed for p in last_compilation().passes if p.name == "join_writes") > 0


def test_gradients():
    a, b = (X.clone().requires_grad_() for _ in range(2))
    torch.compile(returns, backend=fuser_backend)(a)[1].square().sum().backward()
    returns(b)[1].square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_rows_of_an_input():
    def f(x):
        for t in range(4):
            x[t] = x[t + 1] * 2
        return x.sum()

    a, b = X.clone(), X.clone()
    torch.testing.assert_close(torch.compile(f, backend=fuser_backend)(a), f(b))
    assert torch.equal(a, b)
