"""One sample of one operator through fuser, compared with eager.

Routes:
  call      the operator as users call it, registered as a graph of one node
  aten      what make_fx traces of it, ATen's own operators, registered whole
  copies    the same as `aten` by `functional=True`, which lets views be copies
  functional  the same as `aten` with writes made functional, as AOTAutograd does it
  plans     the same as `functional`, but its kernel plans are run by the interpreter: no compiler, so much quicker
  compile   torch.compile(backend="fuser")
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fuser import register_fusion
from fuser.arguments import home_of, why_unfit
from fuser.canonical import canonicalize, interpret
from fuser.debug.reference import interpret_schedule, verify_lowered
from fuser.errors import FuserError, Unsupported
from fuser.frontends.dynamo import fuser_backend
from fuser.kernel_cache import REGISTRY
from fuser.lowering.graph import lower_graph
from fuser.scheduler.schedule import schedule
from tests import compare

NATIVE, PARTLY, ATEN, REFUSED, WRONG, SKIPPED = "native", "partly", "aten", "refused", "wrong", "skipped"
SEED = 42  # what the database itself uses for operators that draw random numbers


@dataclass(frozen=True)
class Sample:
    """An operator's call: `call(*tensors)` makes it. `undefined`: results that nothing has written; None: all."""

    call: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    undefined: tuple[int, ...] | None = ()


@dataclass
class Outcome:
    """What happened: `status` is one of the constants above, `reason` why it is not native or what is wrong."""

    status: str
    reason: str = ""
    problems: list[str] = field(default_factory=list)


def make_sample(function: Callable[..., Any], sample: Any, undefined: tuple[int, ...] | None = ()) -> Sample:
    """The call `function(sample.input, *sample.args, **sample.kwargs)`, its tensors apart."""
    flat, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    at = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        values = list(flat)
        for i, t in zip(at, tensors):
            values[i] = t
        args, kwargs = pytree.tree_unflatten(values, spec)
        return function(*args, **kwargs)

    args, kwargs = pytree.tree_unflatten(flat, spec)
    return Sample(call, tuple(flat[i] for i in at), function, tuple(args), kwargs, undefined)


def _eager(call: Callable[..., Any], tensors: Sequence[Any]) -> tuple[Any, Exception | None]:
    torch.manual_seed(SEED)
    try:
        return call(*tensors), None
    except Exception as e:
        return None, e


def alone_eagerly(sample: Sample) -> tuple[Any, Exception | None]:
    """What eager gives, on copies of the sample's tensors, or what it raises."""
    return _eager(sample.call, compare.copy_inputs(sample.tensors))


def call_graph(sample: Sample, result: Any) -> torch.fx.Graph:
    """The call as a graph of one node (and one for each of several results)."""
    graph = torch.fx.Graph()
    nodes = iter([graph.placeholder(f"t{i}") for i in range(len(sample.tensors))])

    def put(v: Any) -> Any:
        return next(nodes) if isinstance(v, torch.Tensor) else v

    args, kwargs = pytree.tree_map(put, (sample.args, sample.kwargs))
    node = graph.call_function(sample.function, args, kwargs)
    if isinstance(result, (tuple, list)):
        graph.output(tuple(graph.call_function(operator.getitem, (node, i)) for i in range(len(result))))
    else:
        graph.output(node)
    return graph


def aten_graph(sample: Sample, functional: bool) -> torch.fx.Graph:
    """The call as make_fx sees it; `functional`: without writes, which must not be into inputs."""

    def flat(*tensors: torch.Tensor) -> tuple[Any, ...]:
        return tuple(pytree.tree_leaves(sample.call(*tensors)))

    torch.manual_seed(SEED)
    traced = dispatch_functionalize(flat) if functional else flat
    return make_fx(traced)(*compare.copy_inputs(sample.tensors)).graph


