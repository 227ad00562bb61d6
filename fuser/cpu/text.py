"""Small pieces of C++ text: expressions over sizes, names, indented lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fuser.ir.ranges import NO_LOOPS, Extents, is_nonnegative
from fuser.ir.sizes import Call, Expr, Sym

FLOOR_HELPERS = """\
static inline i64 floor_div(i64 a, i64 b) {
  i64 q = b ? a / b : 0;
  return q - (b && (a % b != 0) && ((a < 0) != (b < 0)));
}
static inline i64 floor_mod(i64 a, i64 b) { return b ? a - floor_div(a, b) * b : 0; }
"""
HIDDEN_HELPER = """\
static inline __attribute__((always_inline)) i64 hidden(i64 n) { __asm__("" : "+r"(n)); return n; }
"""
# Offsets are below 2**52, so a quotient of doubles truncates to the right integer or to the one above it. Division of
# doubles and truncation vectorise; integer division and floor do not.
PLACE_HELPERS = """\
static inline i64 place_div(i64 a, i64 b) {
  const i64 d = b ? b : 1, q = (i64)((double)a / (double)d);
  return q - (i64)(a < q * d);
}
static inline i64 place_mod(i64 a, i64 b) { return a - place_div(a, b) * b; }
"""


def cpp_name(s: Sym) -> str:
    """The C++ variable of a symbol; for a computed index, that of the row that computes it."""
    return s.name if s.row is None else f"t{s.row}"


def cpp_expr(
    e: Expr, name: Callable[[Sym], str] = cpp_name, of: str = "floor", extents: Extents = NO_LOOPS,
    uses: set[str] | None = None,
) -> str:  # fmt: skip
    """The C++ of an integer expression inside the loops `extents`; `of` is "place" for an offset, below 2**52.

    The helpers that it calls are added to `uses`.
    """
    if not e.terms:
        return "0"
    parts: list[str] = []
    for monomial, c in e.terms:
        factors = [name(a) if isinstance(a, Sym) else _call(a, name, of, extents, uses) for a in monomial]
        if c != 1 or not factors:
            factors.insert(0, str(c) if c >= 0 else f"({c})")
        parts.append(" * ".join(factors))
    return " + ".join(parts)


def _call(c: Call, name: Callable[[Sym], str], of: str, extents: Extents, uses: set[str] | None) -> str:
    a, b = (cpp_expr(x, name, of, extents, uses) for x in c.args)
    if c.fn in ("min", "max"):
        sign = "<" if c.fn == "min" else ">"
        return f"(({a}) {sign} ({b}) ? ({a}) : ({b}))"
    divisor = c.args[1].as_int()
    plain = divisor is not None and divisor > 0 and is_nonnegative(c.args[0], extents)  # C's `/` and `%` truncate
    of = of if is_nonnegative(c.args[1], extents) else "floor"
    sign, helper = ("/", f"{of}_div") if c.fn == "floordiv" else ("%", f"{of}_mod")
    if plain:
        return f"(({a}) {sign} {b})"
    if uses is not None:
        uses.add(helper)
    return f"{helper}({a}, {b})"


def filled(template: str, words: Mapping[str, object]) -> str:
    """`template` with each key of `words`, in order, replaced by its value."""
    for word, to in words.items():
        template = template.replace(word, str(to))
    return template


class Lines:
    """Indented lines of a source."""

    def __init__(self, depth: int = 0) -> None:
        self.lines: list[str] = []
        self.depth = depth

    def add(self, text: str) -> None:
        """Append one line at the current depth."""
        self.lines.append("  " * self.depth + text if text else "")

    def open(self, text: str) -> None:
        """Append a line that opens a block."""
        self.add(text + " {")
        self.depth += 1

    def close(self, text: str = "}") -> None:
        """Append a line that closes a block."""
        self.depth -= 1
        self.add(text)

    def text(self) -> str:
        """All lines as one text."""
        return "\n".join(self.lines) + "\n"
