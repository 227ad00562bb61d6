"""Compiling: kernels that do not fit get smaller tiles; compilers that hang or crash are stopped, and none stays."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from importlib import util

import pytest
import torch
from cuda_cases import CASES, Case

from fuser import config
from fuser.cuda import binary, compile_worker, driver, fused_kernel, pool, tiles, toolchain
from fuser.errors import CompileError

needs_triton = pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed")
REQUEST = toolchain.Request("import time\ntime.sleep(100)\n", "hangs", (), (), 4, 90, True, False)


@needs_triton
def test_a_kernel_that_spills_gets_smaller_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES["relu_mul_add/2"]
    source = case.source(case.fake_args())
    (entry,) = fused_kernel.compile_entries(source, 90)
    most = binary.usage(entry.cubin).registers - 1
    assert most > 8
    # As if a thread had fewer registers than this kernel takes, and spilled all of them.
    monkeypatch.setattr(fused_kernel, "usage", lambda c: binary.Usage(0, 1000 * (binary.usage(c).registers > most)))
    with caplog.at_level("INFO", "fuser.cuda"):
        smaller, (entry,) = fused_kernel.fitting(source, 90)
        fused_kernel.fitting(source, 90)
    assert binary.usage(entry.cubin).registers <= most
    assert smaller.text != source.text and smaller.name != source.name
    said = [r.getMessage() for r in caplog.records]
    assert (
        said and len(said) == len(set(said)) and "spills registers to 1000 bytes" in said[0] and entry.name in said[0]
    )


def test_smaller_tiles() -> None:
    assert tiles.fewer(tiles.Tile(4, 256, 4), 2) == tiles.Tile(1, 256, 4)
    assert tiles.fewer(tiles.Tile(4, 256, 4), 3) is None
    assert tiles.shrunk(tiles.Tile(64, 64, 8), 1) == tiles.Tile(32, 64, 8)
    assert tiles.shrunk(tiles.Tile(1, 4096, 8), 20) == tiles.Tile(1, 128, 8)


@pytest.mark.parametrize(
    "name", ("softmax/2", "softmax/odd", "column_sum/odd", "cumsum", "cumsum/columns/long", "full_sum/2")
)
def test_every_kind_of_kernel_has_smaller_tiles(name: str) -> None:
    case = CASES[name]
    source = case.source(case.fake_args())
    assert source.again is not None
    texts = {source.again(dict.fromkeys(source.owners, level)).text for level in range(4)}
    assert len(texts) > 1


@needs_triton
def test_a_kernel_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernel, "SHARED", {90: 0})
    case = CASES["transposed_add/2"]
    with pytest.raises(CompileError, match="takes .* bytes of shared memory, where a block has 0, with the smallest"):
        fused_kernel.fitting(case.source(case.fake_args()), 90)


def test_what_is_no_binary_takes_nothing() -> None:
    for cubin in (b"", b"\x7fELF\x02", b"\x7fELF\x02" + b"\xff" * 100):
        assert binary.usage(cubin) == binary.Usage(0, 0)
    assert fused_kernel.why_unfit(driver.Entry("k", b"", 200_000, 128, 0), 89) is not None
    assert fused_kernel.why_unfit(driver.Entry("k", b"", 200_000, 128, 0), 90) is None


@needs_triton
def test_a_compiler_that_hangs_is_stopped() -> None:
    own = pool.Pool(1)
    asked = {**REQUEST.__dict__, "path": "/there/hangs.py"}
    with pytest.raises(CompileError, match="longer than 0.5 s on kernel hangs .*hangs.py.* and was stopped"):
        own.compile(asked, 0.5)
    assert not own._all and not own._idle
    answer = own.compile({**asked, "text": "broken ="}, 60)  # a new process goes on
    assert "SyntaxError" in answer["error"]
    (worker,) = own._idle
    own.stop()
    assert worker.process.poll() is not None


class Ending(pool.Pool):
    """Its processes end with a code, after so many answers."""

    code, answers = 3, 0

    @property
    def command(self) -> list[str]:
        loop = f"[print('{{}}', flush=True) for _ in range({self.answers}) if sys.stdin.readline()]"
        return [sys.executable, "-c", f"import sys; {loop}; sys.exit({self.code})"]


def test_a_compiler_that_crashes_is_an_error_and_one_that_was_idle_is_replaced() -> None:
    own, asked = Ending(1), {"name": "k", "path": "p"}
    with pytest.raises(CompileError, match="ended with exit code 3 on kernel k"):
        own.compile(asked, 60)
    own.code, own.answers = 0, 1
    for _ in range(3):
        assert own.compile(asked, 60) == {}
        time.sleep(0.01)
    own.stop()


def test_kernels_compile_here_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.Pool, "command", property(lambda self: ["/no/such/python"]))
    monkeypatch.setattr(pool, "_pool", None)
    monkeypatch.setattr(toolchain, "why_not", lambda: None)
    monkeypatch.setattr(toolchain.compile_worker, "compile_one", lambda r: {"error": f"of {r['name']}", "log": ""})
    with pytest.raises(CompileError, match="cannot compile kernel hangs .*: of hangs"):
        toolchain.compile_now(REQUEST)


CHILD = """
import threading, sys
from fuser.cuda import pool
own = pool.Pool(1)
asked = {"name": "hangs", "path": "p", "text": "import time; time.sleep(100)", "stages": 0, "divisors": ()}
threading.Thread(target=own.compile, args=(asked, 100), daemon=True).start()
while not own._all:
    pass
