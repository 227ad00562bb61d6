"""The C++ compilers of this machine, looked up once for each `$CXX` and `$PATH`, and the flags of each kind."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import shlex
import shutil
from dataclasses import field

from fuser.errors import CompileError
from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine
from fuser.reasons import because

Command = tuple[str, ...]
NAMES = ("g++", "clang++")
BARE = "-nostdlib++"  # kernels need no C++ library, which the wheel's compiler takes a minute to build
WHEEL = "ziglang"  # a compiler in a wheel: what `pip install fuser[compiler]` brings


# -O3 takes 1.7 times as long to compile, because it unrolls vectorised loops, and its kernels are not faster.
FLAGS = (
    "-O2", "-ftree-vectorize", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno",
    "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd", "-fno-exceptions", "-fno-rtti", "-fvisibility=default",
    "-w",
)  # fmt: skip
# A loop with a loop-invariant condition becomes two loops; otherwise neither vectorises. Loops of normalised joins and
# pads exceed g++'s limit of 50 instructions for that. Jump threading turns consecutive selects (`relu6`) into
# branches: loops that do not vectorise and mispredicted tails. It takes a quarter of the compile time.
_GCC_FLAGS = (
    "-fvect-cost-model=dynamic", "-funswitch-loops", "--param=max-unswitch-insns=200", "-fno-thread-jumps", "-pipe",
)  # fmt: skip
_WHOLE = "-Wl,--no-undefined"


@dataclass(frozen=True)
class Kind:
    """A kind of compiler: one row of the table.

    test: the preprocessor condition that holds in one.
    flags, libraries: in addition to `FLAGS` and the machine's.
    lean: libraries for a link without the compiler's start files and C++ library, which kernels do not need; tried
    first. Symbols of the C library stay unresolved until a library is loaded. A kernel that needs more is linked
    again.
    tune: the flag to schedule instructions for this machine without using any that others lack.
    spelled: its spelling of machine flags. bare: its flag for a machine without flags of its own, by architecture.
    """

    name: str
    test: str
    flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ("-lm",)
    lean: tuple[str, ...] = ()
    tune: str = "-mtune=native"
    spelled: dict[str, str] = field(default_factory=dict)
    bare: dict[str, str] = field(default_factory=dict)

    def flags_for(self, machine: Machine) -> tuple[str, ...]:
        """All flags for kernels of `machine`."""
        own = os.uname().machine
        bare = self.bare.get(own)
        flags = machine.flags or (() if bare is None else (bare,))
        tune = (self.tune,) if self.tune and machine.architecture == own else ()
        return (*FLAGS, *(self.spelled.get(f, f) for f in flags), *tune, *self.flags)


# In the order in which they are tried. g++'s extra flags need glibc's vector functions.
KINDS: tuple[Kind, ...] = (
    Kind(
        "g++ with libmvec", "!defined(__clang__)", (*_GCC_FLAGS, "-DFUSER_SIMD_MATH"), (_WHOLE, "-lmvec", "-lm"),
        lean=("-nostdlib", "-lmvec", "-lm"),
    ),
    Kind("g++", "!defined(__clang__)", _GCC_FLAGS, (_WHOLE, "-lm"), lean=("-nostdlib", "-lm")),
    Kind(
        "zig", "defined(__clang__)", tune="",  # it takes -mtune=native as permission to use this machine's instructions
        spelled={"-march=x86-64": "-march=x86_64", "-march=armv8-a": "-mcpu=generic"},
        bare={"x86_64": "-march=x86_64", "aarch64": "-mcpu=generic"},
    ),
    Kind("clang++", "defined(__clang__)"),
    Kind("another", "1", tune=""),
)  # fmt: skip


def whole(libraries: tuple[str, ...]) -> tuple[str, ...]:
    """The full libraries of the kind whose lean ones are `libraries`; others are returned unchanged."""
    return next((kind.libraries for kind in KINDS if kind.lean and kind.lean == libraries), libraries)


def find() -> tuple[Command, ...]:
    """The commands to try, the best first: only `$CXX` if it is set. CompileError if there are none."""
    commands, why = _find(os.environ.get("CXX"), os.environ.get("PATH"))
    if not commands:
        raise CompileError(why)
    return commands


def why_none() -> str | None:
    """None if there is a compiler, else the sentence of the error that `find` raises."""
    commands, why = _find(os.environ.get("CXX"), os.environ.get("PATH"))
    return None if commands else why


@functools.lru_cache(maxsize=8)
def _find(cxx: str | None, path: str | None) -> tuple[tuple[Command, ...], str]:
    cure = "install one, or pip install fuser[compiler], or set CXX"
    if cxx and cxx.strip():
        try:
            words = shlex.split(cxx)
        except ValueError as e:  # an unterminated quotation
            return (), because(
                "compiler", f"there is no C++ compiler: $CXX is {cxx!r}, which is no command ({e}); {cure}"
            )
        found = shutil.which(words[0], path=path) if words else None
        if found is not None:
            return ((found, *words[1:]),), ""
        return (), because("compiler", f"there is no C++ compiler: $CXX is {cxx!r}, which does not exist; {cure}")
    commands: list[Command] = [(found,) for name in NAMES if (found := shutil.which(name, path=path))]
    if not commands and (wheel := importlib.util.find_spec(WHEEL)) is not None:
        program = pathlib.Path(*(wheel.submodule_search_locations or ())[:1]) / "zig"
        commands += [(str(program), "c++", BARE)] if os.access(program, os.X_OK) else []
    return tuple(commands), because(
        "compiler", f"there is no C++ compiler: there is neither {' nor '.join(NAMES)} on the PATH; {cure}"
    )
