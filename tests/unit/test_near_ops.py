"""Functions on an interval: which rows lie in one, and that the helpers for it give the same bits."""

from __future__ import annotations

import ctypes
import math
import struct
import subprocess

import pytest
import torch

from fuser import config, debug_get_fused_kernel_code, machines
from fuser.cpu import toolchain
from fuser.ops import OPS, prelude_for
from fuser.ops.cells import CPP_TYPEDEFS
from tests.backend.support import fused, graph_of

NEAR = {name: row for name, row in OPS.items() if row.near}
STEP = 61  # of a float's bits
LOOP = """
extern "C" i64 count_NAME(u32 first, u32 last) {
  i64 different = 0;
  for (u32 b = first; b <= last; b += STEP) {
    const float x = FUSER_BITS(float, b), a = WHOLE(x), c = HELPER(x);
    different += (FUSER_BITS(u32, a) != FUSER_BITS(u32, c)) & !((a != a) & (c != c));
  }
  return different;
}
"""


def bits(x: float) -> int:
    return struct.unpack("I", struct.pack("f", x))[0]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    text, words = "", {"FUSER_BITS"}
    for name, row in NEAR.items():
        names = {"NAME": name, "WHOLE": f"fuser_{name}_f32", "HELPER": f"fuser_{row.near.helper}", "STEP": str(STEP)}
        words |= {names["WHOLE"], names["HELPER"]}
        loop = LOOP
        for word, to in names.items():
            loop = loop.replace(word, to)
        text += loop
    folder = tmp_path_factory.mktemp("near")
    machine = machines.find(config.isa)
    (folder / "t.cpp").write_text(CPP_TYPEDEFS + prelude_for(words, machine) + text)
    flags = ["-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-ftree-vectorize"]
    command = [*toolchain.find_compiler(), *machine.flags, *flags, "-w", "-shared", "-fPIC", "-o", str(folder / "t.so")]
    subprocess.run([*command, str(folder / "t.cpp"), "-lm"], check=True)
    return ctypes.CDLL(str(folder / "t.so"))


@pytest.mark.parametrize("name", NEAR)
def test_a_helper_gives_the_same_bits_on_its_interval(library, name):
    near = NEAR[name].near
    count = getattr(library, f"count_{name}")
    count.restype = ctypes.c_int64
    ranges = [(bits(0.0), bits(near.high))] if near.high > 0 else []
    ranges += [(bits(-0.0), bits(near.low))] if near.low < 0 else []
    for first, last in [*ranges, (0x7FC00000, 0x7FC00000)]:
        assert count(ctypes.c_uint32(first), ctypes.c_uint32(last)) == 0


def source(f, *inputs):
    return debug_get_fused_kernel_code(graph_of([f], len(inputs)), list(inputs))


def test_arguments_that_lie_in_an_interval():
    x = torch.randn(300)
    text = source(torch.nn.functional.logsigmoid, x)
    assert "= fuser_exp_below_f32(" in text and "= fuser_log1p_unit_f32(" in text
    assert "= fuser_log1p_unit_f32(" in source(lambda x: torch.log1p(torch.sigmoid(x)), x)
    assert "= fuser_exp_below_f32(" in source(lambda x: torch.exp(-(x * x)), x)


def test_arguments_that_may_lie_elsewhere():
    x, y = torch.randn(300), torch.randn(300)
    for f in (
        lambda x, y: torch.exp(-x) + torch.log1p(y),
        lambda x, y: torch.exp(-(x * y)) + torch.log1p(x.exp()),
        lambda x, y: torch.exp(x.abs()) + torch.log1p(torch.relu(y)),
    ):
        text = source(f, x, y)
        assert "_below_f32(t" not in text and "_unit_f32(t" not in text


def test_softplus_and_mish_at_the_edges():
    numbers = (1e-30, 0.0, 1e-8, 1.0, 19.9, 20.1, 89.0, 200.0, 3e38, math.inf, math.nan)
    x = torch.tensor([*numbers, *(-n for n in numbers)])
    for f in (torch.nn.functional.softplus, torch.nn.functional.mish):
        (got,) = fused(graph_of([f], 1), [x])
        torch.testing.assert_close(got, f(x.double()).float(), equal_nan=True, rtol=3e-7, atol=1e-43)


def test_vectors_of_elementary_functions():
    """Loops that functions decide are in explicit vectors, where the machine has them; their tails are masked."""
    f = lambda x, y: torch.nn.functional.gelu(x, approximate="tanh") * y + torch.exp(-y.abs())  # noqa: E731
    graph = graph_of([f], 2)
    for n in (1, 15, 64, 77, 1031):
        x, y = torch.randn(n) * 4, torch.randn(n)
        torch.testing.assert_close(fused(graph, [x, y])[0], f(x.double(), y.double()).float(), rtol=2e-6, atol=2e-7)
    has_vectors = bool(machines.find(config.isa).lanes)
    assert has_vectors == ("fuser_lanes_exp_below_f32(t" in debug_get_fused_kernel_code(graph, [x, y]))
    plain = source(lambda x, y: torch.tan(x) + torch.sin(y), x, y)
    assert "fuser_lanes_sin_f32(t" not in plain


def test_vectors_of_sines_share_the_rest_of_their_argument():
    """Vectors of sine and cosine of one number; numbers from 2^50 on are computed apart, with the same bits."""
    f = lambda x, y: (torch.sin(x * y), torch.cos(x * y))  # noqa: E731
    graph = graph_of([f], 2)
    for n in (1, 33, 1031):
        x, y = torch.randn(n) * 100, torch.ones(n)
        x[n // 2], x[n // 3] = 3e20, -1e36
        for got, want in zip(fused(graph, [x, y]), f(x.double(), y.double())):
            torch.testing.assert_close(got, want.float(), rtol=2e-7, atol=1e-7)
        for function, got in zip((torch.sin, torch.cos), fused(graph, [x, y])):
            by_rows = fused(graph_of([lambda x, y: function(x * y).amax(0)], 2), [x.repeat(2, 1), y.repeat(2, 1)])  # noqa: B023
            assert torch.equal(got, by_rows[0])
    text = debug_get_fused_kernel_code(graph, [x, y])
    assert bool(machines.find(config.isa).lanes) == ("fuser_lanes_sin_f32(t" in text)
    for name in ("sin", "cos") if machines.find(config.isa).lanes else ():
        body = text.partition(f"lanes_f fuser_lanes_{name}_f32(lanes_f x) {{")[2].partition("\n}\n")[0]
        assert body.index("fuser_lanes_turned_f32") < body.index(f"fuser_lanes_{name}_far")  # no branch before


def test_powers_of_two_in_vectors():
    """Products with 2^n round once, to denormals and to infinity too: vectors have the bits of the scalar function."""
    x = torch.linspace(-106, 92, 40001)
    in_vectors = fused(graph_of([torch.exp], 1), [x])[0]
    assert torch.equal(in_vectors, fused(graph_of([lambda x: x.exp().amax(0)], 1), [x.repeat(2, 1)])[0])
