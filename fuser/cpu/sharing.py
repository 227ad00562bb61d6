"""Functions of one source that are equal up to their arguments share one body.

A chain of equal layers generates the same function repeatedly, with other pointers, sizes and factors. The compiler
sees the body once; each function calls it with its own arguments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from fuser.cpu.records import Function
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.printer import SIGNATURE, Printer, Text
from fuser.cpu.vir.rewrite import walk
from fuser.lazy_dataclasses import dataclass
from fuser.ops import OPS, atom, cpp_constant

LEAST = 1000  # characters of a function, from which sharing pays for the call
_LINEAR = ("+", "-", "*")


@dataclass(frozen=True)
class _Form:
    """A function's text with placeholders, and their values: names, arguments in order of first use, constants."""

    text: str
    names: dict[str, str]
    slots: dict[ir.Slot, str]
    constants: dict[int, str]

    def taken(self, kind: str) -> list[str]:
        """The arguments of one kind, as C++."""
        return [f"{slot.kind}[{slot.at}]" for slot in self.slots if slot.kind == kind]


def _form_of(function: Function) -> _Form:
    """The form of a function."""
    names: dict[str, str] = {}
    for s in function.code.body:
        source = s.source if isinstance(s, ir.Pointer) else s.value if isinstance(s, ir.Let) else None
        if isinstance(s, ir.Pointer | ir.Let) and isinstance(source, ir.Slot) and source.kind in ("ptrs", "s"):
            names[s.name] = f"arg{len(names)}"
    slots: dict[ir.Slot, str] = {}
    taken = {"ptrs": 0, "s": 0, "f": 0}
    constants: dict[int, str] = {}
    for node in walk(function.code):
        if type(node) is ir.Slot and node not in slots:
            slots[node] = f"{node.kind}[{taken[node.kind]}]"
            taken[node.kind] += 1
        elif type(node) is ir.Let and (constant := _constant(node)) is not None:
            constants[id(node)] = constant
    printer = Printer(names, slots, dict.fromkeys(constants, "?"))
    return _Form(printer.function("", function.code).text, names, slots, constants)


def _constant(s: ir.Let) -> str | None:
    """The constant factor or summand in `s`, whose operation is the same for a known number and a variable; else None.

    A number broadcast to all lanes counts, too: functions that use it differently also differ in the code of their
    tail.
    """
    v = s.value
    number: ir.Value | None
    if type(v) is ir.Splat and v.of is torch.float32:
        number = v.a
    elif type(v) is ir.Op and v.table == "op" and v.dtype is torch.float32 and OPS[v.name].sign in _LINEAR:
        number = v.args[1] if len(v.args) == 2 and type(v.args[0]) is ir.Name else None
    else:
        return None
    if type(number) is not ir.Number or not math.isfinite(number.number):
        return None
    return atom(cpp_constant(number.number, torch.float32))


def _outline(function: Function) -> tuple[object, ...]:
    """A cheap key: functions with equal forms have equal keys."""
    return (function.printed.text.count("\n"), *map(type, function.code.body))


def shared(functions: Sequence[Function]) -> list[list[Text]]:
    """The texts of `functions`, in lists; functions of one list share a body, so they belong in one source."""
    # Checked functions have static data of their own.
    long = [f for f in functions if not f.code.checked and len(f.printed.text) >= LEAST]
    alike = Counter(map(_outline, long))
    forms = {id(f): _form_of(f) for f in long if alike[_outline(f)] > 1}
    groups: dict[str, list[Function]] = {}
    for f in functions:
        groups.setdefault(forms[id(f)].text if id(f) in forms else f"\0{f.name}", []).append(f)
    return [_texts([(f, forms[id(f)]) for f in g]) if len(g) > 1 else [g[0].printed] for g in groups.values()]


def _texts(group: Sequence[tuple[Function, _Form]]) -> list[Text]:
    """The shared body, and a caller of it for each function."""
    first, form = group[0]
    columns = list(zip(*(other.constants.values() for _, other in group), strict=True))
    varying = [n for n, column in enumerate(columns) if len(set(column)) > 1]
    n_scalars = len(form.taken("f"))
    own = {n: f"own{k}" for k, n in enumerate(varying)}
    constants = {at: own.get(n, columns[n][0]) for n, at in enumerate(form.constants)}
    takes = tuple(
        ir.Let("float", name, ir.Cast("float", ir.Slot("f", n_scalars + k))) for k, name in enumerate(own.values())
    )
    body = ir.Kernel(f"{first.name}_body", (*takes, *first.code.body))
    printer = Printer(form.names, form.slots, constants)
    made = printer.function(f"static __attribute__((noinline)) void {body.name}", body)
    return [made, *(_caller(f, body.name, its, varying) for f, its in group)]


def _caller(function: Function, body: str, form: _Form, varying: Iterable[int]) -> Text:
    """The function that calls the shared body with its own arguments."""
    values = list(form.constants.values())
    scalars = [*form.taken("f"), *(f"(double){values[n]}" for n in varying)]
    pointers, slots, floats = (", ".join(t) or "0" for t in (form.taken("ptrs"), form.taken("s"), scalars))
    text = (
        f'extern "C" void {function.name}({SIGNATURE}) {{\n'
        f"  char* const own_ptrs[] = {{{pointers}}};\n"
        f"  const i64 own_s[] = {{{slots}}};\n"
        f"  const double own_f[] = {{{floats}}};\n"
        f"  {body}(own_ptrs, own_s, own_f, begin, end, scratch, status);\n"
        "}\n"
    )
    return Text(text, frozenset())


__all__ = ["LEAST", "shared"]
