"""The native launcher under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: no report.

`make stress` runs the launcher's tests there, and a million random calls from eight threads.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from fuser.runtime import native_build
from tests.unit import launcher_stress, sanitized
from tests.unit import runtime_support as support

ROOT = pathlib.Path(__file__).parents[2]
IN_FULL = bool(os.environ.get("FUSER_TEST_ALL") or os.environ.get("FUSER_STRESS"))
CALLS = 1_000_000 if IN_FULL else 5_000
THREADS = 8
TESTS = ("launcher", "each", "pool", "sequences")

pytestmark = pytest.mark.xdist_group("sanitizers")


@pytest.fixture(scope="module", params=sorted(sanitized.SANITIZERS) if IN_FULL else ["address,undefined"])
def sanitizer(request, tmp_path_factory):
    """(its name, the launcher's file, a folder with libraries of kernels)"""
    why = sanitized.why_not(request.param)
    if why is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("sanitized")
    library = support.compile_library(folder)
    for n in range(2 * launcher_stress.LIBRARY_LIMIT):
        shutil.copy(library, folder / f"kernels{n}.so")
    return request.param, sanitized.built(request.param, folder), folder


def run(sanitizer: str, *command: str, timeout: float = 3000, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | sanitized.environment(sanitizer) | variables
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=timeout)


def stress(sanitizer: str, launcher: str, folder: pathlib.Path, calls: int) -> subprocess.CompletedProcess[str]:
    script = str(pathlib.Path(launcher_stress.__file__))
    return run(sanitizer, script, str(folder), launcher, str(calls), str(THREADS), "1")


def test_random_calls_from_eight_threads(sanitizer):
    name, launcher, folder = sanitizer
    done = stress(name, launcher, folder, CALLS)
    assert done.returncode == 0 and not any(word in done.stderr for word in sanitized.REPORTS), done.stderr[-8000:]
    counts = json.loads(done.stdout)
    print(f"{name}: {counts}")
    assert counts["calls"] >= CALLS and counts["hits"] > 0.6 * CALLS and counts["misses"] > 0.005 * CALLS
    assert counts["batches"] > 0.005 * CALLS and counts["others"] > 0.004 * CALLS


@pytest.mark.skipif(not IN_FULL, reason="neither FUSER_TEST_ALL nor FUSER_STRESS is set")
@pytest.mark.parametrize("part", TESTS)
def test_its_own_tests(sanitizer, part):
    name, launcher, _ = sanitizer
    which = "not python and not leak_nothing"  # which measures memory: AddressSanitizer keeps what was given back
    options = ("-q", "-n", "0", "-k", which, "-p", "no:cacheprovider", "-p", "tests.unit.sanitized")
    done = run(name, "-m", "pytest", *options, f"tests/unit/test_runtime_{part}.py", **{sanitized.LAUNCHER: launcher})
    said = done.stdout + done.stderr
    assert done.returncode == 0 and not any(word in said for word in sanitized.REPORTS), said[-8000:]


# What each sanitizer must find: a change of the launcher's source, which is a mistake.
MISTAKES = {
    "address,undefined": ("native/batch.h", "size_t(frame_words) * size_t(most)", "size_t(frame_words)"),
    "thread": ("native/pool.h", "pthread_mutex_lock(&pool.lock);\n  pool.used_bytes -= b->", "pool.used_bytes -= b->"),
}


@pytest.mark.skipif(not IN_FULL, reason="neither FUSER_TEST_ALL nor FUSER_STRESS is set")
def test_a_mistake_is_found(sanitizer, tmp_path):
    name, _, folder = sanitizer
    path, right, wrong = MISTAKES[name]
    source = tmp_path / "launcher.cpp"
    shutil.copytree(native_build.SOURCE.parent / "native", tmp_path / "native")
    shutil.copy(native_build.SOURCE, source)
    text = (tmp_path / path).read_text()
    assert right in text
    (tmp_path / path).write_text(text.replace(right, wrong, 1))
    done = stress(name, sanitized.built(name, tmp_path, source), folder, 20_000)
    assert done.returncode != 0 and "Sanitizer" in done.stderr, done.stderr[-3000:]
