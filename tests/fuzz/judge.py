"""What makes a program's results differ from eager's: more than the roundings on the way to them allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests import compare
from tests.device import test_device
from tests.fuzz import program as programs
from tests.fuzz.program import Program, run, run_step

_NORMS = ("layer_norm", "group_norm", "batch_norm", "instance_norm")
_ADDING = ("sum", "mean", "_norm", "_add", "index_put")
_EITHER_ZERO = ("max", "min", "clamp", "relu", "hard", "sum")


def make_inputs(program: Program, sizes: dict[int, int] | None = None) -> list[torch.Tensor]:
    """The program's inputs, on the device that is tested."""
    return programs.make_inputs(program, sizes, test_device())


def what_differs(
    program: Program, got: Sequence[Any], want: Sequence[Any], sizes: dict[int, int] | None, strides: bool,
    zeros: bool = True,
) -> list[str]:  # fmt: skip
    """Differences of results: exact values to the bit (unless not `zeros`, with the zeros' signs), others as near as
    the roundings allow."""
    found = []
    # Which zero an extreme or a sum of both is, depends on the order, which is not the same on a GPU.
    zeros = zeros and (test_device() == "cpu" or not any(t in s.fn for s in program.steps for t in _EITHER_ZERO))
    wide, _, largest, low = wide_run(program, sizes)
    norms = [i for i, s in enumerate(program.steps) if any(n in s.fn for n in _NORMS)]
    if norms:
        largest *= 400  # 1 / sqrt(eps): what it makes of the rounding of a mean where all values are equal
        later = program.steps[norms[0] + 1 :]
        if any(x.layout == "expanded" for x in program.inputs) and any(t in s.fn for s in later for t in _ADDING):
            largest *= max(x.numel() for x in make_inputs(program, sizes))
    for n, o in enumerate(program.outputs):
        a, b = got[n], want[n]
        if o in program.exact and is_identical(b.double(), wide[n].double()):
            form = compare.differences([a], [b], strides=strides)
            if form or not is_identical(a, b, zeros):
                found.append(f"output {n} (exact): {form or compare._describe(a, b)}")
            continue
        for p in compare.differences([a], [b], lambda n=n: [wide[n]], strides=strides, low=low):
            form = compare._form_difference(a, b, strides)
            noise = _is_noise(a, b, wide[n], largest, low) or _as_on_cpu(program, n, a, wide[n], sizes)
            noise = noise or _as_in_float32(program, n, a, sizes, low)
            noise = noise or _is_noise(a, b, _in_float64(program, sizes, True)[o], largest, low)
            noise = noise or _is_noise(a, b, _in_float64(program, sizes, False)[o], largest, low)
            noise = noise or (bool(norms) and _is_noise(_settled(program, o, a, b, sizes), b, wide[n], largest, low))
            if form or not noise:
                found.append(f"output {n}: {p}")
    return found


def _as_on_cpu(
    program: Program, output: int, got: torch.Tensor, exact: torch.Tensor, sizes: dict[int, int] | None
) -> bool:  # fmt: skip
    """Whether a result of a GPU is about as near to the exact one as eager's on the CPU, which adds in another order.

    Where a sum is nearly nothing and others are divided by it, eager's results on the two are as far apart.
    """
    if got.device.type == "cpu" and test_device() == "cpu":
        return False
    want = run(program, programs.make_inputs(program, sizes))[output]
    return not compare.differences([got.cpu()], [want], lambda: [exact.cpu()], strides=False)


def _as_in_float32(
    program: Program, output: int, got: torch.Tensor, sizes: dict[int, int] | None, low: torch.dtype | None
) -> bool:
    """Whether a result is eager's with halves in float32: where a half underflows to 0, infinity times it is no number,
    and which infinity it is else may depend on the sign of what is left of `sin(pi)`."""
    if low not in (torch.float16, torch.bfloat16):
        return False
    real = make_inputs(program, sizes)
    values: list[Any] = [v.float() if _is_half(v) else v for v in real]
    for s in program.steps:
        real.append(run_step(s, real))
        given = values
        if s.fn == ".to":  # the cast that is asked for is of the half
            given = [v.to(r.dtype) if _is_half(r) else v for v, r in zip(values, real)]
        try:
            values.append(run_step(s, given))
        except RuntimeError:  # a write of float32 into what was made as a half
            return False
    want = values[program.outputs[output]]
    return not compare.differences([got], [want.to(got.dtype)], strides=False, low=low)


