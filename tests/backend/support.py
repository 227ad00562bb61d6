"""Run functions through a fused kernel and compare with eager and with float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import fuser
from fuser import debug

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
INTS = (*SIGNED, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)

# -- data --------------------------------------------------------------------------------------------------------------


def special_floats(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, infinities, NaN, the largest, smallest and subnormal numbers, numbers near 1, halves."""
    info = torch.finfo(dtype)
    values = [0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 20.0, 88.0, info.max, info.tiny, info.tiny / 4, math.inf, 1 - info.eps]
    return torch.tensor([*values, *(-v for v in values), math.nan], dtype=torch.float64).to(dtype)


def values(dtype: torch.dtype, n: int = 120, low: float = -5.0, high: float = 5.0) -> torch.Tensor:
    """`n` numbers of the dtype: the special ones, then even draws from [low, high] or the whole range of integers."""
    if dtype is torch.bool:
        return torch.arange(n) % 3 == 0
    if dtype.is_floating_point:
        special = special_floats(dtype)
        special = special[(special.isnan()) | ((special >= low) & (special <= high)) | ((low, high) == (-5.0, 5.0))]
        drawn = torch.rand(n - len(special), dtype=torch.float64) * (high - low) + low
        return torch.cat([special, drawn.to(dtype)])
    info = torch.iinfo(dtype)
    ends = [info.max, info.max - 1, info.min, info.min + 1]
    edges = torch.tensor([0, 1, 2, 3, 7, *ends, *([-1, -2] if info.min else [])])
    small = torch.randint(max(info.min, -9), 10, ((n - len(edges)) // 2,))
    wide = torch.randint(info.min, info.max, (n - len(edges) - len(small),))
    return torch.cat([edges, small, wide]).to(dtype)


def pairs(dtype: torch.dtype, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that meet in every combination of their first values."""
    v = values(dtype, 44, **kwargs)
    return v.repeat_interleave(len(v)), v.repeat(len(v))


# -- running -----------------------------------------------------------------------------------------------------------
def graph_of(functions: Sequence[Callable[..., Any]], n_inputs: int) -> fx.GraphModule:
    """One graph that computes every function of the same inputs, its results in one list."""
    names = ", ".join(f"x{i}" for i in range(n_inputs))
    space: dict[str, Any] = {"functions": functions, "flat": flat}
    exec(f"def every({names}):\n    return flat([f({names}) for f in functions])\n", space)
    return fx.GraphModule(torch.nn.Module(), fx.Tracer().trace(space["every"]))


def fused(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The graph's results by kernels alone: a fallback fails the test with its reason."""
    key = fuser.register_fusion(graph)
    out = fuser.run_fusion(key, list(inputs))
    report = debug.report([key])
    assert report.kernels >= 1 and not report.fallback_calls, f"not fused:\n{report}"
    return out


def run(
    functions: Sequence[Callable[..., Any]], *inputs: Any, wide: Any = None, exact: Sequence[Any] | None = None
) -> tuple[list[Any], list[Any], list[Any]]:
    """(kernel's, eager's, float64's) results of every function; the last for inputs `wide` or by `exact`, if given."""
    graph = graph_of(functions, len(inputs))
    if wide is None:
        wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs]
    return flat(fused(graph, inputs)), flat(graph(*inputs)), flat([f(*wide) for f in exact or functions])


def flat(value: Any) -> list[Any]:
    """What is in a nest of tuples and lists."""
    return [t for v in value for t in flat(v)] if isinstance(value, (tuple, list)) else [value]


# -- comparing ---------------------------------------------------------------------------------------------------------
def ulps(a: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, floor: float = 0.0) -> torch.Tensor:
    """|a - reference| in units in the last place of `dtype` at the reference, or at `floor` if that is more."""
    a, r = a.double(), reference.double()
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(r.abs().clamp(max(floor, info.tiny), info.max))
    unit = torch.ldexp(torch.full_like(r, info.eps), exponent - 1)
    out = (a - r).abs() / unit
    same = (a == r) | (a.isnan() & r.isnan())
    return torch.where(same, torch.zeros_like(out), out.nan_to_num(math.inf))


def check(
    out: torch.Tensor, eager: torch.Tensor, wide: torch.Tensor | None, name: str, slack: float = 1.0,
    zeros: bool = True, floor: float = 0.0,
) -> None:  # fmt: skip
    """dtype, size and strides of eager; the same bits, or an error no larger than eager's plus `slack` roundings."""
    assert out.dtype == eager.dtype and out.shape == eager.shape, f"{name}: {out.dtype}{tuple(out.shape)}"
    if out.numel():
        kept = [d for d in range(out.dim()) if out.shape[d] > 1]
        strides = [out.stride(d) for d in kept], [eager.stride(d) for d in kept]
        assert strides[0] == strides[1], f"{name}: strides {strides[0]}, eager has {strides[1]}"
    if not out.is_floating_point():
        wrong = out != eager
        assert not wrong.any(), f"{name}: {out[wrong][:3].tolist()} where eager has {eager[wrong][:3].tolist()}"
        return
    for what, test in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        differ = test(out) != test(eager)
        assert not differ.any(), f"{name}: {what}: {out[differ][:3].tolist()} for {eager[differ][:3].tolist()}"
    if zeros:
        differ = (out == 0) & (eager == 0) & (out.signbit() != eager.signbit())
        assert not differ.any(), f"{name}: {int(differ.sum())} zeros of the other sign"
    wide = eager if wide is None or out.dtype is torch.float64 else wide
    finite = torch.isfinite(out) & torch.isfinite(wide)
    mine, its = (ulps(t, wide, out.dtype, floor)[finite] for t in (out, eager))
    if mine.numel():
        at = int(mine.argmax())
        assert mine[at] <= its.max() + slack, (
            f"{name}: {mine[at]:.2f} ulp from float64, eager {its.max():.2f}: "
            f"{out[finite][at].item()!r}, float64 {wide[finite][at].item()!r}"
        )


def check_all(
    names: Sequence[str], functions: Sequence[Callable[..., Any]], *inputs: Any, wide: Any = None,
    exact: Sequence[Any] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Every function fused into one graph, run and compared."""
    results = run(functions, *inputs, wide=[wide] if isinstance(wide, torch.Tensor) else wide, exact=exact)
    for name, out, eager, wide in zip(names, *results, strict=True):
        check(out, eager, wide, name, **options)
