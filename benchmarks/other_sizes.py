"""Calls after first calls of other sizes: `python -m benchmarks.other_sizes [--threads N] [--rows REGEX] [--count]`.

A kernel's loops are chosen for the sizes of its first call. Each function's kernel for each of a few unlike sizes runs
on all others that its guards accept, in turns with the kernel that those would have by themselves. Kernels stay
whatever their time. With `--count`: the number of kernels of 100 random sizes, uniform and log-uniform.
"""

from __future__ import annotations

import argparse
import inspect
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.runner import Budget, Call, geomean, interleave
from fuser import compiler, config, executor, pipeline
from fuser.canonical import canonicalize
from fuser.debug.guarding import refusal_of
from fuser.kernel_cache import Registration, Registry

Function = Callable[..., Any]
Size = tuple[int, ...]
aten = torch.ops.aten
SIZES: dict[int, tuple[Size, ...]] = {
    1: ((20,), (3000,), (300000,)),
    2: ((64, 1024), (50000, 3), (20000, 8), (6000, 20), (1000, 100), (8, 20000), (24, 24)),
    3: ((16, 64, 128), (3, 2000, 20), (2000, 12, 6), (400, 3, 100), (4, 5, 6)),
    4: ((8, 64, 28, 28), (4000, 3, 5, 5), (2000, 8, 3, 8), (2, 3, 120, 120), (16, 256, 7, 7), (2, 4, 6, 6)),
}  # few long rows, many short ones, and a small call
UNIFORM: dict[int, Size] = {1: (90000,), 2: (300, 600), 3: (20, 60, 150), 4: (8, 40, 24, 24)}  # the largest sizes
ELEMENTS = 8, 400_000  # of a log-uniform size
SHOWN, FLOOR = 1.3, 2e-5  # times an own kernel's time from which a pair is printed; seconds of a call that counts
BUDGET = Budget(0.1, 1.5e-3, 7, 7)

