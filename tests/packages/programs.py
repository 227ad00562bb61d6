"""One program: run by eager, compiled, and in float64; results, gradients and arguments are compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fuser
from tests.peers.judge import problem

MODES = ("plain", "grad", "dynamic")
_NOISE = 64  # units in the last place of the largest gradient: smaller ones cancel to rounding


@dataclass(frozen=True)
class Program:
    """A function and its arguments, of which a module may be one."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]

    def on(self, device: str) -> Program:
        """The same on a device."""
        move = lambda v: v.to(device) if isinstance(v, (torch.Tensor, nn.Module)) else v  # noqa: E731
        return Program(self.name, self.function, pytree.tree_map(move, list(self.arguments)))


@dataclass(frozen=True)
class Run:
    """What came of a call: its results, gradients, and what became of its arguments."""

    results: list[Any]
    gradients: list[Any]
    arguments: list[Any]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value."""
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _copied(value: Any, wide: bool) -> Any:
    if isinstance(value, nn.Module):
        module = copy.deepcopy(value)
        return module.double() if wide else module
    if isinstance(value, torch.Tensor):
        made = value.detach().clone(memory_format=torch.preserve_format)
        return made.double() if wide and made.is_floating_point() else made
    return value


def run(program: Program, function: Callable[..., Any], grad: bool, wide: bool = False) -> Run:
    """A call with copies of the arguments; with gradients of all that takes some. `wide`: in float64."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # some packages draw from it
    arguments = pytree.tree_map(lambda v: _copied(v, wide), list(program.arguments))
    given = tensors(arguments)
    leaves = [p for m in arguments if isinstance(m, nn.Module) for p in m.parameters()] if grad else []
    leaves += [t.requires_grad_() for t in given if grad and t.is_floating_point()]
    with torch.set_grad_enabled(grad):
        results = pytree.tree_leaves(function(*arguments))
    made = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    gradients: list[Any] = []
    if made and leaves:
        torch.manual_seed(1)
        tangents = [torch.randn(t.shape).to(t) for t in made]
        gradients = list(torch.autograd.grad(made, leaves, tangents, allow_unused=True))
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in results]
    return Run(detached, gradients, [t.detach() for t in given])


def worse(got: Run, want: Run, exact: Run | None) -> str | None:
    """None, or the first thing of `got` that is worse than eager's."""
    for kind in ("results", "gradients", "arguments"):
        ours, theirs = getattr(got, kind), getattr(want, kind)
        if len(ours) != len(theirs):
            return f"{len(ours)} {kind} instead of {len(theirs)}"
        true = getattr(exact, kind, [])
        true = true if len(true) == len(theirs) else [None] * len(theirs)
        largest = max((t.abs().max().item() for t in theirs if _is_finite(t)), default=0.0)
        largest = largest if kind == "gradients" else 0.0
        for n, (a, b, e) in enumerate(zip(ours, theirs, true, strict=True)):
            if a is None and b is None or callable(b):
                continue
            found = problem(f"{kind} {n}", a, b, e)
            if e is None and _is_finite(b):  # not known in float64
                largest = max(largest, b.abs().max().item())
            if found and not (largest and _is_noise(a, b, largest)):
                return found
    return None


def _is_finite(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.numel() > 0 and t.is_floating_point() and bool(t.isfinite().all())


def _is_noise(a: Any, b: Any, largest: float) -> bool:
    if not (_is_finite(a) and _is_finite(b) and a.shape == b.shape and a.dtype is b.dtype):
        return False
    return bool(((a - b).abs() <= _NOISE * torch.finfo(b.dtype).eps * largest).all())


def compiled(program: Program, mode: str, backend: str) -> Callable[..., Any]:
    """The program through torch.compile."""
    torch._dynamo.reset()
    return torch.compile(lambda *a: program.function(*a), backend=backend, dynamic=mode == "dynamic")  # type: ignore[no-any-return]


def check(program: Program, mode: str, backend: str = "fuser") -> str | None:
    """None, or what is wrong of two calls; LookupError if eager itself has no result, or not twice the same."""
    grad = mode == "grad"
    try:
        want = run(program, program.function, grad)
        again = run(program, program.function, grad)
    except Exception as error:
        raise LookupError(str(error)) from None
    if (grad and not want.gradients) or worse(again, want, None):
        raise LookupError("no gradients, or other results in a second run")
    try:
        exact = run(program, program.function, grad, wide=True)
    except Exception:
        exact = None
    with fuser.config.override(random="eager"):
        try:
            function = compiled(program, mode, backend)
            for call in ("first", "second"):
                found = worse(run(program, function, grad), want, exact)
                if found:
                    return f"{call} call: {found}"
        except Exception as error:
            return f"raised {type(error).__name__}: {(str(error).strip() or '.').splitlines()[0]}"
    return None
