"""Runs a program by eager, in float64, and fused on one of several routes, and compares results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fuser
from fuser.frontends.dynamo import fuser_backend
from tests.device import test_device
from tests.distances import Distances
from tests.peers import (  # noqa: F401  (each registers its programs)
    activations,
    attention,
    detection,
    graphs,
    iterations,
    losses,
    masks,
    norms,
    optimisers,
    physics,
    quantisation,
    recurrent,
    sampling,
    signal,
    transforms,
    vision,
    writing,
)
from tests.peers.judge import problem, widened
from tests.peers.spec import FIRST, PEERS, SECOND, Peer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DRAWS = 32
SIZES = {"dynamic": (FIRST, SECOND), "few": (1, 0)}
MODES = ("inference", "training", "dynamic", "few", "registered")
Function = Callable[..., Any]
_REFUSALS = (RuntimeError, NotImplementedError, ValueError, IndexError, ZeroDivisionError)  # of eager


def _compiled(function: Function, dynamic: bool) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend=fuser_backend, dynamic=dynamic, options={"random": "eager"})


def _registered(function: Function, inputs: list[torch.Tensor]) -> Function:
    """The program as one FX graph of ATen operators behind a handle."""
    try:
        graph = make_fx(lambda *args: function(*args))(*inputs)
    except RuntimeError as error:
        raise ValueError(f"no graph: {error}") from error
    return fuser.fusion_handle(fuser.register_fusion(graph))


def _forward(function: Function, inputs: list[Any]) -> list[Any]:
    """Results, then the inputs as the program leaves them."""
    args = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    with torch.no_grad():
        return [*pytree.tree_leaves(function(*args)), *args]


def _with_gradients(peer: Peer, function: Function, inputs: list[Any]) -> list[Any]:
    """Results, then the gradients of what needs them, for cotangents that are the same on every route."""
    args = [
        x.detach().clone().requires_grad_(s.grad and x.is_floating_point()) for x, s in zip(inputs, peer.inputs)
    ]  # fmt: skip
    outputs = pytree.tree_leaves(function(*args))
    roots = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    ways = [torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).view(o.shape).to(o) for o in roots]
    torch.autograd.backward(roots, ways)
    return [*outputs, *(a.grad for a in args if a.requires_grad)]


def _on_device(function: Function) -> Function:
    """The call with new tensors on the device that is tested: programs name none."""
    if test_device() == "cpu":
        return function

    def call(*args: Any) -> Any:
        with torch.device(test_device()):  # outside what is compiled: Dynamo reads the mode that it is called in
            return function(*args)

    return call


def _results(peer: Peer, function: Function, inputs: list[Any], mode: str) -> list[Any]:
    gradients = peer.grad and mode in ("training", "dynamic")
    return _with_gradients(peer, function, inputs) if gradients else _forward(function, inputs)


def _exact(peer: Peer, program: Function, inputs: list[Any], mode: str) -> list[Any]:
    """The results in float64; none for a program that reads the bits of its floats."""
    try:
        return list(widened(lambda *args: _results(peer, program, list(args), mode), inputs))
    except RuntimeError:
        return []


def is_torchs_own(peer: Peer, dtype: torch.dtype, mode: str) -> bool:
    """Whether `torch.compile` without fuser raises, too."""
    torch._dynamo.reset()
    plain = _on_device(torch.compile(peer.function, backend="aot_eager", dynamic=mode == "dynamic"))
    try:
        for n in SIZES.get(mode, (FIRST,)):
            _results(peer, plain, peer.make_inputs(n, dtype), mode)
    except Exception:
        return mode != "registered"
    return False


def registered(peer: Peer, dtype: torch.dtype) -> tuple[Function, Callable[[], Any]]:
    """The program behind a handle, and a call of it; ValueError where eager has it not."""
    inputs = peer.make_inputs(FIRST, dtype)
    program = _on_device(peer.function)
    try:
        _results(peer, program, inputs, "registered")
    except _REFUSALS as error:
        raise ValueError(f"eager: {error}") from error
    fused = _on_device(_registered(program, inputs))
    return fused, lambda: _results(peer, fused, inputs, "registered")


def check(peer: Peer, dtype: torch.dtype, mode: str, fused: Function | None = None) -> str | None:
    """None for a program that is right on a route, else what is wrong; ValueError where eager has it not.

    With "dynamic" sizes each call is made twice, and has equal bits; "few" has sizes of one and of none. `fused`: what
    `registered` gave.
    """
    program = _on_device(peer.function)
    for n in SIZES.get(mode, (FIRST,)):
        inputs = peer.make_inputs(n, dtype)
        try:
            want = _results(peer, program, inputs, mode)
        except _REFUSALS as error:
            raise ValueError(f"eager: {error}") from error
        exact = _exact(peer, program, inputs, mode)
        if fused is None:
            alone = mode == "registered"
            fused = _registered(program, inputs) if alone else _compiled(peer.function, mode == "dynamic")
            fused = _on_device(fused)
        got = _results(peer, fused, inputs, mode)
        if len(got) != len(want):
            return f"{len(got)} results instead of {len(want)}"
        for k, (a, b) in enumerate(zip(got, want)):
            found = problem(f"N={n}, result {k}", a, b, exact[k] if k < len(exact) else None)
            if found is None or exact and _is_as_exact(peer, program, fused, n, dtype, mode, k):
                continue
            if _has_size_of_meta(peer, inputs, k, a, b):
                raise ValueError(f"eager: N={n}, result {k} has other sizes than its operators' meta functions say")
            return found
        changed = _changed(peer, fused, n, dtype, mode, got) if mode == "dynamic" else None
        if changed is not None:
            return changed
    return None


def _changed(peer: Peer, fused: Function, n: int, dtype: torch.dtype, mode: str, before: list[Any]) -> str | None:
    """None, or which result differs from that of an equal call, once all that was begun has been compiled.

    Between the two there is no call with other sizes: Dynamo may have made another graph for them, and prefers the
    graph that ran last.
    """
    fuser.wait()
    again = _results(peer, fused, peer.make_inputs(n, dtype), mode)
    for k, (a, b) in enumerate(zip(before, again)):
        if isinstance(a, torch.Tensor) and not torch.equal(a.nan_to_num(), b.nan_to_num()):
            return f"N={n}, result {k} differs from that of an equal call"
    return None


def _has_size_of_meta(peer: Peer, inputs: list[Any], k: int, got: Any, want: Any) -> bool:
    """Whether result `k`, unlike eager's, has the size that torch's own shape functions compute: `pixel_unshuffle` of
    no elements leaves the sizes as they are."""
    if not (isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)) or got.shape == want.shape:
        return False
    said = pytree.tree_leaves(peer.function(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs)))
    return k < len(said) and said[k].shape == got.shape


def _is_as_exact(
    peer: Peer, program: Function, fused: Function, n: int, dtype: torch.dtype, mode: str, k: int
) -> bool:  # fmt: skip
    """Whether result `k` is within twice eager's distance from float64, over many draws of the inputs together.

    Where large terms cancel, the distance of one draw is that of a few roundings and says nothing. In 16-bit floats
    eager's roundings may cancel, too, and leave an exact 0: kernels compute in float32, and have to be as near as eager
    is in float32.
    """
    distances, single = Distances(), Distances()
    for draw in range(DRAWS):
        inputs = peer.make_inputs(n, dtype, draw)
        got, want = (_results(peer, f, inputs, mode)[k] for f in (fused, program))
        if not (isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor) and got.stride() == want.stride()):
            return False
        exact = _exact(peer, program, inputs, mode)[k]
        if not distances.add(got, want, exact):
            return False
        if dtype.itemsize == 2:
            wide = [x.float() if isinstance(x, torch.Tensor) and x.dtype is dtype else x for x in inputs]
            single.add(got, _results(peer, program, wide, mode)[k].to(got.dtype), exact)
    return distances.is_right or single.count > 0 and single.is_right


def checks_of(peer: Peer) -> list[tuple[str, str]]:
    """All dtypes and modes that a program is meant for."""
    dtypes = DTYPES if peer.halves else ("float32",)
    return [(d, m) for d in dtypes for m in MODES if m != "training" or peer.grad]


__all__ = ["DTYPES", "MODES", "PEERS", "check", "checks_of", "is_torchs_own", "registered"]
