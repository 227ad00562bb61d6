"""Runs kernel rows through Triton's interpreter: `TRITON_INTERPRET=1 python interpreted.py <rows …>`.

The flag is read when Triton is imported, so this is a process of its own. Prints one JSON object: by row, null for a
result as right as eager's, or a sentence.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
import traceback
from typing import Any

import numpy as np
import torch
import triton.language as tl
from attention_cases import ADDED, ATTENTION, AddedCase, AttentionCase
from cuda_cases import BATCHED, CASES, SCANS, TUNED, Case, readable, same_bits, special_rows
from matmul_cases import MATMULS, MatmulCase
from memory_orders import order_case
from reduction_chains import chain_case, chain_problem, pair_case
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps, ScanOps, TensorHandle

from benchmarks import checks
from fuser import targets
from fuser.cuda import batch, fused_kernel, tiles, toolchain, tuning
from fuser.cuda.target import TARGET
from fuser.errors import Unsupported
from fuser.ir.sizes import run_program
from fuser.lowering import norms
from fuser.runtime.python_launcher import match
from fuser.scheduler import neighbours, plan, traversal
from tests.flex_cases import FlexCase

NUMPY = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "fmod": np.fmod, "pow": np.power,
    "nearbyint": np.rint, "fast_dividef": np.divide,
    "copysign": np.copysign,
    "erf": lambda x: torch.erf(torch.from_numpy(np.atleast_1d(x))).numpy().reshape(x.shape),
}  # fmt: skip


neighbours.FEWEST = 1  # small images are computed by several neighbours, too
BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # what kernels take as bytes


def stand_in(name: str) -> Any:
    """A libdevice function by numpy: the interpreter has none."""

    def run(*args: Any) -> Any:
        first = next(a for a in args if not isinstance(a, float))
        values = NUMPY[name](*(a if isinstance(a, float) else a.handle.data for a in args))
        values = values.astype(first.handle.data.dtype)
        return tl.core.tensor(TensorHandle(values, first.handle.dtype), first.type)

    return run


for _name in NUMPY:
    setattr(libdevice, _name, stand_in(_name))


def combined(op: Any, first: list[Any], second: list[Any], kinds: list[Any]) -> list[Any]:
    """A combining function's results for arrays of elements."""
    tensors = [op.to_tensor(x, kind) for values in (first, second) for x, kind in zip(values, kinds, strict=True)]
    found = op.combine_fn.fn(*tensors)
    found = found if isinstance(found, tuple) else (found,)
    values = [x.handle.data if isinstance(x, tl.core.tensor) else x for x in found]
    return [np.broadcast_to(x, y.shape).astype(y.dtype) for x, y in zip(values, first, strict=True)]


def reduced(self: Any, given: Any) -> list[Any]:
    """A reduction by neighbours, half of the elements at once: the interpreter's own takes one after the other."""
    given, axis = self.unravel(given, self.axis)
    kinds, shape = [x.dtype for x in given], given[0].handle.data.shape
    values = [np.moveaxis(x.handle.data, axis, 0) for x in given]
    while len(values[0]) > 1:
        values = combined(self, [x[::2] for x in values], [x[1::2] for x in values], kinds)
    values = [x[0] for x in values]
    if self.keep_dims:
        kept = shape[:axis] + (1,) + shape[axis + 1 :] if self.axis is not None else (1,) * len(shape)
        values = [x.reshape(kept) for x in values]
    return [self.to_tensor(x, kind) for x, kind in zip(values, kinds, strict=True)]


def scanned(self: Any, given: Any) -> list[Any]:
    """A scan of all rows at once."""
    kinds = [x.dtype for x in given]
    values = [np.moveaxis(x.handle.data.copy(), self.axis, 0) for x in given]
    for n in range(1, len(values[0])):
        found = combined(self, [x[n - 1 : n] for x in values], [x[n : n + 1] for x in values], kinds)
        for x, y in zip(values, found, strict=True):
            x[n : n + 1] = y
    return [self.to_tensor(np.moveaxis(x, 0, self.axis), kind) for x, kind in zip(values, kinds, strict=True)]


ReduceOps.generic_reduce, ScanOps.generic_scan = reduced, scanned


