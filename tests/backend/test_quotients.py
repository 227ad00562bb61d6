"""Quotients by constants have eager's bits; loops that g++ would leave scalar are vectorised; interleaved reads."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fuser import compiler, config, machines, pipeline
from fuser.canonical import canonicalize
from fuser.cpu import toolchain
from fuser.cpu.quotients import factors
from tests import forked
from tests.backend.fused import fuse, no_fallback

CONSTANTS = (3.0, 6.0, -255.0, 0.9, 0.1, 11.313708, 1e-3, 1 / 3, 1.9999999, 8.0)


def text_of(function, *inputs) -> str:
    graph = canonicalize(fx.symbolic_trace(function)).graph
    return pipeline.generate(graph, inputs, compiler.find_backend("cpu")).text


def test_quotients_by_constants_have_eagers_bits():
    patterns = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64, generator=torch.Generator().manual_seed(1))
    x = patterns.to(torch.int32).view(torch.float32)
    x = x[x.isnan() | (x.abs() > 2.0**-90)]  # below, products lose bits of their own
    x = torch.cat((x, torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4028235e38, -3.4028235e38])))
    function = lambda x: tuple(x / c for c in CONSTANTS)  # noqa: E731
    handle, spec = fuse(function)
    for out, want in zip(handle(x), function(x), strict=True):
        same = (out.view(torch.int32) == want.view(torch.int32)) | (out.isnan() & want.isnan())
        assert same.all(), x[~same][:5]
    no_fallback(spec)


@pytest.mark.parametrize("constant", [2.0, -0.25, 0.0, float("inf"), 1e38, 1e-38])
def test_some_constants_stay_divisors(constant):
    assert factors(constant) is None


def test_a_division_by_a_constant_is_two_products_where_machines_fuse_them():
    x = torch.randn(64, 64)
    assert ("/" in text_of(lambda x: x / 6.0, x).split('extern "C"')[1]) is not machines.find(config.isa).fma


SCALAR_ONCE = {
    "log after a clamp": (lambda x: torch.log(x.clamp(min=1e-3)), (64, 4096)),
    "log10 after a clamp": (lambda x: torch.log10(x.clamp(min=1e-3)), (64, 4096)),
    "pow after a clamp": (lambda x: x.clamp(min=1e-3).pow(2.7), (64, 4096)),
    "int8 after a clamp": (lambda x: (x * 3.7).round().clamp(-128, 127).to(torch.int8), (64, 4096)),
    "uint8 after a clamp": (lambda x: (x.clamp(0, 1) * 255).to(torch.uint8), (64, 4096)),
    "int32 after relu": (lambda x: F.relu(x).to(torch.int32), (64, 4096)),
    "int64 after a choice": (lambda x: torch.where(x > 0.5, 3.0, x).to(torch.int64), (64, 4096)),
    "windows with steps": (lambda x: F.max_pool2d(F.relu(x), 3, 2, 1), (2, 8, 112, 112)),
}


# Quotients that vectors without conversions between 64-bit integers and doubles can compute, too.
ON_ALL_VECTORS = {
    "int32 by a constant": (lambda x: x // 7, (64, 4096)),
    "int32 modulo a constant": (lambda x: x % -12, (64, 4096)),
    "int32 by another": (lambda x: torch.fmod(x, x + 3), (64, 4096)),
}


@pytest.mark.parametrize("name", SCALAR_ONCE | ON_ALL_VECTORS)
def test_loops_that_were_scalar_are_vectorised(name, tmp_path: pathlib.Path):
    found = toolchain.find_compiler()
    if found is None or pathlib.Path(found[0]).name.startswith("clang") or config.isa:
        pytest.skip("g++ says which loops it vectorises")
    if not (machines.find("").masks or name in ON_ALL_VECTORS and machines.find("").lanes):
        pytest.skip("the machine does not have the vectors")
    function, size = (SCALAR_ONCE | ON_ALL_VECTORS)[name]
    x = torch.rand(size)
    text = text_of(function, x.int() if name in ON_ALL_VECTORS else x)
    if re.search("fuser_lanes_(load|each)", text.split('extern "C"')[1]):  # explicit vectors: g++ says nothing
        return
    source = tmp_path / "kernel.cpp"
    source.write_text(text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "#pragma omp simd" in row) + 1
    flags, _ = toolchain.flags_for(found)
    command = [*found, *flags, str(source), "-o", str(tmp_path / "kernel.so"), "-fopt-info-vec"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert any(f"kernel.cpp:{n}:" in said for n in range(line - 1, line + 2))


EDGES = (
    0, 1, -1, 2, -2, 7, -7, 12345, -99999, 2**31 - 1, -(2**31), 2**31, 2**53 + 1, 2**63 - 1, -(2**63), -(2**62) - 3,
)  # fmt: skip
DIVISORS = (1, 2, -2, 3, 7, -7, 8, -12, 2**31 - 1, -(2**31), 2**40 + 1, -(2**63))
DIVISIONS = {
    "floor": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("isa", [m.name for m in machines.ROWS if machines.why_not(m) is None])
@pytest.mark.parametrize("dtype", (torch.int16, torch.int32, torch.int64), ids=str)
def test_integers_are_divided_as_in_eager(dtype, isa):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    within, constants = ([n for n in numbers if least <= n <= most] for numbers in (EDGES, DIVISORS))
    x = torch.tensor(within, dtype=dtype).repeat_interleave(len(within))
    y = torch.tensor(within, dtype=dtype).repeat(len(within))
    kept = (y != 0) & ~((y == -1) & (x == least))  # eager refuses one, and may trap at the other
    x, y = x[kept], y[kept]

    def function(x, y):
        by = [divide(x, n) for n in constants for divide in DIVISIONS.values()]
        return [divide(x, y) for divide in DIVISIONS.values()] + by

    with config.override(isa=isa):
        handle, spec = fuse(function)
        for got, want in zip(handle(x, y), function(x, y), strict=True):
            assert torch.equal(got, want)
        no_fallback(spec)


def test_costly_functions_of_triples_run_over_many_of_them_at_once():
    text = text_of(lambda x: torch.cat((x, torch.sin(x), torch.cos(x)), -1), torch.rand(4096, 3))
    assert "for (i64 a0 = v0" in text


# Inputs that end where memory does: a read past them ends the process.
GUARDED = """
import ctypes, itertools, torch, fuser
libc, page = ctypes.CDLL(None), 4096
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def guarded(size):
    pages = -(-size // page) * page
    base = libc.mmap(None, pages + page, 3, 0x22, -1, 0)
    assert libc.mprotect(base + pages, page, 0) == 0
    return (ctypes.c_char * size).from_address(base + pages - size)
function = lambda x: x.permute(0, 3, 1, 2).contiguous() + 1
handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(function)))
for dtype, channels, width in itertools.product((torch.uint8, torch.bfloat16, torch.float32), (2, 3, 17), (19, 150)):
    x = torch.frombuffer(guarded(14 * width * channels * dtype.itemsize), dtype=dtype).view(2, 7, width, channels)
    x.copy_(torch.randint(0, 200, x.shape))
    assert torch.equal(handle(x), function(x))
"""


def test_interleaved_channels_are_read_by_blocks_up_to_their_end():
    done = forked.run(["-c", GUARDED])
    assert done.returncode == 0, done.stderr
