"""A device from outside the package: NumPy arrays as torch's device "arrays", with a code generator and a runtime.

    python examples/numpy_device.py

Three things make a device for fuser: a `Target` (what lowering and scheduler need to know), a backend (from scheduled
loops to code) and a `Runtime` (allocate, encode, load, launch). The device itself is torch's `privateuseone`, renamed;
every operator that is not fused runs on the CPU on copies, so views are copies too. What has no spelling here, such as
scans, scatters and erf, is refused with a reason and runs so.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import backend_registration

import fuser
from fuser.codegen.program import ProgramBuilder
from fuser.errors import BackendError, Unsupported
from fuser.ir.loop_body import Row
from fuser.ir.sizes import INDIRECT, LOOP, Expr, Sym, expr, product
from fuser.kernel_spec import LaunchProgram
from fuser.lowering.graph import Lowered
from fuser.ops import REDUCTIONS
from fuser.scheduler.kernel_plan import KernelPlan
from fuser.scheduler.schedule import Schedule
from fuser.targets import Target

NAME = "arrays"  # torch makes `Tensor.arrays()` and `torch.arrays` of it
DTYPES = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int8: np.int8, torch.int16: np.int16,
    torch.int32: np.int32, torch.int64: np.int64, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip


# -- the device: row-major tensors whose memory is a NumPy array -------------------------------------------------------
def empty(size: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    """A new tensor on the device; its memory is the attribute `array`, in one dimension."""
    dtype = dtype or torch.get_default_dtype()
    made: Any = torch._C._acc.create_empty_tensor(list(size), dtype)
    made.array = np.empty(int(np.prod(size)), dtype=DTYPES[dtype])
    return made


def to_host(t: Any) -> torch.Tensor:
    """A CPU tensor with a copy of its elements."""
    return torch.from_numpy(t.array.copy()).reshape(t.shape)


def to_device(t: torch.Tensor) -> torch.Tensor:
    """A tensor on the device with a copy of the elements of a CPU tensor."""
    made: Any = empty(t.shape, t.dtype)
    made.array[:] = t.detach().contiguous().reshape(-1).numpy()
    return made


def _moved(value: Any, move: Any, here: str) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value) if value.device.type == here else value
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, move, here) for v in value)
    return torch.device("cpu") if isinstance(value, torch.device) and here == NAME else value


def _on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator, on the CPU: what it writes is copied back."""
    host, named = _moved(args, to_host, NAME), {k: _moved(v, to_host, NAME) for k, v in kwargs.items()}
    result = op(*host, **named)
    written = []
    for n, argument in enumerate(op._schema.arguments):
        given = args[n] if n < len(args) else kwargs.get(argument.name)
        copy = host[n] if n < len(host) else named.get(argument.name)
        if argument.is_write and isinstance(given, torch.Tensor):
            given.array[:] = copy.contiguous().reshape(-1).numpy()  # type: ignore[attr-defined,union-attr]
            written.append(given)
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return _moved(result, to_device, "cpu")


def _copy_from(source: torch.Tensor, target: Any, non_blocking: bool = False) -> torch.Tensor:
    host = to_host(source) if source.device.type == NAME else source
    if target.device.type == NAME:
        target.array[:] = host.to(target.dtype).expand(target.shape).contiguous().reshape(-1).numpy()
    else:
        target.copy_(host)
    return target


def make_device() -> list[torch.library.Library]:
    """Teach torch the device; it stays as long as the result is held."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    aten, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    aten.impl("empty_strided", lambda size, stride, *, dtype=None, **_: empty(size, dtype), "PrivateUse1")
    aten.impl("empty.memory_format", lambda size, *, dtype=None, **_: empty(size, dtype), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    rest.fallback(_on_cpu, "PrivateUse1")
    return [aten, rest]


# -- the backend: a plan becomes a Python function over whole arrays ---------------------------------------------------
SPELLING = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "fma": "{0} * {1} + {2}",
    "neg": "-{0}", "abs": "np.abs({0})", "sqrt": "np.sqrt({0})", "rsqrt": "1 / np.sqrt({0})",
    "reciprocal": "1 / {0}", "exp": "np.exp({0})", "exp_down": "np.exp({0})", "expm1": "np.expm1({0})",
    "log": "np.log({0})", "log1p": "np.log1p({0})", "tanh": "np.tanh({0})", "sin": "np.sin({0})",
    "cos": "np.cos({0})", "sigmoid": "1 / (1 + np.exp(-{0}))", "relu": "np.maximum({0}, 0)",
    "maximum": "np.maximum({0}, {1})", "minimum": "np.minimum({0}, {1})", "where": "np.where({0}, {1}, {2})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "logical_and": "({0} != 0) & ({1} != 0)", "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_not": "{0} == 0", "bitwise_not": "~{0}", "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}",
    "isnan": "np.isnan({0})", "floor": "np.floor({0})",
    "ceil": "np.ceil({0})", "trunc": "np.trunc({0})", "sign": "np.sign({0})",
}  # fmt: skip
FOLDS = {"sum": "np.sum", "prod": "np.prod", "max": "np.max", "min": "np.min", "any": "np.any", "all": "np.all"}
HEAD = '''\
import numpy as np


def load(array, place, held):
    """The elements at `place` where `held`; 0 elsewhere, and where there is no memory."""
    if array.size == 0 or held is False:
        return np.zeros(np.broadcast_shapes(np.shape(place), np.shape(held)), array.dtype)
    return array[place] if held is True else np.where(held, array[np.where(held, place, 0)], array.dtype.type(0))
'''


@dataclass(frozen=True)
class Source:
    """Python text, and how to launch it."""

    text: str
    program: LaunchProgram
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Kernel:
    """What the executor keeps of a compiled group; `library` goes to the runtime's `load`."""

    name: str
    program: LaunchProgram
    source: str
    library: dict[str, Any]
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]


