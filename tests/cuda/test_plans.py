"""Plans of GPUs' kernels: a new process has them again without Triton, lowering or scheduling. Here is no driver."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import bundles, compiler, config, interface, kernel_cache, plans
from fuser.contests import records
from fuser.cuda import driver, fused_kernel, kept, toolchain
from fuser.cuda.driver import Entry
from fuser.kernel_spec import is_aligned
from fuser.runtime import files, prebuilt
from fuser.runtime.counting import COUNTS
from tests import forked

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


class Library:
    """What `driver.Library` is without a driver."""

    def __init__(self, path: str, parts: Any, batched: Any = None) -> None:
        self.path, self.parts, self.batched, self.entries = path, tuple(parts), batched, (1,) * len(parts)

    def __str__(self) -> str:
        return self.path


def compile_now(r: toolchain.Request) -> Entry:
    return Entry(r.name, f"binary of {r.text} for {r.capability}".encode(), 64, 32 * r.warps, 2)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    """A device of capability 90 and an empty cache."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "capability", lambda device: 90)
    monkeypatch.setattr(driver, "Library", Library)
    monkeypatch.setattr(toolchain, "compile_now", compile_now)
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")
    with config.override(cache_dir=str(tmp_path / "cache"), check_ir=False):
        yield tmp_path / "cache"
    prebuilt.forget()


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * y + 1) - y


def fakes(offset: int = 0, size: tuple[int, ...] = (64, 1024)) -> tuple[torch.Tensor, ...]:
    with FakeTensorMode():
        whole = torch.empty(size[0] * size[1] + offset, device="cuda")
        return torch.as_strided(whole, size, (size[1], 1), offset), torch.empty(size[1], device="cuda")


CASES: dict[str, Any] = {
    "elementwise": (scaled, fakes()),
    "rows": (lambda x, y: torch.softmax(x, -1), fakes()),
    "several kernels": (lambda x, y: (x.sum(0), x.exp().sum(1)), fakes(size=(8192, 1024))),
    "numbers": (lambda x, y, a, n: x * a + n, (*fakes(), 0.5, 7)),
}


