"""A program through fuser, compared with eager.

Ways:
  plans     lowered and scheduled, the kernel plans run by the interpreter: no compiler
  vectors   the same, then the CPU's vector IR run by its interpreter, explicit vectors included: no compiler
  kernel    registered with `functional=True` and run; then with other sizes
  whole     registered as it is: results that are views must be views
  backend   through the frontend's compiler, without dynamo: writes and aliases
  compile   through torch.compile; then with other sizes
  dynamic   the same, with symbolic sizes from the first call on
  sequence  programs of `sequences.py` as by kernel
  gradient  the same programs in training, through the frontend: results and the gradients of all inputs
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
import torch.fx
from torch._dynamo.backends.debugging import aot_eager

from fuser import config, machines, notices, register_fusion
from fuser.arguments import why_unfit
from fuser.canonical import canonicalize
from fuser.cpu.fused_kernel import functions_for
from fuser.cpu.vir.verifier import verify_kernel
from fuser.debug.reference import interpret_lowered, interpret_schedule
from fuser.debug.vector_interpreter import run_functions
from fuser.errors import FuserError, Unsupported
from fuser.frontends.dynamo import fuser_backend
from fuser.interface import prepare
from fuser.kernel_cache import REGISTRY
from fuser.lowering.graph import Lowered, lower_graph
from fuser.scheduler.schedule import Schedule, schedule
from fuser.scheduler.verifier import verify_lowered
from tests import compare
from tests.device import test_device
from tests.fuzz import program as programs
from tests.fuzz import sequences
from tests.fuzz.generate import generate
from tests.fuzz.judge import are_exact, is_identical, make_inputs, what_differs, wide_run
from tests.fuzz.program import Program, graph_of, map_refs, run, run_step

FUNCTIONAL, WRITING = ("plans", "vectors", "kernel", "whole"), ("backend", "compile", "dynamic")
SEQUENCES = ("sequence", "gradient")


Judge = Callable[[], str]


# Where several values go to one place, any of them stays on a GPU, in eager too.
_IN_NO_ORDER = ("index_put", "index_copy", ".scatter", "torch.scatter", "setitem")


def program_of(seed: int, way: str) -> Program:
    """The program of a seed that goes a way."""
    return sequences.generate(seed) if way in SEQUENCES else generate(seed, mutate=way not in FUNCTIONAL)


def check(program: Program, way: str) -> str:
    """What differs from eager, as text; "" if nothing. `program` must run in eager."""
    return begin(program, way)()


def begin(program: Program, way: str) -> Judge:
    """Start the compilation of a program's kernels; what is returned runs and compares them."""
    if test_device() != "cpu" and any(s.fn.startswith(_IN_NO_ORDER) or "index_put" in s.fn for s in program.steps):
        return lambda: ""
    before = frozenset(notices._said)
    with _settings():
        judge = _WAYS[way](program)

    def finish() -> str:
        with _settings():
            return judge() or _defects(before)

    return finish


def _defects(before: Set[str]) -> str:
    """What made a compilation fail that should not have, in this program or another of its batch: eager hides it."""
    found = notices._said.keys() - before
    for cause in found:
        notices._said.pop(cause, None)
    return "; ".join(sorted(found))


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings(), config.override(check_ir=True):
        warnings.simplefilter("ignore")
        yield


def _eager(program: Program, inputs: Sequence[Any]) -> tuple[Any, ...] | Exception:
    try:
        return run(program, inputs)
    except Exception as e:
        return e


# -- functional programs -----------------------------------------------------------------------------------------------
def _scheduled(program: Program) -> tuple[Lowered, Schedule, tuple[Any, ...]] | None:
    """The lowered program, its plans and the arguments of a call; None if nothing takes it."""
    registered = canonicalize(graph_of(program), True)
    args = (*registered.bound, *make_inputs(program))
    if registered.blocked or why_unfit(args):
        return None
    try:
        lowered = lower_graph(registered.graph, args)
        verify_lowered(lowered)
        plans = schedule(lowered, 256)
    except Unsupported:
        return None
    verify_lowered(lowered, plans)
    return lowered, plans, args


def _by_vectors(program: Program) -> str:
    found = _scheduled(program)
    if found is None:
        return ""
    lowered, plans, args = found
    functions, launch = functions_for(lowered, plans, False, machines.find("avx512"))
    for function in functions:
        verify_kernel(function.code)
    want = run(program, make_inputs(program))
    problems = []
    for macros in ((), ("FUSER_LANES", "FUSER_MASKS")):
        got = run_functions(functions, launch, args, macros)
        found_wrong = what_differs(program, got, want, None, strides=False, zeros=False)
        problems += [f"{' '.join(macros) or 'plain'}: {p}" for p in found_wrong]
    return "; ".join(problems)