class Writer:
    """Writes the function of one plan: m are the arrays by pointer, s the sizes by slot, f the floats."""

    def __init__(self, plan: KernelPlan, builder: ProgramBuilder) -> None:
        if plan.ordered is not None or any(REDUCTIONS[r.kind].index for r in plan.reductions):
            raise Unsupported("arrays have no scans, scatters or places of extremes here")
        self.plan, self.builder = plan, builder

    def size(self, e: Expr) -> str:
        """An index expression, in Python."""
        terms = []
        for monomial, c in self.builder.ctx.canon(e).terms:
            factors = [*map(self._atom, monomial)]
            terms.append(" * ".join(factors if factors and c == 1 else [str(c), *factors]))
        return f"({' + '.join(terms) or '0'})"

    def _atom(self, a: Any) -> str:
        if isinstance(a, Sym):
            if a.kind == INDIRECT:
                return f"t{a.name[1:]}"
            return a.name if a.kind == LOOP else f"s[{self.builder.slots[a]}]"
        x, y = map(self.size, a.args)
        signs = {"floordiv": f"({x} // {y})", "mod": f"({x} % {y})"}
        return signs.get(a.fn) or f"np.{a.fn}imum({x}, {y})"

    def function(self, name: str) -> str:
        """The function's text. It returns a status."""
        lines, rank = [], len(self.plan.axes)
        for d, a in enumerate(self.plan.axes):
            shape = ", ".join("-1" if k == d else "1" for k in range(rank))
            lines.append(f"{a.sym.name} = np.arange({self.size(a.size)}).reshape({shape})")
        lines.append(f"domain = ({''.join(f'{a.sym.name}.size, ' for a in self.plan.axes)})")
        for n, row in enumerate(self.plan.rows):
            lines += self.row(n, row)
        for s in self.plan.stores:
            lines.append(f"at, value = np.broadcast_arrays({self.size(s.address)}, t{s.row})")
            lines.append(f"m[{self.builder.pointers[s.buffer]}][at] = value")
        body = textwrap.indent("\n".join(lines), " " * 8)
        return f"\n\ndef {name}(m, s, f):\n    with np.errstate(all='ignore'):\n{body}\n    return 0\n"

    def row(self, n: int, row: Row) -> list[str]:
        """The statements of one row."""
        if row.dtype not in DTYPES:
            raise Unsupported(f"NumPy has no {row.dtype}")
        dtype, args = f"np.{np.dtype(DTYPES[row.dtype]).name}", [f"t{a}" for a in row.args]
        match row.op:
            case "load":
                buffer, (address,) = row.attr
                held = args[0] if args else "True"
                return [f"t{n} = load(m[{self.builder.pointers[buffer]}], {self.size(address)}, {held})"]
            case "const":
                value = row.attr if row.attr not in ("inf", "-inf", "nan") else f"float('{row.attr}')"
                return [f"t{n} = {dtype}({value})"]
            case "scalar":
                return [f"t{n} = {dtype}(f[{self.builder.floats[row.attr]}])"]
            case "index":
                return [f"t{n} = np.int64(1) * {self.size(row.attr)}"]
            case "to_dtype":
                test = " != 0" if row.dtype is torch.bool else f".astype({dtype})"
                return [f"t{n} = np.asarray({args[0]}){test}"]
            case "indirect":
                return self._indirect(n, row, args)
            case "reduced":
                return [f"t{n} = {self._reduced(row.attr)}.astype({dtype})"]
        if row.op not in SPELLING:
            raise Unsupported(f"NumPy has no {row.op}")
        return [f"t{n} = ({SPELLING[row.op].format(*args)}).astype({dtype})"]

    def _indirect(self, n: int, row: Row, args: list[str]) -> list[str]:
        size, checked = row.attr
        held = f" & {args[1]}" if len(args) > 1 else ""
        test = [f"if np.any(((t{n} < 0) | (t{n} >= {self.size(size)})){held}): return 1"] if checked else []
        inside = f"t{n} = np.where((t{n} >= 0) & (t{n} < {self.size(size)}), t{n}, 0)"
        return [f"t{n} = np.where({args[0]} < 0, {args[0]} + {self.size(size)}, {args[0]})", *test, inside]

    def _reduced(self, number: int) -> str:
        r = self.plan.reductions[number]
        spec, value = REDUCTIONS[r.kind], self.plan.rows[r.row].dtype
        acc = spec.accumulate(value)
        wide = torch.float64 if spec.adds and acc is torch.float32 else acc
        start = {float("inf"): "np.inf", -float("inf"): "-np.inf"}.get(spec.identity(acc), str(spec.identity(acc)))
        axes = tuple(d for d, a in enumerate(self.plan.axes) if a.reduced)
        given = f"np.broadcast_to(t{r.row}, domain).astype(np.{np.dtype(DTYPES[wide]).name})"
        more = "" if r.kind in ("any", "all") else f", initial={start}"
        return f"{FOLDS[r.kind]}({given}, axis={axes}, keepdims=True{more})"


