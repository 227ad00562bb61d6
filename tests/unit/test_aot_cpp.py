"""The C++ example that loads an ahead-of-time file with libtorch alone. Compiling it takes a minute."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from torch.export import Dim, export

from fuser import aot

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "aot_cpp"
pytestmark = pytest.mark.skipif(
    not os.environ.get("FUSER_TEST_ALL") or shutil.which("make") is None,
    reason="a minute of C++ against torch's headers: FUSER_TEST_ALL=1",
)


class Model(torch.nn.Module):
    """Groups, products, joins, sizes in arithmetic, an input that is written, a buffer that calls count up."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, index):
        self.calls.add_(1)
        index.add_(1)
        h = self.norm(torch.nn.functional.gelu(self.linear(x)))
        joined = torch.cat([h, h[index % x.shape[0]]], 0)
        return {"rows": joined.softmax(-1), "mean": h.sum() / x.shape[0], "n": x.shape[0] * 2, "calls": self.calls + 0}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    out = tmp_path_factory.mktemp("cpp") / "run"
    subprocess.run(
        ["make", "-s", f"PYTHON={sys.executable}", f"OUT={out}"], cwd=SOURCES, check=True, timeout=900
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    model = Model().eval()
    x, index = torch.randn(6, 8), torch.tensor([0, 3])
    with torch.no_grad():
        exported = export(model, (x, index.clone()), dynamic_shapes=({0: Dim("rows", min=1, max=99)}, None))
    return model, aot.compile(exported, tmp_path_factory.mktemp("file") / "model.fuser")


def run(program, file, leaves, folder):
    torch.save(list(leaves), folder / "in")
    command = [str(program), str(file), str(folder / "in"), str(folder / "out")]
    return subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, timeout=60)


def test_cpp_gives_pythons_results(program, written, tmp_path):
    model, file = written
    for rows in (6, 1, 40):
        x, index = torch.randn(rows, 8), torch.tensor([0, 3])
        done = run(program, file, (x, index), tmp_path)
        assert done.returncode == 0, done.stderr
        assert " by kernels, 0 by ATen" in done.stdout
        got, want = torch.load(tmp_path / "out"), model(x, index)
        torch.testing.assert_close(got[0], want["rows"])
        torch.testing.assert_close(got[1], want["mean"])
        assert got[2] == 2 * rows


def test_cpp_refuses_what_is_damaged_or_not_allowed(program, written, tmp_path):
    _, file = written
    leaves = torch.randn(100, 8), torch.tensor([0, 3])
    done = run(program, file, leaves, tmp_path)
    assert done.returncode == 1 and "a size of 100, which the export does not allow" in done.stderr
    whole, bad = pathlib.Path(file).read_bytes(), tmp_path / "bad"
    for place in (5, 200, len(whole) // 4, len(whole) // 2, 3 * len(whole) // 4):
        bad.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        done = run(program, bad, leaves, tmp_path)
        assert done.returncode == 1 and "is not used: " in done.stderr, place
    bad.write_bytes(whole[: len(whole) // 2])
    assert "it is cut" in run(program, bad, leaves, tmp_path).stderr
