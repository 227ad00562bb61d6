"""`config.slowest`: which calls are left to ATen by their time, and that no result's bits ever change."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
import torch.fx

from fuser import config, debug, fallback, fusion_handle, interface, kernel_cache, register_fusion, trials
from fuser.contests import trial as contest
from fuser.contests.trial import Outcome
from fuser.runtime import growth, launcher


def register(fn) -> int:
    return register_fusion(torch.fx.symbolic_trace(fn))


@pytest.fixture(autouse=True)
def timed():
    """Trials are held, as for users."""
    assert launcher.wait(120)
    before = config.slowest
    config.set(slowest=1.05)  # for the threads of a test, too
    yield
    config.set(slowest=before)


def decide(monkeypatch, answer) -> list[int]:
    """Contests end as `answer(elements)` says. The elements of each, in order."""
    held: list[int] = []

    def compete(kernel, other, args, limit, now):
        held.append(max(a.numel() for a in args if isinstance(a, torch.Tensor)))
        slower = answer(held[-1])
        return Outcome(1.3 if slower else 0.9, slower)

    monkeypatch.setattr(contest, "compete", compete)
    return held


@pytest.mark.parametrize("sure", [True, False])
def test_that_a_kernel_was_surely_faster_is_kept_for_other_processes(monkeypatch, sure):
    """For the same arguments alone."""
    held = []

    def compete(kernel, other, args, limit, now):
        held.append(args[0].numel())
        return Outcome(0.5, False, sure)

    monkeypatch.setattr(contest, "compete", compete)
    function, number = torch.expm1 if sure else torch.log1p, 0.8125
    for _ in range(2):  # with specifications of its own each
        monkeypatch.setattr(interface, "REGISTRY", kernel_cache.Registry())
        monkeypatch.setattr(trials.records, "_made", {})
        for n in (5000, 50000):
            x = torch.linspace(0, 1, n)
            handle = fusion_handle(register(lambda x: function(x) * number + x))
            torch.testing.assert_close(handle(x), function(x) * number + x)
    assert held == ([5000, 50000] if sure else [5000, 50000] * 2)


def test_results_of_one_element_are_compared_in_any_stride():
    """Seed 34000030: a result that is an input of one element, every second of two."""
    for x in (torch.ones(2)[::2], torch.ones(3, 4)[:1, 1:2], torch.tensor(1.0), torch.ones(0, 3), torch.ones(2, 3).t()):
        assert trials._is_equal((x,), (x,)) and not (x.numel() and trials._is_equal((x,), (x + 1,)))


# Each test has operators of its own: graphs that differ in numbers alone share a kernel.
@pytest.mark.parametrize(
    "op, slower, size, left",
    [(torch.cos, True, 5000, True), (torch.cosh, False, 5000, False), (torch.atan, True, 50, False)],
)
def test_calls_for_which_a_kernel_is_slower_go_to_eager(monkeypatch, op, slower, size, left):
    decide(monkeypatch, lambda elements: slower and elements == size)
    key = register(lambda x: op(x) * 1.25 - 3)
    store, handle = interface.REGISTRY.find(key).spec.store, fusion_handle(key)
    x, other = torch.linspace(0, 1, size), torch.linspace(0, 1, size + 1)
    for _ in range(3):
        torch.testing.assert_close(handle(x), op(x) * 1.25 - 3)
    assert handle.hits == (0 if left else 3 if size == 50 else 2)  # the first ran on trial
    torch.testing.assert_close(handle(other), op(other) * 1.25 - 3)
    assert handle.hits == (0 if left else 4 if size == 50 else 3)  # another size
    if left:
        (reason,) = store.fallbacks
        assert re.fullmatch(r"kernel \w+ took 1.30 times as long as ATen for sizes \(5000,\)", reason)
        assert "took 1.30 times as long" in str(debug.explain(key))


def test_a_kernel_is_timed_once_for_each_magnitude_and_form_that_it_lost(monkeypatch):
    held = decide(monkeypatch, lambda elements: elements in (5000, 5001))
    key = register(lambda x: torch.sin(x) * 0.375)
    handle = fusion_handle(key)
    for _ in range(2):
        for size in (4095, 5000, 5001, 5002, 5003, 8191, 8192, 32767, 32768, 100, 1 << 20):
            handle(torch.ones(size))
    assert held == [5000, 5001, 5002, 8192, 32768, 1 << 20]
    assert handle.kernel_count == 1
    assert sum(dict(interface.REGISTRY.find(key).spec.store.fallbacks).values()) == 4



def test_what_is_timed():
    sizes = (1, 4095, 4096, 1 << 20, (1 << 25) - 1, 1 << 25, 1 << 40)
    assert [n for n in sizes if not trials._UNTIMED >> n.bit_length() & 1] == [4096, 1 << 20, (1 << 25) - 1]


def test_results_that_outgrow_small_inputs_are_timed(monkeypatch):
    held = decide(monkeypatch, lambda elements: True)
    handle = fusion_handle(register(lambda x: x[:, None] * x.sin()))
    for size in (10, 100, 100, 101, 11):
        x = torch.ones(size)
        torch.testing.assert_close(handle(x), x[:, None] * x.sin())
    assert held == [100, 101]


@pytest.mark.parametrize(
    ("f", "outgrows"),
    [
        (lambda x, y: torch.relu(x) * y, False),
        (lambda x, y: x.sum(1) + y.sum(), False),
        (lambda x, y: x.view(-1) * 2, False),
        (lambda x, y: x.repeat(1, 2) * 2, True),
        (lambda x, y: x[:, None] * y[:1, :, None], True),
        (lambda x, y: torch.cat([x, x]), True),
        (lambda x, y: x.new_zeros(500, 500) + y.sum(), True),
    ],
)
def test_which_results_may_outgrow_inputs(f, outgrows):
    key = register(f)
    fusion_handle(key)(torch.ones(30, 40), torch.ones(30, 40))
    (kernel,) = interface.REGISTRY.find(key).spec.store.kernels
    assert growth.may_outgrow(kernel.program) == outgrows


def test_many_calls_at_once_go_where_each_goes_alone(monkeypatch):
    decide(monkeypatch, lambda elements: elements == 5000)
    handle = fusion_handle(register(lambda x: torch.exp(x) * 0.5625 - 1))
    inputs = [torch.linspace(-3, 3, n) for n in (5000, 5001, 300, 5000)]
    alone = [handle(x) for x in inputs]
    for _ in range(2):
        before = handle.hits
        assert all(map(torch.equal, handle.each(1, True, *inputs), alone))
        assert handle.hits - before == 2


def test_nothing_is_timed_where_results_must_not_differ(monkeypatch):
    held = decide(monkeypatch, lambda elements: True)
    key = register(lambda x: torch.asinh(x) * 9.125)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            fusion_handle(key)(torch.ones(5000))
    finally:
        torch.use_deterministic_algorithms(False)
    assert fusion_handle(key).hits == 1 and not held


def test_calls_that_write_are_not_repeated():
    key = register(lambda x: x.copy_(x * 2.5 + 1))
    x = torch.ones(5000)
    with config.override(verify=3):
        fusion_handle(key)(x)
    assert torch.equal(x, torch.full((5000,), 3.5))


LAYOUTS = ("rows", "turned", "unaligned")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("slower", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_that_write_are_timed_on_copies(monkeypatch, layout, slower):
    """Whatever stays: the input is written once in each call, and is what comes back. Copies fit the same kernel."""
    written = []

    def compete(kernel, other, args, limit, now):
        before = [a.clone() for a in args]
        for function in (kernel, other, kernel):
            assert function(*args) is not trials.MISS
        written.append([not torch.equal(a, b) for a, b in zip(args, before)])
        return Outcome(1.3 if slower else 0.9, slower)

    monkeypatch.setattr(contest, "compete", compete)
    number = 3 + 2 * LAYOUTS.index(layout) + slower
    memory = torch.linspace(0, 1, 70 * 80 + 1)
    x = {
        "rows": memory[: 70 * 80].view(70, 80), "turned": memory[: 70 * 80].view(80, 70).t(),
        "unaligned": memory[1 : 70 * 80 + 1].view(70, 80),
    }[layout]  # fmt: skip
    graph = torch.fx.symbolic_trace(lambda x, y: x.copy_(torch.sin(x) * y + number))
    key, y = register_fusion(graph, in_place=True), torch.rand(70, 80)
    handle, want = fusion_handle(key), x.clone()
    for _ in range(3):
        want = torch.sin(want) * y + number
        assert handle(x, y) is x
        torch.testing.assert_close(x, want)
    assert written == [[True, False]] and handle.hits == (0 if slower else 2)


def test_verified_calls_are_timed_too(monkeypatch):
    held = decide(monkeypatch, lambda elements: elements == 5000)
    handle = fusion_handle(register(lambda x: torch.erf(x) * 0.4375))
    with config.override(verify=2):
        for size in (5000, 5001, 5000, 5001, 5001):
            torch.testing.assert_close(handle(torch.ones(size)), torch.ones(size).erf() * 0.4375)
    assert held == [5000, 5001] and handle.hits == 1


def test_time_is_measured():
    x = torch.ones(100_000)
    slow = contest.compete(lambda x: [x.exp() for _ in range(9)], lambda x: x.exp(), (x,), 1.05)
    fast = contest.compete(lambda x: x.exp(), lambda x: [x.exp() for _ in range(9)], (x,), 1.05)
    assert not fast.slower and fast.ratio < 1.0 < 1.05 < slow.ratio


@pytest.mark.parametrize("pages, slower", [(8000, True), (9000, False)], ids=["kept", "mapped"])
def test_calls_that_write_into_pages_that_stay_with_the_heap_are_not_compared(monkeypatch, pages, slower):
    """ATen takes half of the kernel's time, and 14 ms more in calls that get new pages: some of the first, or, where
    results are so large that malloc maps each anew, all."""
    spent, faults, calls = [0.0], [0], [0]

    def kernel(x):
        spent[0] += 2e-3

    def other(x):
        new = pages > 8192 or calls[0] in (0, 2, 3, 4, 5)
        calls[0] += 1
        faults[0] += pages if new else 0
        spent[0] += 15e-3 if new else 1e-3

    monkeypatch.setattr(contest, "_page_faults", lambda: faults[0])
    for limit in (0.97, 1.05):
        calls[0] = 0
        assert contest.compete(kernel, other, (None,), limit, lambda: (spent[0], spent[0])).slower == slower


def test_what_only_a_kernel_can_compute_is_not_timed(monkeypatch):
    key = register(lambda x: torch.sin(x) + 2.25)
    x = torch.randn(5000)

    def refusing(*args):
        raise NotImplementedError("not implemented for this dtype")

    spec = interface.REGISTRY.find(key).spec
    handle = fusion_handle(key)
    monkeypatch.setattr(contest, "compete", refusing)
    torch.testing.assert_close(handle(x), torch.sin(x) + 2.25)
    assert handle.kernel_count == 1 and not spec.store.fallbacks


# -- single operators --------------------------------------------------------------------------------------------------
def _decided(monkeypatch) -> list[tuple[float, Any]]:
    """Every kernel loses; the limit of each contest, and what the kernel was timed beside."""
    held: list[tuple[float, Any]] = []

    def compete(kernel, other, args, limit, now):
        held.append((limit, other))
        return Outcome(1.0, True)

    monkeypatch.setattr(contest, "compete", compete)
    return held


@pytest.mark.parametrize(
    "fn, limit",
    [
        (lambda x: torch.ops.aten.sinh.default(x), trials.ALONE),
        (lambda x: torch.ops.aten.t.default(torch.ops.aten.acosh.default(x)), trials.ALONE),
        (lambda x: torch.ops.aten.neg.default(torch.ops.aten.sinh.default(x)), 1.05),
    ],
)
def test_a_kernel_of_a_single_operator_has_to_be_faster(monkeypatch, fn, limit):
    held = _decided(monkeypatch)
    handle, x = fusion_handle(register(fn)), torch.rand(70, 80) + 1
    for _ in range(3):
        assert torch.equal(handle(x), fn(x))
    assert [found for found, _ in held] == [limit] and handle.hits == 0


def test_a_single_operator_that_is_left_to_eager_is_called_as_eager_calls_it(monkeypatch):
    held = _decided(monkeypatch)
    key = register(lambda x: torch.ops.aten.sum.dim_IntList(x, [1], True))
    x = torch.rand(70, 80)
    assert torch.equal(fusion_handle(key)(x), x.sum(1, True))
    ((_, other),) = held
    assert torch.sum in other.__globals__.values()
    assert other is not interface.REGISTRY.find(key).spec.fallback


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "op, args, name",
    [
        ("relu.default", (), "relu_"),
        ("mul.Tensor", ("y",), "mul_"),
        ("add.Tensor", ("y",), "add_"),
        ("clamp.default", (0.25, 0.5), "clamp_"),
        ("hardtanh.default", (0.0, 0.5), "hardtanh_"),
        ("copy.default", ("y",), "copy_"),
        ("mul.Tensor", ("x",), ""),  # it reads what it writes once more
        ("sin.default", None, ""),  # of another tensor
    ],
)
def test_an_operator_copied_into_its_argument_is_timed_beside_its_twin_in_place(monkeypatch, op, args, name):
    held = _decided(monkeypatch)
    packet, overload = op.split(".")
    target = getattr(getattr(torch.ops.aten, packet), overload)
    graph = torch.fx.Graph()
    given = {n: graph.placeholder(n) for n in "xy"}
    read = (given["y"],) if args is None else (given["x"], *(given.get(a, a) for a in args))
    made = graph.call_function(target, read)
    graph.output(graph.call_function(torch.ops.aten.copy_.default, (given["x"], made)))
    key = register_fusion(torch.fx.GraphModule({}, graph), in_place=True)
    x, y = torch.rand(70, 81), torch.rand(70, 81)
    want = target(*((y,) if args is None else (x, *({"x": x, "y": y}.get(a, a) for a in args))))
    assert fusion_handle(key)(x, y) is x
    assert torch.equal(x, want)
    ((limit, other),) = held
    functions = getattr(other, "__globals__", {})
    assert (limit, name in functions) == ((trials.ALONE, True) if name else (1.05, False))


def test_another_meaning_of_torchs_own_function_is_noticed(monkeypatch):
    """The direct function is used only if its result is the fallback's to the bit, with dtype and strides."""
    held = _decided(monkeypatch)
    monkeypatch.setattr(fallback, "_torch_function", lambda target: torch.cosh)
    key = register(lambda x: torch.ops.aten.asinh.default(x))
    x = torch.rand(70, 80)
    assert torch.equal(fusion_handle(key)(x), x.asinh())
    assert [other for _, other in held] == [interface.REGISTRY.find(key).spec.fallback]


