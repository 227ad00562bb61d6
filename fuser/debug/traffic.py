"""The bytes that a kernel plan reads and writes, each element of a buffer once, and this machine's copy rate."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from fuser import targets
from fuser.codegen.program import ProgramBuilder
from fuser.ir.loop_body import loads_in
from fuser.ir.sizes import INDIRECT, Expr, Sym, evaluate, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import NumberInput
from fuser.ops import OPS
from fuser.scheduler.kernel_plan import KernelPlan
from fuser.scheduler.schedule import Schedule

# Bytes of a copy's result (its source is as large), and copies in a sample: a GPU launch costs as much as 20 MB.
_COPIES = {"cpu": (32 << 20, 1), "cuda": (256 << 20, 10)}
_ROUNDS = 9


def plan_bytes(lowered: Lowered, plans: Schedule, sizes: tuple[int, ...] | None = None) -> list[int]:
    """Memory traffic of each plan in bytes, for the launch program slots `sizes`, or the example's.

    A buffer counts once for all reads of a plan: the number of points of the axes with which its addresses vary, at
    most its own size.
    """
    value = _value_of(lowered, sizes)
    elements = {b.name: _product(value, b.size) for b in (*lowered.ctx.buffers, *plans.buffers)}
    for n, record in enumerate(lowered.inputs):
        if not isinstance(record, NumberInput):
            elements[f"in{n}"] = _product(value, record.size)
    return [_bytes_of(plan, elements, value) for plan in plans.plans]


def plan_operations(lowered: Lowered, plans: Schedule, sizes: tuple[int, ...] | None = None) -> list[int]:
    """Scalar operations of each plan: each op of the table, and each step of a reduction, counts as one."""
    value = _value_of(lowered, sizes)
    return [_operations_of(plan, value) for plan in plans.plans]


def _operations_of(plan: KernelPlan, value: Callable[[Expr], int]) -> int:
    extents = {a.sym: value(a.size) for a in plan.axes}
    counted = [v for row, v in zip(plan.rows, plan.varies) if row.op in OPS]
    counted += [plan.varies[r.row] | {a.sym for a in plan.reduced_axes} for r in plan.reductions]
    return sum(math.prod(extents[s] for s in found if s in extents) for found in counted)


def _value_of(lowered: Lowered, sizes: tuple[int, ...] | None) -> Callable[[Expr], int]:
    """A function that gives the value of a size in a call with these slots."""
    ctx = lowered.ctx
    if sizes is None:
        return ctx.hint
    builder = ProgramBuilder(lowered)
    builder.bind_inputs()
    env: Mapping[Sym, int] = {s: sizes[n] for s, n in builder.slots.items()}
    return lambda e: evaluate(ctx.canon(e), env)


def _product(value: Callable[[Expr], int], size: tuple[Expr, ...]) -> int:
    return math.prod(value(s) for s in size)


def _bytes_of(plan: KernelPlan, elements: Mapping[str, int], value: Callable[[Expr], int]) -> int:
    extents = {a.sym: value(a.size) for a in plan.axes}
    dtypes = dict(plan.buffers)

    def points(address: Expr) -> int:
        found = symbols(address)
        if any(s.kind == INDIRECT for s in found):
            return math.prod(extents.values())
        return math.prod(extents[s] for s in found if s in extents)

    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    for row in loads_in(plan.rows):
        reads[row.buffer] = reads.get(row.buffer, 0) + points(row.address)
    for store in plan.stores:
        writes[store.buffer] = writes.get(store.buffer, 0) + points(store.address)
    return sum(
        min(n, elements.get(name, n)) * dtypes[name].itemsize for found in (reads, writes) for name, n in found.items()
    )


@functools.cache
def product_rate(device: str, threads: int) -> float:
    """Operations per second of a large float32 matrix product, two for each multiplication.

    An upper bound for compute-bound kernels; torch's TF32 setting applies. `threads` is torch's current number.
    """
    n = 1024 if device == targets.HOST else 8192
    a, b = torch.ones(n, n, device=device), torch.ones(n, n, device=device)
    best = math.inf
    for _ in range(4):
        _wait(device)
        start = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


@dataclass(frozen=True)
class CopyRate:
    """Bytes per second of a copy in warm memory, reads plus writes, and the spread of single copies."""

    bytes_per_second: float
    spread: float  # interquartile range of the seconds, relative to their median


def copy_rate(device: torch.device | str = "cpu") -> CopyRate:
    """This machine's copy rate on `device` with torch's current threads; measured once in a process."""
    return _copy_rate(str(device), torch.get_num_threads())


@functools.cache
def _copy_rate(device: str, threads: int) -> CopyRate:
    count, times = _COPIES[torch.device(device).type]
    source = torch.ones(count // 4, device=device)
    target = torch.empty_like(source)
    seconds = []
    for n in range(_ROUNDS + 2):
        _wait(device)
        start = time.perf_counter()
        for _ in range(times):
            target.copy_(source)
        _wait(device)
        if n >= 2:
            seconds.append((time.perf_counter() - start) / times)
    middle, apart = spread(seconds)
    return CopyRate(2 * count / middle, apart / middle)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@functools.cache
def cache_bytes(device: str = "cpu") -> int:
    """Bytes of the device's largest cache: data that fits is read faster than a copy in memory."""
    if device != targets.HOST:
        return int(torch.get_device_module(device).get_device_properties(0).L2_cache_size)
    names = ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")
    found = [os.sysconf(n) for n in names if n in os.sysconf_names]
    return max([n for n in found if n > 0], default=8 << 20)


def spread(values: list[float]) -> tuple[float, float]:
    """Median and interquartile range; for a single value, the value and 0."""
    if len(values) < 2:
        return (values[0] if values else 0.0), 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low


__all__ = ["CopyRate", "cache_bytes", "copy_rate", "plan_bytes", "plan_operations", "product_rate", "spread"]
