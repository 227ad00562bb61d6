"""Compilations that nobody waits for: ATen serves meanwhile, and one process compiles for all."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
from fuser import compiler, config, elsewhere, examples, executor, interface, kernel_store, trials
from fuser.contests import trial as contest
from fuser.errors import CompileError, ConfigError, Unsupported
from fuser.runtime import background, files, launcher, workers
from tests import forked
from tests.unit import stub_launcher

needs_compiler = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 120  # more than anything here takes


def scaled(x, y):
    return torch.relu(x * y + 1)


@pytest.fixture
def in_background():
    """Calls do not wait."""
    with config.override(compile_mode="background"):
        yield
    assert fuser.wait(SECONDS)


@pytest.fixture
def gate(monkeypatch):
    """Compilations wait until this is set; their arguments are in `gate.seen`."""
    found, compile_runtime = threading.Event(), compiler.compile_runtime
    found.seen = []

    def compile_behind(spec, args):
        found.seen.append(args)
        assert found.wait(SECONDS)
        return compile_runtime(spec, args)

    monkeypatch.setattr(compiler, "compile_runtime", compile_behind)
    yield found
    found.set()
    assert fuser.wait(SECONDS)


@pytest.fixture
def meanwhile(monkeypatch):
    """The calls that reached Python while their kernel was being compiled."""
    seen, run = [], executor.Executor._run_meanwhile
    monkeypatch.setattr(executor.Executor, "_run_meanwhile", lambda *a: (seen.append(a[2]), run(*a))[1])
    return seen


def handle_of(function):
    key = fuser.register_fusion(fx.symbolic_trace(function))
    return interface.fusion_handle(key), interface.kernel_spec(key)


# -- calls ---------------------------------------------------------------------------------------------------------
@needs_compiler
def test_calls_run_aten_until_the_kernel_takes_over(in_background, gate, meanwhile):
    assert launcher.wait(SECONDS)
    handle, spec = handle_of(scaled)
    calls = [(torch.randn(5, 3), torch.randn(3)), (torch.randn(9, 3), torch.randn(3))]
    for _ in range(50):
        for args in calls:
            assert torch.equal(handle(*args), scaled(*args))
    assert len(meanwhile) == 2 and handle.hits == 0  # native code answers all but the first call of a form
    assert spec.store.fallbacks == {executor.PENDING: 100}
    assert not fuser.wait(0)
    gate.set()
    assert fuser.wait(SECONDS) and len(gate.seen) == 1
    for args in calls:
        torch.testing.assert_close(handle(*args), scaled(*args))
    assert handle.hits == 2 and spec.store.fallbacks == {executor.PENDING: 100}
    stands_in = gate.seen[0][0]
    assert stands_in.shape == (5, 3) and stands_in.data_ptr() != calls[0][0].data_ptr()  # no call's memory is held


@needs_compiler
def test_a_call_that_the_new_kernel_does_not_take_gets_its_own(in_background, gate):
    handle, spec = handle_of(lambda x: x.view(-1, 4).sum(1))
    inputs = [torch.randn(n, 8)[:, :4] if n == 3 else torch.randn(n, 4) for n in (2, 5, 3)]
    for x in inputs:
        handle(x)
    gate.set()
    for _ in range(3):
        assert fuser.wait(SECONDS)
        got = [handle(x) for x in inputs]
    before = handle.hits
    got = [handle(x) for x in inputs]
    assert handle.hits == before + 3
    for x, result in zip(inputs, got):
        torch.testing.assert_close(result, x.reshape(-1, 4).sum(1))


@pytest.mark.filterwarnings("ignore:fuser")
@pytest.mark.parametrize("error", [Unsupported("too odd"), CompileError("g++ said no"), ZeroDivisionError("a defect")])
def test_errors_become_reasons(monkeypatch, error):
    stub = stub_launcher.install(monkeypatch)

    def refuse(spec, args):
        raise error

    stub.make = refuse
    handle, spec = handle_of(scaled)
    x = torch.randn(4)
    with config.override(compile_mode="background"):
        for _ in range(2):
            assert torch.equal(handle(x, x), scaled(x, x))
            assert fuser.wait(SECONDS)
        assert torch.equal(handle(x, x), scaled(x, x))
    reason = kernel_store.reason_of(error)
    (entry,) = spec.store.entries
    assert entry.state == "failed" and entry.reason == reason and len(stub.calls) == 1
    assert spec.store.fallbacks == {executor.PENDING: 1, reason: 2}


def test_a_kernel_that_does_not_take_its_own_call_is_made_once(monkeypatch):
    blind = stub_launcher.StubKernel(stub_launcher.StubProgram(lambda *a: False, scaled))
    stub = stub_launcher.install(monkeypatch, lambda spec, args: blind)
    handle, spec = handle_of(scaled)
    x = torch.randn(4)
    with config.override(compile_mode="background"):
        for _ in range(4):
            assert torch.equal(handle(x, x), scaled(x, x))
            assert fuser.wait(SECONDS)
    assert len(stub.calls) == 1 and any("does not take the inputs" in reason for reason in spec.store.fallbacks)


@needs_compiler
@pytest.mark.parametrize("slower", [True, False])
def test_a_trial_begins_when_the_kernel_is_there(in_background, gate, monkeypatch, slower):
    """What ran by ATen meanwhile is judged like any other call, and left to ATen for good if ATen is faster."""
    assert launcher.wait(SECONDS)
    monkeypatch.setattr(trials.contest, "compete", lambda *a: contest.Outcome(2.0 if slower else 0.5, slower))
    with config.override(slowest=1.05):
        handle, spec = handle_of(scaled)
        x = torch.randn(100, 100)
        for _ in range(3):
            handle(x, x)
        gate.set()
        assert fuser.wait(SECONDS)
        for _ in range(3):
            torch.testing.assert_close(handle(x, x), scaled(x, x))
    slow = sum(n for reason, n in spec.store.fallbacks.items() if "times as long as ATen" in reason)
    assert slow == (3 if slower else 0) and handle.hits == (0 if slower else 2)


@needs_compiler
def test_a_group_with_calls_for_aten_is_split_meanwhile(in_background):
    def mixed(x):
        return torch.sort(torch.relu(x) * 2, dim=0).values.exp() + 1

    handle, spec = handle_of(mixed)
    x = torch.randn(5, 3)
    for _ in range(4):
        torch.testing.assert_close(handle(x), mixed(x))
        assert fuser.wait(SECONDS)
    pieces = [interface.kernel_spec(k) for made in spec.store.splits for k in made.keys]
    assert len(spec.store.splits) == 1 and pieces and all(p.store.kernels for p in pieces)
    assert executor.PENDING in spec.store.fallbacks


@needs_compiler
def test_deterministic_results_do_not_depend_on_when_a_kernel_is_ready(in_background, meanwhile):
    handle, spec = handle_of(scaled)
    x = torch.randn(4, 3)
    torch.use_deterministic_algorithms(True)
    try:
        handle(x, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert handle.hits == 1 and not meanwhile and not spec.store.fallbacks


@needs_compiler
def test_prepared_kernels_are_not_waited_for(in_background, gate):
    handle, spec = handle_of(scaled)
    x = torch.randn(4, 3)
    ahead = fuser.prepare(spec.key, [x, x])
    assert torch.equal(handle(x, x), scaled(x, x)) and not ahead.done()
    gate.set()
    assert ahead.result(SECONDS) is None and fuser.wait(SECONDS) and len(gate.seen) == 1
    handle(x, x)
    assert handle.hits == 1


@needs_compiler
def test_under_torch_compile_for_one_model(gate):
    torch._dynamo.reset()
    model = torch.compile(scaled, backend="fuser", options={"compile_mode": "background"})
    x, y = torch.randn(31, 17), torch.randn(17)
    assert config.compile_mode == "wait"
    for _ in range(3):
        assert torch.equal(model(x, y), scaled(x, y))
    assert not fuser.wait(0)
    gate.set()
    assert fuser.wait(SECONDS) and len(gate.seen) == 1  # before, no thread need have come to it
    before = fuser.num_compiled_kernels()
    torch.testing.assert_close(model(x, y), scaled(x, y))
    assert before == fuser.num_compiled_kernels() and before > 0


def test_values_of_the_setting():
    with pytest.raises(ConfigError, match="expected one of 'wait', 'background'"):
        config.set(compile_mode="later")


# -- threads -------------------------------------------------------------------------------------------------------
def test_a_pool_says_whether_all_is_done():
    pool, go = workers.Pool(lambda: 2, "test"), threading.Event()
    assert pool.wait(0) and not pool.busy
    futures = [pool.submit(lambda n=n: go.wait(SECONDS) and n) for n in range(5)]
    assert not pool.wait(0) and pool.busy == 5
    go.set()
    assert pool.wait(SECONDS) and [f.result(0) for f in futures] == list(range(5)) and not pool.busy
    failed = pool.submit(lambda: 1 / 0)
    assert pool.wait(SECONDS) and isinstance(failed.exception(0), ZeroDivisionError)


def test_threads_take_turns_more_often_only_meanwhile():
    before = sys.getswitchinterval()
    with background.yielding(), background.yielding():
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before
    with background.yielding():
        sys.setswitchinterval(2 * before)  # the user's own choice stays
    assert sys.getswitchinterval() == pytest.approx(2 * before)
    sys.setswitchinterval(before)


_HANGING = """
import torch, fuser, sys
from fuser import config
config.compile_mode = "background"
def chain(x):
    for n in range({length}):
        x = torch.softmax(x, -1) * (n + 2)
    return x
handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(chain)))
x = torch.randn(4, 50)
assert torch.equal(handle(x), chain(x)) and not fuser.wait({seconds})
print("ends", flush=True)
"""


@pytest.mark.parametrize("probed", [False, True])
def test_a_compiler_that_hangs_does_not_hold_up_the_end(tmp_path, probed):
    """Neither while it is asked what it can do, nor while several parts of a source are compiled."""
    compiler_path = tmp_path / "c++"
    passes = 'case "$*" in *probe*) exec g++ "$@";; esac' if probed else ""
    compiler_path.write_text(f"#!/bin/sh\n{passes}\nexec sleep 300\n")
    compiler_path.chmod(0o755)
    env = os.environ | {"CXX": str(compiler_path), "FUSER_CACHE_DIR": "", "PYTHONPATH": str(ROOT)}
    script = _HANGING.format(length=12 if probed else 1, seconds=2 if probed else 0.2)
    command = ["-W", "error::RuntimeWarning", "-c", script]
    if probed:  # how Python ends by itself, too
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=SECONDS)
    else:
        done = forked.run(command, env, timeout=SECONDS)  # not 300
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


# -- processes -----------------------------------------------------------------------------------------------------
_COLD = """
import json, os, sys, torch, fuser
from fuser import config
config.set(cache_dir=sys.argv[1], compile_mode=sys.argv[2])
children = []
for n in range(3):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        functions = [lambda x: torch.relu(x) * 2, lambda x: x.exp().sum(1)]
        x = torch.randn(5, 7)
        for f in functions:
            handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(f)))
            handle(x)
            assert fuser.wait(100)
            torch.testing.assert_close(handle(x), f(x))
            assert handle.hits == (2 if sys.argv[2] == "wait" else 1)
        os._exit(0)
    children.append(child)
