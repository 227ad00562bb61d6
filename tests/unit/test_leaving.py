"""Fusions that nobody holds give everything back; libraries beyond a limit are unloaded and come back when called."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import pathlib
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import fx

import fuser
from fuser import config, executor, interface
from fuser.errors import UnknownKeyError
from fuser.kernel_cache import REGISTRY
from fuser.runtime import files, launcher, libraries, python_launcher
from tests.unit import runtime_support as support

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
X = torch.linspace(-2, 2, 24)
OPS = (torch.sin, torch.exp, torch.relu, torch.tanh)
SECONDS = 20  # more than any thread needs to end a step
CHAINS = list(itertools.product(OPS, OPS))


def chain(n):
    """A graph of few operators, and its function; equal numbers give equal graphs."""
    first, second = CHAINS[n]

    def fn(x):
        return second(first(x) * 0.7 + 0.1) * x

    return fx.symbolic_trace(fn), fn


def scaling(weight):
    """A module that holds a tensor."""
    root = torch.nn.Module()
    root.register_buffer("weight", weight)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.sub, (graph.call_function(torch.mul, (x, graph.get_attr("weight"))), x)))
    return fx.GraphModule(root, graph)


def holders(registration):
    """What holds the handle of a registration, for the message of a failure."""
    return gc.get_referrers(registration.handle)


def is_gone(key):
    with pytest.raises(UnknownKeyError, match=f"fusion {key} is gone: it was unregistered"):
        fuser.run_fusion(key, [X])
    return True


@pytest.fixture(params=["native", "python"])
def either(request, monkeypatch):
    """Both launchers. No garbage collection: what nobody holds leaves at once."""
    if request.param == "python":
        monkeypatch.setattr(executor.launcher, "make_handle", python_launcher.Handle)
    elif not launcher.wait(60):
        pytest.skip(launcher.reason())
    gc.collect()
    gc.disable()
    yield request.param
    gc.enable()


@pytest.fixture
def own(tmp_path):
    """A specification of this test's own for each graph, and no trials, which time."""
    with config.override(max_body_rows=900 + next(NUMBERS), slowest=0):
        yield


NUMBERS = itertools.count()


# -- who keeps a fusion ------------------------------------------------------------------------------------------------
def test_rounds_of_register_run_unregister_keep_nothing(either, own):
    def maps():
        return sum(1 for _ in open("/proc/self/maps"))

    counts = []
    for n in range(8):
        graph, fn = chain(n % 4)
        key = fuser.register_fusion(graph)
        assert torch.allclose(fuser.run_fusion(key, [X])[0], fn(X), atol=1e-6)
        assert launcher.loaded_libraries() > 0
        assert interface.kernel_spec(key).store.kernels
        del graph
        fuser.unregister_fusion(key)
        assert is_gone(key)
        counts.append((launcher.loaded_libraries(), len(REGISTRY.specs()), len(REGISTRY.registrations()), maps()))
    assert len({c[:3] for c in counts}) == 1, counts
    assert max(c[3] for c in counts[4:]) <= counts[3][3] + 4, counts


def maps_and_bytes():
    """Of this process."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return len(pathlib.Path("/proc/self/maps").read_text().splitlines()), pages * 4096


def nth_graph(n):
    """A graph of its own for each n below 2048."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = x
    for bit in range(11):
        out = graph.call_function(torch.relu if n >> bit & 1 else torch.sigmoid, (out,))
    graph.output(graph.call_function(torch.mul, (out, x)))
    return graph


@pytest.mark.skipif(os.environ.get("FUSER_STRESS") != "1", reason="a long run: make stress")
def test_a_thousand_rounds_leave_memory_and_maps_flat():
    for n in range(1050):
        if n == 50:
            before = maps_and_bytes()
        key = fuser.register_fusion(nth_graph(n))
        fuser.run_fusion(key, [X])
        assert interface.kernel_spec(key).store.kernels
        fuser.unregister_fusion(key)
    maps, size = (now - then for now, then in zip(maps_and_bytes(), before, strict=True))
    assert maps <= 50 and size <= 5e6, (maps, size)


