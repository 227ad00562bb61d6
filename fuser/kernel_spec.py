"""Records that are passed between the folders. All are frozen; none holds a device's code.

`LaunchProgram` is the contract with `runtime/`: all that a launcher needs to go from a call's arguments to its
outputs. It is data, so that the native launcher and the Python one read the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.ir.sizes import Program
from fuser.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class Bind:
    """Store the number at this position in slot `slot`."""

    slot: int


@dataclass(frozen=True)
class Check:
    """The number at this position has to equal the value of `code`, computed from the slots bound so far."""

    code: Program


@dataclass(frozen=True)
class InputPattern:
    """The pattern that one argument has to match for a kernel to accept it.

    kind "tensor": dtype, device type, rank, and a `Bind` or `Check` for each size and each stride, in the order size 0
    … size n-1, stride 0 … stride n-1. A stride is bound but not checked if its size is at most 1, unless
    `every_stride` is set, or if the tensor is empty. kinds "int" and "bool" bind `slot`, an int64 slot; kind "float"
    binds `slot` of the float array (an int is accepted as a float, but not the reverse).
    """

    kind: str
    dtype: torch.dtype | None = None
    device_type: str = "cpu"
    sizes: tuple[Bind | Check, ...] = ()
    strides: tuple[Bind | Check, ...] = ()
    slot: int = -1
    aligned: bool = False  # the data has to start at a multiple of `ALIGNMENT` bytes
    every_stride: bool = False  # strides in dims of one element count, too: eager's layout may depend on them


@dataclass(frozen=True)
class BufferPattern:
    """A tensor to allocate before the first step. Sizes and strides are in elements.

    `output` buffers become torch tensors from torch's own allocator. The others are temporaries from the buffer pool
    (on a GPU, from torch's allocator): contiguous, 64-byte aligned, freed after the last step. `counters`, only on a
    GPU, are int32 temporaries that are 0 before the first step and that the steps leave at 0.
    """

    dtype: torch.dtype
    sizes: tuple[Program, ...]
    strides: tuple[Program, ...]
    output: bool
    counters: bool = False


@dataclass(frozen=True)
class GpuLaunch:
    """The launch of a step on a GPU: blocks of `threads` threads with `shared` bytes, one for each unit.

    `params` are the kernel's arguments in order: ("pointer", index of the pointer), ("int32" or "int64", program),
    ("float64", slot of the float array) or ("null", 0).
    """

    threads: int
    shared: int
    params: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Step:
    """One loop nest to run: `entry` of the kernel's library over units [0, units).

    The C entry is `void entry(char* const* ptrs, const int64_t* slots, const double* floats, int64_t begin,
    int64_t end, char* scratch, int32_t* status)`; `ptrs` are the tensor inputs' data pointers in order, then the
    buffers'. Units are independent: the launcher may split them over threads. `work` estimates the element
    operations of the whole step (below about 32,768 it is run inline). `scratch` is the bytes of private, 64-byte
    aligned scratch memory per thread. An entry sets `*status` to a code in `STATUS` when an index is out of range.
    """

    entry: str
    units: Program
    work: Program
    scratch: Program
    gpu: GpuLaunch | None = None


ALIGNMENT = 16


def memory_order(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dims from outermost to innermost if the strides are dense, else None."""
    order = sorted(range(len(size)), key=lambda d: (-stride[d], -size[d], d))
    expected = 1
    for d in reversed(order):
        if size[d] != 1:
            if stride[d] != expected:
                return None
            expected *= size[d]
    return tuple(order)


def is_aligned(t: torch.Tensor) -> bool:
    """Whether the data starts at a multiple of `ALIGNMENT` bytes; tensors without memory count as new."""
    plain = type(t) in (torch.Tensor, torch.nn.Parameter)
    start = t.data_ptr() if plain else int(t.storage_offset()) * t.element_size()
    return start % ALIGNMENT == 0


OUT_OF_BOUNDS = 2  # only by kernels with `config.check_bounds`: a defect of the kernel
STATUS = {1: "index out of range", OUT_OF_BOUNDS: "an offset outside of its buffer"}


@dataclass(frozen=True)
class LaunchProgram:
    """The program from arguments to outputs. `outputs` has, for each result, ("buffer", i) or ("input", i)."""

    inputs: tuple[InputPattern, ...]
    n_slots: int
    n_floats: int
    guards: tuple[Program, ...]
    buffers: tuple[BufferPattern, ...]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, int], ...]
    single: bool  # the graph returns one tensor, not a tuple


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an `ArgSpec`. Size and stride tokens are symbols' names or numbers; see `arguments.arg_spec`."""

    dtype: torch.dtype
    device_type: str
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]


@dataclass(frozen=True)
class ArgSpec:
    """The class of arguments on which a kernel is specialised: without sizes, unless the kernel needs one."""

    args: tuple[Any, ...]
    config: tuple[Any, ...]
