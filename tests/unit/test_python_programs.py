"""Launch programs as Python functions compute what the interpreter of stack programs does, and leave nothing to it."""

from __future__ import annotations

import random

import pytest
import torch

import fuser
from fuser.ir import sizes
from fuser.ir.sizes import ADD, LE, MUL, PUSH, SLOT
from fuser.kernel_spec import BufferPattern, LaunchProgram, Step
from fuser.runtime import python_launcher, python_programs
from fuser.runtime.python_programs import counter

SLOTS = (0, 1, 5, 7, 1 << 40, 3)


def random_program(rng: random.Random, depth: int) -> tuple[int, ...]:
    if depth == 0 or rng.random() < 0.2:
        return (SLOT, rng.randrange(len(SLOTS))) if rng.random() < 0.6 else (PUSH, rng.randint(-4, 9))
    left, right = random_program(rng, depth - 1), random_program(rng, depth - 1)
    return (*left, *right, rng.randint(ADD, LE))


def program_of(codes) -> LaunchProgram:
    buffer = BufferPattern(torch.float32, tuple(codes), tuple(codes), True)
    return LaunchProgram((), len(SLOTS), 0, (), (buffer,), (Step("e", codes[0], codes[-1], (PUSH, 0)),), (), False)


def check(codes) -> None:
    expected = tuple(sizes.run_program(code, list(SLOTS)) for code in codes)
    outputs, temporaries, steps = counter(program_of(codes))(SLOTS)
    assert outputs == ((expected, expected),) and temporaries == ()
    assert steps == ((expected[0], expected[-1], 0),)


def test_random_programs():
    rng = random.Random(0)
    codes = [random_program(rng, rng.randint(0, 8)) for _ in range(300)]
    assert any(len(code) > python_programs._MOST_WORDS for code in codes)
    for first in range(0, len(codes), 30):
        check(codes[first : first + 30])


@pytest.mark.parametrize("op", [ADD, MUL])
def test_long_and_deep_programs(op):
    chain = (SLOT, 1) + (SLOT, 1, op) * 5000
    deep = (SLOT, 1) * 66 + (op, sizes.MIN) * 32 + (op,)
    check([chain, deep])


def test_a_steady_call_interprets_no_program(monkeypatch):
    made = []

    def handle_like(slow):
        made.append(python_launcher.Handle(slow))
        return made[-1]

    monkeypatch.setattr(fuser.executor.launcher, "make_handle", handle_like)
    if not fuser.can_fuse_on_cpu():
        pytest.skip("needs a C++ compiler")

    def fn(x):
        return torch.softmax(x * 1.375, 0).sum(1)

    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(fn)))
    x = torch.randn(5, 7)
    expected = fn(x)
    torch.testing.assert_close(handle(x), expected)
    monkeypatch.setattr(python_launcher, "run_program", None)
    monkeypatch.setattr(python_programs, "run_program", None)
    torch.testing.assert_close(handle(x), expected)
    assert made and made[0].hits >= 1
