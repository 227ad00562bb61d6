"""Stand-ins for arguments, with which kernels are compiled without a call's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser import targets
from fuser.errors import Unsupported
from fuser.reasons import because
from fuser.trials import PLAIN_TENSORS


def outline(a: Any) -> Any:
    """All that a kernel for `a` depends on, without its memory."""
    return (a.shape, a.stride(), a.dtype, a.device) if isinstance(a, torch.Tensor) else a


def stand_in(found: Any) -> Any:
    """A tensor with an outline. On the CPU it is a real one that is never written: fake ones cost an import."""
    if not isinstance(found, tuple):
        return found
    size, stride, dtype, device = found
    if targets.is_host(device):
        return torch.empty_strided(size, stride, dtype=dtype)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


def as_json(a: Any) -> Any:
    """An argument's outline for another process. Unsupported unless it is a CPU tensor or a number."""
    if isinstance(a, torch.Tensor) and targets.is_host(a.device):
        return {"tensor": [str(a.dtype).removeprefix("torch."), list(a.shape), list(a.stride())]}
    if type(a) not in (bool, int, float):
        raise Unsupported(because("data_size", "an argument that has no outline"))
    from fuser.canonical.portable import encode_value  # only for other processes

    return encode_value(a)


def from_json(kept: Any) -> Any:
    """The stand-in for an argument whose outline `as_json` wrote."""
    from fuser.canonical.portable import decode_value  # only for other processes

    if not isinstance(kept, dict) or "tensor" not in kept:
        return decode_value(kept)
    dtype, size, stride = kept["tensor"]
    return stand_in((size, stride, decode_value({"dtype": dtype}), torch.device("cpu")))


def on(device_type: str, example: Any) -> Any:
    """A meta tensor as a fake tensor on a device; other values unchanged."""
    if not isinstance(example, torch.Tensor):
        return example
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=device_type)


def all_concrete(like: Sequence[Any]) -> tuple[Any, ...]:
    """`concrete` for each; one mode, which takes a millisecond to make, for all tensors."""
    mode = None
    if any(isinstance(e, torch.Tensor) and type(e) not in PLAIN_TENSORS for e in like):
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode()
    return tuple(concrete(e, mode) for e in like)


def concrete(example: Any, mode: Any = None) -> Any:
    """A symbolic number or a fake tensor as a real one with its traced sizes; no memory is written.

    The tensor is one of `mode`, by default a new one: kernels are made in threads, and none may share a mode.
    """
    if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if example.node.hint is None:
            raise Unsupported(because("data_size", "a size among the inputs depends on data and is not known ahead"))
        return example.node.hint
    if not isinstance(example, torch.Tensor) or type(example) in PLAIN_TENSORS:
        return example
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    size = [concrete(n) for n in example.shape]
    stride = [concrete(n) for n in example.stride()]
    with unset_fake_temporarily(), FakeTensorMode() if mode is None else mode:
        return torch.empty_strided(size, stride, dtype=example.dtype, device=example.device)


def described(a: Any) -> Any:
    """(dtype, device type, size, stride) of a tensor; a number unchanged."""
    if not isinstance(a, torch.Tensor):
        return a
    return a.dtype, a.device.type, tuple(map(concrete, a.shape)), tuple(map(concrete, a.stride()))
