"""Attention on CUDA that leaves out blocks of keys: its lists of blocks, and calls through `torch.compile`."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fuser.attention.reach import Reach
from fuser.attention.reached import CUDNN, CUDNN_BACKWARD, EFFICIENT, EFFICIENT_BACKWARD, SIDE, Reached, blocks_on
from fuser.passes.attention_blocks import attention_by_blocks
from fuser.passes.attention_reach import bound_attention

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
MASKS = {
    "window": lambda d: (d >= 0) & (d < 200),
    "around": lambda d: d.abs() < 100,
    "causal": lambda d: d >= 0,
    "far": lambda d: (d > 700) | (d.abs() < 10),
}


def mask_of(name: str, rows: int, keys: int, device: str = "cpu") -> torch.Tensor:
    return MASKS[name](torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device))


def reach_in(name: str, rows: int, keys: int) -> Reach:
    """What the compiler finds out about a mask."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fuser.passes.attention_reach import reach_of

    made = make_fx(lambda: torch.where(mask_of(name, rows, keys), 0.0, -math.inf), tracing_mode="fake")()
    (node,) = made.graph.output_node().all_input_nodes
    found = reach_of(node, rows, keys)
    assert found is not None
    return found


@pytest.mark.parametrize("rows, keys", ((1024, 1024), (1000, 1100), (300, 129)))
@pytest.mark.parametrize("name", ("window", "around", "causal"))
def test_lists_have_each_block_that_is_needed(name: str, rows: int, keys: int) -> None:
    """Whole blocks leave every key, no block that is not listed leaves one; both directions list the same blocks."""
    blocks = blocks_on(reach_in(name, rows, keys), torch.device("cpu"))
    mask = mask_of(name, rows, keys)
    found = []
    for pair in (blocks.partial, blocks.full, blocks.partial_q, blocks.full_q):
        assert pair is not None
        count, index = pair
        listed = torch.zeros(index.shape[2:], dtype=torch.bool)
        for row, number in enumerate(count[0, 0].tolist()):
            listed[row, index[0, 0, row, :number].long()] = True
        found.append(listed)
    partial, full, partial_q, full_q = found
    assert torch.equal(partial, partial_q.T) and torch.equal(full, full_q.T) and not (partial & full).any()
    for r in range(full.shape[0]):
        for c in range(full.shape[1]):
            block = mask[r * SIDE : (r + 1) * SIDE, c * SIDE : (c + 1) * SIDE]
            assert not full[r, c] or bool(block.all())
            assert partial[r, c] or full[r, c] or not block.any()
    assert full.any() or name != "causal" or keys < 3 * SIDE


