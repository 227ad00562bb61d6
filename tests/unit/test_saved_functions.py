"""`torch.compile(…).aot_compile` and `save_compiled_function`: results and gradients before and after a file."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends.dynamo import compilations
from tests.versions import IS_OLD

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.skipif(IS_OLD, reason="torch saves no functions")]


def gated(x, w, n=2):
    return F.gelu(x @ w + n).softmax(-1), (x.sin() * n).sum(0)


def writing(x, w, n=1):
    x.detach().mul_(2)
    return x + n, w.t()


def loaded(function, path):
    function.save_compiled_function(path)
    torch._dynamo.reset()
    with open(path, "rb") as file:
        return torch.compiler.load_compiled_function(file)


def tensors(rows, gradients):
    torch.manual_seed(rows)
    return torch.randn(rows, 6).requires_grad_(gradients), torch.randn(6, 5)


def results(function, rows, gradients):
    """Results, the inputs as they are afterwards, and the first input's gradient."""
    x, w = tensors(rows, gradients)
    found = [*function(x, w), x, w]
    if gradients:
        sum(t.double().square().sum() for t in found[:2]).backward()
        found.append(x.grad)
    return found


def shared(values):
    return [[a.data_ptr() == b.data_ptr() for a in values] for b in values]


CASES = [(gated, None, False), (gated, True, True), (writing, None, False)]


@pytest.mark.parametrize("f, dynamic, gradients", CASES)
def test_before_and_after_a_file(f, dynamic, gradients, tmp_path):
    options = {"numerics": "eager"}
    made = torch.compile(f, backend="fuser", fullgraph=True, dynamic=dynamic, options=options)
    made = made.aot_compile((tensors(4, gradients), {}))
    assert compilations()[-1].groups and compilations()[-1].options == options
    again = loaded(made, tmp_path / "function")
    for rows in (4, 9) if dynamic else (4,):
        want = results(f, rows, gradients)
        for function in (made, again):
            got = results(function, rows, gradients)
            torch.testing.assert_close(got, want)
            assert shared(got) == shared(want)
    assert compilations()[-1].groups and compilations()[-1].options == options
