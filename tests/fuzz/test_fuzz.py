"""A fixed set of random programs; `make fuzz` runs as many others as asked for."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import run_seed
from tests.fuzz.check import check
from tests.fuzz.generate import generate
from tests.fuzz.program import Input, Program, Ref, Step, graph_of, make_inputs, run
from tests.fuzz.shrink import shrink

# (way, first seed, programs): most go without a compiler.
PORTIONS = [("plans", n, 240) for n in range(0, 1920, 240)] + [
    ("kernel", 50_000, 25),
    ("kernel", 50_025, 25),
    ("whole", 60_000, 25),
    ("backend", 70_000, 20),
    ("compile", 80_000, 4),
]


# Programs over empty tensors for which the plans' interpreter still crashes; each is expected to fail below.
KNOWN = {("plans", 1496): "reads an empty buffer", ("plans", 1503): "rolls an empty result of index_add"}


@pytest.mark.parametrize("way, seed", KNOWN)
@pytest.mark.xfail(strict=True, reason="crashes over empty tensors")
def test_known_defects(way, seed):
    assert run_seed(seed, way)[1] is None


@pytest.mark.parametrize("way, first, count", PORTIONS)
def test_programs_do_what_eager_does(way, first, count):
    wrong = []
    for seed in range(first, first + count):
        if (way, seed) in KNOWN:
            continue
        _, problem, program = run_seed(seed, way)
        if problem:
            wrong.append(f"seed {seed} by {way}: {problem}\n{program}")
    assert not wrong, "\n".join(wrong)


def test_a_seed_gives_the_same_program():
    assert [str(generate(s)) for s in range(20)] == [str(generate(s)) for s in range(20)]
    assert str(generate(3, mutate=True)) == str(generate(3, mutate=True))


def test_a_program_and_its_graph_are_the_same():
    import torch

    for seed in range(40):
        program = generate(seed)
        want = run(program, make_inputs(program))
        got = torch.fx.GraphModule(torch.nn.Module(), graph_of(program))(*make_inputs(program))
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, want))


def test_a_wrong_kernel_is_seen_and_its_program_shrunk(monkeypatch):
    """With a lowering of relu that is off by one, any program with a relu is wrong, and shrinks to the relu."""
    import torch

    from fuser.ir.loop_body import ops
    from fuser.lowering.pointwise import elementwise
    from fuser.lowering.registry import LOWERINGS

    broken = lambda ctx, x: elementwise(ctx, [x], lambda v: ops.add(ops.relu(v), 1))  # noqa: E731
    monkeypatch.setitem(LOWERINGS, "aten.relu", broken)
    program = Program(
        (Input((4, 16), torch.float32, "transposed", "integers", 5), Input((4, 16), torch.float32, seed=6)),
        (
            Step("torch.mul", (Ref(0), Ref(1))),
            Step("torch.relu", (Ref(2),)),
            Step("torch.sum", (Ref(3), (0,))),
            Step("torch.neg", (Ref(0),)),
        ),
        (4, 5),
        (4, 5),
    )
    assert "differ" in check(program, "plans")
    small = shrink(program, lambda p: bool(check(p, "plans")))
    assert [s.fn for s in small.steps] == ["torch.relu"] and len(small.inputs) == 1
    assert small.inputs[0].layout == "dense"