def graph_of(target: Any, name: str, n: int = 2048, heads: int = 2, **changed: Any) -> fx.GraphModule:
    """A graph with one call for queries on CUDA, as AOTAutograd has it. No GPU is needed."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    made = make_fx(
        lambda: torch.where(mask_of(name, n, n), 0.0, -math.inf).to(torch.bfloat16)[None, None], tracing_mode="fake"
    )()
    graph = made.graph
    (bias,) = graph.output_node().all_input_nodes
    with FakeTensorMode():
        value = torch.empty(2, heads, n, 64, dtype=torch.bfloat16, device="cuda", requires_grad=False)
        other = value.float()
        mask = torch.empty(1, 1, n, n, dtype=torch.bfloat16, device="cuda")
    bias.meta["val"] = mask
    with graph.inserting_before(graph.output_node()):
        q, k, v, out, grad, logs = (graph.placeholder(x) for x in ("q", "k", "v", "out", "grad", "logs"))
        for node in (q, k, v, out, grad):
            node.meta["val"] = changed.get("value", value)
        dropout = changed.get("dropout", 0.0)
        args = {
            CUDNN: (q, k, v, bias, True, dropout, False),
            EFFICIENT: (q, k, v, bias, True, dropout, False),
            CUDNN_BACKWARD: (grad, q, k, v, out, logs, logs, logs, bias, None, None, n, n, dropout, False),
            EFFICIENT_BACKWARD: (
                grad, q, k, v, bias, out, logs, logs, logs, dropout, [True, True, True, changed.get("wanted", False)]
            ),
        }[target]  # fmt: skip
        call = graph.call_function(target, args)
        call.meta["val"] = (value, value, value) if target in (CUDNN_BACKWARD, EFFICIENT_BACKWARD) else (value, other)
        first = graph.call_function(operator.getitem, (call, 0))
    graph.output_node().args = (first,)
    return made


def replaced(module: fx.GraphModule) -> bool:
    bound_attention(module)
    return attention_by_blocks(module) == 1 and any(isinstance(n.target, Reached) for n in module.graph.nodes)


@pytest.mark.parametrize("target", (CUDNN, EFFICIENT, CUDNN_BACKWARD, EFFICIENT_BACKWARD), ids=str)
def test_which_calls_are_replaced(target: Any) -> None:
    assert replaced(graph_of(target, "window"))
    backward = target in (CUDNN_BACKWARD, EFFICIENT_BACKWARD)
    assert not replaced(graph_of(target, "window", 512))
    assert replaced(graph_of(target, "window", 1024)) is not backward
    assert not replaced(graph_of(target, "window", dropout=0.1))
    assert not backward or not replaced(graph_of(target, "causal"))
    if target is EFFICIENT_BACKWARD:
        assert not replaced(graph_of(target, "window", wanted=True))


@pytest.mark.parametrize("target", (CUDNN, EFFICIENT), ids=str)
def test_logarithms_of_queries_without_keys(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen's gradient subtracts them from minus infinity, which must not be NaN."""

    class Stub:
        def forward(self, q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return q, torch.tensor([-math.inf, 1.0]).expand(1, 1, 2)

    monkeypatch.setattr(Reached, "_kernels", lambda self, sums: Stub())
    monkeypatch.setattr(Reached, "_blocks", lambda self, q, k: None)
    q = torch.zeros(1, 1, 2, 4)
    logs = Reached(target, None, (2, 3), 1.0)(q, q, q, torch.full((2, 2), -math.inf), True)[1]  # type: ignore[arg-type]
    assert logs.flatten()[:2].tolist() == pytest.approx([math.inf, math.log(2)])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str) -> torch.Tensor:
    mask = mask_of(name, q.shape[2], k.shape[2], "cuda")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sloped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str) -> torch.Tensor:
    d = torch.arange(q.shape[2], device="cuda")[:, None] - torch.arange(k.shape[2], device="cuda")
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, device="cuda")
    bias = (-slopes[:, None, None] * d.abs()).to(q.dtype).masked_fill(~MASKS[name](d), -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str) -> torch.Tensor:
    pad = torch.arange(k.shape[2], device="cuda") < k.shape[2] - 50 * torch.arange(2, device="cuda")[:, None]
    mask = mask_of(name, q.shape[2], k.shape[2], "cuda") & pad[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@GPU
@pytest.mark.parametrize("backend", ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("swapped", (False, True), ids=("heads first", "heads last"))
@pytest.mark.parametrize("function", (attention, sloped, padded))
@pytest.mark.parametrize("name", ("window", "around", "causal"))
def test_results(
    name: str, function: Any, swapped: bool, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch._dynamo.reset()
    used: list[bool] = []
    run = Reached._run
    monkeypatch.setattr(Reached, "_run", lambda self, *args: (run(self, *args), used.append(True))[0])
    torch.manual_seed(0)
    n, heads = 2100, 3
    shape = (2, n, heads, 64) if swapped else (2, heads, n, 64)
    made = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4)]
    *operands, grad = (t.transpose(1, 2) if swapped else t for t in made)
    results = []
    compiled = torch.compile(function, backend="fuser", dynamic=False)
    for call, kind in ((compiled, dtype), (function, dtype), (function, torch.float64)):
        q, k, v = (t.detach().to(kind).requires_grad_() for t in operands)
        with sdpa_kernel([getattr(SDPBackend, backend)] if kind is dtype else [SDPBackend.MATH]):
            out = call(q, k, v, name)
            results.append([out, *torch.autograd.grad(out, (q, k, v), grad.to(kind))])
    order = backend == "EFFICIENT_ATTENTION" and not swapped  # whose result is in another order in memory
    number = backend == "CUDNN_ATTENTION" and function is padded  # by which such a mask is no infinity
    causal = name == "causal" and function is attention  # ATen's kernels know that
    assert used or order or number or causal
    for got, eager, exact in zip(*results):
        assert got.stride() == eager.stride()
        far, near = (float((t.double() - exact).abs().max()) for t in (got, eager))
        assert far <= 2 * near + 4 * torch.finfo(dtype).eps * float(exact.abs().max())


@GPU
def test_lengths_of_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    used = []
    run = Reached._run
    monkeypatch.setattr(Reached, "_run", lambda self, *args: (run(self, *args), used.append(args[0].shape[2]))[0])
    compiled = torch.compile(attention, backend="fuser")
    for n in (1200, 1500, 2100, 1100):
        q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v, "window"), attention(q, k, v, "window"), rtol=2e-2, atol=2e-2)
    assert used[0] == 1200  # of symbolic sizes it is not known that each query keeps a key
