"""Real kernels compiled and run from many threads, in forked children, and by either launcher."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fuser
from fuser import config, executor, interface
from fuser.cpu import toolchain
from fuser.runtime import launcher, python_launcher
from tests import forked

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")

THREADS = 8


def in_threads(calls):
    """Run all calls at the same time, each in its own thread; their results in order."""
    start = threading.Barrier(len(calls))

    def run(call):
        start.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as workers:
        return [f.result(300) for f in [workers.submit(run, c) for c in calls]]


def norm_gelu(x, w):
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w)) * x


def test_eight_threads_register_compile_and_run_one_spec(registry):
    w = torch.randn(33)
    inputs = [torch.randn(n + 2, 33) for n in range(THREADS)]
    graphs = [fx.symbolic_trace(norm_gelu) for _ in inputs]  # torch.fx's tracer knows one thread only

    def work(graph, x):
        key = fuser.register_fusion(graph)
        return [fuser.run_fusion(key, [x, w])[0] for _ in range(20)]

    results = in_threads([lambda g=g, x=x: work(g, x) for g, x in zip(graphs, inputs)])
    for x, got in zip(inputs, results):
        for one in got:
            torch.testing.assert_close(one, norm_gelu(x, w))
            assert torch.equal(one, got[0]), "the same inputs must give the same bits"
    (spec,) = registry.specs()
    assert fuser.num_compiled_kernels() == 1 and not spec.store.fallbacks


def test_eight_threads_compile_eight_specs(registry):
    x = torch.randn(40, 50)

    def function(n):
        def chain(x):  # graphs of different lengths: those that differ in constants alone may share a specification
            for _ in range(n):
                x = torch.tanh(x)
            return torch.softmax(x, -1).sum(n % 2)

        return chain

    fns = [function(n) for n in range(THREADS)]
    handles = [fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(fn))) for fn in fns]
    for fn, got in zip(fns, in_threads([lambda h=h: h(x) for h in handles])):
        torch.testing.assert_close(got, fn(x))
    assert [len(s.store.kernels) for s in registry.specs()] == [1] * THREADS
    assert not any(s.store.fallbacks for s in registry.specs())


def test_classes_of_one_spec_from_many_threads(registry):
    """Dtypes and ranks arrive together; each class compiles once, whoever asks."""
    key = fuser.register_fusion(fx.symbolic_trace(lambda x: x * x + x))
    dtypes = (torch.float32, torch.float64, torch.int32, torch.bfloat16)
    inputs = [torch.ones((3,) * rank, dtype=d) * 3 for d in dtypes for rank in (1, 2)]
    for x, got in zip(inputs * 2, in_threads([lambda x=x: fuser.run_fusion(key, [x])[0] for x in inputs * 2])):
        assert torch.equal(got, x * x + x)
    assert fuser.num_compiled_kernels() == len(inputs)


def test_large_calls_from_threads_share_the_pool_of_temporaries(registry):
    """A transposing reduction with a temporary, big enough to be split over OpenMP threads."""

    def fn(x):
        return (x - x.mean(0, keepdim=True)).t().contiguous().softmax(-1)

    handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(fn)))
    inputs = [torch.randn(300 + n, 200) for n in range(4)]
    for x, got in zip(inputs * 2, in_threads([lambda x=x: [handle(x) for _ in range(5)] for x in inputs * 2])):
        for one in got:
            torch.testing.assert_close(one, fn(x))
            assert torch.equal(one, got[0])


# -- one process after another, and beside another ---------------------------------------------------------------------
def test_the_disk_remembers(registry, fresh_cache_dir, monkeypatch):
    """A second registry stands for a second process: the library is found, the compiler is not run."""
    x, w = torch.randn(6, 33), torch.randn(33)
    runs = []
    run = toolchain.run_compiler
    monkeypatch.setattr(toolchain, "run_compiler", lambda command: (runs.append(command), run(command)))
    for _ in range(2):
        registry.__init__()
        (got,) = interface.debug_launch_graph(fx.symbolic_trace(norm_gelu), [x, w])
        torch.testing.assert_close(got, norm_gelu(x, w))
        assert len(runs) == 1


def test_a_broken_library_on_disk_is_made_again(registry, fresh_cache_dir):
    x, w = torch.randn(6, 33), torch.randn(33)
    code = interface.debug_get_fused_kernel_code(fx.symbolic_trace(norm_gelu), [x, w])
    assert code
    path = toolchain.compile_library((code,))
    with open(path, "wb") as file:
        file.write(b"\x7fELF and then the disk was full")
    (got,) = interface.debug_launch_graph(fx.symbolic_trace(norm_gelu), [x, w])
    torch.testing.assert_close(got, norm_gelu(x, w))
    (spec,) = registry.specs()
    assert not spec.store.fallbacks


_FORKS = """
import os, sys, torch, fuser
from torch import fx
torch.set_num_threads(2)
def fn(x): return torch.softmax(x * 3, -1)
def other(x): return torch.softmax(x * 5, 0)
handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(fn)))
inputs = [torch.randn(12, 300), torch.randn(600, 700)]
expected = [(fn(x), other(x)) for x in inputs]
handle(inputs[{warm}])
pids = []
for n in range(3):
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1)  # as torch's data loaders do: OpenMP's threads do not survive a fork, here or in eager
        new = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(other)))
        ok = all(torch.allclose(h(x), e[i]) for x, e in zip(inputs, expected) for i, h in enumerate((handle, new)))
        os._exit(0 if ok and fuser.num_compiled_kernels() == 3 else 1)  # few blocks of columns are split
    pids.append(pid)
