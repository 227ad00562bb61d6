"""A lowered graph → Triton source → binaries → what the launcher runs."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuser.codegen.program import ProgramBuilder
from fuser.cuda import codegen, driver, toolchain
from fuser.cuda.text import Param
from fuser.ir.sizes import ONE, Expr, expr, product
from fuser.kernel_spec import GpuLaunch, LaunchProgram
from fuser.lowering.context import LoweringContext
from fuser.lowering.graph import Lowered, TensorInput
from fuser.scheduler.plan import KernelPlan
from fuser.scheduler.schedule import Schedule

INT32 = 1 << 31  # addresses, counted in elements, that do not fit 32 bits


@dataclass(frozen=True)
class FusedKernel:
    """One compiled variant of a fusion group. `library` holds its kernels in the driver, `source` is their text."""

    name: str
    program: LaunchProgram
    source: str
    library: driver.Library
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Source:
    """Generated kernels and how to launch them; neither Triton nor a GPU was needed.

    The steps of `program` have no block sizes yet: those come with the binaries.
    """

    name: str
    text: str
    functions: tuple[codegen.Function, ...]
    program: LaunchProgram
    numerics: str
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]


Write = Callable[[KernelPlan, str, codegen.Context], codegen.Generated]


def generate(
    lowered: Lowered, plan: Schedule, single: bool, comment: str = "", write: Write = codegen.generate
) -> Source:
    """Triton for all kernels of a schedule; `write` makes the functions of one plan."""
    ctx = lowered.ctx
    unaligned = {f"in{i}" for i, r in enumerate(lowered.inputs) if isinstance(r, TensorInput) and not r.aligned}
    builder = ProgramBuilder(lowered)
    builder.bind_inputs()
    builder.add_buffers(plan.buffers)
    spans = _spans(lowered, plan)
    wide = any(ctx.hint(e) >= INT32 for e in spans)
    if not wide:
        for e in spans:
            if e.as_int() is None:
                builder.guard("lt", e, expr(INT32))
    context = codegen.Context(ctx.hint, lambda b: b not in unaligned, wide, _is_rough(lowered))
    functions: list[codegen.Function] = []
    for number, kernel in enumerate(plan.plans):
        made = write(kernel, f"k{number}_{kernel.name}", context)
        for p in made.partials:
            builder.add_buffer(p.name, p.dtype, (p.size,), (ONE,), False)
        for relation, a, b in made.guards:
            builder.guard(relation, a, b)
        functions += made.functions
    used = {p.value for f in functions for p in f.params if p.kind == "pointer" and p.aligned}
    builder.align({str(b) for b in used})
    text = codegen.source_text(functions, comment)
    launches = [GpuLaunch(0, 0, tuple(_argument(builder, p) for p in f.params)) for f in functions]
    steps = [builder.step(f.name, f.units, f.work, expr(0), g) for f, g in zip(functions, launches)]
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = re.sub(r"\W+", "_", f"{plan.plans[0].name if plan.plans else 'empty'}_{digest}")
    program = builder.finish(steps, plan.buffers, single)
    return Source(name, text, tuple(functions), program, ctx.numerics, len(plan.plans), plan.reasons)


def _is_rough(lowered: Lowered) -> bool:
    """Whether all floating results are halves, so that errors of a few units of float32 are rounded away."""
    outputs = {name for kind, name in lowered.outputs if kind == "buffer"}
    floats = [b.dtype for b in lowered.ctx.buffers if b.name in outputs and b.dtype.is_floating_point]
    return lowered.ctx.numerics == "fast" and bool(floats) and all(d.itemsize == 2 for d in floats)


def _spans(lowered: Lowered, plan: Schedule) -> list[Expr]:
    """Bounds of the addresses of all memory, in elements, each once."""
    ctx: LoweringContext = lowered.ctx
    tensors = [(r.size, r.stride) for r in lowered.inputs if isinstance(r, TensorInput)]
    tensors += [(b.size, b.stride) for b in plan.buffers]
    out: dict[Expr, None] = {}
    for size, stride in tensors:
        sizes = [ctx.canon(s) for s in size]
        strides = [ctx.canon(s) for s in stride]
        out[product(sizes)] = None
        if any(s.as_symbol() is not None and s.as_symbol().kind == "stride" for s in strides):  # type: ignore[union-attr]
            span = expr(0)
            for n, s in zip(sizes, strides):
                span = span + n * s
            out[span] = None
    return list(out)


def _argument(builder: ProgramBuilder, p: Param) -> tuple[str, object]:
    if isinstance(p.value, Expr):
        return p.kind, builder.code(p.value)
    return p.kind, builder.pointers[p.value] if p.kind == "pointer" else builder.floats[p.value]


def compile_source(source: Source) -> FusedKernel:
    """Compile for the current device, or take earlier binaries from disk, and load them. Raises CompileError."""
    capability = driver.capability(torch.cuda.current_device())
    entries = compile_entries(source, capability)
    library = driver.Library(toolchain.source_path(source.text), entries)
    program = with_entries(source.program, entries)
    return FusedKernel(source.name, program, source.text, library, source.n_kernels, source.reasons)


def compile_entries(source: Source, capability: int) -> tuple[driver.Entry, ...]:
    """The binaries of all kernels for devices of `capability`. No GPU is needed. Raises CompileError."""
    return tuple(
        toolchain.compile_kernel(toolchain.request(source.text, f, capability, source.numerics))
        for f in source.functions
    )


def with_entries(program: LaunchProgram, entries: tuple[driver.Entry, ...]) -> LaunchProgram:
    """`program` with the block sizes and the further arguments of its binaries."""
    steps = []
    for step, entry in zip(program.steps, entries, strict=True):
        assert step.gpu is not None
        params = (*step.gpu.params, *[("null", 0)] * entry.extra)
        gpu = GpuLaunch(entry.threads, entry.shared, params)
        steps.append(dataclasses.replace(step, entry=entry.name, gpu=gpu))
    return dataclasses.replace(program, steps=tuple(steps))
