"""Builds launch programs, for all devices: sizes become slots, facts become checks and guards."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field
from typing import Protocol

import torch

from fuser.ir.nodes import Buffer, strides_of
from fuser.ir.sizes import (
    INDIRECT,
    LOOP,
    STRIDE,
    Expr,
    Sym,
    expr,
    maximum,
    program,
    relation_program,
    substitute,
    symbols,
)
from fuser.kernel_spec import Bind, BufferPattern, Check, GpuLaunch, InputPattern, LaunchProgram, Step
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import NumberInput, TensorInput


def entry_name(number: int, name: str, comment: str) -> str:
    """The name of a kernel in code and in profiles; `number` is its number in its group.

    It ends in the first digits of the group's hash, which `debug.explain` shows; `comment` is the group's graph.
    """
    return f"k{number}_{name}_{hashlib.sha256(comment.encode()).hexdigest()[:4]}"


class Named(Protocol):
    """The properties of a buffer that a launch program refers to."""

    @property
    def name(self) -> str:
        """The buffer's name."""


@dataclass
class ProgramBuilder:
    """Assigns slots and pointers for one lowered graph."""

    lowered: Lowered
    slots: dict[Sym, int] = field(default_factory=dict)
    floats: dict[str, int] = field(default_factory=dict)
    pointers: dict[str, int] = field(default_factory=dict)
    patterns: list[InputPattern] = field(default_factory=list)
    guards: list[tuple[int, ...]] = field(default_factory=list)
    buffers: list[BufferPattern] = field(default_factory=list)

    @property
    def ctx(self) -> LoweringContext:
        """The lowering's symbols and facts."""
        return self.lowered.ctx

    def bind_inputs(self) -> None:
        """Add patterns for all arguments, and a guard for every fact about a symbol."""
        for number, record in enumerate(self.lowered.inputs):
            if isinstance(record, NumberInput):
                self._bind_number(record)
            else:
                self._bind_tensor(number, record)
        for s, e in sorted(self.ctx.facts.items()):
            if s in self.slots:
                self.guards.append(relation_program("eq", Expr({(s,): 1}), self.ctx.canon(e), self.slots))
        for relation, a, b in self.ctx.guards:
            self.guards.append(relation_program(relation, self.ctx.canon(a), self.ctx.canon(b), self.slots))

    def _bind_number(self, record: NumberInput) -> None:
        if record.kind == "float":
            self.floats[record.name] = len(self.floats)
            self.patterns.append(InputPattern("float", slot=self.floats[record.name]))
            return
        slot = self._slot(Sym(record.name, STRIDE))
        self.patterns.append(InputPattern(record.kind, slot=slot))

    def align(self, names: Collection[str]) -> None:
        """Require addresses divisible by 16 bytes for the tensor inputs `names`. Call it before `finish`."""
        for number, record in enumerate(self.lowered.inputs):
            if f"in{number}" in names and isinstance(record, TensorInput):
                self.patterns[number] = dataclasses.replace(self.patterns[number], aligned=True)

    def guard(self, relation: str, a: Expr, b: Expr) -> None:
        """Require that `a relation b` holds for the arguments ("eq", "ne", "lt", "le")."""
        a, b = self.ctx.canon(a), self.ctx.canon(b)
        if a.as_int() is not None and b.as_int() is not None:
            return
        code = relation_program(relation, a, b, self.slots)
        if code not in self.guards:
            self.guards.append(code)

    def _bind_tensor(self, number: int, record: TensorInput) -> None:
        self.pointers[f"in{number}"] = len(self.pointers)
        sizes = tuple(self._token(e) for e in record.size)
        strides = tuple(self._token(e) for e in record.checked or record.stride)
        every = record.checked is not None
        self.patterns.append(
            InputPattern("tensor", record.dtype, record.device_type, sizes, strides, every_stride=every)
        )

    def _token(self, e: Expr) -> Bind | Check:
        known = self.ctx.canon(e)
        if all(s in self.slots for s in symbols(known)):
            return Check(program(known, self.slots))
        own = e.as_symbol()
        if own is not None and own not in self.slots:
            return Bind(self._slot(own))
        # A symbol's fact may refer to a symbol that is bound later; a symbol without a slot is replaced by its fact.
        known = substitute(e, {s: self.ctx.canon(expr(s)) for s in symbols(e) if s not in self.slots})
        return Check(program(known, self.slots))

    def _slot(self, s: Sym) -> int:
        return self.slots.setdefault(s, len(self.slots))

    def add_buffer(
        self, name: str, dtype: torch.dtype, size: Sequence[Expr], stride: Sequence[Expr], output: bool,
        counters: bool = False,
    ) -> None:
        """Add a buffer for `name`, to be allocated at each launch."""
        self.pointers[name] = self.n_inputs + len(self.buffers)
        sizes, strides = (tuple(self.code(s) for s in dims) for dims in (size, stride))
        self.buffers.append(BufferPattern(dtype, sizes, strides, output, counters))

    def add_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Add memory for the scheduled buffers: outputs of the graph are torch's, the others are temporaries."""
        outputs = {name for kind, name in self.lowered.outputs if kind == "buffer"}
        for b in buffers:
            if b.name in outputs:
                size = self.ctx.result_sizes.get(b.name, b.size)
                self.add_buffer(b.name, b.dtype, size, result_strides(self.ctx, b), output=True)
            else:
                self.add_buffer(b.name, b.dtype, b.size, b.stride, output=False)

    @property
    def n_inputs(self) -> int:
        """Number of tensor inputs."""
        return sum(isinstance(r, TensorInput) for r in self.lowered.inputs)

    def code(self, e: Expr) -> tuple[int, ...]:
        """A size expression as a program over the slots."""
        return program(self.ctx.canon(e), self.slots)

    def step(self, entry: str, units: Expr, work: Expr, scratch: Expr, gpu: GpuLaunch | None = None) -> Step:
        """One step, which launches a kernel."""
        return Step(entry, self.code(units), self.code(work), self.code(scratch), gpu)

    def finish(self, steps: Sequence[Step], buffers: Iterable[Named], single: bool) -> LaunchProgram:
        """The complete program; `buffers` are the added buffers, in order."""
        at = {b.name: i for i, b in enumerate(buffers)}
        outputs = tuple((kind, at[name] if kind == "buffer" else name) for kind, name in self.lowered.outputs)
        return LaunchProgram(
            tuple(self.patterns), len(self.slots), len(self.floats), tuple(self.guards), tuple(self.buffers),
            tuple(steps), outputs, single,
        )  # fmt: skip


def result_strides(ctx: LoweringContext, b: Buffer) -> tuple[Expr, ...]:
    """The dense strides that torch gives to results, where a size of 0 counts as 1."""
    size = ctx.result_sizes.get(b.name, b.size)
    at_least_one = tuple(s if s.as_int() else maximum(s, 1) for s in size)
    return strides_of(at_least_one, ctx.result_orders.get(b.name, b.order))


__all__ = ["INDIRECT", "LOOP", "ProgramBuilder"]
