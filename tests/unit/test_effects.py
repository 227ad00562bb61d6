"""Calls that AOTAutograd orders by tokens: error checks of `torch.linalg`, and whatever is registered as an effect."""

from __future__ import annotations

import pytest
import torch

from fuser.frontends.dynamo import fuser_backend
from fuser.frontends.records import compilations, forget_compilations, last_compilation
from tests.versions import IS_OLD

WELL = torch.eye(4).repeat(2, 1, 1) * 3 + 0.1 * torch.arange(32.0).view(2, 4, 4).sin()
FUNCTIONS = {
    "solve": lambda a: torch.linalg.solve(a * 2, a + 1) * 2,
    "inv": lambda a: torch.linalg.inv(a * 2) + 1,
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + 1) * 2,
    "two": lambda a: torch.linalg.inv(torch.linalg.inv(a * 2) + a),
}


# `backend="aot_eager"` gives the inverse of a singular matrix there.
checks_are_kept = pytest.mark.skipif(IS_OLD, reason="AOTAutograd of this torch drops checks whose result is not read")


def compiled(function):
    torch._dynamo.reset()
    forget_compilations()
    return torch.compile(function, backend=fuser_backend)


@pytest.mark.sampled(3)
@checks_are_kept
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_program_calls_the_operator_itself(name):
    fused = compiled(FUNCTIONS[name])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fused(WELL), FUNCTIONS[name](WELL))
    record = last_compilation()
    assert record.route == "direct" and "with_effects(" not in record.source.lower(), record.source
    assert "_LINALG_CHECK_ERRORS" in record.source


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_training(name):
    fused = compiled(lambda a: FUNCTIONS[name](a).sum())
    a, b = WELL.clone().requires_grad_(), WELL.clone().requires_grad_()
    fused(a).backward()
    FUNCTIONS[name](b).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    assert all("WITH_EFFECTS" not in record.source for record in compilations())


@checks_are_kept
@pytest.mark.parametrize("gradients", [False, True])
def test_errors_are_raised_though_nobody_reads_the_check(gradients):
    singular = torch.zeros(2, 3, 3).requires_grad_(gradients)
    for function in (lambda a: torch.linalg.inv(a) + 1, lambda a: torch.linalg.inv_ex(a, check_errors=True)[1] + 1):
        fused = compiled(function)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="singular"):
                fused(singular)


@checks_are_kept
def test_the_first_of_two_errors_is_raised():
    fused = compiled(lambda a, b: torch.linalg.inv(torch.linalg.cholesky(a) * 0) + torch.linalg.inv(b))
    with pytest.raises(RuntimeError, match="cholesky"):
        fused(-torch.eye(3), torch.zeros(3, 3))
    with pytest.raises(RuntimeError, match="inv"):
        fused(torch.eye(3), torch.zeros(3, 3))
