"""Generation and compilation of a kernel: lowered graph → Triton source → binaries → launch program."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType

import torch

from fuser import notices
from fuser.codegen.program import ProgramBuilder, entry_name
from fuser.cuda import codegen, driver, tiles, toolchain
from fuser.cuda.batch import batched
from fuser.cuda.binary import usage
from fuser.cuda.text import Param
from fuser.errors import CompileError
from fuser.ir.sizes import ONE, Expr, expr, product
from fuser.kernel_spec import GpuLaunch, LaunchProgram, Step
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import TensorInput
from fuser.ops import SCANS
from fuser.reasons import because
from fuser.scheduler.kernel_plan import KernelPlan
from fuser.scheduler.schedule import Schedule

_log = logging.getLogger(__name__)
INT32 = 1 << 31  # elements; offsets from this on do not fit 32 bits


@dataclass(frozen=True)
class FusedKernel:
    """One compiled variant of a fusion group. `library` holds its kernels in the driver; `source` is their text.

    `made_of` is the source whose kernels fit devices of `capability`.
    """

    name: str
    program: LaunchProgram
    source: str
    library: driver.Library
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]
    made_of: Source
    capability: int


@dataclass(frozen=True)
class Source:
    """Generated kernels and the program that launches them; no Triton or GPU is needed.

    The steps of `program` have no block sizes yet: those come with the binaries. `lasting`: any process would choose
    the same tiles, so plans may keep the kernel.
    """

    name: str
    text: str
    functions: tuple[codegen.Function, ...]
    program: LaunchProgram
    numerics: str
    n_kernels: int
    reasons: tuple[tuple[str, str, str], ...]
    owners: tuple[int, ...] = ()  # the number of its plan for each function
    # Generates the source with smaller tiles, or with a variant of the tables' tiles; None if there are no others.
    again: Callable[[Levels, tiles.Variant | None], Source] | None = field(default=None, compare=False)
    lasting: bool = True


TABLES = tiles.Variant()
Levels = Mapping[int, int]  # number of a plan → how many times its tiles are halved
Write = Callable[[KernelPlan, str, codegen.Context], codegen.Generated]


def generate(
    lowered: Lowered, plan: Schedule, single: bool, comment: str = "", write: Write = codegen.generate,
    levels: Levels = MappingProxyType({}), variant: tiles.Variant = TABLES,
) -> Source:  # fmt: skip
    """Triton for all kernels of a schedule; `write` generates the functions of one plan."""
    ctx = lowered.ctx
    tensors = [(f"in{i}", r) for i, r in enumerate(lowered.inputs) if isinstance(r, TensorInput)]
    unaligned = {name for name, r in tensors if not r.aligned or not r.size}  # a single number may be at any address
    builder = ProgramBuilder(lowered)
    builder.bind_inputs()
    builder.add_buffers(plan.buffers)
    wide = is_wide(builder, [(b.size, b.stride) for b in plan.buffers])
    context = codegen.Context(ctx.hint, lambda b: b not in unaligned, wide, _is_rough(lowered), variant=variant)
    functions: list[codegen.Function] = []
    owners: list[int] = []
    for number, made in _written(plan, context, write, levels, comment):
        for p in made.partials:
            builder.add_buffer(p.name, p.dtype, (p.size,), (ONE,), output=False, counters=p.counters)
        for relation, a, b in made.guards:
            builder.guard(relation, a, b)
        functions += made.functions
        owners += [number] * len(made.functions)
    used = {p.value for f in functions for p in f.params if p.kind == "pointer" and p.divisor > 1}
    builder.align({str(b) for b in used})
    text = codegen.source_text(functions, comment)
    steps = launches(builder, functions)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = re.sub(r"\W+", "_", f"{plan.plans[0].name if plan.plans else 'empty'}_{digest}")
    program = builder.finish(steps, plan.buffers, single)

    def again(levels: Levels, other: tiles.Variant | None = None) -> Source:
        return generate(lowered, plan, single, comment, write, levels, variant if other is None else other)

    return Source(
        name, text, tuple(functions), program, ctx.numerics, len(plan.plans), plan.reasons, tuple(owners), again
    )


def _written(
    plan: Schedule, context: codegen.Context, write: Write, levels: Levels, comment: str
) -> Iterator[tuple[int, codegen.Generated]]:
    """The functions of each plan with its number; those of a joined pair have the number of the first."""
    both: codegen.Generated | None = None
    for number, kernel in enumerate(plan.plans):
        if both is not None:
            both = None
            continue
        if _does_nothing(kernel):
            continue
        later = frozenset(name for p in plan.plans[number + 1 :] for name, _ in p.buffers)
        own = dataclasses.replace(context, smaller=levels.get(number, 0), later=later)
        joined = plan.joined.get(number)
        if joined is not None:
            both = codegen.generate_joined(joined, entry_name(number, joined.plan.name, comment), own)
            own = dataclasses.replace(own, smaller=max(own.smaller - tiles.WALK_LEVELS, 0))
        yield number, both or write(kernel, entry_name(number, kernel.name, comment), own)


def _does_nothing(plan: KernelPlan) -> bool:
    """Whether a kernel computes no element for any sizes. Addresses along an axis of size 0 vary along no axis."""
    scanned = plan.ordered is not None and plan.ordered.how in SCANS
    return any(a.size.as_int() == 0 for a in plan.axes if scanned or not a.reduced)


def _is_rough(lowered: Lowered) -> bool:
    """Whether all floating results are 16-bit floats, so that errors of a few float32 units are rounded away."""
    outputs = {name for kind, name in lowered.outputs if kind == "buffer"}
    floats = [b.dtype for b in lowered.ctx.buffers if b.name in outputs and b.dtype.is_floating_point]
    return lowered.ctx.numerics == "fast" and bool(floats) and all(d.itemsize == 2 for d in floats)


def is_wide(builder: ProgramBuilder, made: Sequence[tuple[Sequence[Expr], Sequence[Expr]]]) -> bool:
    """Whether addresses of the inputs, and of the sizes and strides `made`, need 64 bits; the answer is guarded."""
    spans = _spans(builder.lowered, made)
    if any(builder.ctx.hint(e) >= INT32 for e in spans):
        return True
    for e in spans:
        if e.as_int() is None:
            builder.guard("lt", e, expr(INT32))
    return False


def _spans(lowered: Lowered, made: Sequence[tuple[Sequence[Expr], Sequence[Expr]]]) -> list[Expr]:
    """Distinct upper bounds of the addresses of all tensors, in elements."""
    ctx: LoweringContext = lowered.ctx
    tensors: list[tuple[Sequence[Expr], Sequence[Expr]]] = [
        (r.size, r.stride) for r in lowered.inputs if isinstance(r, TensorInput)
    ]
    tensors += made
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


def launches(builder: ProgramBuilder, functions: Sequence[codegen.Function]) -> list[Step]:
    """A step of the launch program for each function, in order."""
    gpu = [GpuLaunch(0, 0, tuple(_argument(builder, p) for p in f.params)) for f in functions]
    return [builder.step(f.name, f.units, f.work, expr(0), g) for f, g in zip(functions, gpu)]


def _argument(builder: ProgramBuilder, p: Param) -> tuple[str, object]:
    if isinstance(p.value, Expr):
        return p.kind, builder.code(p.value)
    return p.kind, builder.pointers[p.value] if p.kind == "pointer" else builder.floats[p.value]


def compile_source(source: Source) -> FusedKernel:
    """Compile a source for the current device, or take binaries from disk, and load them. Raises CompileError."""
    capability = driver.capability(torch.cuda.current_device())
    lasting = source.lasting
    source, entries = fitting(source, capability)
    made_of = dataclasses.replace(source, again=None, lasting=lasting)
    more = functools.partial(compile_batched, made_of, capability)
    library = driver.Library(toolchain.source_path(source.text), entries, more)
    program = with_entries(source.program, entries)
    return FusedKernel(
        source.name, program, source.text, library, source.n_kernels, source.reasons, made_of, capability
    )


def compile_entries(source: Source, capability: int) -> tuple[driver.Entry, ...]:
    """The binaries of all kernels for devices of `capability`. No GPU is needed. Raises CompileError."""
    asked = [toolchain.request(source.text, f, capability, source.numerics) for f in source.functions]
    return toolchain.compile_all(asked)


def batched_source(source: Source) -> tuple[str, tuple[codegen.Function, ...]]:
    """The text and functions of the kernels for many argument sets."""
    return _batched_text(source.functions, source.name)


def _batched_text(functions: Sequence[codegen.Function], name: str) -> tuple[str, tuple[codegen.Function, ...]]:
    made = tuple(map(batched, functions))
    return codegen.source_text(made, name), made


def compile_batched(source: Source, capability: int) -> tuple[driver.Entry, ...]:
    """The binaries of all kernels for many argument sets, compiled at the first request. Raises CompileError."""
    return batched_entries(source.functions, source.name, source.numerics, capability)


def batched_entries(
    functions: Sequence[codegen.Function], name: str, numerics: str, capability: int
) -> tuple[driver.Entry, ...]:
    """The binaries for many argument sets of the functions of the source `name`. Raises CompileError."""
    text, made = _batched_text(functions, name)
    entries = toolchain.compile_all([toolchain.request(text, f, capability, numerics) for f in made])
    for e in entries:
        if e.shared > SHARED.get(capability, LEAST_SHARED):
            raise CompileError(f"kernel {e.name} takes {e.shared} bytes of shared memory")
    return entries


SHARED = {70: 98304, 75: 65536, 80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}
LEAST_SHARED = 101376  # bytes that a block may take on all other devices
MOST_STACK = 64  # most bytes of a thread's stack, to which registers spill
MOST_RETRIES = 3


def why_unfit(entry: driver.Entry, capability: int) -> str | None:
    """The reason why a binary does not run well, or not at all, on devices of `capability`; None if it fits."""
    most = SHARED.get(capability, LEAST_SHARED)
    if entry.shared > most:
        return because("compiler", f"takes {entry.shared} bytes of shared memory, where a block has {most}")
    stack = usage(entry.cubin).stack
    return f"spills registers to {stack} bytes of stack" if stack > MOST_STACK else None


def fitting(source: Source, capability: int) -> tuple[Source, tuple[driver.Entry, ...]]:
    """The source and its binaries, with smaller tiles for kernels that do not fit the device. Raises CompileError."""
    levels: dict[int, int] = {}
    tried: list[tuple[tuple[int, int], Source, tuple[driver.Entry, ...]]] = []
    for _ in range(MOST_RETRIES + 1):
        entries = compile_entries(source, capability)
        reasons = [why_unfit(e, capability) for e in entries]
        over = sum(e.shared > SHARED.get(capability, LEAST_SHARED) for e in entries)
        tried.append(((over, sum(usage(e.cubin).stack for e in entries)), source, entries))
        bad = {n: (e.name, why) for n, e, why in zip(source.owners, entries, reasons) if why is not None}
        if not bad or source.again is None:
            break
        for name, why in bad.values():
            sentence = f"kernel {name} of {source.name} {why}: smaller tiles are tried"
            if notices.is_first(sentence):
                _log.info("%s", sentence)
        levels = {**levels, **{n: levels.get(n, 0) + 1 for n in bad}}
        source = source.again(levels, None)
    (over, _), source, entries = min(tried, key=lambda t: t[0])
    if over:
        name, why = next((e.name, w) for e in entries if (w := why_unfit(e, capability)) is not None)
        raise CompileError(f"kernel {name} of {source.name} {why}, with the smallest tiles too")
    return source, entries


def with_entries(program: LaunchProgram, entries: tuple[driver.Entry, ...]) -> LaunchProgram:
    """`program` with the block sizes and null arguments of its binaries."""
    steps = []
    for step, entry in zip(program.steps, entries, strict=True):
        assert step.gpu is not None
        params = (*step.gpu.params, *[("null", 0)] * entry.extra)
        gpu = GpuLaunch(entry.threads, entry.shared, params)
        steps.append(dataclasses.replace(step, entry=entry.name, gpu=gpu))
    return dataclasses.replace(program, steps=tuple(steps))