def remember_types() -> None:
    """Types and shapes of values are made once each: the interpreter makes them anew in each statement of a program."""
    numpy_type, tensor, block = interpreter._get_np_dtype, tl.core.tensor.__init__, tl.core.block_type.__init__
    blocks: dict[Any, Any] = {}
    numpy_types: dict[str, Any] = {}
    alike: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the number of a type, which is kept, the parts of a tensor

    def numpy_of(kind: Any) -> Any:
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    def block_of(cls: Any, element: Any, shape: Any) -> Any:
        key = id(element), tuple(getattr(n, "value", n) for n in shape)
        if key not in blocks:
            made = object.__new__(cls)
            block(made, element, shape)
            blocks[key] = made
        return blocks[key]

    def tensor_of(self: Any, handle: Any, kind: Any) -> None:
        if id(kind) not in alike:
            tensor(self, handle, kind)
            alike[id(kind)] = kind, dict(vars(self))
        vars(self).update(alike[id(kind)][1], handle=handle)

    interpreter._get_np_dtype, tl.core.tensor.__init__ = numpy_of, tensor_of
    tl.core.block_type.__new__, tl.core.block_type.__init__ = block_of, lambda self, element, shape: None


def remember_builtins() -> None:
    """Which functions of a module the interpreter replaces is found once, not in each call of a kernel's functions."""
    found: dict[Any, list[tuple[str, Any]]] = {}

    def replace(module: Any, *rest: Any) -> None:
        if module not in found:
            found[module] = [(n, f) for n, f in inspect.getmembers(module) if tl.core.is_builtin(f)]
        if all(getattr(module, name) is function for name, function in found[module][:1]):  # not within another call
            for name, function in found[module]:
                interpreter._patch_attr(module, name, function, *rest)

    interpreter._patch_builtin = replace


remember_types()
remember_builtins()


def bind(source: fused_kernel.Source, args: tuple[Any, ...]) -> tuple[Any, Any, list[Any], list[Any]]:
    """Slots, floats, all memory by pointer's number, and the results of a call."""
    program = source.program
    here = tuple(dataclasses.replace(p, device_type="cpu") for p in program.inputs)
    bound = match(dataclasses.replace(program, inputs=here), args)
    assert bound is not None, "the program does not take the arguments it was made for"
    slots, floats = bound
    made = []
    for b in program.buffers:
        sizes = [run_program(code, slots) for code in b.sizes]
        strides = [run_program(code, slots) for code in b.strides]
        made.append(torch.empty_strided(sizes, strides, dtype=b.dtype).fill_(0 if b.counters else 99))
    memory = [*(a for a in args if isinstance(a, torch.Tensor)), *made]
    memory = [t.view(torch.uint8) if t.dtype in BYTES else t for t in memory]
    return slots, floats, memory, [args[i] if kind == "input" else made[i] for kind, i in program.outputs]


def run_source(source: fused_kernel.Source, args: tuple[Any, ...]) -> Any:
    """The results of a source's kernels for `args`, as its program says."""
    slots, floats, memory, out = bind(source, args)
    names = toolchain.load_source(source.text)
    for step in source.program.steps:
        values = []
        for kind, value in step.gpu.params:
            find = {"pointer": memory.__getitem__, "float64": floats.__getitem__}
            values.append(find[kind](value) if kind in find else run_program(value, slots))
        units = run_program(step.units, slots)
        if units:
            names[step.entry][(units,)](*values)
    made = zip(reversed(memory), reversed(source.program.buffers))
    assert not any(t.any() for t, b in made if b.counters), "counters are left behind"
    return out[0] if source.program.single else tuple(out)


def run_batched(source: fused_kernel.Source, sets: list[tuple[Any, ...]]) -> list[Any]:
    """The results for many argument sets in one launch for each step, with the tables that the launcher writes."""
    text, functions = fused_kernel.batched_source(source)
    names = toolchain.load_source(text)
    bound = [bind(source, args) for args in sets]
    for step, function in zip(source.program.steps, functions):
        first, words, units = [torch.iinfo(torch.int64).max] * batch.SETS, [], 0
        for member, (slots, floats, memory, _) in enumerate(bound):
            first[member] = units
            units += run_program(step.units, slots)
            for kind, value in step.gpu.params:
                if kind == "pointer":
                    words.append(memory[value].data_ptr())
                elif kind == "float64":
                    words.append(int(np.float64(floats[value]).view(np.int64)))
                else:
                    words.append(run_program(value, slots))
        names[function.name][(units,)](torch.tensor(first + words))
    return [tuple(out) for *_, out in bound]


