"""An interpreter of vector IR, statement by statement: the reference for passes over it and for its C++.

Loops run sequentially, whatever their heads say; lanes of explicit vectors are tensors. Elementary functions are
torch's, so a kernel's results may differ in the last bits. An out-of-bounds access, a variable without a value and an
unknown helper are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from fuser.cpu.records import Function
from fuser.cpu.transposes import TILE_STRIDE
from fuser.cpu.vir import nodes as ir
from fuser.debug.vector_memory import (
    Scalar,
    bits_to_float,
    converted,
    float_to_bits,
    scalar,
    scratch,
    tensor,
    whole,
)
from fuser.debug.vector_values import BINARY, Cell, Env, Values, reduced, stepped
from fuser.ir.sizes import run_program
from fuser.kernel_spec import LaunchProgram
from fuser.ops import LOW, SCANS
from fuser.ops.random import philox_uniform
from fuser.runtime.python_launcher import match

_ZEROS = whole(np.zeros(8192, np.uint8))


def interpret(
    kernel: ir.Kernel, pointers: Sequence[np.ndarray[Any, Any]], slots: Sequence[int], floats: Sequence[float],
    begin: int, end: int, scratch_bytes: int = 0, lanes: int = 16, macros: Collection[str] = (),
) -> int:  # fmt: skip
    """Run units [begin, end) of a kernel on arrays, which it changes; returns its status.

    16-bit floats are arrays of uint16. `lanes`: floats in a vector. `macros`: the macros whose `Only` blocks run.
    """
    status = np.zeros(1, np.int32)
    given: dict[str, Scalar] = {
        "begin": begin, "end": end, "status": whole(status).as_kind("i32"), "FUSER_LANES": lanes,
        "scratch": whole(np.full(scratch_bytes, 255, np.uint8)), "fuser_zeros": _ZEROS,
    }  # fmt: skip
    machine = _Machine(list(map(whole, pointers)), slots, floats, lanes, macros)
    env = Env(None)
    env.own = {name: Cell("", value) for name, value in given.items()}
    machine.body(kernel.body, env)
    return int(status[0])


def run_functions(
    functions: Sequence[Function], program: LaunchProgram, args: Sequence[Any], macros: Collection[str] = ()
) -> list[torch.Tensor]:  # fmt: skip
    """The results of a launch program whose steps are `functions`. IndexError if a step reports a wrong index."""
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
    """A tensor's memory from its first to its last element."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
    flat = t.detach().as_strided((span,), (1,))
    return np.asarray((flat.view(torch.int16) if t.dtype in LOW else flat).numpy())


class _Leave(Exception):
    """A return before a function's last statement."""


