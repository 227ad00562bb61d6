"""Ahead-of-time files of programs on a GPU: written here, run by a process without Triton."""

import os
import subprocess
import sys

import pytest
import torch
from torch.export import Dim, export

from fuser import aot
from fuser.errors import AotError
from tests.unit.test_aot import rewrite

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


class Model(torch.nn.Module):
    """A product, a norm, a softmax, a sum down columns, a gather, a buffer that calls count up."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(64, 256), torch.nn.LayerNorm(256)
        self.words = torch.nn.Embedding(100, 64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids):
        self.calls.add_(1)
        h = self.norm(torch.nn.functional.gelu(self.linear(self.words(ids))))
        return {"rows": torch.softmax(h, -1) + h.tanh(), "columns": h.sum(0), "n": ids.shape[0]}


_CLEAN = """
import sys, torch
from fuser import aot
program = aot.load(sys.argv[1])
for ids, rows, columns in torch.load(sys.argv[2]):
    got = program(ids)
    assert torch.allclose(got["rows"], rows, atol=2e-4, rtol=1e-4), (ids.shape, (got["rows"] - rows).abs().max())
    assert torch.allclose(got["columns"], columns, atol=2e-3, rtol=1e-3), ids.shape
    assert got["n"] == ids.shape[0] and got["rows"].is_cuda
print(program, program.kernel_hits, program.kernel_misses)
assert program.kernel_hits and not program.kernel_misses
found = {"triton", "sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)
assert not found, found
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.manual_seed(0)
    model = Model().cuda().eval()
    ids = torch.randint(0, 100, (300,), device="cuda")
    with torch.no_grad():
        exported = export(model, (ids,), dynamic_shapes=({0: Dim("n", min=1, max=100000)},))
    many = torch.randint(0, 100, (5000,), device="cuda")  # sums down columns are split from some thousands of rows on
    return model, aot.compile(exported, tmp_path_factory.mktemp("aot") / "model.fuser", examples=[((many,), {})])


def test_a_process_without_triton_runs_it(written, tmp_path):
    model, path = written
    cases = []
    for n in (300, 1, 17, 5000):
        ids = torch.randint(0, 100, (n,), device="cuda")
        with torch.no_grad():
            want = model(ids)
        cases.append((ids, want["rows"], want["columns"]))
    torch.save(cases, tmp_path / "cases")
    environment = os.environ | {"FUSER_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _CLEAN, str(path), str(tmp_path / "cases")]
    subprocess.run(command, check=True, timeout=300, env=environment)


def test_another_gpu_is_refused(written, tmp_path):
    for capability in (70, 10_0, 999):
        rewrite(written[1], tmp_path / "foreign", lambda program, c=capability: program.update(capability=c))
        if capability != torch.cuda.get_device_capability()[0] * 10:
            with pytest.raises(AotError, match=f"field 'capability': expected {capability}, here "):
                aot.load(tmp_path / "foreign")
