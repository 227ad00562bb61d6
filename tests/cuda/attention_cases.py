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

from fuser.attention.scores import Mods, write_scores
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


ATTENTION = {f"attention/{case.name}": AttentionCase(case) for case in CASES}
