"""Launch programs as Python functions, for the Python launcher; native/match.h reads them from words.

Interpreting a launch program in Python costs five times a small group's call on ATen. So each program is written as
straight-line Python, once for each kernel: sizes are local variables, stack programs are expressions. The text
contains only digits, names made here, and operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuser.ir.sizes import ADD, EQ, FLOORDIV, LE, LT, MAX, MIN, MOD, MUL, NE, PUSH, SLOT, Program, run_program
from fuser.kernel_spec import ALIGNMENT, Bind, Check, InputPattern, LaunchProgram

Bound = tuple[tuple[int, ...], tuple[float, ...]]  # slots and floats
# The sizes and strides of outputs, the sizes of temporaries, and each step's units, work and scratch.
Numbers = tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], tuple[int, ...], tuple[tuple[int, int, int], ...]]
_MOST_WORDS = 200  # of a stack program written as an expression: Python's parser limits the nesting

_SUM, _PRODUCT, _ATOM = range(3)  # the precedence of an expression's outermost operator
_INFIX = {ADD: ("+", _SUM), MUL: ("*", _PRODUCT)}
_RELATIONS = {EQ: "==", NE: "!=", LT: "<", LE: "<="}
_FUNCTIONS = {MIN: "min", MAX: "max", FLOORDIV: "quotient", MOD: "rest"}
_DIVISIONS = {FLOORDIV: "//", MOD: "%"}


def _quotient(a: int, b: int) -> int:
    return a // b if b else 0


def _rest(a: int, b: int) -> int:
    return a % b if b else 0


def _text(code: Program, n_slots: int) -> str:
    """A stack program as an expression of the local variables s0, s1, …"""
    if len(code) > _MOST_WORDS:
        slots = "".join(f"s{i}, " for i in range(n_slots))
        return f"run_program({tuple(map(int, code))!r}, ({slots}))"
    stack: list[tuple[str, int]] = []
    i = 0
    while i < len(code):
        if code[i] in (PUSH, SLOT):
            n = int(code[i + 1])
            stack.append((f"s{n}", _ATOM) if code[i] == SLOT else (str(n) if n >= 0 else f"({n})", _ATOM))
            i += 2
            continue
        right, left = stack.pop(), stack.pop()
        stack.append(_combined(code[i], left, right))
        i += 1
    return stack[-1][0]


def _combined(op: int, left: tuple[str, int], right: tuple[str, int]) -> tuple[str, int]:
    (a, _), (b, _) = left, right
    if op in _INFIX:  # integers are exact: no parentheses are needed between equal operators
        sign, binds = _INFIX[op]
        return f" {sign} ".join(t if inner >= binds else f"({t})" for t, inner in (left, right)), binds
    if op in _RELATIONS:
        return f"({a} {_RELATIONS[op]} {b})", _ATOM
    if op in _DIVISIONS and b.isdigit() and int(b):
        return f"(({a}) {_DIVISIONS[op]} {b})", _ATOM
    return f"{_FUNCTIONS[op]}({a}, {b})", _ATOM


def _tuple_of(texts: Sequence[str]) -> str:
    return f"({''.join(t + ', ' for t in texts)})"


def _unpack(names: Sequence[str], value: str) -> list[str]:
    return [f"{_tuple_of(names)} = {value}"] if names else []


# -- matching ----------------------------------------------------------------------------------------------------------
class _Matcher:
    """Writes `match(args)`."""

    def __init__(self, program: LaunchProgram) -> None:
        self.program = program
        self.values: dict[str, Any] = {}
        self.bound: set[int] = set()

    def lines(self) -> Iterator[str]:
        p = self.program
        yield f"if len(args) != {len(p.inputs)}: return None"
        yield from _unpack([f"a{i}" for i in range(len(p.inputs))], "args")
        body = [line for i, pattern in enumerate(p.inputs) for line in self.input(i, pattern)]
        yield from (f"s{k} = 0" for k in range(p.n_slots) if k not in self.bound)
        yield from (f"f{k} = 0.0" for k in range(p.n_floats))
        yield from body
        for guard in p.guards:
            yield f"if not {_text(guard, p.n_slots)}: return None"
        slots, floats = ([f"{letter}{k}" for k in range(n)] for letter, n in (("s", p.n_slots), ("f", p.n_floats)))
        yield f"return {_tuple_of(slots)}, {_tuple_of(floats)}"

    def input(self, i: int, pattern: InputPattern) -> Iterator[str]:
        if pattern.kind == "tensor":
            yield from self.tensor(i, pattern)
        elif pattern.kind == "float":
            yield f"if not (isinstance(a{i}, float) or type(a{i}) is int): return None"
            yield f"f{pattern.slot} = float(a{i})"
        else:
            self.bound.add(pattern.slot)
            yield f"if type(a{i}) is not {'int' if pattern.kind == 'int' else 'bool'}: return None"
            yield f"s{pattern.slot} = int(a{i})"

    def tensor(self, i: int, pattern: InputPattern) -> Iterator[str]:
        a, n = f"a{i}", len(pattern.sizes)
        self.values[f"dtype{i}"] = pattern.dtype
        yield f"if not isinstance({a}, Tensor) or {a}.dtype is not dtype{i}: return None"
        yield f"if {a}.device.type != {pattern.device_type!r}: return None"
        if pattern.aligned:
            yield f"if {a}.data_ptr() % {ALIGNMENT}: return None"
        yield f"z = {a}.shape"
        yield f"if len(z) != {n}: return None"
        yield from (line for k, item in enumerate(pattern.sizes) for line in self.number(f"z[{k}]", item, ""))
        if n:
            yield f"t = {a}.stride()"
            for k, item in enumerate(pattern.strides):
                needed = "" if pattern.every_stride else f"z[{k}] > 1 and "
                yield from self.number(f"t[{k}]", item, f"{needed}{a}.numel() and ")

    def number(self, found: str, item: Bind | Check, needed: str) -> Iterator[str]:
        if isinstance(item, Bind):
            self.bound.add(item.slot)
            yield f"s{item.slot} = {found}"
        else:
            yield f"if {needed}{found} != {_text(item.code, self.program.n_slots)}: return None"


@functools.lru_cache(1024)
def matcher(program: LaunchProgram) -> Callable[[Sequence[Any]], Bound | None]:
    """A function of a call's arguments: the slots and floats that they bind if they match `program`, else None."""
    writer = _Matcher(program)
    lines = list(writer.lines())
    values = {"Tensor": torch.Tensor, **writer.values}
    made: Callable[[Sequence[Any]], Bound | None] = _function("match(args)", lines, values)
    return made


