"""`fuser.stats()` and its text for Prometheus: what happened, by documented names."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from torch import fx

import fuser
from fuser import config, interface, kernel_cache, metrics
from fuser.errors import Unsupported
from tests.unit import stub_launcher

ROOT = pathlib.Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")


def new_registry(monkeypatch):
    made = kernel_cache.Registry()
    for module in (interface, metrics):
        monkeypatch.setattr(module, "REGISTRY", made)


@pytest.fixture
def new_cache(tmp_path):
    with config.override(cache_dir=str(tmp_path / "cache"), check_ir=False):
        yield


def scaled(x):
    return torch.relu(x) * 3 + 1


def handle_of(function):
    return fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(function)))


def risen(before):
    """What differs, without times and bytes."""
    now = fuser.stats()
    return {k: now[k] - before[k] for k in now if type(now[k]) is int and now[k] != before[k] and "bytes" not in k}


def test_the_page_of_metrics_is_the_table():
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", page, re.M)
    assert rows == [(m.name, m.kind, m.help) for m in metrics.METRICS]
    assert list(fuser.stats()) == [m.name for m in metrics.METRICS]


@needs_compiler
def test_what_happens_is_counted(new_cache, monkeypatch):
    before = fuser.stats()
    handle, x = handle_of(scaled), torch.randn(5)
    for _ in range(3):
        handle(x)
    made = risen(before)
    assert made.pop("cache_files") >= 3  # a library, its source, its plan
    assert made.pop("misses") == 1 and made.pop("libraries", 1) == 1
    assert made == {"groups": 1, "kernels": 1, "compiles": 1, "lowerings": 1, "binaries_made": 1, "hits": 3}
    assert fuser.stats()["compile_seconds"] > before["compile_seconds"]
    for name, rises in (("restored", {"restored": 1}), ("binaries_found", {"compiles": 1, "binaries_found": 1})):
        new_registry(monkeypatch)
        before = fuser.stats()
        with config.override(check_ir=name != "restored"):
            handle = handle_of(scaled)
            handle(x)
        again = risen(before)
        assert {k: again[k] for k in ("restored", "compiles", "binaries_found", "binaries_made") if k in again} == rises


def test_reasons_are_counted_and_escaped(monkeypatch):
    stub = stub_launcher.install(monkeypatch)
    reason = 'a "quoted" \\ reason\nof two lines'

    def refuse(spec, args):
        raise Unsupported(reason)

    stub.make = refuse
    before = fuser.stats()
    handle = handle_of(scaled)
    monkeypatch.setattr(stub_launcher.StubHandle, "misses", 0, raising=False)
    for _ in range(2):
        handle(torch.ones(3))
    now = fuser.stats()
    assert now["fallbacks"] == {reason: 2} and now["failures"] == before["failures"] + 1
    assert 'fuser_fallbacks{reason="a \\"quoted\\" \\\\ reason\\nof two lines"} 2\n' in fuser.prometheus()


@needs_compiler
def test_the_text_is_prometheus_form(new_cache):
    """Each sample after its help and type, names and numbers as the format wants them."""
    handle = handle_of(scaled)
    handle(torch.randn(3))
    handle(torch.randn(3, requires_grad=True))
    text = fuser.prometheus()
    assert text.endswith("\n") and "\n\n" not in text
    name = kind = None
    seen = set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert re.fullmatch(r"fuser_[a-z_]+", name) and name not in seen
            seen.add(name)
        elif line.startswith("# TYPE "):
            _, _, same, kind = line.split()
            assert same == name and kind in ("counter", "gauge") and (kind == "counter") == name.endswith("_total")
        else:
            assert re.fullmatch(re.escape(name) + r'(\{reason="[^"\n]+"\})? [0-9][0-9.e+-]*', line), line
    assert 'fuser_hits 1\n' in text and 'requires a gradient' in text


def test_a_cache_that_is_not_there_has_no_bytes(tmp_path):
    for place in ("", str(tmp_path / "nowhere")):
        with config.override(cache_dir=place):
            assert fuser.stats()["cache_bytes"] == 0 == fuser.stats()["cache_files"]
