"""What every test gets: a kernel cache of its own, two threads, the same seeds."""

from __future__ import annotations

import gc
import linecache
import logging
import os
import random
import shutil
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

# Before `fuser.config` is imported, which reads it. A folder for each pytest process: a test that counts compilations
# must not find the kernels of a neighbour, or of yesterday. Processes that a test starts inherit it.
_CACHE_DIR = tempfile.mkdtemp(prefix="fuser-test-")
os.environ["FUSER_CACHE_DIR"] = _CACHE_DIR
os.environ.setdefault("FUSER_CHECK_IR", "1")
# Passes are checked in one of so many tests.
CHECKED_OF = 1 if {"FUSER_CHECK_PASSES", "FUSER_TEST_ALL"} & os.environ.keys() else 4
os.environ.setdefault("FUSER_CHECK_PASSES", "1")
os.environ.setdefault("FUSER_STRICT", "1")
# What runs must not depend on a clock.
os.environ.setdefault("FUSER_SLOWEST", "0")
os.environ.setdefault("FUSER_LINEAR_BACKEND", "onednn")
os.environ.setdefault("FUSER_CONVOLUTION_LAYOUT", "channels_last")
# Before torch loads its OpenMP runtime: with several pytest processes on few cores, threads that spin while they wait
# take the cores from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests import compilers, sampling  # noqa: E402

THREADS = 2
FEW_FILES = 20  # of so many each test is given out by itself
COLLECTIONS = (100_000, 10, 10)  # objects and passes between two: Python's own 700 take a twelfth of what torch traces
OPTIMISED_OF = 4  # tests and cases outside of tests/unit, of which one's kernels are optimised
SETTINGS = ("scrubbed_inductor", "get_dynamo", "compiler", "functorch")
AT_MOST = 20.0  # seconds that a test waits for what earlier ones left in the background


def seed_torch() -> None:
    """`torch.manual_seed(0)`, which without a GPU writes the stack down three times, for devices still to come."""
    torch.manual_seed(0) if torch.cuda.is_available() else torch.default_generator.manual_seed(0)


def write_no_traces() -> None:
    """Take all handlers from torch's log of traces, for which torch writes down every graph, guard and stack.

    pytest gives handlers to each logger that does not propagate.
    """
    traces = logging.getLogger("torch.__trace")
    traces.propagate = True
    traces.handlers.clear()


def pytest_configure(config: pytest.Config) -> None:
    write_no_traces()
    torch.set_num_threads(THREADS)
    gc.set_threshold(*COLLECTIONS)
    compilers.watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE_DIR, ignore_errors=True)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The same seeds for what a test module draws while it is imported, too."""
    if isinstance(collector, pytest.Module):
        seed_torch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep files of many small tests together, and skip what needs a GPU where there is none.

    Neighbours have kernels in common, which two workers would both compile. The tests of other folders, some of which
    take long, are given out one by one when files have been, so that the workers end together.
    """
    sampling.leave_out(items)
    if len({item.path for item in items}) > FEW_FILES:
        for item in items:
            if item.path.parent.name in ("backend", "null", "unit") and not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(item.path.stem))
        items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)  # no long file of one test is last
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Iterator[None]:
    made = yield
    sampling.number(made if isinstance(made, list) else [])
    return made


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Collections in a test look at objects of its module, not at a million of torch and of earlier modules; a module
    after small ones keeps theirs."""
    if any(gc.get_count()[1:]):
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """How g++ optimises this test's kernels: as for users, or not at all, which takes half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilers, "level", compilers.OPTIMISED if is_optimised(request.node) else "-O0")
        yield


def is_optimised(item: pytest.Item) -> bool:
    """Whether kernels are compiled as for users. In tests/unit other things than kernels are tested. Elsewhere every
    fourth case that `make test` runs of a test with parameters is, beginning with the first, without those that a mark
    names; of the other tests those of a fourth of the names."""
    if os.environ.get("FUSER_TEST_ALL") or item.get_closest_marker("optimised") is not None:
        return True
    turn, rest = divmod(sampling.position(item), sampling.share(item))
    if not hasattr(item, "callspec"):
        turn = zlib.crc32(item.name.encode())
    return item.path.parent.name != "unit" and not rest and turn % OPTIMISED_OF == 0


