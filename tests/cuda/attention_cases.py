"""Attention with score modifications: the sources of its kernels, and what is wrong with what they give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cuda_cases import on_cuda
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.attention.reach import BLOCK, Reach
from fuser.attention.reached import SIDE, blocks_on
from fuser.attention.scores import Added, Mods, write_scores
from fuser.canonical.build import canonicalize
from fuser.cuda import attention_source, fused_kernel
from fuser.cuda.attention_source import Asked
from tests.flex_cases import CASES, FlexCase

_KEYS = ("keys_count", "keys", "full_keys_count", "full_keys")
_QUERIES = ("queries_count", "queries", "full_queries_count", "full_queries")
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Run = Callable[[fused_kernel.Source, tuple[Any, ...]], Any]


def _index() -> list[torch.Tensor]:
    return [torch.zeros((), dtype=torch.int) for _ in range(4)]


def mods_of(case: FlexCase, gradient: bool) -> Mods:
    """The graphs that torch traces for a case."""
    captured, masking = case.buffers()
    mod = case.mod or (lambda s, b, h, q, k: s)
    mask = case.mask or (lambda b, h, q, k: b.new_ones((), dtype=torch.bool))

    def joint(s: Any, b: Any, h: Any, q: Any, k: Any, g: Any, *held: Any) -> Any:
        s = s.detach().requires_grad_()
        with torch.enable_grad():
            out = mod(s, b, h, q, k, *held)
        return torch.autograd.grad(out, s, g)[0]

    one, other = torch.zeros(()), torch.zeros(())
    with TransformGetItemToIndex():
        graphs = make_fx(mod)(one, *_index(), *captured), make_fx(mask)(*_index(), *masking)
        both = make_fx(joint)(one, *_index(), other, *captured) if gradient else None
    return Mods(*graphs, len(captured), len(masking), 1 / math.sqrt(case.sizes[5]), both)


@dataclass(frozen=True)
class AttentionCase:
    """The kernels of a case, forward and backward."""

    case: FlexCase

    def arguments(self, gradient: bool) -> tuple[tuple[str, ...], list[Any], Asked]:
        """Names of the tensors before those that the rows read, all arguments, and what kernels are asked for."""
        blocks = self.case.block_mask(self.case.buffers()[1])
        names, lists = ["q", "k", "v"], []
        if gradient:
            names += ["grad", "sums", "delta"]
        if blocks is not None:
            given = blocks.as_tuple()[2:10]
            both = dict(zip((*_KEYS, *_QUERIES), given))
            held = {n: t for n, t in both.items() if t is not None and (gradient or n in _KEYS)}
            names, lists = [*names, *held], list(held.values())
        block = None if blocks is None else (self.case.block, self.case.block)
        asked = Asked(tuple(names), self.case.mask is not None, gradient, block, not gradient, "ieee")
        return tuple(names), lists, asked

    def source(self, gradient: bool, args: tuple[Any, ...]) -> fused_kernel.Source:
        """The kernels for arguments like `args`; no GPU is needed."""
        names, _, asked = self.arguments(gradient)
        mods = mods_of(self.case, gradient)
        scores = write_scores(mods, mods.mod_buffers + mods.mask_buffers, torch.float32, names)
        scores.add_up()
        with FakeTensorMode():
            fakes = [on_cuda(a) for a in args]
        return attention_source.make_source(canonicalize(scores.graph, True).graph, asked, fakes)

    def problem(self, run: Run) -> str | None:
        """None, or what is wrong with results or gradients, by float64 and autograd. `run(source, arguments)`."""
        case = self.case
        q, k, v = case.heads()
        captured, masking = case.buffers()
        exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
        result, sums = case.exact(*exact, captured, masking)
        args = (q, k, v, *self.arguments(False)[1], *captured, *masking)
        out, logs = run(self.source(False, args), args)
        grad = torch.randn(result.shape).to(case.dtype)
        grad_logs = torch.randn(sums.shape)
        finite = torch.where(sums.isinf(), 0.0, sums / math.log(2))
        wanted = torch.autograd.grad((result * grad).sum() + (finite * grad_logs).sum(), exact)
        grad_logs = torch.where(sums.isinf(), 0.0, grad_logs).float()
        delta = (out.float() * grad.float()).sum(-1) - grad_logs / math.log(2)
        args = (q, k, v, grad, logs, delta, *self.arguments(True)[1], *captured, *masking)
        found = run(self.source(True, args), args)
        pairs = [("result", out, result), ("sums", logs, sums / math.log(2))]
        pairs += list(zip(("queries", "keys", "values"), found, wanted))
        for name, got, expected in pairs:
            far = (got.double() - expected).abs()
            far = torch.where(got.double() == expected, 0.0, far)
            if not bool((far <= _TOLERANCE[case.dtype] * (1 + expected.abs().max().nan_to_num(posinf=0))).all()):
                return f"{name} are {float(far.max()):.2e} off"
        return None


@dataclass(frozen=True)
class AddedCase:
    """Attention to which a tensor is added in some of its blocks, with gradients."""

    sizes: tuple[int, int, int, int, int]  # batch, heads, queries, keys, width
    dims: tuple[int, ...]  # that the tensor has
    dtype: torch.dtype = torch.float32

    def problem(self, run: Run) -> str | None:
        """None, or what is wrong with results or gradients, by float64 and autograd."""
        batch, heads, rows, keys, width = self.sizes
        torch.manual_seed(0)
        q, grad = (torch.randn(batch, heads, rows, width).to(self.dtype) for _ in range(2))
        k, v = (torch.randn(batch, heads, keys, width).to(self.dtype) for _ in range(2))
        places = torch.arange(rows)[:, None] - torch.arange(keys)
        seen = (places >= 0) & (places < 150)
        shape = [n if d in self.dims else 1 for d, n in enumerate((batch, heads, rows, keys))]
        bias = torch.where(seen, torch.randn(shape), -math.inf)
        bias[..., SIDE : 2 * SIDE, :SIDE] = 0.0
        zero = tuple((0, SIDE) if n in (2, 3) else (0, 0) for n in range(-(-rows // BLOCK)))
        ranges = tuple((max(n * BLOCK - 192, 0), min(n * BLOCK + BLOCK, keys)) for n in range(len(zero)))
        blocks = blocks_on(Reach(ranges, rows, keys, whole=zero), torch.device("cpu"))
        exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
        scores = exact[0] @ exact[1].mT * width**-0.5 + bias.double()
        result = torch.softmax(scores, -1) @ exact[2]
        wanted = torch.autograd.grad((result * grad).sum(), exact)
        held = bias[tuple(slice(None) if d in self.dims else 0 for d in range(4))]
        first = (*blocks.partial, *blocks.full)
        out, sums = run(*self._call(False, ("q", "k", "v", *_KEYS), (q, k, v, *first, held)))
        delta = (out.float() * grad.float()).sum(-1)
        lists = (*first, *blocks.partial_q, *blocks.full_q)
        names = ("q", "k", "v", "grad", "sums", "delta", *_KEYS, *_QUERIES)
        found = run(*self._call(True, names, (q, k, v, grad, sums, delta, *lists, held)))
        pairs = [("result", out, result), *zip(("queries", "keys", "values"), found, wanted)]
        for name, got, expected in pairs:
            far = float((got.double() - expected).abs().max())
            if not far <= _TOLERANCE[self.dtype] * (1 + float(expected.abs().max())):
                return f"{name} are {far:.2e} off"
        return None

    def _call(self, gradient: bool, names: tuple[str, ...], args: tuple[Any, ...]) -> Any:
        scores = write_scores(Added(self.dims, self.sizes[-1] ** -0.5, gradient), 1, torch.float32, names)
        scores.add_up()
        asked = Asked(names, True, gradient, (SIDE, SIDE), not gradient, "ieee")
        with FakeTensorMode():
            fakes = [on_cuda(a) for a in args]
        return attention_source.make_source(canonicalize(scores.graph, True).graph, asked, fakes), args


ADDED = {
    "attention/added": AddedCase((1, 2, 300, 300, 32), (2, 3)),
    "attention/added to a rest": AddedCase((1, 1, 320, 320, 32), (2, 3)),
    "attention/added for each head": AddedCase((2, 2, 256, 320, 64), (1, 2, 3), torch.float16),
}
ATTENTION = {f"attention/{case.name}": AttentionCase(case) for case in CASES}
