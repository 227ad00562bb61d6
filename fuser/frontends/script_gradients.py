"""Gradients of a registered fusion: a fused forward and backward, compiled when a call first needs them.

AOTAutograd traces the group's fallback once for each class of arguments, with symbolic sizes. Its autograd function
then serves all sizes for which the trace is valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from fuser import forks
from fuser.arguments import arg_spec
from fuser.frontends import fakes
from fuser.frontends.failures import guarded, say_unfused
from fuser.frontends.higher_order import differentiable_twice
from fuser.frontends.replay import Replay
from fuser.frontends.training import Training
from fuser.passes.dispatched import in_fast_forms
from fuser.runtime.memory import Tally

Function = Callable[..., Any]
MAX_PROGRAMS = 16  # of one fusion; further classes of arguments run on ATen


class Gradients:
    """Runs the calls of one fusion whose arguments require gradients. `fallback` is the fusion on ATen."""

    def __init__(self, fallback: Function) -> None:
        self._fallback = fallback
        self._programs: dict[Any, list[_Program]] = {}
        self._count = 0
        self._lock = forks.lock()
        self.reasons = Tally()  # of calls that ran on ATen

    def __call__(self, *args: Any) -> Any:
        kind = _kind(args)
        found = next((p for p in self._programs.get(kind, ()) if p.takes(args)), None)
        if found is None:
            found = self._compile(kind, args)
        return self._fallback(*args) if found is None else found(*args)

    def _compile(self, kind: Any, args: tuple[Any, ...]) -> _Program | None:
        with self._lock:
            found = next((p for p in self._programs.get(kind, ()) if p.takes(args)), None)
            if found is not None:
                return found
            if self._count >= MAX_PROGRAMS:
                self.reasons.note(f"more than {MAX_PROGRAMS} classes of arguments need gradients")
                return None
            self._count += 1
            try:
                made = _program(self._fallback, args)
            except Exception as e:  # if it cannot be traced, its gradients are ATen's
                reason = f"its gradient is not fused: {type(e).__name__}: {(str(e).strip() or '.').splitlines()[0]}"
                self.reasons.note(reason)
                say_unfused(reason)
                return None
            self._programs.setdefault(kind, []).append(made)
            return made


def _kind(args: Sequence[Any]) -> Any:
    """The properties on which the trace of a call depends, except relations between sizes."""
    numbers = tuple(a for a in args if isinstance(a, bool))
    needed = tuple(a.requires_grad for a in args if isinstance(a, torch.Tensor))
    return arg_spec(args, ()), needed, numbers


class _Whole(nn.Module):
    """A fusion's fallback as a module whose results are a tuple."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.single = True

    def forward(self, *args: Any) -> tuple[Any, ...]:
        traced = any(isinstance(a, torch.SymFloat) for a in args)
        with _Powers() if traced else contextlib.nullcontext():
            result = self.function(*args)
        self.single = not isinstance(result, (tuple, list))
        return (result,) if self.single else tuple(result)


_aten = torch.ops.aten
_POWERS = (torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.__rpow__, _aten.pow, _aten.pow.Tensor_Scalar,
           _aten.pow.Scalar)  # fmt: skip


class _Powers(TorchFunctionMode):
    """Powers with a symbolic float as tensor operations: torch's gradient formulas read a number's value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _POWERS and len(args) == 2 and not kwargs:
            base, exponent = reversed(args) if func is torch.Tensor.__rpow__ else args
            tensor = base if isinstance(base, torch.Tensor) else exponent
            if tensor.dtype in (torch.float32, torch.float64):
                base, exponent = (_opened(v, tensor) for v in (base, exponent))
                return torch.pow(base, exponent)
        return func(*args, **kwargs or {})


def _opened(value: Any, like: torch.Tensor) -> Any:
    """A symbolic float as a 0-dim tensor; any other value unchanged."""
    make: Any = torch.scalar_tensor
    return make(value, dtype=like.dtype) if isinstance(value, torch.SymFloat) else value


def _program(fallback: Function, args: Sequence[Any]) -> _Program:
    """The program for a call: floats are arguments of the trace, or constants if torch cannot trace it so."""
    for _ in range(2 if any(type(a) is float for a in args) else 0):
        try:
            return _Program(fallback, args, open_floats=True)
        except Exception as e:
            if type(e).__name__ != "TensorifyScalarRestartAnalysis":  # by which torch requests a second trace
                break
    return _Program(fallback, args)


class _Program:
    """A compiled forward and backward for one class of arguments. `open_floats`: for floats of any value."""

    def __init__(self, fallback: Function, args: Sequence[Any], open_floats: bool = False) -> None:
        self._env = ShapeEnv()
        self._open_floats = open_floats
        mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._fake = [self._like(mode, i, a) for i, a in enumerate(args)]
        whole: Any = _Whole(fallback)
        steps = Training({}, ())
        fakes.correct(mode)
        with tracing(TracingContext(mode)), in_fast_forms():
            compiled = steps.trace(whole, self._fake)
        self._single = whole.single
        self._run = guarded(differentiable_twice(compiled, Replay(whole)), whole, Tally())
        self._guards = [g.expr for g in self._env.guards]
        self._held: dict[tuple[Any, ...], bool] = {}

    def __call__(self, *args: Any) -> Any:
        results = self._run(*args)
        return results[0] if self._single else tuple(results)

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether the assumptions of the trace about sizes hold for these arguments of the class."""
        sizes = tuple(tuple(a.shape) + a.stride() if isinstance(a, torch.Tensor) else a for a in args)
        if sizes not in self._held:
            if len(self._held) >= 256:
                self._held.clear()
            self._held[sizes] = self._holds(args)
        return self._held[sizes]

    def _holds(self, args: Sequence[Any]) -> bool:
        values: dict[Any, float] = {}
        for fake, given in zip(self._fake, args, strict=True):
            pairs = [(fake, given)]
            if isinstance(given, torch.Tensor):
                pairs = [*zip(fake.shape, given.shape, strict=True), *zip(fake.stride(), given.stride(), strict=True)]
            for symbolic, number in pairs:
                if not isinstance(symbolic, (torch.SymInt, torch.SymFloat)):
                    if symbolic != number:
                        return False
                    continue
                symbol = symbolic.node._expr  # as it was made: `expr` is what the trace replaced it with
                if symbol.is_Symbol and values.setdefault(symbol, number) != number:
                    return False
        return all(str(guard.xreplace(values)) == "True" for guard in self._guards)

    def _like(self, mode: FakeTensorMode, number: int, given: Any) -> Any:
        source = torch._dynamo.source.ConstantSource(f"i{number}")
        if isinstance(given, torch.Tensor):
            context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * given.dim())
            return mode.from_tensor(given, symbolic_context=context, source=source)
        if type(given) is int:
            return self._env.create_unspecified_symint_and_symbol(given, source, DimDynamic.DUCK)
        if type(given) is float and self._open_floats:
            symbol = self._env.create_unspecified_symbol(given, source, DimDynamic.DYNAMIC)
            return self._env.create_symfloatnode(symbol, hint=given, source=source)
        return given