def test_a_bound_tensor_leaves_with_its_registration(either, own):
    weight = torch.full((24,), 3.0)
    seen = weakref.ref(weight)
    graph = scaling(weight)
    key = fuser.register_fusion(graph)
    assert torch.equal(fuser.run_fusion(key, [X])[0], X * 3 - X)
    del graph, weight
    gc.collect()  # a module and its graph are a cycle
    assert seen() is not None
    fuser.unregister_fusion(key)
    assert seen() is None and is_gone(key)


def test_the_system_gets_the_memory_of_bound_tensors_back(own):
    def resident():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

    def register(n):
        key = fuser.register_fusion(scaling(torch.full((1 << 20,), float(n))))
        fuser.run_fusion(key, [X[:1]])
        return key

    fuser.unregister_fusion(register(0))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what other tests left would serve these tensors
    before = resident()
    keys = [register(n) for n in range(40)]
    gc.collect()
    held = resident() - before
    for key in keys:
        fuser.unregister_fusion(key)
    assert held > 140e6 and resident() - before < held / 3


def test_as_many_registrations_are_taken_back_as_were_made(either, own):
    keys = [fuser.register_fusion(chain(0)[0]) for _ in range(3)]
    assert len(set(keys)) == 1
    for _ in range(3):
        fuser.run_fusion(keys[0], [X])
        fuser.unregister_fusion(keys[0])
    assert is_gone(keys[0])
    with pytest.raises(UnknownKeyError, match="is gone"):
        fuser.unregister_fusion(keys[0])


def test_a_handle_keeps_its_fusion(either, own):
    graph, fn = chain(1)
    key = fuser.register_fusion(graph)
    handle = fuser.fusion_handle(key)
    handle(X)
    fuser.unregister_fusion(key)
    kernels = interface.kernel_spec(key).store.kernels
    assert torch.equal(handle(X), fuser.run_fusion(key, [X])[0])
    with pytest.raises(UnknownKeyError, match="not registered any more: it leaves with the last of its handles"):
        fuser.unregister_fusion(key)
    assert fuser.register_fusion(chain(1)[0]) == key  # the same again, with its kernels
    assert interface.kernel_spec(key).store.kernels == kernels != ()
    fuser.unregister_fusion(key)
    before = launcher.loaded_libraries()
    del handle, kernels
    assert is_gone(key) and launcher.loaded_libraries() < before


@pytest.mark.parametrize("make", [scaling, lambda w: fx.symbolic_trace(lambda x: [x * float(w[0]) - 1, x])])
def test_keys_that_share_a_specification_leave_one_by_one(either, own, make):
    """What is bound, constants that were lifted and containers are partials and closures around one handle."""
    weights = [torch.full((24,), n + 0.3) for n in range(4)]
    graphs = [make(w) for w in weights]
    keys = [fuser.register_fusion(g) for g in graphs]
    wanted = [g(X) for g in graphs]

    def same(a, b):
        return all(map(torch.equal, a if isinstance(a, list) else [a], b if isinstance(b, list) else [b]))

    for n, key in enumerate(keys):
        handle = fuser.fusion_handle(key)
        assert same(handle(X), wanted[n])
        fuser.unregister_fusion(key)
        assert all(same(fuser.fusion_handle(k)(X), w) for k, w in zip(keys[n:], wanted[n:], strict=True))
        del handle
        assert is_gone(key)


def test_a_key_never_means_something_else(either, own):
    keys = []
    for n in range(5):
        key = fuser.register_fusion(scaling(torch.full((24,), float(n))))
        assert torch.equal(fuser.run_fusion(key, [X])[0], X * n - X)
        fuser.unregister_fusion(key)
        keys.append(key)
    assert len(set(keys)) == 5 and all(map(is_gone, keys))


