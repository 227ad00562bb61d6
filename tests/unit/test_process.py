"""Programs that are run: they end with this process, within their time, whatever they leave behind."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import pytest

from fuser import errors
from fuser.runtime import process, workers

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 60  # seconds to wait for an end; the tests ask whether it comes, not how soon


def eventually(what) -> bool:
    """Whether `what()` becomes true."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody reaped does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def program(tmp_path):
    """A maker of programs: shell scripts."""

    def make(script: str) -> str:
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


HANGS = "sleep 600 & echo $$ $! > {0}.part; mv {0}.part {0}; wait"  # with a process that it started

# How this process may end while the program hangs, and where that was started.
RUNS = """
import os, signal, sys, threading, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if whoever started the tests ignores it
sys.modules["fuser"] = types.ModuleType("fuser")  # without torch: this is about processes alone
sys.modules["fuser"].__path__ = [{root!r}]
from fuser.runtime import process, workers
def hang():
    try: process.run([{program!r}], 600)
    except Exception: pass
def wait():
    while not os.path.exists({pids!r}): time.sleep(0.01)
"""
ENDS = {
    "interrupt": ("hang()", signal.SIGINT),
    "terminate": ("hang()", signal.SIGTERM),
    "kill": ("hang()", signal.SIGKILL),
    "terminate, in a thread": ("workers.start(hang, 'x'); time.sleep(600)", signal.SIGTERM),
    "kill, with a forked child": ("workers.start(hang, 'x'); wait()\nif not os.fork(): time.sleep(30)\ntime.sleep(600)",
                                  signal.SIGKILL),
    "end of a daemon": ("workers.start(hang, 'x'); wait()", None),
    "end of a thread": ("threading.Thread(target=hang).start(); wait()", None),
    "end of a pool": ("p = workers.Pool(lambda: 1, 'x')\nfor _ in range(3): p.submit(hang)\nwait()", None),
    "exit of a pool": ("p = workers.Pool(lambda: 1, 'x')\nf = p.submit(hang)\nwait(); raise SystemExit(0)", None),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_with_the_process_that_ran_it(tmp_path, program, how):
    code, number = ENDS[how]
    pids = tmp_path / "pids"
    start = RUNS.format(root=str(ROOT / "fuser"), program=program(HANGS.format(pids)), pids=str(pids))
    command = [sys.executable, "-c", start + code]
    python = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        assert eventually(pids.exists)
        if number is not None:
            python.send_signal(number)
        python.wait(PATIENCE)
        assert all(eventually(lambda pid=pid: not is_alive(pid)) for pid in map(int, pids.read_text().split()))
    finally:
        python.kill()
        python.wait()


@pytest.mark.parametrize("then", ["exit 3", "sleep 600"])
def test_a_process_that_escapes_with_the_output_open_holds_up_nothing(tmp_path, program, then):
    """A new session is out of reach, as that of a server of compilers is meant to be; it is not waited for."""
    path, pid = program(f"echo said; setsid sleep 600 & echo $! > {tmp_path}/pid; {then}"), tmp_path / "pid"
    began = time.monotonic()
    try:
        if then == "exit 3":
            assert process.run([path], 300) == (3, "said\n")
        else:
            with pytest.raises(errors.CompileError, match="longer than 0.5 s and was stopped"):
                process.run([path], 0.5)
        assert time.monotonic() - began < 200
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_what_a_program_leaves_behind_ends_with_it(tmp_path, program):
    assert process.run([program(f"sleep 600 & echo $! > {tmp_path}/pid")], 300) == (0, "")
    assert eventually(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    assert not subprocess.run(["pgrep", "-P", str(os.getpid()), "-x", "sh"], capture_output=True, text=True).stdout


def test_output_without_end_is_stopped_in_time_and_kept_in_part():
    with pytest.raises(errors.CompileError, match="was stopped"):
        process.run(["yes"], 0.5)


@pytest.mark.parametrize("script, code, output", [("kill -11 $$", 139, "Segmentation fault"), ("exec 1>&-", 0, "")])
def test_codes_and_output(program, script, code, output):
    found, text = process.run([program(script)], 300)
    assert (found, output in text) == (code, True)


@pytest.mark.parametrize("name", ["missing", "not executable"])
def test_a_program_that_cannot_be_run_is_named(tmp_path, name):
    path = tmp_path / name
    if name == "not executable":
        path.write_text("text")
    with pytest.raises(errors.CompileError, match=f"{name} cannot be run: .*"):
        process.run([str(path)], 300)


def test_without_a_shell_programs_run_all_the_same(monkeypatch):
    monkeypatch.setattr(process, "_SHELL", "/nowhere/sh")
    assert process.run(["echo", "said"], 300) == (0, "said\n")
    with pytest.raises(errors.CompileError, match="nowhere/compiler cannot be run: .*No such file"):
        process.run(["/nowhere/compiler"], 300)


def test_files_of_any_number_are_waited_for():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1200
    if hard != resource.RLIM_INFINITY and hard < wanted + 100:
        pytest.skip("so many files cannot be opened")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 100), hard))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(wanted)]
    try:
        assert process.run(["echo", "said"], 300) == (0, "said\n")
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- programs that hang again and again --------------------------------------------------------------------------------
def runs_of(tmp_path) -> int:
    return (tmp_path / "runs").read_text().count("\n")


