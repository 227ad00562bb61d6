"""A fixed set of random programs in several spellings; `make spellings` runs as many others as asked for."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch

from fuser import fusion_handle, register_fusion
from fuser.interface import prepare
from tests.distances import Distances
from tests.fuzz import cases, running, writer
from tests.fuzz.batch import BatchBackend
from tests.fuzz.generate import generate
from tests.fuzz.judge import what_differs
from tests.fuzz.program import Input, Program, Ref, Step, make_inputs, run
from tests.fuzz.routes import BY_NAME, Group, is_traceable
from tests.fuzz.running import reproducer
from tests.fuzz.spelling_table import spellings
from tests.fuzz.spellings import MOST, OFTEN, case_of, cases_of, run_batch
from tests.fuzz.writer import Style, function_text, make_function, write


@pytest.mark.parametrize("first, count", [(0, 10), (2_000, 7)])
def test_programs_in_all_spellings_do_what_eager_does(first, count):
    running.EXCUSED.clear()
    batch = run_batch(range(first, first + count), None, "-O0")
    wrong = [f"seed {seed} {problem}\n{texts}" for seed, _, problem, texts in batch if problem]
    assert not wrong, "\n".join(wrong)
    assert running.EXCUSED.total() <= 3 * count // 20, "torch itself takes too few of them"


def remembered(function):
    """The function, called once for each tuple of arguments."""
    found = {}

    def call(*args):
        key = tuple(id(a) if isinstance(a, cases.Case) else a for a in args)
        if key not in found:
            found[key] = args, function(*args)  # `args` stay, and with them their ids
        return found[key][1]

    return call


def _judged(monkeypatch, case, change):
    """Whether a run that rounds at random, its gradients changed by `change`, passes for as near as eager's."""

    def alone(own, backend=None):
        want, rounded = cases.eager(own), cases.rounded(own, 99)
        own = [None if w is None else g.to(w.dtype) for g, w in zip(rounded.gradients, want.gradients)]
        return dataclasses.replace(want, gradients=[None if g is None else change(g) for g in own])

    monkeypatch.setattr("tests.fuzz.routes.alone", alone)
    return running.is_by_chance(case, "gradient 0: 1 of 2 elements differ")


@pytest.mark.parametrize("seed", [9_003_273, 7_000_207, 7_000_927])
def test_gradients_of_terms_that_cancel(monkeypatch, seed):
    """The gradient of sinc near 0; norms of two and three elements, whose gradient is nearly nothing."""
    case = cases_of(seed, "compile")[-1]
    assert case.mode == "grad"
    for name in ("drawn", "eager", "exact", "rounded"):  # the same at each judgement
        monkeypatch.setattr(cases, name, remembered(getattr(cases, name)))
    assert _judged(monkeypatch, case, lambda g: g)
    assert not _judged(monkeypatch, case, lambda g: g * 1.25)
    assert not _judged(monkeypatch, case, lambda g: g.flip(-1))
    assert not _judged(monkeypatch, case, torch.zeros_like)
    assert not running.is_by_chance(case, "gradient 0: 1 of 2 elements differ; input 0: its version changes")


def test_distances_where_eager_overflows():
    """There float64 and random roundings alone are the measure."""
    exact = torch.tensor([5.0, 1.0, 2.0], dtype=torch.float64)
    want, rounded = torch.tensor([float("inf"), 1.0, 2.0]).half(), [exact * 1.0005, exact * 0.9995]
    for first, is_right in ((5.0, True), (6.0, False)):
        distances = Distances()
        assert distances.add(torch.tensor([first, 1.0, 2.0]).half(), want, exact, rounded)
        assert distances.is_right == is_right


def test_distances_where_one_draw_is_nearly_nothing():
    """A draw whose terms cancel does not outweigh the others; a fault of any draw does."""

    def is_right(errors):
        distances = Distances()
        for size, error in zip((1.0, 1e-4), errors):
            exact = torch.full((8,), size, dtype=torch.float64)
            assert distances.add((exact + error).float(), (exact + 1e-6).float(), exact)
        return distances.is_right

    assert is_right((1e-6, 2.5e-6))
    assert not is_right((1e-2, 1e-6)) and not is_right((1e-6, 1e-2))


