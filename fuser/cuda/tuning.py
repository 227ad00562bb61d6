"""Tiles by measurement, under `max_autotune`: variants of a kernel race its default tiles, and the winner is kept.

Only parameters that change no result vary (`layout.reduction_layout`), and a variant whose results differ in any bit
from those of the default tiles is disqualified. Races use inputs of their own: those of the call may not exist yet.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser import config, forks
from fuser.cuda import choices, driver, fused_kernel, toolchain
from fuser.cuda.fused_kernel import Source
from fuser.cuda.tiles import Variant
from fuser.errors import CompileError, Unsupported
from fuser.ir.sizes import run_program
from fuser.runtime import launcher, python_launcher, workers

# Most promising first; a variant that gives the same kernel as an earlier one is not tried.
VARIANTS = (
    Variant(outer=1), Variant(outer=-1), Variant(warps=1), Variant(outer=1, warps=1), Variant(outer=-1, warps=-1),
    Variant(stages=2), Variant(stages=4), Variant(stages=5),
)  # fmt: skip
MOST = 5  # most variants in a race
LEAST_WORK = 1 << 18  # least element operations of a kernel for a race
TABLE = "table"
_choosing = forks.lock()  # so that a class is raced only once
Run = Callable[..., Any]


def variants(source: Source) -> dict[str, Source]:
    """At most `MOST` sources that differ from `source`, by the text of their variant."""
    found: dict[str, Source] = {}
    if source.again is None or any(f.unordered for f in source.functions):
        return found
    seen = {_kernels(source)}
    for v in VARIANTS:
        try:
            other = source.again({}, v)
        except Unsupported:
            continue
        if _kernels(other) not in seen and len(found) < MOST:
            seen.add(_kernels(other))
            found[str(v)] = other
    return found


def _kernels(source: Source) -> Any:
    return source.text, tuple((f.warps, f.stages, f.registers) for f in source.functions)


def size_class(source: Source, args: Sequence[Any]) -> tuple[int, ...]:
    """The power of two that holds the work for `args`, for each kernel. Unsupported if `args` do not fit."""
    inputs = tuple(dataclasses.replace(p, aligned=False) for p in source.program.inputs)  # there may be no memory yet
    bound = python_launcher.match(dataclasses.replace(source.program, inputs=inputs), args)
    if bound is None:
        raise Unsupported("the kernel does not take the arguments that it was made for")
    return tuple(run_program(step.work, bound[0]).bit_length() for step in source.program.steps)


def tuned(source: Source, args: Sequence[Any]) -> Source:
    """The source with the fastest tiles for arguments like `args`: chosen earlier, or by a race now."""
    others = variants(source)
    try:
        size = size_class(source, args)
    except Unsupported:
        return source
    if not others or max(size) <= LEAST_WORK.bit_length():
        return source
    if torch.cuda.is_current_stream_capturing():
        return dataclasses.replace(source, lasting=False)
    kernels = hashlib.sha256(repr((source.numerics, sorted(others), _kernels(source))).encode()).hexdigest()
    name = choices.name_of("tiles", kernels, size)
    with _choosing:
        known = choices.find(name)
        if known is None or known.winner not in (TABLE, *others):
            try:
                known = _race(source, others, args)
            except (CompileError, torch.OutOfMemoryError):
                return dataclasses.replace(source, lasting=False)
            choices.keep(name, known)
    return others.get(known.winner, source)


def examples(args: Sequence[Any]) -> list[Any]:
    """New arguments with the sizes and strides of `args`, always the same: normal numbers, and zeros as indices."""
    made = []
    for a in args:
        if not isinstance(a, torch.Tensor):
            made.append(a)
            continue
        chance = torch.Generator(device=a.device).manual_seed(len(made))
        n = 1 + sum((size - 1) * stride for size, stride in zip(a.shape, a.stride())) if a.numel() else 0
        if a.dtype.is_floating_point or a.dtype is torch.bool:
            flat = torch.randn(n, generator=chance, device=a.device)
            flat = flat > 0 if a.dtype is torch.bool else flat.to(a.dtype)
        else:
            flat = torch.zeros(n, dtype=a.dtype, device=a.device)
        made.append(flat.as_strided(a.shape, a.stride()))
    return made


def _race(source: Source, others: Mapping[str, Source], args: Sequence[Any]) -> choices.Choice:
    what = f"tiles of {source.name}"
    needed = sum(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))
    if 8 * needed > torch.cuda.mem_get_info()[0]:
        return choices.Choice(TABLE, "too little memory for a race", (), what)
    handles, failed = _compiled({TABLE: source, **others})
    if TABLE not in handles:
        return choices.Choice(TABLE, "it does not fit as it is", (), what)
    with torch.no_grad():
        expected = outcome(handles[TABLE], args)
        for label in others.keys() & handles.keys():
            if not same(outcome(handles[label], args), expected):
                failed.append((label, "its results have other bits"))
                del handles[label]
        del expected
        shared = examples(args)
        runs = {label: functools.partial(handle, *shared) for label, handle in handles.items()}
        choice = choices.race(runs, TABLE)
    reason = "; ".join([choice.reason, *(f"{label}: {why}" for label, why in failed)])
    return dataclasses.replace(choice, what=what, reason=reason)


def outcome(run: Callable[..., Any], args: Sequence[Any]) -> list[torch.Tensor]:
    """A call's results and its arguments afterwards, as bytes."""
    made = examples(args)
    out = run(*made)
    every = [*(out if isinstance(out, (tuple, list)) else (out,)), *made]
    tensors = (t for t in every if isinstance(t, torch.Tensor))
    return [t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in tensors]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two outcomes are equal bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _compiled(sources: Mapping[str, Source]) -> tuple[dict[str, Run], list[tuple[str, str]]]:
    """A handle for each source that fits the device, and the reasons why others do not."""
    settings = config.snapshot()
    device = torch.cuda.current_device()
    capability = driver.capability(device)

    def compile_one(source: Source) -> Run | str:
        try:
            with config.override(**settings), torch.cuda.device(device):
                entries = fused_kernel.compile_entries(source, capability)
                why = next((w for e in entries if (w := fused_kernel.why_unfit(e, capability)) is not None), None)
                return why if why is not None else _handle(source, entries)
        except CompileError as e:
            return str(e).splitlines()[0]

    found = dict(zip(sources, workers.run_all(compile_one, sources.values())))
    failed = [(label, made) for label, made in found.items() if isinstance(made, str)]
    return {label: made for label, made in found.items() if not isinstance(made, str)}, failed


def _handle(source: Source, entries: tuple[driver.Entry, ...]) -> Run:
    def refuse(args: Any, status: int) -> Any:
        raise CompileError(f"kernel {source.name} does not take the arguments of its race")

    handle: Any = launcher.make_handle(refuse)
    library = driver.Library(toolchain.source_path(source.text), entries)
    handle.add_kernel(fused_kernel.with_entries(source.program, entries), library)
    run: Run = handle
    return run