def test_a_program_that_hung_twice_in_a_row_is_given_up(tmp_path, program):
    path = program(f"echo >> {tmp_path}/runs; exec sleep 600")
    for _ in range(4):
        with pytest.raises(errors.CompileError, match="longer than 0.5 s and was stopped; .*COMPILE_TIMEOUT") as raised:
            process.run([path], 0.5)
    assert runs_of(tmp_path) == process.HUNG_IN_A_ROW
    assert process.why_not(path, 0.5) == str(raised.value), "one cause is one sentence"
    with pytest.raises(errors.CompileError, match="longer than 0.6 s"):
        process.run([path], 0.6)  # who gives it longer has it tried
    assert runs_of(tmp_path) == process.HUNG_IN_A_ROW + 1


def test_a_program_that_hangs_now_and_then_is_given_up_later(tmp_path, program):
    path = program(f'echo >> {tmp_path}/runs; [ "$1" ] || exec sleep 600')
    for _ in range(2 * process.HUNG_IN_ALL):
        try:
            assert process.run([path, "well"], 0.5) == (0, "")
        except errors.CompileError:
            pass  # of a machine that is this busy the next line asks just so
        with pytest.raises(errors.CompileError, match="was stopped"):
            process.run([path], 0.5)
    assert process.why_not(path, 0.5) is not None and runs_of(tmp_path) <= 2 * process.HUNG_IN_ALL


def test_programs_that_hang_side_by_side_count_once(tmp_path, program):
    path = program("exec sleep 600")

    def run(_):
        with pytest.raises(errors.CompileError):
            process.run([path], 1.0)

    workers.run_all(run, range(3))
    assert process._hung[path].in_a_row == 1


# -- threads that there are not ----------------------------------------------------------------------------------------
@pytest.fixture
def no_threads(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers.threading.Thread, "start", start)


def test_without_threads_the_caller_works(no_threads):
    assert workers.start(lambda: None, "x") is None
    assert workers.run_all(lambda n: n * n, range(5)) == [0, 1, 4, 9, 16]
    pool, done = workers.Pool(lambda: 2, "x"), []
    assert [pool.submit(done.append, n).result(0) for n in range(3)] == [None] * 3 and done == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(0)


def test_all_items_are_worked_on_and_the_first_failure_is_raised():
    seen = []

    def work(n):
        seen.append(n)
        if n % 2:
            raise ValueError(n)

    with pytest.raises(ValueError, match="1"):
        workers.run_all(work, range(6), 3)
    assert sorted(seen) == list(range(6))
