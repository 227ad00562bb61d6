"""Parses what `fuser.ir.printer` prints: buffers, loops, rows and index expressions, equal to those that were printed.

    buffer    NAME ":" DTYPE EXPRS "strides" EXPRS ["order" "[" INT, … "]"] ["#" origin]
    loops     "for" heads [", reducing" heads "by" KIND] [", scanning the last by" KIND] [", in order," COMBINE]
              rows, then "store" %N "at" EXPRS
    heads     iN "<" expr, … | "one point" | "nothing"
    row       %N [":" DTYPE] "=" value
    value     NAME EXPRS ["where" %N]                                a load
              "index" %N "below" expr ["where" %N] [", unchecked"]    an index that a row computes
              "index" expr | "scalar" NAME | a Python number
              OP "(" %N, … [", " DTYPE] ")"
    expr      sums, differences and products of integers, symbols, (a // b), (a % b), min(a, b), max(a, b)
    symbol    iN: a loop variable; %N: the index of row N; xN_D: a size; xN_sD, xN: a stride or a whole number

A buffer starts in the first column, its loops two columns on, their rows four.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from fuser.errors import VerifyError
from fuser.ir.loop_body import LoopBody, Row
from fuser.ir.nodes import Buffer, Loops, Pointwise, Reduction, Scan, Scatter
from fuser.ir.sizes import LOOP, SIZE, STRIDE, Call, Expr, expr, indirect, symbol

_TOKEN = re.compile(r"\s*(//|%\d+|[-+*%(),\[\]]|\w+)")
_CALLS = {"//": "floordiv", "%": "mod"}
_ROW = re.compile(r"%(\d+)(?:: (\w+))? = (.*)")
_LOAD = re.compile(r"(\w+)(\[.*\])(?: where %(\d+))?")
_INDIRECT = re.compile(r"index %(\d+) below (.+?)(?: where %(\d+))?(, unchecked)?")
_OP = re.compile(r"(\w+)\((.*)\)")
_BUFFER = re.compile(r"(\w+): (\w+)(\[.*\]) strides (\[.*?\])(?: order \[(.*?)\])?(?:   # (.*))?")
_STORE = re.compile(r"store %(\d+) at (\[.*\])")
_HEAD = re.compile(
    r"for (?P<kept>.*?)(?:, reducing (?P<reduced>.*) by (?P<kind>\w+)|, scanning the last by (?P<scan>\w+)"
    r"|, in order, (?P<combine>\w+))?"
)


def parse_buffers(text: str) -> list[Buffer]:
    """The buffers that `print_buffers` printed as `text`. VerifyError names a line that does not parse."""
    buffers: list[Buffer] = []
    lines = [line for line in text.splitlines() if line.strip()]
    at = 0
    while at < len(lines):
        buffers.append(_buffer(lines[at]))
        at += 1
        while at < len(lines) and lines[at].startswith("  "):
            loops, at = _loops(lines, at)
            buffers[-1].loops.append(loops)
    return buffers


def parse_loops(text: str) -> Loops:
    """One loop nest, from lines as `loops_lines` writes them. VerifyError names a line that does not parse."""
    lines = [line for line in text.splitlines() if line.strip()]
    return _loops(lines, 0)[0]


def parse_expr(text: str) -> Expr:
    """An index or size expression from its printed form. VerifyError for other text."""
    return _Exprs(text).whole()


def _wrong(line: str, expected: str) -> VerifyError:
    return VerifyError(f"printed IR: {line.strip()!r} is no {expected}; fuser.ir.parser has the grammar")


def _match(pattern: re.Pattern[str], line: str, expected: str) -> re.Match[str]:
    found = pattern.fullmatch(line.strip())
    if found is None:
        raise _wrong(line, expected)
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise _wrong(name, "dtype of torch")
    return found


def _buffer(line: str) -> Buffer:
    name, dtype, size, stride, order, origin = _match(_BUFFER, line, "buffer").groups()
    dims = tuple(int(d) for d in order.split(",") if d.strip()) if order is not None else None
    return Buffer(name, _dtype(dtype), parse_exprs(size), parse_exprs(stride), origin=origin or "", order=dims)


def _loops(lines: Sequence[str], at: int) -> tuple[Loops, int]:
    """The nest whose first line is number `at`, and the number of the line after it."""
    head = _match(_HEAD, lines[at], "head of a loop")
    rows: list[Row] = []
    at += 1
    while at < len(lines) and lines[at].lstrip().startswith("%"):
        rows.append(_row(lines[at], rows))
        at += 1
    if at == len(lines):
        raise _wrong(lines[-1], "end of a loop, which is a store")
    result, where = _match(_STORE, lines[at], "store").groups()
    kept, reduced = _heads(head["kept"]), _heads(head["reduced"] or "nothing")
    body, store = LoopBody(tuple(rows), int(result)), parse_exprs(where)
    if head["kind"]:
        return Reduction(kept + reduced, body, store, len(reduced), head["kind"]), at + 1
    if head["scan"]:
        return Scan(kept, body, store, head["scan"]), at + 1
    if head["combine"]:
        return Scatter(kept, body, store, "" if head["combine"] == "replacing" else head["combine"]), at + 1
    return Pointwise(kept, body, store), at + 1


def _heads(text: str) -> tuple[Expr, ...]:
    """The extents in `i0 < n, i1 < m`."""
    if text in ("one point", "nothing"):
        return ()
    return tuple(parse_expr(part) for part in re.split(r"(?:, |^)i\d+ < ", text)[1:])


def _row(line: str, rows: Sequence[Row]) -> Row:
    number, dtype_name, value = _match(_ROW, line, "row").groups()
    if int(number) != len(rows):
        raise _wrong(line, f"row number {len(rows)}")
    dtype = _dtype(dtype_name) if dtype_name else torch.float32
    if (found := _INDIRECT.fullmatch(value)) is not None:
        args = tuple(int(n) for n in (found[1], found[3]) if n is not None)
        return Row("indirect", args, dtype, (parse_expr(found[2]), found[4] is None))
    kind, _, rest = value.partition(" ")
    if kind == "index":
        return Row("index", (), dtype, parse_expr(rest))
    if kind == "scalar":
        return Row("scalar", (), dtype, rest)
    if (found := _OP.fullmatch(value)) is not None:
        return _call(found[1], found[2], dtype, rows)
    if (found := _LOAD.fullmatch(value)) is not None:
        return Row("load", (int(found[3]),) if found[3] else (), dtype, (found[1], parse_exprs(found[2])))
    return Row("const", (), dtype, value)


def _call(op: str, inside: str, dtype: torch.dtype, rows: Sequence[Row]) -> Row:
    words = inside.split(", ") if inside else []
    args = tuple(int(w[1:]) for w in words if w.startswith("%"))
    attr: Any = None
    if op == "round_to":
        attr = _dtype(words[-1])
    elif op == "to_dtype":
        attr = rows[args[0]].dtype  # the dtype converted from
    return Row(op, args, dtype, attr)


def parse_exprs(text: str) -> tuple[Expr, ...]:
    """The expressions in `[a, b]`."""
    reader = _Exprs(text)
    reader.take("[")
    out: list[Expr] = []
    while reader.next != "]":
        out.append(reader.sum())
        if reader.next == ",":
            reader.take(",")
    reader.take("]")
    reader.end()
    return tuple(out)


class _Exprs:
    """Reads expressions from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, at = text, [], 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise _wrong(text, "expression")
            self.tokens.append(found[1])
            at = found.end()
        self.at = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.next
        if not token or (wanted and token != wanted):
            raise _wrong(self.text, f"expression: {wanted or 'more'} was expected before {token or 'its end'!r}")
        self.at += 1
        return token

    def end(self) -> None:
        if self.next:
            raise _wrong(self.text, f"expression: it goes on with {self.next!r}")

    def whole(self) -> Expr:
        out = self.sum()
        self.end()
        return out

    def sum(self) -> Expr:
        out = self.product()
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            out = out + self.product() * sign
        return out

    def product(self) -> Expr:
        out = self.factor()
        while self.next == "*":
            self.take()
            out = out * self.factor()
        return out

    def factor(self) -> Expr:
        token = self.take()
        if token == "-":
            return -self.factor()
        if token == "(":
            left = self.sum()
            name = _CALLS.get(self.take())
            if name is None:
                raise _wrong(self.text, "expression: // or % was expected")
            return self.called(name, left)
        if token in ("min", "max") and self.next == "(":
            self.take("(")
            left = self.sum()
            self.take(",")
            return self.called(token, left)
        return expr(int(token)) if token.isdecimal() else _symbol(token)

    def called(self, name: str, left: Expr) -> Expr:
        right = self.sum()
        self.take(")")
        return Expr({(Call(name, (left, right)),): 1})


def _symbol(name: str) -> Expr:
    if re.fullmatch(r"%\d+", name):
        return expr(indirect(int(name[1:])))
    if re.fullmatch(r"i\d+", name):
        return symbol(name, LOOP)
    return symbol(name, SIZE if re.fullmatch(r"x\d+_\d+", name) else STRIDE)


__all__ = ["parse_buffers", "parse_expr", "parse_exprs", "parse_loops"]
