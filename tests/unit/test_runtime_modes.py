"""What the launcher learns about torch is the same under the modes that are on while dynamo compiles."""

from __future__ import annotations

import subprocess
import sys

import pytest

FACTS = """
import contextlib, torch
from torch._subclasses import FakeTensorMode
from fuser.runtime import torch_abi

contexts = {"none": contextlib.nullcontext, "fake": FakeTensorMode, "inference": torch.inference_mode}
with contexts[%r]():
    table = torch_abi.describe()
print(torch_abi.plain_tensor(torch.empty(2)), torch_abi.plain_tensor(torch.ones(2, device="meta")), end=" ")
print(*(table[k] for k in ("plain_keys", "impl_offset", "keys_offset")), end=" ")
print(table["harmless_included"], table["harmful_excluded"], end=" ")
print(*(table[k] is None for k in ("impl_requires_grad", "c10_library", "empty_strided")))
"""


def facts(context: str) -> str:
    done = subprocess.run([sys.executable, "-c", FACTS % context], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected() -> str:
    return facts("none")


@pytest.mark.parametrize("context", ["fake", "inference"])
def test_first_asked_under_a_mode(expected, context):
    assert expected.startswith("True False ")
    assert facts(context) == expected