def compiled(function: Any, args: Any) -> Any:
    """The kernel in a process that has none yet, and how often something was lowered for it."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(interface, "REGISTRY", kernel_cache.Registry())
        spec = interface.kernel_spec(interface.register_fusion(fx.symbolic_trace(function)))
        before = COUNTS["lowerings"]
        kernel = compiler.compile_runtime(spec, args)
        return kernel, COUNTS["lowerings"] - before


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_found_as_it_was_made(gpu: pathlib.Path, name: str) -> None:
    made, lowered = compiled(*CASES[name])
    found, again = compiled(*CASES[name])
    assert (lowered, again) == (1, 0) and isinstance(found, plans.KeptKernel)
    for field in ("name", "program", "source", "n_kernels", "reasons"):
        assert getattr(found, field) == getattr(made, field), field
    assert (found.library.path, found.library.parts) == (made.library.path, made.library.parts)
    assert found.library.batched() == made.library.batched()  # the form for many argument sets


def test_what_decides_a_kernel_is_in_its_key(gpu: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(args: Any = CASES["elementwise"][1], **settings: Any) -> str | None:
        with config.override(**settings):
            spec = interface.kernel_spec(interface.register_fusion(fx.symbolic_trace(scaled)))
            return plans.key_of(spec, args, kept.machine())

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "this")
    found = [key(), key(fakes(offset=1)), key(fakes(size=(64, 1000))), key(max_autotune=True)]
    assert [is_aligned(a[0]) for a in (fakes(), fakes(offset=1))] == [True, False]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "that")
    assert key() == found[0]  # tables' tiles are the same on all devices
    found.append(key(max_autotune=True))
    for module, name, value in (
        (driver, "capability", lambda device: 80), (toolchain, "triton_version", lambda: "3.5.0"),
        (kept, "sources", lambda: "others"),
    ):  # fmt: skip
        with monkeypatch.context() as m:
            m.setattr(module, name, value)
            found.append(key())
    assert None not in found and len(set(found)) == len(found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kept.machine() is None


def _without(name: str) -> Any:
    return lambda cache, plan: (plan.pop(name), plan)[1]


def _at(*path: Any, value: Any) -> Any:
    def change(cache: pathlib.Path, plan: Any) -> Any:
        inner = plan
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value
        return plan

    return change


def _removed(pattern: str) -> Any:
    def change(cache: pathlib.Path, plan: Any) -> Any:
        next(cache.glob(pattern)).unlink()
        return plan

    return change


ODD: dict[str, Any] = {
    "no binaries": _without("binaries"),
    "fewer binaries": _at("binaries", value=[]),
    "a binary elsewhere": _at("binaries", 0, value="../../" + "a" * 26),
    "a number for a binary": _at("binaries", 0, value=3),
    "a source elsewhere": _at("library", value="../x.py"),
    "another capability": _at("capability", value=80),
    "other threads": _at("program", 5, 0, 4, 0, value=1024),
    "more arguments": _at("program", 5, 0, 4, 2, value=[["null", 0]] * 9),
    "no functions": _without("functions"),
    "a binary is gone": _removed("cuda/*.cubin"),
    "its facts are gone": _removed("cuda/*.json"),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_plan_of_another_form_is_made_again(gpu: pathlib.Path, odd: str) -> None:
    compiled(*CASES["elementwise"])
    (path,) = (gpu / "plans").glob("*.plan")
    files.write(path, json.dumps(ODD[odd](gpu, json.loads(files.read(path) or b""))).encode())
    assert compiled(*CASES["elementwise"])[1] == 1
    assert compiled(*CASES["elementwise"])[1] == 0


def test_what_may_become_better_is_not_kept(gpu: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was made while a CUDA graph is recorded had no race."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "this")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    decided = records.choices()
    with config.override(max_autotune=True):
        large = fakes(size=(4096, 1024))
        assert [compiled(scaled, large)[1] for _ in range(2)] == [1, 1]
    assert not list(gpu.glob("plans/*.plan")) and records.choices() == decided


def test_binaries_that_the_driver_refuses_are_made_again(gpu: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(*CASES["elementwise"])
    refused = []

    def refuse(*args: Any) -> Any:
        if not refused:
            refused.append(args)
            raise fused_kernel.CompileError("no kernel image is available")
        return Library(*args)

    monkeypatch.setattr(driver, "Library", refuse)
    assert compiled(*CASES["elementwise"])[1] == 1 and refused


@pytest.mark.parametrize("triton", ("3.6.0", None))
def test_a_bundle_brings_plans(gpu: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: Any, triton: str | None) -> None:
    """Found by a process that lowers nothing, where the same version of Triton is installed or none."""
    monkeypatch.setattr(bundles, "_add_launcher", lambda members: None)
    made, _ = compiled(*CASES["elementwise"])
    made_of = bundles.export(tmp_path / "kernels.bundle")
    assert made_of.kernels["cuda"] == 1 and not made_of.left_out
    place = tmp_path / "prebuilt"
    bundles.import_(tmp_path / "kernels.bundle", to=str(place))
    monkeypatch.setattr(toolchain, "triton_version", lambda: triton)
    monkeypatch.setattr(toolchain, "compile_now", lambda r: pytest.fail("compiled again"))
    with config.override(cache_dir="", prebuilt_cache=str(place)):
        found, lowered = compiled(*CASES["elementwise"])
        assert lowered == 0 and found.program == made.program and found.library.parts == made.library.parts
        assert found.library.path.startswith(str(place))


_PROCESS = """
import json, sys, torch, fuser
from torch import fx
from fuser import compiler, interface
from fuser.cuda import driver, toolchain
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
driver.capability = lambda device: 90
class Library:
    def __init__(self, path, parts, batched=None):
        self.path, self.parts, self.entries = path, parts, (1,) * len(parts)
    def __str__(self):
        return self.path
driver.Library = Library
toolchain.compile_now = lambda r: driver.Entry(r.name, b"binary", 0, 32 * r.warps, 2)
spec = interface.kernel_spec(fuser.register_fusion(fx.symbolic_trace(lambda x, y: torch.relu(x * y + 1) - y)))
class OnGpu(torch.Tensor):  # fake tensors import parts of Triton
    device = torch.device("cuda")
