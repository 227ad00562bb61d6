"""An op of the table, compiled by itself and compared with what its row says that torch computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fuser import config, interface
from fuser.errors import ConfigError, VerifyError
from fuser.kernel_cache import REGISTRY
from fuser.ops import OPS, OpRow
from fuser.passes.extending import lower_to_op, register_lowering, sample_arguments, unregister_lowering

_NAMESPACE = "fuser_check"


def check_op(name: str, device: str = "cpu") -> None:
    """Run a kernel of the op `name` for each of its dtypes on 1000 samples of its domain; compare with `OpRow.eval`.

    Floats may differ by the row's `ulps`. VerifyError names the first dtype, arguments and result that are wrong, or
    the dtype for which there is no kernel, with the reason.
    """
    row = OPS.get(name)
    if row is None:
        raise ConfigError(f"there is no op {name!r}: expected a row of fuser.ops.OPS")
    with _operator(row) as operator:
        graph = torch.fx.Graph()
        node = graph.call_function(operator, tuple(graph.placeholder(f"a{n}") for n in range(row.arity)))
        graph.output(node)
        for dtype in row.dtypes:
            _check(row, torch.fx.GraphModule(torch.nn.Module(), graph), dtype, device)


def _check(row: OpRow, module: torch.fx.GraphModule, dtype: torch.dtype, device: str) -> None:
    args = [a.to(device) for a in sample_arguments(row, dtype)]
    with config.override(slowest=0.0):
        key = interface.register_fusion(module)
        try:
            (got,) = interface.run_fusion(key, args)
            fallbacks = REGISTRY.find(key).spec.store.fallbacks
        finally:
            interface.unregister_fusion(key)
    if fallbacks:
        raise VerifyError(f"op {row.name!r} has no kernel for {dtype} on {device}: {next(iter(fallbacks))}")
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
    """An operator of torch that computes `row.eval`, lowered to the op."""
    names = [f"a{n}" for n in range(row.arity)]
    with torch.library._scoped_library(_NAMESPACE, "FRAGMENT") as library:
        library.define(f"{row.name}({', '.join(f'Tensor {n}' for n in names)}) -> Tensor")
        for key in ("CompositeExplicitAutograd", "Meta"):
            library.impl(row.name, lambda *args: row.eval(*args), key)
        operator = getattr(getattr(torch.ops, _NAMESPACE), row.name).default
        register_lowering(operator, lower_to_op(row.name))
        try:
            yield operator
        finally:
            unregister_lowering(operator)


__all__ = ["check_op"]