def _by_plans(program: Program) -> str:
    found = _scheduled(program)
    if found is None:
        return ""
    lowered, plans, args = found
    want = run(program, make_inputs(program))
    # Which zero an interpreter's maximum gives is torch's affair; kernels have eager's.
    problems = what_differs(program, interpret_schedule(lowered, plans, args), want, None, strides=False, zeros=False)
    if not problems:
        return ""
    before = what_differs(program, interpret_lowered(lowered, args), want, None, strides=False, zeros=False)
    return "lowered: " + "; ".join(before) if before else "plans: " + "; ".join(problems)


def _by_kernel(program: Program, functional: bool = True) -> Judge:
    key = register_fusion(graph_of(program), functional=functional)
    handle = REGISTRY.find(key).handle
    choices = (None, *_other_sizes(program))
    for sizes in choices:
        with contextlib.suppress(FuserError):
            prepare(key, make_inputs(program, sizes))

    def judge() -> str:
        for sizes in choices:
            problem = _run_and_compare(program, handle, sizes, functional)
            if problem:
                return f"{f'sizes {sizes}: ' if sizes else ''}{problem}"
        return ""

    return judge


def _other_sizes(program: Program) -> list[dict[int, int]]:
    """Other extents for the dims of the inputs: equal ones stay equal."""
    extents = sorted({n for x in program.inputs for n in x.size})
    rng = random.Random(len(extents) * 31 + len(program.steps))
    grown = {n: n if n <= 1 else n + rng.choice((1, 2, 3, n)) for n in extents}
    edge = {n: rng.choice((0, 1, 2, n)) for n in extents}
    # On a GPU an index out of range ends the process.
    wanted = (grown, edge) if test_device() == "cpu" else (grown,)
    return [m for m in wanted if any(a != b for a, b in m.items())]


def _run_and_compare(
    program: Program, function: Callable[..., Any], sizes: dict[int, int] | None, functional: bool,
    identity: bool = True,
) -> str:  # fmt: skip
    if test_device() != "cpu" and not _has_meaning(program, sizes):
        return ""
    mine, own = make_inputs(program, sizes), make_inputs(program, sizes)
    before = compare.copy_inputs(own)
    want = _eager(program, own)
    try:
        got = function(*mine)
    except Exception as e:
        if isinstance(want, Exception) and (type(e) is type(want) or "Dynamo" in type(e).__name__ + str(e)):
            return ""
        instead = f" where eager has {want!r}" if isinstance(want, Exception) else ""
        return f"raises {type(e).__name__}: {str(e)[:300]}{instead}"
    if isinstance(want, Exception):
        if sizes and "out of" in str(want) and _may_read_nothing(program, sizes):
            return ""
        return f"gives a result where eager raises {type(want).__name__}: {str(want)[:200]}"
    got = got if isinstance(got, tuple) else tuple(got) if isinstance(got, list) else (got,)
    if sizes and not _comparable(program, sizes):
        return ""
    problems = what_differs(program, got, want, sizes, strides=not functional)
    if functional:
        problems += [f"input {i} changed" for i, (a, b) in enumerate(zip(mine, before)) if not is_identical(a, b)]
        return "; ".join(problems)
    return "; ".join(problems + _compare_memory(mine, own, got, want, identity, lambda: wide_run(program, sizes)[1]))


def _has_meaning(program: Program, sizes: dict[int, int] | None) -> bool:
    """Whether a GPU can be asked: the CPU runs the program, and no float becomes an integer that cannot hold it.

    There an index out of range ends the process, in eager too, and such an integer is whatever the hardware makes.
    """
    values: list[Any] = list(programs.make_inputs(program, sizes))
    try:
        for s in program.steps:
            values.append(run_step(s, values))
            if s.fn == ".to" and not _holds(values[-1].dtype, values[s.args[0].index]):
                return False
    except Exception:
        return False
    return True


def _holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    if not values.is_floating_point() or dtype.is_floating_point or dtype is torch.bool:
        return True
    limits, x = torch.iinfo(dtype), values.double().trunc()
    return bool(((x >= limits.min) & (x <= limits.max) & (x.abs() < 2**63)).all())


def _may_read_nothing(program: Program, sizes: dict[int, int]) -> bool:
    """Whether a wrong index may lead to no element: eager looks at all, a kernel at those that it reads.

    Or be right: among values that other sizes leave unsorted, a search finds one place or another.
    """
    # What `isinf` gives for booleans is a constant, too.
    constant = any(s.fn.endswith(("_like", ".new_zeros", "isinf", "isnan", "isfinite")) for s in program.steps)
    values: list[Any] = list(make_inputs(program))  # `narrow` to nothing, whatever the sizes
    for s in program.steps:
        values.append(run_step(s, values))
    tensors = [v for v in compare.leaves(values) if isinstance(v, torch.Tensor)]
    searches = any(s.fn == "torch.bucketize" for s in program.steps)
    return constant or searches or any(0 in x.shape for x in (*tensors, *make_inputs(program, sizes)))


def _comparable(program: Program, sizes: dict[int, int]) -> bool:
    """Whether results for other sizes depend on no rounding: everything exact, or nothing that turns on a bit."""
    return not any(t in s.fn for s in program.steps for t in _TOUCHY)


