"""Forked children: every lock is free, every thread is replaced, and no folder of the parent's goes away."""

from __future__ import annotations

import ast
import importlib
import os
import pathlib
import pkgutil
import threading

import pytest

import fuser
from fuser import forks
from tests import forked

ROOT = pathlib.Path(__file__).parents[2]
PRIMITIVES = tuple(type(make()) for make in (threading.Lock, threading.RLock, threading.Condition, threading.Event))

# Made in one place each, which sees to forks, to limits on threads, and to the end of the process.
MADE_BY = {
    "threading.Lock": {"forks"},
    "threading.RLock": {"forks"},
    "threading.Condition": {"forks", "runtime.workers"},
    "threading.Event": {"forks"},
    "threading.Semaphore": set(),
    "threading.BoundedSemaphore": {"cuda.pool"},  # of a pool that a child replaces
    "threading.Thread": {"runtime.workers", "cuda.compile_worker"},  # the latter is a program of its own
    "threading.Timer": {"runtime.workers"},
    "concurrent.futures.ThreadPoolExecutor": {"runtime.workers"},
    "concurrent.futures.ProcessPoolExecutor": set(),
    "tempfile.TemporaryDirectory": set(),  # a child that exits would remove its parent's
    "weakref.finalize": {"frontends.script_operators"},  # which changes nothing outside of the process
    "atexit.register": {"runtime.files", "runtime.process"},
    "os.register_at_fork": {"forks"},
    "subprocess.Popen": {"runtime.process", "cuda.pool", "runtime.peer"},
    "subprocess.run": set(),
    "os.fork": set(),
}  # fmt: skip


def modules():
    return [m.name for m in pkgutil.walk_packages(fuser.__path__, "fuser.")]


def uses_of(path: pathlib.Path) -> set[str]:
    """What of `MADE_BY` a module calls, or hands to something that may call it."""
    text = path.read_text()
    if not any(word in text for word in ("fork", *(name.partition(".")[0] for name in MADE_BY if name[:3] != "os."))):
        return set()  # a name of a module has to be written to be imported
    tree = ast.parse(text)
    full = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            full.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    used: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            used += (node.func, *node.args, *(k.value for k in node.keywords))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            used += node.decorator_list
    last = {name.rpartition(".")[2] for name in (*MADE_BY, *full)}
    names = {ast.unparse(u) for u in used if getattr(u, "attr", getattr(u, "id", None)) in last}
    return {full.get(n, n) for n in names} & set(MADE_BY)


def test_what_depends_on_threads_and_processes_is_made_in_one_place():
    package = ROOT / "fuser"
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        for use in uses_of(path):
            assert name in MADE_BY[use], f"{name} uses {use}: take forks, runtime.workers, runtime.files or process"


def test_every_lock_of_a_module_or_of_its_objects_is_known():
    found = []
    for name in modules():
        if name == "fuser.cuda.compile_worker" or "_launcher" in name:
            continue
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            ours = type(value).__module__.startswith("fuser.") and hasattr(value, "__dict__")
            inside = [(f"{key}.{k}", v) for k, v in vars(value).items()] if ours else []
            for place, one in ((key, value), *inside):
                if isinstance(one, PRIMITIVES):
                    found.append(f"{name}.{place}")
                    assert one in forks._locks, f"{name}.{place} is not free in a forked child: make it by fuser.forks"
    assert len(found) > 8


def test_a_child_of_a_shared_block_has_the_change_again():
    """Whoever leaves a block that a fork ended already has not left another."""
    changed = []
    shared = forks.Shared(lambda: changed.append(True), changed.clear)
    with shared.block():
        shared.after_fork()  # as in a child of this thread
        assert not changed
    for _ in range(2):
        with shared.block():
            assert changed == [True]
            with shared.block():
                assert changed == [True]
        assert not changed


