"""CUDA graphs by running again: what a recording does, for machines without a GPU.

A replay runs the recorded callable on the recorded arguments and copies the results to where the recording's are, so
what is overwritten by a replay, and what is not, is as with CUDA graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fuser.cuda import graphs


class Graph:
    """A recorded call."""

    def __init__(self) -> None:
        self.call: Any = None

    def replay(self) -> None:
        function, values, results = self.call
        for mine, new in zip(results, function(values), strict=True):
            if isinstance(mine, torch.Tensor) and mine is not new:
                mine.copy_(new)


class Stream:
    """The one and only."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    __hash__ = None


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Recorded` take CPU tensors."""
    current: list[Graph] = []
    run = graphs.Recorded._run

    @contextlib.contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        current.append(graph)
        try:
            yield
        finally:
            current.pop()

    def noted(self: graphs.Recorded, values: Any) -> Any:
        if not current:
            return run(self, values)
        graph, kept = current[-1], list(values)
        before = [v.detach().clone() if isinstance(v, torch.Tensor) else None for v in kept]
        out = run(self, values)
        for v, old in zip(kept, before):  # a recording only records
            if old is not None and not torch.equal(v.detach(), old):
                v.detach().copy_(old)
        many = isinstance(out, (tuple, list))
        again = (lambda v: run(self, list(v))) if many else (lambda v: (run(self, list(v)),))
        graph.call = again, kept, list(out) if many else [out]
        return out

    monkeypatch.setattr(graphs.Recorded, "_run", noted)
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(graphs, "why_not", lambda args: "" if any(map(torch.is_tensor, args)) else "no tensors")
    monkeypatch.setattr(graphs, "_recover", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