_TOUCHY = (
    "floor ceil round trunc sign eq ne lt le gt ge arg any all nonzero logical isinf remainder fmod max min .to frac "
    "isnan isfinite bucketize"
).split()


def _compare_memory(
    mine: Sequence[Any], own: Sequence[Any], got: Sequence[Any], want: Sequence[Any], identity: bool,
    exact: Callable[[], Sequence[Any]],
) -> list[str]:  # fmt: skip
    far = [i for i, (a, b) in enumerate(zip(mine, own)) if not _close(a, b)]
    wide = exact() if far else ()
    problems = [f"input {i} afterwards: {compare._describe(mine[i], own[i])}" for i in far
                if compare.differences([mine[i]], [own[i]], lambda i=i: [wide[i]], strides=False)
                and not are_exact(mine[i], own[i], wide[i])]  # fmt: skip
    # A function made by AOTAutograd alone returns a view of an input where dynamo would return the input.
    aliases = compare.alias_pattern(mine, got, identity), compare.alias_pattern(own, want, identity)
    if not problems and aliases[0] != aliases[1]:
        problems.append(f"aliasing {aliases[0]} instead of {aliases[1]}")
    return problems


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if not b.is_floating_point():
        return torch.equal(a, b) or _are_bits_of_nan(a, b)
    return torch.allclose(a.double(), b.double(), rtol=2e-2, atol=2e-2, equal_nan=True)


def _are_bits_of_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether integers differ only where both are NaN for the floats that a bit view makes of them: which NaN eager
    writes differs between its vectors and what is left over beside them."""
    floats = {2: (torch.float16, torch.bfloat16), 4: (torch.float32,), 8: (torch.float64,)}.get(a.itemsize, ())
    if a.dtype is torch.bool or a.is_complex():
        return False
    x, y = (t.flatten()[(a != b).flatten()] for t in (a, b))
    return any(bool((x.view(d).isnan() & y.view(d).isnan()).all()) for d in floats)


# -- programs that write -----------------------------------------------------------------------------------------------
def _by_backend(program: Program) -> Judge:
    judge = _through(fuser_backend, program)

    def finish() -> str:
        problem = judge()
        return "" if problem and _through(aot_eager, program)() else problem  # functionalisation's own fault

    return finish


def _through(backend: Callable[..., Any], program: Program) -> Judge:
    module = torch.fx.GraphModule(torch.nn.Module(), graph_of(program))
    try:
        function = backend(module, make_inputs(program))
    except Exception as e:
        text = str(e).splitlines()
        problem = f"does not compile: {type(e).__name__}: {text[0] if text else ''}"
        return lambda: problem
    return lambda: _run_and_compare(program, function, None, False, identity=False)


def _by_compile(program: Program, dynamic: bool | None = None) -> str:
    problem = _compiled(program, dynamic, fuser_backend)
    return "" if problem and _compiled(program, dynamic, "aot_eager") else problem  # dynamo's or AOTAutograd's own


def _compiled(program: Program, dynamic: bool | None, backend: Any) -> str:
    torch._dynamo.reset()
    module = torch.fx.GraphModule(torch.nn.Module(), graph_of(program))
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    for sizes in (None, *_other_sizes(program)[:1]):
        problem = _run_and_compare(program, compiled, sizes, False, identity=False)
        if problem:
            return problem
    return ""


# -- gradients ---------------------------------------------------------------------------------------------------------
def _by_gradient(program: Program) -> Judge:
    module = torch.fx.GraphModule(torch.nn.Module(), graph_of(program))
    with torch.enable_grad():
        compiled = fuser_backend(module, _leaves(program))

    def judge() -> str:
        wide = _trained(module, [x.detach().double().requires_grad_() for x in _leaves(program)])
        got, want = (_trained(f, _leaves(program)) for f in (compiled, module))
        return "; ".join(compare.differences(got, want, lambda: wide, strides=False, low=program.inputs[0].dtype))

    return judge


def _leaves(program: Program) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in make_inputs(program)]


def _trained(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The results, and the gradients of the sum of all of them, each element with a weight of its own."""
    with torch.enable_grad():
        out = function(*inputs)
        weights = [torch.linspace(-1, 2, x.numel(), dtype=torch.float64).reshape(x.shape).to(x) for x in out]
        loss = sum((x * v).sum() for x, v in zip(out, weights))
        return [x.detach() for x in (*out, *torch.autograd.grad(loss, inputs, allow_unused=True)) if x is not None]


_WAYS: dict[str, Callable[[Program], Judge]] = {
    "plans": lambda p: lambda: _by_plans(p),
    "vectors": lambda p: lambda: _by_vectors(p),
    "kernel": _by_kernel,
    "whole": lambda p: _by_kernel(p, functional=False),
    "backend": _by_backend,
    "compile": lambda p: lambda: _by_compile(p),
    "dynamic": lambda p: lambda: _by_compile(p, dynamic=True),
    "sequence": _by_kernel,
    "gradient": _by_gradient,
}

__all__ = ["FUNCTIONAL", "WRITING", "Judge", "begin", "check", "map_refs"]
