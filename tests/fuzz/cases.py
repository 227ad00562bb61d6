"""A program's text, how it is run, and whether two runs did the same: results, memory, versions and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests import compare
from tests.device import test_device
from tests.fuzz import judge
from tests.fuzz.check import _compare_memory
from tests.fuzz.program import Program
from tests.fuzz.writer import make_function

Function = Callable[..., Any]
MODES = ("none", "grad", "inference", "autocast")
_NARROW = re.compile(r"torch\.(float16|bfloat16|float32|half|float)\b")
_METHODS = re.compile(r"\.(half|bfloat16|float)\(\)")
_PERTURBED = 6  # runs in float64 with noise on every value, to see how far roundings reach


@dataclass(frozen=True)
class Case:
    """One text by one route. `text` defines `program`, and a `module` if it has weights; `inputs_text` defines
    `inputs`; `low` is the least precise dtype in play. `program` is the data it was written from, if it was."""

    seed: int
    route: str
    mode: str
    text: str
    inputs: Callable[[], list[torch.Tensor]]
    inputs_text: str
    low: torch.dtype | None
    program: Program | None = None
    writes: bool = False
    exact: bool = False  # whether results are what `program` says, to the bit where it says so


@dataclass
class Observation:
    """What a run did. `error` alone, if it raised."""

    outputs: list[Any] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)  # whose version has changed
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)  # a module's buffers
    error: Exception | None = None


@contextlib.contextmanager
def mode_of(name: str) -> Iterator[None]:
    """The grad mode, or autocast, in which a case runs."""
    with contextlib.ExitStack() as stack:
        if name == "grad":
            stack.enter_context(torch.enable_grad())
        elif name == "inference":
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.no_grad())
        if name == "autocast":
            stack.enter_context(torch.autocast(test_device(), dtype=torch.bfloat16))
        yield


def _weights(result: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(result.numel(), device=result.device) % 5 - 2
    return (steps.to(result.dtype) / 2).reshape(result.shape)


def case_inputs(case: Case) -> list[torch.Tensor]:
    """New inputs on the device that is tested; in mode "grad" those that may require gradients do."""
    made = case.inputs()
    if case.program is None:
        made = [x.to(test_device()) for x in made]
    if case.mode == "grad":
        own = [x._base is None or not any(x._base is y for y in made) for x in made]
        aliased = case.program is not None and any(x.of >= 0 for x in case.program.inputs)
        for x, alone in zip(made, own):
            if alone and not aliased and x.is_floating_point():
                x.requires_grad_()
    return made


def module_of(function: Callable[..., Any]) -> torch.nn.Module | None:
    """The module that a text defined beside its function."""
    return getattr(function, "__globals__", {}).get("module")


def observe(cases: Sequence[Case], functions: Sequence[Function], run: Function) -> list[Observation]:
    """What `run`, a function of lists of inputs for each case, does. `functions` hold the modules."""
    inputs = [case_inputs(c) for c in cases]
    inference = cases[0].mode == "inference"
    versions = [[0 if inference else x._version for x in own] for own in inputs]
    with mode_of(cases[0].mode):
        if inference:
            inputs = [_inference(own) for own in inputs]
        try:
            results = run(inputs)
        except Exception as e:
            return [Observation(error=e) for _ in cases]
    seen = []
    for own, before, result, f in zip(inputs, versions, results, functions):
        written = [not inference and x._version != v for x, v in zip(own, before)]
        module = module_of(f)
        state = [b.clone() for b in module.buffers()] if module is not None else []
        seen.append(Observation(compare.leaves(result), own, written, state=state))
    if cases[0].mode == "grad":
        _differentiate(seen, functions)
    return seen


def _inference(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return compare.copy_inputs(inputs)


def _differentiate(seen: list[Observation], functions: Sequence[Callable[..., Any]]) -> None:
    """Gradients of all results with fixed weights, of all cases at once."""
    roots, weights, leaves, owners = [], [], [], []
    for o, f in zip(seen, functions):
        module = module_of(f)
        own = [x for x in (*o.inputs, *(module.parameters() if module is not None else ())) if x.requires_grad]
        results = [r for r in o.outputs if isinstance(r, torch.Tensor) and r.requires_grad]
        if not results or not own:
            continue
        roots += results
        weights += [_weights(r) for r in results]
        leaves += own
        owners += [o] * len(own)
    if not roots:
        return
    try:
        made = torch.autograd.grad(roots, leaves, weights, allow_unused=True)
    except Exception as e:
        for o in seen:
            o.error = e
        return
    for o, g in zip(owners, made):
        o.gradients.append(g)


def eager(case: Case) -> Observation:
    """What the text itself does."""
    function = make_function(case.text)
    return observe([case], [function], lambda ins: [function(*ins[0])])[0]


def drawn(case: Case, draw: int) -> Case:
    """A chain of modules with the inputs of another draw; 0 is its own."""
    text = re.sub(r"manual_seed\((\d+)\)", lambda m: f"manual_seed({int(m[1]) + 7919 * draw})", case.inputs_text)
    return dataclasses.replace(case, inputs_text=text, inputs=lambda: list(make_function(text, "inputs")()))


def exact(case: Case) -> Observation:
    """What the text does in float64."""
    return _Exact(case)._run(None)


def rounded(case: Case, draw: int) -> Observation:
    """What the text does in float64 with the roundings of the real dtypes, drawn at random."""
    return _Exact(case)._run(None, _Roundings(case.low or torch.float32, draw))


def problems(case: Case, got: Observation, want: Observation) -> str:
    """What is wrong, "" if nothing."""
    if got.error is not None or want.error is not None:
        if got.error is not None and want.error is not None:
            return ""
        which = "raises" if got.error is not None else "gives a result where eager raises"
        error = got.error or want.error
        return f"{which} {type(error).__name__}: {str(error)[:300]}"
    found = _value_problems(case, got, want)
    found += [f"input {i}: its version {'stays' if b else 'changes'}"
              for i, (a, b) in enumerate(zip(got.written, want.written)) if a != b]  # fmt: skip
    for i, (a, b) in enumerate(zip(got.outputs, want.outputs)):
        if isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor):
            if a.requires_grad != b.requires_grad:
                found.append(f"output {i}: requires_grad is {a.requires_grad}")
            if a.is_inference() != b.is_inference():
                found.append(f"output {i}: is_inference() is {a.is_inference()}")
    return "; ".join(found)


def _value_problems(case: Case, got: Observation, want: Observation) -> list[str]:
    exact = _Exact(case)
    if case.exact and case.program is not None and len(got.outputs) == len(want.outputs):
        found = [] if _same(got.outputs, want.outputs) else judge.what_differs(
            case.program, got.outputs, want.outputs, None, strides=True)  # fmt: skip
    else:
        found = _far("output", case, got.outputs, want.outputs, exact, "outputs")
    found += _far("gradient", case, _at_nan(case, got, want), want.gradients, exact, "gradients")
    found += _far("buffer", case, got.state, want.state, exact, "state")
    if not found and case.writes:
        found += _compare_memory(got.inputs, want.inputs, got.outputs, want.outputs, False, lambda: exact("inputs"))
    elif not found:
        aliases = [compare.alias_pattern(o.inputs, o.outputs, False) for o in (got, want)]
        if aliases[0] != aliases[1]:
            found.append(f"aliasing {aliases[0]} instead of {aliases[1]}")
    return found


def _at_nan(case: Case, got: Observation, want: Observation) -> list[torch.Tensor | None]:
    """The gradients, with eager's where one of the two is NaN or nothing and the input is NaN.

    If a function with a kink met NaN on the way, also where one of the two or the input is NaN: the input may have
    other gradients beside that function's.

    Such functions compare, and which comparison a NaN fails differs between eager's vectors and what is left over
    beside them.
    """
    leaves = [x.detach() for x in want.inputs if x.requires_grad]
    made, kinked = list(got.gradients), functools.cache(lambda: _kink_meets_nan(case))
    for n, (x, a, b) in enumerate(zip(leaves, got.gradients, want.gradients)):
        if a is not None and b is not None and a.shape == b.shape == x.shape and a.dtype == b.dtype:
            one = a.isnan() ^ b.isnan()
            either = x.isnan() & (one | (a == 0) | (b == 0))
            at_nan = one | x.isnan() & (a != b)
            if (at_nan & ~either).any() and kinked():
                either = at_nan
            made[n] = torch.where(either, b, a) if either.any() else a
    return made


class _Kinks(TorchDispatchMode):
    """Sees whether the gradient of a function with a kink is asked for at NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.at_nan = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _KINKED:
            at = [a for a in args[1:] if isinstance(a, torch.Tensor) and a.is_floating_point()]
            self.at_nan |= any(bool(a.isnan().any()) for a in at)
        return func(*args, **(kwargs or {}))


