"""Kernels in the traces of profilers: on every road an event with the kernel's name for each of its steps."""

from __future__ import annotations

import ctypes
import json
import subprocess
import threading
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fuser
from fuser import config, executor, interface
from fuser.frontends import script_operators
from fuser.runtime import events, launcher, python_launcher

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.skipif(not launcher.wait(60), reason="there is no native launcher"),
]
X, Y = torch.randn(24, 32), torch.randn(24, 32)
CALLS = 20


def two_steps(x, y):
    return torch.softmax(torch.softmax(x * y, -1), 0)


def two_steps_in_python(x, y):
    return torch.softmax(torch.softmax(x - y, -1), 0)


def handle_of(function, make=None, monkeypatch=None, inputs=None):
    if make is not None:
        monkeypatch.setattr(executor.launcher, "make_handle", make)
    key = fuser.register_fusion(torch.fx.symbolic_trace(two_steps_in_python if make is not None else function))
    handle = fuser.fusion_handle(key)
    assert make is None or type(handle) is make
    handle(*(inputs or (X, Y)))
    (kernel,) = interface.kernel_spec(key).store.kernels
    return handle, [step.entry for step in kernel.program.steps]


def counts(run) -> dict[str, int]:
    """How often each of our events happened while `run` ran under a profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return {e.key: e.count for e in found.key_averages() if e.key.startswith("k")}


def heads(found: dict[str, int]) -> dict[str, int]:
    """The same without the digits of the group's hash."""
    return {name.rpartition("_")[0]: n for name, n in found.items()}


@pytest.mark.parametrize("make", [None, python_launcher.Handle], ids=["native", "Python"])
def test_each_call_of_a_handle_has_an_event_for_each_step(make, monkeypatch):
    handle, names = handle_of(two_steps, make, monkeypatch)
    assert len(names) == 2 and len({n.rpartition("_")[2] for n in names}) == 1
    assert counts(lambda: [handle(X, Y) for _ in range(CALLS)]) == dict.fromkeys(names, CALLS)
    assert handle.hits >= CALLS


def test_names_end_in_the_hash_that_explain_shows():
    key = fuser.register_fusion(torch.fx.symbolic_trace(two_steps))
    fuser.run_fusion(key, [X, Y])
    (kernel,) = interface.kernel_spec(key).store.kernels
    digits = kernel.program.steps[0].entry.rpartition("_")[2]
    assert f"hash {digits}" in fuser.debug.explain(key)


def test_steps_of_many_threads_are_events_of_the_calling_thread():
    x = torch.randn(600, 700)
    handle, names = handle_of(lambda x, y: torch.softmax(x, -1).sum(0), inputs=(x, x))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            handle(x, x)
    finally:
        torch.set_num_threads(before)
    mine = [e for e in found.events() if e.name in names]
    assert len(names) > 1 and [e.name for e in mine] == names and len({e.thread for e in mine}) == 1
    spans = [(e.time_range.start, e.time_range.end) for e in mine]
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))


def test_equal_calls_that_run_together_are_one_event():
    handle, names = handle_of(two_steps)
    assert counts(lambda: handle.each(2, True, *[X, Y] * 8)) == dict.fromkeys(names, 1)


def test_a_compiled_model_and_its_backward_on_another_thread():
    model = torch.compile(lambda x, y: torch.relu(x * y + 1).sum(), backend="fuser")
    x = X.clone().requires_grad_()

    def step():
        for _ in range(3):
            model(x, Y).backward()

    step()
    found = heads(counts(step))
    assert found and all(n == 3 for n in found.values()), found
    assert any("red_sum" in name for name in found) and len(found) >= 2, found


def looped(x: torch.Tensor, n: int):
    for _ in range(n):
        x = torch.tanh(x * 2 + 3)
    return x


@pytest.mark.parametrize("usable", [True, False], ids=["native", "Python"])
def test_a_group_of_a_script(usable, monkeypatch):
    monkeypatch.setattr(script_operators, "_known", weakref.WeakValueDictionary())
    if not usable:
        monkeypatch.setattr(script_operators, "_is_usable", lambda _: False)

    fused = fuser.fuse_script(torch.jit.script(looped))
    fused(X, 2)
    assert heads(counts(lambda: fused(X, 5))) == {"k0_pw_mul_add_tanh_d1": 5}


def test_a_trace_holds_the_kernels(tmp_path):
    handle, names = handle_of(two_steps)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        handle(X, Y)
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in traced if e.get("name", "").startswith("k") and e.get("ph") == "X"] == names


def test_no_events_of_other_threads_and_none_afterwards():
    handle, names = handle_of(two_steps)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        thread = threading.Thread(target=handle, args=(X, Y))
        thread.start()
        thread.join()
        handle(X, Y)
    handle(X, Y)
    assert [e.name for e in found.events() if e.name in names] == names


@pytest.mark.parametrize("rows", [24, 2000])
def test_observers_of_the_whole_process_see_kernels_after_a_few_small_calls(rows, tmp_path):
    handle, names = handle_of(two_steps)
    x = torch.rand(rows, 32)
    handle(x, x)
    path = tmp_path / "execution.json"
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(path))
    observer.start()
    for _ in range(40):
        handle(x, x)
    observer.stop()
    observer.unregister_callback()
    text = path.read_text()
    least = 40 if rows > 24 else 40 - 16
    assert all(least <= text.count(f'"{name}"') <= 40 for name in names)


@pytest.mark.parametrize("make", [None, python_launcher.Handle], ids=["native", "Python"])
def test_ranges_are_opened_and_closed_around_calls(make, monkeypatch):
    handle, names = handle_of(two_steps, make, monkeypatch)
    said = []
    functions = said.append, lambda: said.append(None)
    monkeypatch.setattr(events, "range_functions", lambda kind: functions if kind else None)
    config.ranges = "itt"
    try:
        handle(X, Y)
    finally:
        config.ranges = ""
    handle(X, Y)
    expected = names[:1] if make is None else names
    assert said == [word for name in expected for word in (name, None)]


def test_ranges_that_fail_do_no_harm(monkeypatch):
    handle, _ = handle_of(two_steps)

    def fail(*_):
        raise RuntimeError("no range")

    monkeypatch.setattr(events, "range_functions", lambda kind: (fail, fail) if kind else None)
    config.ranges = "nvtx"
    try:
        found = handle(X, Y)
    finally:
        config.ranges = ""
    torch.testing.assert_close(found, two_steps(X, Y))


@pytest.mark.parametrize("kind", ["nvtx", "itt"])
def test_torch_has_the_ranges_or_says_so(kind):
    pair = events.range_functions(kind)
    if kind == "nvtx":
        assert (pair is not None) == bool(torch.version.cuda)
    if pair is not None and kind == "itt":
        pair[0]("a range")
        pair[1]()


def test_the_symbols_of_a_library_are_the_names_of_events():
    """`perf` and debuggers read a library's symbols, so they need no map file."""
    handle, names = handle_of(two_steps)
    spec = handle.slow.__self__.spec
    library = spec.store.kernels[0].library
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in listed.splitlines()} >= set(names)
    assert all(getattr(ctypes.CDLL(str(library)), name) for name in names)