def test_pieces_of_a_split_leave_with_it(either, own):
    def fn(x):
        y = torch.sin(x) * 0.31 + x
        return torch.cos(torch.linalg.inv(y.reshape(2, 2)).reshape(4)) * 1.7 + x

    x = torch.tensor([1.0, 2, 5, 3])
    before = len(REGISTRY.registrations())
    key = fuser.register_fusion(fx.symbolic_trace(fn))
    assert torch.allclose(fuser.run_fusion(key, [x])[0], fn(x), atol=1e-5)
    (made,) = interface.kernel_spec(key).store.splits
    pieces = made.keys
    assert len(pieces) == 2 and all(interface.kernel_spec(k).store.kernels for k in pieces)
    del made
    fuser.unregister_fusion(key)
    gc.collect()  # the graphs of pieces are cycles
    assert len(REGISTRY.registrations()) == before and all(map(is_gone, (key, *pieces)))


def test_a_compiled_program_takes_its_fusions_along(own):
    torch._dynamo.reset()
    before = {r.key for r in REGISTRY.registrations()}
    compiled = torch.compile(lambda x: torch.sin(x) * 0.77 - torch.relu(x), backend="fuser")
    compiled(X)
    made = {r.key for r in REGISTRY.registrations()} - before
    assert made
    del compiled
    torch._dynamo.reset()

    def left():
        gc.collect()
        return [r for r in REGISTRY.registrations() if r.key in made]

    end = time.monotonic() + SECONDS
    # What one collection frees may have held a cycle that the next one finds, and other threads end their steps later.
    while left():
        assert time.monotonic() < end, [type(holder) for r in left() for holder in holders(r)]
        time.sleep(0.1)
    assert all(map(is_gone, made))
    fuser.debug.report()  # tells of what is there


def test_compiling_ahead_ends_before_its_fusion_leaves(either, own):
    key = fuser.register_fusion(chain(2)[0])
    future = interface.prepare(key, [X])
    fuser.unregister_fusion(key)
    assert future.result(60) is None
    del future


# -- calls in progress -------------------------------------------------------------------------------------------------
SLOW = r"""
#include <stdint.h>
#include <unistd.h>
extern "C" void slow(char* const* p, const int64_t* s, const double* f, int64_t a, int64_t b, char* m, int32_t* e) {
  usleep(300000);
  for (int64_t i = a; i < b; i++) ((float*)p[1])[i] = ((const float*)p[0])[i] + 1;
}
"""


def slow_library(folder: pathlib.Path, name: str) -> str:
    """A library whose kernel lets other threads run meanwhile."""
    made = support.compile_library(folder, SLOW)
    files.put(pathlib.Path(made), folder / name)
    return str(folder / name)


def slow_program():
    n = (support.SLOT, 0)
    step = support.Step("slow", n, (support.PUSH, 40000), support.ZERO)
    return support.program([support.vector(support.Bind(0))], 1, [support.output(n)], [step])


def is_mapped(path):
    return path in pathlib.Path("/proc/self/maps").read_text()


def new_handle(either):
    make = python_launcher.Handle if either == "python" else launcher.native().Handle
    return make(lambda args, status: ("slow", status))


def test_a_library_stays_while_a_thread_runs_in_it(either, tmp_path):
    path = slow_library(tmp_path, "one.so")
    handle = new_handle(either)
    handle.add_kernel(slow_program(), path)
    x = torch.zeros(4)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(handle, x)
        del handle
        others = [new_handle(either) for _ in range(3)]
        with config.override():
            config.set(library_limit=1)
            try:
                for n, other in enumerate(others):  # each wants room
                    other.add_kernel(slow_program(), slow_library(tmp_path, f"{n}.so"))
                    assert is_mapped(path) or running.done()
            finally:
                config.set(library_limit=4096)
        assert torch.equal(running.result(60), x + 1)
    del running
    assert not is_mapped(path)
    del others, other
    assert not is_mapped(str(tmp_path))


# -- the limit ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def limit():
    """A setter of the limit."""
    yield lambda n: config.set(library_limit=n)
    config.set(library_limit=4096)


