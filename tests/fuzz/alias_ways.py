"""The ways in which a program of tests/fuzz/aliases.py is compiled, and the judge of what it did."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fuser
import fuser.aot
from fuser import config, executor, interface
from fuser.frontends.dynamo import forget_compilations
from fuser.frontends.functional import compile_functional
from fuser.passes.decompositions import decomposition_table
from tests import compare
from tests.fuzz.aliases import EDGES, SIZES, Program

Function = Callable[..., Any]
NEAR = 2e-4  # of the largest value: what roundings may make, far below what another order of writes does
KERNELS_EVERY = 8  # programs; the groups of the others run on ATen


@dataclass(frozen=True)
class Way:
    """`make(program, inputs, backend)` compiles a program for a call with `inputs`. `sizes`: it is called with all
    sizes. `mode` is around each call."""

    name: str
    make: Callable[[Program, Sequence[torch.Tensor], str], Function]
    sizes: bool = True
    mode: Function = contextlib.nullcontext
    share: int = 1
    graph: bool = False  # without a backend of torch.compile: nothing to compare with but eager
    views: bool = True  # results share memory as in eager


# -- compiling ---------------------------------------------------------------------------------------------------------
def _compiled(dynamic: bool | None) -> Callable[..., Function]:
    return lambda p, inputs, backend: torch.compile(p.function(), backend=backend, dynamic=dynamic)


def _marked(mark: Function) -> Callable[..., Function]:
    def make(p: Program, inputs: Sequence[torch.Tensor], backend: str) -> Function:
        compiled = torch.compile(p.function(), backend=backend)

        def call(*args: torch.Tensor) -> Any:
            for x, a in zip(p.inputs, args, strict=True):
                for d, s in enumerate(x.shape):
                    if not s.isdigit() and a.shape[d] > 1:
                        mark(a, d)
            return compiled(*args)

        return call

    return make


class _Inner(torch.nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("own", buffer)


class _Module(torch.nn.Module):
    """The last two inputs are buffers, one of them of a module inside; the others come as a list in a dict."""

    def __init__(self, p: Program, buffers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.function = p.function()
        self.register_buffer("own", buffers[0])
        self.inner = _Inner(buffers[1])

    def forward(self, given: dict[str, list[torch.Tensor]]) -> Any:
        return self.function(*given["all"], self.own, self.inner.own)


def _in_module(p: Program, inputs: Sequence[torch.Tensor], backend: str) -> Function:
    module = _Module(p, inputs[-2:])
    compiled = torch.compile(module, backend=backend, dynamic=True)

    def call(*args: torch.Tensor) -> Any:
        module.own, module.inner.own = args[-2:]
        return compiled({"all": list(args[:-2])})

    return call


def _in_containers(p: Program, inputs: Sequence[torch.Tensor], backend: str) -> Function:
    function = p.function()
    compiled = torch.compile(lambda first, rest: function(*first, *rest.values()), backend=backend, dynamic=True)
    return lambda *args: compiled(args[:1], dict(zip("xyz", args[1:])))


def _registered(graph: torch.fx.GraphModule) -> Function:
    handle = fuser.fusion_handle(fuser.register_fusion(graph))

    def call(*args: torch.Tensor) -> Any:
        made = handle(*args)
        return list(made) if isinstance(made, (tuple, list)) else [made]

    return call


def _by_make_fx(p: Program, inputs: Sequence[torch.Tensor], backend: str) -> Function:
    return _registered(make_fx(p.function())(*_copies(inputs)))


def _functionalised(p: Program, inputs: Sequence[torch.Tensor], backend: str) -> Function:
    graph = make_fx(torch.func.functionalize(p.function()))(*_copies(inputs))
    made = _registered(graph)
    made.instead = graph  # type: ignore[attr-defined]  # functionalisation itself may be wrong
    return made


class _Functional:
    """The graph that AOTAutograd would make of a program for inference, without Dynamo: a fifth of the time. Sizes that
    its guards rule out get a graph of their own. Results that are views of inputs have the right values alone."""

    def __init__(self, p: Program, backend: str) -> None:
        self.function, self.backend = p.function(), backend
        self.known: list[tuple[torch.fx.GraphModule, Function]] = []

    def __call__(self, *args: torch.Tensor) -> list[Any]:
        for graph, run in self.known:
            if _takes(graph, args):
                return list(run(list(args)))
        with torch.no_grad():
            removed = torch.func.functionalize(self.function, remove="mutations")
            graph = make_fx(removed, decomposition_table(), tracing_mode="symbolic")(*_copies(args))
        graph.graph.eliminate_dead_code(is_impure_node=_is_impure)
        shown = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
        shown.shape_env = graph.shape_env  # type: ignore[attr-defined]
        if self.backend == "fuser":
            self.known.append((shown, compile_functional(graph, ("joint_graph", "post_grad")).boxed))
        else:
            self.known.append((shown, lambda given: shown(*given)))
        return list(self.known[-1][1](list(args)))


def _takes(graph: torch.fx.GraphModule, args: Sequence[torch.Tensor]) -> bool:
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    return bool(graph.shape_env.evaluate_guards_for_args(values, args, ignore_static=False))  # type: ignore[union-attr]


def _is_impure(node: torch.fx.Node) -> bool:
    return node.op in ("placeholder", "output") or "copy_" in str(node.target)


def _functional(p: Program, inputs: Sequence[torch.Tensor], backend: str) -> Function:
    return _Functional(p, backend)


def _by_trace(p: Program, inputs: Sequence[torch.Tensor], backend: str) -> Function:
    return fuser.fuse_script(torch.jit.trace(p.function(), tuple(_copies(inputs)), check_trace=False))


class _Plain(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


def _from_file(p: Program, inputs: Sequence[torch.Tensor], backend: str) -> Function:
    exported = torch.export.export(_Plain(p.function()), tuple(_copies(inputs)))
    with tempfile.TemporaryDirectory() as folder:
        return fuser.aot.load(fuser.aot.compile(exported, Path(folder) / "program.fuser"))


def _copies(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return compare.copy_inputs(inputs)  # type: ignore[no-any-return]


def _mark_unbacked(x: torch.Tensor, dim: int) -> None:
    torch._dynamo.decorators.mark_unbacked(x, dim)


_ROWS = (
    Way("functional", _functional, mode=torch.no_grad, share=90, views=False),
    Way("static", _compiled(False), sizes=False, share=6),
    Way("dynamic", _compiled(True), share=16),
    Way("auto", _compiled(None), share=4),
    Way("marked", _marked(torch._dynamo.mark_dynamic), share=2),
    Way("unbacked", _marked(_mark_unbacked), share=2),
    Way("no_grad", _compiled(True), mode=torch.no_grad, share=2),
    Way("inference", _compiled(True), mode=torch.inference_mode, share=3),
    Way("grad", _compiled(True), share=9),
    Way("grad_static", _compiled(False), sizes=False, share=4),
    Way("module", _in_module, share=4),
    Way("containers", _in_containers, share=2),
    Way("make_fx", _by_make_fx, sizes=False, share=3, graph=True),
    Way("functionalised", _functionalised, sizes=False, share=3, graph=True, views=False),
    Way("trace", _by_trace, sizes=False, share=3, graph=True),
    Way("file", _from_file, sizes=False, share=1, graph=True, views=False),
)
WAYS = {w.name: w for w in _ROWS}


# -- judging -----------------------------------------------------------------------------------------------------------
@dataclass
class Outcome:
    """What a call did: results and inputs behind it, which share memory, versions, gradients."""

    values: list[torch.Tensor]
    shared: list[Any]
    forms: list[Any]
    written: list[bool]
    gradients: list[torch.Tensor | None]


def outcome(
    function: Function, inputs: Sequence[torch.Tensor], grad: bool, mode: Function = contextlib.nullcontext
) -> Any:  # fmt: skip
    """The outcome of a call, or the kind of error that it raises."""
    before = [x._version for x in inputs]
    try:
        with mode():
            results = pytree.tree_leaves(function(*inputs))
    except Exception as e:
        return f"raises {type(e).__name__}: {e}"
    written = [x._version != v for x, v in zip(inputs, before, strict=True)]
    cells = [x.untyped_storage()._cdata for x in inputs]
    written = [any(w for w, c in zip(written, cells, strict=True) if c == cell) for cell in cells]
    values = [r.detach().clone() for r in [*results, *inputs]]
    forms = [(r.dtype, r.shape, _strides(r), r.requires_grad) for r in [*results, *inputs]]
    try:
        gradients = _gradients(results, inputs) if grad else []
    except Exception as e:
        return f"backward raises {type(e).__name__}: {e}"
    return Outcome(values, compare.alias_pattern(inputs, results), forms, written, gradients)


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() > 1 else ()


def _gradients(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    leaves = [x.behind for x in inputs if hasattr(x, "behind")]
    ends = [t for t in [*results, *inputs] if t.requires_grad and t.grad_fn is not None]
    if not ends or not leaves:
        return []
    chance = torch.Generator().manual_seed(5)
    given = [torch.randint(-4, 5, t.shape, generator=chance).to(t.dtype) for t in ends]
    return list(torch.autograd.grad(ends, leaves, given, allow_unused=True))


def differs(got: Any, want: Any, values: bool = False) -> str:
    """What differs between two outcomes; "" if nothing does. `values`: nothing but these is compared."""
    if isinstance(got, str) or isinstance(want, str):
        both = isinstance(got, str) and isinstance(want, str)
        return "" if both else f"{_said(got)}, where eager {_said(want)}"
    if len(got.values) != len(want.values):
        return f"{len(got.values)} values instead of {len(want.values)}"
    of = len(want.forms) - len(want.written)
    for n, (a, b) in enumerate(zip(got.values, want.values, strict=True)):
        name = f"result {n}" if n < of else f"input {n - of}"
        if got.forms[n][: 2 if values else None] != want.forms[n][: 2 if values else None]:
            return f"{name} is {got.forms[n]} instead of {want.forms[n]}"
        if not _is_near(a, b):
            return f"{name}: {int((~_near(a, b)).sum())} of {a.numel()} values differ"
    if values:
        return ""
    if got.shared != want.shared:
        return f"memory is shared as {got.shared} instead of {want.shared}"
    if any(w and not g for g, w in zip(got.written, want.written, strict=True)):  # `.data` counts no write
        return f"versions: inputs are written {got.written} instead of {want.written}"
    for n, (g, h) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        if g is None or h is None:
            if (g is None) != (h is None) and bool((g if h is None else h).any()):  # type: ignore[union-attr]
                return f"gradient {n} is {'missing' if g is None else 'set'}"
        elif not _is_near(g, h):
            return f"gradient {n} differs"
    return ""


def _near(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    room = NEAR * float(b.double().abs().nan_to_num(0.0).max()) if b.numel() else 0.0
    return torch.isclose(a.double(), b.double(), NEAR, room, equal_nan=True)


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(_near(a, b).all())


def _said(found: Any) -> str:
    return found[:300] if isinstance(found, str) else "has results"


# -- running -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def on_aten() -> Iterator[None]:
    """In this block no kernel is compiled: groups run by their fallbacks."""
    names = [c for c in vars(executor).values() if isinstance(c, type) and hasattr(c, "_compile_and_run")]
    with contextlib.ExitStack() as stack:
        for c in names:
            stack.enter_context(mock.patch.object(c, "_compile_and_run", lambda self, args: self.spec.fallback(*args)))
        stack.enter_context(mock.patch.object(interface, "prepare", lambda *args: None))
        yield


def _calls(way: Way, seed: int) -> list[tuple[int, int]]:
    if not way.sizes:
        return [SIZES[0]] * 2
    last = EDGES[seed // 3 % len(EDGES)] if seed % 3 == 0 else SIZES[2]  # an edge is compiled anew
    return [SIZES[0], SIZES[1], last]


def _difference(p: Program, way: Way, seed: int, backend: str) -> str | None:
    """What is wrong with a program compiled by a backend; None where it cannot be compiled so."""
    grad = way.name.startswith("grad")
    torch._dynamo.reset()
    forget_compilations()
    function = None
    state: list[Any] = [None, None]  # buffers, which the next call of the same sizes finds as they are
    for n, sizes in enumerate(_calls(way, seed)):
        given = [p.make_inputs(sizes, seed * 8 + n) for _ in range(2)]
        if way.name == "module" and n and sizes == SIZES[0]:
            for own, kept in zip(given, state, strict=True):
                own[-2:] = kept
        if function is None:
            try:
                function = way.make(p, given[0], backend)
            except Exception as e:
                if way.graph:  # such a graph, script or file does not take the program
                    return None
                return f"raises {type(e).__name__}: {e}"
        with torch.random.fork_rng(devices=[]):
            got = outcome(function, given[0], grad, way.mode)
            want = outcome(getattr(function, "instead", p.function()), given[1], grad, way.mode)
        state = [own[-2:] for own in given]
        found = differs(got, want, not way.views)
        if found:
            return f"call {n} of {sizes}: {found}"
    return ""


def problem(p: Program, name: str, seed: int) -> str:
    """What a program does wrong by a way; "" if nothing, or where torch's own backend raises or counts so, too."""
    way = WAYS[name]
    kernels = seed % KERNELS_EVERY == KERNELS_EVERY - 1 or name == "file"
    settings = {"strict": True, "random": "eager", "slowest": 0.0, "linear_backend": "onednn"}
    settings |= {"convolution_layout": "channels_last"}
    quick = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # symbolic sizes are never found there
    with warnings.catch_warnings(), config.override(**settings), quick:
        warnings.simplefilter("ignore")
        with contextlib.nullcontext() if kernels else on_aten():
            found = _difference(p, way, seed, "fuser")
        if not found:
            return ""
        theirs = "" if way.graph else _difference(p, way, seed, "aot_eager")
    if theirs and not (way.views and "values differ" in found):
        TORCHS_OWN.append(f"{seed} {name}: {found} | aot_eager: {theirs}")
        return ""
    return f"{found}, with aot_eager too" if theirs else found


TORCHS_OWN: list[str] = []  # programs that AOTAutograd, or functionalisation alone, does not run as eager does
