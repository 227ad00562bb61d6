"""Values of vector IR: evaluates expressions with the variables of a block (see `vector_interpreter.py`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from fuser.cpu.vir import nodes as ir
from fuser.debug.vector_memory import (
    Pointer,
    Scalar,
    bits_to_float,
    converted,
    float_to_bits,
    scalar,
    tensor,
)
from fuser.errors import VerifyError
from fuser.ir.sizes import Call, Expr, Sym
from fuser.ops import LOW, OPS, REDUCTIONS, SCANS, compute_dtype


class Cell:
    """A variable."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: str, value: Scalar) -> None:
        self.kind, self.value = kind, value


class Env:
    """The variables of a block."""

    def __init__(self, outer: Env | None) -> None:
        self.outer, self.own = outer, dict[str, Cell]()

    def cell(self, name: str) -> Cell:
        """The variable with this name, in this block or around it. VerifyError if there is none."""
        env: Env | None = self
        while env is not None:
            if name in env.own:
                return env.own[name]
            env = env.outer
        raise VerifyError(f"{name!r} is not declared")

    def let(self, kind: str, name: str, value: Scalar) -> None:
        """Declare a variable in this block."""
        self.own[name] = Cell(kind, None if value is None else converted(kind, value))


class Values:
    """Evaluates expressions. `arguments`: the kernel's arguments, by the kind of `Slot`."""

    def __init__(
        self, pointers: Sequence[Pointer], slots: Sequence[int], floats: Sequence[float], lanes: int,
        macros: Collection[str],
    ) -> None:  # fmt: skip
        self.arguments: dict[str, Sequence[Scalar]] = {"ptrs": pointers, "s": slots, "f": list(map(np.float64, floats))}
        self.lanes, self.macros = lanes, macros

    # -- values --------------------------------------------------------------------------------------------------------
    def value(self, v: ir.Value, env: Env) -> Scalar:
        """The value of an expression."""
        return _VALUES[type(v)](self, v, env)

    def _name(self, v: ir.Name, env: Env) -> Scalar:
        found = env.cell(v.name).value
        if found is None:
            raise VerifyError(f"{v.name!r} has no value yet")
        return found

    def _number(self, v: ir.Number, env: Env) -> Scalar:
        return v.number if v.dtype is None else scalar(tensor(v.number, v.dtype))

    def _slot(self, v: ir.Slot, env: Env) -> Scalar:
        return self.arguments[v.kind][v.at]

    def _offset(self, v: ir.Offset, env: Env) -> int:
        def symbol(s: Sym) -> int:
            if s.row is not None:
                return int(self.value(v.scope.ref(s.row), env))
            return int(self.arguments["s"][v.scope.slots[s]] if v.scope.slots is not None else env.cell(s.name).value)

        def expression(e: Expr) -> int:
            total = 0
            for monomial, c in e.terms:
                for a in monomial:
                    c *= symbol(a) if isinstance(a, Sym) else called(a)
                total += c
            return total

        def called(c: Call) -> int:
            a, b = map(expression, c.args)
            if c.fn in ("min", "max"):
                return min(a, b) if c.fn == "min" else max(a, b)
            return (a // b if c.fn == "floordiv" else a % b) if b else 0

        return expression(v.e)

    def place(self, v: ir.Value, env: Env) -> Pointer:
        """The memory that a value names."""
        if isinstance(v, ir.Unary):
            found = self.value(v.a, env)
        else:
            assert isinstance(v, ir.At)
            array = self.place(v.array, env) if isinstance(v.array, ir.At) else self.value(v.array, env)
            found = array.element(self.value(v.place, env))
        assert isinstance(found, Pointer)
        return found

    def _at(self, v: ir.At, env: Env) -> Scalar:
        array = self.place(v.array, env) if isinstance(v.array, ir.At) else self.value(v.array, env)
        place = array.element(self.value(v.place, env))
        return place if array.dims else place.read()

    def _address(self, v: ir.Address, env: Env) -> Scalar:
        return self.value(v.buffer, env).moved(self.value(v.place, env))

    def _unary(self, v: ir.Unary, env: Env) -> Scalar:
        if v.sign == "&":
            return self.place(v.a, env)
        if v.sign == "*":
            return self.place(v, env).read()
        a = self.value(v.a, env)
        if v.sign == "-":
            return -a
        return not a if v.sign == "!" else ~a

    def _binary(self, v: ir.Binary, env: Env) -> Scalar:
        a = self.value(v.a, env)
        if v.sign in ("&&", "||"):
            return bool(self.value(v.b, env)) if bool(a) is (v.sign == "&&") else bool(a)
        return BINARY[v.sign](a, self.value(v.b, env))

    def _select(self, v: ir.Select, env: Env) -> Scalar:
        test = self.value(v.test, env)
        if isinstance(test, torch.Tensor):
            return torch.where(test, self.value(v.a, env), self.value(v.b, env))
        return self.value(v.a if test else v.b, env)

    def _cast(self, v: ir.Cast, env: Env) -> Scalar:
        value = self.value(v.a, env)
        if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
            return -value.to(torch.int16)
        return converted(v.kind, value)

    def _op(self, v: ir.Op, env: Env) -> Scalar:
        return _TABLES[v.table](v, [self.value(a, env) for a in v.args])

    def _convert(self, v: ir.Convert, env: Env) -> Scalar:
        value = tensor(self.value(v.a, env), compute_dtype(v.source)).to(v.target)
        return scalar(value.to(compute_dtype(v.target)))

    def _round(self, v: ir.Round, env: Env) -> Scalar:
        return scalar(tensor(self.value(v.a, env), torch.float32).to(v.dtype).float())

    def _decode(self, v: ir.Decode, env: Env) -> Scalar:
        value = self.value(v.a, env)
        if v.dtype in LOW:
            return bits_to_float(value, v.dtype)
        return value != 0 if v.dtype is torch.bool else value

    def _encode(self, v: ir.Encode, env: Env) -> Scalar:
        value = self.value(v.a, env)
        return float_to_bits(value, v.dtype) if v.dtype in LOW else value

    def _bound(self, v: ir.Bound, env: Env) -> Scalar:
        a, b = self.value(v.a, env), self.value(v.b, env)
        return a if a != a or BINARY[v.sign](a, b) else b

    def _fma(self, v: ir.Fma, env: Env) -> Scalar:
        a, b, c = (self.value(x, env) for x in (v.a, v.b, v.c))
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))

    def _gather(self, v: ir.Gather, env: Env) -> Scalar:
        return self.value(v.buffer, env).element(self.value(v.place, env)).read()

    def _call(self, v: ir.Call, env: Env) -> Scalar:
        if v.function == "hidden":
            return self.value(v.args[0], env)
        return self.value(ir.Name(v.function), env)(env, v.args)

    # -- vectors -------------------------------------------------------------------------------------------------------
    def width(self, of: ir.Of) -> int:
        """The number of lanes of a vector."""
        if of is torch.float64:
            return self.lanes // 2
        return self.lanes * 4 // of if isinstance(of, int) else self.lanes

    def mask(self, v: ir.Value | None, env: Env, lanes: int) -> torch.Tensor:
        """The mask that `v` evaluates to; without `v`, all lanes."""
        found = True if v is None else self.value(v, env)
        return found if isinstance(found, torch.Tensor) else torch.full((lanes,), bool(found))

    def _load(self, v: ir.Load, env: Env) -> torch.Tensor:
        lanes = self.width(v.of) * (2 if v.paired else 1)
        place, mask = self.value(v.address, env), self.mask(v.mask, env, lanes)
        if v.back is not None:
            mask = torch.arange(lanes) < self.value(v.back, env)
        step = v.step if v.back is None else -1
        found = [place.moved(step * n).read() if mask[n] else 0 for n in range(lanes)]
        if isinstance(v.of, int):
            return torch.tensor(found, dtype=torch.int32).to(torch.int16 if v.of == 2 else torch.int8)
        if v.of in LOW:
            found = [bits_to_float(x, v.of) for x in found]
        return torch.tensor(found, dtype=compute_dtype(v.of))

    def _first(self, v: ir.First, env: Env) -> torch.Tensor:
        found: torch.Tensor = torch.arange(self.width(v.of)) < self.value(v.count, env)
        return found

    def _mask(self, v: ir.Mask, env: Env) -> Scalar:
        flags = self.value(v.flags, env)
        return bool(flags.any()) if v.any else flags

    def _half(self, v: ir.Half, env: Env) -> torch.Tensor:
        found: torch.Tensor = self.value(v.pairs, env)[int(v.odd) :: 2]
        return found

    def _blend(self, v: ir.Blend, env: Env) -> torch.Tensor:
        a, b = self.value(v.a, env), self.value(v.b, env)
        return torch.where(self.mask(v.mask, env, len(a)), a, b)

    def _splat(self, v: ir.Splat, env: Env) -> torch.Tensor:
        dtype = (torch.int16 if v.of == 2 else torch.int8) if isinstance(v.of, int) else v.of
        return torch.full((self.width(v.of),), tensor(self.value(v.a, env), dtype).item(), dtype=dtype)