class _Machine(Values):
    """Runs statements."""

    # -- statements ----------------------------------------------------------------------------------------------------
    def body(self, statements: Sequence[ir.Statement], env: Env) -> None:
        """Run statements in order."""
        taken = True  # whether the block before ran, for an `Else` or `Otherwise`
        try:
            for s in statements:
                if isinstance(s, ir.Block):
                    taken = self._block(s.head, s.body, env, taken)
                else:
                    _STATEMENTS[type(s)](self, s, env)
        except _Leave:
            if env.outer is not None:
                raise

    def _let(self, s: ir.Let, env: Env) -> None:
        env.let(s.kind, s.name, None if s.value is None else self.value(s.value, env))

    def _scratch(self, s: ir.Scratch, env: Env) -> None:
        env.own[s.name] = Cell("", scratch(s.kind, s.sizes, s.zero))

    def _pointer(self, s: ir.Pointer, env: Env) -> None:
        env.own[s.name] = Cell("", self.value(s.source, env).as_kind(s.kind))

    def _set(self, s: ir.Set, env: Env) -> None:
        value, target = self.value(s.value, env), s.target
        if isinstance(target, ir.Name):
            cell = env.cell(target.name)
            cell.value = converted(cell.kind, BINARY[s.sign](cell.value, value) if s.sign else value)
            return
        place = self.place(target, env)
        place.write(BINARY[s.sign](place.read(), value) if s.sign else value)

    def _store(self, s: ir.Store, env: Env) -> None:
        to = self.value(s.address, env)
        values = [self.value(v, env) for v in s.values]
        lanes = torch.stack(values, 1).reshape(-1) if len(values) > 1 else values[0]
        mask = self.mask(s.mask, env, len(lanes))
        stored = lanes if isinstance(s.of, int) else _stored(lanes, s.of)
        for n in range(len(lanes)):
            if mask[n]:
                to.moved(n).write(stored[n].item())

    def _transpose(self, s: ir.Transpose, env: Env) -> None:
        kind = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[s.size]
        source, to = (self.value(v, env).as_kind(kind) for v in (s.source, s.to))
        step, columns = self.value(s.step, env), self.value(s.columns, env)
        rows = step if s.rows is None else self.value(s.rows, env)
        for c in range(columns):
            for r in range(rows):
                to.moved(r * TILE_STRIDE + c).write(source.moved(c * step + r).read())

    def _widen(self, s: ir.Widen, env: Env) -> None:
        to, source, count = (self.value(v, env) for v in (s.to, s.source, s.count))
        low = 0 if s.low is None else self.value(s.low, env)
        high = count if s.high is None else self.value(s.high, env)
        for n in range(count):
            to.moved(n).write(bits_to_float(source.moved(n).read(), torch.float16) if low <= n < high else 0.0)

    def _narrow(self, s: ir.Narrow, env: Env) -> None:
        to, source, count = (self.value(v, env) for v in (s.to, s.source, s.count))
        for n in range(count):
            to.moved(n).write(float_to_bits(source.moved(n).read(), torch.float16))

    def _draw(self, s: ir.Draw, env: Env) -> None:
        to, seed, stream, place, count = (self.value(v, env) for v in (s.to, s.seed, s.stream, s.place, s.count))
        index = torch.arange(place, place + count)
        index = index if s.word == 2 else (index & ~1) + s.word
        numbers = philox_uniform(torch.tensor(int(seed)), torch.tensor(int(stream)), index)
        for n, number in enumerate(numbers.tolist()):
            to.moved(n).write(number)

    def _scan_block(self, s: ir.ScanBlock, env: Env) -> None:
        row, source, to = SCANS[s.how], self.value(s.source, env), s.to and self.value(s.to, env)
        places = s.places and self.value(s.places, env)
        acc, place = env.cell(s.acc.name), env.cell(s.place.name) if s.place else None
        dtype = {"float": torch.float32, "double": torch.float64}.get(acc.kind, torch.int64)
        for n in range(self.value(s.count, env)):
            x = source.moved(n).read()
            if place is None:
                acc.value = converted(acc.kind, stepped(ir.Op("step", s.how, dtype, ()), (acc.value, x)))
            elif x != x or (acc.value == acc.value and BINARY[f"{row.extreme}="](x, acc.value)):
                acc.value, place.value = x, self.value(s.base or ir.Number(0), env) + n
            if to:
                to.moved(n).write(acc.value)
            if places and place:
                places.moved(n).write(place.value)

    def _stream(self, s: ir.Stream, env: Env) -> None:
        to, source, count = (self.value(v, env) for v in (s.to, s.source, s.count))
        to.as_kind("u8").span(0, count)[:] = source.as_kind("u8").span(0, count)

    def _nothing(self, s: ir.Statement, env: Env) -> None:
        """Ignore a hint."""

    def _do(self, s: ir.Do, env: Env) -> None:
        self.value(s.call, env)

    def _return(self, s: ir.Return, env: Env) -> None:
        raise _Leave

    def _fold(self, s: ir.Fold, env: Env) -> None:
        array = env.cell(s.array).value
        width = min(s.vector_bytes, s.lanes * s.folded.itemsize) // s.folded.itemsize
        held = [array.element(n).read() for n in range(s.lanes)]
        held = held if s.total is None else list(map(np.float64, held))
        vectors = [held[n : n + width] for n in range(0, s.lanes, width)]
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [[_joined(s, a, b) for a, b in zip(vectors[i], vectors[i + half])] for i in range(half)]
        (lanes,), by = vectors, width
        while by > 1:
            by //= 2
            lanes = [_joined(s, a, lanes[(i + by) % width]) for i, a in enumerate(lanes)]
        if s.total is None:
            array.element(0).write(lanes[0])
        else:
            assert isinstance(s.total, ir.Name)
            env.cell(s.total.name).value += lanes[0]

    # -- blocks --------------------------------------------------------------------------------------------------------
    def _block(self, head: ir.Head, body: Sequence[ir.Statement], env: Env, before: bool) -> bool:
        """Run a block; returns whether its test held."""
        match head:
            case ir.Plain() | ir.Staged():
                self.body(body, Env(env))
            case ir.For():
                self._for(head, body, env)
            case ir.Units():
                self._units(head, body, env)
            case ir.Segments():
                self._segments(head, body, env)
            case ir.While():
                while self.value(head.test, env):
                    self.body(body, Env(env))
            case ir.If():
                return self._if(bool(self.value(head.test, env)), body, env)
            case ir.Only():
                return self._if(head.macro in self.macros, body, env)
            case ir.Else() | ir.Otherwise():
                self._if(not before, body, env)
            case ir.Routine():
                env.own[head.name] = Cell("", self._routine(head, body, env))
        return True

    def _if(self, holds: bool, body: Sequence[ir.Statement], env: Env) -> bool:
        if holds:
            self.body(body, Env(env))
        return holds

    def _for(self, head: ir.For, body: Sequence[ir.Statement], env: Env) -> None:
        inner = Env(env)
        if head.low is not None:
            inner.let("i64", head.name, self.value(head.low, env))
        counter, step = inner.cell(head.name), self.value(head.step, env)
        while counter.value + (step - 1 if head.whole else 0) < self.value(head.high, inner):
            self.body(body, Env(inner))
            counter.value += step

    def _units(self, head: ir.Units, body: Sequence[ir.Statement], env: Env) -> None:
        sizes = [(name, self.value(size, env)) for name, size in head.digits]
        for u in range(self.value(ir.Name("begin"), env), self.value(ir.Name("end"), env)):
            inner, rest = Env(env), u
            inner.let("i64", "u", u)
            for at, (name, size) in reversed(list(enumerate(sizes))):
                inner.let("i64", name, rest % size if at else rest)
                rest = rest // size if at else rest
            self.body(body, inner)

    def _segments(self, head: ir.Segments, body: Sequence[ir.Statement], env: Env) -> None:
        start, high = self.value(head.low, env), self.value(head.high, env)
        while start < high:
            to = min(start + head.longest, high)
            for cut in head.cuts:
                at = self.value(cut, env)
                to = at if start < at < to else to
            inner = Env(env)
            inner.let("i64", "from", start)
            inner.let("i64", "to", to)
            self.body(body, inner)
            start = to

    def _routine(self, head: ir.Routine, body: Sequence[ir.Statement], env: Env) -> Callable[..., None]:
        def run(caller: Env, args: Sequence[ir.Value]) -> None:
            inner = Env(env)
            for (kind, name), arg in zip(head.params, args, strict=True):
                if kind.endswith("&"):
                    assert isinstance(arg, ir.Name)
                    inner.own[name] = caller.cell(arg.name)
                else:
                    inner.let(kind, name, self.value(arg, caller))
            self.body(body, inner)

        return run


