"""A fixed set of random programs; `make fuzz` runs as many others as asked for."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy
import pytest
import torch

from tests.fuzz import judge, workers
from tests.fuzz.__main__ import run_batch, run_seed
from tests.fuzz.check import _compare_memory, check
from tests.fuzz.generate import generate
from tests.fuzz.program import Input, Program, Ref, Step, graph_of, make_inputs, run
from tests.fuzz.shrink import shrink

# (way, first seed, programs): 279, most of which go without a compiler.
PORTIONS = [
    *(("plans", n, 120) for n in range(0, 1600, 800)),
    ("vectors", 100_000, 6),
    ("kernel", 50_000, 10),
    ("whole", 60_000, 10),
    ("backend", 70_000, 8),
    ("compile", 80_000, 3),
    ("dynamic", 90_000, 2),
]


@pytest.mark.parametrize("way, first, count", PORTIONS)
def test_programs_do_what_eager_does(way, first, count):
    batch = run_batch(range(first, first + count), way, "-O0")
    wrong = [f"seed {seed} by {own}: {problem}\n{program}" for seed, own, problem, program in batch if problem]
    assert not wrong, "\n".join(wrong)


@pytest.mark.optimised
def test_programs_do_what_eager_does_as_users_compile_them():
    wrong = [(seed, problem) for seed in range(40_000, 40_012) for problem in [run_seed(seed, "kernel")[1]] if problem]
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_plans_over_nothing(dtype):
    """Loops without a turn read nothing: found by seeds 1496 and 1503 of the first fuzzer."""
    empty, half = Input((0, 4), dtype), Input((2, 0, 2), torch.float32)
    rows = Input((0,), torch.int64)
    programs = [
        Program((empty, rows), (Step("torch.index_add", (Ref(0), 0, Ref(1), Ref(0))),), (2,)),
        Program((half, half), (Step("torch.softmax", (Ref(0), 1)), Step("torch.mean", (Ref(1), (2,)))), (2, 3)),
        Program((empty,), (Step(".reshape", (Ref(0), (4, 0))), Step("torch.count_nonzero", (Ref(1),))), (2,)),
    ]
    assert [check(p, "plans") for p in programs] == ["", "", ""]


def test_a_seed_gives_the_same_program():
    assert [str(generate(s)) for s in range(20)] == [str(generate(s)) for s in range(20)]
    assert str(generate(3, mutate=True)) == str(generate(3, mutate=True))


def test_a_program_and_its_graph_are_the_same():
    for seed in range(40):
        program = generate(seed)
        want = run(program, make_inputs(program))
        got = torch.fx.GraphModule(torch.nn.Module(), graph_of(program))(*make_inputs(program))
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, want))


def test_a_wrong_kernel_is_seen_and_its_program_shrunk(monkeypatch):
    """With a lowering of relu that is off by one, any program with a relu is wrong, and shrinks to the relu."""
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


def test_a_result_of_a_gpu_may_be_as_far_off_as_eagers_on_the_cpu(monkeypatch):
    """Seed 603435: divided by a sum that is nearly nothing."""
    summed, divided = Step("torch.sum", (Ref(0), (0, 1))), Step("torch.div", (Ref(0), Ref(1)))
    program = Program((Input((33, 40), torch.float32, "offset", "normal", 90548020),), (summed, divided), (2,))
    (exact,), _, _, _ = judge.wide_run(program, None)
    monkeypatch.setattr(judge, "test_device", lambda: "cuda")
    monkeypatch.setattr(judge, "run", lambda p, inputs: ((exact * (1 + 6e-5)).float(),))
    near, far = (exact * (1 - 3e-5)).float(), (exact * (1 + 3e-4)).float()
    assert judge._as_on_cpu(program, 0, near, exact, None)
    assert not judge._as_on_cpu(program, 0, far, exact, None)
    monkeypatch.setattr(judge, "test_device", lambda: "cpu")
    assert not judge._as_on_cpu(program, 0, near, exact, None)


def test_what_an_input_holds_afterwards_may_be_nearer_than_eagers():
    """Seed 600881: a long sum of halves, which eager on a GPU adds up in halves."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(302437494)).half()
    exact = x.double().cumsum(0)
    near, far = exact.half(), torch.from_numpy(numpy.cumsum(x.numpy(), dtype=numpy.float16))

    def problems(mine, eager):
        return _compare_memory([mine], [eager], (), (), False, lambda: [exact])

    assert not problems(near, far)
    assert "input 0 afterwards" in problems(far, near)[0]


def test_what_underflows_on_the_way_to_a_product_may_be_nothing():
    """Seeds 1422756 and 1494807: 0.95 to the 5000th is 1e-44 where eager multiplies one after the other, and infinity
    times it is no number elsewhere."""
    powers = Program(
        (Input((5000,), torch.float32, "expanded", "normal", 858397497), Input((1,), torch.float32)),
        (Step("torch.prod", (Ref(0), 0)), Step("torch.div", (Ref(1), 0.0)), Step("torch.mul", (Ref(2), Ref(3)))), (4,),
    )  # fmt: skip
    (infinite,) = run(powers, make_inputs(powers))
    assert infinite.isinf().all()
    assert not judge.what_differs(powers, (infinite * 0,), (infinite,), None, True)
    assert judge.what_differs(powers, (-infinite,), (infinite,), None, True)
    assert judge.what_differs(powers, (torch.ones(1),), (infinite,), None, True)


def test_where_a_worker_died_is_told(tmp_path):
    crash = tmp_path / "0.crash"
    code = (
        "import ctypes, faulthandler, threading\ndef f(): ctypes.string_at(0)\n"
        f"faulthandler.enable(open({str(crash)!r}, 'w'))\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\nf()"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGSEGV
    assert workers.crashed_at(crash).startswith(", in __init__.py:") and "<string>:2 f" in workers.crashed_at(crash)
    assert workers.crashed_at(tmp_path / "none") == ""


def test_where_a_worker_hangs_is_told(tmp_path):
    """Beside more threads than faulthandler writes the stacks of."""
    crash = tmp_path / "0.crash"
    code = (
        "import threading\nfrom tests.fuzz import workers\ndef f():\n  while True: pass\n"
        "for i in range(120): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"workers.HANGS = 0.2\nworkers.watch(open({str(crash)!r}, 'w'))\nworkers.alive()\nf()"
    )
    code = subprocess.run([sys.executable, "-c", code], timeout=60).returncode
    assert code == -signal.SIGALRM
    assert workers.crashed_at(crash).startswith(", in <string>:4 f")
    assert workers.ended(code).startswith("nothing happened") and workers.ended(1) == "the process ended with code 1"
