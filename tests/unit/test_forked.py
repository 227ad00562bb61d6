"""Forked processes do as started ones: what they are given, what they say, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import forked

TOLD = """
import os, sys
assert "torch" in sys.modules and not any(m.partition(".")[0] == "fuser" for m in sys.modules)
print(__name__, sys.argv, os.getcwd(), os.environ["FUSER_FOR_A_TEST"], sys.path[:2], sys.stdin.read())
print("said", file=sys.stderr)
import atexit
atexit.register(print, "at exit")
sys.exit({code})
"""


@pytest.mark.parametrize("command", [["-c"], ["-W", "ignore", "-c"]])
def test_what_a_process_is_given_and_says(command, tmp_path):
    env = os.environ | {"FUSER_FOR_A_TEST": "7", "PYTHONPATH": str(tmp_path)}
    done = forked.run([*command, TOLD.format(code=3), "a", "b"], env, tmp_path)
    said = f"__main__ ['-c', 'a', 'b'] {tmp_path} 7 ['', '{tmp_path}'] \nat exit\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, said, "said\n")


def test_files_and_modules(tmp_path):
    (tmp_path / "own.py").write_text("import sys\nprint(__name__, __file__, sys.argv, sys.path[0])\n")
    path = str(tmp_path / "own.py")
    assert forked.run([path, "a"]).stdout == f"__main__ {path} {[path, 'a']} {tmp_path}\n"
    assert forked.run(["-m", "own", "a"], cwd=tmp_path).stdout == f"__main__ {path} {[path, 'a']} {tmp_path}\n"


@pytest.mark.parametrize("option", ["ignore", "error", "error::RuntimeWarning"])
def test_options_for_warnings_are_those_of_a_started_process(option):
    code = "import sys, warnings; print(sys.warnoptions); warnings.warn('a'); warnings.warn('b', RuntimeWarning)"
    command = ["-W", option, "-c", code]
    done = forked.run(command)
    started = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (started.returncode, started.stdout)
    assert done.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_how_processes_end():
    raised = forked.run(["-c", "raise ValueError('for a test')"])
    assert raised.returncode == 1 and raised.stderr.endswith("ValueError: for a test\n")
    assert forked.run(["-c", "import sys; sys.exit('why')"]).stderr == "why\n"
    assert forked.run(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]).returncode == -9
    with pytest.raises(subprocess.CalledProcessError):
        forked.run(["-c", "1 / 0"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(["-c", "import time; time.sleep(60)"], timeout=0.2)
    assert forked.run(["-c", "print('again')"]).stdout == "again\n"


def test_variables_that_were_read_already_are_those_of_a_new_process():
    code = "import os, torch; print(torch.get_num_threads(), os.getppid())"
    threads, parent = forked.run(["-c", code], os.environ | {"OMP_NUM_THREADS": "1"}).stdout.split()
    assert threads == "1" and int(parent) == os.getpid()
    assert int(forked.run(["-c", code]).stdout.split()[1]) != os.getpid()
