"""A few models that NNSmith generates; `make nnsmith` installs it and runs as many as asked for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("nnsmith", reason="`make nnsmith` installs the generator")

from tests.nnsmith import model as models
from tests.nnsmith.__main__ import cases_of, run_batch
from tests.nnsmith.model import build


def test_models_do_what_eager_does():
    wrong = [f"{seed}: {problem}\n{text}" for seed, _, problem, text in run_batch(range(12), None, "-O0") if problem]
    assert not wrong, "\n".join(wrong)


def test_a_seed_gives_the_same_model():
    first = [build(s) for s in range(4)]
    models._built.cache_clear()
    second = [build(s) for s in reversed(range(4))]
    for (model, inputs), (again, others) in zip(first, reversed(second)):
        assert [(a, r) for _, a, r in model.steps] == [(a, r) for _, a, r in again.steps]
        assert all(torch.equal(x, y) for x, y in zip(inputs, others))


def test_a_process_generates_a_model_once(monkeypatch):
    """On a busy machine the solver runs out of time and another model comes of the seed; copies share no weights."""
    seed = next(s for s in range(20) if list(build(s)[0].parameters()))
    model, inputs = build(seed)
    monkeypatch.setattr(models, "_generate", None)
    again, others = build(seed)
    assert all(torch.equal(x, y) and x is not y for x, y in zip(inputs, others))
    with torch.no_grad():
        want = model(*inputs)
        for p in again.parameters():
            p.fill_(7.0)
        got = model(*others)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_models_are_fused_and_have_gradients():
    from fuser.frontends.dynamo import compilations, forget_compilations
    from tests.fuzz import cases
    from tests.fuzz.routes import alone

    forget_compilations()
    case = next(c for s in range(12) for c in cases_of(s, "compile") if c.mode == "grad")
    assert cases.eager(case).gradients
    assert not cases.problems(case, alone(case), cases.eager(case))
    assert any(c.groups for c in compilations())
