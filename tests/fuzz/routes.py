"""The routes from a text to fused kernels, as a table, and what each takes."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fuser import fuse_script, register_fusion
from fuser.errors import FuserError, GraphError
from fuser.frontends.dynamo import fuser_backend
from fuser.frontends.torchscript import to_fx
from fuser.interface import prepare
from fuser.kernel_cache import REGISTRY
from tests.fuzz.cases import Case, Observation, case_inputs, mode_of, module_of, observe
from tests.fuzz.writer import MODULES, make_function

Function = Callable[..., Any]
Backend = Callable[..., Any]
# From functions of the cases, the cases and a backend to a function of a list of inputs for each case.
Maker = Callable[[Sequence[Function], Sequence[Case], Backend], Function]
TOGETHER = 12  # programs in one compiled function; fewer where sizes are symbols, which costs more than in proportion
_files = itertools.count()


class _Begun(Exception):
    """Raised in place of the first run: everything is compiled by then."""


class Gate:
    """fuser's backend, whose functions do not run before it is `open`."""

    open = False

    def __call__(self, gm: Any, examples: Any, **options: Any) -> Function:
        function = fuser_backend(gm, examples, **options)

        def run(*args: Any) -> Any:
            if not self.open:
                raise _Begun
            return function(*args)

        if getattr(function, "_boxed_call", False):
            run._boxed_call = True  # type: ignore[attr-defined]
        return run


@dataclass(frozen=True)
class Route:
    """`make` compiles up to `together` cases as one function; `reproduce` says the same in Python, with `program`
    and `inputs` at hand. `traceable`: only what symbolic tracing sees; `writes`: programs that write are fused, too;
    `lowers`: by AOTAutograd, with a backend."""

    name: str
    make: Maker
    reproduce: str
    modes: tuple[str, ...] = ("none",)
    share: int = 1
    together: int = 1
    traceable: bool = False
    writes: bool = True
    lowers: bool = False


# -- without Dynamo ----------------------------------------------------------------------------------------------------
def _registered(graph: Any, inputs: Sequence[Any]) -> Function:
    key = register_fusion(graph)
    with contextlib.suppress(FuserError):
        prepare(key, inputs)
    return REGISTRY.find(key).handle


_traces: dict[str, torch.fx.GraphModule] = {}  # of texts that nobody has run yet


def is_traceable(text: str, keep: bool = False) -> bool:
    """Whether symbolic tracing takes a text: most writes by an index it does not. With `keep`, the route "fx" uses the
    trace."""
    try:
        trace = torch.fx.symbolic_trace(make_function(text))
    except Exception:
        return False
    if keep:
        if len(_traces) >= 1000:  # of programs that eager does not run
            _traces.clear()
        _traces[text] = trace
    return True


def _by_fx(functions: Sequence[Function], cases: Sequence[Case], backend: Backend) -> Function:
    trace = _traces.pop(cases[0].text, None) or torch.fx.symbolic_trace(functions[0])
    handle = _registered(trace, case_inputs(cases[0]))
    return lambda ins: [handle(*ins[0])]


def _by_make_fx(functions: Sequence[Function], cases: Sequence[Case], backend: Backend) -> Function:
    handle = _registered(make_fx(functions[0])(*case_inputs(cases[0])), case_inputs(cases[0]))
    return lambda ins: [handle(*ins[0])]


def _by_backend(functions: Sequence[Function], cases: Sequence[Case], backend: Backend) -> Function:
    inputs = [case_inputs(c) for c in cases]
    graph = torch.fx.symbolic_trace(_flat_function(functions, [len(own) for own in inputs]))
    function = backend(graph, list(itertools.chain(*inputs)))

    def run(ins: Any) -> list[Any]:
        results = iter(function(*itertools.chain(*ins)))
        return [list(itertools.islice(results, len(c.program.outputs))) for c in cases if c.program is not None]

    return run


def _flat_function(functions: Sequence[Function], counts: Sequence[int]) -> Function:
    """One function that takes all inputs one after the other and gives all results so."""
    names = [[f"v{i}_{n}" for n in range(count)] for i, count in enumerate(counts)]
    calls = ", ".join(f"*p{i}({', '.join(own)})" for i, own in enumerate(names))
    text = f"def batch({', '.join(itertools.chain(*names))}):\n    return {calls},\n"
    return _made(text, functions)


