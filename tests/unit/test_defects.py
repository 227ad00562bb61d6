"""A defect of fuser is loud: one warning that names it, and an error where `config.strict` is set."""

from __future__ import annotations

import warnings

import pytest
import torch

import fuser
from fuser import notices, pipeline
from fuser.cpu import fused_kernel
from fuser.errors import LoweringError
from fuser.lowering.registry import LOWERINGS
from tests.backend.fused import fuse

ERRORS = (TypeError, ValueError, NotImplementedError, AssertionError, IndexError, AttributeError, KeyError)


@pytest.fixture(params=ERRORS)
def broken(request, monkeypatch):
    """A lowering that raises."""

    def lower_relu(ctx, x):
        raise request.param("no such thing")

    monkeypatch.setattr(notices, "_said", {})
    monkeypatch.setitem(LOWERINGS, "aten.relu", lower_relu)
    return request.param


def program(x, y):
    return torch.relu(x * 2) + torch.softmax(y * 3, -1)


def test_is_said_once_and_runs_by_aten(broken, lenient):
    handle, spec = fuse(program)
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    with pytest.warns(RuntimeWarning) as seen:
        torch.testing.assert_close(handle(x, y), program(x, y))
    (said,) = [str(w.message) for w in seen]
    for part in ("lower_relu", "aten.relu", broken.__name__, "no such thing", "report"):
        assert part in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(handle(x, y), program(x, y))
    assert spec.store.entries[0].reason and "a defect of fuser" in spec.store.entries[0].reason


def test_is_an_error_where_that_is_asked_for(broken):
    assert fuser.config.strict, "tests run so"
    handle, _ = fuse(program)
    with pytest.raises(LoweringError, match="lower_relu, for aten.relu"):
        handle(torch.randn(4, 5), torch.randn(4, 5))


@pytest.mark.parametrize("error", (AttributeError, AssertionError, NameError))
def test_a_number_of_the_call_hides_no_defect(error, monkeypatch):
    def lower_mul(ctx, x, y):
        raise error("'NoneType' object has no attribute 'size'")

    monkeypatch.setitem(LOWERINGS, "aten.mul", lower_mul)
    handle, _ = fuse(lambda x, factor: x * factor)
    with pytest.raises(LoweringError, match="lower_mul, for aten.mul"):
        handle(torch.randn(4), 2.5)


def _fails(*args, **kwargs):
    raise KeyError("no such row")


@pytest.mark.parametrize(
    ("module", "name", "stage"), ((pipeline, "schedule", "schedule"), (fused_kernel, "generate", "codegen"))
)
def test_a_defect_of_a_later_stage_is_named(module, name, stage, monkeypatch):
    monkeypatch.setattr(module, name, _fails)
    handle, _ = fuse(program)
    said = rf"report this: {stage} of aten.mul.*raised KeyError: 'no such row' \(test_defects.py:\d+, in _fails\)"
    with pytest.raises(LoweringError, match=said):
        handle(torch.randn(4, 5), torch.randn(4, 5))
