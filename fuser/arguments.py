"""Classes of arguments, by which kernels are stored, and the reasons why a kernel may not run on arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fuser import targets
from fuser.canonical import CanonicalGraph, text_of
from fuser.kernel_spec import ArgSpec, TensorSpec
from fuser.kernel_store import KernelEntry
from fuser.reasons import because, told
from fuser.trials import PLAIN_TENSORS

_NUMBERS = (bool, int, float)


def arg_spec(args: Sequence[Any], settings: tuple[tuple[str, Any], ...]) -> ArgSpec:
    """The class of `args`: it has no sizes, but which sizes are equal, 0 or 1.

    A size is 0, 1 or "s<n>", where n numbers the distinct sizes in order of appearance over all arguments. A stride is
    0, 1, "d<k>" if it is size times stride of dim k (so a contiguous tensor is d1 d2 … 1), "x" if it has no meaning
    (the size is at most 1), else "t". Numbers are "int", "float" or "bool".
    """
    seen: dict[int, str] = {}
    return ArgSpec(tuple(_one_arg(a, seen) for a in args), settings)


def _one_arg(a: Any, seen: dict[int, str]) -> Any:
    if not isinstance(a, torch.Tensor):
        return type(a).__name__
    sizes, strides = tuple(a.shape), a.stride()
    tokens = tuple(s if s <= 1 else seen.setdefault(s, f"s{len(seen)}") for s in sizes)
    return TensorSpec(a.dtype, a.device.type, tokens, _stride_tokens(sizes, strides))


def _stride_tokens(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
    spans = {size * stride: k for k, (size, stride) in reversed(list(enumerate(zip(sizes, strides)))) if size > 1}
    out: list[Any] = []
    for size, stride in zip(sizes, strides):
        if size <= 1:
            out.append("x")
        elif stride <= 1:
            out.append(stride)
        else:
            out.append(f"d{spans[stride]}" if stride in spans else "t")
    return tuple(out)


def home_of(graph: CanonicalGraph) -> str | None:
    """The device type on which a graph without tensor inputs creates its tensors; None if some call does not name it.

    A call without a device follows torch's default device, which may change between calls.
    """
    homes = set()
    for node in graph.calls:
        if not any(True for _ in node.refs()) and not node.op.startswith(("host.", "sizes.")):
            named = dict(node.kwargs).get("device")
            homes.add(named.type if isinstance(named, torch.device) else "")
    return targets.HOST if homes == {targets.HOST} else None


def why_unfit(args: Sequence[Any], home: str | None = None) -> str | None:
    """None if a kernel may run on these arguments, else the reason why ATen must. `home`: see `home_of`."""
    grad = torch.is_grad_enabled()
    for i, a in enumerate(args):
        if not isinstance(a, torch.Tensor):
            if type(a) not in _NUMBERS:
                return because("python", f"input {i} is a {type(a).__name__}")
            if type(a) is int and not -(1 << 63) <= a < 1 << 63:
                return because("python", f"input {i} is an integer of more than 64 bits")
            continue
        reason = _why_unfit_tensor(a, grad)
        if reason is not None:
            return told(reason, f"input {i} {reason}")
    return why_apart(args, home)


def why_apart(args: Sequence[Any], home: str | None = None) -> str | None:
    """None if all tensors are on one device, else the reason why no kernel can read them. `home`: see `home_of`."""
    devices = list(dict.fromkeys(str(a.device) for a in args if isinstance(a, torch.Tensor)))
    if len(devices) > 1:
        return because("devices", f"inputs are on {devices[0]} and on {devices[1]}")
    return None if devices or home is not None else NO_TENSOR


def _why_unfit_tensor(a: torch.Tensor, grad: bool) -> str | None:
    if type(a) not in PLAIN_TENSORS:
        return because("subclass", f"is of the tensor subclass {type(a).__name__}")
    if torch._C._functorch.is_functorch_wrapped_tensor(a):
        return because("subclass", "is inside a transform of torch.func")
    if a.layout is not torch.strided:
        return because("layout", f"has the layout {a.layout}")
    if grad and a.requires_grad:
        return because("gradient", "requires a gradient, which kernels do not compute")
    if a.is_quantized or a.is_nested:
        return because("layout", "is quantized or nested")
    return because("layout", "is lazily conjugated or negated") if a.is_conj() or a.is_neg() else None


NO_TENSOR = because("no_tensor", "there is no tensor among the inputs")


# NumPy's values go to ATen unchanged: their arithmetic has other dtype rules than Python's numbers.
_NUMPY = (np.generic, np.ndarray)
_ACCEPTABLE = (torch.Tensor, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool, *_NUMPY)


def is_acceptable(a: Any) -> bool:
    """Whether a call may have `a` as an argument, at least on ATen."""
    return isinstance(a, _ACCEPTABLE)


def broadcasts(shapes: Sequence[torch.Size]) -> bool:
    """Whether `shapes` broadcast together."""
    for dim in range(1, max(map(len, shapes), default=0) + 1):
        sizes = {s[-dim] for s in shapes if len(s) >= dim} - {1}
        if len(sizes) > 1:
            return False
    return True


def explain_entry(entry: KernelEntry) -> str:
    """One line: the class of arguments, and its kernels or the reason why there are none."""
    args = ", ".join(_text(a) for a in entry.spec.args)
    names = ", ".join(k.name for k in entry.kernels)
    return f"({args}): {names or 'no kernel'}{f', because {entry.reason}' if entry.reason else ''}"


def _text(a: Any) -> str:
    if not isinstance(a, TensorSpec):
        return str(a)
    sizes = ", ".join(map(str, a.sizes))
    strides = ", ".join(map(str, a.strides))
    return f"{text_of(a.dtype).removeprefix('torch.')} on {a.device_type} [{sizes}] strides [{strides}]"
