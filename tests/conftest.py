"""What every test gets: a kernel cache of its own, two threads, the same seeds."""

from __future__ import annotations

import contextlib
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
COLLECTIONS = (500_000, 10, 10)  # objects and passes between two: Python's own 700 take a twelfth of what torch traces
OPTIMISED_OF = 4  # tests and cases outside of tests/unit, of which one's kernels are optimised
SETTINGS = ("scrubbed_inductor", "get_dynamo", "compiler", "functorch")
AT_MOST = 20.0  # seconds that a test waits for what earlier ones left in the background


def keep_no_stacks() -> None:
    """Where a device is not there, each `torch.manual_seed` keeps the stack as text, for three of them: 3 ms in a
    test."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.traceback = SimpleNamespace(format_stack=list)


def write_no_traces() -> None:
    """Take all handlers from torch's log of traces, for which torch writes down every graph, guard and stack.

    pytest gives handlers to each logger that does not propagate.
    """
    traces = logging.getLogger("torch.__trace")
    traces.propagate = True
    traces.handlers.clear()


def log_by_the_root() -> None:
    """Let torch's 57 loggers propagate: pytest gives each other one two handlers, and takes them away, three times in a
    test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def set_root_level(level: int, usual: Callable[[int], None] = logging.root.setLevel) -> None:
    """A level that is the root's already empties no caches of loggers: pytest sets it twelve times in a test."""
    if level != logging.root.level:
        usual(level)


def spare_torch() -> None:
    """Take from torch what it does for its logs and messages alone, in the modules that are imported.

    Dynamo empties the processor's caches to time each graph's guards, a twentieth of the suite. Each mode of fake
    tensors writes down where it was made, three calls in each trace. Each compilation writes torch's settings down as
    JSON, and each joint graph and its halves as text. AOTAutograd makes twelve empty fake tensors for each graph, in
    place of states that it sets only on demand. Dynamo collects garbage after each.
    """
    if settings := sys.modules.get("torch._dynamo.config"):
        settings.run_gc_after_compile = False
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *args: 0.0
    if fakes := sys.modules.get("torch._subclasses.fake_tensor"):
        fakes.traceback = SimpleNamespace(extract_stack=list, format_list=traceback.format_list)
    if utils := sys.modules.get("torch._dynamo.utils"):
        for name in SETTINGS:
            setattr(utils, f"_{name}_config_for_logging", lambda: None)
    if stages := sys.modules.get("torch._functorch._aot_autograd.graph_compile"):
        stages._log_joint_graph = lambda *args: None
        stages._log_fw_bw_graphs = lambda *args: (None, None)
    states = sys.modules.get("torch._decomp.decompositions_for_rng")
    if states and not hasattr(states, "EMPTY"):
        states.EMPTY = dict(vars(states.PhiloxState()))
        states.PhiloxState.reset = lambda state: vars(state).update(states.EMPTY)


def pytest_configure(config: pytest.Config) -> None:
    keep_no_stacks()
    logging.root.setLevel = set_root_level  # type: ignore[method-assign]
    torch.set_num_threads(THREADS)
    gc.set_threshold(*COLLECTIONS)
    compilers.watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE_DIR, ignore_errors=True)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The same seeds for what a test module draws while it is imported, too."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


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
def quick_tests() -> None:
    """Collections in a test look at objects of its module, not at a million of torch and of earlier modules; a module
    after small ones keeps theirs."""
    log_by_the_root()
    if any(gc.get_count()[1:]):
        gc.collect()
        gc.freeze()


def is_optimised(item: pytest.Item) -> bool:
    """Whether kernels are compiled as for users. In tests/unit other things than kernels are tested. Elsewhere every
    fourth case that `make test` runs of a test is, without those that a mark names. The test's name says which is the
    first: of tests with one case, a fourth are."""
    if os.environ.get("FUSER_TEST_ALL") or item.get_closest_marker("optimised") is not None:
        return True
    turn, rest = divmod(sampling.position(item), sampling.share(item))
    turn += zlib.crc32(getattr(item, "originalname", item.name).encode())
    return item.path.parent.name != "unit" and not rest and turn % OPTIMISED_OF == 0


# -- around each test --------------------------------------------------------------------------------------------------
# One fixture enters all of these: a fixture for each takes as long as a small test.
@contextlib.contextmanager
def same_start(item: pytest.Item) -> Iterator[None]:
    """The same seeds and thread count for each test, whatever ran before it, and nothing written for torch's logs, also
    where an earlier test has set them up anew."""
    write_no_traces()
    spare_torch()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    yield


@contextlib.contextmanager
def same_settings(item: pytest.Item) -> Iterator[None]:
    """No test leaves a setting to later ones."""
    from fuser import config

    before = config.snapshot()
    yield
    left = {name: value for name, value in config.snapshot().items() if value != before[name]}
    for name in left:
        config.set(**{name: before[name]})
    assert not left, f"settings that the test left behind: {left}"


@contextlib.contextmanager
def some_passes_are_checked(item: pytest.Item) -> Iterator[None]:
    """In a share of the tests, by their names, the graph is checked after each pass: a twentieth of the suite."""
    from fuser import config

    with pytest.MonkeyPatch.context() as patch:
        if zlib.crc32(item.name.encode()) % CHECKED_OF:
            patch.setitem(config._values, "check_passes", False)
        yield


@contextlib.contextmanager
def sources_stay(item: pytest.Item) -> Iterator[None]:
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


@contextlib.contextmanager
def nothing_before(item: pytest.Item) -> Iterator[None]:
    """What a process counts together and says once is a test's own: earlier ones compile no more, and said nothing."""
    from fuser import notices
    from fuser.runtime import background

    background.COMPILERS.wait(AT_MOST)
    with pytest.MonkeyPatch.context() as patch:  # its own: a test's patches end before other fixtures do
        patch.setattr(notices, "_said", {})
        patch.setattr(notices, "_logged", {})
        yield


@contextlib.contextmanager
def quick_compilers(item: pytest.Item) -> Iterator[None]:
    """No test makes a kernel that holds the compiler. g++ optimises the test's kernels as for users, or not at all,
    which takes half of the time."""
    before = len(compilers.runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilers, "level", compilers.OPTIMISED if is_optimised(item) else "-O0")
        yield
    slow = compilers.too_slow(before)
    assert not slow, "; ".join(slow)


AROUND = (same_start, same_settings, some_passes_are_checked, sources_stay, nothing_before, quick_compilers)


@pytest.fixture(autouse=True)
def own_state(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for part in AROUND:
            stack.enter_context(part(request.node))
        yield


@pytest.fixture(autouse=True)
def registry() -> Iterator[Any]:
    """What a test registers has no kernels, fallbacks or verdicts from what others did: tests of equal graphs share
    nothing, whichever worker runs them and in whichever order."""
    from fuser.kernel_cache import REGISTRY, Registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REGISTRY, "__dict__", Registry().__dict__)
        yield REGISTRY


@pytest.fixture
def clean() -> Iterator[None]:
    """Nothing compiled through Dynamo, and the same random numbers."""
    from fuser.frontends.dynamo import forget_compilations

    torch._dynamo.reset()
    forget_compilations()
    torch.manual_seed(0)
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
