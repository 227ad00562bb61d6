"""Groups that no kernel takes whole: a process with a warm cache lowers nothing, and splits them as before."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest
import torch
from torch import fx

import fuser
from fuser import bundles, compiler, config, interface, kernel_cache, pipeline, plans, refusals
from fuser.lowering.survey import Survey
from fuser.runtime import archive, prebuilt, remote
from fuser.runtime.counting import COUNTS
from tests import forked, redis_servers

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
ROOT = pathlib.Path(__file__).resolve().parents[2]

_SCRIPT = """
import json, sys, torch, torch.fx, fuser
from fuser import interface
from tests.unit.test_splitting import PROGRAMS, pieces_of

out = {}
for name in sys.argv[1:]:
    program, _, _ = PROGRAMS[name]
    key = fuser.register_fusion(torch.fx.symbolic_trace(program))
    handle = fuser.fusion_handle(key)
    for n in (1, 2):
        torch.manual_seed(n)
        x = torch.rand(4 * n, 6) - 0.5
        want_input = x.clone()
        torch.manual_seed(7)
        want = program(want_input)
        torch.manual_seed(7)
        torch.testing.assert_close(handle(x), want)
    spec = interface.kernel_spec(key)
    groups, left = pieces_of(spec)
    out[name] = [[g.hash for g in groups], sorted(left.elements()), [e.reason for e in spec.store.entries]]

class Model(torch.nn.Module):
    def forward(self, x):
        y = torch.nn.functional.interpolate(torch.relu(x)[None], scale_factor=2.0)[0] * 2
        return torch.sort(y + 1)[0].view(torch.int32).float() + torch.nn.functional.max_pool2d(y[None], 3, 1, 1)[0]

with torch.no_grad():
    x = torch.rand(3, 8, 8)
    torch.testing.assert_close(torch.compile(Model(), backend="fuser")(x), Model()(x))
found = fuser.stats()
counts = {name: found[name] for name in ("lowerings", "compiles", "binaries_made", "restored", "failures")}
print(json.dumps([out, counts, sum(found["fallbacks"].values())]))
"""


# A group with a Python object that no text tells from another one is not among them: nothing of it is kept.
SPLIT = ("complex", "a view as a result")


def test_a_second_process_lowers_nothing(tmp_path):
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path), "FUSER_CHECK_IR": "0", "PYTHONPATH": str(ROOT)}
    said = []
    for _ in range(2):
        command = ["-c", _SCRIPT, *SPLIT]
        done = forked.run(command, env=env, timeout=300, dynamo=True)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    (cold, counts, fallbacks), (warm, found, fallen) = said
    assert counts["lowerings"] > len(SPLIT) <= counts["compiles"] and counts["failures"]
    assert warm == cold and fallen == fallbacks
    assert not found["lowerings"] and not found["compiles"] and not found["binaries_made"]
    assert found["restored"] == counts["compiles"] + counts["restored"] and found["failures"] == counts["failures"]


# -- what is kept --------------------------------------------------------------------------------------------------
@pytest.fixture
def spec(tmp_path):
    """A group with a call that is not lowered for its argument's dtype; its refusals are kept in an empty cache."""
    with config.override(cache_dir=str(tmp_path / "cache"), check_ir=False):
        key = interface.register_fusion(fx.symbolic_trace(lambda x, n: (torch.relu(x).view(torch.int32) + n) * 2))
        yield interface.kernel_spec(key)


ARGS = (torch.randn(4, 3), 5)


def test_refusals_are_found_as_they_were_kept(spec, monkeypatch):
    surveyed = []
    find_refused = pipeline.find_refused
    monkeypatch.setattr(pipeline, "find_refused", lambda *a: (surveyed.append(a), find_refused(*a))[1])
    made, found = compiler.find_refused(spec, ARGS, "why"), compiler.find_refused(spec, ARGS)
    assert len(surveyed) == 1 and made.refused and made.free is not found.free
    assert (found.refused, found.free, found.rounded) == (made.refused, made.free, made.rounded)
    for a, b in zip(found.metas, made.metas, strict=True):
        assert type(a) is type(b)
        assert a is None or not isinstance(a, torch.Tensor) or (a.dtype, a.shape, a.stride(), a.device) == (
            b.dtype, b.shape, b.stride(), b.device,
        )  # fmt: skip
        assert isinstance(a, torch.Tensor) or a == b
    compiler.find_refused(spec, (torch.randn(5, 3), 5))
    assert len(surveyed) == 2
    with config.override(check_ir=True):
        compiler.find_refused(spec, ARGS)
    assert len(surveyed) == 3