print([os.waitpid(p, 0)[1] for p in pids], torch.allclose(handle(inputs[0]), expected[0][0]))
"""


@pytest.mark.parametrize("warm", [0, 1], ids=["one thread before", "OpenMP before"])
def test_forked_children_run_and_compile(tmp_path, warm):
    env = {**os.environ, "FUSER_CACHE_DIR": str(tmp_path)}
    done = forked.run(["-c", _FORKS.format(warm=warm)], env=env, timeout=300)
    assert done.stdout.split("\n")[0] == "[0, 0, 0] True", done.stdout + done.stderr


_MEMORY = """
import time, torch, fuser
from torch import fx
from fuser import config
from fuser.runtime import pool, launcher
config.set(pool_idle_seconds=0.3)
launcher.wait()
def fn(x): return (x - x.mean(0, keepdim=True)).softmax(-1).sum(0)
handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(fn)))
x = torch.randn(4000, 1000)
assert torch.allclose(handle(x), fn(x), atol=1e-4)
for _ in range(3): handle(x)
busy = pool.stats()["idle_bytes"]
blocks = pool.empty_strided((1 << 22,), (1,), torch.float32)
del blocks
kept = pool.stats()["idle_bytes"]
deadline = time.time() + 20
while pool.stats()["idle_bytes"] and time.time() < deadline: time.sleep(0.05)
print(kept >= 1 << 24, pool.stats()["idle_bytes"], pool.stats()["used_bytes"])
"""


def test_memory_of_an_idle_pool_is_returned(tmp_path):
    done = forked.run(["-c", _MEMORY], timeout=300)
    assert done.stdout.split() == ["True", "0", "0"], done.stdout + done.stderr


# -- either launcher ---------------------------------------------------------------------------------------------------
BY_EITHER = {
    "pointwise": (lambda x, y: torch.relu(x * y + 1), lambda: (torch.randn(70, 90), torch.randn(90))),
    "reduction": (lambda x, y: torch.softmax(x + y, -1), lambda: (torch.randn(400, 300), torch.randn(300))),
    "column sum": (lambda x, n: x.sum(0) * n, lambda: (torch.rand(700, 130) + 1, 3)),
    "temporaries": (lambda x, y: (x - x.mean(0)).amax(1) + y.sum(), lambda: (torch.randn(300, 200), torch.randn(5))),
    "several results": (lambda x, n: (x * n, (x > n).any(-1), x.argmax(1)), lambda: (torch.randn(50, 60), 0.5)),
    "transposed": (lambda x, y: x.t() + y, lambda: (torch.randn(60, 50), torch.randn(50, 60))),
    "empty": (lambda x, y: x * y, lambda: (torch.randn(0, 5), torch.randn(5))),
}  # fmt: skip


@pytest.mark.sampled(7, also=("column sum",))
@pytest.mark.parametrize("name", BY_EITHER)
def test_both_launchers_give_the_same_bits(registry, monkeypatch, name):
    if not launcher.wait(120):
        pytest.skip(f"no native launcher: {launcher.reason()}")
    fn, make = BY_EITHER[name]
    args = make()
    results = []
    for handles in (launcher.make_handle, python_launcher.Handle):
        registry.__init__()
        monkeypatch.setattr(executor.launcher, "make_handle", handles)
        key = fuser.register_fusion(fx.symbolic_trace(fn))
        results.append([fuser.run_fusion(key, list(args)) for _ in range(2)][1])
        spec = interface.kernel_spec(key)
        assert spec.store.kernels and not spec.store.fallbacks
        assert isinstance(registry.find(key).handle, python_launcher.Handle) == (handles is python_launcher.Handle)
    native, python = results
    want = fn(*args)
    want = list(want) if isinstance(want, tuple) else [want]
    for a, b, w in zip(native, python, want, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() == w.stride()
        torch.testing.assert_close(a, w)


# -- compilers that are no use -----------------------------------------------------------------------------------------
_BROKEN = """
import warnings, torch, fuser
from torch import fx
from fuser import config, interface
config.set(compile_timeout_seconds=1.0)
x, y = torch.randn(5, 3), torch.randn(3)
fns = [lambda x, y: torch.relu(x * y + 1), lambda x, y: torch.softmax(x - y, -1)]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for fn in fns:
        key = fuser.register_fusion(fx.symbolic_trace(fn))
        for _ in range(2):
            assert torch.equal(fuser.run_fusion(key, [x, y])[0], fn(x, y))