_KINKED = {
    f"aten::{name}_backward"
    for name in ("elu", "hardtanh", "leaky_relu", "threshold", "hardshrink", "softshrink", "hardsigmoid", "hardswish")
}


def _kink_meets_nan(case: Case) -> bool:
    with _Kinks() as seen:
        eager(case)
    return seen.at_nan


def _same(got: Sequence[Any], want: Sequence[Any]) -> bool:
    """Whether results agree to the bit, with strides: then there is nothing to compute in float64."""
    for a, b in zip(got, want):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return False
        if compare._form_difference(a, b, True) or not judge.is_identical(a, b):
            return False
    return True


def _far(what: str, case: Case, got: Sequence[Any], want: Sequence[Any], exact: _Exact, kind: str) -> list[str]:
    if len(got) != len(want):
        return [f"{len(got)} {what}s instead of {len(want)}"]
    found = []
    for n, (a, b) in enumerate(zip(got, want)):
        if b is None or a is None:
            if (a is None) != (b is None):
                found.append(f"{what} {n}: {type(a).__name__} instead of {type(b).__name__}")
            continue
        for p in compare.differences([a], [b], lambda n=n: [exact(kind)[n]], strides=kind != "gradients", low=case.low):
            form = compare._form_difference(a, b, kind != "gradients")
            if form or not exact.explains(kind, n, a, b):
                found.append(f"{what} {n}: {p.removeprefix('result 0: ')}")
    return found


