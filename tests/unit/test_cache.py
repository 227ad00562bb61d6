"""The kernel cache and the executor: compile once, remember failures, fall back, whatever the threads do."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fuser import arguments, config, executor, interface, notices
from fuser.errors import CompileError, FuserError, Unsupported
from tests.unit import stub_launcher
from tests.unit.stub_launcher import StubKernel, StubProgram, by_fallback, same_class

THREADS = 8


@pytest.fixture
def stub(monkeypatch):
    return stub_launcher.install(monkeypatch)


def key_of(fn):
    return interface.register_fusion(torch.fx.symbolic_trace(fn))


def scaled(x, y):
    return torch.relu(x * y + 1)


def in_threads(calls):
    """Run all calls at the same time, each in its own thread; their results in order."""
    start = threading.Barrier(len(calls))

    def run(call):
        start.wait(120)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(120) for f in [pool.submit(run, c) for c in calls]]


def test_same_class_compiles_once_in_many_threads(stub):
    stub.before = lambda: threading.Event().wait(0.05)
    handle = interface.fusion_handle(key_of(scaled))
    inputs = [(torch.randn(n + 2, 3), torch.randn(3)) for n in range(THREADS)]
    results = in_threads([lambda a=a: handle(*a) for a in inputs])
    for (x, y), got in zip(inputs, results):
        torch.testing.assert_close(got, scaled(x, y))
    # sizes 3 x 3 and n x 3 are two classes: which sizes are equal is part of a class
    classes = {arguments.arg_spec(a, ()) for a in inputs}
    assert len(stub.calls) <= len(classes) == 2
    assert handle.hits == THREADS
    assert len(interface.REGISTRY.specs()) == 1


def test_exactly_one_compilation_of_one_class(stub):
    stub.before = lambda: threading.Event().wait(0.05)
    handle = interface.fusion_handle(key_of(scaled))
    x, y = torch.randn(5, 3), torch.randn(3)
    in_threads([lambda: handle(x, y)] * THREADS)
    assert len(stub.calls) == 1
    handle(torch.randn(9, 4), torch.randn(4))
    assert len(stub.calls) == 1 and interface.num_compiled_kernels() == 1


def test_different_classes_compile_in_parallel(stub):
    together = threading.Barrier(THREADS)
    stub.before = lambda: together.wait(120)  # breaks unless all compile at the same time
    handle = interface.fusion_handle(key_of(lambda x: torch.relu(x) + 1))
    inputs = [torch.randn((2,) * rank) for rank in range(THREADS)]
    for x, got in zip(inputs, in_threads([lambda x=x: handle(x) for x in inputs])):
        torch.testing.assert_close(got, torch.relu(x) + 1)
    assert len(stub.calls) == THREADS == interface.num_compiled_kernels()


def test_registration_in_many_threads(stub):
    def times(n):
        return torch.fx.symbolic_trace(lambda x: x * n + 1)

    graphs = [times(n % 3) for n in range(THREADS)]
    keys = in_threads([lambda g=g: interface.register_fusion(g) for g in graphs])
    assert len(set(keys)) == 3 and len(interface.REGISTRY.specs()) == 3
    assert keys == [interface.register_fusion(g) for g in graphs]


@pytest.mark.parametrize("error", [Unsupported("too odd"), CompileError("g++ said no"), ZeroDivisionError("a defect")])
def test_failure_is_remembered_and_never_raised(stub, lenient, error):
    def refuse(spec, args):
        raise error

    stub.make = refuse
    key = key_of(scaled)
    handle = interface.fusion_handle(key)
    x, y = torch.randn(5, 3), torch.randn(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for got in in_threads([lambda: handle(x, y)] * THREADS) + [handle(x, y)]:
            torch.testing.assert_close(got, scaled(x, y))
    assert len(stub.calls) == 1
    store = interface.kernel_spec(key).store
    (entry,) = store.entries
    reason = str(error) if isinstance(error, FuserError) else "a defect of fuser, ZeroDivisionError: a defect"
    assert entry.state == "failed" and entry.reason == reason
    assert store.fallbacks == {reason: THREADS + 1}
    assert interface.num_compiled_kernels() == 0


@pytest.mark.parametrize("error", [CompileError("the compiler hung"), KeyError("the compiler hung")])
def test_what_is_not_unsupported_warns_once(stub, lenient, monkeypatch, error):
    def refuse(spec, args):
        raise error

    stub.make = refuse
    monkeypatch.setattr(notices, "_said", {})
    with pytest.warns(RuntimeWarning, match="the compiler hung'?; the groups concerned run by ATen") as seen:
        interface.run_fusion(key_of(scaled), [torch.ones(2), torch.ones(2)])
        interface.run_fusion(key_of(lambda x: x + 2), [torch.ones(2)])
    assert len(seen) == 1


def test_failure_of_one_class_leaves_the_others(stub):
    def only_float32(spec, args):
        if args[0].dtype is not torch.float32:
            raise Unsupported("float32 only")
        return by_fallback(spec, args)

    stub.make = only_float32
    key = key_of(lambda x: x * 2 + 1)
    handle = interface.fusion_handle(key)
    for _ in range(2):
        handle(torch.ones(3, dtype=torch.int64))
        handle(torch.ones(3))
    assert len(stub.calls) == 2 and handle.hits == 2
    assert interface.kernel_spec(key).store.fallbacks == {"float32 only": 2}


def test_interrupt_passes_through_and_is_not_remembered(stub):
    def interrupted(spec, args):
        raise KeyboardInterrupt

    stub.make = interrupted
    handle = interface.fusion_handle(key_of(scaled))
    x = torch.ones(3)
    with pytest.raises(KeyboardInterrupt):
        handle(x, x)
    stub.make = by_fallback
    torch.testing.assert_close(handle(x, x), scaled(x, x))
    assert len(stub.calls) == 2 and handle.hits == 1


def test_kernel_that_does_not_take_its_own_inputs(stub):
    stub.make = lambda spec, args: StubKernel(StubProgram(lambda *a: False, spec.fallback), name="blind")
    key = key_of(scaled)
    handle = interface.fusion_handle(key)
    x = torch.ones(3)
    for _ in range(3):
        torch.testing.assert_close(handle(x, x), scaled(x, x))
    assert len(stub.calls) == 1
    assert "kernel blind does not take the inputs it was compiled for" in interface.kernel_spec(key).store.fallbacks


def test_kernels_that_need_a_size_are_limited(stub):
    def one_size(spec, args):
        wanted = args[0].shape
        return StubKernel(StubProgram(lambda x: x.shape == wanted, spec.fallback))

    stub.make = one_size
    key = key_of(lambda x: x * 2 + 1)
    handle = interface.fusion_handle(key)
    for n in range(2, 30):
        torch.testing.assert_close(handle(torch.ones(n)), torch.ones(n) * 2 + 1)
    assert len(stub.calls) == executor.MAX_VARIANTS
    assert any("kernels for inputs of one class" in r for r in interface.kernel_spec(key).store.fallbacks)


def test_status_runs_eager_with_its_error(stub):
    stub.make = lambda spec, args: StubKernel(StubProgram(same_class(args), spec.fallback, status=1))
    handle = interface.fusion_handle(key_of(lambda x, i: x.index_select(0, i) + 1))
    x = torch.randn(4)
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        handle(x, torch.tensor([9]))
    torch.testing.assert_close(handle(x, torch.tensor([2])), x[2:3] + 1)


@pytest.mark.parametrize(
    "args, reason",
    [
        ((torch.ones(3, requires_grad=True), torch.ones(3)), "requires a gradient"),
        ((torch.ones(3).to_sparse(), torch.ones(3)), "layout torch.sparse_coo"),
        ((torch.ones(3, device="meta"), torch.ones(3, device="meta")), None),
        ((torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3)), "lazily conjugated"),
        ((1.0, 2.0), "no tensor among the inputs"),
    ],
)
def test_inputs_that_kernels_may_not_see(stub, args, reason):
    key = key_of(lambda x, y: x * y)
    handle = interface.fusion_handle(key)
    got, want = handle(*args), args[0] * args[1]
    assert type(got) is type(want) and getattr(got, "shape", None) == getattr(want, "shape", None)
    fallbacks = interface.kernel_spec(key).store.fallbacks
    assert len(stub.calls) == (reason is None)
    assert reason is None or reason in next(iter(fallbacks))


def test_gradients_flow_through_the_fallback(stub):
    x = torch.randn(3, requires_grad=True)
    handle = interface.fusion_handle(key_of(scaled))
    handle(x, torch.ones(3)).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        handle(x, torch.ones(3))
    assert len(stub.calls) == 1


def test_tensor_subclass_keeps_its_behaviour(stub):
    class Loud(torch.Tensor):
        pass

    handle = interface.fusion_handle(key_of(scaled))
    got = handle(torch.ones(3).as_subclass(Loud), torch.ones(3))
    assert isinstance(got, Loud) and not stub.calls


def test_sizes_that_do_not_broadcast_give_eagers_error(stub):
    key = key_of(scaled)
    x, y = torch.ones(3), torch.ones(4)
    with pytest.raises(RuntimeError) as eager:
        scaled(x, y)
    with pytest.raises(RuntimeError) as fused:
        interface.run_fusion(key, [x, y])
    assert str(fused.value) == str(eager.value) and not stub.calls
    assert interface.kernel_spec(key).store.fallbacks == {"sizes (3,), (4,) do not broadcast": 1}


def test_settings_at_registration_are_those_of_compilation(stub):
    seen = []
    stub.make = lambda spec, args: seen.append(config.numerics) or by_fallback(spec, args)
    with config.override(numerics="eager"):
        exact = key_of(scaled)
    fast = key_of(scaled)
    assert exact != fast
    for key in (exact, fast):
        interface.run_fusion(key, [torch.ones(2), torch.ones(2)])
    assert seen == ["eager", "fast"]


def test_switched_off(stub):
    key = key_of(scaled)
    with config.override(enabled=False):
        interface.run_fusion(key, [torch.ones(2), torch.ones(2)])
    assert not stub.calls
    interface.run_fusion(key, [torch.ones(2), torch.ones(2)])
    with config.override(enabled=False):
        interface.run_fusion(key, [torch.ones(2), torch.ones(2)])
    assert interface.kernel_spec(key).store.fallbacks == {"fusion is switched off (config.enabled is False)": 2}


def test_prepare_compiles_ahead_and_calls_wait_for_it(stub):
    go = threading.Event()
    stub.before = lambda: go.wait(120)
    key = key_of(scaled)
    x, y = torch.randn(5, 3), torch.randn(3)
    ahead = interface.prepare(key, [x, y])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(interface.run_fusion, key, [x, y])
        go.set()
        assert ahead.result(120) is None
        torch.testing.assert_close(call.result(120)[0], scaled(x, y))
    assert len(stub.calls) == 1


def test_prepare_takes_fake_tensors_and_symbolic_sizes(stub):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    x = mode.from_tensor(torch.randn(5, 3))
    before = len(mode.shape_env.guards)
    assert isinstance(x.shape[0], torch.SymInt)
    key = key_of(lambda x, n: x * n)
    assert interface.prepare(key, [x, x.shape[0]]).result(120) is None
    (args,) = stub.calls
    assert tuple(args[0].shape) == (5, 3) and args[1] == 5 and type(args[1]) is int
    assert len(mode.shape_env.guards) == before


def test_prepare_says_why_not(stub):
    key = key_of(lambda x: x.add_(1))
    assert interface.prepare(key, [torch.ones(2)]).result(120) == "aten.add_ writes into a tensor"


@pytest.mark.parametrize("given", ["both", "bound"])
def test_nothing_is_prepared_for_tensors_of_two_devices(stub, given):
    """A kernel of the first tensor's device would read the other's memory, and end the process."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    here = torch.ones(3)
    with FakeTensorMode():
        there = torch.empty(3, device="cuda")
    key, examples = (key_of(scaled), [here, there]) if given == "both" else (key_of(lambda x: x * here), [there])
    assert interface.prepare(key, examples).result(120) == "inputs are on cpu and on cuda:0"
    assert not stub.calls


class TestArgSpec:
    def spec(self, *args):
        return arguments.arg_spec(args, ())

    def test_sizes_do_not_count_but_their_equality_does(self):
        a, b = torch.ones(3, 4), torch.ones(4)
        assert self.spec(a, b) == self.spec(torch.ones(7, 9), torch.ones(9))
        assert self.spec(a, b) != self.spec(torch.ones(4, 4), torch.ones(4))

    @pytest.mark.parametrize(
        "x, y",
        [
            (torch.ones(3, 4), torch.ones(3, 4).double()),
            (torch.ones(3, 4), torch.ones(4, 3).t()),
            (torch.ones(3, 4), torch.ones(3, 8)[:, ::2]),
            (torch.ones(3, 4), torch.ones(3, 1).expand(3, 4)),
            (torch.ones(3, 4), torch.ones(3, 4, 1)),
            (torch.ones(3, 4), torch.ones(1, 4)),
            (torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)),
            (1, 1.0),
            (1, True),
        ],
    )
    def test_what_tells_classes_apart(self, x, y):
        assert self.spec(x) != self.spec(y)

    def test_numbers_count_by_type_only(self):
        assert self.spec(torch.ones(2), 3) == self.spec(torch.ones(5), 4)