class NumpyBackend:
    """From scheduled loops to Python."""

    name = "numpy"

    def can_fuse(self) -> str | None:
        """Always."""
        return None

    def codegen(self, lowered: Lowered, plan: Schedule, single: bool, comment: str) -> Source:
        """The text of all kernels, one step each."""
        if any(b.order not in (None, tuple(range(len(b.size)))) for b in plan.buffers):
            raise Unsupported("tensors of this device are row-major")
        builder = ProgramBuilder(lowered)
        builder.bind_inputs()
        builder.add_buffers(plan.buffers)
        text, steps = HEAD, []
        for number, kernel in enumerate(plan.plans):
            text += Writer(kernel, builder).function(f"k{number}_{kernel.name}")
            work = product(a.size for a in kernel.axes)
            steps.append(builder.step(f"k{number}_{kernel.name}", expr(1), work, expr(0)))
        return Source(text, builder.finish(steps, plan.buffers, single), len(steps), plan.reasons)

    def compile(self, source: Source) -> Kernel:
        """Run the text: its functions are the library."""
        library: dict[str, Any] = {}
        exec(compile(source.text, "<numpy kernel>", "exec"), library)
        name = source.program.steps[0].entry if source.program.steps else "empty"
        return Kernel(name, source.program, source.text, library, source.n_kernels, source.reasons)


# -- the runtime -------------------------------------------------------------------------------------------------------
class NumpyRuntime:
    """Allocates arrays and calls functions on them; counts launches."""

    launches = 0

    def allocate(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new tensor; strides are row-major ones, as the backend makes no others."""
        return empty(size, dtype)

    def encode(self, program: LaunchProgram) -> tuple[str, ...]:
        """The names of the steps. BackendError for a program that was made for another device."""
        if any(step.gpu is not None for step in program.steps):
            raise BackendError("a program for a GPU cannot be run by NumPy")
        return tuple(step.entry for step in program.steps)

    def load(self, library: dict[str, Any], entries: tuple[str, ...]) -> list[Any]:
        """The functions."""
        return [library[name] for name in entries]

    def launch(
        self, code: list[Any], encoded: Any, step: int, units: int, tensors: Sequence[Any], slots: Sequence[int],
        floats: Sequence[float],
    ) -> int:  # fmt: skip
        """One function, on whole arrays."""
        self.launches += 1
        return int(code[step]([t.array for t in tensors], slots, floats))


TARGET = Target(NAME, eager="cpu", dtypes=frozenset(DTYPES), split_units=0)


def install() -> tuple[NumpyRuntime, list[torch.library.Library]]:
    """Make the device, and have fuser compile for it."""
    device, runtime = make_device(), NumpyRuntime()
    fuser.register_fusion_backend(NAME, NumpyBackend(), TARGET, runtime)
    return runtime, device


def main() -> None:
    """Fuse a function for the device, show its kernel, and compare with the CPU."""
    runtime, _device = install()

    def normalised(x: torch.Tensor, scale: float) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return torch.tanh(centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)) * scale

    key = fuser.register_fusion(torch.fx.symbolic_trace(normalised))
    x = torch.randn(4, 1000)
    fused = fuser.fusion_handle(key)(to_device(x), 2.0)
    error = (to_host(fused) - normalised(x, 2.0)).abs().max().item()
    print(fuser.debug_get_fused_kernel_code(torch.fx.symbolic_trace(normalised), (to_device(x), 2.0)))
    print(f"on {fused.device}: {runtime.launches} launch(es), greatest difference from the CPU {error:.1e}")


if __name__ == "__main__":
    main()