class _Exact:
    """The same text in float64, run when it is asked for; and how far roundings can take each of its values."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seen: Observation | None = None
        self.noisy: list[Observation] = []

    def __call__(self, kind: str) -> list[Any]:
        if self.seen is None:
            self.seen = self._run(None)
        if self.seen.error is not None:
            raise self.seen.error
        return list(getattr(self.seen, kind))

    def explains(self, kind: str, n: int, got: Any, want: Any) -> bool:
        """Whether roundings on the way explain a difference: values in float64 with noise differ as much."""
        if not isinstance(got, torch.Tensor) or got.is_complex():
            return False
        try:
            exact = self(kind)[n].double()
            self.noisy = self.noisy or [self._run(i) for i in range(_PERTURBED)]
            runs = [getattr(o, kind)[n].double() for o in self.noisy]
        except Exception:
            return False
        x, y = got.double(), want.double()
        if not got.is_floating_point():
            return bool(((x == y) | torch.stack([r != y for r in runs]).any(0)).all())
        spread = torch.stack([(r - exact).abs().nan_to_num(0.0, float("inf")) for r in runs]).amax(0)
        finite = torch.stack([r.isfinite() for r in runs]).all(0) & exact.isfinite()
        eps = torch.finfo(self.case.low or got.dtype).eps
        gap = torch.fmin((x - y).abs(), (x - exact).abs())
        near = gap <= 8 * spread + 8 * eps * exact.abs() + torch.finfo(got.dtype).tiny
        odd = (x == y) | (x.isnan() & (y.isnan() | exact.isnan())) | (~finite & ~y.isfinite())
        return bool((near | odd).all())

    def _run(self, noise: int | None, roundings: _Roundings | None = None) -> Observation:
        case = self.case
        text = _METHODS.sub(".double()", _NARROW.sub("torch.float64", case.text))
        mode = "grad" if case.mode == "grad" else "none"
        inputs = self._inputs()  # before any cast gives float64
        wide = Case(case.seed, case.route, mode, text, lambda: inputs, "", None, case.program, case.writes)
        eps = 0.0 if noise is None or case.writes else torch.finfo(case.low or torch.float32).eps
        torch.set_default_dtype(torch.float64)
        try:
            function = make_function(text)
            module = module_of(function)
            if module is not None:
                self._widen(module)
            with _Widened(), roundings or (_Noise(eps, noise or 0) if eps else contextlib.nullcontext()):
                return observe([wide], [function], lambda ins: [function(*ins[0])])[0]
        finally:
            torch.set_default_dtype(torch.float32)

    def _widen(self, module: torch.nn.Module) -> None:
        """The module in float64 with the state of the real one: the text draws other numbers in another dtype."""
        torch.set_default_dtype(torch.float32)
        real = module_of(make_function(self.case.text))
        torch.set_default_dtype(torch.float64)
        assert real is not None
        with torch.no_grad():
            for own, value in zip(module.double().state_dict().values(), real.state_dict().values()):
                own.copy_(value)

    def _inputs(self) -> list[torch.Tensor]:
        with torch.no_grad():
            if self.case.program is not None:
                return judge._wide_inputs(self.case.program, None)
            made = [x.to(test_device()) for x in self.case.inputs()]
            return [x.double() if x.is_floating_point() else x for x in made]


class _Widened(TorchFunctionMode):
    """Casts to narrower floating dtypes give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("half", "bfloat16", "float"):
            return args[0].double()
        return func(*map(_wide, args), **{k: _wide(a) for k, a in (kwargs or {}).items()})


