"""A `LaunchProgram` as one array of 64-bit integers, in the order in which a launch reads it.

launcher.cpp walks this array from front to back on every call:

    inputs     tensor: 0, DLPack dtype word, DLPack device type (256 more if aligned, 512 if every stride
               counts), rank, an item for each size and each stride
               int, bool, float: 1, 2 or 3, slot
    guards     count, an item each
    buffers    count; each: is output, torch's scalar type, item size, rank, an item for each size, and, for outputs,
               for each stride
    steps      count; each: items for units, work, scratch; 0, or for a GPU: 1, threads, bytes of shared memory, count
               of parameters, each: POINTER number, NUMBER4 item, NUMBER8 item, REAL slot or NULL
    outputs    single, count; each: 0 buffer, 1 input or 2 earlier result, and its number

An item is CONST value, LOAD slot, CODE n followed by n words of a program, or BIND slot.
"""

from __future__ import annotations

from array import array

import torch

from fuser.errors import BackendError
from fuser.ir.sizes import LE, PUSH, SLOT, Program
from fuser.kernel_spec import Bind, BufferPattern, Check, InputPattern, LaunchProgram, Step
from fuser.runtime.torch_abi import DEVICE_TYPES, DTYPE_WORDS, scalar_type

LAYOUT = 12  # version of the words below and of the native module's functions; native/given.h has the same number
CONST, LOAD, CODE, BIND = range(4)
KINDS = {"tensor": 0, "int": 1, "bool": 2, "float": 3}
COUNTERS = 2  # beside 0, a temporary, and 1, an output
FROM_BUFFER, FROM_INPUT, FROM_RESULT = range(3)
PARAMS = {"pointer": 0, "int32": 1, "int64": 2, "float64": 3, "null": 4}
MOST_PARAMS = 512

Encoded = tuple[tuple[int, ...], bytes, tuple[str, ...], tuple[torch.dtype, ...]]


