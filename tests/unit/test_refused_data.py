"""Operators that look at their data and refuse some: a compiled function raises where eager does, also in training."""

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends.dynamo import fuser_backend

LOW, HIGH = torch.tensor([0, -1, 1]), torch.tensor([0, 3, 1])
HALVES, ABOVE = torch.full((3,), 0.5), torch.tensor([0.5, 1.5, 0.0])
NAN = torch.tensor([0.5, float("nan"), 0.0])
TABLE = torch.arange(12.0).view(3, 4)

pytestmark = pytest.mark.usefixtures("clean")

# A function of an input and data; data that it takes; data that eager refuses, in some versions of torch at least.
CASES = {
    "one_hot": (lambda x, i: F.one_hot(i, 3) * x[:, None], LOW.abs(), (LOW, HIGH)),
    "one_hot of a column": (lambda x, i: F.one_hot(i[:, None].t(), 3).sum(1) * x, LOW.abs(), (LOW, HIGH)),
    "probabilities": (lambda x, p: F.binary_cross_entropy(p * 1, HALVES) * x, HALVES, (ABOVE, -ABOVE, NAN)),
    "targets": (lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), HALVES, (ABOVE, -ABOVE, NAN)),
    "targets by weights": (lambda x, t: F.binary_cross_entropy(x.sigmoid(), t, x.detach()), HALVES, (ABOVE,)),
    "classes": (lambda x, i: F.cross_entropy(x * TABLE.t(), torch.cat([i, i[:1]])), LOW.abs(), (LOW, HIGH)),
    "rows": (lambda x, i: F.embedding(i, TABLE).sum(1) * x, LOW.abs(), (LOW, HIGH)),
    "chances": (lambda x, p: torch.bernoulli(p * 1) * x, HALVES, (ABOVE, NAN)),
    "divisors": (lambda x, i: torch.tensor([4, 5, 6]) % (i + 1) * x, LOW.abs(), (LOW,)),
}  # fmt: skip


def outcome(f, x, *data):
    """The result and gradient of f(x, *data), or the type of what it raises."""
    torch.manual_seed(0)
    try:
        y = f(x, *data)
        return y.detach(), (torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else None)
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error)


# Numbers that eager refuses when it draws; the draws are read, so that kernels could compute them.
NUMBERS = {
    "a chance above 1": lambda x: torch.empty_like(x).bernoulli_(1.5) * x,
    "a chance below 0": lambda x: torch.empty_like(x).bernoulli_(-0.5) * x,
    "a chance of NaN": lambda x: torch.bernoulli(x, float("nan")) * x,
    "a share of dropout": lambda x: torch.dropout(x * 2, 1.5, True) * 2,
    "a share by its own name": lambda x: torch.native_dropout(x * 2, -0.5, True)[0] * 2,
    "a share of attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 1)] * 3, dropout_p=1.5) * 2,
    "an interval": lambda x: torch.empty_like(x).uniform_(3, 1) * x,
}


@pytest.mark.sampled(8, also=("targets-True",))
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_data_that_eager_refuses_is_refused(name, trains):
    fn, good, bad = CASES[name]
    compiled = torch.compile(fn, backend=fuser_backend)
    for data in (good, *bad, good):
        x = torch.tensor([0.3, -2.0, 1.0], requires_grad=trains)
        got, want = outcome(compiled, x, data), outcome(fn, x, data)
        if isinstance(want, type):
            assert got is want, data
        elif name != "chances":  # random numbers of its own
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_eager_refuses_are_refused(name):
    fn, x = NUMBERS[name], torch.randn(3)
    assert outcome(torch.compile(fn, backend=fuser_backend), x) is outcome(fn, x) is RuntimeError
