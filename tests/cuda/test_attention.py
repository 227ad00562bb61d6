"""`flex_attention` on CUDA: what its kernels take of a GPU, and their results and gradients through `torch.compile`."""

from __future__ import annotations

import dataclasses
from importlib import util
from typing import Any

import pytest
import torch
from attention_cases import ATTENTION, AttentionCase
from torch.nn.attention.flex_attention import flex_attention

from fuser.attention import served
from fuser.cuda import fused_kernel
from fuser.cuda.attention_source import fitted, forward_tile
from fuser.cuda.binary import usage
from fuser.errors import Unsupported
from tests.flex_cases import CASES, FlexCase, causal, soft_cap

WITHOUT_TRITON = pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.sampled(3)
@WITHOUT_TRITON
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("head", (64, 128, 256))
def test_registers_do_not_spill(head: int, dtype: torch.dtype) -> None:
    case = AttentionCase(FlexCase("", soft_cap, causal, (1, 2, 2, 256, 256, head, head), dtype=dtype))
    q, k, v = case.case.heads()
    number = torch.zeros(q.shape[:3])
    for gradient, first in ((False, (q, k, v)), (True, (q, k, v, q, number, number))):
        source = case.source(gradient, (*first, *case.arguments(gradient)[1]))
        for entry in fused_kernel.compile_entries(source, 90):
            used = usage(entry.cubin)
            assert used.stack <= 64 and used.registers * entry.threads <= 65536, (entry.name, used)


def test_tiles_fit_the_blocks_of_a_mask() -> None:
    tile = forward_tile(torch.bfloat16, 64)
    assert (fitted(tile, (128, 64), 0).queries, fitted(tile, (128, 64), 0).keys) == (64, 64)
    assert fitted(tile, (32, 16), 0).keys == 16 and fitted(tile, None, 2).queries < tile.queries * 2
    with pytest.raises(Unsupported, match="expected multiples of 16"):
        fitted(tile, (128, 24), 0)


@pytest.mark.parametrize("name", ("attention/bias", "attention/causal", "attention/float16"))
def test_a_graph_has_one_text(name: str) -> None:
    """Equal problems have equal sources, and every number of the launch is a parameter, not text."""
    case = ATTENTION[name]
    held = (*case.arguments(False)[1], *case.case.buffers()[0])
    first = case.source(False, (*case.case.heads(), *held)).text
    longer = dataclasses.replace(case.case, sizes=(5, *case.case.sizes[1:]))
    assert AttentionCase(longer).source(False, (*longer.heads(), *held)).text == first


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_results_and_gradients(case: FlexCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str | None] = []
    fused = served._Served.fused

    def watched(self: Any, run: Any, *heads: Any) -> Any:
        found = fused(self, run, *heads)
        ran.append(self.reason if found is None else "fused")
        return found

    monkeypatch.setattr(served._Served, "fused", watched)
    torch._dynamo.reset()
    case = dataclasses.replace(case, dtype=dtype)
    captured, masking = case.buffers("cuda")
    blocks = case.block_mask(masking, "cuda")
    mod = None if case.mod is None else (lambda s, b, h, q, k: case.mod(s, b, h, q, k, *captured))
    args = [t.requires_grad_() for t in case.heads("cuda")]

    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, mod, blocks, enable_gqa=q.shape[1] != k.shape[1])

    exact = [t.detach().double().requires_grad_() for t in args]
    wanted, _ = case.exact(*exact, captured, masking)
    grad = torch.randn(wanted.shape, device="cuda").to(dtype)
    expected = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]
    by = []
    for run in (torch.compile(call, backend="fuser"), call):
        out = run(*args)
        by.append([out, *torch.autograd.grad(out, args, grad)])
    assert ran == ["fused", "fused"]
    for ours, eager, right in zip(*by, expected):
        far = [float((t.double() - right).abs().max()) for t in (ours, eager)]
        assert ours.stride() == eager.stride()
        assert far[0] <= 2 * far[1] + 4 * torch.finfo(dtype).eps * (1e-3 + float(right.abs().max())), far