class Encoder:
    """Writes one program's words, and checks that a launch cannot access anything outside of it."""

    def __init__(self, program: LaunchProgram) -> None:
        self.program = program
        self.words: list[int] = []
        self.bound: set[int] = set()
        self.device_type: str | None = None  # of all tensors
        self.depth = 1

    def slot(self, k: int) -> int:
        """The slot `k`. BackendError if the program has none of that number."""
        if not 0 <= k < self.program.n_slots:
            raise BackendError(f"launch program: slot {k} of {self.program.n_slots} does not exist")
        return k

    def load(self, k: int) -> int:
        """The slot `k`, to be read. BackendError if no earlier input binds it."""
        if self.slot(k) not in self.bound:
            raise BackendError(f"launch program: slot {k} is read before an input binds it")
        return k

    def code(self, code: Program) -> None:
        """An item that computes a number."""
        self.depth = max(self.depth, self.check_code(code))
        if len(code) == 2:
            self.words += [CONST if code[0] == PUSH else LOAD, code[1]]
        else:
            self.words += [CODE, len(code), *code]

    def check_code(self, code: Program) -> int:
        """The stack depth that `code` needs; BackendError if it is ill-formed."""
        i = depth = deepest = 0
        while i < len(code):
            op = code[i]
            if op in (PUSH, SLOT) and i + 1 < len(code):
                if op == SLOT:
                    self.load(code[i + 1])
                depth, i = depth + 1, i + 2
            elif SLOT < op <= LE and depth >= 2:
                depth, i = depth - 1, i + 1
            else:
                raise BackendError(f"launch program: {code} is no program of fuser.ir.sizes at word {i}")
            deepest = max(deepest, depth)
        if depth != 1:
            raise BackendError(f"launch program: {code} leaves {depth} numbers, expected one")
        return deepest

    def item(self, item: Bind | Check) -> None:
        """A size or stride of an input."""
        if isinstance(item, Check):
            self.code(item.code)
            return
        self.words += [BIND, self.slot(item.slot)]
        self.bound.add(item.slot)

    def input(self, pattern: InputPattern) -> None:
        """An argument. BackendError if its dtype, device, dims or slot cannot be matched."""
        self.words.append(KINDS[pattern.kind])
        if pattern.kind == "tensor":
            if pattern.dtype not in DTYPE_WORDS or pattern.device_type not in DEVICE_TYPES:
                raise BackendError(f"launch program: {pattern.dtype} on {pattern.device_type} cannot be matched")
            if self.device_type not in (None, pattern.device_type):
                raise BackendError(f"launch program: tensors on {self.device_type} and on {pattern.device_type}")
            self.device_type = pattern.device_type
            if len(pattern.sizes) != len(pattern.strides):
                raise BackendError(f"launch program: {len(pattern.sizes)} sizes but {len(pattern.strides)} strides")
            flags = (256 if pattern.aligned else 0) | (512 if pattern.every_stride else 0)
            device = DEVICE_TYPES[pattern.device_type] | flags
            self.words += [DTYPE_WORDS[pattern.dtype], device, len(pattern.sizes)]
            for item in (*pattern.sizes, *pattern.strides):
                self.item(item)
        elif pattern.kind == "float":
            if not 0 <= pattern.slot < self.program.n_floats:
                raise BackendError(f"launch program: float {pattern.slot} of {self.program.n_floats} does not exist")
            self.words.append(pattern.slot)
        else:
            self.words.append(self.slot(pattern.slot))
            self.bound.add(pattern.slot)

    def buffer(self, b: BufferPattern) -> None:
        """A tensor to allocate."""
        kind = COUNTERS if b.counters else int(b.output)
        self.words += [kind, scalar_type(b.dtype), b.dtype.itemsize, len(b.sizes)]
        if b.output and len(b.sizes) != len(b.strides):
            raise BackendError(f"launch program: {len(b.sizes)} sizes but {len(b.strides)} strides")
        for code in (*b.sizes, *b.strides) if b.output else b.sizes:
            self.code(code)

    def step(self, step: Step, n_pointers: int) -> None:
        """A step; its pointers are below `n_pointers`. BackendError if it takes others, or too many arguments."""
        for code in (step.units, step.work, step.scratch):
            self.code(code)
        if step.gpu is None:
            self.words.append(0)
            return
        params = step.gpu.params
        if len(params) > MOST_PARAMS:
            raise BackendError(f"launch program: {step.entry} takes {len(params)} arguments: at most {MOST_PARAMS}")
        self.words += [1, step.gpu.threads, step.gpu.shared, len(params)]
        for kind, value in params:
            self.words.append(PARAMS[kind])
            if kind in ("int32", "int64"):
                self.code(value)
            elif kind != "null":
                known = n_pointers if kind == "pointer" else self.program.n_floats
                if not 0 <= value < known:
                    raise BackendError(f"launch program: {step.entry} takes {kind} {value} of {known}")
                self.words.append(value)

    def outputs(self) -> None:
        """The results. BackendError if one is neither an input nor an output buffer."""
        p = self.program
        if p.single and len(p.outputs) != 1:
            raise BackendError(f"launch program: a single result was announced, but {len(p.outputs)} are named")
        self.words += [int(p.single), len(p.outputs)]
        first: dict[tuple[str, int], int] = {}
        for n, (kind, i) in enumerate(p.outputs):
            known = len(p.inputs) if kind == "input" else len(p.buffers)
            if not 0 <= i < known or (kind == "buffer" and not p.buffers[i].output):
                raise BackendError(f"launch program: result {n} names {kind} {i}: no input and no output buffer")
            if kind == "buffer" and (kind, i) in first:
                self.words += [FROM_RESULT, first[kind, i]]
            else:
                first[kind, i] = n
                self.words += [FROM_INPUT if kind == "input" else FROM_BUFFER, i]

    def encode(self) -> Encoded:
        """All words of the program."""
        p = self.program
        for pattern in p.inputs:
            self.input(pattern)
        self.words.append(len(p.guards))
        for guard in p.guards:
            self.code(guard)
        self.words.append(len(p.buffers))
        for b in p.buffers:
            self.buffer(b)
        self.words.append(len(p.steps))
        tensors = sum(pattern.kind == "tensor" for pattern in p.inputs)
        for step in p.steps:
            self.step(step, tensors + len(p.buffers))
        self.outputs()
        n_dims = max((2 * len(b.sizes) for b in p.buffers), default=0)
        header = (len(p.inputs), p.n_slots, p.n_floats, tensors + len(p.buffers), len(p.buffers), n_dims, self.depth)
        stream = array("q", self.words).tobytes()
        return header, stream, tuple(s.entry for s in p.steps), tuple(b.dtype for b in p.buffers)


def encode(program: LaunchProgram) -> Encoded:
    """`program` for the native launcher: header, words, step entries, buffer dtypes; BackendError if ill-formed."""
    return Encoder(program).encode()
