"""`python -m fuser report`: one page without network; it opens in a browser, searches, clicks, and is quick to make."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pathlib
import re
import sys
import time
import zlib

import pytest
import torch
from torch import nn

import fuser
from fuser.debug import watching
from fuser.debug.explanation import Explanation, Group
from tests import browser, forked

ROOT = pathlib.Path(__file__).parents[2]
GROUPS = 300
needs_browser = pytest.mark.skipif(browser.find() is None, reason="there is no Chromium: apt install chromium")

SCRIPT = """
import sys
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(torch.nn.functional.gelu(self.inner(x)).sinh()).sort(-1).values * 2

def main():
    model = torch.compile(Model(), backend="fuser")
    for _ in range(int(sys.argv[1])):
        model(torch.rand(8, 32)).sum().backward()

main()
sys.exit(int(sys.argv[2]))
"""


def packed(text: str) -> dict:
    """The data of a page."""
    data = re.search(r'id="data">([^<]+)<', text)[1]
    return json.loads(zlib.decompress(base64.b64decode(data)))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def written(script):
    """The page of a script that makes steps, and its process."""
    found = script.with_name("page.html")
    command = ["-m", "fuser", "report", str(script), "6", "3", "-o", str(found)]
    ended = forked.run(command, timeout=300, cwd=ROOT, dynamo=True)
    return found, ended


def test_a_script_is_run_and_its_steps_are_timed(written):
    path, ended = written
    assert ended.returncode == 3, ended.stderr
    assert "2 graphs" in ended.stderr and "written in" in ended.stderr
    text = path.read_text()
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?!data:)", text), "one file, and no network"
    data = packed(text)
    assert [g["stage"] for g in data["graphs"]] == ["forward", "backward"]
    forward = data["graphs"][0]
    assert ["addmm", "group 0"] in [[a, b] for a, b, n in forward["flows"] if n == 8 * 32 * 4]
    group = forward["groups"][0]
    file, line, function, _ = group["operators"][0]["at"]
    assert data["files"][file][str(line)]
    kind = data["kinds"][group["key"]]
    assert "void" in kind["kernels"][0]["source"] and "for i0" in kind["ir"] and kind["plan"].startswith("kernel ")
    assert len(data["profile"]["steps"]) >= 3 and not data["profile"]["replayed"]
    own = {k["name"] for k in data["roof"]["kernels"]}
    assert all(k["bytes"] and k["operations"] for k in data["roof"]["kernels"]) and data["roof"]["product"] > 1e8
    events = {e[0] for e in data["profile"]["events"]}
    assert own <= events and any(e.startswith("aten::") for e in events)
    assert {"Dynamo", "graph", "passes", "lower", "compiler"} <= {row[0] for row in data["compiling"]} | {"compiler"}
    assert min(row[2] for row in data["compiling"]) == 0.0


def test_a_script_with_one_call_has_its_kernels_called_by_themselves(script):
    """In a process of its own."""
    found = script.with_name("one.html")
    command = ["-m", "fuser", "report", str(script), "1", "0", "-o", str(found)]
    ended = forked.run(command, timeout=300, cwd=ROOT, dynamo=True)
    assert ended.returncode == 0, ended.stderr
    data = packed(found.read_text())
    assert data["profile"]["replayed"] and data["roof"]["kernels"]
    kinds = [data["kinds"][g["key"]] for graph in data["graphs"] for g in graph["groups"]]
    assert kinds and all(kind["kernels"] for kind in kinds), "held beyond main()"


@pytest.fixture
def alone(registry, monkeypatch):
    """Groups of other tests are neither explained nor called again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fuser.") and name != "fuser.kernel_cache" and hasattr(module, "REGISTRY"):
            monkeypatch.setattr(module, "REGISTRY", registry)
    torch._dynamo.reset()


def test_a_script_that_raises_is_told(script, alone):
    found = watching.run_script(script, ["1", "x"])
    assert isinstance(found.error, ValueError) and "ValueError" in found.times.note and found.explanation.graphs


def test_a_profile_of_the_script_is_taken_instead(tmp_path, alone):
    script = tmp_path / "own.py"
    script.write_text(
        "import fuser, torch\n"
        "f = torch.compile(lambda x: torch.relu(x * 3 + 1), backend='fuser')\nx = torch.rand(4096)\nf(x), f(x), f(x)\n"
        "with fuser.profile() as found:\n    for _ in range(4):\n        f(x)\n        found.step()\n"
    )
    found = watching.run_script(script, [])
    assert found.error is None and len(found.times.profile.steps) == 4 and not found.times.replayed


