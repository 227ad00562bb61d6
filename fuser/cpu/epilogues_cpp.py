"""C++ of the elements of rows that routines read, compute and write: one element, or a vector of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from fuser.cpu.epilogues import PER_CHANNEL, PER_ELEMENT, Epilogue, folded
from fuser.ir.loop_body import Row, Value, ops, recording
from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine
from fuser.ops import cpp_cell, cpp_constant, cpp_lanes, cpp_load, cpp_store

_NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16"}  # of loads and stores of vectors


@dataclass(frozen=True)
class Element:
    """C++ for element j of a row, and for the vector that begins there: an expression each, or a statement."""

    plain: str
    lanes: str


def loaded(dtype: torch.dtype, start: str, index: str) -> Element:
    """An element in memory, as float32."""
    return Element(cpp_load(dtype, f"{start}[{index}]"), f"fuser_lanes_load_{_NAMES[dtype]}({start} + {index})")


def stored(dtype: torch.dtype, value: Element, start: str) -> Element:
    """The statement that rounds element j to `dtype` and stores it."""
    rounded = f"fuser_lanes_nearest_bfloat16({value.lanes})" if dtype is torch.bfloat16 else value.lanes
    vector = f"fuser_lanes_store_{_NAMES[dtype]}({start} + j, {rounded});"
    return Element(f"{start}[j] = {cpp_store(dtype, value.plain)};", vector)


def computed(
    epilogue: Epilogue, sums: Element, numbers: Iterable[Element], tensors: Iterable[Element], machine: Machine
) -> tuple[str, Element]:  # fmt: skip
    """The functions of an epilogue, and its result for `sums`; the operands are in the order of its steps."""
    if not epilogue:
        return "", sums
    numbers, tensors = iter(numbers), iter(tensors)
    operands = [sums]
    for step in epilogue:
        if step in PER_CHANNEL or step == PER_ELEMENT:
            operands.append(next(tensors if step == PER_ELEMENT else numbers))
    plain, lanes = (", ".join(getattr(e, kind) for e in operands) for kind in ("plain", "lanes"))
    made = Element(f"fuser_epilogue({plain})", f"fuser_lanes_epilogue({lanes})")
    return _functions(epilogue, len(operands), machine), made


def either(lanes: str, plain: str, machine: Machine) -> str:
    """`lanes` where the compiler has vectors of this machine, else `plain`."""
    return f"#if FUSER_LANES\n{lanes}\n#else\n{plain}\n#endif" if machine.lanes else plain


def whole(made: Element, count: str, machine: Machine) -> str:
    """The loop that runs a statement for `count` elements, a multiple of all vectors' lengths."""
    vectors = f"for (int j = 0; j < {count}; j += FUSER_LANES) {made.lanes}"
    return either(vectors, f"#pragma omp simd\nfor (int j = 0; j < {count}; ++j) {made.plain}", machine)


def with_tail(made: Element, count: str, machine: Machine) -> str:
    """The loop that runs a statement for `count` elements."""
    if not machine.lanes:
        return f"#pragma omp simd\nfor (int j = 0; j < {count}; ++j) {made.plain}"
    vectors = f"#if FUSER_LANES\nfor (; j + FUSER_LANES <= {count}; j += FUSER_LANES) {made.lanes}\n#endif\n"
    return f"int j = 0;\n{vectors}for (; j < {count}; ++j) {made.plain}"


def _lowered(step: str, v: Value) -> Value:
    """The lowering of an activation, applied to a value of a loop body."""
    if step == "relu":
        return ops.relu(v)
    from fuser.lowering import activations  # a process that finds its kernels on disk imports no lowerings

    if step == "relu6":
        return ops.minimum(activations.number(6, v), ops.maximum(activations.number(0, v), v))
    by_name: dict[str, Callable[[Value], Value]] = {
        "hardswish": activations.hardswish, "hardsigmoid": activations.hardsigmoid, "silu": activations.silu,
        "sigmoid": activations.logistic, "tanh": ops.tanh, "gelu": activations.gelu, "gelu_tanh": activations.gelu_tanh,
    }  # fmt: skip
    return by_name[step](v)


def _functions(epilogue: Epilogue, operands: int, machine: Machine) -> str:
    """C++ of an epilogue, as a function of floats and, where there are vectors, of vectors."""
    with recording() as recorder:
        first, *others = (recorder.add_row(Row("scalar", (), torch.float32, f"x{n}")) for n in range(operands))
        rest = iter(others)  # of both kinds, in the order of the steps
        result = folded(epilogue, first, rest, rest, ops.mul, ops.add, _lowered)

    def function(name: str, kind: str, constant: str, cell: Callable[..., str | None]) -> str:
        lines = []
        for n, row in enumerate(recorder.rows[operands:], operands):
            if row.op == "const":
                value: str | None = constant.format(cpp_constant(float(row.attr), row.dtype))
            else:
                value = cell(row.op, row.dtype, *(f"t{a}" for a in row.args))
            lines.append(f"  const {kind} t{n} = {value};\n")
        given = ", ".join(f"{kind} t{n}" for n in range(operands))
        return f"FUSER_FN {kind} {name}({given}) {{\n{''.join(lines)}  return t{result.row};\n}}\n"

    plain = function("fuser_epilogue", "float", "{}", cpp_cell)
    if not machine.lanes:
        return plain
    lanes = function("fuser_lanes_epilogue", "lanes_f", "fuser_lanes_all({})", cpp_lanes)
    return f"{plain}#if FUSER_LANES\n{lanes}#endif\n"


__all__ = ["Element", "computed", "either", "loaded", "stored", "whole", "with_tail"]
