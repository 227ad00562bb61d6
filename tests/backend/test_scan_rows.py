"""A scan is what its row of the table says, whatever it is called: twins under other names give the same texts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import compiler, pipeline
from fuser.canonical import canonicalize
from fuser.errors import Unsupported
from fuser.lowering.context import LoweringContext
from fuser.ops import SCANS

SIZES = ((40, 300), (3, 1 << 18), (300, 40))
DTYPES = (torch.float32, torch.float16, torch.int64, torch.uint8)
FUNCTIONS = {
    "sum": lambda x: (x.cumsum(-1), (x * 2).cumsum(0)),
    "prod": lambda x: (x.cumprod(-1), x.cumprod(0)),
    "logaddexp": lambda x: (x.logcumsumexp(-1), x.logcumsumexp(0)),
    "max": lambda x: (*both(x.cummax(-1)), *both((x + 1).cummax(0))),
    "min": lambda x: (*both(x.cummin(-1)), *both(x.cummin(0))),
    "max alone": lambda x: (x.cummax(-1)[0], x.cummax(0)[1]),
}


def both(pair):
    return pair[0], pair[1]


def text_of(fn, size, dtype: torch.dtype, device: str) -> str:
    """The source of a function's kernels, or why there is none."""
    with FakeTensorMode():
        x = torch.empty(size, dtype=dtype, device=device)
    graph = canonicalize(torch.fx.symbolic_trace(fn), False).graph
    try:
        return str(pipeline.generate(graph, [x], compiler.find_backend(device)).text).replace("twin_", "")
    except Unsupported as e:
        return e.reason.replace("twin_", "")


@pytest.mark.sampled(7, also=("logaddexp-cuda", "max-cuda", "prod-cpu"))
@pytest.mark.parametrize("device", ("cpu", "cuda"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_twin_gives_the_same_text(name, device, monkeypatch):
    cases = [(size, dtype) for size in SIZES for dtype in DTYPES]
    want = [text_of(FUNCTIONS[name], *case, device) for case in cases]
    assert sum(len(t) > 1000 for t in want) > (1 if name == "logaddexp" else len(cases) // 3)
    for row in list(SCANS.values()):
        other = {k: f"twin_{getattr(row, k)}" for k in ("name", "value", "place") if getattr(row, k)}
        monkeypatch.setitem(SCANS, other["name"], dataclasses.replace(row, **other))
    plain, asked = LoweringContext.scan, []

    def scan(self, kind, *args, **kw):
        asked.append(kind)
        return plain(self, f"twin_{kind}", *args, **kw)

    monkeypatch.setattr(LoweringContext, "scan", scan)
    for case, text in zip(cases, want, strict=True):
        assert text_of(FUNCTIONS[name], *case, device) == text, case
    assert asked