def run(sample: Sample, route: str) -> Outcome:
    """The sample through `route`. Whatever goes wrong is in the outcome; nothing is raised."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = compare.copy_inputs(sample.tensors)
        want, error = _eager(sample.call, own)
        writes = any(map(_changed, own, sample.tensors))
        leaves = compare.leaves(want)
        if error is None and not any(isinstance(v, torch.Tensor) for v in leaves):
            return Outcome(SKIPPED, "no tensor comes out")
        try:
            runner = _runner(sample, route, want, writes)
        except FuserError as e:
            return Outcome(REFUSED, f"{type(e).__name__}: {e}")
        except Exception as e:
            return Outcome(SKIPPED, f"no graph: {type(e).__name__}: {str(e).splitlines()[:1]}")
        return _compare(sample, route, runner, own, want, error)


def _changed(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` is no longer `b`."""
    if a.shape != b.shape or a.layout is not torch.strided:
        return a.shape != b.shape
    return not torch.equal(a, b) and not bool(((a == b) | ((a != a) & (b != b))).all())


class _Registered:
    """A registered graph as a callable; knows afterwards whether a kernel ran."""

    def __init__(self, graph: torch.fx.Graph, functional: bool, untraced: str = "") -> None:
        self.untraced = untraced
        self.key = register_fusion(graph, functional=functional)
        self.registration = REGISTRY.find(self.key)
        self.before = sum(self.registration.spec.store.fallbacks.values())

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.registration.handle(*tensors)

    def outcome(self) -> Outcome:
        """Native, or ATen with the reason."""
        store = self.registration.spec.store
        if sum(store.fallbacks.values()) == self.before:
            return Outcome(NATIVE)
        if self.untraced:
            return Outcome(ATEN, self.untraced)
        return Outcome(ATEN, self.registration.spec.blocked[0] if self.registration.spec.blocked else _last(store))


def _last(store: Any) -> str:
    reasons = [e.reason for e in store.entries if e.reason is not None]
    return reasons[-1] if reasons else next(reversed(store.fallbacks), "")


class Interpreted:
    """A graph's kernel plans, run by torch. `in_place`: it may write its inputs."""

    def __init__(self, graph: torch.fx.Graph, in_place: bool = False) -> None:
        self.registered = canonicalize(graph, True, in_place)
        self.reason: str | None = next(iter(self.registered.blocked), None)

    def __call__(self, *inputs: Any) -> Any:
        found = self.planned(*inputs)
        return interpret(self.registered.graph, (*self.registered.bound, *inputs)) if found is None else found

    def planned(self, *inputs: Any) -> tuple[Any, ...] | None:
        """The results of kernel plans, or None, with a reason."""
        args = (*self.registered.bound, *inputs)
        self.reason = self.reason or why_unfit(args, home_of(self.registered.graph))
        if self.reason is not None:
            return None
        try:
            lowered = lower_graph(self.registered.graph, args)
            plans = schedule(lowered, 256)
        except Unsupported as e:
            self.reason = e.reason
            return None
        verify_lowered(lowered, plans)
        return tuple(interpret_schedule(lowered, plans, args))

    def outcome(self) -> Outcome:
        """Native, or the reason why not."""
        return Outcome(NATIVE) if self.reason is None else Outcome(ATEN, self.reason)


class _Compiled:
    """The call through torch.compile."""

    def __init__(self, sample: Sample) -> None:
        torch._dynamo.reset()
        self.compiled = torch.compile(sample.call, backend=fuser_backend)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.compiled(*tensors)

    def outcome(self) -> Outcome:
        """Native, partly or ATen by what the frontend recorded."""
        from fuser.frontends.records import last_compilation

        record = last_compilation()
        if record is None:
            return Outcome(ATEN, "dynamo made no graph")
        reasons = [u.reason for u in record.unfused]
        if record.ops_fused and not reasons:
            return Outcome(NATIVE)
        return Outcome(PARTLY if record.ops_fused else ATEN, reasons[0] if reasons else record.reason)


