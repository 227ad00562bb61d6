"""A kernel's requirements on arguments as text: the patterns and guards that its launch program tests.

    pw_d2_1c0f takes
      in0: float32[x0_0, x0_1] strides [x0_1, 1] on cpu
      in1: float32[x0_1] strides [1] on cpu, from a multiple of 16 bytes
      where x0_0 < 2147483648

`x0_1` is the size of dim 1 of input 0, `x0_s1` its stride, `x2` the value of the number input 2. A name that occurs
once stands for any number; anything else has to match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fuser.ir.sizes import ADD, EQ, FLOORDIV, LE, LT, MAX, MIN, MOD, MUL, NE, PUSH, SLOT, Program, run_program
from fuser.kernel_cache import REGISTRY
from fuser.kernel_spec import ALIGNMENT, Bind, Check, InputPattern, LaunchProgram
from fuser.lazy_dataclasses import dataclass

_INFIX = {ADD: "+", MUL: "*", FLOORDIV: "//", MOD: "%", EQ: "==", NE: "!=", LT: "<", LE: "<="}
_CALLS = {MIN: "min", MAX: "max"}


@dataclass(frozen=True)
class KernelGuards:
    """The arguments that one kernel accepts: a line for each input, and the relations between sizes."""

    kernel: str
    inputs: tuple[str, ...]
    relations: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.kernel} takes", *(f"  {line}" for line in self.inputs)]
        return "\n".join([*lines, *(f"  where {r}" for r in self.relations)])


def guards(key: int) -> tuple[KernelGuards, ...]:
    """The requirements of a fusion's kernels on their inputs.

    Args:
        key: what `register_fusion` returned.

    Returns:
        A `KernelGuards` for each kernel compiled so far: a line for each input, bound ones first, and relations between
        sizes. Sizes and strides are in elements.

    Raises:
        UnknownKeyError: the key is not registered in this process.
    """
    kernels = REGISTRY.find(key).spec.store.kernels
    return tuple(guards_of(k.name, k.program) for k in kernels if isinstance(k.program, LaunchProgram))


def guards_of(name: str, program: LaunchProgram) -> KernelGuards:
    """The requirements of one launch program."""
    slots: dict[int, str] = {}
    inputs = tuple(_input_text(n, p, slots) for n, p in enumerate(program.inputs))
    return KernelGuards(name, inputs, tuple(program_text(g, slots) for g in program.guards if SLOT in g))


def _input_text(number: int, pattern: InputPattern, slots: dict[int, str]) -> str:
    if pattern.kind != "tensor":
        if pattern.kind != "float":
            slots[pattern.slot] = f"x{number}"
        return f"in{number}: {pattern.kind} x{number}"
    sizes = _numbers(pattern.sizes, f"x{number}_", slots)
    strides = _numbers(pattern.strides, f"x{number}_s", slots)
    aligned = f", from a multiple of {ALIGNMENT} bytes" if pattern.aligned else ""
    every = ", in dims of one element, too," if pattern.every_stride else ""
    dtype = str(pattern.dtype).removeprefix("torch.")
    return f"in{number}: {dtype}[{sizes}] strides [{strides}]{every} on {pattern.device_type}{aligned}"


def _numbers(items: Sequence[Bind | Check], name: str, slots: dict[int, str]) -> str:
    texts = []
    for d, item in enumerate(items):
        if isinstance(item, Bind):
            slots[item.slot] = f"{name}{d}"
        texts.append(slots[item.slot] if isinstance(item, Bind) else program_text(item.code, slots))
    return ", ".join(texts)


def refusal_of(program: LaunchProgram, example: Sequence[Any]) -> str | None:
    """Why a kernel does not accept arguments, given as in a kernel entry's example; None if it accepts them.

    A tensor is (dtype, device type, size, stride). The alignment of its memory is not described.
    """
    slots, names = [0] * program.n_slots, dict[int, str]()
    for n, (pattern, given) in enumerate(zip(program.inputs, example)):
        before = dict(names)
        said = _input_text(n, pattern, names)
        if not _takes(pattern, given, slots):
            return f"it takes {said}, with {_known(before, slots)}; given {_given(given)}" if before else (
                f"it takes {said}; given {_given(given)}"
            )  # fmt: skip
    failed = next((g for g in program.guards if not run_program(g, slots)), None)
    return None if failed is None else f"{program_text(failed, names)} does not hold, with {_known(names, slots)}"


def _takes(pattern: InputPattern, given: Any, slots: list[int]) -> bool:
    if pattern.kind != "tensor" or not isinstance(given, tuple):
        kinds = {"float": ("float", "int"), "int": ("int",), "bool": ("bool",)}.get(pattern.kind, ())
        if pattern.slot >= 0 and isinstance(given, int) and pattern.kind != "float":
            slots[pattern.slot] = int(given)
        return not isinstance(given, tuple) and type(given).__name__ in kinds
    dtype, device_type, size, stride = given
    if dtype != pattern.dtype or device_type != pattern.device_type or len(size) != len(pattern.sizes):
        return False
    return _match(size, pattern.sizes, [True] * len(size), slots) and _match(
        stride, pattern.strides, [s > 1 and 0 not in size for s in size], slots
    )


def _match(found: Sequence[int], items: Sequence[Bind | Check], checked: Sequence[bool], slots: list[int]) -> bool:
    for value, item, counts in zip(found, items, checked):
        if isinstance(item, Bind):
            slots[item.slot] = value
        elif counts and run_program(item.code, slots) != value:
            return False
    return True


def _known(names: Mapping[int, str], slots: Sequence[int]) -> str:
    return ", ".join(f"{name} = {slots[slot]}" for slot, name in names.items())


def _given(given: Any) -> str:
    if not isinstance(given, tuple):
        return f"{type(given).__name__} {given}"
    dtype, device_type, size, stride = given
    return f"{str(dtype).removeprefix('torch.')}{list(size)} strides {list(stride)} on {device_type}"


def program_text(code: Program, slots: Mapping[int, str]) -> str:
    """A program over slots as an expression over the slots' names."""
    stack: list[tuple[str, bool]] = []  # a text, and whether it needs parentheses inside another
    at = 0
    while at < len(code):
        op = code[at]
        if op in (PUSH, SLOT):
            number = code[at + 1]
            stack.append((str(number) if op == PUSH else slots[number], op == PUSH and number < 0))
            at += 2
            continue
        b, a = stack.pop(), stack.pop()
        stack.append(_joined(op, a, b))
        at += 1
    return stack[-1][0]


def _joined(op: int, a: tuple[str, bool], b: tuple[str, bool]) -> tuple[str, bool]:
    if op in _CALLS:
        return f"{_CALLS[op]}({a[0]}, {b[0]})", False
    if op in (EQ, NE, LT, LE, ADD):
        return f"{a[0]} {_INFIX[op]} {b[0]}", True
    x, y = (f"({text})" if loose else text for text, loose in (a, b))
    tight = op == MUL
    return f"{x} {_INFIX[op]} {y}" if not tight else f"{x}*{y}", not tight


__all__ = ["KernelGuards", "guards", "guards_of", "program_text"]
