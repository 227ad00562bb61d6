"""Attention as programs write it, over layouts of its operands, readers of its result, dtypes and modes.

A case is compared with eager and with float64: values, dtype and strides of each result, and gradients.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.attention_models import MODELS
from tests.attention_spellings import SPELLINGS
from tests.peers import judge

TABLE = {s.name: s for s in (*SPELLINGS, *MODELS)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Rows without any key, filled with minus infinity: eager's gradients of queries and keys are not NaN (docs/limits.md).
EMPTY_ROWS = ("whisper_bool", "filled_in_place")
MODES = ("inference", "without gradients", "training", "autocast", "autocast training", "dynamic", "dynamic training")
Tensor = torch.Tensor
Layout = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]


def _swapped(a: int, b: int) -> Layout:
    return lambda t: (t.transpose(a, b).contiguous(), lambda x: x.transpose(a, b))


def _map(t: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Heads of a channels-last map."""
    if t.dim() != 4:
        return t.mT.contiguous(), lambda x: x.mT
    b, h, n, d = t.shape
    made = t.transpose(2, 3).reshape(b, h * d, n, 1).contiguous(memory_format=torch.channels_last)
    return made, lambda x: x.flatten(2).view(b, h, d, n).transpose(2, 3)


# Each makes a tensor in memory, and a view of it that has the values and the shape of the operand.
LAYOUTS: dict[str, Layout] = {
    "rows": lambda t: (t.contiguous(), lambda x: x),
    "columns": _swapped(-1, -2),
    "tokens first": _swapped(1, -2),
    "packed": lambda t: (torch.stack([t, t * 2, t], -2), lambda x: x.select(-2, 0)),
    "every third": lambda t: (torch.stack([t, t * 2, t], -1), lambda x: x[..., 0]),
    "gaps": lambda t: (torch.cat([t, t[..., :3]], -1), lambda x, n=t.shape[-1]: x[..., :n]),  # type: ignore[misc]
    "offset": lambda t: (torch.cat([t[:1], t]), lambda x: x[1:]),
    "one head": lambda t: (t[:, :1].contiguous(), lambda x, n=t.shape: x.expand(n)),  # type: ignore[misc]
    "one batch": lambda t: (t[:1].contiguous(), lambda x, n=t.shape: x.expand(n)),  # type: ignore[misc]
    "map": _map,
}


def _projected(t: Tensor, like: Tensor) -> Tensor:
    weight = torch.arange(t.shape[-1] * 3).view(-1, 3) % 7 / 4 - 0.75  # exact in each dtype
    return t @ weight.to(like.dtype if not torch.is_autocast_enabled("cpu") else torch.bfloat16)


# What follows: each takes the result, and the queries for their dtype.
READERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "none": lambda t, q: t,
    "projected": _projected,
    "twice": lambda t, q: (t, _projected(t, q)),
    "heads merged": lambda t, q: t.transpose(1, 2).reshape(t.shape[0], t.shape[2], -1),
    "heads merged in channels": lambda t, q: t.transpose(-1, -2).reshape(t.shape[0], -1, t.shape[-2]),
    "copied": lambda t, q: t.transpose(1, 2).contiguous(),
    "columns": lambda t, q: t.transpose(-1, -2).reshape(-1, t.shape[-1], t.shape[-2]),
    "turned": lambda t, q: t.permute((3, 2, 1, 0) if t.dim() == 4 else (2, 1, 0)).contiguous(),
    "flattened": lambda t, q: t.flatten(0, 1),
    "wide": lambda t, q: t.transpose(1, 2).float(),
    "strides": lambda t, q: t * (t.stride(-1) + 10 * t.stride(1)),
}