def _runner(sample: Sample, route: str, want: Any, writes: bool) -> Any:
    if route == "compile":
        from fuser.frontends.records import forget_compilations

        forget_compilations()
        return _Compiled(sample)
    if route == "call":
        return _Registered(call_graph(sample, want), False)
    try:
        graph = aten_graph(sample, route in ("functional", "plans") and not writes)
    except Exception as e:
        return _Registered(call_graph(sample, want), False, _why_no_trace(e))
    return Interpreted(graph) if route == "plans" else _Registered(graph, route == "copies")


def _why_no_trace(e: Exception) -> str:
    text = str(e).partition("\n")[0]
    if "get value out of a tracing tensor" in text:
        return f"it reads a tensor's values on the way, by {text.partition(' with ')[2].partition(' ')[0]}"
    return f"no trace: {type(e).__name__}: {text}"


def _compare(
    sample: Sample, route: str, runner: Any, own: list[Any], want: Any, error: Exception | None
) -> Outcome:  # fmt: skip
    mine = compare.copy_inputs(sample.tensors)
    got, failure = _eager(runner, mine)
    if error is not None or failure is not None:
        return _compare_errors(error, failure, runner)
    outcome: Outcome = runner.outcome()
    got_leaves, want_leaves = compare.leaves(got), compare.leaves(want)
    forget_undefined(sample, (got_leaves, want_leaves), (mine, own))
    functional = route in ("copies", "plans")
    problems = differences(sample, got_leaves, want_leaves, mine, own, not functional)
    if not functional and not problems:
        aliases = compare.alias_pattern(mine, got_leaves), compare.alias_pattern(own, want_leaves)
        if aliases[0] != aliases[1]:
            problems.append(f"aliasing {aliases[0]} instead of {aliases[1]}")
    return Outcome(WRONG, outcome.status, problems) if problems else outcome


def forget_undefined(sample: Sample, results: Iterable[list[Any]], inputs: Iterable[Sequence[Any]]) -> None:
    """Set what holds whatever was in memory to zero, in lists of results and, where all does, of inputs."""
    everything = sample.undefined is None
    for own in results:
        for t in own if everything else [own[i] for i in sample.undefined or ()]:
            t.zero_()
    for t in (t for own in inputs for t in own if everything):
        t.zero_()


def exact_of(sample: Sample) -> list[Any]:
    """The results, computed in float64, and after them the sample's tensors as that left them."""
    torch.manual_seed(SEED)
    wide = compare.in_float64(compare.copy_inputs(sample.tensors))
    tensors = iter(wide)

    def put(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return next(tensors)
        return torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v

    args, kwargs = pytree.tree_map(put, (sample.args, sample.kwargs))
    torch.set_default_dtype(torch.float64)  # what becomes of integers
    try:
        return [*compare.leaves(sample.function(*args, **kwargs)), *wide]
    finally:
        torch.set_default_dtype(torch.float32)


def differences(
    sample: Sample, got: list[Any], want: list[Any], mine: Sequence[Any], own: Sequence[Any], strides: bool = True
) -> list[str]:  # fmt: skip
    """What is different in the results, and in what the inputs `mine` and eager's `own` hold afterwards."""
    exact = functools.cache(lambda: exact_of(sample))
    low = compare.lowest([*sample.tensors, *want])
    problems = compare.differences(got, want, lambda: exact()[: len(want)], strides=strides, low=low)
    for i, (a, b) in enumerate(zip(mine, own)):
        changed = compare.differences([a], [b], lambda at=i: [exact()[len(want) + at]])
        problems += [f"input {i} afterwards: {p}" for p in changed]
    return problems


def _compare_errors(error: Exception | None, failure: Exception | None, runner: Any) -> Outcome:
    if error is None:
        text = str(failure).splitlines()
        return Outcome(WRONG, "raises", [f"raises {type(failure).__name__}: {text[0] if text else ''}"])
    if failure is None:
        return Outcome(WRONG, "silent", [f"eager raises {type(error).__name__}: {str(error)[:200]}"])
    if isinstance(failure, FuserError):
        return Outcome(REFUSED, f"{type(failure).__name__}: {failure}")
    return Outcome(ATEN, "eager raises")
