"""Biases and gelu go into cuBLASLt's call, where only they read a matmul; checked on CUDA tensors without memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.passes.cublas import fold_into_cublas
from fuser.passes.matmuls import addmm_to_add

aten = torch.ops.aten


def rewritten(f, dtype=torch.bfloat16, device="cuda"):
    """The graph's operators after the pass, for x[6,4], w[4,8], b[8], r[6,8]."""
    with FakeTensorMode():
        args = [torch.empty(s, dtype=dtype, device=device) for s in ((6, 4), (4, 8), (8,), (6, 8))]
        module = make_fx(f)(*args)
    changed = fold_into_cublas(module)
    module.graph.lint()
    module.recompile()
    calls = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return changed, [t for t in calls if t not in (aten.view.default, aten.t.default)], module


def gelu(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    "f",
    (
        lambda x, w, b, r: gelu(torch.addmm(b, x, w)),
        lambda x, w, b, r: gelu(torch.addmm(b, x, w).view(2, 3, 8)),
        lambda x, w, b, r: gelu(x @ w + b) @ w.t(),
        lambda x, w, b, r: gelu(b + (x @ w).view(2, 3, 8)),
    ),
)
def test_gelu(f):
    changed, calls, module = rewritten(f)
    assert changed and calls[0] is aten._addmm_activation.default and len(calls) == 1 + (aten.mm.default in calls)
    (node,) = (n for n in module.graph.nodes if n.target is aten._addmm_activation.default)
    assert [a.name[:1] for a in node.args] == ["b", "x", "w"] or len(node.args) == 3
    assert node.kwargs == {"use_gelu": True}
    output = module.graph.output_node().args[0]
    assert tuple(output.meta["val"].shape) in ((6, 8), (2, 3, 8), (6, 4))


def test_values_of_the_bias():
    """The rewritten graph computes the same."""
    def f(x, w, b, r):
        return (x @ w + b).view(3, 16) @ r.view(16, 3)

    changed, calls, module = rewritten(f)
    assert changed == 1 and calls == [aten.addmm.default, aten.mm.default]
    generator = torch.Generator().manual_seed(1)
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((6, 4), (4, 8), (8,), (6, 8))]
    torch.testing.assert_close(module(*args), f(*args))


@pytest.mark.parametrize(
    "f",
    (
        lambda x, w, b, r: F.gelu(torch.addmm(b, x, w)),  # by erf, which cuBLASLt has not
        lambda x, w, b, r: torch.relu(torch.addmm(b, x, w)),
        lambda x, w, b, r: gelu(torch.addmm(r, x, w)),  # no bias for each column
        lambda x, w, b, r: gelu(torch.addmm(b, x, w, beta=2)),
        lambda x, w, b, r: (lambda y: (gelu(y), y))(torch.addmm(b, x, w)),  # read by others
        lambda x, w, b, r: gelu(torch.addmm(b, x, w).view(8, 6)),  # other columns
        lambda x, w, b, r: torch.softmax(x @ w + b, -1),  # a kernel adds it for nothing
        lambda x, w, b, r: x @ w + 1,
        lambda x, w, b, r: torch.add(x @ w, b, alpha=2),
        lambda x, w, b, r: x @ w + r,
    ),
)
def test_left_alone(f, monkeypatch):
    monkeypatch.setattr("fuser.interface.has_fusion_backend", lambda device: True)
    assert rewritten(f)[0] == 0


def test_float32_keeps_its_gelu_and_other_devices_everything():
    changed, calls, _ = rewritten(lambda x, w, b, r: gelu(x @ w + b), torch.float32)
    assert changed == 0 and calls == [aten.mm.default, aten.add.Tensor, aten.gelu.default]
    assert rewritten(lambda x, w, b, r: gelu(torch.addmm(b, x, w)), device="cpu")[0] == 0


@pytest.mark.parametrize("dtype, read, apart", [
    (torch.float32, lambda y: y.relu(), True),
    (torch.float32, lambda y: y.view(2, 2, 3).sin(), True),
    (torch.float32, lambda y: F.gelu(y, approximate="tanh"), True),
    (torch.float32, lambda y: y, False),  # no kernel reads it
    (torch.float32, lambda y: (y @ y.t()).relu(), False),
    (torch.bfloat16, lambda y: y.relu(), False),  # it would be rounded twice
])  # fmt: skip
def test_biases_of_float32_products_are_left_to_the_kernel_behind(dtype, read, apart) -> None:
    def f(b, x, w):
        return read(torch.addmm(b, x, w))

    with FakeTensorMode():
        args = [torch.empty(s, device="cuda", dtype=dtype) for s in ((3,), (4, 5), (5, 3))]
        module = make_fx(f)(*args)
    addmm_to_add(module)
    fold_into_cublas(module)
    targets = [n.target for n in module.graph.nodes]
    assert (aten.addmm.default not in targets) == apart