print(json.dumps([os.waitpid(child, 0)[1] for child in children]))
"""


@needs_compiler
@pytest.mark.parametrize("mode", ["wait", "background"])
def test_cold_processes_compile_each_kernel_once(tmp_path, mode):
    log, compiler_path, cache = tmp_path / "log", tmp_path / "c++", tmp_path / "cache"
    compiler_path.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec g++ "$@"\n')
    compiler_path.chmod(0o755)
    env = os.environ | {"CXX": str(compiler_path), "PYTHONPATH": str(ROOT)}
    command = ["-c", _COLD, str(cache), mode]
    done = forked.run(command, env=env, timeout=SECONDS)
    assert done.returncode == 0 and json.loads(done.stdout) == [0] * 3, done.stderr
    kernels = [line for line in log.read_text().splitlines() if "probe" not in line and "launcher" not in line]
    assert len(kernels) == 2, kernels
    assert not [p.name for p in (cache / "cpu").iterdir() if p.name.startswith(".")]


def test_a_claim_is_for_one_and_waits_for_nobody_for_ever(tmp_path):
    path = tmp_path / "entry"
    with files.claim(path, 0) as mine:
        assert mine
        with files.claim(path, 0.05) as other, files.claim(tmp_path / "another", 0) as free:
            assert not other and free
    assert not list(tmp_path.iterdir())
    order, threads = [], []

    def work(n):
        with files.claim(path, SECONDS) as got:
            order.append((n, got))
            time.sleep(0.01)
            order.append((n, got))

    for n in range(4):
        threads.append(threading.Thread(target=work, args=(n,)))
        threads[-1].start()
    for thread in threads:
        thread.join(SECONDS)
    assert [a for a, _ in order[::2]] == [b for b, _ in order[1::2]] and all(got for _, got in order)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_holds_nothing_any_more_when_its_result_is_there(fails):
    """A thread that is not given a processor for a while may have ended its call long before it ends its step."""

    class Held:
        pass

    def function(held):
        if fails:
            raise ValueError("as asked for")

    pool = workers.Pool(lambda: 1, "fuser-test")
    gate, seen = threading.Event(), []
    pool.submit(gate.wait, SECONDS)
    held = Held()
    left = weakref.ref(held)
    promise = pool.submit(function, held)
    promise.add_done_callback(lambda _: seen.append(left()))
    del held
    gate.set()
    assert pool.wait(SECONDS)
    assert (type(promise.exception()), seen) == (ValueError if fails else type(None), [None])


def test_locks_of_dead_processes_are_free_and_go_away(tmp_path):
    left = tmp_path / f"{files._LOCK}left"
    left.touch()
    with files.claim(tmp_path / "left", 0) as mine:
        assert mine
    left.touch()
    held = os.open(tmp_path / f"{files._LOCK}held", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    files.write(tmp_path / "entry", b"contents")
    assert {p.name for p in tmp_path.iterdir()} == {"entry", f"{files._LOCK}held"}
    os.close(held)


def test_a_place_without_locks_is_compiled_in_without(tmp_path):
    with files.claim(tmp_path / "nowhere" / "entry", SECONDS) as mine:
        assert not mine


# -- another process -----------------------------------------------------------------------------------------------
_BESIDE = """
import sys, torch, fuser
from fuser import config, interface
config.compile_mode = "background"

