"""Programs for a device from outside the package, run as a process: torch can rename `privateuseone` only once."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fuser
from fuser import interface

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "numpy_device.py"
torch.manual_seed(0)
X, Y = torch.randn(6, 40), torch.randn(6, 40)
N = torch.randint(-9, 9, (6, 40))
ROWS = torch.tensor([3, 0, 5, 5, -1])

POINTWISE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "chain": (lambda x, y: torch.relu(x * 2 - y) / (y.abs() + 1), (X, Y)),
    "broadcast": (lambda x, y: (x + y[:1].sigmoid(), x[:, :1] * y), (X, Y)),
    "numbers": (lambda x, a, n: x * a + n, (X, 0.5, 3)),
    "masks": (lambda x, y: torch.where((x > y) & ~(y < 0), x, 0), (X, Y)),
    "integers": (lambda n: (n * n - 3, n.float() / 4, (n > 2)), (N,)),
    "pad and join": (lambda x, y: torch.cat([F.pad(x, (1, 2)), y.exp()], 1), (X, Y)),
    "gather": (lambda x, rows: x[rows] * 2, (X, ROWS)),
    "transpose": (lambda x: (x.t() + 1).t() * x, (X,)),
    "empty": (lambda x: x[:0] * 2 + 1, (X,)),
    "nan": (lambda x: torch.maximum(x.log(), x), (X,)),
}
REDUCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "sum": (lambda x: (x.sum(), x.sum(0), x.mean(-1)), (X,)),
    "extremes": (lambda x: (x.amax(1), x.amin(0)), (X,)),
    "masks": (lambda x: ((x > 0).any(1), (x > -9).all(), (x * 0 + 1).prod(1)), (X,)),
    "softmax": (lambda x: torch.softmax(x, -1), (X,)),
    "layer norm": (lambda x: F.layer_norm(x, (40,)), (X,)),
    "var": (lambda x: x.var(1), (X,)),
    "integers": (lambda n: (n.sum(1), n.amax(0)), (N,)),
    "loss": (lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y), (X, Y)),
}


def flat(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def check(device: Any, fn: Callable[..., Any], args: tuple[Any, ...], runtime: Any) -> None:
    key = fuser.register_fusion(torch.fx.symbolic_trace(fn))
    handle, spec = fuser.fusion_handle(key), interface.kernel_spec(key)
    for size in (slice(None), slice(1, 5)):  # one kernel for both
        given = [a[size] if isinstance(a, torch.Tensor) and a.dim() == 2 else a for a in args]
        if any(isinstance(a, torch.Tensor) and a.dim() == 1 for a in args):
            given = list(args)
        there = [device.to_device(a) if isinstance(a, torch.Tensor) else a for a in given]
        before = runtime.launches
        got = flat(handle(*there))
        for a, b in zip(got, flat(fn(*given)), strict=True):
            assert a.device.type == device.NAME, a.device
            torch.testing.assert_close(device.to_host(a), b, rtol=2e-6, atol=1e-6, equal_nan=True)
        assert runtime.launches > before
    reasons = [*spec.blocked, *spec.store.fallbacks]
    assert not reasons, reasons
    assert len(spec.store.kernels) == 1, [k.name for k in spec.store.kernels]


def main() -> None:
    loader: Any = importlib.util.spec_from_file_location("numpy_device", EXAMPLE)
    device = sys.modules["numpy_device"] = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(device)
    runtime, _library = device.install()
    for kind, programs in (("pointwise", POINTWISE), ("reductions", REDUCTIONS)):
        for name, (fn, args) in programs.items():
            try:
                check(device, fn, args, runtime)
            except Exception as e:
                print(f"{kind} {name}: {type(e).__name__}: {e}")
    check_refusals(device, runtime)
    check_homes(device)
    print("done")


def check_refusals(device: Any, runtime: Any) -> None:
    """What the device's generator refuses runs on ATen, and says why; an index out of range is eager's error."""
    there, launches = device.to_device(X), runtime.launches
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x: x.cumsum(1)))
    torch.testing.assert_close(device.to_host(fuser.fusion_handle(key)(there)), X.cumsum(1))
    assert "arrays have no scans" in " ".join(interface.kernel_spec(key).store.fallbacks)
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x, rows: x[rows] * 2))
    rows = device.to_device(torch.tensor([2, 77]))
    try:
        fuser.fusion_handle(key)(there, rows)
    except IndexError:
        pass
    else:
        raise AssertionError("eager raises for index 77 of 6 rows")
    assert runtime.launches == launches + 1


def check_homes(device: Any) -> None:
    """A tensor made without a device is on torch's default device, as in eager, whatever the group is on."""
    makers: tuple[tuple[Any, ...], ...] = (
        (torch.zeros, (4,)), (torch.full, (2, 3), 7), (torch.arange, 5), (torch.ones, 3), (torch.scalar_tensor, 2.5),
    )  # fmt: skip
    for make, *args in makers:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        made = graph.call_function(make, tuple(args))
        twice = graph.call_function(torch.mul, (made, 2))
        graph.output((graph.call_function(torch.relu, (x,)), made, twice))
        key = fuser.register_fusion(torch.fx.GraphModule(torch.nn.Module(), graph))
        there, here, doubled = fuser.fusion_handle(key)(device.to_device(X))
        torch.testing.assert_close(device.to_host(there), X.relu())
        want = make(*args)
        assert here.device == doubled.device == want.device, (here.device, doubled.device)
        assert torch.equal(here, want) and torch.equal(doubled, want * 2)


if __name__ == "__main__":
    main()