def _in_float64(program: Program, sizes: dict[int, int] | None, keeps: bool) -> list[Any]:
    """All values of a program with quotients of integers in float64, too; unless it `keeps` them, or writes into some,
    with nothing in place of what the real dtype has no normal number for.

    Which of the factors of a product overflow or underflow before the others come depends on the order, and infinity
    times what is left is infinity or no number.
    """
    real, wide = make_inputs(program, sizes), _wide_inputs(program, sizes)
    torch.set_default_dtype(torch.float64)
    try:
        for s in program.steps:
            wide.append(run_step(_widened(s), wide))
    finally:
        torch.set_default_dtype(torch.float32)
    if keeps or any(s.fn.endswith("_") or "setitem" in s.fn for s in program.steps):
        return wide
    wide = wide[: len(real)]
    for s in program.steps:
        real.append(run_step(s, real))
        wide.append(_without_small(real[-1], run_step(_widened(s), wide)))
    return wide


def _settled(program: Program, value: int, a: Any, b: Any, sizes: dict[int, int] | None) -> Any:
    """`a` with eager's values `b` where what is infinite, or no number, turns on the last bits of inputs: what a norm
    leaves of a value that is the mean is nothing, or so little of either sign that infinity times it is infinite."""
    if not isinstance(b, torch.Tensor) or not b.is_floating_point() or a.shape != b.shape:
        return a
    kinds = []
    for sign in (1e-6, -1e-6):
        draw, values = torch.Generator().manual_seed(0), _wide_inputs(program, sizes)
        for i, v in enumerate(values):
            if v.is_floating_point():
                values[i] = v * (1 + sign * torch.randn(v.shape, generator=draw, dtype=v.dtype))
        for s in program.steps:
            values.append(run_step(_widened(s), values))
        x = values[value]
        kinds.append(torch.where(x.isnan(), 2.0, torch.where(x.isinf(), x.sign(), 0.0)))
    return torch.where((kinds[0] != kinds[1]) & ~(a.isfinite() & b.isfinite()), b, a)


def _without_small(real: Any, wide: Any) -> Any:
    if not isinstance(real, torch.Tensor) or not real.is_floating_point():
        return wide
    return wide.masked_fill(wide.abs() < torch.finfo(real.dtype).tiny, 0)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def is_identical(a: torch.Tensor, b: torch.Tensor, zeros: bool = True) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    x, y = a.double().cpu(), b.double().cpu()  # a text may bring a result of a GPU to the CPU
    same = (x == y) & (torch.signbit(x) == torch.signbit(y)) if zeros else x == y
    return bool((same | x.isnan() & y.isnan()).all())


def wide_run(
    program: Program, sizes: dict[int, int] | None
) -> tuple[list[Any], list[Any], float, torch.dtype | None]:  # fmt: skip
    """Outputs in float64, the inputs after that run; on the way there the largest magnitude and least precise dtype."""
    real, wide = make_inputs(program, sizes), _wide_inputs(program, sizes)
    for s in program.steps:
        real.append(run_step(s, real))
        wide.append(run_step(_widened(s), wide))
    floats = [v for v in compare.leaves(wide) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    finite = [float(v[v.isfinite()].abs().max()) for v in floats if v.isfinite().any()]
    largest, low = max(finite, default=1.0), compare.lowest(compare.leaves(real))
    return [wide[o] for o in program.outputs], wide[: len(program.inputs)], largest, low


def _wide_inputs(program: Program, sizes: dict[int, int] | None) -> list[Any]:
    """The inputs in float64, which alias each other as the real ones do."""
    wide: list[Any] = []
    for x, own in zip(program.inputs, make_inputs(program, sizes)):
        wide.append(programs.VIEWS[x.view](wide[x.of]) if x.of >= 0 else compare.in_float64([own])[0])
    return wide


def _widened(s: Any) -> Any:
    from tests.fuzz.generate import _widened as widened

    return widened(s)


def are_exact(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether integers are eager's `b` or those of the exact program."""
    plain = not b.is_floating_point() and a.dtype is b.dtype is exact.dtype and a.shape == b.shape
    return plain and bool(((a == b) | (a == exact)).all())


def _is_noise(a: Any, b: Any, exact: Any, largest: float, low: torch.dtype | None) -> bool:
    """Whether a difference is what roundings of values as large as `largest` can make.

    Where eager's own result is no number, since halves overflowed on its way, the exact one alone counts; and so it
    does for integers made of such results.
    """
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if not b.is_floating_point():
        return are_exact(a, b, exact)
    x, y, e = a.double(), b.double(), exact.double()
    same = (x == y) | (x == e) | (x.isnan() & (y.isnan() | e.isnan()))
    gap = torch.where(same, 0.0, torch.fmin((x - y).abs(), (x - e).abs()))
    return bool((gap <= 16 * torch.finfo(low or b.dtype).eps * max(largest, 1.0)).all())