def _quotient(a: Scalar, b: Scalar) -> Scalar:
    if isinstance(a, np.floating) or isinstance(b, np.floating):
        return a / b
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _joining(operate: Callable[[Any, Any], Any]) -> Callable[[Scalar, Scalar], Scalar]:
    def join(a: Scalar, b: Scalar) -> Scalar:
        if isinstance(a, torch.Tensor) and a.dtype is torch.bool and not isinstance(b, torch.Tensor):
            b = bool(b)
        if isinstance(b, torch.Tensor) and b.dtype is torch.bool and not isinstance(a, torch.Tensor):
            a = bool(a)
        return operate(a, b)

    return join


def _plus(a: Scalar, b: Scalar) -> Scalar:
    return a.moved(b) if isinstance(a, Pointer) else a + b


def _minus(a: Scalar, b: Scalar) -> Scalar:
    return a.moved(-b) if isinstance(a, Pointer) else a - b


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": _plus, "-": _minus, "*": operator.mul, "/": _quotient, "%": lambda a, b: a - _quotient(a, b) * b,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "&": _joining(operator.and_), "|": _joining(operator.or_), "^": _joining(operator.xor),
}  # fmt: skip


# -- cells of the op table ---------------------------------------------------------------------------------------------
def _op_cell(v: ir.Op, args: Sequence[Scalar]) -> Scalar:
    row = OPS[v.name]
    kinds = row.signature or "t" * len(args)
    tensors = [tensor(a, torch.bool if kind == "b" else v.dtype) for a, kind in zip(args, kinds)]
    return scalar(row.eval(*torch.broadcast_tensors(*tensors)))  # type: ignore[no-untyped-call]


