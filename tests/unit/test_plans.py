"""Kernels that another process made: found again without making anything, by all that decided them, or made again."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fuser
from fuser import compiler, config, interface, kernel_cache, notices, pipeline, plans, refusals
from fuser.cpu import toolchain
from fuser.lowering import registry
from fuser.passes.classify import op_name
from fuser.passes.decompositions import decomposition_table
from fuser.runtime import files
from tests import forked
from tests.unit.test_cache_files import DAMAGE, TRUST, TRUST_CASES

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path):
    """An empty cache in which plans are kept, as they are for users."""
    with config.override(cache_dir=str(tmp_path / "cache"), check_ir=False):
        yield tmp_path / "cache"


class Fresh:
    """What a new process would do: an empty registry. `made` are the kernels that were not found."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.made, generate = monkeypatch, [], compiler.generate
        monkeypatch.setattr(compiler, "generate", lambda *a: (self.made.append(a), generate(*a))[1])

    def run(self, function, args):
        self.monkeypatch.setattr(interface, "REGISTRY", kernel_cache.Registry())
        self.made.clear()
        key = interface.register_fusion(fx.symbolic_trace(function))
        handle = interface.fusion_handle(key)
        result = handle(*args)
        assert handle.hits == 1, interface.kernel_spec(key).store.fallbacks
        return result, interface.kernel_spec(key).store.kernels[0]


@pytest.fixture
def fresh(monkeypatch, cache):
    return Fresh(monkeypatch)


def scaled(x, y):
    return torch.relu(x * y + 1) - y


X, Y = torch.randn(5, 3), torch.randn(3)
CASES = {
    "elementwise": (scaled, (X, Y)),
    "rows": (lambda x: torch.softmax(x, -1), (torch.randn(7, 50),)),
    "columns": (lambda x: x.sum(0) + x.exp().mean(0), (torch.randn(40, 30),)),
    "several results": (lambda x: (x + 1, x.sum(1), x), (X,)),
    "numbers": (lambda x, a, n, b: x * a + n + b, (X.double(), 0.5, 7, True)),
    "16 bits": (lambda x: F.gelu(x) * 2, (torch.randn(9, 33).bfloat16(),)),
    "strides": (lambda x: x.t() + 1, (torch.randn(6, 12)[:, ::2],)),
    "one element": (lambda x: x * 2, (torch.randn(1, 4),)),
    "indices": (lambda x, i: x.index_select(0, i) * 2, (X, torch.tensor([2, 0]))),
    "a scan": (lambda x: x.cumsum(1), (torch.randn(4, 100),)),
    "sizes that must hold": (lambda x: x.view(2, -1).sum(1), (torch.randn(4, 6),)),
}


# -- found again ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_found_as_it_was_made(fresh, name):
    function, args = CASES[name]
    want, made = fresh.run(function, args)
    assert len(fresh.made) == 1
    got, found = fresh.run(function, args)
    assert not fresh.made and isinstance(found, plans.KeptKernel)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (want, got)), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    for field in ("name", "program", "library", "n_kernels", "reasons", "source"):
        assert getattr(found, field) == getattr(made, field), field


_WARM = """
import sys, torch, fuser
from fuser.runtime import process
process.run = None  # no compiler is asked anything
key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x, y: torch.relu(x * y + 1) - y))
x, y = torch.arange(12.0).reshape(4, 3), torch.ones(3)
handle = fuser.fusion_handle(key)
result = handle(x, y)
hits = handle.hits
assert torch.equal(result, torch.relu(x * y + 1) - y)
heavy = [m for m in sys.modules if m.startswith(("fuser.lowering", "fuser.scheduler", "fuser.codegen", "fuser.cuda"))]
print(hits, heavy, fuser.num_compiled_kernels())
"""


