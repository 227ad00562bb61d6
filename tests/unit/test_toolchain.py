"""The C++ compiler and the folder of kernels: damaged files, unwritable folders, what is said of a failure."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import warnings

import pytest

from fuser import can_fuse_on_cpu, config
from fuser.cpu import complaints, toolchain
from fuser.errors import CompileError
from fuser.runtime import compilers, files, process
from fuser.runtime.libraries import Library

pytestmark = pytest.mark.skipif(not can_fuse_on_cpu(), reason="needs a C++ compiler")
ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def folder(tmp_path):
    toolchain._probe.cache_clear()
    toolchain._asked.clear()
    with config.override(cache_dir=str(tmp_path)):
        yield tmp_path / "cpu"
    toolchain._probe.cache_clear()


def find():
    return toolchain.find_compiler()


@pytest.mark.parametrize("damage", ["", "-O3\n", "-O3 '\n-lm\n", "a\nb\nc\n"])
def test_a_damaged_memory_of_flags_is_found_out_again(folder, damage):
    want = toolchain.flags_for(find())
    (known,) = folder.glob("toolchain-*")
    right = known.read_text()
    known.write_text(damage)
    toolchain._probe.cache_clear()
    assert toolchain.flags_for(find()) == want and known.read_text() == right


def test_a_folder_that_can_only_be_read_gives_what_it_has(folder, monkeypatch):
    kept = toolchain.compile_library((SOURCE,))
    assert pathlib.Path(kept).parent == folder
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: pathlib.Path(path) != folder and access(path, mode))
    assert toolchain.compile_library((SOURCE,)) == kept
    with pytest.warns(RuntimeWarning, match="it cannot be written; set FUSER_CACHE_DIR"):
        other = toolchain.compile_library((SOURCE.replace("42", "43"),))
    assert pathlib.Path(other).parent != folder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert toolchain.compile_library((SOURCE.replace("42", "43"),)) == other


def test_a_new_library_has_to_define_its_kernels(folder):
    assert toolchain.compile_library((SOURCE,), None, ["answer"])
    with pytest.raises(CompileError, match="ended without an error, but .*missing"):
        toolchain.compile_library((SOURCE + "// another\n",), None, ["answer", "missing"])


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with config.override(cache_dir=str(tmp_path / "file")):
        with pytest.warns(RuntimeWarning, match="kernels are not kept in .*file"):
            made = toolchain.compile_library((SOURCE,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert toolchain.compile_library((SOURCE,)) == made


@pytest.mark.parametrize(
    "log, gist",
    [
        ("ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status\n",
         "no space is left in {tmp} or {cache}: free some, or set TMPDIR and FUSER_CACHE_DIR"),
        ("/usr/bin/ld: cannot find -lnone: No such file\ncollect2: error: ld returned 1 exit status\n",
         "/usr/bin/ld: cannot find -lnone: No such file"),
        ("collect2: error: ld returned 1 exit status\n/usr/bin/ld: a.o: undefined reference to `f'\n",
         "/usr/bin/ld: a.o: undefined reference to `f'"),
        ("sh: 1: Cannot fork\n", "no process can be started: raise the limit (ulimit -u, or the container's)"),
        ("In file a.cpp:\na.cpp:3: error: expected ';'\na.cpp:4: error: more\n", "a.cpp:3: error: expected ';'"),
        ("something odd\nelse\n", "something odd"),
        ("\n", "it said nothing"),
    ],
)  # fmt: skip
def test_the_line_that_says_most(log, gist):
    gist = gist.replace("{tmp}", os.environ.get("TMPDIR", "/tmp")).replace("{cache}", config.cache_dir)
    assert complaints.gist(log) == gist


def test_another_level_where_the_compiler_itself_fails(tmp_path):
    find()
    compiler, seen = tmp_path / "broken", tmp_path / "seen"
    words = 'echo "x.cpp:1:2: internal compiler error: in convert_move"; exit 1'
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {seen}\ncase "$*" in *-O1*) exit 0;; esac\n{words}\n')
    compiler.chmod(0o755)
    toolchain.run_compiler([str(compiler), "-O2"])
    assert seen.read_text().splitlines() == ["-O2", "-O2 -O3", "-O2 -O1"]
    compiler.write_text(f"#!/bin/sh\n{words}\n")
    with pytest.raises(CompileError, match="internal compiler error"):
        toolchain.run_compiler([str(compiler), "-O2"])


def test_a_refusal_of_the_system_is_one_sentence_for_all_kernels(folder, tmp_path, monkeypatch):
    """Whatever temporary file a compiler names."""
    find()
    compiler = tmp_path / "full"
    compiler.write_text("#!/bin/sh\necho \"as: error writing to /tmp/cc$$.s: No space left on device\"; exit 1\n")
    compiler.chmod(0o755)
    said = set()
    for _ in range(3):
        with pytest.raises(CompileError) as raised:
            toolchain.run_compiler([str(compiler)])
        said.add(str(raised.value))
    (sentence,) = said
    assert "cannot work: no space is left in " in sentence and "set TMPDIR" in sentence
    monkeypatch.setattr(files.tempfile, "mkdtemp", no_room)
    for n in range(2):
        with pytest.raises(CompileError, match="no kernel can be written: no space is left in "):
            toolchain.compile_library((SOURCE + f"// {n}",))


def no_room(*args, **kwargs):
    raise OSError(28, "No space left on device")


_ENDS = """
import threading
from fuser.runtime import launcher, native_build, process

