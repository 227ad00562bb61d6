"""Vector IR, run statement by statement: what a pass must not change, and what C++ has to do.

Loops run their turns one after the other, whatever their head says of vectors; lanes of explicit vectors are tensors.
Elementary functions are torch's, so a kernel's may differ in the last bits. An access outside of an array, a variable
without a value and a helper that is not known are errors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from fuser.cpu.nest import TILE_STRIDE
from fuser.cpu.records import Function
from fuser.cpu.vir import nodes as ir
from fuser.debug.vector_memory import (
    Pointer,
    Scalar,
    bits_to_float,
    converted,
    float_to_bits,
    scalar,
    scratch,
    tensor,
    whole,
)
from fuser.errors import VerifyError
from fuser.ir.sizes import INDIRECT, Call, Expr, Sym, run_program
from fuser.kernel_spec import LaunchProgram
from fuser.ops import LOW, OPS, REDUCTIONS, SCANS, compute_dtype
from fuser.runtime.python_launcher import match

_ZEROS = whole(np.zeros(8192, np.uint8))


def interpret(
    kernel: ir.Kernel, pointers: Sequence[np.ndarray[Any, Any]], slots: Sequence[int], floats: Sequence[float],
    begin: int, end: int, scratch_bytes: int = 0, lanes: int = 16, macros: Collection[str] = (),
) -> int:  # fmt: skip
    """Run units [begin, end) of a kernel on arrays, which it changes; returns its status.

    16-bit floats are arrays of uint16. `lanes`: floats in a vector. `macros`: those whose blocks `Only` are taken.
    """
    status = np.zeros(1, np.int32)
    given: dict[str, Scalar] = {
        "begin": begin, "end": end, "status": whole(status).as_kind("i32"), "FUSER_LANES": lanes,
        "scratch": whole(np.full(scratch_bytes, 255, np.uint8)), "fuser_zeros": _ZEROS,
    }  # fmt: skip
    machine = _Machine(list(map(whole, pointers)), slots, floats, lanes, macros)
    env = _Env(None)
    env.own = {name: _Cell("", value) for name, value in given.items()}
    machine.body(kernel.body, env)
    return int(status[0])


def run_functions(
    functions: Sequence[Function], program: LaunchProgram, args: Sequence[Any], macros: Collection[str] = ()
) -> list[torch.Tensor]:  # fmt: skip
    """The results of a launch program whose steps are `functions`. IndexError where one reports a wrong index."""
    bound = match(program, args)
    if bound is None:
        raise ValueError("the program does not take these arguments")
    slots, floats = bound
    buffers = []
    for b in program.buffers:
        size, stride = ([run_program(code, slots) for code in codes] for codes in (b.sizes, b.strides or b.sizes))
        made = torch.empty_strided(size, stride, dtype=b.dtype) if b.output else torch.empty(size, dtype=b.dtype)
        flat = _flat(made)
        flat.view(np.uint8)[:] = 255
        buffers.append(made)
    pointers = [_flat(t) for t in (*(a for a in args if isinstance(a, torch.Tensor)), *buffers)]
    for function, step in zip(functions, program.steps, strict=True):
        units, space = (run_program(code, slots) for code in (step.units, step.scratch))
        status = interpret(function.code, pointers, slots, floats, 0, units, space, macros=macros) if units > 0 else 0
        if status:
            raise IndexError(f"{step.entry} says {status}")
    return [args[at] if kind == "input" else buffers[at] for kind, at in program.outputs]


def _flat(t: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's memory from its first element to its last one."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
    flat = t.detach().as_strided((span,), (1,))
    return np.asarray((flat.view(torch.int16) if t.dtype in LOW else flat).numpy())


class _Cell:
    """A variable."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: str, value: Scalar) -> None:
        self.kind, self.value = kind, value


