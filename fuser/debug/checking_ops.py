"""Checks of single ops and reductions of the table: each is compiled by itself and compared with its row's `eval`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuser import config, interface
from fuser.errors import ConfigError, VerifyError
from fuser.kernel_cache import REGISTRY
from fuser.ops import OPS, REDUCTIONS, OpRow, ReductionRow
from fuser.passes.extending import lower_to_op, register_lowering, sample_arguments, unregister_lowering
from fuser.passes.own_reductions import lower_to_reduction

_NAMESPACE = "fuser_check"
_SHAPES = ((3, 130), (200, 3), (2, 515), (4, 1))  # of several registers and fewer, with a tail


def check_op(name: str, device: str = "cpu") -> None:
    """Run a kernel of an op for each of its dtypes on 1000 samples of its domain, and compare with `OpRow.eval`.

    Floats may differ by the row's `ulps`; all other dtypes must be equal.

    Args:
        name: the name of a row of `fuser.ops.OPS`, such as one that `register_op` added.
        device: the device on which the kernels run, such as "cpu" or "cuda".

    Raises:
        ConfigError: there is no op of the name, or no device of that name in this torch.
        VerifyError: the first dtype, arguments and result that are wrong, or the dtype without a kernel and the reason.
    """
    row = OPS.get(name) if isinstance(name, str) else None
    if row is None:
        raise ConfigError(f"there is no op {name!r}: expected a row of fuser.ops.OPS")
    _check_device(device)
    with _operator(row) as operator:
        graph = torch.fx.Graph()
        node = graph.call_function(operator, tuple(graph.placeholder(f"a{n}") for n in range(row.arity)))
        graph.output(node)
        for dtype in row.dtypes:
            _check(row, torch.fx.GraphModule(torch.nn.Module(), graph), dtype, device)


def check_reduction(
    name: str, device: str = "cpu", domain: tuple[float, float] = (-4.0, 4.0), rtol: float | None = None
) -> None:
    """Run kernels of a reduction along rows, columns and both, for each dtype, and compare with its `eval`.

    Floats are compared with `eval` of the values in float64.

    Args:
        name: the name of a row of `fuser.ops.REDUCTIONS`, such as one that `register_reduction` added. Rows of
            positions (`index`) and contractions cannot be checked.
        device: the device on which the kernels run, such as "cpu" or "cuda".
        domain: the lowest and highest value that is drawn.
        rtol: the largest error allowed, relative to the result or 1.0, whichever is larger. None is torch's own limit
            for the dtype.

    Raises:
        ConfigError: there is no such reduction or device, or `domain` or `rtol` are no numbers.
        VerifyError: the first dtype, shape and dims that are wrong, or the dtype without a kernel and the reason.
    """
    row = REDUCTIONS.get(name) if isinstance(name, str) else None
    if row is None:
        raise ConfigError(f"there is no reduction {name!r}: expected a row of fuser.ops.REDUCTIONS")
    if row.index or row.contracts:
        raise ConfigError(f"reduction {name!r}: positions and contractions cannot be checked, expected one of values")
    _check_device(device)
    if not (isinstance(domain, (tuple, list)) and len(domain) == 2 and all(map(_is_number, domain))):
        raise ConfigError(f"domain={domain!r}: expected the lowest and the highest value, such as (-4.0, 4.0)")
    if rtol is not None and not _is_number(rtol):
        raise ConfigError(f"rtol={rtol!r}: expected a relative error such as 1e-5, or None")
    generator, (low, high) = torch.Generator().manual_seed(0), domain
    with _reducing(row) as operator:
        for dtype in row.dtypes:
            for shape in _SHAPES:
                drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
                for dims in ((1,), (0,), (0, 1)):
                    _check_reduction(row, operator, drawn.to(dtype), dims, device, rtol)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as e:  # the last: CUDA in a torch without it
        why = str(e).splitlines()[0]
        raise ConfigError(f"device={device!r} cannot be used: {why}; expected one such as 'cpu'") from None


def _check_reduction(
    row: ReductionRow, operator: torch._ops.OpOverload, x: torch.Tensor, dims: tuple[int, ...], device: str,
    rtol: float | None,
) -> None:  # fmt: skip
    graph = torch.fx.Graph()
    graph.output(graph.call_function(operator, (graph.placeholder("x"), list(dims))))
    got, said = _run(torch.fx.GraphModule(torch.nn.Module(), graph), [x.to(device)])
    where = f"reduction {row.name!r} in {x.dtype} on {device}, dims {list(dims)} of {list(x.shape)}"
    if said:
        raise VerifyError(f"{where}: there is no kernel: {said}")
    want = row.eval(x.double() if x.is_floating_point() else x, dims, False).to(got.dtype)
    try:
        torch.testing.assert_close(got.cpu(), want, equal_nan=True, rtol=rtol, atol=rtol)
    except AssertionError as e:
        raise VerifyError(f"{where}: {e}") from None


def _run(module: torch.fx.GraphModule, args: list[torch.Tensor]) -> tuple[torch.Tensor, str]:
    """The result of a group of its own, and the reason if no kernel computed it."""
    with config.override(slowest=0.0):
        key = interface.register_fusion(module)
        try:
            (got,) = interface.run_fusion(key, args)
            fallbacks = REGISTRY.find(key).spec.store.fallbacks
        finally:
            interface.unregister_fusion(key)
    return got, str(next(iter(fallbacks), ""))


def _check(row: OpRow, module: torch.fx.GraphModule, dtype: torch.dtype, device: str) -> None:
    args = [a.to(device) for a in sample_arguments(row, dtype)]
    got, said = _run(module, args)
    if said:
        raise VerifyError(f"op {row.name!r} has no kernel for {dtype} on {device}: {said}")
    want = row.eval(*(a.cpu() for a in args)).to(row.result_dtype(dtype))
    allowed = row.ulps * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    same = torch.isclose(got.cpu(), want, rtol=allowed, atol=0.0, equal_nan=dtype.is_floating_point)
    if not bool(same.all()):
        n = int((~same).nonzero()[0])
        given = ", ".join(str(a[n].item()) for a in args)
        raise VerifyError(
            f"op {row.name!r} in {dtype} on {device}: {row.name}({given}) is {got[n].item()}, and torch computes "
            f"{want[n].item()}; {int((~same).sum())} of {same.numel()} samples differ by more than {row.ulps} ulps"
        )


@contextlib.contextmanager
def _operator(row: OpRow) -> Iterator[torch._ops.OpOverload]:
    """A torch operator that computes `row.eval` and is lowered to the op."""
    names = [f"a{n}" for n in range(row.arity)]
    with torch.library._scoped_library(_NAMESPACE, "FRAGMENT") as library:
        library.define(f"{row.name}({', '.join(f'Tensor {n}' for n in names)}) -> Tensor")
        for key in ("CompositeExplicitAutograd", "Meta"):
            library.impl(row.name, lambda *args: row.eval(*args), key)
        with _lowered(row.name, lower_to_op(row.name)) as operator:
            yield operator


@contextlib.contextmanager
def _reducing(row: ReductionRow) -> Iterator[torch._ops.OpOverload]:
    """A torch operator that computes `row.eval` over dims and is lowered to the reduction."""

    def sizes(x: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
        return torch.empty_like(x.sum(dim, keepdim), dtype=row.result_dtype(x.dtype))

    with torch.library._scoped_library(_NAMESPACE, "FRAGMENT") as library:
        library.define(f"{row.name}(Tensor x, int[] dim, bool keepdim=False) -> Tensor")
        library.impl(row.name, lambda x, dim, keepdim=False: row.eval(x, tuple(dim), keepdim), "CPU")
        library.impl(row.name, sizes, "Meta")
        with _lowered(row.name, lower_to_reduction(row.name)) as operator:
            yield operator


@contextlib.contextmanager
def _lowered(name: str, function: Callable[..., Any]) -> Iterator[torch._ops.OpOverload]:
    operator = getattr(getattr(torch.ops, _NAMESPACE), name).default
    register_lowering(operator, function)
    try:
        yield operator
    finally:
        unregister_lowering(operator)


__all__ = ["check_op", "check_reduction"]