def _by_trace(functions: Sequence[Function], cases: Sequence[Case], backend: Backend) -> Function:
    traced = torch.jit.trace(functions[0], tuple(case_inputs(cases[0])), check_trace=False)
    handle = _registered(to_fx(traced), case_inputs(cases[0]))
    return lambda ins: [handle(*ins[0])]


def _by_script(functions: Sequence[Function], cases: Sequence[Case], backend: Backend) -> Function:
    made = scripted(cases[0].text)
    try:
        handle = _registered(to_fx(made), case_inputs(cases[0]))
    except GraphError as e:
        if "branch depends" not in str(e) and "prim::Loop" not in str(e):  # `list(x)` is a loop
            raise
        handle = fuse_script(made)  # which keeps branches and loops
    return lambda ins: [handle(*ins[0])]


# -- through Dynamo ----------------------------------------------------------------------------------------------------
def batch_function(functions: Sequence[Function]) -> Function:
    """One function that calls all: `batch(inputs)` gives the results of each."""
    calls = ", ".join(f"p{i}(*inputs[{i}])" for i in range(len(functions)))
    return _made(f"def batch(inputs):\n    return [{calls}]\n", functions)


def _made(text: str, functions: Sequence[Function]) -> Function:
    space: dict[str, Any] = {f"p{i}": f for i, f in enumerate(functions)}
    exec(compile(text, f"<batch {next(_files)}>", "exec"), space)
    made: Function = space["batch"]
    return made


def _compiled(**options: Any) -> Maker:
    def make(functions: Sequence[Function], cases: Sequence[Case], backend: Backend) -> Function:
        compiled: Function = torch.compile(batch_function(functions), backend=backend, **options)
        return compiled

    return make


def _by_export(functions: Sequence[Function], cases: Sequence[Case], backend: Backend) -> Function:
    class Whole(torch.nn.Module):
        def forward(self, inputs: Any) -> Any:
            return batch_function(functions)(inputs)

    module = torch.export.export(Whole(), ([case_inputs(c) for c in cases],)).module()
    compiled: Function = torch.compile(module, backend=backend)
    return compiled


def _by_unbacked(functions: Sequence[Function], cases: Sequence[Case], backend: Backend) -> Function:
    compiled = torch.compile(batch_function(functions), backend=backend)

    def run(inputs: Any) -> Any:
        for x in itertools.chain(*inputs):
            if x.dim() and x.shape[0] > 1:
                torch._dynamo.decorators.mark_unbacked(x, 0)
        return compiled(inputs)

    return run


_COMPILE = "torch.compile(program, backend='fuser'{})"
_HANDLE = "fuser.fusion_handle(fuser.register_fusion({}))"
_EVERY_MODE = ("none", "grad", "grad", "inference", "autocast")
ROUTES = (
    Route("fx", _by_fx, _HANDLE.format("torch.fx.symbolic_trace(program)"), share=36,
          traceable=True, writes=False),
    Route("make_fx", _by_make_fx, _HANDLE.format("make_fx(program)(*inputs())"), share=18, writes=False),
    Route("backend", _by_backend, "fuser.backend(torch.fx.symbolic_trace(program), inputs())",
          ("none", "grad", "inference"), share=18, together=TOGETHER, traceable=True, lowers=True),
    Route("trace", _by_trace, _HANDLE.format("to_fx(torch.jit.trace(program, tuple(inputs()), check_trace=False))"),
          share=14, writes=False),
    Route("script", _by_script, _HANDLE.format("to_fx(torch.jit.script(program))"), share=2, writes=False),
    Route("compile", _compiled(), _COMPILE.format(""), _EVERY_MODE, share=12, together=TOGETHER, lowers=True),
    Route("dynamic", _compiled(dynamic=True), _COMPILE.format(", dynamic=True"), ("none", "grad", "inference"), share=2,
          together=3, lowers=True),
    Route("export", _by_export, _COMPILE.replace("program", "torch.export.export(Whole(), inputs).module()").format(""),
          share=1, together=TOGETHER, lowers=True),
    Route("unbacked", _by_unbacked, _COMPILE.format("") + "  # with mark_unbacked(x, 0) of each input", share=1,
          lowers=True),
)  # fmt: skip
BY_NAME = {r.name: r for r in ROUTES}


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """No warnings, and as many compilations as there are programs."""
    limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 100_000}
    with warnings.catch_warnings(), torch._dynamo.config.patch(**limits):
        warnings.simplefilter("ignore")
        yield


