"""What a routine takes and returns: one list of arguments gives its C++ names for them, and its launch program.

A size or stride that is a name is bound when the name first appears, and has to be equal wherever it appears again.
The C++ of the routine has a constant of that name, and a pointer of each tensor's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.cpu.dots import DTYPES, ELEMENTS
from fuser.ir.sizes import STRIDE, Expr, IntLike, Program, Sym, expr, program
from fuser.kernel_spec import Bind, BufferPattern, Check, InputPattern, LaunchProgram, Step
from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine
from fuser.ops import CPP_TYPEDEFS, helpers_in, prelude_for

Dim = IntLike | str


@dataclass(frozen=True)
class Routine:
    """The C++ of helpers and entry, without the op table's typedefs and helpers, and its launch program."""

    text: str
    program: LaunchProgram
    machine: Machine

    @property
    def source(self) -> str:
        """The complete source."""
        return f"{CPP_TYPEDEFS}{prelude_for(helpers_in(self.text), self.machine)}{self.text}"


class Signature:
    """The arguments of a routine in order, then the tensors that it makes."""

    def __init__(self) -> None:
        self._slots: dict[Sym, int] = {}
        self._inputs: list[InputPattern] = []
        self._buffers: list[BufferPattern] = []
        self._outputs: list[tuple[str, int]] = []
        self._floats = self._tensors = 0
        self._lines: list[str] = []

    def __getitem__(self, name: str) -> Expr:
        """The number that is bound to a name."""
        return expr(Sym(name, STRIDE))

    def integers(self, *names: str) -> None:
        """Take an integer for each name."""
        first = len(self._slots)
        self._inputs += [InputPattern("int", slot=self._bind(name)) for name in names]
        self._declare(first)

    def float(self, name: str) -> None:
        """Take a number, which is rounded to float32."""
        self._inputs.append(InputPattern("float", slot=self._floats))
        self._lines.append(f"const float {name} = (float)f[{self._floats}];")
        self._floats += 1

    def tensor(
        self, name: str, dtype: torch.dtype, sizes: Sequence[Dim], strides: Sequence[Dim] | None = None,
        written: bool = False,
    ) -> None:  # fmt: skip
        """Take a tensor; without strides, a contiguous one. One that is `written` is returned."""
        first = len(self._slots)
        own = tuple(map(self._dim, sizes))
        steps = tuple(map(self._dim, self._contiguous(sizes) if strides is None else strides))
        if written:
            self._outputs.append(("input", len(self._inputs)))
        self._inputs.append(InputPattern("tensor", dtype, "cpu", own, steps))
        self._declare(first)
        self._point(name, dtype, written)

    def result(self, name: str, dtype: torch.dtype, sizes: Sequence[Dim], strides: Sequence[Dim] | None = None) -> None:
        """Make a tensor, which is returned."""
        steps = self._contiguous(sizes) if strides is None else strides
        own, along = (tuple(self._code(self._expr(d)) for d in dims) for dims in (sizes, steps))
        self._outputs.append(("buffer", len(self._buffers)))
        self._buffers.append(BufferPattern(dtype, own, along, output=True))
        self._point(name, dtype, written=True)

    def opening(self, entry: str) -> str:
        """The first lines of the C++ function: its head, and a constant or pointer of each name."""
        head = (
            f'extern "C" void {entry}(\n    char* const* ptrs, const i64* s, const double* f, i64 begin, i64 end,'
            " char* scratch, i32* status) {\n"
        )
        return head + "".join(f"  {line}\n" for line in self._lines)

    def program(self, entry: str, units: Expr, work: Expr, scratch: Expr) -> LaunchProgram:
        """The launch program of one step; `work` is in multiplications, `scratch` in bytes per thread."""
        step = Step(entry, self._code(units), self._code(work), self._code(scratch))
        counts, outputs = (len(self._slots), self._floats), tuple(self._outputs)
        return LaunchProgram(
            tuple(self._inputs), *counts, (), tuple(self._buffers), (step,), outputs, len(outputs) == 1
        )

    def _bind(self, name: str) -> int:
        """The slot of a new name."""
        return self._slots.setdefault(Sym(name, STRIDE), len(self._slots))

    def _dim(self, dim: Dim) -> Bind | Check:
        if isinstance(dim, str) and Sym(dim, STRIDE) not in self._slots:
            return Bind(self._bind(dim))
        return Check(self._code(self._expr(dim)))

    def _expr(self, dim: Dim) -> Expr:
        return self[dim] if isinstance(dim, str) else expr(dim)

    def _code(self, e: Expr) -> Program:
        return program(e, self._slots)

    def _contiguous(self, sizes: Sequence[Dim]) -> list[Expr]:
        strides = [expr(1)]
        for size in reversed(sizes[1:]):
            strides.insert(0, strides[0] * self._expr(size))
        return strides

    def _declare(self, first: int) -> None:
        """Declare the names bound from slot `first` on."""
        if new := list(self._slots.items())[first:]:
            self._lines.append(f"const i64 {', '.join(f'{s.name} = s[{n}]' for s, n in new)};")

    def _point(self, name: str, dtype: torch.dtype, written: bool) -> None:
        kind = f"{'' if written else 'const '}{ELEMENTS[DTYPES[dtype]]}*"
        self._lines.append(f"{kind} const {name} = ({kind})ptrs[{self._tensors}];")
        self._tensors += 1


__all__ = ["Dim", "Routine", "Signature"]