native_build.installed = lambda: None  # as where none was built with the package
start, waiting = process._start, threading.Event()


def spy(command):
    running = start(command)
    waiting.set()
    return running


process._start = spy
handle = launcher.make_handle(lambda args, status: 0)
handle._kernels.append((None, None))  # so that a launcher that cannot be had is worth a warning
assert waiting.wait(60)
"""


def test_a_process_that_ends_while_the_launcher_is_built_leaves_nothing(tmp_path, monkeypatch):
    compiler = tmp_path / "slow-compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 600\n")
    compiler.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FUSER_CACHE_DIR": str(tmp_path), "CXX": str(compiler)}
    done = subprocess.run([sys.executable, "-c", _ENDS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert not list((tmp_path / "native").iterdir())


# What a kernel may ask of libraries: nothing, the C library, the compiler's own, a vector function, a C++ library.
NEEDS = {
    "nothing": ("int answer() { return 42; }", 1),
    "memory": ("void answer(char* to, const char* from, long n) { __builtin_memcpy(to, from, n); }", 1),
    "mathematics": ("double lgamma(double); double answer(double x) { return lgamma(x); }", 1),
    "wide integers": ("__int128 answer(__int128 a, __int128 b) { return a / b; }", 2),
    "C++": ("int answer() { static int known = *new int; return known; }", 2),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_kernel_is_linked_with_what_it_needs(folder, monkeypatch, name):
    """Without start files and C++ library first; a second time only if symbols are missing."""
    text, most = NEEDS[name]
    _, libraries = toolchain.flags_for(find())
    commands = []
    run = toolchain.run_compiler
    monkeypatch.setattr(toolchain, "run_compiler", lambda command: (commands.append(command), run(command)))
    made = toolchain.compile_library((f'extern "C" {{ {text} }}\n',), None, ["answer"])
    assert len(commands) <= (most if compilers.whole(libraries) != libraries else 1)
    assert pathlib.Path(made).exists() and Library(made).address("answer")


def test_functions_of_the_mathematical_library_are_those_of_its_version(folder):
    """A symbol without a version may be bound to an older function of the name."""
    made = toolchain.compile_library(('extern "C" { float expf(float); float answer(float x) { return expf(x); } }\n',))
    data = pathlib.Path(made).read_bytes()
    assert not os.confstr("CS_GNU_LIBC_VERSION") or b"libm.so" in data and b"GLIBC_2." in data


def test_a_symbol_that_no_library_has_is_an_error(folder):
    with pytest.raises(CompileError, match="nowhere"):
        toolchain.compile_library(('extern "C" { int nowhere(); int answer() { return nowhere(); } }\n',))


def runs(monkeypatch, fails=lambda command: False):
    """The commands of the compiler, each of which fails if `fails` says so."""
    commands, run = [], process.run

    def watched(command, timeout):
        commands.append(command)
        return (1, "x.cpp: error: no such thing") if fails(command) else run(command, timeout)

    monkeypatch.setattr(process, "run", watched)
    return commands


usual = pytest.mark.skipif(
    not (can_fuse_on_cpu() and toolchain._is_usual(toolchain.find_compiler())), reason="needs g++ and glibc 2.35"
)


@usual
def test_the_first_kernel_waits_for_no_probe(folder, monkeypatch):
    commands = runs(monkeypatch)
    toolchain.warm_up()
    assert toolchain.compile_library((SOURCE,)) and len(commands) == 1
    assert set(toolchain.flags_for(find())[0]) <= set(commands[0])


@usual
def test_a_compiler_of_another_kind_is_found_out_when_a_kernel_fails(folder, monkeypatch):
    """One that says it is g++, and takes nothing of libmvec."""
    commands = runs(monkeypatch, lambda command: "-DFUSER_SIMD_MATH" in command)
    assert toolchain.compile_library((SOURCE,))
    assert "-DFUSER_SIMD_MATH" in commands[0] and "-DFUSER_SIMD_MATH" not in commands[-1]
    asked = len(commands)
    assert toolchain.compile_library((SOURCE.replace("42", "43"),)) and len(commands) == asked + 1
    toolchain._asked.clear()  # another process
    toolchain._has_memory.cache_clear()
    assert toolchain.compile_library((SOURCE.replace("42", "44"),)) and len(commands) == asked + 2


@usual
def test_a_kernel_that_no_compiler_takes_is_not_compiled_again(folder, monkeypatch):
    commands = runs(monkeypatch)
    wrong = 'extern "C" int answer() { return none; }\n'
    for n in range(2):
        with pytest.raises(CompileError, match="none"):
            toolchain.compile_library((wrong + "//" * n,))
    assert sum("probe" not in " ".join(command) for command in commands) == 2


@usual
def test_a_compiler_that_hangs_is_waited_for_once(folder, tmp_path, monkeypatch):
    hangs = tmp_path / "g++"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: (str(hangs),))
    commands = runs(monkeypatch)
    with config.override(compile_timeout_seconds=0.5), pytest.raises(CompileError, match="longer than 0.5 s"):
        toolchain.compile_library((SOURCE,))
    assert len(commands) == 1
