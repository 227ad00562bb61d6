"""A reduction is what its row of the table says, whatever it is called: twins under other names give the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fuser import interface, kernel_cache
from fuser.lowering.context import LoweringContext
from fuser.ops import REDUCTIONS
from tests.backend.fused import flat, fuse, no_fallback

SHAPES = ((3, 130), (200, 3), (2, 515), (4, 1), (8, 0), (1, 70000))
FUNCTIONS = {
    "sum": lambda x: (x.sum(-1), x.sum(0), x.sum()),
    "prod": lambda x: (x.prod(-1), x.prod(0)),
    "max": lambda x: (x.amax(-1), x.amax(0)),
    "min": lambda x: (x.amin(-1), x.amin(0), x.amin()),
    "any": lambda x: (x.any(-1), x.any(0), x.any()),
    "all": lambda x: (x.all(-1), x.all(0)),
    "argmax": lambda x: (x.argmax(-1), x.max(0)[1], x.max(-1)[0], x.max(-1)[1]),
    "argmin": lambda x: (x.argmin(-1), x.min(0)[0], x.min(0)[1]),
    "mean, var": lambda x: (x.double().var(-1), x.float().mean(0)),
}


@pytest.fixture
def twins(monkeypatch):
    """Lets lowerings ask for a copy of each reduction under another name once it is called."""

    def switch() -> None:
        for name, row in list(REDUCTIONS.items()):
            twin = dataclasses.replace(row, name=f"twin_{name}", value=row.value and f"twin_{row.value}")
            monkeypatch.setitem(REDUCTIONS, twin.name, twin)
        plain = LoweringContext.reduction
        monkeypatch.setattr(
            LoweringContext, "reduction", lambda self, kind, *args, **kw: plain(self, f"twin_{kind}", *args, **kw)
        )

    return switch


def results(monkeypatch, function, inputs):
    monkeypatch.setattr(interface, "REGISTRY", kernel_cache.Registry())
    handle, spec = fuse(function)
    found = [flat(handle(x)) for x in inputs]
    return found, spec


@pytest.mark.sampled(12, also=("argmax-torch.float32",))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int32, torch.uint8), ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_twin_gives_the_same_bits(name, dtype, twins, monkeypatch):
    inputs = [(torch.randn(s) * 4).to(dtype) for s in SHAPES]
    if name not in ("sum", "prod", "any", "all"):  # nothing is the extreme of no elements
        inputs = [x for x in inputs if x.numel()]
    want, _ = results(monkeypatch, FUNCTIONS[name], inputs)
    twins()
    got, spec = results(monkeypatch, FUNCTIONS[name], inputs)
    for a, b in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    no_fallback(spec)
    assert any("twin" in k.source for k in spec.store.kernels)