def test_the_reference_of_modules_has_their_weights():
    """In float64 the text draws other random numbers."""
    case = cases_of(15, "compile")[0]
    wide, real = make_function(case.text.replace("torch.float32", "torch.float64")), make_function(case.text)
    cases._Exact(case)._widen(cases.module_of(wide))
    torch.set_default_dtype(torch.float32)
    states = (cases.module_of(f).state_dict().values() for f in (wide, real))
    assert all(torch.equal(a, b.double()) if b.is_floating_point() else a.equal(b) for a, b in zip(*states))


def test_the_spellings_of_a_program_agree():
    """The texts give in eager what the plain calls give; of each operation that occurs often, several are written."""
    used: dict[str, set[str]] = defaultdict(set)
    for seed in range(120):
        program = generate(seed, mutate=seed % 4 == 0, most=MOST, often=OFTEN)
        want = run(program, make_inputs(program))
        for n in range(3):
            with torch.no_grad():
                body = write(program, seed * 4 + n, Style(traceable=n == 0))
            got = make_function(function_text(program, body))(*make_inputs(program))
            assert not what_differs(program, got, want, None, strides=False), function_text(program, body)
            for step, line in zip(program.steps, [b for b in body if not b.startswith("dead")]):
                used[step.fn].add(line.partition(" = ")[2].partition("(")[0])
    assert all(len(used[fn]) > 3 for fn in ("torch.add", "torch.mul", "torch.sum", ".to", "torch.div", "torch.sub"))


def test_operators_are_among_the_spellings():
    for fn, text in (("torch.bitwise_and", "{0} & {1}"), ("torch.add", "{0} + {1}"), ("torch.ge", "{0} >= {1}")):
        assert text in spellings(fn)
    assert "{0} += {1}\n{r} = {0}" in spellings(".add_")


def test_a_seed_gives_the_same_texts():
    assert [c.text for c in cases_of(5, None)] == [c.text for c in cases_of(5, None)]
    assert [c.text for c in cases_of(15, None)] == [c.text for c in cases_of(15, None)]


def test_a_reproducer_runs_by_itself(capsys):
    for seed in (5, 15, 18):
        space: dict[str, object] = {}
        exec(reproducer(cases_of(seed, "compile")[0]).partition("mode = ")[0], space)
        space["program"](*space["inputs"]())  # type: ignore[operator]


@pytest.mark.parametrize("route", ["fx", "make_fx", "backend", "compile", "trace", "script"])
def test_a_wrong_lowering_is_seen_by_each_route(monkeypatch, route):
    from fuser.ir.loop_body import ops
    from fuser.lowering.pointwise import elementwise
    from fuser.lowering.registry import LOWERINGS
    from tests.fuzz.routes import alone

    broken = lambda ctx, x: elementwise(ctx, [x], lambda v: ops.add(ops.cos(v), 1))  # noqa: E731
    monkeypatch.setitem(LOWERINGS, "aten.cos", broken)
    steps = Step("torch.cos", (Ref(0),)), Step("torch.mul", (Ref(1), 2))
    program = Program((Input((3, 7), torch.float32),), steps, (2,))
    texts = (case_of(program, 0, n, route) for n in range(40))
    case = next(c for c in texts if "out=" not in c.text and "_(" not in c.text)  # a write would be left to ATen
    assert "differ" in cases.problems(case, alone(case), cases.eager(case))


def test_a_difference_in_memory_or_gradients_is_seen():
    steps = (Step("torch.mul", (Ref(0), Ref(0))),)
    program = Program((Input((3, 4), torch.float32, "dense", "normal", 1),), steps, (1,))
    body = write(program, 0, writer.Style(plain=True))
    text = function_text(program, body)
    case = cases.Case(0, "compile", "grad", text, lambda: make_inputs(program), "", torch.float32, program)
    want = cases.eager(case)
    for change in (
        lambda o: o.gradients[0].mul_(1.01),
        lambda o: o.gradients[0].fill_(float("nan")),
        lambda o: o.outputs.__setitem__(0, o.outputs[0].detach()),
        lambda o: o.outputs.__setitem__(0, o.outputs[0].t().contiguous().t()),
        lambda o: o.outputs.__setitem__(0, o.inputs[0]),
        lambda o: o.written.__setitem__(0, True),
    ):
        got = cases.eager(case)
        assert not cases.problems(case, got, want)
        with torch.no_grad():
            change(got)
        assert cases.problems(case, got, want)


