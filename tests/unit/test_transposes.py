"""Blocks transposed in registers, with the edges for registers of either width."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
import torch.fx

from fuser import config, fusion_handle, machines, register_fusion
from fuser.cpu import toolchain, transposes
from fuser.cpu.transposes import TILE_STRIDE
from fuser.cpu.vir.calls import WORDS

DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TYPES = "typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32; typedef unsigned long long u64;"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A function `t<bytes>_<edge>` for each edge that a machine may use."""
    text = [TYPES, "typedef long long i64;", transposes._SHUFFLE]
    for size, word in WORDS.items():
        for edge, row in {transposes.edge_of(size, row): row for row in machines.ROWS}.items():
            made = transposes._function(size, row).replace(f"lines_{word}", f"lines_{size}_{edge}")
            text.append(made.replace(f"static void transpose_{word}", f'extern "C" void t{size}_{edge}'))
        text.append(transposes._apart(size).replace(f"static void apart_{word}", f'extern "C" void a{size}'))
    folder = tmp_path_factory.mktemp("transposes")
    (folder / "t.cpp").write_text("\n".join(text))
    compiler = toolchain.find_compiler()
    command = [*compiler, "-O1", *machines.find(config.isa).flags, "-w", "-shared", "-fPIC", "-o", str(folder / "t.so")]
    subprocess.run([*command, str(folder / "t.cpp")], check=True)
    return ctypes.CDLL(str(folder / "t.so"))


@pytest.mark.parametrize("machine", machines.ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("size", DTYPES)
def test_blocks_are_transposed(library, size, machine):
    step, rows, columns = 70, 48, 32  # of the tile; the operand that is read is transposed
    x = torch.arange(columns * step).to(DTYPES[size]).reshape(columns, step)
    room = torch.zeros(80, step, dtype=x.dtype)  # what is asked for ahead lies past the end
    room[:columns] = x
    tile = torch.zeros(rows, TILE_STRIDE, dtype=x.dtype)
    of, to = ctypes.c_void_p(room.data_ptr()), ctypes.c_void_p(tile.data_ptr())
    numbers = [ctypes.c_int64(n) for n in (step, rows, columns)]
    getattr(library, f"t{size}_{transposes.edge_of(size, machine)}")(of, numbers[0], to, *numbers[1:])
    assert torch.equal(tile[:, :columns], x[:, :rows].t())


@pytest.mark.parametrize("count", range(2, transposes.MOST_APART + 1))
@pytest.mark.parametrize("size", DTYPES)
def test_narrow_rows_are_taken_apart(library, size, count):
    for columns in (0, 1, 15, 128):
        x = torch.arange(columns * count).to(DTYPES[size]).reshape(columns, count)
        tile = torch.zeros(count, TILE_STRIDE, dtype=x.dtype)
        of, to = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(tile.data_ptr())
        getattr(library, f"a{size}")(of, ctypes.c_int64(count), to, ctypes.c_int64(columns))
        assert torch.equal(tile[:, :columns], x.t())
        assert not tile[:, columns:].any()


@pytest.mark.parametrize("size", DTYPES)
def test_blocks_fit_the_registers(size):
    """A block that does not fit takes ten times as long. Tiles hold whole blocks."""
    for machine in machines.ROWS:
        edge = transposes.edge_of(size, machine)
        assert edge * size <= machine.vector_bytes and edge <= machine.registers
        assert transposes.EDGES[size] % edge == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("channels", range(2, transposes.MOST_APART + 1))
def test_kernels_see_what_was_taken_apart(channels, dtype):
    """The tile has another type than its stores: constant sizes, and few columns, put both into one function."""

    def program(mask, x):
        return torch.where(mask, x, mask) * 2, mask.contiguous()

    mask = (torch.arange(16 * channels * 60).reshape(4, 2 * channels, 6, 20) % 3 > 0)[::2, ::2, ::2, ::2]
    x = torch.randn(mask.shape).to(dtype).contiguous(memory_format=torch.channels_last)
    handle = fusion_handle(register_fusion(torch.fx.symbolic_trace(program)))
    assert all(map(torch.equal, handle(mask, x), program(mask, x)))
