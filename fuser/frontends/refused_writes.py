"""Writes that eager refuses: for their dtypes, such as a float into an integer in place, or of inference tensors.

Functionalisation casts to the written dtype, and torch's shape functions for fake tensors do not all check it. So eager
is asked, with tensors of one element.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fuser.frontends.overlaps import name_of
from fuser.passes.calls import value_of, writes
from fuser.passes.classify import all_nodes
from fuser.reasons import because

_KINDS = (bool, int, float, complex)
_NOT_CAST = "can't be cast"
_CASTING = frozenset(("copy_", "setitem"))  # no dtype is refused; of complex numbers they warn once in a process


def refused_write(writers: Iterable[fx.Node]) -> str | None:
    """The reason why eager raises at one of the calls that write; None if none is refused for its dtypes."""
    asked: set[str] = set()
    return next(filter(None, (_why_refused(node, asked) for node in writers)), None)


def writes_inference_tensors(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether Dynamo's graph writes and an input was made in inference mode. Later calls have such inputs, too."""
    made = any(isinstance(x, torch.Tensor) and x.is_inference() for x in example_inputs)
    return made and any(map(writes, all_nodes(gm)))


def in_inference_mode(function: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """`function` where inference mode is on. Elsewhere eager runs, which raises if an inference tensor is written.

    Dynamo switches the mode off while a backend compiles.
    """

    def call(*args: Any) -> Any:
        return (function if torch.is_inference_mode_enabled() else eager)(*args)

    return call


def _why_refused(node: fx.Node, asked: set[str]) -> str | None:
    """`asked`: calls that are not refused. An equal call is not made again, such as the counter of each batch norm."""
    tensors = [v for v in map(value_of, node.all_input_nodes) if v is not None]
    numbers = [a for a in (*node.args, *node.kwargs.values()) if type(a) in _KINDS]
    if name_of(node) in _CASTING or not tensors or not _are_plain(tensors) or not _may_be_refused(tensors, numbers):
        return None
    form = str((node.target, [(t.dtype, t.dim()) for t in tensors], numbers))
    if form in asked:
        return None
    asked.add(form)
    values = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("example_value"), (node.args, dict(node.kwargs)))
    error = _error(node, values, None)
    if error is None or _NOT_CAST not in str(error) and _error(node, values, tensors[0].dtype) is not None:
        return None
    says = (str(error).strip() or ".").splitlines()[0]
    return because("eager_raises", f"{name_of(node)} raises {type(error).__name__}: {says}")


def _are_plain(tensors: list[torch.Tensor]) -> bool:
    fakes = (torch._subclasses.FakeTensor, torch.Tensor, torch.nn.Parameter)
    return all(type(t) in fakes and t.layout is torch.strided and not t.is_quantized for t in tensors)


def _may_be_refused(tensors: list[torch.Tensor], numbers: list[Any]) -> bool:
    """Whether not all tensors have one dtype, of floats or complex numbers, that a result with all numbers has, too."""
    dtype = tensors[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex) or any(t.dtype != dtype for t in tensors):
        return True
    return not dtype.is_complex and any(type(v) is complex for v in numbers)


def _error(node: fx.Node, values: Any, dtype: torch.dtype | None) -> Exception | None:
    """What the node's call raises with tensors of one element; with `dtype`, if all operands are of this one."""

    def small(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inner = dtype or value.dtype
            one = inner.is_floating_point or inner.is_complex  # integers may be indices
            return torch.full([1] * value.dim(), int(one), dtype=inner)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}[type(value)]
        if dtype is not None and type(value) in _KINDS:
            return True if dtype is torch.bool else value if type(value) in (bool, int) else 1
        return value

    args, kwargs = pytree.tree_map(small, values)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if node.op == "call_method":
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        return error
    return None