def test_a_warm_process_imports_no_compiler_and_asks_none(tmp_path):
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path), "FUSER_CHECK_IR": "0", "PYTHONPATH": str(ROOT)}
    cold = _WARM.replace("process.run = None", "")
    said = []
    for script in (cold, _WARM):
        done = forked.run(["-c", script], env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert "fuser.lowering" in said[0] and said[1] == "1 [] 1\n"


_COMPILED = """
import sys, torch, fuser, torch.nn.functional as F
def f(x, y):
    return torch.relu(F.layer_norm(x * y + 1, (3,))) - y, (x + 1).sort(0)[0] @ x.t()
x, y = torch.arange(12.0).reshape(4, 3), torch.ones(3)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(f, backend=fuser.backend)(x, y), f(x, y))
heavy = ("lowering.registry", "ops", "scheduler", "codegen", "pipeline", "cpu.codegen")
print([m for m in sys.modules if m.startswith(tuple(f"fuser.{name}" for name in heavy))], fuser.num_compiled_kernels())
"""


_OWN_OPERATORS = """
import torch, fuser, torch.nn.functional as F
torch.manual_seed(0)
def dropped(x, w):
    return F.dropout(torch.relu(x), 0.5).sum() + w.sum()
def pooled(x, w):
    return (F.max_pool2d(torch.relu(x)[None], 2) * 2).sum() + w.sum()
def drawn(x, w):
    return (torch.rand_like(x) + torch.randn_like(x)).mul(x).sum() + w.sum()
def product(x, w):
    return torch.relu(x[0] @ w).sum() + x.sum()
for f in (dropped, pooled, drawn, product):
    for needs in (True, False):
        torch._dynamo.reset()
        x, w = torch.rand(3, 8, 512, requires_grad=needs), torch.randn(512, 512, requires_grad=needs)
        result = torch.compile(f, backend=fuser.backend)(x, w)
        if f in (pooled, product):
            torch.testing.assert_close(result, f(x, w), rtol=1e-4, atol=1e-3)
        if needs:
            result.backward()
print(fuser.num_compiled_kernels())
"""


def test_a_warm_process_imports_no_lowerings_and_has_the_operators_of_the_package(tmp_path):
    """What the tables of scalar ops register, which a warm process does not import for anything else."""
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path), "FUSER_CHECK_IR": "0", "PYTHONPATH": str(ROOT)}
    said = []
    for _ in range(2):
        done = forked.run(["-c", _COMPILED + _OWN_OPERATORS], env=env, timeout=200, dynamo=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert "fuser.lowering" in said[0][0] and said[1][0].startswith("[]") and int(said[1][0].split()[1]) >= 1
    assert all(int(made) >= 5 for _, made in said), said


def test_what_is_kept_of_operators_says_what_the_lowerings_say(cache, monkeypatch):
    names = {*registry.LOWERINGS, *registry.REFUSED, *map(op_name, decomposition_table()), "aten.sort", "prims.mul"}
    names = {n for n in names if n.count(".") == 1}
    lowered = compiler.lowered_of(names)
    want = {n: (n in lowered, *(compiler.why_not_on(n, d) for d in ("cpu", "cuda", "meta"))) for n in names}
    assert any(on_cpu and not on_cuda for _, on_cpu, on_cuda, _ in want.values()), "an operator for points in no order"
    plans.keep_operators(pipeline.lowered_operators(), pipeline.unordered_operators(), registry.VIEWS)
    plans._operators.cache_clear()
    views = compiler.views()
    assert views == registry.VIEWS and "aten.view" in views
    asked, supports = [], registry.supports
    monkeypatch.setattr(registry, "supports", lambda name, *device: (asked.append(name), supports(name, *device))[1])
    for recalled in (None, lambda question: want[question.split()[2]][1]):
        with monkeypatch.context() as m:
            asked.clear()
            if recalled is not None:
                m.setattr(refusals, "recall", recalled)
            m.delitem(sys.modules, "fuser.lowering.registry")
            assert compiler.lowered_of(names) == lowered and not asked
            assert compiler.views() == views and "fuser.lowering.registry" not in sys.modules
            for n, (_, on_cpu, _, _) in want.items():
                if on_cpu is None:
                    assert compiler.why_not_on(n, "cpu") is None and not asked, n
                if recalled is not None:
                    assert compiler.why_not_on(n, "cpu") == on_cpu and not asked, n


def test_what_no_kernel_can_be_made_of_has_its_reason_in_a_warm_process(fresh, monkeypatch):
    names = pipeline.lowered_operators()
    assert {"aten.add", "aten.softmax", "getitem"} <= set(names) and "aten.sort" not in names
    plans.keep_operators(names)
    plans._operators.cache_clear()
    monkeypatch.setattr(fuser, "pipeline", pipeline)  # which an import puts in, and leaves to other tests
    monkeypatch.delitem(sys.modules, "fuser.pipeline")
    monkeypatch.setattr(interface, "REGISTRY", kernel_cache.Registry())
    blocked = [
        interface.kernel_spec(interface.register_fusion(fx.symbolic_trace(f))).blocked
        for f in (scaled, lambda x: torch.sort(x + 1)[0])
    ]
    assert blocked[0] == () and "aten.sort" in blocked[1][0]


# -- keys ----------------------------------------------------------------------------------------------------------
def test_all_that_decides_a_kernel_is_in_its_key(cache, monkeypatch):
    def key(args=(X, Y), function=scaled, machine="this", **settings):
        with config.override(**settings):
            spec = interface.kernel_spec(interface.register_fusion(fx.symbolic_trace(function)))
        return plans.key_of(spec, args, machine)

    found = [
        key(), key((torch.randn(6, 3), Y)), key((X.double(), Y.double())), key((X.t().contiguous().t(), Y)),
        key((X, 2.0)), key((X, 2)), key((X, 3)), key((X, True)), key(machine="another"), key(numerics="eager"),
        key(deterministic="yes"), key(check_bounds=True), key(function=lambda x, y: torch.relu(x * y + 2) - y),
    ]  # fmt: skip
    assert len(set(found)) == len(found) and key() == found[0] == key((torch.zeros(5, 3), torch.zeros(3)))
    for name, value in (("FORMAT", plans.FORMAT + 1), ("_DECIDING", plans._DECIDING[1:])):
        with monkeypatch.context() as m:
            m.setattr(plans, name, value)
            m.setattr(plans, "version", plans.version.__wrapped__)
            assert key() != found[0]
    torch.set_default_dtype(torch.float64)
    try:
        assert key() != found[0]
    finally:
        torch.set_default_dtype(torch.float32)


def test_code_of_this_package_decides(tmp_path, monkeypatch):
    """A change of any file that can change a kernel changes every key."""
    copy = shutil.copytree(pathlib.Path(plans.__file__).parent, tmp_path / "fuser")
    monkeypatch.setattr(plans, "__file__", str(copy / "plans.py"))
    before = plans.version.__wrapped__()
    for name in ("cpu/pointwise.py", "ops/pointwise.py", "kernel_spec.py", "pipeline.py"):
        path = copy / name
        path.write_text(path.read_text() + "\n# changed\n")
        now = plans.version.__wrapped__()
        assert now != before, name
        before = now


@pytest.mark.parametrize("gone", ["lowering", "kernel_spec.py"])
def test_a_package_without_sources_keeps_no_plans(fresh, cache, tmp_path, monkeypatch, gone):
    """Whatever was changed in it could not be told."""
    copy = shutil.copytree(pathlib.Path(plans.__file__).parent, tmp_path / "fuser")
    for path in [copy / gone] if gone.endswith(".py") else (copy / gone).glob("*.py"):
        path.unlink()
    monkeypatch.setattr(plans, "__file__", str(copy / "plans.py"))
    monkeypatch.setattr(plans, "version", plans.version.__wrapped__)
    for _ in range(2):
        fresh.run(scaled, (X, Y))
        assert len(fresh.made) == 1
    plans.keep_operators(["aten.add"])
    assert plans._operators.__wrapped__(str(cache), "") == plans._NO_OPERATORS
    assert not list(cache.glob("plans/*"))


def test_another_compiler_or_setting_finds_nothing(fresh, monkeypatch, tmp_path):
    fresh.run(scaled, (X, Y))
    with config.override(check_ir=True):
        fresh.run(scaled, (X, Y))
    assert len(fresh.made) == 1  # there is something to check
    other = tmp_path / "c++"
    other.write_text('#!/bin/sh\nexec g++ "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    fresh.run(scaled, (X, Y))
    assert len(fresh.made) == 1


def test_without_a_cache_nothing_is_kept(fresh, cache):
    with config.override(cache_dir=""):
        for _ in range(2):
            fresh.run(scaled, (X, Y))
            assert len(fresh.made) == 1
    assert not cache.exists()


# -- damage --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A cache with two plans, the first that of `scaled`, and their libraries."""
    made = tmp_path_factory.mktemp("warm") / "cache"
    with config.override(cache_dir=str(made), check_ir=False), pytest.MonkeyPatch.context() as patch:
        for name in ("elementwise", "rows"):
            Fresh(patch).run(*CASES[name])
    return made


@pytest.fixture
def entries(warm, cache):
    """A copy of that cache: the plan of `scaled`, and the other one."""
    shutil.copytree(warm, cache)
    return tuple(sorted((cache / "plans").glob("*.plan"), key=lambda p: b"red_max" in p.read_bytes()))


def used_again(fresh):
    """The result is right, whether the kernel was found or made; how many were made."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, _ = fresh.run(scaled, (X, Y))
    torch.testing.assert_close(got, scaled(X, Y))
    return len(fresh.made)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plan_is_made_again(fresh, entries, damage):
    plan, other = entries
    whole = plan.read_bytes()
    DAMAGE[damage](plan, other)
    readable = damage == "not readable" and os.geteuid() == 0
    assert used_again(fresh) == (0 if readable else 1)
    assert used_again(fresh) == 0 and plan.read_bytes() == whole and plan.is_file() and not plan.is_symlink()


@pytest.mark.parametrize("damage", ["missing", "zeros", "a bit, middle", "another's contents", "a folder"])
def test_a_plan_of_a_damaged_library_is_made_again(fresh, entries, cache, damage):
    library = cache / "cpu" / json.loads(files.read(entries[0]))["library"]
    other = next(p for p in (cache / "cpu").glob("*.so") if p != library)
    files.write(library, files.read(library))  # a file of its own: this process has the other one loaded
    DAMAGE[damage](library, other)
    assert used_again(fresh) == 1 and used_again(fresh) == 0 and files.read(library) is not None


@pytest.mark.parametrize("damage", ["missing", "zeros", "a bit, middle", "another's contents", "a folder"])
def test_damaged_names_of_operators_are_not_believed(cache, entries, damage):
    plans.keep_operators(["aten.add"])
    path = cache / "plans" / f"{plans.version()}.operators"
    DAMAGE[damage](path, entries[0])
    plans._operators.cache_clear()
    assert plans.operators() == frozenset()
    plans.keep_operators(["aten.add"])
    plans._operators.cache_clear()
    assert plans.operators() == {"aten.add"}


def _without(key):
    return lambda kept: kept.pop(key)


def _at(*path, value):
    def change(kept):
        for step in path[:-1]:
            kept = kept[step]
        kept[path[-1]] = value

    return change


ODD = {
    "no program": _without("program"),
    "no library": _without("library"),
    "a library elsewhere": _at("library", value="../cpu/planted.so"),
    "an absolute library": _at("library", value="/planted.so"),
    "a number for a library": _at("library", value=3),
    "an unknown dtype": _at("program", 0, 0, 1, value="torch.os"),
    "a slot that does not exist": _at("program", 0, 0, 3, 0, value=99),
    "fewer strides": _at("program", 0, 0, 4, value=[]),
    "code of no program": _at("program", 5, 0, 1, value=[77]),
    "an output that does not exist": _at("program", 6, value=[["buffer", 9]]),
    "text for numbers": _at("program", 1, value="many"),
    "another form": lambda kept: kept.clear(),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_whole_plan_of_another_form_is_made_again(fresh, entries, odd):
    plan, _ = entries
    kept = json.loads(files.read(plan))
    ODD[odd](kept)
    files.write(plan, json.dumps(kept).encode())
    assert used_again(fresh) == 1 and used_again(fresh) == 0


@pytest.mark.parametrize("how", TRUST_CASES)
@pytest.mark.parametrize("what", ["plan", "folder"])
def test_plans_that_others_may_have_written_are_not_used(fresh, entries, monkeypatch, how, what):
    plan, _ = entries
    TRUST[how](plan if what == "plan" else plan.parent)
    monkeypatch.setattr(notices, "_said", {})
    if what == "plan":
        with pytest.warns(RuntimeWarning, match="not used but made again"):
            fresh.run(scaled, (X, Y))
    else:
        fresh.run(scaled, (X, Y))
    assert len(fresh.made) == 1


def test_a_folder_that_cannot_be_written_is_no_error(fresh, monkeypatch):
    def full(*a, **k):
        raise OSError("no space left")

    monkeypatch.setattr(plans.files, "write", full)
    assert used_again(fresh) == 1 and used_again(fresh) == 1


def test_libraries_of_this_process_alone_have_no_plan(fresh, cache, monkeypatch):
    """Where the cache cannot be written its libraries are elsewhere, and gone with this process."""
    with pytest.MonkeyPatch.context() as m, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m.setattr(toolchain, "_folder_for", lambda library: toolchain._instead_of(library.parent, "a test"))
        fresh.run(scaled, (X, Y))
    assert not list((cache / "plans").glob("*.plan"))


def test_sources_are_read_again_where_they_changed(cache, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "fuser", tmp_path / "fuser", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    monkeypatch.setattr(plans, "__file__", str(tmp_path / "fuser" / "plans.py"))
    version, digest, read = plans.version.__wrapped__, plans._digest, []
    monkeypatch.setattr(plans, "_digest", lambda *a: read.append(1) or digest(*a))
    first = version()
    assert version() == first and len(read) == 1
    source = tmp_path / "fuser" / "cpu" / "vir" / "printer.py"
    text = source.read_text()
    source.write_text(text[:-1] + "#")  # of the same size
    assert version() != first and len(read) == 2
    source.write_text(text)
    assert version() == first and len(read) == 3


def test_every_source_that_decides_kernels_is_part_of_a_key(tmp_path, monkeypatch):
    """A changed file in any of their folders, those in a folder included, gives plans other names. All are read; of
    each folder one is changed."""
    shutil.copytree(ROOT / "fuser", tmp_path / "fuser", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    monkeypatch.setattr(plans, "__file__", str(tmp_path / "fuser" / "plans.py"))
    version = plans.version.__wrapped__
    paths = [p for name in plans._DECIDING for p in (tmp_path / "fuser" / name).rglob("*.py")]
    paths += [tmp_path / "fuser" / name for name in plans._DECIDING_FILES]
    assert tmp_path / "fuser" / "cpu" / "vir" / "printer.py" in paths
    read, digest = [], plans._digest
    monkeypatch.setattr(plans, "_digest", lambda root, names: read.append({*names}) or digest(root, names))
    known = {version()}
    assert read == [{str(p.relative_to(tmp_path / "fuser")) for p in paths}]
    for path in {p.parent: p for p in paths}.values():
        text = path.read_bytes()
        path.write_bytes(text + b"#")
        assert version() not in known, path
        known.add(version())
        path.write_bytes(text)
