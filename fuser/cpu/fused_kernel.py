"""Generation and compilation of a kernel: lowered graph → C++ source → shared library → launch program."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from fuser import config, machines
from fuser.codegen.program import ProgramBuilder, entry_name
from fuser.cpu import codegen, toolchain
from fuser.cpu.checked import span
from fuser.ir.sizes import ONE, Expr
from fuser.kernel_spec import LaunchProgram
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import TensorInput
from fuser.machines import Machine
from fuser.scheduler.schedule import Schedule


@dataclass(frozen=True)
class FusedKernel:
    """One compiled variant of a fusion group. `library` is the path of its code, `source` its text."""

    name: str
    program: LaunchProgram
    source: str
    library: str
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Source:
    """Generated sources for `machine`, which are linked into one library, and the program that launches it."""

    name: str
    parts: tuple[str, ...]
    program: LaunchProgram
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]
    machine: Machine

    @property
    def text(self) -> str:
        """The code, all parts."""
        return "\n".join(self.parts)


def generate(lowered: Lowered, plan: Schedule, single: bool, comment: str = "") -> Source:
    """C++ for all kernels of a schedule, for the machine that `config.isa` names."""
    machine = machines.find(config.isa)
    functions, program = functions_for(lowered, plan, single, machine, comment)
    parts = codegen.source_parts(functions, comment, machine)
    digest = hashlib.sha256("".join(parts).encode()).hexdigest()[:8]
    name = re.sub(r"\W+", "_", f"{plan.plans[0].name if plan.plans else 'empty'}_{digest}")
    return Source(name, parts, program, len(plan.plans), plan.reasons, machine)


def functions_for(
    lowered: Lowered, plan: Schedule, single: bool, machine: Machine, comment: str = ""
) -> tuple[list[codegen.Function], LaunchProgram]:
    """The functions of a schedule's kernels as vector IR, and the program that launches them, a step for each."""
    builder = ProgramBuilder(lowered)
    builder.bind_inputs()
    builder.add_buffers(plan.buffers)
    counts = _counts(lowered, plan) if config.check_bounds else None
    bindings = codegen.Bindings(builder.pointers, builder.slots, builder.floats, machine, counts)
    functions: list[codegen.Function] = []
    for made in _generated(plan, bindings, comment):
        for p in made.partials:
            builder.add_buffer(p.name, p.dtype, (p.size,), (ONE,), output=False)
        functions += made.functions
    steps = [builder.step(f.name, f.units, f.work, f.scratch) for f in functions]
    return functions, builder.finish(steps, plan.buffers, single)


def _generated(plan: Schedule, bindings: codegen.Bindings, comment: str) -> Iterator[codegen.Generated]:
    """The functions of each plan, or of a joined pair of plans."""
    taken = False  # whether this plan was joined with the plan before
    for number, kernel in enumerate(plan.plans):
        if taken:
            taken = False
            continue
        both, joined = None, plan.joined.get(number)
        if joined is not None:
            both = codegen.generate_joined(joined, entry_name(number, joined.plan.name, comment), bindings)
        taken = both is not None
        yield both or codegen.generate(kernel, entry_name(number, kernel.name, comment), bindings)


def _counts(lowered: Lowered, plan: Schedule) -> dict[str, Expr]:
    """The elements of memory that each input and buffer spans."""
    canon, out = lowered.ctx.canon, {b.name: span(b.size, b.stride) for b in plan.buffers}
    for number, record in enumerate(lowered.inputs):
        if isinstance(record, TensorInput):
            out[f"in{number}"] = span(tuple(map(canon, record.size)), tuple(map(canon, record.stride)))
    return out


def compile_source(source: Source) -> FusedKernel:
    """Compile a source, or take the library from disk. Raises CompileError."""
    entries = [step.entry for step in source.program.steps]
    library = toolchain.compile_library(source.parts, source.machine, entries)
    return FusedKernel(source.name, source.program, source.text, library, source.n_kernels, source.reasons)
