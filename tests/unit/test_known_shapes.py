"""The package's own rules for the sizes of results are torch's, and asking torch for others does not import Dynamo."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from fuser.frontends.dynamo import fuser_backend
from fuser.lowering.corrections import corrected
from fuser.lowering.graph import run_meta
from fuser.lowering.known_shapes import known_meta
from tests import forked

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool)


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def layouts(dtype: torch.dtype) -> list[torch.Tensor]:
    x = meta(2, 3, 4, dtype=dtype)
    return [x, x.permute(2, 0, 1), x[:, 1:], x.expand(5, 2, 3, 4), meta(dtype=dtype), meta(2, 0, dtype=dtype), x[:1]]


def call(op: str, args: tuple, kwargs: dict) -> torch.Tensor | None:
    try:
        return getattr(torch.ops.aten, op)(*args, **kwargs)
    except Exception:
        return None


def same(op: str, *args: object, **kwargs: object) -> bool:
    """Whether the rule, where it answers, says what torch says; returns whether it answered."""
    mine = known_meta(f"aten.{op}", args, kwargs)
    if mine is None:
        return False
    theirs = call(op, args, kwargs)
    assert theirs is not None, f"{op}{args} is an error"
    assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), (op, args, kwargs)
    return True


@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin", "any", "all"])
def test_reductions(op: str) -> None:
    answered = 0
    for dtype in DTYPES:
        for x in layouts(dtype):
            for dim in ((), (0,), (-1,), (0, 1), (1, -2), (0, 0), (7,), 1):
                if isinstance(dim, int) and op in ("amax", "amin", "sum", "mean"):
                    continue
                answered += same(op, x, dim) + same(op, x, dim, True)
    assert answered > 50


@pytest.mark.parametrize("op", ["std", "var"])
def test_spread(op: str) -> None:
    answered = 0
    for dtype in DTYPES:
        for x in layouts(dtype):
            for dim in (None, (), (0,), (-1,), (0, 1), (7,)):
                answered += same(op, x, dim) + same(op, x, dim, correction=0, keepdim=True)
            same(op, x, True), same(op, x, (0,), False, True)
    assert answered > 50


def test_where() -> None:
    answered = 0
    for dtype in DTYPES:
        for x in layouts(dtype):
            condition = torch.empty_like(x, dtype=torch.bool)
            others = [x, x.double(), meta(dtype=torch.float64), 1, 2.5, True]
            answered += sum(same("where", condition, x, o) + same("where", condition, o, x) for o in others)
            answered += same("where", meta(4, dtype=torch.bool), x, x) if x.shape[-1:] == (4,) else 0
    assert answered > 200


def test_joins_norms_and_rows() -> None:
    for dtype in DTYPES:
        for x in layouts(dtype):
            for dim in (0, 1, -1, 5):
                same("cat", [x, x], dim)
                same("softmax", x, dim)
                same("log_softmax", x, dim)
            same("layer_norm", x, tuple(x.shape[-1:]))
            same("layer_norm", x, (4,), meta(4), meta(4, dtype=dtype))
            same("layer_norm", x, (3, 4), meta(3, 4, dtype=dtype), None, 1e-6)
            same("embedding", x, meta(5, 2, dtype=torch.int64))
    assert same("cat", [meta(2, 3), meta(4, 3)]) and same("cat", [meta(2, 3), meta(2, 1)], -1)
    assert not same("cat", [meta(2, 3), meta(2, 1)]) and not same("cat", [meta(2, 3), meta(0)])
    assert same("softmax", meta(2, 3), -1) and same("layer_norm", meta(2, 3), (3,), meta(3), meta(3))
    assert same("embedding", meta(7, 3), meta(2, 2, dtype=torch.int64), 1)


def test_torch_is_asked_where_no_rule_answers() -> None:
    assert run_meta("aten.sum", (meta(2, 3),), {"dtype": torch.float64}).dtype is torch.float64
    assert run_meta("aten.amax", (meta(0, 3), (1,)), {}).shape == (0,)


SCRIPT = """
import sys, torch, torch.nn.functional as F, fuser

def norm(x, w):
    return torch.where(x > 0, F.layer_norm(x, (8,), w, w), x.softmax(-1)) + x.mean(-1, keepdim=True)

def rare(x, w):
    return torch.tril(F.group_norm(x, 2, w, w)) + x.std(1, keepdim=True), torch.roll(x, 1, 0).all(0), x.argmax(1)

for fn, heavy in ((norm, ("torch._dynamo", "sympy")), (rare, ("torch._dynamo",))):
    args = (torch.randn(4, 8), torch.randn(8))
    out = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(fn)))(*args)
    found = [m for m in heavy if m in sys.modules]
    assert fuser.num_compiled_kernels(), "nothing was compiled"
    torch.testing.assert_close(out, fn(*args))
    print(found)
f = torch.compile(lambda x: torch._refs.where(x > 0, x, -x), backend="eager")
print(f(torch.tensor([-2.0, 3.0])).tolist())
"""


def test_a_first_kernel_imports_neither_dynamo_nor_sympy() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = forked.run(["-c", SCRIPT], env=env, timeout=300)
    assert out.stdout.splitlines() == ["[]", "[]", "[2.0, 3.0]"], out.stderr[-2000:]


def test_what_is_set_to_zero_lies_in_memory_as_before() -> None:
    """Seed 603424 of the random programs, with torch 2.11: its shape function says that zeros are contiguous."""

    def magnitudes(x: torch.Tensor) -> torch.Tensor:
        return torch.abs(x.zero_())

    x = torch.ones(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    got = torch.compile(magnitudes, backend=fuser_backend)(x.clone())
    assert got.stride() == magnitudes(x).stride() == (48, 1, 12, 3)
    assert corrected("aten.zero.default", "cpu", torch.empty(x.shape, device="meta"), [x]).stride() == x.stride()
