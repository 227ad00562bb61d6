"""Which C++ compilers there are. Looked up once for each `$CXX` and `$PATH`."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import shlex
import shutil

from fuser.errors import CompileError

Command = tuple[str, ...]
NAMES = ("g++", "clang++")
BARE = "-nostdlib++"  # kernels need nothing of C++'s library, which takes the wheel's compiler a minute to make
WHEEL = "ziglang"  # a compiler in a wheel: what `pip install fuser[compiler]` brings


def find() -> tuple[Command, ...]:
    """The commands to try, the best first: `$CXX` alone if it is set. CompileError if there are none."""
    commands, why = _find(os.environ.get("CXX"), os.environ.get("PATH"))
    if not commands:
        raise CompileError(why)
    return commands


def why_none() -> str | None:
    """None if there is a compiler, else the sentence that `find` raises."""
    commands, why = _find(os.environ.get("CXX"), os.environ.get("PATH"))
    return None if commands else why


@functools.lru_cache(maxsize=8)
def _find(cxx: str | None, path: str | None) -> tuple[tuple[Command, ...], str]:
    cure = "install one, or pip install fuser[compiler], or set CXX"
    if cxx and cxx.strip():
        try:
            words = shlex.split(cxx)
        except ValueError as e:  # a quotation without end
            return (), f"there is no C++ compiler: $CXX is {cxx!r}, which is no command ({e}); {cure}"
        found = shutil.which(words[0], path=path) if words else None
        if found is not None:
            return ((found, *words[1:]),), ""
        return (), f"there is no C++ compiler: $CXX is {cxx!r}, which does not exist; {cure}"
    commands: list[Command] = [(found,) for name in NAMES if (found := shutil.which(name, path=path))]
    if not commands and (wheel := importlib.util.find_spec(WHEEL)) is not None:
        program = pathlib.Path(*(wheel.submodule_search_locations or ())[:1]) / "zig"
        commands += [(str(program), "c++", BARE)] if os.access(program, os.X_OK) else []
    return tuple(commands), f"there is no C++ compiler: there is neither {' nor '.join(NAMES)} on the PATH; {cure}"