def loaded(which):
    """How many libraries one of the launchers has loaded."""
    return libraries.loaded() if which == "python" else launcher.loaded_libraries() - libraries.loaded()


def test_what_was_unloaded_comes_back(either, own, limit):
    limit(2)
    made = [chain(n) for n in range(4)]
    handles = [fuser.fusion_handle(fuser.register_fusion(graph)) for graph, _ in made]
    wanted = [handle(X) for handle in handles]
    for _ in range(3):
        for handle, want, (_, fn) in zip(handles, wanted, made, strict=True):
            got = handle(X)
            assert torch.equal(got, want) and torch.allclose(got, fn(X), atol=1e-6)
            assert loaded(either) <= 2
        (together,) = handles[0].each(1, True, X)
        assert torch.equal(together, wanted[0])
    for graph, _ in made:
        key = fuser.register_fusion(graph)
        assert len(interface.kernel_spec(key).store.kernels) == 1  # none was compiled again
        fuser.unregister_fusion(key)
        fuser.unregister_fusion(key)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_library_that_was_damaged_meanwhile_is_made_again(either, own, limit, damage, tmp_path):
    with config.override(cache_dir=str(tmp_path)):
        limit(1)
        (graph, fn), (other, _) = chain(5), chain(6)
        key, second = fuser.register_fusion(graph), fuser.register_fusion(other)
        fuser.run_fusion(key, [X])
        path = pathlib.Path(interface.kernel_spec(key).store.kernels[0].library)
        fuser.run_fusion(second, [X])
        assert not is_mapped(str(path))
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:3000])
        else:
            path.unlink()
        for _ in range(2):
            assert torch.allclose(fuser.run_fusion(key, [X])[0], fn(X), atol=1e-6)
        assert path.exists() and is_mapped(str(path))
        fuser.unregister_fusion(key)
        fuser.unregister_fusion(second)


def test_a_kernel_whose_library_is_lost_gives_way_to_the_one_made_instead(either, own, limit, tmp_path):
    with config.override(cache_dir=str(tmp_path)):
        limit(1)
        (graph, fn), (other, _) = chain(7), chain(8)
        key, second = fuser.register_fusion(graph), fuser.register_fusion(other)
        handle = fuser.fusion_handle(key)
        handle(X)
        path = pathlib.Path(interface.kernel_spec(key).store.kernels[0].library)
        fuser.run_fusion(second, [X])
        assert not is_mapped(str(path))
        path.unlink()
        with config.override(cache_dir=""):  # so that the next library is another file
            for calls in (2, 3, 4):
                assert torch.allclose(handle(X), fn(X), atol=1e-6)
                assert handle.hits == calls
        assert len(interface.kernel_spec(key).store.kernels) == 2 and not path.exists()
        fuser.unregister_fusion(key)
        fuser.unregister_fusion(second)


# -- threads -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [2, 4096])
def test_threads_that_register_run_and_unregister(either, own, limit, most):
    """Every call is right, whoever leaves meanwhile; in the end nothing is left."""
    limit(most)
    before = {r.key for r in REGISTRY.registrations()}
    graphs = [chain(n) for n in range(4)] + [(scaling(w), w) for w in torch.rand(3, 24)]
    wanted = [graph(X) for graph, _ in graphs]
    stop, faults = threading.Event(), []

    def work(seed):
        try:
            for n in range(40):
                at = (seed * 5 + n * 3) % len(graphs)
                key = fuser.register_fusion(graphs[at][0])
                handle = fuser.fusion_handle(key) if n % 2 else None
                got = fuser.run_fusion(key, [X])[0]
                fuser.unregister_fusion(key)
                if handle is not None:
                    assert torch.allclose(handle(X), wanted[at], atol=1e-6)
                assert torch.allclose(got, wanted[at], atol=1e-6)
                if stop.is_set():
                    return
        except BaseException as e:
            faults.append(e)
            stop.set()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not faults, faults[0]
    gc.collect()
    assert {r.key for r in REGISTRY.registrations()} == before
