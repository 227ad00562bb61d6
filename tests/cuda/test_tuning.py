"""Tiles by races: what is varied, that it changes no bit, and that a choice is kept. Here stand-ins race."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from importlib import util
from typing import Any

import pytest
import torch
from cuda_cases import CASES

from fuser import compiler, config, interface
from fuser.contests import records
from fuser.cuda import choices, fused_kernel, tuning
from fuser.cuda.choices import Choice
from fuser.errors import CompileError

POINTWISE = {"tile x2", "tile x0.5", "warps x2", "tile x2, warps x2", "tile x0.5, warps x0.5"}
STAGES = {"2 stages", "4 stages", "5 stages"}
KINDS = {
    "relu_mul_add/2": POINTWISE, "transposed_add/2": POINTWISE,
    "extremes/odd": POINTWISE - {"tile x0.5, warps x0.5"},  # has one warp
    "layer_norm/0": {"tile x2", "tile x0.5"}, "softmax/2": {"tile x2"}, "column_sum/2": STAGES, "full_sum/2": STAGES,
    "norm_gradients/summed/2048": STAGES, "cumsum/columns": STAGES, "scatter_amin/new": set(),
}  # fmt: skip


def source_of(name: str) -> fused_kernel.Source:
    case = CASES[name]
    return case.source(case.fake_args())


@pytest.mark.parametrize("name", KINDS)
def test_what_is_varied(name: str) -> None:
    assert set(tuning.variants(source_of(name))) == KINDS[name]


@pytest.mark.parametrize("name", ("softmax/2", "column_sum/2", "full_sum/2", "cumsum", "norm_gradients"))
def test_sums_of_floats_keep_their_threads(name: str) -> None:
    """By their number Triton cuts a row, and so decides in which order it is added up."""
    source = source_of(name)
    for label, other in tuning.variants(source).items():
        assert [f.warps for f in other.functions] == [f.warps for f in source.functions], label


@pytest.mark.parametrize("name", ("relu_mul_add/2", "layer_norm/0", "column_sum/2"))
def test_other_tiles_take_the_same_arguments(name: str) -> None:
    source = source_of(name)
    for other in tuning.variants(source).values():
        assert other.program.inputs == source.program.inputs and other.program.buffers == source.program.buffers
        assert other.program.outputs == source.program.outputs
        assert other.again is not None and other.again({}, None).text == other.text


@pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
@pytest.mark.parametrize("name", ("relu_mul_add/2", "column_sum/2"))
def test_other_tiles_compile(name: str) -> None:
    for other in tuning.variants(source_of(name)).values():
        for entry, function in zip(fused_kernel.compile_entries(other, 90), other.functions):
            assert entry.threads == 32 * function.warps and fused_kernel.why_unfit(entry, 90) is None


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, fresh_cache_dir: str) -> Iterator[list[str]]:
    """Races between stand-ins for kernels, which the last contestant wins; the contestants of each race."""
    found: list[str] = []

    def race(runs: Any, incumbent: str, failed: Any = ()) -> Choice:
        found.append(" ".join(runs))
        return Choice(list(runs)[-1], "raced", tuple((name, 1.0) for name in runs))

    monkeypatch.setattr(records, "_made", {})
    monkeypatch.setattr(choices, "name_of", lambda *parts: f"{abs(hash(parts)):x}")
    monkeypatch.setattr(choices, "race", race)
    monkeypatch.setattr(tuning, "size_class", lambda source, args: (tuple(args[0].shape)[0].bit_length() + 20,))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(
        tuning, "_compiled", lambda sources: ({name: lambda *args: args[0] * 2 for name in sources}, [])
    )
    yield found


def test_a_choice_is_made_once_for_a_class_and_kept_on_disk(raced: list[str]) -> None:
    source, args = source_of("relu_mul_add/2"), (torch.ones(40, 50),)
    won = tuning.tuned(source, args)
    assert won.text != source.text or [f.warps for f in won.functions] != [f.warps for f in source.functions]
    assert len(raced) == 1 and raced[0].startswith("table ")
    assert tuning.tuned(source, args) is not source and len(raced) == 1
    records._made.clear()
    assert tuning.tuned(source, args).text == won.text and len(raced) == 1
    assert [c.what for c in choices.choices()] == [f"tiles of {source.name}"]
    tuning.tuned(source, (torch.ones(4000, 50),))
    assert len(raced) == 2


def test_other_bits_are_out_of_the_race(raced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(sources: Any) -> Any:
        off = {name: 0.0 if name in ("table", "tile x2") else 1e-7 for name in sources}
        return {name: lambda x, d=off[name]: x * 2 + x * d for name in sources}, [("warps x8", "spills")]

    monkeypatch.setattr(tuning, "_compiled", compiled)
    tuning.tuned(source_of("relu_mul_add/2"), (torch.ones(40, 50),))
    assert raced == ["table tile x2"]
    (made,) = choices.choices()
    assert "warps x2: its results have other bits" in made.reason and "warps x8: spills" in made.reason


def test_without_memory_or_work_there_is_no_race(raced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source, args = source_of("relu_mul_add/2"), (torch.ones(40, 50),)
    with monkeypatch.context() as m:
        m.setattr(tuning, "size_class", lambda source, args: (10,))
        assert tuning.tuned(source, args) is source
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert tuning.tuned(source, args) == dataclasses.replace(source, lasting=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    assert tuning.tuned(source, args) is source and not raced
    assert "memory" in choices.choices()[0].reason


def test_a_race_that_cannot_be_run_leaves_the_tables_tiles(raced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise CompileError("the driver is gone")

    monkeypatch.setattr(tuning, "_compiled", fail)
    source = source_of("relu_mul_add/2")
    assert tuning.tuned(source, (torch.ones(40, 50),)) == dataclasses.replace(source, lasting=False)
    assert not choices.choices()


def test_made_arguments_are_the_same_each_time() -> None:
    args = (torch.ones(3, 1).expand(3, 4), torch.ones(4, 3).t(), torch.tensor(7), torch.ones(2, 2) > 0, 3, 0.5)
    one, two = tuning.examples(args), tuning.examples(args)
    assert one[4:] == [3, 0.5]
    for a, b, given in zip(one[:4], two[:4], args[:4]):
        assert torch.equal(a, b) and (a.shape, a.stride(), a.dtype) == (given.shape, given.stride(), given.dtype)
    assert one[2] == 0 and one[0].std() > 0, "indices that are in range, and numbers that differ"
    assert tuning.examples([torch.ones(0, 3)])[0].shape == (0, 3)


def test_only_max_autotune_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    backend = compiler.CudaBackend()
    monkeypatch.setattr(compiler.CudaBackend, "tune", staticmethod(lambda source, args: asked.append(args) or source))
    monkeypatch.setattr(compiler.CudaBackend, "compile", lambda self, source: source)
    monkeypatch.setattr(compiler, "find_backend", lambda device_type: backend)
    case = CASES["relu_mul_add/0"]
    spec = interface.kernel_spec(interface.register_fusion(torch.fx.symbolic_trace(case.fn)))
    compiler.compile_runtime(spec, case.fake_args())
    assert not asked
    with config.override(max_autotune=True):
        compiler.compile_runtime(spec, case.fake_args())
    assert len(asked) == 1


def test_what_races_may_race_for_its_own_kernels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call compiles kernels, in other threads, and these may have races of their own."""
    monkeypatch.setattr(choices, "_timed", lambda runs, incumbent, failed: Choice(incumbent, "", ()))
    within: list[Choice] = []

    def first_call() -> None:
        if not within:
            inner = threading.Thread(target=lambda: within.append(choices.race({"b": lambda: None}, "b")), daemon=True)
            inner.start()
            inner.join(20)

    assert choices.race({"a": first_call}, "a").winner == "a"
    assert [c.winner for c in within] == ["b"]
