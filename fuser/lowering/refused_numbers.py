"""Numbers that eager refuses: a fill that the dtype cannot hold, a divisor that wraps to 0, a bool as a factor.

Eager's kernels check them, its shape functions do not. So a kernel is called, on tensors of two elements in each dim,
or of one: fills of one element check nothing, and other operators accept only an index of one element. The numbers are
refused if such a call raises, and does not raise with 1 instead of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.canonical.schemas import Param, Signature, signature, signatures
from fuser.errors import Unsupported
from fuser.lowering.without_dynamo import without_dynamo
from fuser.reasons import because

MOST = 127  # any dtype represents the numbers from 0 to this one
SIZED_BY_NUMBERS = frozenset(("aten.arange", "aten.range"))


def check_numbers(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Unsupported, with eager's message, if eager refuses the numbers in a call on meta tensors like these."""
    if not any(map(_is_unusual, (*args, *kwargs.values()))) or op in SIZED_BY_NUMBERS or not op.startswith("aten."):
        return
    target: Any = torch.ops
    for part in op.split("."):
        target = getattr(target, part)
    own = _signature_of(target, args, kwargs)
    if own is None or own.random:
        return
    params = [*zip(own.params, args), *((p, kwargs[p.name]) for p in own.params if p.name in kwargs)]
    unusual = {p.name for p, v in params if p.element in ("number", "float") and _is_unusual(v)}

    def run(size: int, harmless: bool = False) -> Exception | None:
        values = [1 if harmless and p.name in unusual else _small(p.name, v, size) for p, v in params]
        named = {p.name: v for (p, _), v in zip(params[len(args) :], values[len(args) :])}
        try:
            with torch.no_grad(), without_dynamo():
                target(*values[: len(args)], **named)
        except Exception as error:
            return error
        return None

    for size in (2, 1) if unusual else ():
        error = run(size)
        if error is not None and run(size, harmless=True) is None:
            says = str(error).splitlines()[0] if str(error) else ""
            raise Unsupported(because("eager_raises", f"eager raises {type(error).__name__}: {says}"), op)


def _is_unusual(value: Any) -> bool:
    return type(value) is bool or (type(value) in (int, float) and not 0 <= value <= MOST)


def _signature_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature | None:
    """The overload that has tensors at these arguments; None if there is none."""
    found = (signature(target),) if isinstance(target, torch._ops.OpOverload) else signatures(target)

    def fits(s: Signature) -> bool:
        names = {p.name: p for p in s.params}
        if s.mutable or len(args) > s.n_positional or not names.keys() >= kwargs.keys():
            return False
        pairs = [*zip(s.params, args), *((names[name], v) for name, v in kwargs.items())]
        return all((p.element == "Tensor") == isinstance(v, torch.Tensor) for p, v in pairs if _is_plain(p, v))

    return next(filter(fits, found), None)


def _is_plain(p: Param, value: Any) -> bool:
    return value is not None and not p.is_list


def _small(name: str, value: Any, size: int) -> Any:
    """A tensor of `size` in each dim for a meta tensor, `size` for sizes of a new tensor, None for a device."""
    if isinstance(value, torch.Tensor):
        one = value.dtype.is_floating_point or value.dtype is torch.bool
        return torch.full([size] * value.dim(), one).to(value.dtype)
    if isinstance(value, (tuple, list)):
        return [size] * len(value) if name == "size" else [_small("", v, size) for v in value]
    return None if isinstance(value, torch.device) else value


__all__ = ["check_numbers"]
