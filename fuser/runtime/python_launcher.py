"""The launcher in Python: it replaces launcher.cpp without a compiler and until that is built.

Both make the same checks in the same order, with the same counters and errors, and run the same tests.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import functools
import itertools
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any

import torch

from fuser import config, targets
from fuser.ir.sizes import run_program
from fuser.kernel_spec import GpuLaunch, LaunchProgram
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import events, libraries, python_pool, torch_abi, warm
from fuser.runtime.encode import encode
from fuser.runtime.handles import ALL_MAGNITUDES, Slow, magnitude_of, reduced
from fuser.runtime.python_programs import Bound, counter, matcher

settings: Any = config  # its attributes are made from a table

PARALLEL_WORK = 32768  # element operations that are worth one more thread
POOL_MIN = 256 << 10  # smaller temporaries need no pool

_disabled: set[str] = set()


def set_enabled(device_type: str, on: bool) -> None:
    """Whether handles may run kernels on tensors of `device_type`."""
    (_disabled.discard if on else _disabled.add)(device_type)


# -- matching ----------------------------------------------------------------------------------------------------------
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({float, bool})


def _readable(args: Sequence[Any]) -> bool:
    """Whether every argument is of a kind that kernels take, on an enabled device."""
    if not settings.enabled or not torch_abi.plain_context():
        return False
    grad, cards = torch.is_grad_enabled(), set()
    for a in args:
        kind = type(a)
        if kind in _TENSORS:
            if (grad and a.requires_grad) or not torch_abi.plain_tensor(a):
                return False
            if not targets.is_host(a.device):
                cards.add(a.device.index)
        elif kind is int:
            if not -(1 << 63) <= a < 1 << 63:
                return False
        elif not isinstance(a, (bool, float)):
            return False
    return len(cards) < 2 and not (_disabled and _disabled & _devices(args))


def _devices(args: Sequence[Any]) -> set[str]:
    return {a.device.type for a in args if isinstance(a, torch.Tensor)} or {targets.HOST}


def match(program: LaunchProgram, args: Sequence[Any]) -> Bound | None:
    """The slots and floats bound by `args` if they match `program`, else None."""
    return matcher(program)(args)


_USUAL = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool})


# -- running -----------------------------------------------------------------------------------------------------------
@functools.cache
def _openmp() -> tuple[Any, Any, Any, Any] | None:
    """torch's own OpenMP: GOMP_parallel, omp_get_thread_num, omp_get_num_threads, omp_in_parallel."""
    lib = torch_abi.library("libtorch_cpu.so")
    try:
        return lib.GOMP_parallel, lib.omp_get_thread_num, lib.omp_get_num_threads, lib.omp_in_parallel  # type: ignore[union-attr]
    except AttributeError:
        return None


_PARALLEL_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_STEP = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)