class _Env:
    """The variables of a block."""

    def __init__(self, outer: _Env | None) -> None:
        self.outer, self.own = outer, dict[str, _Cell]()

    def cell(self, name: str) -> _Cell:
        env: _Env | None = self
        while env is not None:
            if name in env.own:
                return env.own[name]
            env = env.outer
        raise VerifyError(f"{name!r} is not declared")

    def let(self, kind: str, name: str, value: Scalar) -> None:
        self.own[name] = _Cell(kind, None if value is None else converted(kind, value))


class _Leave(Exception):
    """A function's end before its last statement."""


class _Machine:
    """Runs statements and gives values of expressions, each in the variables of its block."""

    def __init__(
        self, pointers: Sequence[Pointer], slots: Sequence[int], floats: Sequence[float], lanes: int,
        macros: Collection[str],
    ) -> None:  # fmt: skip
        self.arguments: dict[str, Sequence[Scalar]] = {"ptrs": pointers, "s": slots, "f": list(map(np.float64, floats))}
        self.lanes, self.macros = lanes, macros

    # -- statements ----------------------------------------------------------------------------------------------------
    def body(self, statements: Sequence[ir.Statement], env: _Env) -> None:
        """Statements in order."""
        taken = True  # whether the block before was, for an `Else` or `Otherwise`
        try:
            for s in statements:
                if isinstance(s, ir.Block):
                    taken = self._block(s.head, s.body, env, taken)
                else:
                    _STATEMENTS[type(s)](self, s, env)
        except _Leave:
            if env.outer is not None:
                raise

    def _let(self, s: ir.Let, env: _Env) -> None:
        env.let(s.kind, s.name, None if s.value is None else self.value(s.value, env))

    def _scratch(self, s: ir.Scratch, env: _Env) -> None:
        env.own[s.name] = _Cell("", scratch(s.kind, s.sizes, s.zero))

    def _pointer(self, s: ir.Pointer, env: _Env) -> None:
        env.own[s.name] = _Cell("", self.value(s.source, env).as_kind(s.kind))

    def _set(self, s: ir.Set, env: _Env) -> None:
        value, target = self.value(s.value, env), s.target
        if isinstance(target, ir.Name):
            cell = env.cell(target.name)
            cell.value = converted(cell.kind, _BINARY[s.sign](cell.value, value) if s.sign else value)
            return
        place = self._place(target, env)
        place.write(_BINARY[s.sign](place.read(), value) if s.sign else value)

    def _store(self, s: ir.Store, env: _Env) -> None:
        to = self.value(s.address, env)
        values = [self.value(v, env) for v in s.values]
        lanes = torch.stack(values, 1).reshape(-1) if len(values) > 1 else values[0]
        mask = self.mask(s.mask, env, len(lanes))
        stored = lanes if isinstance(s.of, int) else _stored(lanes, s.of)
        for n in range(len(lanes)):
            if mask[n]:
                to.moved(n).write(stored[n].item())

    def _transpose(self, s: ir.Transpose, env: _Env) -> None:
        kind = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[s.size]
        source, to = (self.value(v, env).as_kind(kind) for v in (s.source, s.to))
        step, columns = self.value(s.step, env), self.value(s.columns, env)
        rows = step if s.rows is None else self.value(s.rows, env)
        for c in range(columns):
            for r in range(rows):
                to.moved(r * TILE_STRIDE + c).write(source.moved(c * step + r).read())

    def _widen(self, s: ir.Widen, env: _Env) -> None:
        to, source, count = (self.value(v, env) for v in (s.to, s.source, s.count))
        low = 0 if s.low is None else self.value(s.low, env)
        high = count if s.high is None else self.value(s.high, env)
        for n in range(count):
            to.moved(n).write(bits_to_float(source.moved(n).read(), torch.float16) if low <= n < high else 0.0)

    def _narrow(self, s: ir.Narrow, env: _Env) -> None:
        to, source, count = (self.value(v, env) for v in (s.to, s.source, s.count))
        for n in range(count):
            to.moved(n).write(float_to_bits(source.moved(n).read(), torch.float16))

    def _scan_block(self, s: ir.ScanBlock, env: _Env) -> None:
        row, source, to = SCANS[s.how], self.value(s.source, env), s.to and self.value(s.to, env)
        places = s.places and self.value(s.places, env)
        acc, place = env.cell(s.acc.name), env.cell(s.place.name) if s.place else None
        dtype = {"float": torch.float32, "double": torch.float64}.get(acc.kind, torch.int64)
        for n in range(self.value(s.count, env)):
            x = source.moved(n).read()
            if place is None:
                acc.value = converted(acc.kind, _stepped(ir.Op("step", s.how, dtype, ()), (acc.value, x)))
            elif x != x or (acc.value == acc.value and _BINARY[f"{row.extreme}="](x, acc.value)):
                acc.value, place.value = x, self.value(s.base or ir.Number(0), env) + n
            if to:
                to.moved(n).write(acc.value)
            if places and place:
                places.moved(n).write(place.value)

    def _stream(self, s: ir.Stream, env: _Env) -> None:
        to, source, count = (self.value(v, env) for v in (s.to, s.source, s.count))
        to.as_kind("u8").span(0, count)[:] = source.as_kind("u8").span(0, count)

    def _nothing(self, s: ir.Statement, env: _Env) -> None:
        """A hint."""

    def _do(self, s: ir.Do, env: _Env) -> None:
        self.value(s.call, env)

    def _return(self, s: ir.Return, env: _Env) -> None:
        raise _Leave

    def _fold(self, s: ir.Fold, env: _Env) -> None:
        array = env.cell(s.array).value
        width = min(s.vector_bytes, s.lanes * s.dtype.itemsize) // s.dtype.itemsize
        held = [array.element(n).read() for n in range(s.lanes)]
        vectors = [held[n : n + width] for n in range(0, s.lanes, width)]
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [[_joined(s, a, b) for a, b in zip(vectors[i], vectors[i + half])] for i in range(half)]
        (lanes,), by = vectors, width
        while by > 1:
            by //= 2
            lanes = [_joined(s, a, lanes[(i + by) % width]) for i, a in enumerate(lanes)]
        array.element(0).write(lanes[0])

    # -- blocks --------------------------------------------------------------------------------------------------------
    def _block(self, head: ir.Head, body: Sequence[ir.Statement], env: _Env, before: bool) -> bool:
        """Run a block; returns whether its test held."""
        match head:
            case ir.Plain() | ir.Staged():
                self.body(body, _Env(env))
            case ir.For():
                self._for(head, body, env)
            case ir.Units():
                self._units(head, body, env)
            case ir.Segments():
                self._segments(head, body, env)
            case ir.While():
                while self.value(head.test, env):
                    self.body(body, _Env(env))
            case ir.If():
                return self._if(bool(self.value(head.test, env)), body, env)
            case ir.Only():
                return self._if(head.macro in self.macros, body, env)
            case ir.Else() | ir.Otherwise():
                self._if(not before, body, env)
            case ir.Routine():
                env.own[head.name] = _Cell("", self._routine(head, body, env))
        return True

    def _if(self, holds: bool, body: Sequence[ir.Statement], env: _Env) -> bool:
        if holds:
            self.body(body, _Env(env))
        return holds

    def _for(self, head: ir.For, body: Sequence[ir.Statement], env: _Env) -> None:
        inner = _Env(env)
        if head.low is not None:
            inner.let("i64", head.name, self.value(head.low, env))
        counter, step = inner.cell(head.name), self.value(head.step, env)
        while counter.value + (step - 1 if head.whole else 0) < self.value(head.high, inner):
            self.body(body, _Env(inner))
            counter.value += step

    def _units(self, head: ir.Units, body: Sequence[ir.Statement], env: _Env) -> None:
        sizes = [(name, self.value(size, env)) for name, size in head.digits]
        for u in range(self.value(ir.Name("begin"), env), self.value(ir.Name("end"), env)):
            inner, rest = _Env(env), u
            inner.let("i64", "u", u)
            for at, (name, size) in reversed(list(enumerate(sizes))):
                inner.let("i64", name, rest % size if at else rest)
                rest = rest // size if at else rest
            self.body(body, inner)

    def _segments(self, head: ir.Segments, body: Sequence[ir.Statement], env: _Env) -> None:
        start, high = self.value(head.low, env), self.value(head.high, env)
        while start < high:
            to = min(start + head.longest, high)
            for cut in head.cuts:
                at = self.value(cut, env)
                to = at if start < at < to else to
            inner = _Env(env)
            inner.let("i64", "from", start)
            inner.let("i64", "to", to)
            self.body(body, inner)
            start = to

    def _routine(self, head: ir.Routine, body: Sequence[ir.Statement], env: _Env) -> Callable[..., None]:
        def run(caller: _Env, args: Sequence[ir.Value]) -> None:
            inner = _Env(env)
            for (kind, name), arg in zip(head.params, args, strict=True):
                if kind.endswith("&"):
                    assert isinstance(arg, ir.Name)
                    inner.own[name] = caller.cell(arg.name)
                else:
                    inner.let(kind, name, self.value(arg, caller))
            self.body(body, inner)

        return run

    # -- values --------------------------------------------------------------------------------------------------------
    def value(self, v: ir.Value, env: _Env) -> Scalar:
        """The value of an expression."""
        return _VALUES[type(v)](self, v, env)

    def _name(self, v: ir.Name, env: _Env) -> Scalar:
        found = env.cell(v.name).value
        if found is None:
            raise VerifyError(f"{v.name!r} has no value yet")
        return found

    def _number(self, v: ir.Number, env: _Env) -> Scalar:
        return v.number if v.dtype is None else scalar(tensor(v.number, v.dtype))

    def _slot(self, v: ir.Slot, env: _Env) -> Scalar:
        return self.arguments[v.kind][v.at]

    def _offset(self, v: ir.Offset, env: _Env) -> int:
        def symbol(s: Sym) -> int:
            if s.kind == INDIRECT:
                return int(self.value(v.scope.ref(int(s.name[1:])), env))
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

    def _place(self, v: ir.Value, env: _Env) -> Pointer:
        if isinstance(v, ir.Unary):
            found = self.value(v.a, env)
        else:
            assert isinstance(v, ir.At)
            array = self._place(v.array, env) if isinstance(v.array, ir.At) else self.value(v.array, env)
            found = array.element(self.value(v.place, env))
        assert isinstance(found, Pointer)
        return found

    def _at(self, v: ir.At, env: _Env) -> Scalar:
        array = self._place(v.array, env) if isinstance(v.array, ir.At) else self.value(v.array, env)
        place = array.element(self.value(v.place, env))
        return place if array.dims else place.read()

    def _address(self, v: ir.Address, env: _Env) -> Scalar:
        return self.value(v.buffer, env).moved(self.value(v.place, env))

    def _unary(self, v: ir.Unary, env: _Env) -> Scalar:
        if v.sign == "&":
            return self._place(v.a, env)
        if v.sign == "*":
            return self._place(v, env).read()
        a = self.value(v.a, env)
        if v.sign == "-":
            return -a
        return not a if v.sign == "!" else ~a

    def _binary(self, v: ir.Binary, env: _Env) -> Scalar:
        a = self.value(v.a, env)
        if v.sign in ("&&", "||"):
            return bool(self.value(v.b, env)) if bool(a) is (v.sign == "&&") else bool(a)
        return _BINARY[v.sign](a, self.value(v.b, env))

    def _select(self, v: ir.Select, env: _Env) -> Scalar:
        test = self.value(v.test, env)
        if isinstance(test, torch.Tensor):
            return torch.where(test, self.value(v.a, env), self.value(v.b, env))
        return self.value(v.a if test else v.b, env)

    def _cast(self, v: ir.Cast, env: _Env) -> Scalar:
        value = self.value(v.a, env)
        if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
            return -value.to(torch.int16)
        return converted(v.kind, value)

    def _op(self, v: ir.Op, env: _Env) -> Scalar:
        return _TABLES[v.table](v, [self.value(a, env) for a in v.args])

    def _convert(self, v: ir.Convert, env: _Env) -> Scalar:
        value = tensor(self.value(v.a, env), compute_dtype(v.source)).to(v.target)
        return scalar(value.to(compute_dtype(v.target)))

    def _round(self, v: ir.Round, env: _Env) -> Scalar:
        return scalar(tensor(self.value(v.a, env), torch.float32).to(v.dtype).float())

    def _decode(self, v: ir.Decode, env: _Env) -> Scalar:
        value = self.value(v.a, env)
        if v.dtype in LOW:
            return bits_to_float(value, v.dtype)
        return value != 0 if v.dtype is torch.bool else value

    def _encode(self, v: ir.Encode, env: _Env) -> Scalar:
        value = self.value(v.a, env)
        return float_to_bits(value, v.dtype) if v.dtype in LOW else value

    def _bound(self, v: ir.Bound, env: _Env) -> Scalar:
        a, b = self.value(v.a, env), self.value(v.b, env)
        return a if a != a or _BINARY[v.sign](a, b) else b

    def _fma(self, v: ir.Fma, env: _Env) -> Scalar:
        a, b, c = (self.value(x, env) for x in (v.a, v.b, v.c))
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))

    def _gather(self, v: ir.Gather, env: _Env) -> Scalar:
        return self.value(v.buffer, env).element(self.value(v.place, env)).read()

    def _call(self, v: ir.Call, env: _Env) -> Scalar:
        if v.function == "hidden":
            return self.value(v.args[0], env)
        return self.value(ir.Name(v.function), env)(env, v.args)

    # -- vectors -------------------------------------------------------------------------------------------------------
    def width(self, of: ir.Of) -> int:
        """Lanes of a vector."""
        return self.lanes * 4 // of if isinstance(of, int) else self.lanes

    def mask(self, v: ir.Value | None, env: _Env, lanes: int) -> torch.Tensor:
        """The mask that a value is; all lanes without one."""
        found = True if v is None else self.value(v, env)
        return found if isinstance(found, torch.Tensor) else torch.full((lanes,), bool(found))

    def _load(self, v: ir.Load, env: _Env) -> torch.Tensor:
        lanes = self.width(v.of) * (2 if v.paired else 1)
        place, mask = self.value(v.address, env), self.mask(v.mask, env, lanes)
        if v.back is not None:
            mask = torch.arange(lanes) < self.value(v.back, env)
        step = 1 if v.back is None else -1
        found = [place.moved(step * n).read() if mask[n] else 0 for n in range(lanes)]
        if isinstance(v.of, int):
            return torch.tensor(found, dtype=torch.int32).to(torch.int16 if v.of == 2 else torch.int8)
        if v.of in LOW:
            found = [bits_to_float(x, v.of) for x in found]
        return torch.tensor(found, dtype=compute_dtype(v.of))

    def _first(self, v: ir.First, env: _Env) -> torch.Tensor:
        found: torch.Tensor = torch.arange(self.width(v.of)) < self.value(v.count, env)
        return found

    def _mask(self, v: ir.Mask, env: _Env) -> Scalar:
        return self.value(v.flags, env)

    def _half(self, v: ir.Half, env: _Env) -> torch.Tensor:
        found: torch.Tensor = self.value(v.pairs, env)[int(v.odd) :: 2]
        return found

    def _blend(self, v: ir.Blend, env: _Env) -> torch.Tensor:
        a, b = self.value(v.a, env), self.value(v.b, env)
        return torch.where(self.mask(v.mask, env, len(a)), a, b)

    def _splat(self, v: ir.Splat, env: _Env) -> torch.Tensor:
        dtype = (torch.int16 if v.of == 2 else torch.int8) if isinstance(v.of, int) else v.of
        return torch.full((self.width(v.of),), tensor(self.value(v.a, env), dtype).item(), dtype=dtype)


