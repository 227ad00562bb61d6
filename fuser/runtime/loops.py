"""The loops of operators on graphs: the results of torch's own loops, with a compiled graph for each step.

A step of `scan` and `map` may take rows of the results as further inputs and store there; `Form` describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import targets
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import warm

Function = Callable[..., Any]


@dataclass(frozen=True)
class Form:
    """One row of a result: its dtype, device, and for each size a number or the source of the number.

    A source is the number of a step's input and one of its dims; the dim is None if the input itself is the size.
    """

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | tuple[int, int | None], ...]


def _cond(true: Function, false: Function, forms: Any) -> Function:
    def run(predicate: Any, operands: Sequence[Any]) -> Any:
        return true(*operands) if predicate else false(*operands)

    return run


def _while_loop(condition: Function, body: Function, forms: Any) -> Function:
    def run(carried: Sequence[Any], additional: Sequence[Any], **_: Any) -> Any:
        if not condition(*carried, *additional)[0]:
            return tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in carried)
        going = True
        while going:
            carried = body(*carried, *additional)
            going = condition(*carried, *additional)[0]
        return carried

    return run


def _stacking_while_loop(condition: Function, body: Function, forms: Any) -> Function:
    def run(carried: Sequence[Any], additional: Sequence[Any], **_: Any) -> Any:
        if not condition(*carried, *additional)[0]:
            return tuple(v.unsqueeze(0).clone() if isinstance(v, torch.Tensor) else v for v in carried)
        made: list[Any] = []
        going = True
        while going:
            carried = body(*carried, *additional)
            made.append(carried)
            going = condition(*carried, *additional)[0]
        return tuple(map(torch.stack, zip(*made, strict=True)))

    return run


def _scan(body: Function, forms: Sequence[Form] | None) -> Function:
    def run(init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any]) -> Any:
        carry, outs = _steps(body, forms, tuple(init), xs, additional)
        return (*carry, *outs)

    return run


def _map(body: Function, forms: Sequence[Form] | None) -> Function:
    def run(xs: Sequence[Any], additional: Sequence[Any]) -> Any:
        if xs[0].shape[0] == 0:
            raise RuntimeError("fuser: map of no rows: its results have no sizes")
        return tuple(_steps(body, forms, (), xs, additional)[1])

    return run


def _steps(
    body: Function, forms: Sequence[Form] | None, carry: tuple[Any, ...], xs: Sequence[Any], additional: Sequence[Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """The last carry, and the stacked results of all steps, a tensor each."""
    count, carried = len(xs[0]) if xs else 0, len(carry)
    if not count:
        return carry, []
    outs: list[Any] = []
    slots: Any = ((),) * count
    if forms is not None:
        first = [*carry, *(x[0] for x in xs), *additional]
        outs = [_rows([count, *_sizes(f, first)], f.dtype, f.device) for f in forms]
        slots = zip(*(out.unbind(0) for out in outs), strict=True)
    for i, (given, rows) in enumerate(zip(zip(*(x.unbind(0) for x in xs), strict=True), slots, strict=True)):
        results = body(*carry, *given, *additional, *rows)
        carry, made = results[:carried], results[carried:]
        if not made:
            continue
        if i == 0:
            outs = [None if t is None else _rows([count, *t.shape], t.dtype, t.device) for t in made]
        for out, t in zip(outs, made, strict=True):
            if out is not None:
                out[i].copy_(t)
    return carry, outs


def _sizes(form: Form, inputs: Sequence[Any]) -> list[int]:
    return [n if isinstance(n, int) else _size(inputs[n[0]], n[1]) for n in form.sizes]


def _size(value: Any, dim: int | None) -> int:
    found: int = value if dim is None else value.shape[dim]
    return found


def _rows(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised row-major memory of this size, in warm pages if it is large."""
    strides = [1]
    for n in reversed(size[1:]):
        strides.insert(0, strides[0] * n)
    if targets.is_host(device) and size[0] * strides[0] * dtype.itemsize >= warm.WARM_MIN:
        return warm.empty_strided(size, strides, dtype)
    return torch.empty(size, dtype=dtype, device=device)


def _once(body: Function, forms: Any) -> Function:
    def run(identifier: Any, *operands: Any) -> Any:
        return body(*operands)

    return run


def _hinted(body: Function, forms: Any) -> Function:
    def run(operands: Sequence[Any], *_: Any, **__: Any) -> Any:
        return body(*operands)

    return run


LOOPS: dict[str, Callable[..., Function]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": _stacking_while_loop,
    "scan": _scan,
    "map_impl": _map,
    "invoke_subgraph": _once,
    "hints_wrapper": _hinted,
}

__all__ = ["LOOPS", "Form"]
