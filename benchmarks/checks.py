"""Is a contestant's result right? Compared with eager, and with the same function in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Per dtype (rtol, atol): torch.testing's for the wide types. A low-precision chain which rounds once differs from
# eager's, which rounds after every op, by a few units in the last place of its intermediates.
TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}


@dataclass(frozen=True)
class Verdict:
    """`problem` is a sentence, or None for a right result; errors are relative root mean squares against float64."""

    problem: str | None
    error: float | None = None
    eager_error: float | None = None


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def to_float64(tree: Any) -> Any:
    """Clones of the tensors, the floating ones as float64."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() and t.dtype != torch.float64 else t.clone(), tree
    )


def clones(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the same strides and memory of their own, for functions that write to them."""
    return tuple(_clone(a) if isinstance(a, torch.Tensor) else a for a in args)


def _clone(t: torch.Tensor) -> torch.Tensor:
    if 0 in t.stride():
        return t.clone()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def run_on_clones(fn: Callable[..., Any], args: tuple[Any, ...], mutates: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """The result's tensors followed by those arguments which `fn` writes to. The arguments stay as they are."""
    mine = clones(args) if mutates else args
    return tensors(fn(*mine)) + [mine[i] for i in mutates]


def _rms(t: torch.Tensor) -> float:
    return t.square().mean().sqrt().item()


def _relative_rms(out: torch.Tensor, exact: torch.Tensor, least_scale: float = 0.0) -> float:
    if out.numel() == 0:
        return 0.0
    wide = out.double()
    finite = exact.isfinite()
    difference = torch.where(finite, wide - exact, 0.0)
    scale = max(least_scale, _rms(torch.where(finite, exact, 0.0)))
    rms = difference.square().mean().sqrt().item()
    return rms / scale if scale else rms


def _compare_one(out: torch.Tensor, eager: torch.Tensor, rtol_scale: float) -> str | None:
    if out.shape != eager.shape or out.dtype != eager.dtype:
        return (
            f"is {out.dtype} {tuple(out.shape)} where eager's is {eager.dtype} {tuple(eager.shape)}: "
            "expected the same dtype and sizes"
        )
    if eager.dtype not in TOLERANCE:
        wrong = int((out != eager).sum())
        return f"differs from eager's in {wrong} of {out.numel()} elements: expected none" if wrong else None
    rtol, atol = TOLERANCE[eager.dtype]
    finite = eager[eager.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    atol *= max(1.0, largest) * rtol_scale
    if torch.allclose(out, eager, rtol=rtol * rtol_scale, atol=atol, equal_nan=True):
        return None
    worst = (out.double() - eager.double()).abs().nan_to_num(math.inf).max().item()
    return f"is off eager's by up to {worst:.3g}: expected rtol {rtol * rtol_scale:.2g}, atol {atol:.2g}"


def judge(
    out: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: list[torch.Tensor] | None = None,
    tolerance_scale: float = 1.0,
    together: bool = False,
) -> Verdict:
    """Right if close to eager and, where `exact` (float64) is given, no further from it than twice eager's error.

    What is not close to eager is right if it is at most half as far from `exact` as eager is.

    `tolerance_scale` widens the comparison with eager for whole models, whose matmuls reassociate; the comparison with
    float64 then still holds the result to eager's own precision. `together`: see `_judge_together`; needs `exact`.
    """
    if len(out) != len(eager):
        return Verdict(f"{len(out)} results: expected {len(eager)}, as eager gives")
    if together:
        assert exact is not None
        return _judge_together(out, eager, exact)
    for i, (a, b) in enumerate(zip(out, eager, strict=True)):
        problem = _compare_one(a, b, tolerance_scale)
        if problem and not (exact is not None and _is_nearer(a, b, exact[i])):
            return Verdict(f"result {i} {problem}")
    if exact is None:
        return Verdict(None)
    error = eager_error = 0.0
    for i, (a, b, e) in enumerate(zip(out, eager, exact, strict=True)):
        if not e.is_floating_point():
            continue
        mine, theirs = _relative_rms(a, e), _relative_rms(b, e)
        if not mine <= 2 * theirs + 2 * torch.finfo(a.dtype).eps:
            return Verdict(
                f"result {i} has an error of {mine:.3g} against float64 where eager has {theirs:.3g}: "
                "expected at most twice eager's and two units in the last place",
                mine,
                theirs,
            )
        error, eager_error = max(error, mine), max(eager_error, theirs)
    return Verdict(None, error, eager_error)


def _is_nearer(out: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a result, of eager's shape and dtype, has at most half of eager's error: then it is eager that is off."""
    alike = out.shape == eager.shape and out.dtype == eager.dtype and exact.is_floating_point()
    alike = alike and torch.equal(out.isfinite(), exact.isfinite())
    return alike and 2 * _relative_rms(out, exact) <= _relative_rms(eager, exact)


def _judge_together(out: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> Verdict:
    """Gradients, which hang together: none may have four times the error of eager's worst.

    Rounding decides on which side of zero a ReLU's argument falls, and each such element changes all gradients before
    it: eager's own error against float64 is 2 % for ResNet-50, at other places on every run of another order of sums.
    What is small beside the others, such as a key's bias, whose gradient is 0 but for rounding, is judged beside a
    thousandth of their size.
    """
    least = 1e-3 * max((_rms(e) for e in exact if e.is_floating_point() and e.numel()), default=0.0)
    errors, eager_errors = [], []
    for i, (a, b, e) in enumerate(zip(out, eager, exact, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isfinite(), b.isfinite()):
            return Verdict(f"result {i} differs from eager's in sizes, dtype or where it is finite")
        errors.append(_relative_rms(a, e, least))
        eager_errors.append(_relative_rms(b, e, least))
    worst, allowed = max(errors), 4 * max(eager_errors) + 4 * torch.finfo(out[0].dtype).eps
    if worst <= allowed:
        return Verdict(None, worst, max(eager_errors))
    return Verdict(
        f"result {errors.index(worst)} has an error of {worst:.3g} against float64 where eager's worst is "
        f"{max(eager_errors):.3g}: expected at most four times that",
        worst,
        max(eager_errors),
    )