def _stored(lanes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Lanes as they are in memory."""
    if dtype not in LOW:
        return lanes
    return lanes.to(dtype).view(torch.int16)


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


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
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
    return _reduced(v.name, v.dtype, *args)


def _reduced(name: str, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
    pair = torch.stack([tensor(a, dtype), tensor(b, dtype)])
    return scalar(REDUCTIONS[name].eval(pair, (0,), False).to(dtype))


def _equal(a: Scalar, b: Scalar) -> bool:
    return bool(a == b or (a != a and b != b))


def _overtakes(v: ir.Op, args: Sequence[Scalar]) -> bool:
    held, x = args
    return bool(held == held and (x != x or _BINARY[REDUCTIONS[v.name].extreme](x, held)))


def _stepped(v: ir.Op, args: Sequence[Scalar]) -> Scalar:
    row, (acc, x) = SCANS[v.name], args
    if row.index:
        return bool(x != x or _BINARY[f"{row.extreme}="](x, acc))
    pair = torch.stack([tensor(acc, v.dtype), tensor(x, v.dtype)])
    return scalar(row.eval(pair, 0)[-1].to(v.dtype))


def _joined(s: ir.Fold, a: Scalar, b: Scalar) -> Scalar:
    if s.table == "wins":
        return b if _BINARY[s.name](b, a) else a
    if s.table == "sign":
        return scalar(tensor(_BINARY[s.name](a, b), s.dtype))
    return _reduced(s.name, s.dtype, a, b)


_TABLES: dict[str, Callable[[ir.Op, Sequence[Scalar]], Scalar]] = {
    "op": _op_cell, "lanes": _op_cell, "combine": _combined, "overtakes": _overtakes, "step": _stepped,
    "near": _op_cell, "lanes_near": _op_cell,
}  # fmt: skip
_STATEMENTS: dict[type, Callable[[_Machine, Any, _Env], None]] = {
    ir.Let: _Machine._let, ir.Scratch: _Machine._scratch, ir.Pointer: _Machine._pointer, ir.Set: _Machine._set,
    ir.Store: _Machine._store, ir.Transpose: _Machine._transpose, ir.Widen: _Machine._widen,
    ir.Narrow: _Machine._narrow, ir.ScanBlock: _Machine._scan_block,
    ir.Stream: _Machine._stream, ir.StreamEnd: _Machine._nothing,
    ir.Prefetch: _Machine._nothing, ir.Do: _Machine._do, ir.Return: _Machine._return, ir.Fold: _Machine._fold,
}  # fmt: skip
_VALUES: dict[type, Callable[[_Machine, Any, _Env], Scalar]] = {
    ir.Name: _Machine._name, ir.Number: _Machine._number, ir.Slot: _Machine._slot, ir.Offset: _Machine._offset,
    ir.At: _Machine._at, ir.Address: _Machine._address, ir.Unary: _Machine._unary, ir.Binary: _Machine._binary,
    ir.Select: _Machine._select, ir.Cast: _Machine._cast, ir.Op: _Machine._op, ir.Convert: _Machine._convert,
    ir.Round: _Machine._round, ir.Decode: _Machine._decode, ir.Encode: _Machine._encode, ir.Bound: _Machine._bound,
    ir.Fma: _Machine._fma, ir.Gather: _Machine._gather, ir.Call: _Machine._call, ir.Load: _Machine._load,
    ir.First: _Machine._first, ir.Mask: _Machine._mask, ir.Half: _Machine._half, ir.Blend: _Machine._blend,
    ir.Splat: _Machine._splat,
}  # fmt: skip

__all__ = ["interpret", "run_functions"]
