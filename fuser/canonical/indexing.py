"""`x[...]` as ATen calls: select, slice, unsqueeze and index, in the order in which torch applies them."""

from __future__ import annotations

from typing import Any

from fuser.canonical.builder import Builder, Untranslatable
from fuser.canonical.graph import Ref
from fuser.canonical.schemas import Kind


def translate_getitem(b: Builder, base: Any, index: Any) -> Any:
    """`base[index]` for a tensor, one of several results, sizes, or a constant tuple."""
    kind = b.kind(base)
    if isinstance(base, tuple) and isinstance(index, (int, slice)):
        return base[index]
    if kind is Kind.TENSORS and isinstance(index, int):
        return b.add("getitem", (base, index), (), Kind.TENSOR)
    if kind is Kind.SIZES:
        return _sizes_item(b, base, index)
    if kind not in (Kind.TENSOR, Kind.INPUT):
        raise Untranslatable("an item of a value of unknown kind")
    items = list(index) if isinstance(index, (tuple, list)) and not isinstance(index, list) else [index]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or any(isinstance(i, (bool, list, tuple, str, float)) for i in items):
        raise Untranslatable("an index that is not made of numbers, slices, None, ... and tensors")
    out = _indexed(b, _with_dims_for(b, base, items), items, dots)
    return b.aten("alias", base) if out is base else out  # x[:] shares x's memory, but is another tensor


def _with_dims_for(b: Builder, base: Any, items: list[Any]) -> Any:
    """`base`, checked to have a dim for each item: a `:` needs one but changes nothing; other items check their own."""
    taking = [item for item in items if item is not None and item is not Ellipsis]
    last = taking if Ellipsis in items else taking[-1:]
    if not any(isinstance(item, slice) and item == slice(None) for item in last):
        return base
    return b.aten("slice", base, len(taking) - 1, None, None, 1)


def _indexed(b: Builder, base: Any, items: list[Any], dots: list[int]) -> Any:
    if not dots:
        return _from_the_left(b, base, items)
    if any(_is_tensor(b, i) for i in items):
        raise Untranslatable("an index with both ... and a tensor")
    base = _from_the_left(b, base, items[: dots[0]])
    return _from_the_right(b, base, items[dots[0] + 1 :])


def _is_tensor(b: Builder, item: Any) -> bool:
    return isinstance(item, Ref) and b.kind(item) is not Kind.NUMBER


def _sizes_item(b: Builder, base: Ref, index: Any) -> Any:
    made_by = b.nodes[base.index]
    if isinstance(index, int) and made_by.op in ("aten.sym_size", "aten.sym_stride"):
        return b.aten(made_by.op.removeprefix("aten."), made_by.args[0], index)
    if isinstance(index, slice):
        return b.add("sizes.slice", (base, index), (), Kind.SIZES)
    return b.add("sizes.item", (base, index), (), Kind.NUMBER)


def _from_the_left(b: Builder, x: Any, items: list[Any]) -> Any:
    tensors: list[Any] = []
    dim = 0
    for item in items:
        if item is None:
            x = b.aten("unsqueeze", x, dim)
        elif isinstance(item, slice):
            x = _slice(b, x, dim, item)
        elif _is_tensor(b, item):
            tensors += [None] * (dim - len(tensors)) + [item]
        else:
            x = b.aten("select", x, dim, item)
            continue
        dim += 1
    return b.aten("index", x, tuple(tensors)) if tensors else x


def _from_the_right(b: Builder, x: Any, items: list[Any]) -> Any:
    dim = -1
    for item in reversed(items):
        if item is None:
            x = b.aten("unsqueeze", x, dim)
        elif isinstance(item, slice):
            x = _slice(b, x, dim, item)
        else:
            x = b.aten("select", x, dim, item)
            continue
        dim -= 1
    return x


def _slice(b: Builder, x: Any, dim: int, item: slice) -> Any:
    if item == slice(None):
        return x
    start, stop, step = item.start, item.stop, item.step
    return b.aten("slice", x, dim, start, stop, 1 if step is None else step)
