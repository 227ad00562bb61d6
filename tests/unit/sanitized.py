"""The native launcher built with a sanitizer, and what a process needs that loads it.

As a plugin of pytest (`-p tests.unit.sanitized`) it has all tests use the launcher in the file `$SANITIZED_LAUNCHER`.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sysconfig

from fuser.runtime import native_build

# Python and torch are not instrumented: what they do to memory between themselves is not looked at, only how they
# synchronise. Their memory lives until the process ends: leaks are not looked for.
SUPPRESSED = pathlib.Path(__file__).with_name("thread.suppressions")
SANITIZERS = {
    "address,undefined": (
        ("libasan.so", "libstdc++.so"),
        {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66", "UBSAN_OPTIONS": "print_stacktrace=1"},
    ),
    "thread": (
        ("libtsan.so", "libstdc++.so"),
        {"TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:exitcode=66:die_after_fork=0:suppressions={SUPPRESSED}"},
    ),
}
REPORTS = ("Sanitizer", "runtime error")
LAUNCHER = "SANITIZED_LAUNCHER"


def built(sanitizer: str, folder: pathlib.Path, source: pathlib.Path = native_build.SOURCE) -> str:
    """The launcher's file, built by g++ with a sanitizer of SANITIZERS."""
    made, include = str(folder / "_launcher.so"), sysconfig.get_paths()["include"]
    flags = ["-O0", "-g1", *native_build.FLAGS[1:], f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    subprocess.run(["g++", *flags, f"-I{include}", str(source), "-o", made], check=True)
    return made


def environment(sanitizer: str) -> dict[str, str]:
    """Variables of a process that loads something built with it. CalledProcessError if g++ does not have it."""
    libraries, options = SANITIZERS[sanitizer]
    ask = [["g++", f"-print-file-name={name}"] for name in libraries]
    found = [subprocess.check_output(command, text=True).strip() for command in ask]
    return {"LD_PRELOAD": " ".join(found), "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1", **options}


def why_not(sanitizer: str) -> str | None:
    """Why nothing can be built with it; None if it can."""
    if shutil.which("g++") is None:
        return "there is no g++"
    library = environment(sanitizer)["LD_PRELOAD"].split()[0]
    return None if os.path.isabs(library) else f"g++ has no {library}"


def pytest_configure() -> None:
    """Every process of a test run takes the launcher that is named."""
    path = pathlib.Path(os.environ[LAUNCHER])
    module = native_build.load(path)
    native_build.installed = lambda: module