@dataclass(frozen=True)
class Case:
    """One spelling, with the layouts of queries, keys and values."""

    spelling: str
    layouts: tuple[str, str, str]
    reader: str
    dtype: torch.dtype
    mode: str
    tokens: int = 12

    def __str__(self) -> str:
        return f"{self.spelling} {self.layouts} {self.reader} {self.dtype} {self.mode}"

    @property
    def trains(self) -> bool:
        return "training" in self.mode

    @property
    def narrows(self) -> bool:
        """Whether products have 16 bits less than the operands: float32 under autocast."""
        return "autocast" in self.mode and self.dtype is torch.float32

    def made(self) -> tuple[list[Tensor], Callable[..., Any]]:
        """The inputs and the function. In training, views of the inputs are the operands."""
        torch.manual_seed(0)
        spelling, reader = TABLE[self.spelling], READERS[self.reader]
        args = spelling.make(2, 4, self.tokens, 16, torch.float32)
        args = [a.to(self.dtype) if a.is_floating_point() else a for a in args]
        bases, views = zip(*(LAYOUTS[n](a) for n, a in zip(self.layouts, args[:3])))

        def operands(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
            return reader(spelling.fn(q, k, v, *others), q)

        def function(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
            return operands(views[0](q), views[1](k), views[2](v), *others)

        if self.trains:
            return [*(b.requires_grad_() for b in bases), *args[3:]], function
        return [*(view(b) for view, b in zip(views, bases)), *args[3:]], operands

    def eager(self) -> tuple[list[Tensor], list[Tensor | None]]:
        args, function = self.made()
        with context(self.mode):
            results = _listed(function(*args))
        return results, gradients(results, args[:3]) if self.trains else []

    def exact(self) -> tuple[list[Any], list[Any]]:
        """The results in float64."""
        given, function = self.made()

        def wide(*args: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
            args = tuple(a.detach().requires_grad_(self.trains and i < 3) for i, a in enumerate(args))
            results = _listed(function(*args))
            return results, gradients(results, list(args[:3])) if self.trains else []

        return judge.widened(wide, given)


def context(mode: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    if mode in ("inference", "autocast", "dynamic"):
        stack.enter_context(torch.no_grad())
    if "autocast" in mode:
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    return stack


def _listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def gradients(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    """The gradients of a sum of all results' elements with factors from -1 to 1."""
    factors = [torch.linspace(-1, 1, r.numel(), dtype=torch.float64).view(r.shape).to(r.dtype) for r in results]
    return list(torch.autograd.grad(results, leaves, factors, allow_unused=True))


def problems(cases: list[Case], backend: Any) -> Iterator[str]:
    """How results of one compiled function of several cases of one mode are worse than eager's."""
    mode = cases[0].mode
    inputs, functions = zip(*(c.made() for c in cases))

    def together(*inputs: list[Tensor]) -> list[Any]:
        return [f(*args) for f, args in zip(functions, inputs)]

    torch._dynamo.reset()
    with context(mode):
        found = [_listed(r) for r in torch.compile(together, backend=backend, dynamic="dynamic" in mode)(*inputs)]
    leaves = [leaf for args in inputs for leaf in args[:3]]
    slopes = gradients([r for rs in found for r in rs], leaves) if "training" in mode else []
    for n, (case, got) in enumerate(zip(cases, found)):
        (want, wanted), (exact, exactly) = case.eager(), case.exact()
        for r, triple in enumerate(zip(got, want, exact, strict=True)):
            if (problem := judge.problem(f"{case}, result {r}", *triple, ulps=4 << 16 * case.narrows)) is not None:
                yield problem
        for g, triple in enumerate(zip(slopes[3 * n : 3 * n + 3], wanted, exactly, strict=True)):
            ulps = (8 if case.dtype.itemsize == 2 else 64) << 16 * case.narrows
            if (problem := judge.problem(f"{case}, gradient {g}", *triple, strides=False, ulps=ulps)) is not None:
                if not _is_tiny(triple[0], triple[1]):
                    yield problem


def _is_tiny(got: Any, want: Any) -> bool:
    """Whether a difference is a rounding of the operands: a gradient may be 0 because all its terms cancel."""
    return got.dtype is want.dtype and bool((got - want).abs().max() <= 16 * torch.finfo(want.dtype).eps)


def sampled(seed: int) -> list[Case]:
    """Four cases that eager runs, all of one dtype and mode; two with symbolic sizes, which take long to trace."""
    rng = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    dtype = DTYPES[seed // len(MODES) % len(DTYPES)] if "autocast" not in mode else DTYPES[seed // len(MODES) % 2]
    names = [n for n in TABLE if not ("training" in mode and n in EMPTY_ROWS)]
    found: list[Case] = []
    while len(found) < (2 if "dynamic" in mode else 4):
        layouts = rng.choice([[rng.choice(list(LAYOUTS))] * 3, rng.choices(list(LAYOUTS), k=3)])
        case = Case(rng.choice(names), tuple(layouts), rng.choice(list(READERS)), dtype, mode)  # type: ignore[arg-type]
        try:
            case.eager()
        except (RuntimeError, IndexError):
            continue
        found.append(case)
    return found
