"""OpenTelemetry spans of compilations: none without its API, a tree with it, and no harm from a tracer that fails."""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import torch
from torch import fx

import fuser
from fuser import config, interface, kernel_cache
from fuser.errors import Unsupported
from fuser.runtime import spans

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
MAKING = ["lower", "schedule", "codegen", "build"]


def scaled(x, y):
    return torch.relu(x * y + 1) - y


def call(monkeypatch, folder, function=scaled):
    """A call of a group in a new process's registry. How many calls its kernels answered."""
    monkeypatch.setattr(interface, "REGISTRY", kernel_cache.Registry())
    args = torch.randn(5, 3), torch.randn(3)
    with config.override(cache_dir=str(folder), check_ir=False):
        handle = interface.fusion_handle(interface.register_fusion(fx.symbolic_trace(function)))
        torch.testing.assert_close(handle(*args), function(*args))
        return handle.hits


class Tracer:
    """Keeps what was begun and ended, in order; fails where it is told to."""

    def __init__(self, fails=""):
        self.fails, self.said = fails, []

    def get_tracer(self, name):
        assert name == "fuser"
        if self.fails == "get":
            raise RuntimeError("no tracer")
        return self

    @contextlib.contextmanager
    def start_as_current_span(self, name, attributes):
        if self.fails == "enter":
            raise RuntimeError("no span")
        self.said.append((name, dict(attributes)))
        try:
            yield self
        finally:
            self.said.append((f"/{name}", {}))
            if self.fails == "exit":
                raise RuntimeError("no end")

    def set_attribute(self, name, value):
        if self.fails == "note":
            raise RuntimeError("no attribute")
        self.said.append((name, {"value": value}))


def traced(monkeypatch, fails=""):
    tracer = Tracer(fails)
    api = types.ModuleType("opentelemetry.trace")
    api.get_tracer = tracer.get_tracer
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", api)
    return tracer


def test_a_kernel_that_is_made_and_one_that_is_found(monkeypatch, tmp_path):
    tracer = traced(monkeypatch)
    call(monkeypatch, tmp_path)
    names = [name.removeprefix("fuser.") for name, _ in tracer.said if not name.startswith("/")]
    assert [n for n in names if n in MAKING] == MAKING and names.index("compile") == 0 and "compiler" in names
    assert tracer.said[0][1].items() >= {"fuser.device": "cpu", "fuser.operators": 4}.items()
    assert ("fuser.restored", {"value": False}) in tracer.said
    tracer.said.clear()
    call(monkeypatch, tmp_path)
    assert [n for n, _ in tracer.said] == ["fuser.compile", "fuser.kernel", "fuser.restored", "/fuser.compile"]
    assert tracer.said[2][1] == {"value": True}


def test_calls_have_none(monkeypatch, tmp_path):
    tracer = traced(monkeypatch)
    handle = interface.fusion_handle(interface.register_fusion(fx.symbolic_trace(scaled)))
    args = torch.randn(5, 3), torch.randn(3)
    handle(*args)
    tracer.said.clear()
    for _ in range(3):
        handle(*args)
    assert not tracer.said


def test_a_graph_of_torch_compile(monkeypatch, clean):
    tracer = traced(monkeypatch)
    torch.compile(scaled, backend=fuser.backend)(torch.randn(7, 3), torch.randn(3))
    begun = [(name, tuple(attributes.values())) for name, attributes in tracer.said if not name.startswith("/")]
    assert begun[0][0] == "fuser.graph"
    assert [a for n, a in begun if n == "fuser.passes"] == [("pre_grad",), ("joint_graph",), ("post_grad",)]


@pytest.mark.parametrize("fails", ["get", "enter", "note", "exit"])
def test_a_tracer_that_fails_changes_nothing(monkeypatch, tmp_path, fails):
    traced(monkeypatch, fails)
    assert call(monkeypatch, tmp_path) == 1
    with pytest.raises(Unsupported, match="the reason"), spans.span("lower"):
        raise Unsupported("the reason")


def test_nothing_is_imported_for_them(monkeypatch, tmp_path):
    before = {m for m in sys.modules if m.startswith("opentelemetry")}
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    assert call(monkeypatch, tmp_path) == 1
    assert {m for m in sys.modules if m.startswith("opentelemetry")} == before - {"opentelemetry.trace"}


def test_by_opentelemetry_itself(monkeypatch, tmp_path):
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    call(monkeypatch, tmp_path, lambda x, y: torch.tanh(x) * y - x)
    with pytest.raises(Unsupported), spans.span("lower"):
        raise Unsupported("the reason")
    found = exporter.get_finished_spans()
    by_name = {s.name: s for s in found}
    root = by_name["fuser.compile"]
    assert root.parent is None and root.attributes["fuser.kernel"] and root.attributes["fuser.restored"] is False
    for stage in MAKING[1:]:
        assert by_name[f"fuser.{stage}"].parent.span_id == root.context.span_id
    compiler = [s for s in found if s.name == "fuser.compiler"]
    assert {s.parent and s.parent.span_id for s in compiler} == {by_name["fuser.build"].context.span_id}
    assert found[-1].status.status_code.name == "ERROR" and found[-1].events[0].name == "exception"