@pytest.mark.parametrize("function, kinked", [("torch.selu", True), ("torch.tanh", False)])
def test_gradients_at_a_nan_on_the_way_are_judged_by_what_meets_it(function, kinked):
    steps = Step("torch.log", (Ref(0),)), Step(function, (Ref(1),))
    program = Program((Input((3, 4), torch.float32, "dense", "normal", 1),), steps, (2,))
    text = function_text(program, write(program, 0, writer.Style(plain=True)))
    case = cases.Case(0, "compile", "grad", text, lambda: make_inputs(program), "", torch.float32, program)
    got, want = cases.eager(case), cases.eager(case)
    negative = make_inputs(program)[0] < 0
    got.gradients[0] = torch.where(negative if kinked else ~negative, torch.nan, want.gradients[0])
    assert bool(cases.problems(case, got, want)) is not kinked
    for factor in (1.5, 0.0):  # numbers are judged as ever
        got.gradients[0] = want.gradients[0] * factor
        assert cases.problems(case, got, want)


def _squared(route, mode="none", then="torch.tanh"):
    """A case of two steps."""
    steps = (Step("torch.mul", (Ref(0), Ref(0))), Step(then, (Ref(1),)))
    program = Program((Input((3, 4), torch.float32, "dense", "normal", 1),), steps, (2,))
    text = function_text(program, write(program, 0, writer.Style(plain=True)))
    return cases.Case(0, route, mode, text, lambda: make_inputs(program), "", torch.float32, program)


@pytest.mark.parametrize("route", ["fx", "make_fx", "backend", "compile", "unbacked"])
def test_whatever_traces_does_so_before_a_batch_is_rehearsed(route):
    """Torch keeps the patches of a trace in one variable: a thread that traced beside this one would drop them."""
    asked = []
    Group(BY_NAME[route], [_squared(route)]).begin(asked.append)
    assert bool(asked) is not BY_NAME[route].lowers


def test_a_program_is_traced_once(monkeypatch):
    case = _squared("fx")
    assert is_traceable(case.text, keep=True)
    monkeypatch.setattr(torch.fx, "symbolic_trace", None)
    group = Group(BY_NAME["fx"], [case])
    group.begin()
    assert group.error is None and not is_traceable(case.text)


def test_kernels_of_the_backward_are_compiled_with_the_batch():
    backend, case = BatchBackend(), _squared("compile", "grad", "torch.atan")
    with backend.installed():
        group = Group(BY_NAME["compile"], [case])
        with backend.collecting():
            group.begin(backend.rehearse)
        before = backend.compiled
        assert not cases.problems(case, group.finish()[0], cases.eager(case))
    assert backend.compiled == before == 2


def test_kernels_with_the_same_helpers_are_compiled_together(monkeypatch):
    """Some helpers name their symbols for the assembler."""
    backend, made = BatchBackend(), []
    library = backend._library
    monkeypatch.setattr(backend, "_library", lambda sources: made.append(len(sources)) or library(sources))
    with backend.installed():
        with backend.collecting():
            keys = []
            for dtype in (torch.float32, torch.float64):
                for power in (3, 5):
                    graph = torch.fx.symbolic_trace(lambda x, power=power: torch.remainder(x, 0.3) ** power)
                    keys.append((register_fusion(graph), torch.linspace(-2, 2, 77, dtype=dtype)))
                    prepare(*keys[-1][:1], [keys[-1][1]])
        for (key, x), power in zip(keys, (3, 5, 3, 5)):
            torch.testing.assert_close(fusion_handle(key)(x), torch.remainder(x, 0.3) ** power)
    assert made == [4] and backend.compiled == 4