def batched_problem(case: Case, source: fused_kernel.Source, args: tuple[Any, ...]) -> str | None:
    """None, or what differs between calls made one by one and in one launch."""
    sets = [args, tuple(a.flip(0).clone() if isinstance(a, torch.Tensor) and a.dim() else a for a in args), args]
    one = [checks.tensors(run_source(source, s)) for s in sets]
    both = run_batched(source, sets)
    same = all(torch.equal(a, b) for x, y in zip(one, both) for a, b in zip(x, y, strict=True))
    return None if same else "many sets in one launch give something else than each alone"


def tuned_problem(source: fused_kernel.Source, args: tuple[Any, ...]) -> str | None:
    """None, or which other tiles give other bits."""
    expected = checks.tensors(run_source(source, args))
    for label, other in tuning.variants(source).items():
        if not all(map(same_bits, checks.tensors(run_source(other, args)), expected)):
            return f"other bits with {label}"
    return None


def check(case: Case | AttentionCase | AddedCase) -> str | None:
    """None, or what is wrong with a case's kernels."""
    if isinstance(case, (AttentionCase, AddedCase)):
        return case.problem(run_source)
    args = case.args("cpu")
    source = case.source(case.fake_args())
    if isinstance(case, MatmulCase):
        return case.problem(run_source(source, args), args)
    problem = batched_problem(case, source, args) if case.name in BATCHED else None
    if problem is None and case.name in TUNED:
        problem = tuned_problem(source, args)
    if problem is not None:
        return problem
    out = checks.tensors(run_source(source, args))
    if case.name.startswith("exact/"):
        same = all(map(same_bits, out, checks.tensors(case.fn(*args))))
        return None if same else "some bits are not eager's"
    out = readable(out)
    eager = readable(checks.tensors(case.fn(*args)))
    exact = readable(checks.tensors(case.fn(*checks.to_float64(args))))
    if case.name.startswith(("chain/", "pair/", "order/")):
        return chain_problem(out, eager, exact)
    return checks.judge(out, eager, exact).problem


def small_scans() -> None:
    """Small tiles: the interpreter scans an element at a time."""
    tiles.SCANNED_ROWS = tiles.SCANNED_PLACES = ((16, 64, 1), (64, 64, 1))
    tiles.SHORTEST_ROW = 8
    tiles.LOOPED_SCAN = tiles.LOOPED_SCAN_ODD = tiles.LOOPED_PLACES = dict.fromkeys((1, 2, 4, 8), tiles.Tile(1, 64, 1))
    tiles.SCANNED_SHORT_COLUMNS = dict.fromkeys((1, 2, 4, 8), tiles.Tile(4, 4, 1))
    tiles.SCANNED_COLUMNS, tiles.SHORT_COLUMN = dict.fromkeys((1, 2, 4, 8), tiles.Tile(4, 8, 1)), 4
    tiles.PLACED_COLUMNS = tiles.SCANNED_COLUMNS
    tiles.SPLIT_ROW_FROM, tiles.SPLIT_COLUMN_FROM, tiles.MOST_CHUNKS = 256, 32, 4


def small_splits() -> None:
    """Short rows and columns are cut in a few chunks of several steps."""
    small_steps()
    tiles.SPLIT_ROW_FROM, tiles.SPLIT_COLUMN_FROM, tiles.MOST_CHUNKS = 512, 65, 4


def small_walks() -> None:
    """Few programs that go over many rows, and tiles that take several steps to combine what they find."""
    tiles.WALKED = tiles.WALKED_ODD = ((64, 64, 1, 2), (128, 256, 1, 1))
    tiles.MULTIPROCESSORS = 2
    tiles.COMBINE_PROGRAMS = tiles.Tile(16, 2, 1)


