"""`python -m benchmarks.recorded FOLDER`: calls of operators that models made, recorded by others, beside eager.

The folder holds text files in the form of tritonbench's `input_configs`: a line `Operator: aten.add.Tensor`, then lines
`cnt: 12, ((T([64, 128], f16), 1.0), {})` with the sizes, dtypes and strides that a model's training step called it
with. Each different call runs through `torch.compile` by itself; its result is compared with eager's and float64's,
its time with eager's, and with that of a backend that does nothing. Numbers are random, places and classes are in
range. Larger calls than `--most` are left out. With `--device cuda` the times are the device's alone, with memory that
no cache holds.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks import checks, contestants
from benchmarks.h200_timing import device_time
from benchmarks.runner import Budget, Call, geomean, interleave

_LINE = re.compile(r"cnt: \d+, (\(.*\))\s*$")
# Sparse tensors, cuDNN's own operators, and what makes tensors without looking at one.
_LEFT_OUT = re.compile(r"_sparse|_cudnn|^aten\.(new_empty|empty|lift_fresh)|bernoulli|dropout|rand")
_NOT_ON_CUDA = re.compile(r"_embedding_bag")  # places that it does not check end the process
_LEAST = {"cpu": 1e-4, "cuda": 4e-6}  # seconds of eager's: below, what Dynamo or the GPU takes for a call would decide
_DTYPES = {
    **{f"f{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "bf16": torch.bfloat16, "b8": torch.bool, "u8": torch.uint8, "c32": torch.complex32, "c64": torch.complex64,
}
_RENAMED = {"aten.sum.SymInt": "aten.sum.dim_IntList"}  # as torch has it now
# Which argument has a dim of classes.
_CLASSES = {"aten.nll_loss_forward": 0, "aten.nll_loss_backward": 1, "aten.nll_loss2d_forward": 0}


class Refused(Exception):
    """Eager does not take the call, or it is larger than asked for."""


@dataclass(frozen=True)
class Recorded:
    """One call: the operator's name, and its arguments as they were written."""

    operator: str
    text: str


@dataclass(frozen=True)
class _Made:
    """A tensor that a line describes."""

    size: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    def bytes(self) -> int:
        places = torch.Size(self.size).numel()
        return (places if self.stride is None else _extent(self.size, self.stride)) * self.dtype.itemsize


def _extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def read(folder: pathlib.Path) -> list[Recorded]:
    """All different calls of a folder's files."""
    found: dict[Recorded, None] = {}
    for path in sorted(folder.rglob("*.txt")):
        operator = ""
        for line in path.read_text().splitlines():
            if line.startswith("Operator:"):
                operator = line.removeprefix("Operator:").strip()
                operator = _RENAMED.get(operator, operator)
            elif (match := _LINE.match(line)) and not _LEFT_OUT.search(operator):
                found[Recorded(operator, match[1])] = None
    return list(found)


