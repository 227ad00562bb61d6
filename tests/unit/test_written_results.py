"""Inputs that are written and returned: eager's values, strides and tensors, and no copy beside the kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends.dynamo import last_compilation

pytestmark = pytest.mark.usefixtures("clean")

WHOLE = {
    "returned": lambda x, y: x.add_(y),
    "returned twice": lambda x, y: (x.add_(y), x),
    "read again": lambda x, y: (x.mul_(y), x * 2, y + 1),
    "activation": lambda x, y: F.silu(x.add_(y), inplace=True),
    "both": lambda x, y: (x.copy_(y * 2), y.copy_(x + 1)),
    "norm": lambda x, y: x.copy_(F.layer_norm(x, (64,)) + y),
    "sum": lambda x, y: (x.add_(y).sum(), x),
    "mean of rows": lambda x, y: x.sub_(x.mean(1, keepdim=True)),
    "mean of columns": lambda x, y: x.sub_(x.mean(0, keepdim=True)),
    "filled": lambda x, y: x.zero_(),
    "copy": lambda x, y: x.add_(y).clone(),
}
ROWS = {
    "mean": lambda x, d: x.sub_(x.mean(d, keepdim=True)),
    "norm": lambda x, d: x.copy_((x - x.mean(d, keepdim=True)) * torch.rsqrt(x.var(d, keepdim=True) + 1e-5)),
    "two passes": lambda x, d: x.copy_(torch.log_softmax(x, d) + x),
    "sum of the new": lambda x, d: x.relu_().sum(d),
    "sum of the old": lambda x, d: (x.sum(d), x.mul_(0.5))[0],
    "extreme": lambda x, d: (x.mul_(2).sum(d), x.sub_(x.amax(d, keepdim=True)).exp_())[0],
    "scan": lambda x, d: x.copy_(torch.cumsum(x, d) * 2),
    "turned around": lambda x, d: x.sub_(x.flip(d) * 2),
    "other rows": lambda x, d: x.sub_(x.flip(0).mean(d, keepdim=True)),
}
SIZES = [(3, 5), (5, 130), (33, 17), (7, 2, 3), (4, 515), (1031,)]
OTHERS = {
    "old content": lambda x, y: (x * 1, x.add_(y)),
    "own memory": lambda x, y: (x.add_(y), y.mul_(2)),
    "row": lambda x, y: x.add_(y)[0],
    "rows before": lambda x, y: (x[0], x.add_(y)),
    "flat": lambda x, y: x.add_(y).view(-1),
    "part": lambda x, y: (x[:, :32].add_(1), x)[1],
    "detached": lambda x, y: x.detach().add_(y),
}


def told(results, inputs):
    """Values, strides, and which input each result is, or is a view of."""
    results = results if isinstance(results, tuple) else (results,)
    same = [[r is t or 2 * (r._base is t) for t in inputs] for r in results]
    return [*results, *inputs], [r.stride() for r in results], same


@pytest.mark.sampled(9)
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("name", ROWS)
def test_along_each_dim(name, order):
    """What is computed along a dim is written into the input: short dims, which become several stores, and others."""

    def program(*tensors):
        return [ROWS[name](x, d) for x, (_, d) in zip(tensors, cases)]

    cases = [(size, d) for size in SIZES for d in range(len(size))]
    inputs = [torch.randn(size[::-1]).permute(*range(len(size))[::-1]) for size, _ in cases]
    inputs = inputs if order == "columns" else [x.contiguous() for x in inputs]
    copies = [x.clone() for x in inputs]
    want, got = program(*copies), torch.compile(program, backend="fuser")(*inputs)
    torch.testing.assert_close([*got, *inputs], [*want, *copies], rtol=1e-4, atol=1e-5)
    assert not [u for u in last_compilation().unfused if u.op == "aten.copy_"]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [*WHOLE, *OTHERS])
def test_as_in_eager(name, dynamic):
    program = (WHOLE | OTHERS)[name]
    inputs = torch.randn(48, 64), torch.randn(48, 64)
    copies = inputs[0].clone(), inputs[1].clone()
    want, strides, same = told(program(*copies), copies)
    got, *rest = told(torch.compile(program, backend="fuser", dynamic=dynamic)(*inputs), inputs)
    torch.testing.assert_close(got, want)
    assert rest == [strides, same]
    if name in WHOLE:
        assert not last_compilation().unfused