args = torch.empty(64, 1024, device="meta").as_subclass(OnGpu), torch.empty(1024, device="meta").as_subclass(OnGpu)
kernel = compiler.compile_runtime(spec, args)
rooms = ("fuser.lowering", "fuser.scheduler", "fuser.cuda.codegen", "fuser.cuda.nest", "triton")
print(json.dumps([kernel.name, fuser.stats()["lowerings"], [r for r in rooms if r in sys.modules]]))
"""


def test_a_warm_process_imports_neither_lowering_nor_triton(tmp_path: pathlib.Path) -> None:
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path), "FUSER_CHECK_IR": "0", "PYTHONPATH": PATHS}
    said = []
    for _ in range(2):
        done = forked.run(["-c", _PROCESS], env, timeout=120)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    assert said[0][1] == 1 and "fuser.lowering" in said[0][2]
    assert said[1] == [said[0][0], 0, []]


_MODEL = """
import importlib.abc, json, sys, torch, torch.nn.functional as F, fuser
from torch._subclasses.fake_tensor import FakeTensorMode
from fuser import compiler, executor, interface, kernel_cache
from fuser.cuda import driver, toolchain
from fuser.runtime import python_launcher
asked, made, prepare = set(), [], interface.prepare
for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]  # which Dynamo has imported; torch asks again whether it is there
for function in vars(torch.utils._triton).values():
    getattr(function, "cache_clear", list)()
class NoTriton(importlib.abc.MetaPathFinder):  # torch itself asks for it, and does without
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename and "importlib.util" not in frame.f_code.co_filename:
            frame = frame.f_back
        if name.partition(".")[0] != "triton" or "importlib" in frame.f_code.co_filename:
            return None  # or somebody only asks whether it is there
        asked.add(frame.f_globals["__name__"].partition(".")[0])
        raise ImportError("there is no Triton")
class Library:
    def __init__(self, path, parts, batched=None):
        self.path, self.parts, self.entries = path, parts, (1,) * len(parts)
    def __str__(self):
        return self.path
sys.meta_path.insert(0, NoTriton())
compiler.why_not, driver.capability, driver.Library = (lambda device: None), (lambda device: 90), Library
torch.cuda.is_available, torch.cuda.current_device = (lambda: True), (lambda: 0)
torch.cuda.get_rng_state, torch.cuda.set_rng_state = (lambda: torch.zeros(16, dtype=torch.uint8)), (lambda state: None)
toolchain.compile_now = lambda r: driver.Entry(r.name, b"binary", 0, 32 * r.warps, 2)
executor.launcher.make_handle = python_launcher.Handle
interface.prepare = lambda key, given: made.append(prepare(key, given))
def model(x, g, b, up, down):
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (64,), g, b), up)), down)
for _ in range(2):  # as in two processes: the second has but what the first left on disk
    torch._dynamo.reset()
    interface.REGISTRY, before = kernel_cache.Registry(), fuser.stats()
    with FakeTensorMode(), torch.no_grad():
        given = [torch.empty(size, device="cuda") for size in ((32, 64), (64,), (64,), (128, 64), (64, 128))]
        torch.compile(model, backend="fuser")(*given)
    reasons, stats = [f.result(60) for f in made], fuser.stats()
    del made[:]
    print(json.dumps([reasons, *(stats[n] - before[n] for n in ("restored", "lowerings")), sorted(asked - {"torch"})]))
"""


def test_a_model_that_finds_its_kernels_needs_no_triton(tmp_path: pathlib.Path) -> None:
    """Dynamo imports it, if it is there; nothing of this package asks for it."""
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path), "FUSER_CHECK_IR": "0", "PYTHONPATH": PATHS}
    done = forked.run(["-c", _MODEL], env, timeout=120, dynamo=True)
    assert done.returncode == 0, done.stderr
    cold, warm = map(json.loads, done.stdout.splitlines())
    groups = len(cold[0])
    assert groups >= 3 and cold[0] == warm[0] == [None] * groups and cold[2] > 0
    assert warm[1:] == [groups, 0, []] and cold[3] == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_warm_process_on_a_gpu_lowers_nothing(tmp_path: pathlib.Path) -> None:
    script = """
import sys, torch, fuser
key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x, y: torch.softmax(torch.relu(x * y + 1) - y, -1)))
x, y = torch.randn(64, 1000, device="cuda"), torch.randn(1000, device="cuda")
handle = fuser.fusion_handle(key)
torch.testing.assert_close(handle(x, y), torch.softmax(torch.relu(x * y + 1) - y, -1))
print(handle.hits, fuser.stats()["lowerings"], "triton" in sys.modules)
"""
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path), "FUSER_CHECK_IR": "0", "PYTHONPATH": PATHS}
    done = [forked.run(["-c", script], env) for _ in range(2)]
    assert done[0].stdout.startswith("1 1") and done[1].stdout == "1 0 False\n", [d.stderr for d in done]
