"""Random chains of reductions along one dim, each of a value that depends on the results of those before.

Online maxima, variances in one reading, splits of long rows and of columns each take over two phases of a kernel. A
chain says where one begins in a phase that another has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from cuda_cases import Case

from benchmarks.kernel_rows import Inputs

Reduction = Callable[[torch.Tensor, int], torch.Tensor]

REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda x, d: x.sum(d, keepdim=True) / math.sqrt(x.shape[d]),
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "max": lambda x, d: x.amax(d, keepdim=True),
    "min": lambda x, d: x.amin(d, keepdim=True),
    "var": lambda x, d: x.var(d, keepdim=True),
    "biased_var": lambda x, d: x.var(d, correction=0, keepdim=True),
    "norm": lambda x, d: x.square().mean(d, keepdim=True).sqrt(),
    "sum_exp": lambda x, d: x.exp().mean(d, keepdim=True),
    "logsumexp": lambda x, d: x.logsumexp(d, keepdim=True),
    "largest": lambda x, d: x.argmax(d, keepdim=True).to(x.dtype) / x.shape[d],
    "positive": lambda x, d: (x > 0).sum(d, keepdim=True) / x.shape[d],
}
# What is done with a value and the result of its reduction; values stay of the size of 1.
STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "less": lambda x, r, d: x - r,
    "exp_less": lambda x, r, d: (x - r).clamp(max=1).exp(),
    "exp": lambda x, r, d: torch.exp(x - r.abs() - 3),
    "square": lambda x, r, d: (x - r).square().clamp(max=50) / 8,
    "scaled": lambda x, r, d: x * torch.sigmoid(r),
    "softmax": lambda x, r, d: torch.softmax(x, d) * 50 * torch.sigmoid(r),
    "both": lambda x, r, d: torch.maximum(x, r) - x * 0.5,
}
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "rows": ((40, 300), 1), "few_rows": ((2, 9001), 1), "one_row": ((1, 12001), 1), "short_rows": ((70, 13), 1),
    "columns": ((300, 40), 0), "few_columns": ((2500, 3), 0), "middle": ((3, 120, 17), 1),
}  # fmt: skip
# For the interpreter, which compares an element at a time: the same kernels are made for these.
SHORT: dict[str, tuple[int, ...]] = {
    "rows": (6, 300), "few_rows": (2, 1101), "one_row": (1, 1501), "columns": (130, 37), "few_columns": (700, 3),
    "long_rows": (3, 1301),
}  # fmt: skip
PAIR_SHAPES: dict[str, tuple[tuple[int, ...], int]] = {**SHAPES, "long_rows": ((70, 20001), 1)}  # are looped over
# The two last ones were wrong: a variance of columns, in one reading, in a phase that goes backwards.
CHAINS = (*(f"chain/{n}" for n in range(12)), "chain/104", "chain/112")
PAIRS = (*(f"pair/{n}" for n in range(8)), "pair/13", "pair/63")  # 5, 13, 63: several maxima or variances at once


def chain_case(seed: int, short: bool = False) -> Case:
    """The chain of a number: two or three reductions with a step between each two, and some of their results."""
    rng = random.Random(f"{seed} chain")
    kind = rng.choice(list(SHAPES))
    shape, dim = SHAPES[kind]
    shape = SHORT.get(kind, shape) if short else shape
    names = [(rng.choice(list(REDUCTIONS)), rng.choice(list(STEPS))) for _ in range(rng.choice((2, 2, 3)))]
    again, whole, dtype = rng.random() < 0.3, rng.random() < 0.4, rng.choice((torch.float32,) * 3 + (torch.bfloat16,))

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        wide = value = x.float() if dtype is torch.bfloat16 else x
        for reduction, step in names:
            found = REDUCTIONS[reduction](value, dim)
            results.append(found.squeeze(dim))
            value = STEPS[step](wide if again else value, found, dim)
        return (*results, value) if whole else tuple(results[1:])

    def make(i: Inputs) -> tuple[Any, ...]:
        return (i.normal(*shape, dtype=dtype),)

    name = "/".join(["chain", str(seed), *(f"{r}-{s}" for r, s in names)])
    return Case(name, run, make)


def pair_case(seed: int, short: bool = False) -> Case:
    """Chains of two tensors, whose last values are combined and reduced: one kernel takes both, phase by phase."""
    rng = random.Random(f"{seed} pair")
    kind = rng.choice(list(PAIR_SHAPES))
    shape, dim = PAIR_SHAPES[kind]
    shape = SHORT.get(kind, shape) if short else shape
    alike = [(rng.choice(list(REDUCTIONS)), rng.choice(list(STEPS))) for _ in range(rng.choice((1, 2)))]
    other = [(rng.choice(list(REDUCTIONS)), rng.choice(list(STEPS))) for _ in alike]
    chains = alike, alike if rng.random() < 0.6 else other
    dtype = rng.choice((torch.float32,) * 3 + (torch.bfloat16,))
    last = rng.choice(("sum", "max", "none"))

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found, values = [], []
        for tensor, names in zip((x, y), chains, strict=True):
            value = tensor.float() if dtype is torch.bfloat16 else tensor
            for reduction, step in names:
                result = REDUCTIONS[reduction](value, dim)
                found.append(result.squeeze(dim))
                value = STEPS[step](value, result, dim)
            values.append(value)
        both = values[0] * values[1]
        return (*found, both if last == "none" else REDUCTIONS[last](both, dim))

    def make(i: Inputs) -> tuple[Any, ...]:
        return i.normal(*shape, dtype=dtype), i.normal(*shape, dtype=dtype)

    name = "/".join(["pair", str(seed), *(f"{r}-{s}" for chain in chains for r, s in chain), last])
    return Case(name, run, make)


def chain_problem(out: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> str | None:
    """None, or which result is wrong: by far more than roundings, which a chain may make larger, can explain."""
    for n, (mine, theirs, wide) in enumerate(zip(out, eager, exact, strict=True)):
        if mine.dtype is not theirs.dtype or mine.shape != theirs.shape:
            return f"result {n} is {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
        if not torch.equal(mine.isfinite(), theirs.isfinite()):
            return f"result {n} is not finite elsewhere than eager's"
        far = [torch.where(wide.isfinite(), x.double() - wide, 0.0).abs().max().item() for x in (mine, theirs)]
        rounding = torch.finfo(mine.dtype).eps if mine.dtype.is_floating_point else 0.0
        most = 8 * far[1] + max(1e-3, rounding) * torch.where(wide.isfinite(), wide, 0.0).abs().max().item()
        if far[0] > most:
            return f"result {n} is {far[0]:.3g} from float64, eager's {far[1]:.3g}"
    return None
