"""A part of the operators' database; `make opinfo` runs all of it.

Every operator, one sample of one or two dtypes, by the interpreter; some through kernels and through torch.compile.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.opinfo import batches, database, runner
from tests.opinfo.__main__ import ROUNDS, of_round

SHARES = 8
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    OPERATORS = database.operators()  # first: what torch's database imports may be missing
from torch.testing._internal.opinfo.core import SampleInput  # noqa: E402

KERNELS = (
    "add", "clamp", "where", "nn.functional.gelu", "sum", "amax", "argmax", "softmax.with_dtype", "var",
    "nn.functional.layer_norm", "cat", "index_select", "gather", "nn.functional.embedding", "tril", "roll",
    "nn.functional.cross_entropy", "cumsum", "select_scatter", "expand",
)  # fmt: skip
COMPILED = ("mul", "view", "split", "scatter_add", "index_put", "sort", "nn.functional.batch_norm", "fill")


def run(op, dtypes, samples: int, route: str) -> list[str]:
    wrong = []
    for dtype in [d for d in dtypes if d in database.dtypes_of(op)][:1]:
        for n, sample in enumerate(database.samples_of(op, dtype, samples)):
            outcome = runner.run(runner.make_sample(op.op, sample, database.undefined(op, sample)), route)
            if outcome.status in (runner.WRONG, runner.REFUSED):
                wrong.append(f"{database.full_name(op)} {dtype} sample {n} by {route}: {outcome}")
    return wrong


@pytest.mark.sampled(7, also=("1", "2", "3"))
@pytest.mark.parametrize("share", range(SHARES))
def test_every_operator_by_the_interpreter(share):
    wrong = []
    for op in OPERATORS[share::SHARES]:
        if database.family_of(op):
            wrong += run(op, (torch.float32, torch.int64, torch.bool), 1, "plans")
    assert not wrong, "\n".join(wrong)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", KERNELS)
def test_operators_by_kernels(name):
    op = next(op for op in OPERATORS if database.full_name(op) == name)
    wrong = run(op, (torch.float32,), 2, "call") + run(op, (torch.bfloat16, torch.int64), 1, "copies")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["special.bessel_j0", "special.bessel_y1"])
def test_bessel_functions_in_float64_are_eagers(name):
    """Eager's are off by 1e-7 near 5, kernels' are not: eager decides what is right."""
    (sample, *_) = samples_of((name,), (torch.float64,), 1)
    outcome = runner.run(sample, "call")
    assert outcome.status == runner.ATEN and "float64" in outcome.reason and not outcome.problems


@pytest.mark.parametrize("name", ["nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic"])
def test_interpolation_of_bytes_is_eagers(name):
    """Eager rounds weights and sums to fixed point; torch's decomposition computes in float32 and is off by one."""
    for sample in samples_of((name,), (torch.uint8,), 2):
        outcome = runner.run(sample, "compile")
        assert outcome.status == runner.ATEN and not outcome.problems, outcome


def test_written_inputs_are_compared_by_their_exact_value():
    """Eager rounds a bfloat16 mean before it is added to the running one: 0.0937 instead of 0.0898."""
    op = next(op for op in OPERATORS if op.name == "native_batch_norm")
    sample = runner.make_sample(op.op, list(database.samples_of(op, torch.bfloat16, None))[5])
    outcome = runner.run(sample, "compile")
    assert outcome.status == runner.NATIVE, outcome


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COMPILED)
def test_operators_through_torch_compile(name):
    op = next(op for op in OPERATORS if database.full_name(op) == name)
    wrong = run(op, (torch.float32,), 2, "compile")
    assert not wrong, "\n".join(wrong)


def samples_of(names, dtypes, most: int) -> list[runner.Sample]:
    ops = [op for op in OPERATORS if database.full_name(op) in names]
    return [
        runner.make_sample(op.op, s) for op in ops for d in dtypes if d in database.dtypes_of(op)
        for s in database.samples_of(op, d, most)
    ]  # fmt: skip


def test_a_batch_is_one_graph_and_each_sample_is_compared():
    samples = samples_of(("add", "cumsum", "index_add", "linalg.inv", "nonzero"), (torch.float32, torch.int64), 2)
    outcomes, broken = batches.run_batch(samples)
    assert len(outcomes) == len(samples) and broken  # by nonzero
    assert {o.status for o in outcomes} == {runner.PARTLY} and not any(o.problems for o in outcomes), outcomes


def test_a_wrong_sample_of_a_batch_is_found(monkeypatch):
    def off_by_one(gm, inputs):
        def call(*args):
            first, *rest = gm(*args)
            return first + 1, *rest

        return call

    monkeypatch.setattr(batches, "fuser_backend", off_by_one)
    outcomes, _ = batches.run_batch(samples_of(("cos", "sin"), (torch.float32,), 2))
    assert [o.status == runner.WRONG for o in outcomes] == [True] + [False] * (len(outcomes) - 1), outcomes


@pytest.mark.parametrize("n", [0, 1, 2, 9, 500])
def test_the_rounds_take_each_sample_once(n):
    taken = [i for number in range(len(ROUNDS)) for i in of_round(n, number)]
    assert sorted(taken) == list(range(n))


def test_what_is_whatever_was_in_memory_is_not_compared():
    """Attention on a GPU returns a seed and an offset that nothing has written, unless it drops something."""
    flash = next(op for op in OPERATORS if op.name.endswith("_flash_attention_forward"))
    undefined = [database.undefined(flash, SampleInput(torch.ones(1), dropout_p=p)) for p in (0.0, 0.5)]
    assert undefined == [(2, 3), ()]
    for some, differs in (((1,), False), ((0,), True), ((), True), (None, False)):
        sample = runner.make_sample(lambda x: (x + 1, x + 2), SampleInput(torch.ones(3)), some)
        want, got = list(sample.call(*sample.tensors)), list(sample.call(*sample.tensors))
        got[1].fill_(99)
        runner.forget_undefined(sample, (got, want), ())
        assert bool(runner.differences(sample, got, want, (), ())) == differs
