"""The tables of lowerings, filled by each family of operators. Read them through `registry`, which imports all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fuser import targets
from fuser.lowering.context import LoweringContext
from fuser.reasons import because

Lowering = Callable[..., Any]
_F = TypeVar("_F", bound=Lowering)
LOWERINGS: dict[str, Lowering] = {}
REFUSED: dict[str, str] = {}  # operators left to ATen on purpose, with the reason
ELSEWHERE: dict[str, Callable[[], str | None]] = {}  # why an operator is refused on targets without an order of points
ORDERED: dict[str, str] = {}  # why an operator is refused on targets that run points in order
VIEWS: set[str] = set()  # operators whose result aliases their first argument
# Operators whose result is discontinuous in a float argument, so that its last bits matter, with the numbers of these
# arguments, or `EVERY`.
DECISIVE: dict[str, tuple[int, ...]] = {}
EVERY: tuple[int, ...] = ()


def lower(*names: str, view: bool = False, decisive: tuple[int, ...] | None = None) -> Callable[[_F], _F]:
    """Register a function `(ctx, *args, **kwargs)` for operators such as "aten.add" (arguments as in the schema).

    `view` and `decisive` add the operators to `VIEWS` and `DECISIVE`.
    """

    def register(fn: _F) -> _F:
        for name in names:
            if name in LOWERINGS:
                raise ValueError(f"{name} is lowered twice")
            LOWERINGS[name] = fn
            if view:
                VIEWS.add(name)
            if decisive is not None:
                DECISIVE[name] = decisive
        return fn

    return register


def refuse(reason: str, *names: str) -> None:
    """Leave operators to ATen, with the reason that users read."""
    REFUSED.update(dict.fromkeys(names, reason))


def ask_elsewhere(reason: Callable[[], str | None], *names: str) -> None:
    """Leave operators to ATen on targets that run points in no order (`Target.ordered`), if `reason()` is not None."""
    ELSEWHERE.update(dict.fromkeys(names, reason))


def refuse_in_order(reason: str, *names: str) -> None:
    """Leave operators to ATen on targets that run points in order (`Target.ordered`)."""
    ORDERED.update(dict.fromkeys(names, reason))


def find(name: str) -> Lowering | None:
    """The lowering of "aten.add" or "aten.add.Tensor"; an overload's own entry comes first."""
    found = LOWERINGS.get(name)
    if found is None and name.count(".") == 2:
        found = LOWERINGS.get(name.rsplit(".", 1)[0])
    return found


def supports(name: str, device_type: str | None = None) -> str | None:
    """Why an operator cannot be lowered for a device, or, without `device_type`, for any; None if it can."""
    packet = name.rsplit(".", 1)[0] if name.count(".") == 2 else name
    if find(name) is None:
        return REFUSED.get(packet, because("no_lowering", f"no lowering for {packet}"))
    target = targets.known(device_type) if device_type is not None else None
    if target is None:
        return None
    if target.ordered:
        return ORDERED.get(packet)
    return ELSEWHERE[packet]() if packet in ELSEWHERE else None


__all__ = [
    "DECISIVE", "EVERY", "LOWERINGS", "ORDERED", "REFUSED", "VIEWS", "LoweringContext", "ask_elsewhere", "find",
    "lower", "refuse", "refuse_in_order", "supports",
]  # fmt: skip
