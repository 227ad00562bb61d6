"""`fuser.explain`: what became of a model, by operator, with lines, reasons, breaks and recompilations."""

from __future__ import annotations

import base64
import dataclasses
import json
import pathlib
import re
import zlib

import pytest
import torch
from torch import nn

import fuser
import fuser.debug
from fuser.debug import explanation
from fuser.errors import InputError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        x = self.norm(torch.relu(self.inner(x) + 1))
        torch._dynamo.graph_break()
        return (x * 2).sort(-1).values.sum()


@pytest.fixture(scope="module")
def model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def explained(model):
    x = torch.rand(4, 16)
    before = [t.clone() for t in (*model.buffers(), torch.get_rng_state())]
    found = fuser.explain(model, x)
    assert all(map(torch.equal, before, (*model.buffers(), torch.get_rng_state()))), "nothing of the caller's changed"
    assert all(p.grad is None for p in model.parameters())
    return found


def test_all_is_told(explained):
    e = explained
    assert [g.stage for g in e.graphs] == ["forward", "forward", "backward", "backward"]
    assert [g.function for g in e.graphs][0] == "forward" and e.graphs[0].at.startswith(__file__)
    (broken,) = e.breaks
    assert broken.source.text == "torch._dynamo.graph_break()" and broken.source.file == __file__
    assert {o.op: o.code for o in e.not_fused if o.code != "library"} == {"aten.sort": "left_to_aten"}
    assert all(o.source is not None for o in (*e.fused, *e.not_fused))
    assert all(g.fused and g.kernels and g.hits for g in e.groups)
    assert e.groups[0].stages["compile"] <= e.groups[0].seconds
    assert "void" in e.groups[0].source() and "for i0" in e.groups[0].plan()


def test_printed(explained, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = str(explained)
    assert max(map(len, text.splitlines())) <= 100
    line = re.search(r"1 sort \[left_to_aten\] [\d.]+ \w+ at \S*test_explain\.py:(\d+)", text)
    assert pathlib.Path(__file__).read_text().splitlines()[int(line[1]) - 1].endswith(".sort(-1).values.sum()")
    assert "graph breaks\n  1 at " in text


def test_json_has_the_documented_fields(explained):
    found = json.loads(explained.to_json(source=True))
    page = (pathlib.Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    for record in ("Explanation", "Graph", "Group", "Operator", "Kernel", "Break", "Recompilation"):
        fields = {f.name for f in dataclasses.fields(getattr(explanation, record))} - {"read_traces"}
        assert fields <= named, f"docs/explain.md lacks {fields - named} of {record}"
    assert found["schema"] == explanation.SCHEMA and len(found["graphs"]) == 4
    assert "void" in found["graphs"][0]["groups"][0]["kernels"][0]["source"]
    assert "source" not in json.loads(explained.to_json())["graphs"][0]["groups"][0]["kernels"][0]


def test_pages(explained, tmp_path):
    """The report's own tests are in test_report.py."""
    page = explained.to_html(tmp_path / "e.html").read_text()
    data = zlib.decompress(base64.b64decode(re.search(r'id="data">([^<]+)<', page)[1])).decode()
    assert page.startswith("<!doctype html>") and "left_to_aten" in data and "void" in data
    assert "void" not in explained._repr_html_() and "left_to_aten" in explained._repr_html_()


def test_what_was_compiled_before_stays(model):
    compiled = torch.compile(lambda x: torch.relu(x * 3), backend="fuser", dynamic=False)
    a, b = torch.rand(8), torch.rand(9)
    want = compiled(a), compiled(b)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = fuser.explain(compiled)
    assert [g.stage for g in found.graphs] == ["inference"] * 2 and not found.breaks
    (again,) = found.recompilations
    assert "size mismatch" in again.reason and again.at.startswith(__file__)
    assert not fuser.explain(compiled, a).recompilations, "of this call alone"
    assert torch.equal(compiled(a), want[0]) and torch.equal(compiled(b), want[1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames + 1, "that of explain alone"
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(compiled._torchdynamo_orig_callable.__code__)
    left = [e for e in entries if "Deleted" not in type(e.guard_manager).__name__]
    assert len(entries) - len(left) == 1, "what was compiled to be explained is emptied"


def test_a_split_group_names_the_line(model):
    def f(x):
        y = (x + 1).half()
        y = torch.nextafter(y, y + 1)
        return y * 2

    with torch.no_grad():
        found = fuser.explain(f, torch.rand(64))
    (op,) = found.not_fused
    assert (op.op, op.code, op.within) == ("aten.nextafter", "arguments", 0) and op.bytes == 3 * 128
    assert op.source.text == "y = torch.nextafter(y, y + 1)"
    assert len(found.fused) > 2 and found.groups[0].kernels


def test_the_guard_that_failed(model):
    # A graph of no other test: equal ones share their kernels, and this asks which calls missed them.
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x, y: torch.copysign(x, y) * 3 + 1))
    fuser.run_fusion(key, [torch.rand(4, 8), torch.rand(4, 8)])
    fuser.run_fusion(key, [torch.rand(4, 8), torch.rand(8)])
    (group,) = (g for g in fuser.debug.explain().others if g.key == key)
    (missed,) = group.missed
    assert "given float32[8] strides [1] on cpu" in missed
    assert group.hits == 2 and [o.op for o in group.operators] == ["aten.copysign", "aten.mul", "aten.add"]
    assert not any("where 4 ==" in t or re.search(r"where \d+ == \d+$", t) for k in group.kernels for t in k.takes)


def test_what_cannot_be_explained():
    with pytest.raises(InputError, match="explain was given a int"):
        fuser.explain(3)