print(next(iter(own._all)).process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", (signal.SIGKILL, None))
def test_no_compiler_outlives_its_user(how: signal.Signals | None) -> None:
    root = str(pathlib.Path(__file__).parent.parent.parent)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    pid = int(child.stdout.readline())
    assert _is_running(pid)
    if how is None:
        child.stdin.close()  # it ends by itself
    else:
        child.send_signal(how)
    child.wait(60)
    deadline = time.monotonic() + 60
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_as_many_at_a_time_as_are_asked_for() -> None:
    with config.override(compile_workers=3):
        assert pool.workers() == 3


PAIRS = """
    mov.b32 %r28, {%rs3, %rs2};
    mov.b32 %r29, 65537;
    add.s16x2 	%r30, %r28, %r29;
    min.s16x2 	%r31, %r28, %r29;
"""


def test_pairs_of_short_integers_are_added_apart():
    """ptxas loses the constant of `add.s16x2` where the upper half of the sum is not read."""
    ptx = compile_worker.add_pairs_apart(PAIRS)
    assert "add.s16x2" not in ptx and ptx.count("add.s16 ") == 2
    assert ptx.splitlines()[:3] + ptx.splitlines()[-1:] == PAIRS.splitlines()[:3] + PAIRS.splitlines()[-1:]
    assert "{%fuser0, %fuser1}, %r28" in ptx and "{%fuser2, %fuser3}, %r29" in ptx and "%r30, {%fuser0" in ptx


@needs_triton
def test_triton_compiles_what_is_rewritten(monkeypatch):
    """A kernel's PTX passes through the rewriting, and ptxas takes what it writes."""
    import triton

    seen = []

    def pretend(ptx):
        seen.append(ptx)
        pair = ".reg .b32 %p<3>; mov.b32 %p0, 65537; mov.b32 %p1, 65537; add.s16x2 %p2, %p0, %p1;"
        at = ptx.index("{", ptx.index(".entry")) + 1
        return rewritten(ptx[:at] + "{ " + pair + " }" + ptx[at:])

    rewritten = compile_worker.add_pairs_apart
    monkeypatch.setattr(compile_worker, "add_pairs_apart", pretend)
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k(a):\n    tl.store(a, tl.load(a) + 1)\n"
    request = {
        "text": text, "path": "<pairs>", "capability": 90, "name": "k", "types": {"a": "*fp32"}, "divisors": [(0, 16)],
        "warps": 1, "fused_multiply_add": False, "checked": False, "stages": 0, "registers": 0,
    }  # fmt: skip
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    made = compile_worker._triton_compile(request)
    assert seen and "add.s16x2" not in made.asm["ptx"] and "%fuser0" in made.asm["ptx"] and made.asm["cubin"]
    assert triton.knobs.runtime.add_stages_inspection_hook is None


@needs_triton
@pytest.mark.parametrize(
    "length, dtype, width",
    [(96, torch.float32, "v4.b32"), (100, torch.float32, "v4.b32"), (101, torch.float32, "b32"),
     (96, torch.bfloat16, "v4.b32"), (100, torch.bfloat16, "v2.b32"), (101, torch.bfloat16, "b16")],
)  # fmt: skip
def test_rows_are_loaded_in_vectors_as_wide_as_their_length_allows(length, dtype, width):
    case = Case("", lambda x: torch.softmax(x, -1), lambda i: (i.normal(4096, length, dtype=dtype),))
    source = case.source(case.fake_args())
    request = toolchain.request(source.text, source.functions[0], 90, source.numerics)
    made = compile_worker._triton_compile({**dataclasses.asdict(request), "path": "<rows>"})
    assert set(re.findall(r"ld\.global\.([\w.]+)", made.asm["ptx"])) == {width}