print(len(seen), fuser.num_compiled_kernels())
print(*(w.message for w in seen))
print(interface.kernel_spec(key).store.fallbacks)
"""
SCRIPTS = {
    "missing": (None, "which does not exist; install one, or pip install fuser[compiler], or set CXX"),
    "fails": ("echo 'out of memory' >&2; exit 1", "does not compile a small loop"),
    "hangs": ("sleep 60", "ran longer than 1 s and was stopped"),
    "writes nothing": ("exit 0", "ended without an error, but it wrote no library"),
}


@pytest.mark.sampled(4, also=("fails",))
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_compiler_of_no_use_means_eager_one_warning_and_a_reason(tmp_path, name):
    script, says = SCRIPTS[name]
    path = tmp_path / "compiler"
    if script is not None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    env = {**os.environ, "CXX": str(path), "FUSER_CACHE_DIR": str(tmp_path / "cache")}
    done = forked.run(["-c", _BROKEN], env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    counts, warning, fallbacks = done.stdout.splitlines()
    assert counts == "1 0" and says in warning and says in fallbacks and fallbacks.endswith(": 2}")


def test_a_compiler_that_hung_is_not_asked_again(tmp_path, monkeypatch, fresh_cache_dir):
    asked = []

    def hang(command, timeout):
        asked.append(command)
        raise fuser.errors.CompileError("it hung")

    monkeypatch.setattr(toolchain.process, "run", hang)
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\n")
    for _ in range(3):
        with pytest.raises(fuser.errors.CompileError, match="it hung"):
            toolchain.flags_for((str(compiler),))
    assert len(asked) == 1


def test_a_compiler_that_hangs_leaves_no_process_behind(tmp_path):
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\nsleep 61 & echo $! > {tmp_path}/child; wait\n")
    path.chmod(0o755)
    with config.override(compile_timeout_seconds=0.5), pytest.raises(fuser.errors.CompileError, match="was stopped"):
        toolchain.run_compiler([str(path)])
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if f"{child} (sleep) Z" in open(f"/proc/{child}/stat").read():
            return
        time.sleep(0.05)
    pytest.fail("the process that the compiler started is still there")