def _wide(arg: Any) -> Any:
    return torch.float64 if isinstance(arg, torch.dtype) and arg.is_floating_point else arg


class _Noise(TorchFunctionMode):
    """Every floating result is off by a rounding of relative size `eps`."""

    def __init__(self, eps: float, seed: int) -> None:
        super().__init__()
        self.eps, self.draw = eps, torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        writes = getattr(func, "__name__", "").endswith("_") or "out" in (kwargs or {})
        if writes or not isinstance(made, torch.Tensor) or not made.is_floating_point():
            return made
        with torch._C.DisableTorchFunctionSubclass():
            noise = torch.randn(made.shape, generator=self.draw, dtype=torch.float64)
            return made * (1 + self.eps * noise).to(made.device, made.dtype)


class _Roundings(TorchDispatchMode):
    """Every operator of the forward and the backward rounds its results to `low`, and on the way to them to float32.

    The roundings are random numbers in place of the last bits of float64. What an operator computes inside is that of
    its decomposition. Results behind the first one of a forward are statistics, which not all devices keep in `low`.
    """

    def __init__(self, low: torch.dtype, seed: int) -> None:
        super().__init__()
        self.outer = torch.finfo(low).eps
        self.inner = min(self.outer, torch.finfo(torch.float32).eps)
        self.eps, self.draw = self.outer, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        eps = self.eps
        made = self._computed(func, args, kwargs or {})
        if func._schema.is_mutable or func.is_view:
            return made
        if not isinstance(made, (tuple, list)):
            return self._rounded(made, eps)
        gradients = "backward" in func._schema.name
        results = [self._rounded(m, eps if gradients or not i else self.inner) for i, m in enumerate(made)]
        return results if type(made) is list else tuple(results)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        taken_apart = _decompositions().get(func)
        if taken_apart is None or func._schema.is_mutable or func.is_view:
            return func(*args, **kwargs)
        before, self.eps = self.eps, self.inner
        try:
            with self:
                return taken_apart(*args, **kwargs)
        except (RuntimeError, TypeError, NotImplementedError):  # sizes or options that the decomposition does not know
            return func(*args, **kwargs)
        finally:
            self.eps = before

    def _rounded(self, value: Any, eps: float) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        noise = torch.rand(value.shape, generator=self.draw, dtype=torch.float64) - 0.5
        made = value * (1 + eps * noise).to(value.device, value.dtype)
        if value.dtype is not torch.float64 or not value.numel():
            return made
        with _disable_current_modes():  # no rounding passes a number of the narrow dtype: a sigmoid stays below 1
            step = torch.ldexp(torch.full_like(value, eps), torch.frexp(value).exponent - 1)
            low, high = (value / step).floor() * step, (value / step).ceil() * step
            return torch.where(step > 0, made.clamp(low, high), made)


@functools.cache
def _decompositions() -> dict[Any, Function]:
    """Of operators that sum terms which may cancel: norms, losses and the gradients of both."""
    from torch._decomp import decomposition_table

    named = {f: d for f, d in decomposition_table.items() if isinstance(f, torch._ops.OpOverload)}
    return {f: d for f, d in named.items() if any(t in f._schema.name for t in ("norm", "softmax", "_backward"))}