# By rank. Parameters name what a function is given: see `inputs`.
FUNCTIONS: dict[int, dict[str, Function]] = {
    1: {
        "relu": lambda x: torch.relu(x * 2 + 1), "gelu": lambda x: F.gelu(x), "sum": lambda x: (x * x).sum(),
        "softmax": lambda x: x.softmax(0), "cumsum": lambda x: x.cumsum(0), "roll": lambda x: x.roll(1, 0) * 2,
        "flip": lambda x: x.flip(0) * 2,
    },
    2: {
        "relu": lambda x, y: torch.relu(x * y + 1), "bias": lambda x, w, b: F.gelu(x + b) * w,
        "first column": lambda x: x * x[:, :1] + 1, "gap": lambda gap: gap * 2 + 1,
        "16 bits": lambda half: (half * 2 + 1).sigmoid(), "plus turned": lambda x, turned: x + turned,
        "turn": lambda x: (x * 2).t().contiguous(), "turned": lambda turned: (turned * 2).contiguous(),
        "sum 1": lambda x: (x * 2).sum(1), "sum 0": lambda x: (x * 2).sum(0), "mean": lambda x: (x * x).mean(),
        "sums": lambda x: ((x * 2).sum(0), (x * 3).sum(1)), "var 1": lambda x: x.var(1), "var 0": lambda x: x.var(0),
        "max 1": lambda x: x.max(1), "argmax 1": lambda x: x.argmax(1), "argmax 0": lambda x: x.argmax(0),
        "amax 1": lambda x: x.amax(1), "count": lambda x: (x > 0).sum(1), "any": lambda x: (x > 2).any(1),
        "all 0": lambda x: (x > 0).all(0), "float64": lambda wide: wide.sum(1),
        "16-bit sum 1": lambda half: half.sum(1), "16-bit sum 0": lambda half: half.sum(0),
        "turned sum": lambda turned: (turned * 2).sum(1),
        "softmax": lambda x: x.softmax(-1), "softmax 0": lambda x: x.softmax(0),
        "16-bit softmax": lambda half: half.softmax(-1), "turned softmax": lambda turned: turned.softmax(1),
        "log_softmax": lambda x: x.log_softmax(-1), "cross entropy": lambda x, label: F.cross_entropy(x, label),
        "layer norm": lambda x, w, b: F.layer_norm(x, (x.shape[1],), w, b),
        "16-bit layer norm": lambda half: F.layer_norm(half, (half.shape[1],)),
        "rms norm": lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w,
        "centred": lambda x: x - x.mean(0),
        "deviations": lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
        "softmax's gradient": lambda x, y: aten._softmax_backward_data(x, y.softmax(1), 1, torch.float32),
        "cumsum 1": lambda x: x.cumsum(1), "cumsum 0": lambda x: x.cumsum(0), "cummax": lambda x: x.cummax(1)[0],
        "cumprod": lambda x: x.cumprod(1), "logcumsumexp": lambda x: x.logcumsumexp(1),
        "gather": lambda x, column: x.gather(1, column) * 2, "rows": lambda x, row: x[row] * 2,
        "sums of rows": lambda x, row: x[row].sum(1),
        "index_add": lambda x, row: torch.zeros_like(x).index_add(0, row, x),
        "scatter_add": lambda x, column: torch.zeros_like(x).scatter_add(1, column, x),
        "index_put": lambda x, row: torch.index_put(x, (row,), x * 2, True),
        "roll 1": lambda x: x.roll(1, 1) + 1, "roll 0": lambda x: x.roll(1, 0) + 1, "flip 1": lambda x: x.flip(1) * 2,
        "flip 0": lambda x: x.flip(0) * 2, "cat 1": lambda x, y: torch.cat([x * 2, y], 1),
        "cat 0": lambda x, y: torch.cat([x * 2, y], 0), "stack": lambda x, y: torch.stack([x * 2, y], 2),
        "pad": lambda x: F.pad(x, (1, 2, 1, 0)) * 2,
        "circular pad": lambda x: F.pad(x[None], (1, 1), mode="circular") * 2,
        "differences": lambda x: x[:, 1:] - x[:, :-1], "repeat": lambda x: x.repeat(2, 3) + 1,
        "gate": lambda x: F.glu(torch.cat([x, x], 1), 1), "tril": lambda x: x.tril(),
        "every second": lambda x: x[:, ::2] + 1,
    },
    3: {
        "sum 1": lambda x: (x * 2).sum(1), "softmax 1": lambda x: x.softmax(1),
        "swap": lambda x: (x + 1).transpose(1, 2).contiguous(),
        "heads": lambda x: (x + 1).transpose(0, 1).contiguous(), "max 1": lambda x: x.amax(1),
        "layer norm": lambda x, last: F.layer_norm(x, (x.shape[2],), last, last), "cumsum 1": lambda x: x.cumsum(1),
        "mean 02": lambda x: x.mean((0, 2)), "bias 1": lambda x, w, b: x * w[:, None] + b[:, None],
    },
    4: {
        "channels": lambda x, w, b: (x * w[:, None, None] + b[:, None, None]).relu(),
        "channels last": lambda image, w, b: (image * w[:, None, None] + b[:, None, None]).relu(),
        "mean 23": lambda x: x.relu().mean([2, 3]), "mean 23 last": lambda image: image.relu().mean([2, 3]),
        "sum 023": lambda x: (x * x).sum([0, 2, 3]), "sum 023 last": lambda image: (image * image).sum([0, 2, 3]),
        "batch norm": lambda x, w, b: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0],
        "batch norm last": lambda image, w, b: aten.native_batch_norm(image, w, b, None, None, True, 0.1, 1e-5)[0],
        "to last": lambda x: (x * 2).contiguous(memory_format=torch.channels_last),
        "from last": lambda image: (image * 2).contiguous(), "heads": lambda x: (x + 1).transpose(1, 2).contiguous(),
        "3021": lambda x: (x + 1).permute(3, 0, 2, 1).contiguous(),
        "0321": lambda x: (x + 1).permute(0, 3, 2, 1).contiguous(), "amax 1": lambda x: x.amax(1),
        "softmax 1": lambda x: x.softmax(1), "softmax 1 last": lambda image: image.softmax(1),
        "mean 1": lambda x: x.mean(1), "average 3": lambda x: F.avg_pool2d(x, 3, 1, 1),
        "average 2": lambda x: F.avg_pool2d(x, 2), "average 3 last": lambda image: F.avg_pool2d(image, 3, 1, 1),
        "max pool": lambda x: F.max_pool2d(x, 2), "instance norm": lambda x: F.instance_norm(x),
        "group norm": lambda x: F.group_norm(x, 1), "roll": lambda x: x.roll((1, 1), (2, 3)) * 2,
        "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect") * 2, "pad": lambda x: F.pad(x, (1, 1, 1, 1)) * 2,
        "flip": lambda x: x.flip(3) * 2, "sum 13": lambda x: x.sum((1, 3)), "sum 3": lambda x: x.sum(-1),
        "cat": lambda x: torch.cat([x, x * 2], 1), "differences": lambda x: x[:, :, 1:] - x[:, :, :-1],
        "norm of channels": lambda image, w, b: F.layer_norm(image.permute(0, 2, 3, 1), (image.shape[1],), w, b),
    },
}  # fmt: skip


def inputs(f: Function, size: Size) -> tuple[torch.Tensor, ...]:
    """The tensors that the parameters of `f` name, for a first input of `size`."""
    n = size[1] if len(size) > 1 else size[0]
    made: dict[str, Callable[[], torch.Tensor]] = {
        "x": lambda: torch.randn(size), "y": lambda: torch.randn(size), "w": lambda: torch.rand(n),
        "b": lambda: torch.rand(n), "last": lambda: torch.rand(size[-1]), "half": lambda: torch.randn(size).bfloat16(),
        "wide": lambda: torch.randn(size).double(), "turned": lambda: torch.randn(size[::-1]).t(),
        "image": lambda: torch.randn(size).to(memory_format=torch.channels_last),
        "gap": lambda: torch.randn(size[0], n + 5)[:, 2 : 2 + n], "row": lambda: torch.randint(0, size[0], size[:1]),
        "column": lambda: torch.randint(0, n, size), "label": lambda: torch.randint(0, n, size[:1]),
    }  # fmt: skip
    return tuple(made[name]() for name in inspect.signature(f).parameters)


