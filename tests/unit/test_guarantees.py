"""Guarantees that a user writes: `require_fused` in a block and as an option, `fuser.testing.assert_fused`."""

from __future__ import annotations

import pytest
import torch

import fuser
import fuser.testing
from fuser.errors import ConfigError, NotFusedError
from fuser.frontends.records import compilations, forget_compilations

X = torch.rand(8, 8)


def one(x):
    return torch.relu(x * x + 1)


def two(x):
    return (x.softmax(-1) @ x).relu()  # a product between: two kernels


def sorts(x):
    return (x + 1).sort().values * 2


def breaks(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def refused(x):
    y = (x + 1).half()
    return torch.nextafter(y, y + 1) * 2


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def in_block(function, most=None):
    with fuser.require_fused(most):
        torch.compile(function, backend="fuser")(X)


def with_option(function, most=None):
    options = {"require_fused": True if most is None else most}
    torch.compile(function, backend="fuser", options=options)(X)


def asserted(function, most=None):
    fuser.testing.assert_fused(function, X, kernels=most)


WAYS = (in_block, with_option, asserted)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_fused_passes(way):
    way(one, 1)
    way(two)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_fails_with_the_reason_and_the_line(way):
    line = sorts.__code__.co_firstlineno + 1
    with pytest.raises(NotFusedError, match=rf"aten.sort at .*test_guarantees.py:{line} \[left_to_aten\]: it sorts"):
        way(sorts)
    with pytest.raises(NotFusedError, match=r"it takes 2 kernels: expected 1 at most"):
        way(two, 1)
    with pytest.raises(NotFusedError, match="nextafter of a 16-bit float"):
        way(refused)


@pytest.mark.parametrize("way", [in_block, asserted])
def test_graph_breaks_are_none_of_it(way):
    with pytest.raises(NotFusedError, match=r"graph break at .*test_guarantees.py:\d+"):
        way(breaks)


def test_calls_are_checked_too():
    key = fuser.register_fusion(torch.fx.symbolic_trace(refused))
    fuser.run_fusion(key, [X])
    with pytest.raises(NotFusedError, match=f"a call of fusion {key} runs on ATen"), fuser.require_fused():
        fuser.run_fusion(key, [X[:7]])
    with pytest.raises(NotFusedError, match="calls ran on ATen"), fuser.require_fused():
        fuser.run_fusion(key, [X])  # native code answers this call, and counts it
    with pytest.raises(NotFusedError, match=r"eager, because config.enabled"):
        torch.compile(one, backend="fuser", options={"enabled": False, "require_fused": True})(X)


def test_reads():
    fuser.testing.assert_fused(lambda x: x.softmax(-1), X, kernels=1, reads=1)
    with pytest.raises(NotFusedError, match="its kernels read 3 tensors: expected 2 at most"):
        fuser.testing.assert_fused(lambda x, y, z: x + y + z, X, X + 1, X + 2, reads=2)


def test_values():
    with pytest.raises(ConfigError, match="expected True, False, or the most kernels"):
        with_option(one, -1)
    assert fuser.config.check("require_fused", "3") == 3 and not fuser.config.require_fused


class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.conv = torch.nn.Linear(256, 512), torch.nn.Conv2d(8, 16, 3)
        self.scale = torch.nn.Parameter(torch.rand(256))

    def forward(self, x):
        y = self.up(x * (self.scale.exp() + 1))
        return torch.relu(y), torch.relu(self.conv(x.view(-1, 8, 16, 16)))


def head(x, w):
    return torch.relu(x @ w + 1)


def looked_up(table, rows):
    """The gradient of a large table, which begins as pages that nobody has written."""
    return (torch.nn.functional.embedding(rows, table) * 2).square().sum()


OWN = {
    "large product": {"product"},
    "large product of any rows": {"sized_product"},
    "frozen": {"folded_add"},  # whether weights are packed is for a contest to say
    "table": {"zeros"},
}


@pytest.mark.parametrize("name", OWN)
def test_what_the_package_calls_itself_is_a_librarys(name):
    """Calls of Python functions that passes put in count as calls of a library, not as operators left over."""
    forget_compilations()
    options = {"require_fused": True, "freeze": name == "frozen"}

    def compiled(f):
        return torch.compile(f, backend="fuser", options=options)

    if name == "frozen":
        model, x = Frozen().eval(), torch.rand(64, 256)
        got, want = compiled(model)(x), model(x)
        assert all(map(torch.allclose, got, want, [1e-4] * 2, [1e-5] * 2))
    elif name == "table":
        table, rows = torch.rand(40000, 256, requires_grad=True), torch.randint(0, 40000, (64,))
        with torch.enable_grad():
            (got,) = torch.autograd.grad(compiled(looked_up)(table, rows), table)
            assert torch.equal(got, torch.autograd.grad(looked_up(table, rows), table)[0])
    else:
        x, w = torch.rand(1024, 64), torch.rand(64, 9000)
        if name.endswith("rows"):
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(head)(x, w), head(x, w), rtol=1e-4, atol=1e-5)
    own = {o.op for g in compilations() for o in g.unfused if not o.op.startswith("aten.")}
    assert own >= OWN[name]