def _described(call: Recorded, narrow: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The arguments with `_Made` for each tensor; `narrow` stands for float16."""
    dtypes = {**_DTYPES, "f16": narrow}

    def made(size: list[int], dtype: torch.dtype, **others: Any) -> _Made:
        stride = others.get("stride")
        return _Made(tuple(size), dtype, None if stride is None else tuple(stride))

    names = {**dtypes, "T": made, "torch": torch, "inf": float("inf"), "nan": float("nan"), "device": torch.device}
    args, kwargs = eval(call.text, {"__builtins__": {}}, names)  # the folder is the user's, as a script would be
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "layout")}
    return args, kwargs


def _bound(operator: str, args: Any) -> int:
    """How many places or classes a call's integers may name."""
    name = operator.rsplit(".", 1)[0]
    if name == "aten.embedding":
        return int(args[0].size[0])
    if name == "aten.embedding_dense_backward":
        return int(args[2])
    if name in _CLASSES:
        size = args[_CLASSES[name]].size
        return int(size[min(1, len(size) - 1)])
    sizes = [n for made in pytree.tree_leaves(args) if isinstance(made, _Made) for n in made.size if n > 1]
    return min(sizes, default=2)


def _fill(made: _Made, bound: int, device: str) -> torch.Tensor:
    extent = torch.Size(made.size).numel() if made.stride is None else _extent(made.size, made.stride)
    if made.dtype.is_floating_point or made.dtype.is_complex:
        memory = torch.randn(extent).to(made.dtype)
    elif made.dtype == torch.bool:
        memory = torch.rand(extent) < 0.5
    else:
        memory = torch.randint(0, max(1, min(bound, 100)), (extent,)).to(made.dtype)
    memory = memory.to(device)
    return memory.view(made.size) if made.stride is None else memory.as_strided(made.size, made.stride)


def _from_forward(operator: str, args: list[Any]) -> list[Any]:
    """Places of a pool's gradient are its forward's."""
    if operator.startswith("aten.max_pool2d_with_indices_backward"):
        grad, x, *window = args[:-1]
        return [grad, x, *window, torch.ops.aten.max_pool2d_with_indices(x, *window)[1]]
    return args


def program(
    call: Recorded, narrow: torch.dtype, most: int, device: str = "cpu"
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A function of a call's tensors, and these; None if they have more than `most` bytes."""
    args, kwargs = _described(call, narrow)
    leaves, spec = pytree.tree_flatten((list(args), kwargs))
    described = [leaf for leaf in leaves if isinstance(leaf, _Made)]
    if not described or sum(made.bytes() for made in described) > most:
        return None
    bound = _bound(call.operator, args)
    filled = [_fill(v, bound, device) if isinstance(v, _Made) else v for v in leaves]
    args, kwargs = pytree.tree_unflatten(filled, spec)
    leaves, spec = pytree.tree_flatten((_from_forward(call.operator, args), kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    target: Any = torch.ops
    for part in call.operator.split("."):
        target = getattr(target, part)

    def function(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            given[i] = tensor
        args, kwargs = pytree.tree_unflatten(given, spec)
        return target(*args, **kwargs)

    tensors = tuple(leaves[i] for i in places)
    for i in places:
        leaves[i] = None  # they come as arguments
    return function, tensors


def _problem(
    function: Callable[..., Any], compiled: Callable[..., Any], tensors: tuple[torch.Tensor, ...]
) -> str | None:
    """What is wrong with a call's results and arguments; Refused if eager does not take it."""
    mine, theirs = checks.clones(tensors), checks.clones(tensors)
    try:
        eager = checks.tensors(function(*theirs))
    except Exception as error:
        raise Refused(str(error)) from error
    out = checks.tensors(compiled(*mine))
    if [o.stride() for o in out] != [e.stride() for e in eager]:
        return f"strides {[o.stride() for o in out]}, eager's {[e.stride() for e in eager]}"
    try:
        exact = checks.tensors(function(*checks.to_float64(checks.clones(tensors)))) + checks.to_float64(list(theirs))
    except Exception:  # an argument of the call says float32
        exact = None
    return checks.judge([*out, *mine], [*eager, *theirs], exact).problem


def _raises(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether `torch.compile` raises with a backend that compiles nothing, too."""
    torch._dynamo.reset()
    try:
        torch.compile(function, backend="aot_eager")(*checks.clones(tensors))
    except Exception:
        return True
    return False


def _may_run(call: Recorded, narrow: torch.dtype, most: int, device: str) -> bool:
    """Whether a call's places are in range: on the CPU eager says so, on CUDA the process would be lost."""
    if device == "cpu" or not re.search(r"\bi(8|16|32|64)\b", call.text):
        return True
    made = None if _NOT_ON_CUDA.search(call.operator) else program(call, narrow, most)
    if made is None:
        return False
    made[0](*made[1])
    return True


def run(
    call: Recorded, narrow: torch.dtype, most: int, budget: Budget | None, device: str = "cpu"
) -> tuple[str, tuple[float, float] | None]:  # fmt: skip
    """What is wrong, and eager's time by fuser's, called by itself and by Dynamo. Refused if eager does not run it."""
    torch._dynamo.reset()
    try:
        torch.manual_seed(0)
        made = program(call, narrow, most, device) if _may_run(call, narrow, most, device) else None
    except Exception as error:
        raise Refused(str(error)) from error
    if made is None:
        raise Refused("too large")
    function, tensors = made
    compiled = contestants.compile_for("fuser", function, dynamic=None)
    try:
        problem = _problem(function, compiled, tensors)
    except Refused:
        raise
    except Exception as error:
        problem = None if _raises(function, tensors) else f"{type(error).__name__}: {str(error).strip()[:300]}"
        if problem is None:
            raise Refused("torch.compile itself raises") from error
    if problem is not None or budget is None:
        return problem or "", None
    if device != "cpu":
        eager, mine = (device_time(lambda f=f: f(*tensors)) for f in (function, compiled))
        return "", None if eager < _LEAST[device] else (eager / mine, eager / mine)
    dynamo = contestants.compile_for("dynamo", function, dynamic=None)
    calls = {name: Call(f, tensors) for name, f in (("eager", function), ("dynamo", dynamo), ("fuser", compiled))}
    # What this thread spends alone does not depend on other processes.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    eager, beside, mine = (min(t.samples) for t in interleave(calls, budget, clock=clock, equal=True).values())
    return "", None if eager < _LEAST[device] else (eager / mine, beside / mine)


def _chosen(calls: list[Recorded], options: argparse.Namespace) -> Iterator[Recorded]:
    part, parts = map(int, options.part.split("/"))
    wanted = [c for c in calls if re.search(options.only, c.operator)]
    random.Random(0).shuffle(wanted)
    seen: Counter[str] = Counter()
    found = []
    for call in wanted:
        seen[call.operator] += 1
        if seen[call.operator] <= options.each:
            found.append(call)
    return iter(found[part - 1 :: parts])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorded")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="", help="regular expression of operators")
    parser.add_argument("--each", type=int, default=1 << 30, help="calls of one operator, at most")
    parser.add_argument("--part", default="1/1", help="which of how many parts, as 2/8")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no call later")
    parser.add_argument("--narrow", default="float32", help="the dtype that stands for float16")
    parser.add_argument("--most", type=int, default=1 << 26, help="bytes of a call's tensors")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=tuple(_LEAST), default="cpu")
    parser.add_argument("--untimed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    budget = None if options.untimed else Budget(row_seconds=0.1, sample_seconds=1e-3, min_rounds=5, max_rounds=31)
    start, ran, wrong, shares = time.monotonic(), 0, 0, []
    for call in _chosen(read(options.folder), options):
        if time.monotonic() - start > options.seconds:
            break
        try:
            problem, share = run(call, getattr(torch, options.narrow), options.most, budget, options.device)
        except Refused:
            continue
        ran, wrong = ran + 1, wrong + bool(problem)
        if problem:
            print(f"WRONG {call.operator} {call.text}: {problem}", flush=True)
        if share is not None:
            shares.append(share)
            print(f"{share[0]:.2f} {share[1]:.2f} {call.operator} {call.text}", flush=True)
    by_itself, by_dynamo = (geomean(column) for column in zip(*shares)) if shares else (1, 1)
    print(f"{ran} calls, {wrong} wrong; {len(shares)} timed, {by_itself:.2f} × eager, {by_dynamo:.2f} × its by Dynamo")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