def _takes(program: Any, args: Sequence[torch.Tensor]) -> bool:
    return refusal_of(program, [(a.dtype, "cpu", tuple(a.shape), a.stride()) for a in args]) is None


def _registered(f: Function, args: Sequence[torch.Tensor]) -> Registration:
    """`f` with a kernel for `args`, registered apart from all others."""
    made = executor.register(Registry(), torch.fx.symbolic_trace(f))
    torch.testing.assert_close(made.handle(*args), f(*args), rtol=1e-2, atol=1e-2)
    return made


def pairs(rank: int, f: Function, threads: int) -> Iterator[tuple[Size, Size, float, float]]:
    """For each pair of sizes that share a kernel with another text than the second's own: seconds with it, and own."""
    calls = [inputs(f, size) for size in SIZES[rank]]
    own = [_registered(f, args) for args in calls]
    kernels = [made.spec.store.kernels for made in own]
    for i, first in enumerate(SIZES[rank]):
        for j, size in enumerate(SIZES[rank]):
            shared = i != j and kernels[i] and kernels[j] and _takes(kernels[i][0].program, calls[j])
            if shared and kernels[i][0].source != kernels[j][0].source:
                held = {"served": Call(own[i].handle, calls[j]), "own": Call(own[j].handle, calls[j])}
                clock = time.thread_time if threads == 1 else time.perf_counter
                timed = interleave(held, BUDGET, clock=clock)
                yield first, size, timed["served"].median, timed["own"].median


def _sizes(rank: int, count: int) -> tuple[list[Size], list[Size]]:
    """Random sizes, uniform and log-uniform."""
    draw, wide = random.Random(0), list[Size]()
    uniform = [tuple(draw.randint(2, most) for most in UNIFORM[rank]) for _ in range(count)]
    while len(wide) < count:
        size = tuple(int(math.exp(draw.uniform(math.log(2), math.log(30000)))) for _ in range(rank))
        if ELEMENTS[0] <= math.prod(size) <= ELEMENTS[1]:
            wide.append(size)
    return uniform, wide


def kernels_for(f: Function, sizes: Sequence[Size]) -> int:
    """How many kernels calls of these sizes make, one after the other. Nothing is compiled."""
    graph, backend = canonicalize(torch.fx.symbolic_trace(f)).graph, compiler.find_backend("cpu")
    made: list[Any] = []
    for size in sizes:
        args = inputs(f, size)
        if not any(_takes(program, args) for program in made):
            made.append(pipeline.generate(graph, args, backend).program)
    return len(made)


def _count(chosen: Sequence[tuple[int, str, Function]]) -> None:
    found = list[tuple[int, int]]()
    print("| function | uniform | log-uniform |\n|---|---:|---:|")
    for rank, name, f in chosen:
        uniform, wide = _sizes(rank, 100)
        found.append((kernels_for(f, uniform), kernels_for(f, wide)))
        print(f"| {rank} {name} | {found[-1][0]} | {found[-1][1]} |", flush=True)
    means = (sum(column) / len(found) for column in zip(*found, strict=True))
    print("mean kernels of 100 sizes: {:.2f} uniform, {:.2f} log-uniform".format(*means))


def _compare(chosen: Sequence[tuple[int, str, Function]], threads: int) -> None:
    ratios = list[float]()
    print("| function | first size | size | served | own | times own |\n|---|---|---|---:|---:|---:|")
    for rank, name, f in chosen:
        for first, size, served, own in pairs(rank, f, threads):
            if max(served, own) >= FLOOR:
                ratios.append(served / own)
                if ratios[-1] >= SHOWN:
                    row = f"| {served * 1e6:.0f} µs | {own * 1e6:.0f} µs | {ratios[-1]:.2f} |"
                    print(f"| {rank} {name} | {first} | {size} {row}", flush=True)
    many = sum(ratio >= SHOWN for ratio in ratios)
    print(f"{len(ratios)} pairs share a kernel that is not the second's own and take {FLOOR * 1e6:.0f} µs or more:")
    print(f"{geomean(ratios):.2f} times their own kernel's time, at most {max(ratios):.2f}; {many} at {SHOWN} or more")


def main() -> int:
    """Print the pairs that take `SHOWN` times an own kernel's time or more, or counts of kernels."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.other_sizes", description=__doc__)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rows", default="", help="a regular expression for names such as `2 softmax`")
    p.add_argument("--count", action="store_true", help="count kernels in place of timing them")
    given = p.parse_args()
    torch.set_num_threads(given.threads)
    every = [(rank, name, f) for rank, named in FUNCTIONS.items() for name, f in named.items()]
    chosen = [item for item in every if re.search(given.rows, f"{item[0]} {item[1]}")]
    with config.override(slowest=0.0), torch.no_grad():
        if given.count:
            _count(chosen)
        else:
            _compare(chosen, given.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