@pytest.mark.parametrize("damage", [
    "{}", "[]", "nothing", '{"refused": 1}', "null",
    lambda kept: json.dumps(kept | {"refused": [[99, "why"]]}), lambda kept: json.dumps(kept | {"free": [-1]}),
    lambda kept: json.dumps(kept | {"metas": [["torch.float32", [-4], [1]]]}),
    lambda kept: json.dumps(kept | {"metas": [["torch.nothing", [4], [1]]]}),
    lambda kept: json.dumps(kept | {"metas": [None] * 99}), lambda kept: json.dumps(kept | {"rounded": "all"}),
])  # fmt: skip
def test_refusals_of_another_form_are_found_out_again(spec, damage):
    made = compiler.find_refused(spec, ARGS)
    backend = compiler.find_backend("cpu")
    key = plans.key_of(spec, ARGS, backend.machine())
    assert refusals.find(key, spec.graph, backend) is not None
    kept = plans.read(f"{key}.refusal")
    from fuser.runtime import files

    text = damage if isinstance(damage, str) else damage(kept)
    files.write(pathlib.Path(config.cache_dir, "plans", f"{key}.refusal"), text.encode())
    assert refusals.find(key, spec.graph, backend) is None
    assert compiler.find_refused(spec, ARGS).refused == made.refused


def test_answers_are_kept_by_question_and_cache(spec, tmp_path):
    assert refusals.recall("why?") is None
    refusals.remember("why?", "because")
    assert refusals.recall("why?") == "because" and refusals.recall("how?") is None
    refusals._answers.clear()
    assert refusals.recall("why?") == "because"
    with config.override(cache_dir=str(tmp_path / "other")):
        assert refusals.recall("why?") is None


@pytest.mark.filterwarnings("ignore:fuser")
# -- elsewhere -----------------------------------------------------------------------------------------------------
def halved(x):
    """A sort in the middle, which is not lowered, and a view as another dtype, which depends on the argument."""
    return torch.sort(torch.relu(x).view(torch.int32) + 1)[0] * 2


def lowered_by(function=halved, x=ARGS[0]):
    """How often a new process would lower something for a group that is split."""
    refusals._answers.clear(), refusals._asked.clear(), plans._operators.cache_clear(), prebuilt.forget()
    before = COUNTS["lowerings"]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(interface, "REGISTRY", kernel_cache.Registry())
        m.setattr(fuser, "pipeline", pipeline)  # which an import puts in, and leaves to other tests
        m.delitem(sys.modules, "fuser.pipeline")  # not imported yet
        key = interface.register_fusion(fx.symbolic_trace(function))
        handle = interface.fusion_handle(key)
        torch.testing.assert_close(handle(x), function(x))
        assert interface.kernel_spec(key).store.splits
    return COUNTS["lowerings"] - before


def test_a_bundle_brings_refusals(spec, tmp_path):
    assert lowered_by() and not lowered_by()
    made = bundles.export(tmp_path / "a.bundle")
    assert not made.left_out
    bundles.import_(tmp_path / "a.bundle", to=str(tmp_path / "there"))
    assert {p.name.partition(".")[2] for p in (tmp_path / "there" / "plans").iterdir()} == {
        "plan", "refusal", "operators",
    }  # fmt: skip
    for cache_dir in ("", str(tmp_path / "new")):
        with config.override(cache_dir=cache_dir, prebuilt_cache=str(tmp_path / "there")):
            assert not lowered_by()
    with config.override(cache_dir=str(tmp_path / "other")):
        assert lowered_by()
        bundles.import_(tmp_path / "a.bundle")
    with config.override(cache_dir=str(tmp_path / "another")):
        bundles.import_(tmp_path / "a.bundle")
        assert not lowered_by()


def test_refusals_of_other_versions_stay_behind(spec, tmp_path, monkeypatch):
    lowered_by()
    monkeypatch.setattr(plans, "version", lambda: "another")
    bundles.export(tmp_path / "a.bundle")
    with archive.Archive(tmp_path / "a.bundle") as packed:
        assert not [name for name in packed.members if name.startswith("plans/")]


def test_a_fleet_shares_refusals(tmp_path):
    pytest.importorskip("redis", reason="the package redis is not installed")
    with redis_servers.fake() as server:
        fleet = {"remote_cache": server.address, "remote_cache_key": "the key of this fleet", "check_ir": False}
        for name in ("first", "second"):
            with config.override(cache_dir=str(tmp_path / name), remote_cache_seconds=5.0, **fleet):
                assert bool(lowered_by()) == (name == "first") and remote.wait(10)
        asked = len(server.requests)
        with config.override(cache_dir=str(tmp_path / "second"), **fleet):
            assert not lowered_by() and len(server.requests) == asked  # a local hit asks nobody


def test_a_missing_compiler_is_no_lasting_reason(spec, monkeypatch):
    """A kernel that could only be found is made as soon as there is a compiler."""
    key = interface.register_fusion(fx.symbolic_trace(lambda x: torch.relu(x) + 1))
    handle = interface.fusion_handle(key)
    with monkeypatch.context() as without:
        without.setattr(compiler.CpuBackend, "why_not_made", lambda self: "there is no compiler")
        handle(ARGS[0])
    assert handle.hits == 0 and "there is no compiler" in str(interface.kernel_spec(key).store.fallbacks)
    assert compiler.compile_runtime(interface.kernel_spec(key), ARGS[:1]).name


def test_what_holds_for_every_argument_needs_none(spec):
    found = pipeline.refusals(spec.graph, Survey())
    assert not found.refused and not found.metas and found.free