# -- buffers and steps -------------------------------------------------------------------------------------------------
@functools.lru_cache(1024)
def counter(program: LaunchProgram) -> Callable[[tuple[int, ...]], Numbers]:
    """A function of a call's slots: the sizes of its buffers, and the units, work and scratch of its steps."""
    n = program.n_slots

    def several(codes: Sequence[Program]) -> str:
        return _tuple_of([_text(code, n) for code in codes])

    outputs = [f"({several(b.sizes)}, {several(b.strides)})" for b in program.buffers if b.output]
    others = [
        " * ".join([str(b.dtype.itemsize), *(f"({_text(code, n)})" for code in b.sizes)])
        for b in program.buffers if not b.output
    ]  # fmt: skip
    steps = [several((s.units, s.work, s.scratch)) for s in program.steps]
    lines = _unpack([f"s{k}" for k in range(n)], "slots")
    lines.append(f"return {', '.join(map(_tuple_of, (outputs, others, steps)))}")
    made: Callable[[tuple[int, ...]], Numbers] = _function("count(slots)", lines, {})
    return made


def _function(head: str, lines: Sequence[str], values: dict[str, Any]) -> Any:
    scope = {"run_program": run_program, "quotient": _quotient, "rest": _rest, **values}
    text = "\n    ".join([f"def {head}:", *lines])
    exec(compile(text, "<fuser launch program>", "exec"), scope)
    return scope[head.partition("(")[0]]


__all__ = ["Bound", "Numbers", "counter", "matcher"]
