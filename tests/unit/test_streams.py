"""Results written past the cache: every byte, at any address and length, on each of this machine's rows."""

from __future__ import annotations

import ctypes
import random

import pytest

from fuser import can_fuse_on_cpu, machines
from fuser.cpu import toolchain
from fuser.cpu.streams import stream_helper

ROWS = [row for row in machines.ROWS if row.past_cache and machines.why_not(row) is None]
pytestmark = pytest.mark.skipif(not can_fuse_on_cpu() or not ROWS, reason="needs a C++ compiler, and such stores")
_GO = 'extern "C" void go(void* to, const void* from, i64 n) { fuser_stream(to, from, n); fuser_stream_end(); }\n'


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_exactly_the_bytes_of_a_result_are_written(row):
    helper = stream_helper({"fuser_stream"}, row)
    source = f"typedef long long i64;\n{helper}{_GO}"
    library = ctypes.CDLL(toolchain.compile_library((source,), row, ["go"]))
    library.go.argtypes, library.go.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong), None
    draw, room = random.Random(0), 6000
    data = (ctypes.c_char * room).from_buffer_copy(draw.randbytes(room))
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 4096]
    for _ in range(2000):
        memory = (ctypes.c_char * room).from_buffer_copy(b"\xee" * room)
        to, of, n = draw.randrange(200), draw.randrange(200), draw.choice([*lengths, draw.randrange(5000)])
        library.go(ctypes.addressof(memory) + to, ctypes.addressof(data) + of, n)
        assert memory.raw == b"\xee" * to + data.raw[of : of + n] + b"\xee" * (room - to - n), (to, of, n)