def fused(x, n):
    return torch.relu(x * n + 1)

def split(x):
    return torch.sort(torch.relu(x) * 2, 0)[0].view(torch.int32) + 1  # a call that ATen makes, one refused for a dtype

x = torch.randn(5, 3)
made = [fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(f))) for f in (fused, split)]
for _ in range(3):
    torch.testing.assert_close(made[0](x, 2.5), fused(x, 2.5))
    assert torch.equal(made[1](x), split(x))
    assert fuser.wait(100)
found = fuser.stats()
print(found["lowerings"], found["compiles"], found["restored"], made[0].hits > 0, found["failures"])
"""


@needs_compiler
def test_another_process_lowers(tmp_path):
    """Threads that call do not take turns with one that lowers: it is done elsewhere, split and refused groups too."""
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path), "FUSER_CHECK_IR": "0", "PYTHONPATH": str(ROOT)}
    done = forked.run(["-W", "error", "-c", _BESIDE], env, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 3 0 True 0\n"


_LEFT = """
import os, signal, sys, time, torch, fuser
from fuser import config, elsewhere
config.compile_mode = "background"
handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)))
x = torch.randn(5, 3)
handle(x)
until = time.monotonic() + 60
while (peer := elsewhere._peer()._running) is None:
    assert time.monotonic() < until
    time.sleep(0.01)
print(peer.process.pid, flush=True)
if sys.argv[1] == "lives on":
    os.kill(peer.process.pid, signal.SIGKILL)
    assert fuser.wait(100)
    handle(x)
    assert handle.hits == 1 and fuser.stats()["lowerings"] == 1
elif sys.argv[1] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[1] == "forks":
    child = os.fork()
    if child == 0:
        assert fuser.wait(100) and torch.equal(handle(x), torch.relu(x) + 1) and fuser.wait(100)
        os._exit(0 if handle(x) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0 and fuser.wait(100)
    assert fuser.stats()["lowerings"] == 0
"""


_WAYS = ("ends", "forks") if os.environ.get("FUSER_TEST_ALL") == "1" else ()


@needs_compiler
@pytest.mark.parametrize("way", ["lives on", "is killed", *_WAYS])
def test_the_other_process_ends_with_this_one(tmp_path, way):
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path), "FUSER_CHECK_IR": "0", "PYTHONPATH": str(ROOT)}
    done = forked.run(["-c", _LEFT, way], env=env, timeout=SECONDS)
    assert done.returncode == (-9 if way == "is killed" else 0), done.stderr
    until = time.monotonic() + 20
    while _runs(int(done.stdout)):
        assert time.monotonic() < until
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_another_process_cannot_be_told_is_made_here(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(elsewhere, "_peer", lambda: asked.append(1))
    handle, spec = handle_of(scaled)
    x = torch.randn(3)
    with config.override(cache_dir=str(tmp_path)):
        assert not elsewhere.make(spec, (x, x)) and not asked  # nobody wants it
        with elsewhere.preferred():
            assert not elsewhere.make(spec, (x, x)) and asked
            assert elsewhere._request(spec, (x, 2.5), False)["args"] == [{"tensor": ["float32", [3], [1]]}, 2.5]
            assert elsewhere._request(spec, (x.to("meta"), x), False) is None
            assert elsewhere._request(spec, (x, 1j), False) is None
            with config.override(cache_dir=""):
                assert not elsewhere.make(spec, (x, x)) and len(asked) == 1


def test_stand_ins_of_one_thread_are_read_by_others_while_it_makes_more():
    """A mode of fake tensors says "meta" of all its tensors while it makes one: each stand-in has a mode of its own."""
    with FakeTensorMode():
        given = torch.empty(3, 4)
    found, wrong, done = [examples.concrete(given)], [], threading.Event()

    def read():
        while not done.is_set():
            wrong.extend(t.device.type for t in found[-50:] if t.device.type != "cpu")

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        found.append(examples.concrete(given))
        found.append(examples.on("cpu", given.to("meta")))
    done.set()
    reader.join()
    assert not wrong