def _combined(v: ir.Op, args: Sequence[Scalar]) -> Scalar:
    row = REDUCTIONS[v.name]
    if row.index:
        held, at, x, here = args
        return _overtakes(v, (held, x)) or (_equal(held, x) and here < at)
    return reduced(v.name, v.dtype, *args)


def reduced(name: str, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
    """Two accumulators of a reduction, combined."""
    pair = torch.stack([tensor(a, dtype), tensor(b, dtype)])
    return scalar(REDUCTIONS[name].eval(pair, (0,), False).to(dtype))


def _equal(a: Scalar, b: Scalar) -> bool:
    return bool(a == b or (a != a and b != b))


def _overtakes(v: ir.Op, args: Sequence[Scalar]) -> bool:
    held, x = args
    return bool(held == held and (x != x or BINARY[REDUCTIONS[v.name].extreme](x, held)))


def stepped(v: ir.Op, args: Sequence[Scalar]) -> Scalar:
    """The next accumulator of a scan; for an index scan, whether the value's index is the new result."""
    row, (acc, x) = SCANS[v.name], args
    if row.index:
        return bool(x != x or BINARY[f"{row.extreme}="](x, acc))
    pair = torch.stack([tensor(acc, v.dtype), tensor(x, v.dtype)])
    return scalar(row.eval(pair, 0)[-1].to(v.dtype))


_TABLES: dict[str, Callable[[ir.Op, Sequence[Scalar]], Scalar]] = {
    "op": _op_cell, "lanes": _op_cell, "combine": _combined, "overtakes": _overtakes, "step": stepped,
    "near": _op_cell, "lanes_near": _op_cell,
}  # fmt: skip
_VALUES: dict[type, Callable[[Values, Any, Env], Scalar]] = {
    ir.Name: Values._name, ir.Number: Values._number, ir.Slot: Values._slot, ir.Offset: Values._offset,
    ir.At: Values._at, ir.Address: Values._address, ir.Unary: Values._unary, ir.Binary: Values._binary,
    ir.Select: Values._select, ir.Cast: Values._cast, ir.Op: Values._op, ir.Convert: Values._convert,
    ir.Round: Values._round, ir.Decode: Values._decode, ir.Encode: Values._encode, ir.Bound: Values._bound,
    ir.Fma: Values._fma, ir.Gather: Values._gather, ir.Call: Values._call, ir.Load: Values._load,
    ir.First: Values._first, ir.Mask: Values._mask, ir.Half: Values._half, ir.Blend: Values._blend,
    ir.Splat: Values._splat,
}  # fmt: skip

__all__ = ["BINARY", "Cell", "Env", "Values", "reduced", "stepped"]