class Group:
    """Cases of one route and mode that are compiled as one function."""

    def __init__(self, route: Route, cases: Sequence[Case]) -> None:
        self.route, self.cases = route, cases
        self.functions = [make_function(c.text) for c in cases]
        modules = (module_of(f) for f in self.functions)
        self.states = [(m, {k: v.clone() for k, v in m.state_dict().items()}) for m in modules if m is not None]
        self.gate = Gate()
        self.error: Exception | None = None
        self.function: Function | None = None

    def begin(self, rehearse: Callable[[Callable[[], Any]], None] | None = None) -> None:
        """Trace everything; kernels are compiled in the background. Nothing runs here; `rehearse` takes a call that
        may be made meanwhile, whose results nobody needs."""
        # With all kernels of a batch, those of the backward too; without `rehearse` they come at the first gradient.
        early = torch._functorch.config.patch(force_non_lazy_backward_lowering=rehearse is not None)
        try:
            with settled(), mode_of(self.cases[0].mode), early:
                self.function = self.route.make(self.functions, self.cases, self.gate)
                if self.route.lowers:
                    self.function([case_inputs(c) for c in self.cases])
        except _Begun:
            pass
        except Exception as e:
            self.error = e
        # Tracing belongs to this thread: torch keeps its patches of modules in one variable for the whole process.
        if rehearse is not None and not self.route.lowers and self.function is not None:
            function = self.function
            rehearse(lambda: function([case_inputs(c) for c in self.cases]))

    def finish(self) -> list[Observation]:
        """What each case did."""
        self.gate.open = True
        if self.error is not None or self.function is None:
            return [Observation(error=self.error) for _ in self.cases]
        for module, state in self.states:  # what dynamo leaves to Python, such as an LSTM, has run already
            module.load_state_dict(state)
        with settled():
            return observe(self.cases, self.functions, self.function)


def alone(case: Case, backend: Backend | None = None) -> Observation:
    """What a case does on its route by itself, by another backend if one is given."""
    return together([case], backend)[0]


def together(cases: Sequence[Case], backend: Backend | None = None) -> list[Observation]:
    """What cases do that are compiled as one function, by another backend if one is given."""
    torch._dynamo.reset()
    group = Group(BY_NAME[cases[0].route], cases)
    if backend is not None:
        group.gate = backend  # type: ignore[assignment]
    else:
        group.gate.open = True
    try:
        with settled(), mode_of(cases[0].mode):
            group.function = group.route.make(group.functions, cases, group.gate)
        with settled():
            return observe(cases, group.functions, group.function)
    except Exception as e:
        return [Observation(error=e) for _ in cases]
    finally:
        torch._dynamo.reset()


def traced(case: Case) -> Observation:
    """What torch's own graph of a case does, before fuser sees it."""
    try:
        with settled(), mode_of(case.mode):
            function = _TRACES[case.route](case)
        with settled():
            return observe([case], [function], lambda ins: [function(*ins[0])])[0]
    except Exception as e:
        return Observation(error=e)


def scripted(text: str) -> Any:
    """The text's function as TorchScript."""
    file = f"<scripted {next(_files)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)  # where it looks for the text
    try:
        return torch.jit.script(make_function(text, file=file))
    finally:
        del linecache.cache[file]


_TRACES: dict[str, Callable[[Case], Any]] = {
    "fx": lambda c: torch.fx.symbolic_trace(make_function(c.text)),
    "make_fx": lambda c: make_fx(make_function(c.text))(*case_inputs(c)),
    "trace": lambda c: torch.jit.trace(make_function(c.text), tuple(case_inputs(c)), check_trace=False),
    "script": lambda c: scripted(c.text),
}
__all__ = [
    "BY_NAME", "MODULES", "ROUTES", "Gate", "Group", "Route", "alone", "batch_function", "is_traceable", "scripted",
    "together", "traced",
]  # fmt: skip