def small_caches() -> None:
    """All that is read passes by what lies in the cache, in several steps."""
    small_steps()
    tiles.PASSING_FROM = 0


def small_passing() -> None:
    """The same, and columns are cut from fewer elements on."""
    small_caches()
    tiles.SPLIT_COLUMN_FROM, tiles.MOST_CHUNKS = 65, 4


def small_steps() -> None:
    """Few programs of small tiles, which take several steps for a chunk."""
    tiles.AHEAD_ROWS = (dict.fromkeys((1, 2, 4, 8), tiles.Ahead(tiles.Tile(1, 64, 1), 4)),) * 2
    tiles.AHEAD_ODD_COLUMNS = dict.fromkeys((1, 2, 4, 8), tiles.Ahead(tiles.Tile(16, 8, 1), 8))
    tiles.AHEAD_COLUMNS = (tiles.AHEAD_ODD_COLUMNS,) * 2


def small_rows() -> None:
    """Rows of more than 512 elements are long, and split from four times as many; chunks take several steps."""
    tiles.PERSISTENT = ((512, 512, 1),)
    tiles.PERSISTENT_ONE = tiles.PERSISTENT_READ = tiles.PERSISTENT_DRAWN = ()
    tiles.LOOPED_ROW = tiles.LOOPED_ROW_AGAIN = tiles.LOOPED_ROW_DOUBLE = tiles.Tile(1, 512, 1)
    tiles.SPLIT_ROW_FROM = tiles.SPLIT_ELEMENTS = 2048
    tiles.AHEAD_ROWS = tuple(dict.fromkeys((1, 2, 4, 8), tiles.Ahead(tiles.Tile(1, n, 1), 6)) for n in (512, 256))


def small_columns() -> None:
    """Columns of more than 16 elements are long, and a step takes 32 of them."""
    small_steps()
    tiles.AHEAD_ODD_COLUMNS = dict.fromkeys((1, 2, 4, 8), tiles.Ahead(tiles.Tile(16, 32, 1), 8))
    tiles.PERSISTENT_COLUMNS, tiles.LONGEST_COLUMN = dict.fromkeys((1, 2, 4, 8), ((16, 8, 1),)), 16
    tiles.AHEAD_WHOLE_COLUMNS = tuple((n, dict.fromkeys((1, 2, 4, 8), 16), 1) for n, _, _ in tiles.AHEAD_WHOLE_COLUMNS)
    tiles.SPLIT_COLUMN_FROM, tiles.MOST_CHUNKS = 65, 4


