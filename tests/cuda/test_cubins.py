"""Every kernel compiles for Ampere and Hopper, without a GPU, in a bounded number of registers and with no spills."""

from __future__ import annotations

import pathlib
import re
import subprocess
from importlib import util

import pytest
from cuda_cases import CASES, LARGE

from fuser.cuda import fused_kernel
from fuser.cuda.driver import Entry
from fuser.errors import Unsupported

pytestmark = pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)")

MOST_REGISTERS = 128
FILE_REGISTERS = 65536  # of a multiprocessor


def usage(entry: Entry, folder: pathlib.Path) -> dict[str, int]:
    """What the binary takes of the machine: REG, STACK, SHARED and LOCAL, by the disassembler that Triton brings."""
    spec = util.find_spec("triton")
    tool = pathlib.Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(entry.cubin)
    done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout + done.stderr))
    return {name: int(number) for name, number in found.items()}


@pytest.mark.parametrize("capability", (80, 90))
@pytest.mark.parametrize("name", LARGE)
def test_compiles_without_spills(name: str, capability: int, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    try:
        source = case.source(case.fake_args())
    except Unsupported as e:
        pytest.skip(str(e))
    entries = fused_kernel.compile_entries(source, capability)
    assert len(entries) == len(source.program.steps)
    for entry in entries:
        used = usage(entry, tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0, used
        assert used["REG"] <= MOST_REGISTERS and used["REG"] * entry.threads <= FILE_REGISTERS, used


def test_binaries_come_from_disk(fresh_cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["relu_mul_add/2"]
    source = case.source(case.fake_args())
    made = fused_kernel.compile_entries(source, 90)
    monkeypatch.setattr(fused_kernel.toolchain, "compile_now", lambda r: pytest.fail("compiled again"))
    assert fused_kernel.compile_entries(source, 90) == made


def test_sources_do_not_name_sizes() -> None:
    case = CASES["layer_norm/2"]
    text = case.source(case.fake_args()).text
    assert "8192" not in text  # the number of rows is an argument