def _of_many(e: Explanation) -> Explanation:
    """An explanation of 300 groups that are different fusions, and 300 operators on ATen between them."""
    graph = e.graphs[0]
    made: list[Group] = []
    for n in range(GROUPS):
        kind = graph.groups[n % len(graph.groups)]
        made.append(dataclasses.replace(kind, number=n, key=kind.key + n))
    (op, *_) = graph.not_fused
    alone = tuple(dataclasses.replace(op, node=f"sort_{n}") for n in range(GROUPS))
    flows = [(f"group {n}", f"sort_{n}", 4096) for n in range(GROUPS)]
    flows += [(f"sort_{n}", f"group {n + 1}", 4096) for n in range(GROUPS - 1)]
    flows += [(f"group {n}", f"group {n + 7}", 1024) for n in range(0, GROUPS - 7, 3)]
    return Explanation((dataclasses.replace(graph, groups=tuple(made), not_fused=alone, flows=tuple(flows)),))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    torch._dynamo.reset()

    class Layer(nn.Module):
        def forward(self, x):
            y = torch.nn.functional.layer_norm(torch.relu(x + 1) * x.exp(), (64,))
            return y.sort(-1).values.softmax(-1) * 2

    with torch.no_grad():
        explained = _of_many(fuser.explain(Layer(), torch.rand(16, 64)))
    path = tmp_path_factory.mktemp("many") / "many.html"
    began = time.perf_counter()
    explained.to_html(path)
    return path, time.perf_counter() - began


def test_300_groups_make_a_small_page_in_time(many):
    path, seconds = many
    assert path.stat().st_size < 5e6 and seconds < 5
    assert len(packed(path.read_text())["kinds"]) == GROUPS


@needs_browser
def test_the_page_is_usable_with_300_groups(many):
    opened = browser.Browser()
    try:
        opened.open(many[0])
        opened.wait("document.documentElement?.dataset.drawn === '0'", 20)
        assert opened.run("fuserReport.drawn.view.nodes().length") == 2 * GROUPS
        _search(opened, "layer_norm")
        assert opened.run("document.querySelectorAll('#results .result').length") == 60
        dimmed = "fuserReport.drawn.view.nodes('.dim').length"
        assert 0 < opened.run(dimmed) < 2 * GROUPS
        _search(opened, "")
        assert opened.run(dimmed) == 0
        frame = "new Promise(d => requestAnimationFrame(() => requestAnimationFrame(d)))"
        began = time.monotonic()
        for factor in (1.2, 1.2, 0.8, 0.8):
            opened.run(f"(fuserReport.drawn.zoom({factor}), {frame}, null)")
        assert time.monotonic() - began < 4, "zooming is smooth"
        opened.run("1")
        assert opened.errors == []
    finally:
        opened.close()


def _search(opened: browser.Browser, text: str) -> None:
    field = "document.getElementById('search')"
    opened.run(f"(i => {{ i.value = {text!r}; i.dispatchEvent(new Event('input')); }})({field})")


@needs_browser
def test_the_page_opens_searches_and_clicks(written):
    opened = browser.Browser()
    try:
        opened.open(written[0])
        opened.wait("document.documentElement?.dataset.ready === 'yes'")
        opened.run("fuserReport.turnTo(fuserReport.data.graphs[0])")
        node = "fuserReport.drawn.view.getElementById('0/group 0').renderedPosition()"
        canvas = "document.getElementById('canvas').getBoundingClientRect()"
        opened.click(*opened.run(f"((n, r) => [n.x + r.x, n.y + r.y])({node}, {canvas})"))
        opened.wait("!document.getElementById('drawer').hidden")
        titles = opened.run("[...document.querySelectorAll('[data-column]')].map(c => c.dataset.column)")
        assert titles == ["Operators", "Your lines", "IR", "Plan", "Code"]
        assert "native_layer_norm" in opened.run("document.querySelector('[data-column=Operators]').innerText")
        assert opened.run("document.querySelectorAll('[data-column=Code] .hljs-keyword, .hljs-type').length") > 5
        assert opened.run("location.hash") == "#0%2Fgroup%200"
        _search(opened, "sort left_to_aten")
        opened.run("document.querySelector('#results .result').click()")
        assert opened.run("document.querySelector('#drawer .reason b').innerText") == "left_to_aten"
        for tab, wanted in {"Groups": "table tbody tr", "Not fused": "table tbody tr", "Roofline": ".dot",
                            "Timeline": ".bar rect", "Breaks and passes": "h3"}.items():  # fmt: skip
            opened.run(f"document.querySelector('[data-tab=\"{tab}\"]').click()")
            assert opened.run(f"document.querySelectorAll('main {wanted}').length") > 0, tab
            if tab == "Not fused":
                assert opened.run("document.querySelector('main th').innerText").startswith("lost time")
                assert opened.run("document.querySelector('main td').innerText").endswith(("µs", "ms", " s"))
        light = opened.run("getComputedStyle(document.body).backgroundColor")
        opened.run("document.getElementById('theme').click()")
        assert opened.run("getComputedStyle(document.body).backgroundColor") != light
        opened.dark(True)
        opened.run("1")
        assert opened.errors == []
    finally:
        opened.close()


def test_the_script_of_the_page_is_that_of_its_sources():
    """`make report-page` was run after the last change, and each bundled package has its licence."""
    made = ROOT / "fuser" / "debug" / "page_files"
    source = ROOT / "tools" / "report_page"
    found = hashlib.sha256()
    for name in ("build.mjs", "package-lock.json", *sorted(f"src/{p.name}" for p in (source / "src").iterdir())):
        found.update((source / name).read_bytes())
    for name in ("report.js", "report.css"):
        assert found.hexdigest() in (made / name).read_text().splitlines()[0], "run make report-page"
    licences = (made / "LICENSES.txt").read_text()
    for name in json.loads((source / "package.json").read_text())["dependencies"]:
        assert f"\n{name} " in licences