# -- bits --------------------------------------------------------------------------------------------------------------
VERDICTS = ("eager", "in turns", "noise")


def programs(verdict: str) -> tuple[Any, ...]:
    """Programs whose kernels no other verdict has: a number would become an argument of one kernel."""

    def own(x):
        for _ in range(VERDICTS.index(verdict)):
            x = torch.sin(x)
        return x

    def sums(x, y):
        return (own(x) * y).sum(1), torch.exp(own(x)).mean(0), torch.logsumexp(x, 1).mean()

    def norms(x, y):
        return torch.nn.functional.layer_norm(own(x) + y, x.shape[1:], y[0], y[1])

    def chain(x, y):
        return torch.tanh(own(x)) * torch.sigmoid(y) + torch.log1p(x.abs())

    return sums, norms, chain


class NoisyClock:
    """A clock that is off by a factor of 50 for the contestant whose turn it is, at random."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.draw = torch.Generator().manual_seed(3)

    def __call__(self) -> tuple[float, float]:
        step = 10 ** float(torch.rand((), generator=self.draw) * 1.7 - 4)
        self.wall += step
        self.cpu += step
        return self.wall, self.cpu


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_same_inputs_give_the_same_bits_in_every_call(monkeypatch, clean, verdict):
    """Whatever a trial decides, from the first call on; sizes in turns, so that verdicts meet each other's kernels."""
    turn = iter(range(1000))
    if verdict == "noise":
        monkeypatch.setattr(contest, "clock", NoisyClock())
    else:
        answers = {"eager": lambda n: True, "in turns": lambda n: bool(next(turn) % 4 < 2)}
        held = decide(monkeypatch, answers[verdict])
    for program in programs(verdict):
        compiled = torch.compile(program, backend="fuser", dynamic=True)
        sizes = [(64, 96), (65, 97), (30, 500), (300, 200), (64, 96), (5, 7)]
        inputs = [(torch.randn(s), torch.rand(s)) for s in sizes]
        first = [_bits(compiled(*i)) for i in inputs]
        for _ in range(3):
            assert first == [_bits(compiled(*i)) for i in inputs]
        again = [_bits(compiled(*(t.clone() for t in i))) for i in inputs]
        assert first == again
    assert verdict == "noise" or held


def _bits(results) -> list[bytes]:
    results = results if isinstance(results, tuple) else (results,)
    return [t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in results]


def test_threads_that_meet_a_form_at_once_agree(monkeypatch):
    """One of them times it, and all others follow."""
    started, turn = threading.Barrier(4), iter(range(100))
    held = decide(monkeypatch, lambda elements: next(turn) % 4 < 2)
    handle = fusion_handle(register(lambda x: torch.tanh(x) * torch.exp(x) - 0.8125))
    x = torch.linspace(-3, 3, 9000)
    found = [b""] * 4

    def call(i: int) -> None:
        started.wait()
        found[i] = _bits(handle(x))[0]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert held == [9000] and len({*found, _bits(handle(x))[0]}) == 1
