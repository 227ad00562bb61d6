"""`config.verify`: kernels on trial beside the fallback, and the script that a broken one leaves behind."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.fx

from fuser import compiler, config, debug, fusion_handle, register_fusion, verify
from fuser.cpu import fused_kernel
from fuser.kernel_cache import REGISTRY
from fuser.runtime import launcher
from fuser.verify import difference


def register(fn) -> int:
    return register_fusion(torch.fx.symbolic_trace(fn))


def run_script(path: str) -> subprocess.CompletedProcess[str]:
    root = str(pathlib.Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    return subprocess.run([sys.executable, path], capture_output=True, text=True, env=env)


def breaking(monkeypatch, find: str, replace: str) -> None:
    """Kernels compiled from now on have `replace` for the pattern `find` in their source."""
    compile_source = fused_kernel.compile_source

    def broken(source):
        parts = tuple(re.sub(find, replace, p) for p in source.parts)
        assert parts != source.parts
        return compile_source(dataclasses.replace(source, parts=parts))

    monkeypatch.setattr(compiler.fused_kernel, "compile_source", broken)


def test_a_good_kernel_is_used_after_its_trial(fresh_cache_dir):
    key = register(lambda x, y: torch.tanh(x * y) + 0.123)
    x, y = torch.randn(50), torch.randn(50)
    handle = fusion_handle(key)
    store = REGISTRY.find(key).spec.store
    with config.override(verify=3):
        for n in range(5):
            torch.testing.assert_close(handle(x, y), torch.tanh(x * y) + 0.123)
            assert handle.kernel_count == (1 if n >= 2 else 0)
    assert len(store.kernels) == 1 and not store.fallbacks
    handle(x[:7], y[:7])
    assert len(store.kernels) == 1


def test_a_broken_kernel_is_caught_and_leaves_a_reproducer(monkeypatch, fresh_cache_dir):
    breaking(monkeypatch, r" \+ 1\.0f", " + 1.01f")
    key = register(lambda x: torch.relu(x * 3 + 1))
    x = torch.randn(64)
    want = torch.relu(x * 3 + 1)
    with config.override(verify=2), pytest.warns(RuntimeWarning, match="failed verification") as caught:
        assert torch.equal(fusion_handle(key)(x), want)
    assert torch.equal(fusion_handle(key)(x), want)
    store = REGISTRY.find(key).spec.store
    assert not store.kernels and any("failed verification" in r for r in store.fallbacks)
    assert "failed verification" in debug.explain(key)
    path = re.search(r"(\S+\.py) reproduces", str(caught[0].message)).group(1)
    # The fault was in the compiler that this test replaced: the script, run by itself, finds nothing wrong.
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    assert "fused" in done.stdout
    text = pathlib.Path(path).read_text()
    assert "\nwant = " in text
    pathlib.Path(path).write_text(text.replace("\nwant = ", "\ngot = got * 2\nwant = "))
    done = run_script(path)
    assert done.returncode == 1 and "instead of" in done.stderr


def test_a_kernel_that_breaks_at_its_second_call(monkeypatch, fresh_cache_dir):
    """Wrong for large sizes alone: the first call is small and passes."""
    breaking(monkeypatch, r" \* 3\.0f", " * (n_a0 > 100 ? 3.5f : 3.0f)")
    key = register(lambda x: x * 3 - 0.5)
    handle = fusion_handle(key)
    small, large = torch.randn(10), torch.randn(1000)
    with config.override(verify=2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(handle(small), small * 3 - 0.5)
        with pytest.warns(RuntimeWarning, match="elements off"):
            assert torch.equal(handle(large), large * 3 - 0.5)
        assert torch.equal(handle(small), small * 3 - 0.5)
    assert handle.kernel_count == 0


def test_verified_calls_raise_what_eager_raises(fresh_cache_dir):
    key = register(lambda x, i: x[i] * 2)
    with config.override(verify=5):
        fusion_handle(key)(torch.randn(5), torch.tensor([1, 2]))
        with pytest.raises(IndexError):
            fusion_handle(key)(torch.randn(5), torch.tensor([1, 9]))


def test_repro_by_hand(tmp_path):
    key = register(lambda x: torch.softmax(x, -1).sum(0))
    path = debug.repro(key, [torch.randn(4, 5)], str(tmp_path))
    done = run_script(path)
    assert done.returncode == 0, done.stderr


NAN = float("nan")


@pytest.mark.parametrize(
    "got, want, wrong",
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), None),
        (torch.tensor([1.0]), torch.tensor([1.1]), "elements off"),
        (torch.tensor([1.0]), torch.tensor([NAN]), "elements off"),
        (torch.tensor([1]), torch.tensor([2]), "elements off"),
        (torch.tensor([1.0]), torch.tensor([1]), "instead of torch.int64"),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), "strides"),
        (torch.zeros(2), (torch.zeros(2), torch.zeros(2)), "1 results"),
        (torch.tensor([1.01]).half(), torch.tensor([1.012]).half(), None),
    ],
)
def test_difference(got, want, wrong):
    found = difference(got, want, (), lambda: want)
    assert found is None if wrong is None else wrong in found


def test_difference_accepts_what_is_nearer_to_the_exact_result():
    eager, kernel, exact = torch.tensor([1.02]), torch.tensor([1.0]), torch.tensor([1.001], dtype=torch.float64)
    assert difference(kernel, eager, (), lambda: exact) is None
    assert difference(eager, kernel, (), lambda: exact) is not None


@pytest.mark.parametrize("calls", [2, "2", "first_2"])
def test_verify_takes_a_number_of_calls_in_several_forms(calls):
    with config.override(verify=calls):
        assert config.verify == 2


@pytest.mark.parametrize("calls", [-1, "first", "first_n", "last_2", "first_-1"])
def test_verify_says_what_it_expects(calls):
    with pytest.raises(config.ConfigError, match="expected a number of calls, such as 3 or 'first_3'; 0 is none"):
        config.check("verify", calls)


def test_verify_from_the_environment():
    code = "import fuser; assert fuser.config.verify == 4; fuser.config.set(verify=0)"
    env = {**os.environ, "FUSER_VERIFY": "first_4", "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


# -- time --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ratio, size, left", [(1.3, 5000, True), (1.02, 5000, False), (9.0, 50, False)])
def test_calls_for_which_a_kernel_is_slower_go_to_eager(monkeypatch, ratio, size, left):
    assert launcher.wait(60)
    monkeypatch.setattr(verify, "time_ratio", lambda *_: ratio)
    key = register(lambda x: torch.cos(x) * ratio - size)
    store, handle = REGISTRY.find(key).spec.store, fusion_handle(key)
    x, other = torch.linspace(0, 1, size), torch.linspace(0, 1, size + 1)
    with config.override(slowest=1.05):
        for _ in range(3):
            torch.testing.assert_close(handle(x), torch.cos(x) * ratio - size)
    assert handle.hits == (0 if left else 2)  # of the second and third call; the first ran on trial
    torch.testing.assert_close(handle(other), torch.cos(other) * ratio - size)
    assert handle.hits == (1 if left else 3)  # another size
    if left:
        (reason,) = store.fallbacks
        assert re.fullmatch(r"kernel \w+ took 1.30 times as long as ATen for sizes \(5000,\)", reason)
        assert "took 1.30 times as long" in str(debug.explain(key))


def test_a_kernel_is_timed_in_its_first_call_or_never(monkeypatch):
    assert launcher.wait(60)
    timed = []
    monkeypatch.setattr(verify, "time_ratio", lambda kernel, eager, args: timed.append(args[0].numel()) or 0.5)
    with config.override(slowest=1.05):
        for first in (4095, 4096, 1 << 19, (1 << 19) + 1):
            key = register(lambda x, first=first: torch.sin(x) * (first + 0.25))
            for size in (first, 5000):
                fusion_handle(key)(torch.ones(size))
            assert fusion_handle(key).kernel_count == 1
    assert timed == [4096, 1 << 19]


def test_nothing_is_timed_where_results_must_not_differ(monkeypatch):
    assert launcher.wait(60)
    monkeypatch.setattr(verify, "time_ratio", lambda *_: 9.0)
    key = register(lambda x: torch.sin(x) * 9.125)
    torch.use_deterministic_algorithms(True)
    try:
        with config.override(slowest=1.05):
            for _ in range(2):
                fusion_handle(key)(torch.ones(5000))
    finally:
        torch.use_deterministic_algorithms(False)
    assert fusion_handle(key).hits == 1


def test_calls_that_write_are_not_repeated():
    key = register(lambda x: x.copy_(x * 2.5 + 1))
    x = torch.ones(5000)
    with config.override(slowest=1.05, verify=3):
        fusion_handle(key)(x)
    assert torch.equal(x, torch.full((5000,), 3.5))


def test_time_is_measured():
    x = torch.ones(100_000)
    slow = verify.time_ratio(lambda x: [x.exp() for _ in range(6)], lambda x: x.exp(), (x,))
    fast = verify.time_ratio(lambda x: x.exp(), lambda x: [x.exp() for _ in range(6)], (x,))
    assert fast < 1.0 < 1.05 < slow


def test_what_only_a_kernel_can_compute_is_not_timed(monkeypatch):
    assert launcher.wait(120)
    key = register(lambda x: torch.sin(x) + 2.25)
    x = torch.randn(5000)
    want = torch.sin(x) + 2.25

    def refusing(*args):
        raise NotImplementedError("not implemented for this dtype")

    spec = REGISTRY.find(key).spec
    handle = fusion_handle(key)
    monkeypatch.setattr(verify, "time_ratio", refusing)
    with config.override(slowest=1.05):
        torch.testing.assert_close(handle(x), want)
    assert handle.kernel_count == 1 and not spec.store.fallbacks
