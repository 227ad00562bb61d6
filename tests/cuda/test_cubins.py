"""Every kernel compiles for Ampere and Hopper, without a GPU, in as many registers as are recorded, without spills.

Here a part of them; with FUSER_TEST_ALL=1 (`make cubins`) all. `python tests/cuda/test_cubins.py` records.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import subprocess
from importlib import util

import pytest
from cuda_cases import CASES
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser.cuda import binary, fused_kernel
from fuser.cuda.driver import Entry
from fuser.errors import Unsupported

pytestmark = pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)")

MOST_REGISTERS = 128
SCAN_REGISTERS = 208  # of scans along columns, of whose programs few run at a time
MORE = 16  # registers that another version of Triton may take beyond those that are recorded
FILE_REGISTERS = 65536  # of a multiprocessor
RECORD = pathlib.Path(__file__).with_name("registers.json")
ALL = tuple(name for name in CASES if not name.endswith("/0"))
# Each kind of kernel once.
PART = (
    "bias_gelu_mul/2", "softmax/2", "softmax_middle/2", "layer_norm/2", "group_norm/2", "cross_entropy/2", "rope/2",
    "adam/2", "transposed_add/2", "column_sum/2", "argmax/split", "mean_var/long", "mixed_dtypes/2", "index_add/bf16",
    "scatter_amin/new", "float8/e5m2/to", "cumsum/columns/long", "cumsum/chunks/long", "dropout/wide", "dropout/odd",
    "dropout/columns", "normal/wide", "norm_gradients/summed/2048", "norm_gradients/layer/f32", "cumsum/inner",
    "cummax/int64/long", "cummax/rows/long", "full_sum/2", "padded_search",
)  # fmt: skip
# Of that part, for the two machines in turns.
BINARIES = [*zip(PART, itertools.cycle((90, 80)))]
if os.environ.get("FUSER_TEST_ALL"):
    BINARIES = [*itertools.product(ALL, (80, 90))]


def usage(entry: Entry, folder: pathlib.Path) -> dict[str, int]:
    """What the binary takes of the machine: REG, STACK, SHARED and LOCAL, by the disassembler that Triton brings."""
    spec = util.find_spec("triton")
    assert spec is not None and spec.origin is not None
    tool = pathlib.Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(entry.cubin)
    done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout + done.stderr))
    return {name: int(number) for name, number in found.items()}


def used(name: str, capability: int) -> list[dict[str, int]]:
    """What each kernel of a case takes."""
    case = CASES[name]
    entries = fused_kernel.compile_entries(case.source(case.fake_args()), capability)
    found = [(e, binary.usage(e.cubin)) for e in entries]
    return [{"registers": u.registers, "stack": u.stack, "threads": e.threads} for e, u in found]


def bound(name: str) -> int:
    """How many registers a thread of a case's kernels may take."""
    return SCAN_REGISTERS if name.startswith("cum") else MOST_REGISTERS


@pytest.mark.parametrize("name, capability", BINARIES)
def test_compiles_in_as_many_registers_as_are_recorded(name: str, capability: int) -> None:
    recorded = json.loads(RECORD.read_text())[str(capability)]
    found = used(name, capability)
    assert len(found) == len(recorded[name]), "another number of kernels than is recorded"
    for u, most in zip(found, recorded[name]):
        assert u["stack"] == 0, u
        assert 0 < u["registers"] <= min(most + MORE, bound(name)), (u, most)
        assert u["registers"] * u["threads"] <= FILE_REGISTERS, u


def test_every_case_is_recorded() -> None:
    recorded = json.loads(RECORD.read_text())
    for capability in ("80", "90"):
        assert set(recorded[capability]) == set(ALL), "run python tests/cuda/test_cubins.py"
        assert all(max(r) <= bound(name) for name, r in recorded[capability].items())


@pytest.mark.parametrize("name", ("index_add", "cumsum", "column_sum/odd", "softmax/odd"))
def test_addresses_of_64_bits_compile(name: str) -> None:
    import torch

    with FakeTensorMode():
        long = torch.empty(1 << 20, 1 << 12, device="cuda")
        index = torch.empty(1 << 20, dtype=torch.int64, device="cuda")
    args = (long, index, long) if name == "index_add" else (long,)
    source = CASES[name].source(args)
    assert "tl.program_id(0).to(tl.int64)" in source.text
    for entry in fused_kernel.compile_entries(source, 90):
        assert binary.usage(entry.cubin).stack == 0


def test_the_disassembler_says_the_same(tmp_path: pathlib.Path) -> None:
    case = CASES["softmax/2"]
    for entry in fused_kernel.compile_entries(case.source(case.fake_args()), 90):
        said, own = usage(entry, tmp_path), binary.usage(entry.cubin)
        assert (said["REG"], said["STACK"] + said["LOCAL"]) == (own.registers, own.stack)


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


def record() -> None:
    """Write down what every case takes."""
    found: dict[str, dict[str, list[int]]] = {}
    for capability in (80, 90):
        mine = found[str(capability)] = {}
        for name in ALL:
            try:
                mine[name] = [u["registers"] for u in used(name, capability)]
            except Unsupported as e:
                print(name, e)
    lines = [
        f' "{capability}": {{\n' + ",\n".join(f'  "{n}": {r}' for n, r in sorted(mine.items())) + "\n }"
        for capability, mine in found.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
