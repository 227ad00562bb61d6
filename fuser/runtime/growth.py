"""Whether a kernel's results may have more elements than its inputs, as far as its launch program shows."""

from __future__ import annotations

from collections import Counter

from fuser.ir.sizes import MUL, PUSH, SLOT, Program
from fuser.kernel_spec import Bind, InputPattern, LaunchProgram


def may_outgrow(program: LaunchProgram) -> bool:
    """Whether a result may have more elements than each input: it has a factor that no single input has."""
    inputs = [_elements(_dims_of(p)) for p in program.inputs if p.kind == "tensor"]
    results = [_elements(b.sizes) for b in program.buffers if b.output]
    return not all(any(_is_within(r, i) for i in inputs) for r in results)


def _dims_of(pattern: InputPattern) -> list[Program]:
    return [(SLOT, s.slot) if isinstance(s, Bind) else s.code for s in pattern.sizes]


def _elements(sizes: list[Program] | tuple[Program, ...]) -> tuple[int, Counter[Program]]:
    """An element count as a number and other factors."""
    number, others = 1, Counter[Program]()
    for size in sizes:
        for factor in _factors(size):
            if factor[0] == PUSH and len(factor) == 2:
                number *= factor[1]
            else:
                others[factor] += 1
    return number, others


def _factors(code: Program) -> list[Program]:
    """The factors of a product of numbers and slots; any other program is one factor."""
    found, at = [], 0
    while at < len(code):
        if code[at] in (PUSH, SLOT):
            found.append(code[at : at + 2])
            at += 2
        elif code[at] == MUL:
            at += 1
        else:
            return [code]
    return found


def _is_within(result: tuple[int, Counter[Program]], given: tuple[int, Counter[Program]]) -> bool:
    return result[0] <= given[0] and result[1] <= given[1]


__all__ = ["may_outgrow"]