def _stored(lanes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Lanes as they are stored in memory."""
    if dtype not in LOW:
        return lanes
    return lanes.to(dtype).view(torch.int16)


def _joined(s: ir.Fold, a: Scalar, b: Scalar) -> Scalar:
    if s.table == "wins":
        return b if BINARY[s.name](b, a) else a
    if s.table == "sign":
        return scalar(tensor(BINARY[s.name](a, b), s.folded))
    return reduced(s.name, s.folded, a, b)


_STATEMENTS: dict[type, Callable[[_Machine, Any, Env], None]] = {
    ir.Let: _Machine._let, ir.Scratch: _Machine._scratch, ir.Pointer: _Machine._pointer, ir.Set: _Machine._set,
    ir.Store: _Machine._store, ir.Transpose: _Machine._transpose, ir.Widen: _Machine._widen,
    ir.Narrow: _Machine._narrow, ir.Draw: _Machine._draw, ir.ScanBlock: _Machine._scan_block,
    ir.Stream: _Machine._stream, ir.StreamEnd: _Machine._nothing,
    ir.Prefetch: _Machine._nothing, ir.Do: _Machine._do, ir.Return: _Machine._return, ir.Fold: _Machine._fold,
}  # fmt: skip
__all__ = ["interpret", "run_functions"]