def thread_count(units: int, work: int) -> int:
    """The number of threads over which a step is split."""
    if work < 2 * PARALLEL_WORK or units < 2:
        return 1
    openmp = _openmp()
    if openmp is None or openmp[3]():
        return 1
    return min(torch.get_num_threads(), work // PARALLEL_WORK, units)


class _Run:
    """One call's arguments and memory, alive while its steps run."""

    __slots__ = ("floats", "pointers", "scratch", "scratch_size", "slots")

    def __init__(self, slots: Any, floats: Any, pointers: Any, scratch: int = 0, scratch_size: int = 0) -> None:
        self.slots, self.floats, self.pointers = slots, floats, pointers
        self.scratch, self.scratch_size = scratch, scratch_size

    def part(self, entry: Any, begin: int, end: int, thread: int) -> int:
        """Run `entry` over the units [begin, end) with the scratch of thread `thread`; returns its status."""
        status = ctypes.c_int32()
        scratch = self.scratch + thread * self.scratch_size
        entry(self.pointers, self.slots, self.floats, begin, end, scratch, ctypes.byref(status))
        return status.value

    def step(self, entry: Any, units: int, work: int) -> int:
        """Run one step over all its units; returns its status."""
        threads = thread_count(units, work)
        if threads <= 1:
            return self.part(entry, 0, units, 0)
        openmp = _openmp()
        assert openmp is not None
        statuses: list[int] = []

        def body(_: Any) -> None:
            n, i = min(threads, openmp[2]()), openmp[1]()
            if i >= n:
                return
            share, rest = divmod(units, n)
            begin = i * share + min(i, rest)
            end = begin + share + (i < rest)
            if begin < end:
                statuses.append(self.part(entry, begin, end, i))

        callback = _PARALLEL_BODY(body)
        openmp[0](callback, None, torch.get_num_threads(), 0)  # a smaller team would end the threads beyond it
        return max(statuses, default=0)


def _round64(n: int) -> int:
    return (n + 63) & ~63


@contextlib.contextmanager
def _memory(nbytes: int) -> Iterator[int]:
    """The address of `nbytes` of memory for temporaries and scratch, valid in the block."""
    held = warm.scratch(nbytes) if nbytes >= python_pool.POOL_MIN else None
    if held is not None:
        yield held.data_ptr()
        return
    with python_pool.block(nbytes) as base:
        yield base


_NOTHING = contextlib.nullcontext(0)
Seen = tuple[tuple[int, ...], bool] | None  # slots of the last observed call; whether those of others differed


def _seen(before: Seen, slots: tuple[int, ...]) -> Seen:
    return slots, before is not None and (before[1] or before[0] != slots)


@dataclass(eq=False)
class Kernel:
    """One program with its library's entries."""

    program: LaunchProgram
    code: libraries.Code
    hits: int = 0
    seen: Seen = None

    def __post_init__(self) -> None:
        p = self.program
        self.match, self.count = matcher(p), counter(p)
        self.tensors = tuple(i for i, pattern in enumerate(p.inputs) if pattern.kind == "tensor")
        self.dtypes = tuple(b.dtype for b in p.buffers if b.output)
        kinds = [b.output for b in p.buffers]
        self.places = tuple((kept, kinds[:i].count(kept)) for i, kept in enumerate(kinds))  # indices in each kind
        self.pack = tuple(struct.Struct(f"{n}{kind}").pack for n, kind in (
            (p.n_slots, "q"), (p.n_floats, "d"), (len(self.tensors) + len(p.buffers), "N")))  # fmt: skip
        self.entries: tuple[tuple[int, ...], list[Any]] = (), []

    def begin_call(self) -> tuple[Any, ...] | None:
        """The loaded library and its addresses, for one call; None if it cannot be loaded again."""
        try:
            return self.code.hold()
        except OSError:
            return None

    def _functions(self, addresses: tuple[int, ...]) -> list[Any]:
        """The steps' functions, made again if the library was loaded again."""
        known, functions = self.entries
        if known != addresses:
            functions = [_STEP(address) for address in addresses]
            self.entries = addresses, functions
        return functions

    def run(
        self, held: tuple[Any, ...], slots: tuple[int, ...], floats: tuple[float, ...], args: Sequence[Any]
    ) -> tuple[int, Any]:  # fmt: skip
        """Status and result of one call with matching arguments."""
        outputs_of, temporaries, steps = self.count(slots)
        outputs = [warm.empty_strided(*form, dtype) for form, dtype in zip(outputs_of, self.dtypes)]
        offsets = list(itertools.accumulate(map(_round64, temporaries), initial=0))
        scratch = max([s for _, _, s in steps], default=0)
        nbytes, scratch = offsets.pop(), _round64(scratch) + 64 if scratch else 0
        shared, nbytes = nbytes, nbytes + scratch * max([thread_count(u, w) for u, w, s in steps if s], default=1)
        with _memory(nbytes) if nbytes else _NOTHING as base:
            pointers = [args[i].data_ptr() for i in self.tensors]
            pointers += [outputs[at].data_ptr() if kept else base + offsets[at] for kept, at in self.places]
            pack_slots, pack_floats, pack_pointers = self.pack
            run = _Run(pack_slots(*slots), pack_floats(*floats), pack_pointers(*pointers), base + shared, scratch)
            status = self._run_steps(run, self._functions(held[1]), slots, steps)
        if status:
            return status, None
        named = [args[i] if kind == "input" else outputs[self.places[i][1]] for kind, i in self.program.outputs]
        return 0, named[0] if self.program.single else tuple(named)

    def _run_steps(
        self, run: _Run, functions: list[Any], slots: tuple[int, ...], steps: Sequence[tuple[int, int, int]]
    ) -> int:  # fmt: skip
        """The first status that is not 0, else 0."""
        if events.is_watched():
            self.seen = _seen(self.seen, slots)
            for n, (function, (units, work, _)) in enumerate(zip(functions, steps, strict=True)):
                with events.event(self.program.steps[n].entry, True):
                    status = run.step(function, units, work) if units > 0 else 0
                if status:
                    return status
            return 0
        for function, (units, work, _) in zip(functions, steps, strict=True):
            status = run.step(function, units, work) if units > 0 else 0
            if status:
                return status
        return 0


@dataclass(eq=False)
class GpuKernel:
    """One program with its kernels in a GPU's driver; `library` launches them (see `fuser.cuda.driver.Library`)."""

    program: LaunchProgram
    library: Any
    hits: int = 0
    seen: Seen = None

    def __post_init__(self) -> None:
        self.match = matcher(self.program)

    def begin_call(self) -> tuple[Any, ...]:
        """An empty tuple: the driver keeps its kernels loaded."""
        return ()

    def run(
        self, held: tuple[Any, ...], slots: tuple[int, ...], floats: tuple[float, ...], args: Sequence[Any]
    ) -> tuple[int, Any]:  # fmt: skip
        """Status and result of one call with matching arguments. RuntimeError if a launch fails."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        device = tensors[0].device
        with torch.cuda.device(device):
            made = [self._buffer(i, slots, device) for i in range(len(self.program.buffers))]
            stream = torch.cuda.current_stream(device).cuda_stream
            pointers = [t.data_ptr() for t in (*tensors, *made)]
            watched = events.is_watched()
            self.seen = _seen(self.seen, slots) if watched else self.seen
            for n, step in enumerate(self.program.steps):
                units = run_program(step.units, slots)
                assert step.gpu is not None
                values = _param_values(step.gpu, pointers, slots, floats)
                with events.event(step.entry, watched):
                    code = self.library.launch(n, units, values, stream) if units > 0 else 0
                if code:
                    raise RuntimeError(self.library.failure(n, code, args))
        named = [args[i] if kind == "input" else made[i] for kind, i in self.program.outputs]
        return 0, named[0] if self.program.single else tuple(named)

    def _buffer(self, i: int, slots: tuple[int, ...], device: torch.device) -> torch.Tensor:
        b = self.program.buffers[i]
        sizes = [run_program(code, slots) for code in b.sizes]
        if not b.output:
            make = torch.zeros if b.counters else torch.empty
            return make(math.prod(sizes), dtype=b.dtype, device=device)
        strides = [run_program(code, slots) for code in b.strides]
        return torch.empty_strided(sizes, strides, dtype=b.dtype, device=device)


def _param_values(
    gpu: GpuLaunch, pointers: list[int], slots: tuple[int, ...], floats: tuple[float, ...]
) -> list[tuple[str, int | float]]:
    find: dict[str, Callable[[Any], int | float]] = {
        "pointer": pointers.__getitem__, "float64": floats.__getitem__, "null": int,
        "int32": lambda code: run_program(code, slots), "int64": lambda code: run_program(code, slots),
    }  # fmt: skip
    return [(kind, find[kind](value)) for kind, value in gpu.params]


def _load(program: LaunchProgram, library_path: Any) -> Kernel | GpuKernel:
    encode(program)  # the same checks of the program as the native launcher makes
    if hasattr(library_path, "entries"):
        return GpuKernel(program, library_path)
    return Kernel(program, libraries.Code(os.fspath(library_path), tuple(s.entry for s in program.steps)))


# -- the handle --------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Handle:
    """`handle(*args)` runs the kernel that matches the call's arguments, or `slow(args, status)`."""

    __name__ = "fusion"  # in a graph of torch.fx
    slow: Slow
    hits: int = 0
    misses: int = 0
    all: tuple[Callable[..., Any], str, int] | None = None  # run while there is no kernel; why; arity
    _kernels: list[Kernel | GpuKernel] = field(default_factory=list)
    # Kernels with the magnitudes that they take, bit b for a `magnitude_of` of b, in the order in which these were
    # added: equal calls run equal code, whatever runs between them.
    _turns: list[tuple[Kernel | GpuKernel, int]] = field(default_factory=list)
    _refused: Counter[str] = field(default_factory=Counter)

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, memo: Any) -> Handle:
        return self

    def refuse(self, function: Callable[..., Any], reason: str, arity: int, first: bool = False) -> bool:
        """While there is no kernel, have calls with `arity` inputs run `function`. Returns whether they do."""
        if self.all is None:
            self.all = function, reason, arity
        return self.all == (function, reason, arity)

    def pardon(self, reason: str) -> None:
        """Send calls that were refused for `reason` to `slow` again."""
        if self.all is not None and self.all[1] == reason:
            self.all = None

    @property
    def refused(self) -> tuple[tuple[str, int], ...]:
        """Pairs of a reason for refusals and the number of calls refused for it."""
        return tuple(self._refused.items())

    @property
    def kernel_count(self) -> int:
        """Kernels added so far."""
        return len(self._kernels)

    @property
    def kernel_hits(self) -> tuple[int, ...]:
        """Calls that each kernel answered, in the order they were added."""
        return tuple(k.hits for k in self._kernels)

    @property
    def seen(self) -> tuple[Seen, ...]:
        """For each kernel: the slots of the last observed call, and whether those of others differed; or None."""
        return tuple(k.seen for k in self._kernels)

    def forget(self) -> None:
        """Reset `seen`."""
        for k in self._kernels:
            k.seen = None

    def add_kernel(self, program: LaunchProgram, library: Any, magnitudes: int = ALL_MAGNITUDES) -> int:
        """Add a kernel for later calls of these magnitudes that match `program`. Returns its number.

        OSError if the library cannot be loaded.
        """
        kernel = _load(program, library)
        self._kernels.append(kernel)
        self._turns.append((kernel, magnitudes))
        return len(self._kernels) - 1

    def widen(self, number: int, magnitudes: int) -> None:
        """Let kernel `number` also take calls of these magnitudes."""
        self._turns.append((self._kernels[number], magnitudes))

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named:
            return self.slow(args, 0, named)
        status = 0
        refusal = self.all
        if refusal is not None and not self._kernels and len(args) == refusal[2] and _USUAL.issuperset(map(type, args)):
            self._refused[refusal[1]] += 1
            self.misses += 1
            return refusal[0](*args)
        if self._kernels and _readable(args):
            for kernel, magnitudes in self._turns:
                bound = kernel.match(args)
                if bound is None or not (magnitudes == ALL_MAGNITUDES or magnitudes >> magnitude_of(args) & 1):
                    continue
                held = kernel.begin_call()
                if held is None:
                    self._turns = [turn for turn in self._turns if turn[0] is not kernel]
                    continue
                status, out = kernel.run(held, *bound, args)
                if not status:
                    kernel.hits += 1
                    self.hits += 1
                    return out
                break
        self.misses += 1
        return self.slow(args, status)

    def each(self, arity: int, keep: bool, *args: Any) -> tuple[Any, ...] | None:
        """A call for every `arity` arguments; no call reads what another writes. Returns the results if `keep`."""
        if arity < 1 or len(args) % arity:
            raise TypeError("each takes how many inputs a call has, whether to keep results, and the inputs")
        results = [self(*args[i : i + arity]) for i in range(0, len(args), arity)]
        return tuple(results) if keep else None


copyreg.pickle(Handle, reduced)
