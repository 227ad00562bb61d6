"""C++ helpers that cells call, by name. A source includes the helpers that it names, and those that they name in turn.

No header is included. Helpers are `static inline`, have scalar parameters and results, and avoid branches where
possible, so that a compiler vectorises the loop that they are inlined into. Functions of libm are declared, not
included: those that glibc's libmvec has in vector form have the attribute that lets g++ call it (the toolchain defines
`FUSER_SIMD_MATH` if linking with -lmvec works). Text that depends on the machine is a function of its row.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable

from fuser.machines import Machine
from fuser.ops import (
    conversions_cpp,
    double_cpp,
    float_cpp,
    gathers_cpp,
    integer_cpp,
    inverse_cpp,
    lanes_cpp,
    math_cpp,
    random,
    scans_cpp,
)

_FUSED = """\
#define FUSER_FMAF(a, b, c) __builtin_fmaf(a, b, c)
#define FUSER_FMA(a, b, c) __builtin_fma(a, b, c)
"""
# A product of floats is exact in double. A product of doubles is a sum of two doubles (Dekker), and so is the sum of
# two doubles (Knuth). Helpers need that in the middle of double's range; other numbers are rounded twice.
_UNFUSED = """\
FUSER_FN float fuser_fused_f32(float a, float b, float c) { return (float)((double)a * (double)b + (double)c); }
FUSER_FN double fuser_fused_f64(double a, double b, double c) {
  const double p = a * b, wide_a = a * 134217729.0, wide_b = b * 134217729.0;
  const double ah = wide_a - (wide_a - a), al = a - ah, bh = wide_b - (wide_b - b), bl = b - bh;
  const double left = al * bl - (p - ah * bh - al * bh - ah * bl);
  const double s = p + c, t = s - p, more = (p - (s - t)) + (c - t) + left, r = s + more;
  return (r - r == 0.0) & (more != 0.0) ? r : s;
}
#define FUSER_FMAF(a, b, c) fuser_fused_f32(a, b, c)
#define FUSER_FMA(a, b, c) fuser_fused_f64(a, b, c)
"""
Text = str | Callable[[Machine], str]
_MACROS: dict[str, Text] = {
    "FUSER_FN": """\
#define FUSER_FN static inline __attribute__((always_inline, unused))
""",
    "FUSER_VEC": """\
#if defined(FUSER_SIMD_MATH)
#define FUSER_VEC __attribute__((simd("notinbranch"), const))
#else
#define FUSER_VEC __attribute__((const))
#endif
""",
    # NaN if either argument is. g++ 12 vectorises chains of this form, but not of `(a > b) | (a != a) ? a : b`. If the
    # first argument is a constant, such as a limit of clamp, the comparison alone keeps a NaN of the second. clang
    # searches for a constant through the initialisers of all names, in time exponential in a chain's length.
    "FUSER_EXTREME": """\
#if defined(__clang__)
#define FUSER_EXTREME(a, wins, b) (__builtin_isunordered(a, b) ? (a) + (b) : (a) wins (b) ? (a) : (b))
#else
#define FUSER_EXTREME(a, wins, b) (__builtin_constant_p(a) ? ((a) != (a) ? (a) : (a) wins (b) ? (a) : (b)) \\
  : (__builtin_isunordered(a, b) ? (a) + (b) : (a) wins (b) ? (a) : (b)))
#endif
""",
    # The same for a loop-invariant first value.
    "FUSER_BOUND": """\
#define FUSER_BOUND(a, wins, b) ((a) != (a) ? (a) : (a) wins (b) ? (a) : (b))
""",
    # With one rounding even where the machine has no instruction: helpers use the rounding error of a product.
    "FUSER_FMA": lambda machine: _FUSED if machine.fma else _UNFUSED,
    "FUSER_BITS": """\
#define FUSER_BITS(T, x) __builtin_bit_cast(T, x)
""",
}
_ALIASES = {"FUSER_FMAF": "FUSER_FMA"}

# Functions of libm that helpers call: by number of arguments, first those with a vector form in libmvec (for most,
# glibc 2.35 or later).
_UNARY = "acos acosh asin asinh atan atanh cos cosh erf erfc expm1 log log10 log1p log2 sin sinh tan tanh"
_LIBM = (
    ("FUSER_VEC ", 1, _UNARY),
    ("FUSER_VEC ", 2, "atan2 hypot pow"),
    ("", 1, "j0 j1 y0 y1"),
    ("", 2, "fmod"),
)
_DECLARATIONS = {
    name: f'extern "C" {attribute}double {name}({", ".join(["double"] * arity)});\n'
    for attribute, arity, names in _LIBM
    for name in names.split()
}

PRELUDE: dict[str, Text] = {
    **_MACROS,
    **_DECLARATIONS,
    **conversions_cpp.HELPERS,
    **lanes_cpp.HELPERS,
    **gathers_cpp.HELPERS,
    **integer_cpp.HELPERS,
    **math_cpp.HELPERS,
    **random.HELPERS,
    **scans_cpp.HELPERS,
    **float_cpp.HELPERS,
    **inverse_cpp.HELPERS,
    **double_cpp.HELPERS,
}


def load(module: str) -> None:
    """Add the helpers of a module of `fuser.ops` that few kernels need (see `OpRow.text`)."""
    if module not in _loaded:
        PRELUDE.update(importlib.import_module(f"fuser.ops.{module}").HELPERS)
        _loaded.add(module)


_loaded: set[str] = set()
_WORD = re.compile(r"[A-Za-z_]\w*")
_CELL_WORD = re.compile(r"\b(?:fuser|FUSER)_\w+")


def _alias(word: str) -> str:
    return _ALIASES.get(word, word)


def helpers_in(source: str) -> tuple[str, ...]:
    """Names of the helpers that a kernel's `source` calls, in order of first use."""
    return known_helpers(_CELL_WORD.findall(source))


def cell_helpers(cell: str) -> list[str]:
    """Names of the helpers that the text of a cell calls."""
    return _CELL_WORD.findall(cell)


def known_helpers(words: Iterable[str]) -> tuple[str, ...]:
    """The names among `words` that are helpers of this prelude, each once."""
    return tuple(dict.fromkeys(w for w in map(_alias, words) if w in PRELUDE))


def _text(name: str, machine: Machine) -> str:
    text = PRELUDE[name]
    return text if isinstance(text, str) else text(machine)


@functools.lru_cache(maxsize=1024)
def _words(text: str) -> tuple[str, ...]:
    """The words of a helper's text, each once: kernels use the same few helpers."""
    return tuple(dict.fromkeys(map(_alias, _WORD.findall(text))))


def _needs(name: str, machine: Machine) -> list[str]:
    return [w for w in _words(_text(name, machine)) if w != name and w in PRELUDE]


def prelude_for(names: Iterable[str], machine: Machine) -> str:
    """The text for `machine` of the helpers `names` and all helpers that they need, each once, dependences first."""
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in done:
            for need in _needs(name, machine):
                visit(need)
            done[name] = None

    for name in sorted(set(names)):
        visit(name)
    return "".join(_text(name, machine) for name in done)