# Every lock is held, a kernel, a launcher and a prepared group are being made, and a folder is in use: as at the worst
# moment of a fork. `child` then does all of it anew.
WORST = """
import os, sys, threading
import torch, fuser
from torch import fx
from fuser import config, executor, forks, interface, orders
from fuser.cpu import toolchain
from fuser.lowering import without_dynamo
from fuser.runtime import files, launcher, pool, warm, workers
import fuser.debug, fuser.passes
torch.set_num_threads(1)
def fn(x): return torch.softmax(x * 3, -1)
def other(x): return torch.softmax(x * 5, 0)
def register(f): return fuser.register_fusion(fx.symbolic_trace(f))
x = torch.randn(12, 30)
key, unmade = register(fn), register(other)
prepared = register(lambda x: (x + 1).tanh().sum())
fuser.run_fusion(key, [x])
folder = files.private_folder()
inside, go_on = threading.Event(), threading.Event()
make = toolchain.compile_library
def slow(*args):
    inside.set()
    go_on.wait()
    return make(*args)
toolchain.compile_library = slow
orders.POOL._size = lambda: 1
future = fuser.prepare(unmade, [x])
later = fuser.prepare(prepared, [x])
assert inside.wait(300)
ready, done = threading.Event(), threading.Event()
def hold():
    with without_dynamo.without_dynamo():
        taken = [l for l in list(forks._locks) if hasattr(l, "acquire") and l.acquire(timeout=0.2)]
        ready.set()
        done.wait()
        for l in reversed(taken):
            l.release()
threading.Thread(target=hold).start()
assert ready.wait(300)
child = os.fork()
if not child:
    toolchain.compile_library = make
    assert without_dynamo.SHARED.blocks == 0
    assert future.done() and later.done() and "forked" in future.result()
    assert fuser.prepare(unmade, [x]).result(300) is None
    assert fuser.prepare(prepared, [x]).result(300) is None
    for f, k in ((fn, key), (other, unmade), (lambda x: torch.sigmoid(x) * x, None)):
        k = register(f) if k is None else k
        torch.testing.assert_close(fuser.run_fusion(k, [x])[0], f(x))
        assert not interface.kernel_spec(k).store.fallbacks and interface.kernel_spec(k).store.kernels
    assert launcher.wait(300)
    warm.empty_strided((1 << 20,), (1,), torch.float32), pool.stats()
    assert workers.run_all(abs, [-1, -2]) == [1, 2]
    assert files.private_folder() != folder
    config.set(enabled=False)
    fuser.override_can_fuse_on_cpu(None)
    sys.exit(7)  # with everything that runs at exit
_, status = os.waitpid(child, 0)
done.set()
go_on.set()
assert future.result(300) is None and later.result(300) is None and folder.exists()
print("status", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
def test_a_child_forked_at_the_worst_moment_does_everything(tmp_path):
    env = {**os.environ, "FUSER_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = forked.run(["-c", WORST], env=env, timeout=240)
    assert done.stdout == "status 7\n", done.stdout + done.stderr


PROBES = """
import os, sys, threading
from fuser.cpu import toolchain
from fuser.runtime import files, launcher, native_build, process
native_build.installed = lambda: None
run, inside, go_on = process.run, threading.Semaphore(0), threading.Event()
def slow(*args):
    inside.release()
    go_on.wait()
    return run(*args)
process.run = slow
def finish():
    toolchain.flags_for(toolchain.find_compiler())
    assert launcher.wait(200), launcher.reason()
toolchain._is_usual = lambda compiler: False
toolchain.warm_up()
launcher.prepare()
assert inside.acquire(timeout=60) and inside.acquire(timeout=60)
child = os.fork()
if not child:
    process.run = run
    finish()
    sys.exit(7)
_, status = os.waitpid(child, 0)
go_on.set()
finish()
print("status", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
def test_a_child_forked_during_a_probe_and_a_build_does_both_itself():
    """And its exit leaves the folders in which its parent is at work."""
    env = {**os.environ, "FUSER_CACHE_DIR": "", "PYTHONPATH": str(ROOT)}
    done = forked.run(["-c", PROBES], env=env, timeout=240)
    assert done.stdout == "status 7\n", done.stdout + done.stderr


def test_a_fork_waits_for_what_a_thread_imports(tmp_path):
    """A child that imports the same module would wait for that thread, which it has not."""
    (tmp_path / "imported_slowly.py").write_text("import time\ntime.sleep(1)\nvalue = 7\n")
    script = f"""
import os, signal, threading, time, fuser
fuser.__path__.append({str(tmp_path)!r})
def load():
    import fuser.imported_slowly
    return fuser.imported_slowly.value
thread = threading.Thread(target=load)
thread.start()
time.sleep(0.2)
child = os.fork()
if not child:
    signal.alarm(5)
    os._exit(load())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), load())
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = forked.run(["-c", script], env=env, timeout=60)
    assert done.stdout == "7 7\n", done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_a_child_forked_during_an_import_has_the_collector_as_it_was(enabled):
    """The thread that imports puts the collector to rest, and a child has not that thread."""
    script = f"""
import gc, os, threading
from fuser import startup
import fuser
if not {enabled}:
    gc.disable()
resting, done = threading.Event(), threading.Event()
def load():
    with startup.collector_at_rest():
        resting.set()
        done.wait()
thread = threading.Thread(target=load)
thread.start()
resting.wait()
child = os.fork()
if not child:
    os._exit(gc.isenabled())
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
thread.join()
print(code, int(gc.isenabled()))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = forked.run(["-c", script], env=env, timeout=60)
    assert done.stdout == f"{int(enabled)} {int(enabled)}\n", done.stderr
