"""Modes of torch: what the launcher learns under those of Dynamo, and the one around the first call of a graph."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._functorch.config as functorch_config
from torch.testing._internal.subclasses import WrapperSubclass

import fuser
from fuser.frontends import dynamo
from tests import forked

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
    done = forked.run(["-c", FACTS % context])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected() -> str:
    return facts("none")


@pytest.mark.parametrize("context", ["fake", "inference"])
def test_first_asked_under_a_mode(expected, context):
    assert expected.startswith("True False ")
    assert facts(context) == expected


LIBRARY = torch.library.Library("fuser_test_modes", "DEF")
for name, implementation in (("twice", lambda x: x * 2), ("itself", lambda x: x)):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, implementation, "CPU")
    LIBRARY.impl(name, torch.empty_like, "Meta")


@pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
@pytest.mark.parametrize("operator", ["twice", "itself"])
def test_the_first_call_of_a_graph_with_custom_operators(operator, monkeypatch, registry):
    """Kernels run, though torch's mode looks for a custom operator that returns its input, and warns of one."""
    monkeypatch.setattr(functorch_config, "error_on_custom_op_aliasing", False, raising=False)  # as it is outside of CI
    call = getattr(torch.ops.fuser_test_modes, operator)

    def fn(x):
        y = call(torch.sin(x) * 3 + 0.5)
        return torch.cos(y) - y * 0.25, x.t()  # a view of an input: AOTAutograd's wrapper stays

    torch._dynamo.reset()
    before, x = fuser.stats(), torch.randn(6, 7)
    told = pytest.warns(UserWarning, match="fuser_test_modes") if operator == "itself" else contextlib.nullcontext()
    with told:
        found = torch.compile(fn, backend="fuser")(x)
    torch.testing.assert_close(found, fn(x))
    after = fuser.stats()
    assert after["hits"] - before["hits"] == 2
    assert after["fallbacks"] == before["fallbacks"]


def test_a_tensor_subclass_is_unwrapped_whatever_the_metadata_say(monkeypatch):
    """Groups are called with what a DTensor holds: torch 2.11 tells nothing of it for inference."""
    monkeypatch.setattr(dynamo, "_metadata_reason", lambda *args, **named: None)
    torch._dynamo.reset()
    x = WrapperSubclass(torch.randn(3, 4))
    found = torch.compile(lambda x: torch.sin(x) * 2.25 + 1, backend="fuser")(x)
    assert type(found) is WrapperSubclass
    torch.testing.assert_close(found.a, torch.sin(x.a) * 2.25 + 1)
    assert dynamo.last_compilation().route == "wrapped"