@pytest.fixture(autouse=True)
def some_passes_are_checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a share of the tests, by their names, the graph is checked after each pass: a twentieth of the suite."""
    from fuser import config

    with pytest.MonkeyPatch.context() as patch:
        if zlib.crc32(request.node.name.encode()) % CHECKED_OF:
            patch.setitem(config._values, "check_passes", False)
        yield


@pytest.fixture(autouse=True)
def guards_take_no_time() -> Iterator[None]:
    """Dynamo empties the processor's caches to time each graph's guards, for its logs: a twentieth of the suite."""
    with pytest.MonkeyPatch.context() as patch:
        if guards := sys.modules.get("torch._dynamo.guards"):
            patch.setattr(guards, "profile_guard_manager", lambda *args: 0.0)
        yield


@pytest.fixture(autouse=True)
def modes_keep_no_stack() -> Iterator[None]:
    """Each mode of fake tensors writes down where it was made, for one message: three calls in each trace."""
    with pytest.MonkeyPatch.context() as patch:
        if fakes := sys.modules.get("torch._subclasses.fake_tensor"):
            stacks = SimpleNamespace(extract_stack=list, format_list=traceback.format_list)
            patch.setattr(fakes, "traceback", stacks)
        yield


@pytest.fixture(autouse=True)
def logs_take_no_time() -> Iterator[None]:
    """Each compilation writes torch's settings down as JSON, and each joint graph and its halves as text, for logs."""
    with pytest.MonkeyPatch.context() as patch:
        if utils := sys.modules.get("torch._dynamo.utils"):
            for name in SETTINGS:
                patch.setattr(utils, f"_{name}_config_for_logging", lambda: None, raising=False)
        if stages := sys.modules.get("torch._functorch._aot_autograd.graph_compile"):
            patch.setattr(stages, "_log_joint_graph", lambda *args: None, raising=False)
            patch.setattr(stages, "_log_fw_bw_graphs", lambda *args: (None, None), raising=False)
        yield


@pytest.fixture(autouse=True)
def random_states_are_made_once() -> Iterator[None]:
    """AOTAutograd makes twelve empty fake tensors for each graph, in place of states that it sets only on demand."""
    with pytest.MonkeyPatch.context() as patch:
        if states := sys.modules.get("torch._decomp.decompositions_for_rng"):
            empty = dict(vars(states.PhiloxState()))
            patch.setattr(states.PhiloxState, "reset", lambda state: vars(state).update(empty))
        yield


@pytest.fixture(autouse=True)
def no_traces() -> Iterator[None]:
    """Also where an earlier test has set torch's logs up anew."""
    write_no_traces()
    yield


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """The same seeds and thread count for each test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    seed_torch()
    torch.set_num_threads(THREADS)
    yield


@pytest.fixture(autouse=True)
def same_settings() -> Iterator[None]:
    """No test leaves a setting to later ones."""
    from fuser import config

    before = config.snapshot()
    yield
    left = {name: value for name, value in config.snapshot().items() if value != before[name]}
    for name in left:
        config.set(**{name: before[name]})
    assert not left, f"settings that the test left behind: {left}"


@pytest.fixture(autouse=True)
def sources_stay() -> Iterator[None]:
    """A source file is looked at once in a test, whether it has changed. Python does so for each file of a stack, and
    torch keeps the stack of each operator that it traces: 90,000 looks in one test."""
    seen: set[str] = set()

    def look(filename: str | None = None, look: Callable[[str | None], None] = linecache.checkcache) -> None:
        if filename is None or filename not in seen:
            seen.update([filename] if filename else [])
            look(filename)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linecache, "checkcache", look)
        yield


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    """What a process counts together and says once is a test's own: earlier ones compile no more, and said nothing."""
    from fuser import notices
    from fuser.runtime import background

    background.COMPILERS.wait(AT_MOST)
    with pytest.MonkeyPatch.context() as patch:  # its own: a test's patches end before other fixtures do
        patch.setattr(notices, "_said", {})
        patch.setattr(notices, "_logged", {})
        yield


@pytest.fixture(autouse=True)
def registry() -> Iterator[Any]:
    """What a test registers has no kernels, fallbacks or verdicts from what others did: tests of equal graphs share
    nothing, whichever worker runs them and in whichever order."""
    from fuser.kernel_cache import REGISTRY, Registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REGISTRY, "__dict__", Registry().__dict__)
        yield REGISTRY


@pytest.fixture(autouse=True)
def quick_compilers() -> Iterator[None]:
    """No test makes a kernel that holds the compiler."""
    before = len(compilers.runs)
    yield
    slow = compilers.too_slow(before)
    assert not slow, "; ".join(slow)


@pytest.fixture
def clean() -> Iterator[None]:
    """Nothing compiled through Dynamo, and the same random numbers."""
    from fuser.frontends.dynamo import forget_compilations

    torch._dynamo.reset()
    forget_compilations()
    seed_torch()
    yield
    torch._dynamo.reset()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs of the graphs that a test compiles through Dynamo."""
    from fuser.frontends import functional
    from fuser.frontends.program import Program

    made: list[Any] = []

    class Kept(Program):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(functional, "Program", Kept)
    torch._dynamo.reset()
    return made


@pytest.fixture
def lenient() -> Iterator[None]:
    """Defects are fallbacks, as users have it; in other tests they are errors."""
    from fuser import config

    config.set(strict=False)
    yield
    config.set(strict=True)


@pytest.fixture(scope="session")
def session_cache_dir() -> str:
    """The kernel cache of this pytest process, shared by its tests."""
    return _CACHE_DIR


@pytest.fixture
def fresh_cache_dir(tmp_path, monkeypatch) -> str:
    """An empty kernel cache for one test and for the processes it starts."""
    from fuser import config

    path = str(tmp_path / "cache")
    monkeypatch.setenv("FUSER_CACHE_DIR", path)
    before = config.cache_dir
    config.set(cache_dir=path)
    yield path
    config.set(cache_dir=before)
