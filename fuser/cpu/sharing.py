"""Functions of one source that are equal up to the arguments they take: one body for all of them.

A chain of equal layers makes the same function again and again, with other pointers, sizes and factors. The compiler
sees its body once; each function calls it with what it would have taken itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fuser.cpu.records import SIGNATURE, Function

LEAST = 1000  # characters of a function that pay for a call
_EXTERN, _END = 'extern "C" void ', f"({SIGNATURE}) {{"
_TAKEN = re.compile(r"\b(ptrs|s|f)\[(\d+)\]")
_BUFFER = re.compile(r"__restrict (\w+) = \(.*\)ptrs\[")
_SIZE = re.compile(r"const i64 (\w+) = s\[")
# A factor or a summand: the same operation of a number that is known and of one that is not.
_CONSTANT = re.compile(r"^( *const float t\d+ = \w+ [-+*] )(\d[\w.+-]*f|\(-?\d[\w.+-]*f\))(;)$", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")
_OTHERWISE = re.compile(r"\b(?:ptrs|s|f)\b(?!\[\d+\])")


@dataclass(frozen=True)
class _Form:
    """A function's text without what it takes; and that, in the order of first use."""

    text: str
    pointers: tuple[str, ...]
    slots: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]


def _form_of(function: Function) -> _Form | None:
    """The form of a function that may share its body; None for others."""
    head, _, body = function.text.partition("\n")
    if len(function.text) < LEAST or head != f"{_EXTERN}{function.name}{_END}":
        return None
    if function.name in body or _OTHERWISE.search(body):  # it has data of its own, or takes more than is seen here
        return None
    names = dict.fromkeys([*_BUFFER.findall(body), *_SIZE.findall(body)])
    number = {name: f"arg{n}" for n, name in enumerate(names)}
    taken: dict[str, dict[str, int]] = {"ptrs": {}, "s": {}, "f": {}}

    def renumbered(found: re.Match[str]) -> str:
        kind, at = found.groups()
        return f"{kind}[{taken[kind].setdefault(at, len(taken[kind]))}]"

    text = _TAKEN.sub(renumbered, _WORD.sub(lambda w: number.get(w[0], w[0]), body))
    constants = tuple(value for _, value, _ in _CONSTANT.findall(text))
    text = _CONSTANT.sub(r"\1?\3", text)
    return _Form(text, tuple(taken["ptrs"]), tuple(taken["s"]), tuple(taken["f"]), constants)


def shared(functions: Sequence[Function]) -> list[list[str]]:
    """The texts of `functions`; those of one list belong into one source, since they share a body."""
    by_form: dict[str, list[tuple[Function, _Form | None]]] = {}
    for function in functions:
        form = _form_of(function)
        by_form.setdefault(form.text if form is not None else f"\0{function.name}", []).append((function, form))
    return [_texts(group) for group in by_form.values()]


def _texts(group: Sequence[tuple[Function, _Form | None]]) -> list[str]:
    first, form = group[0]
    if len(group) == 1 or form is None:
        return [f.text for f, _ in group]
    forms = [other for _, other in group if other is not None]
    columns = list(zip(*(other.constants for other in forms), strict=True))
    varying = [n for n, column in enumerate(columns) if len(set(column)) > 1]
    name, n_scalars = f"{first.name}_body", len(form.scalars)
    values = iter(range(len(columns)))

    def constant(found: re.Match[str]) -> str:
        n = next(values)
        return f"own{varying.index(n)};" if n in varying else f"{columns[n][0]};"

    head = "".join(f"  const float own{k} = (float)f[{n_scalars + k}];\n" for k in range(len(varying)))
    body = re.sub(r"\?;$", constant, form.text, flags=re.MULTILINE)
    texts = [f"static __attribute__((noinline)) void {name}{_END}\n{head}{body}"]
    for (function, _), own in zip(group, forms, strict=True):
        scalars = [*(f"f[{n}]" for n in own.scalars), *(f"(double){own.constants[n]}" for n in varying)]
        lists = [f"ptrs[{n}]" for n in own.pointers], [f"s[{n}]" for n in own.slots], scalars
        texts.append(_caller(function, name, *lists))
    return texts


def _caller(function: Function, body: str, *taken: Iterable[str]) -> str:
    """The function that calls a body with what it takes itself."""
    pointers, slots, scalars = (", ".join(t) or "0" for t in taken)
    return (
        f"{_EXTERN}{function.name}{_END}\n"
        f"  char* const own_ptrs[] = {{{pointers}}};\n"
        f"  const i64 own_s[] = {{{slots}}};\n"
        f"  const double own_f[] = {{{scalars}}};\n"
        f"  {body}(own_ptrs, own_s, own_f, begin, end, scratch, status);\n"
        "}\n"
    )


__all__ = ["LEAST", "shared"]