def cut_columns() -> None:
    """The same, and columns are cut by kernels of their own from a sixteenth of the elements on."""
    small_columns()
    targets.OWN["cuda"] = lambda: dataclasses.replace(TARGET, long_row=TARGET.long_row // 16)


def large_operands() -> None:
    """Every operand that rows share is large."""
    tiles.SHARED_FROM = 0


def many_columns() -> None:
    """Enough columns not to be cut in chunks."""
    small_caches()
    tiles.AHEAD_WHOLE_COLUMNS = ((4, dict.fromkeys((1, 2, 4, 8), 16), 1), *tiles.AHEAD_WHOLE_COLUMNS[1:])
    tiles.SPLIT_COLUMN_FROM = 65


RANDOM = {
    "chain": functools.partial(chain_case, short=True), "pair": functools.partial(pair_case, short=True),
    "order": order_case,
}  # fmt: skip
# Where a graph's memory turns, kernels are kept apart from so many elements on.
TURNS = (
    (traversal, "_TURNED_ROW", 4), (traversal, "_TURNED", 64), (traversal, "RUN", 4), (plan, "RUN", 4),
    (norms, "_LARGE", 64),
)  # fmt: skip


TABLES = dict(vars(tiles))
USUAL = [getattr(module, name) for module, name, _ in TURNS]
# With fewer elements, and smaller tables that have the same kernels made of them: the interpreter takes a program at a
# time, and compares an element at a time.
SHORT: dict[str, tuple[Any, Any]] = {
    "argmax/split": (small_splits, lambda i: (i.normal(30, 50),)),
    "sum_and_max/split": (small_splits, lambda i: (i.normal(200, 19),)),
    "dropout/split": (small_splits, lambda i: (i.below(1 << 62), i.normal(200, 16))),
    "dropout/all": (small_splits, lambda i: (i.below(1 << 62), i.normal(30, 50))),
    "log_softmax/long": (small_rows, lambda i: (i.normal(3, 553),)),
    "mean_var/long": (small_rows, lambda i: (i.normal(2, 1100),)),
    "mean_var/special": (small_rows, lambda i: (special_rows(i, 1101),)),
    "mean_var/few": (small_rows, lambda i: (i.normal(3, 2187) + 100,)),
    "mean_var/all": (small_rows, lambda i: (i.normal(4601) + 30,)),
    "exp_var/long": (small_rows, lambda i: (i.normal(2, 1065),)),
    "long_norm/bf16": (small_rows, lambda i: (i.normal(2, 1264, dtype=torch.bfloat16),)),
    "dropout/long": (small_rows, lambda i: (i.below(1 << 62), i.normal(2, 560))),
    "sum_and_max/passing": (small_passing, lambda i: (i.normal(150, 13),)),
    "column_sum/bf16/passing": (small_passing, lambda i: (i.normal(200, 16, dtype=torch.bfloat16),)),
    "mean_var/columns": (small_columns, lambda i: (i.normal(130, 40) + 30,)),
    "mean_var/columns/odd": (small_columns, lambda i: (special_rows(i, 313)[:, :131].t().contiguous(),)),
    "batch_norm/columns": (cut_columns, lambda i: (i.normal(260, 33), i.uniform(33), i.normal(33))),
    "norm_gradients": (small_walks, lambda i: (i.normal(37, 70), i.normal(37, 70), i.uniform(37, 1), i.uniform(70))),
    "dropout": (None, lambda i: (i.below(1 << 62), i.normal(2, 10, 77, dtype=torch.bfloat16))),
}


def with_few_heads(case: FlexCase) -> FlexCase:
    """The case with two heads, or one where it is long and heads do the same; all where heads share keys."""
    batch, heads, groups, rows, *rest = case.sizes
    few = 1 if rows > 100 and case.mod is None and not case.each else 2
    sizes = (batch, min(heads, few), min(groups, few), rows, *rest)
    return dataclasses.replace(case, sizes=sizes) if heads == groups else case


def case_of(name: str) -> Case | AttentionCase | AddedCase:
    """The case of a name; `chain/7` is the seventh chain of reductions."""
    if name in ATTENTION:
        return AttentionCase(with_few_heads(ATTENTION[name].case))
    if name in ADDED:
        return ADDED[name]
    kind, _, number = name.partition("/")
    case = RANDOM[kind](int(number)) if kind in RANDOM else {**CASES, **MATMULS}[name]
    return dataclasses.replace(case, make=SHORT[name][1]) if name in SHORT else case


def table_of(name: str) -> Any:
    """What sets the tables for a case; None: it has the usual ones."""
    if name in SHORT:
        return SHORT[name][0]
    if name in {c.name for c in SCANS}:
        return small_scans
    if name.startswith("pair/"):
        return small_rows
    if name.startswith("norm_grad"):
        return small_walks
    if name.startswith("shared"):
        return large_operands
    if name.endswith("/passing"):
        return many_columns if "/many/" in name else small_caches
    return None


def prepare(name: str) -> None:
    """Set the tables for a case."""
    vars(tiles).update(TABLES)
    targets.OWN["cuda"] = lambda: TARGET
    for (module, which, low), value in zip(TURNS, USUAL, strict=True):
        setattr(module, which, low if name.startswith("order/") else value)
    table = table_of(name)
    if table is not None:
        table()


def main() -> None:
    """Check the cases named on the command line."""
    verdicts: dict[str, str | None] = {}
    for name in sys.argv[1:]:
        prepare(name)
        try:
            verdicts[name] = check(case_of(name))
        except Unsupported as e:
            verdicts[name] = f"unsupported: {e}"
        except Exception as e:
            verdicts[name] = f"{type(e).__name__}: {e}\n{traceback.format_exc(limit=-3)}"
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
