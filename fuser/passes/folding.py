"""Folds what is known before the program runs: uniform tensors, factors of one, casts and views that cancel out.

All rewrites are exact. A sum with zero stays, since -0.0 + 0.0 is 0.0; a product with zero stays, since it may be NaN.
Results of the graph keep their memory. A computed value is never replaced by an input: what the backward saves of an
input could be written in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from fuser import targets
from fuser.canonical.schemas import is_pointwise
from fuser.passes.classify import tensors_of
from fuser.passes.cleanup import reaches_output, same_static_shape
from fuser.passes.hints import same

aten = torch.ops.aten

# -- tensors of one value ----------------------------------------------------------------------------------------------
_FILLED: dict[Any, Callable[[fx.Node], Any]] = {
    aten.full.default: lambda n: n.args[1],
    aten.full_like.default: lambda n: n.args[1],
    aten.ones.default: lambda n: 1,
    aten.ones_like.default: lambda n: 1,
    aten.zeros.default: lambda n: 0,
    aten.zeros_like.default: lambda n: 0,
    aten.scalar_tensor.default: lambda n: n.args[0],
}
_MOVED = frozenset(
    getattr(aten, name)
    for name in (
        "view _unsafe_view reshape expand permute t transpose unsqueeze squeeze slice select alias detach clone"
    ).split()
)
# Operators whose result on one element is exact, and so the same on every device.
_EXACT = frozenset(
    getattr(aten, name)
    for name in (
        "add sub rsub mul div neg abs minimum maximum eq ne lt le gt ge "
        "logical_not logical_and logical_or where _to_copy"
    ).split()
) | {torch.ops.prims.convert_element_type}


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _uniform_values(graph: fx.Graph) -> dict[fx.Node, Any]:
    """The nodes whose elements all equal one number that is known now, with that number."""
    known: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        packet = _packet(node)
        if node.target in _FILLED:
            value = _FILLED[node.target](node)
            if isinstance(value, (bool, int, float)):
                known[node] = _as_dtype(value, node.meta["val"].dtype)
        elif packet in _MOVED and node.args[0] in known:
            known[node] = known[node.args[0]]
        elif packet in _EXACT and node.all_input_nodes and all(a in known for a in node.all_input_nodes):
            value = _evaluated(node, known)
            if value is not None:
                known[node] = value
    return known


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    with unset_fake_temporarily():
        return torch.full((), value, dtype=dtype, device="cpu").item()


def _evaluated(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """An operator's result for uniform tensors, as a number; None if it is not known."""

    def one(a: fx.Node) -> torch.Tensor:
        value = a.meta["val"]
        return torch.full((1,) * value.dim(), known[a], dtype=value.dtype, device="cpu")

    try:
        with unset_fake_temporarily():
            args, kwargs = fx.map_arg((node.args, {**node.kwargs}), one)
            kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory", "memory_format")}
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            same = result.dtype is node.meta["val"].dtype
            return result.flatten()[0].item() if same else None
    except (RuntimeError, TypeError, IndexError, AttributeError):
        return None


def _factor_of_one(node: fx.Node, known: dict[fx.Node, Any]) -> fx.Node | None:
    """The argument that a call returns unchanged: x of x * 1, 1 * x, x / 1, x - 0, or a branch of a decided `where`."""
    packet, args = _packet(node), node.args
    if node.kwargs or len(args) < 2:
        return None

    def is_number(a: Any, number: int) -> bool:
        value = known.get(a) if isinstance(a, fx.Node) else a
        return isinstance(value, (bool, int, float)) and value == number

    found: Any = None
    if packet is aten.mul and is_number(args[1], 1):
        found = args[0]
    elif packet is aten.mul and is_number(args[0], 1):
        found = args[1]
    elif packet is aten.div and len(args) == 2 and is_number(args[1], 1):
        found = args[0]
    elif packet is aten.sub and is_number(args[1], 0) and str(known.get(args[1], args[1])) != "-0.0":  # type: ignore[arg-type]
        found = args[0]
    elif packet is aten.where and len(args) == 3 and args[0] in known:
        found = args[1] if known[args[0]] else args[2]  # type: ignore[index]
    return found if isinstance(found, fx.Node) else None


def fold_uniform(module: fx.GraphModule) -> int:
    """Values computed from uniform tensors alone become `full`; factors of one and decided selections are dropped."""
    graph = module.graph
    known = _uniform_values(graph)
    kept = reaches_output(graph)
    changed = 0
    for node in list(graph.nodes):
        if node in kept or node.op != "call_function" or not node.users:
            continue
        if node in known:
            changed += _fill(graph, node, known[node])
            continue
        source = _factor_of_one(node, known)
        if source is not None and source.op != "placeholder" and _is_like(node, source):
            node.replace_all_uses_with(source)
            changed += 1
    return changed


def _is_like(node: fx.Node, source: fx.Node) -> bool:
    return same_static_shape(node.meta.get("val"), source.meta.get("val"))


def _fill(graph: fx.Graph, node: fx.Node, number: Any) -> int:
    """Replace a uniform node by a `full`, unless it is a creation or a view already. Returns 1 if it was replaced."""
    value = node.meta["val"]
    if node.target in _FILLED or (_packet(node) in _MOVED and _packet(node) is not aten.clone):
        return 0
    if not all(isinstance(n, int) for n in value.shape) or not value.is_contiguous():
        return 0
    with graph.inserting_before(node):
        kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        new = graph.call_function(aten.full.default, (list(value.shape), number), kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    return 1


def numbers_on_device(module: fx.GraphModule) -> int:
    """`torch.tensor(0.5)` inside a function, a CPU tensor, becomes a `full` on the device of the tensors beside it."""
    graph, changed = module.graph, 0
    for node in list(graph.nodes):
        number = _lifted_number(module, node) if node.target is aten.lift_fresh_copy.default else None
        made: dict[torch.device, fx.Node] = {}
        for user in list(node.users) if number is not None else ():
            device = _device_of_elements(user)
            if device is None or targets.is_host(device):
                continue
            if device not in made:
                value = node.meta["val"]
                with graph.inserting_before(node):
                    kwargs = {"dtype": value.dtype, "device": device, "pin_memory": False}
                    made[device] = graph.call_function(aten.full.default, ([], number), kwargs)
                with value.fake_mode:
                    filled = torch.empty((), dtype=value.dtype, device=device)
                made[device].meta = {**node.meta, "val": filled}
            user.replace_input_with(node, made[device])
            changed += 1
    return changed


def _lifted_number(module: fx.GraphModule, node: fx.Node) -> Any:
    """The number from which the graph makes a new 0-dim tensor in each call; None for anything else."""
    source: Any = node.args[0]
    if source.op != "get_attr" or not isinstance(getattr(node.meta.get("val"), "fake_mode", None), FakeTensorMode):
        return None
    held = getattr(module, source.target, None)
    if type(held) is not torch.Tensor or held.dim() or not targets.is_host(held.device) or held.dtype.is_complex:
        return None
    with unset_fake_temporarily():
        return held.item()


def _device_of_elements(node: fx.Node) -> torch.device | None:
    """The device on which an elementwise operator runs; None for other nodes."""
    value = node.meta.get("val")
    return value.device if is_pointwise(node.target) and isinstance(value, torch.Tensor) else None


# -- casts -------------------------------------------------------------------------------------------------------------
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _cast(node: Any) -> tuple[fx.Node, torch.dtype] | None:
    """The source and the dtype of a node that only casts; None for other nodes."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        found = node.kwargs["dtype"]
    elif node.target is torch.ops.prims.convert_element_type.default and len(node.args) == 2:
        found = node.args[1]
    else:
        return None
    return (node.args[0], found) if isinstance(found, torch.dtype) else None


def _is_lossless(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether the second dtype represents all values of the first exactly."""
    for family in (_FLOATS, _INTEGERS):
        if before in family and after in family:
            return torch.promote_types(before, after) is after
    return before is torch.bool and after in _FLOATS


def merge_casts(module: fx.GraphModule) -> int:
    """A cast of a widened tensor reads the narrow tensor; it is dropped if it restores the same dtype."""
    graph = module.graph
    kept = reaches_output(graph)
    changed = 0
    for node in list(graph.nodes):
        outer = _cast(node)
        inner = _cast(outer[0]) if outer is not None else None
        if outer is None or inner is None:
            continue
        source, dtype = inner[0], outer[1]
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor) or not _is_lossless(value.dtype, inner[1]):
            continue
        if dtype is not value.dtype:
            node.replace_input_with(outer[0], source)
            changed += 1
        elif node not in kept and source.op != "placeholder" and _is_like(node, source):
            node.replace_all_uses_with(source)
            changed += 1
    return changed


# -- views: not `reshape`, which may copy ------------------------------------------------------------------------------
_PLAIN_VIEWS = frozenset(
    getattr(aten, name) for name in "view _unsafe_view permute t transpose unsqueeze squeeze expand alias".split()
)
_SIZED = (aten.view.default, aten._unsafe_view.default)


def merge_views(module: fx.GraphModule) -> int:
    """Views that restore their source are dropped; a view of a view, or a permuted permutation, becomes one view."""
    graph = module.graph
    kept = reaches_output(graph)
    changed = 0
    for node in list(graph.nodes):
        if _packet(node) not in _PLAIN_VIEWS or node in kept or not node.users:
            continue
        same = _ancestor_like(node)
        if same is not None:
            node.replace_all_uses_with(same)
            changed += 1
        elif _shorten(node):
            changed += 1
    return changed


def _ancestor_like(node: fx.Node) -> fx.Node | None:
    """The earliest tensor in a chain of views that the node equals in shape and strides; None if there is none."""
    value, found, at = node.meta.get("val"), None, node
    while _packet(at) in _PLAIN_VIEWS and isinstance(at.args[0], fx.Node):
        at = at.args[0]
        other = at.meta.get("val")
        if at is not node.args[0] and same_static_shape(value, other) and at.op != "placeholder":
            found = at
    return found


def _shorten(node: fx.Node) -> bool:
    """Make a view of a view read the inner view's source; True if that was possible."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or not inner.args or not isinstance(inner.args[0], fx.Node):
        return False
    base = inner.args[0]
    if node.target in _SIZED and inner.target in _SIZED:
        candidate = (base, *node.args[1:])
    elif node.target is aten.permute.default and inner.target is aten.permute.default:
        rank = len(inner.args[1])  # type: ignore[arg-type]
        first, second = ([d % rank for d in n.args[1]] for n in (inner, node))  # type: ignore[operator, union-attr]
        candidate = (base, [first[d] for d in second])  # type: ignore[index]
    else:
        return False
    if not all(isinstance(n, int) for t in tensors_of(node.meta.get("val")) for n in t.shape):
        return False
    try:
        value = node.target(base.meta["val"], *candidate[1:])
    except (RuntimeError, ValueError):  # the strides do not allow it in one step
        return False
    if not same_static_shape(value, node.meta["val"]):
        return False
    node.args = candidate
    return True


# -- pieces ------------------------------------------------------------------------------------------------------------
def _piece(node: Any) -> tuple[fx.Node, int, int, int] | None:
    """(tensor, dim, start, end) of a slice of a tensor of known size; None for other nodes."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node.target is aten.slice.Tensor and not node.kwargs and len(node.args) in (4, 5):
        source, dim, start, end, *step = node.args
        size = source.meta["val"].shape[dim]  # type: ignore[union-attr]
        numbers = (size, start, end, *step)
        if all(isinstance(n, int) for n in numbers) and step in ([], [1]):
            low, high, _ = slice(start, end).indices(size)
            return source, dim % source.meta["val"].dim(), low, high  # type: ignore[union-attr, return-value]
    return None


def join_pieces(module: fx.GraphModule) -> int:
    """All pieces of a tensor concatenated in order become the tensor; a slice of a `cat` becomes its argument there."""
    graph = module.graph
    kept = reaches_output(graph)
    changed = 0
    for node in list(graph.nodes):
        if node in kept or not node.users:
            continue
        found = _whole(node) if node.target is aten.cat.default else _part(node)
        if found is not None and found.op != "placeholder" and _is_like(node, found):
            node.replace_all_uses_with(found)
            changed += 1
    return changed


def _whole(cat: fx.Node) -> fx.Node | None:
    """The tensor whose pieces, all of them in order, are the arguments of a `cat`; None if there is none."""
    parts: Any = cat.args[0]
    dim = cat.args[1] if len(cat.args) > 1 else 0
    pieces = [_piece(p) for p in parts]
    if not pieces or not isinstance(dim, int):
        return None
    at = 0
    for piece in pieces:
        if piece is None or piece[0] is not pieces[0][0] or piece[2] != at:  # type: ignore[index]
            return None
        if piece[1] != dim % cat.meta["val"].dim():
            return None
        at = piece[3]
    source: fx.Node = pieces[0][0]  # type: ignore[index]
    return source if same(at, source.meta["val"].shape[dim]) else None


def _part(node: fx.Node) -> fx.Node | None:
    """The argument of a `cat` that a slice of the result selects exactly; None if there is none."""
    piece = _piece(node)
    if piece is None or piece[0].target is not aten.cat.default:
        return None
    cat, dim, start, end = piece
    parts: Any = cat.args[0]
    along = cat.args[1] if len(cat.args) > 1 else 0
    if along % cat.meta["val"].dim() != dim:
        return None
    at = 0
    for part in parts:
        size = part.meta["val"].shape[dim] if part.meta["val"].dim() > dim else None
        if not isinstance(size, int):
            return None
        if (at, at + size) == (start, end):
            return part  # type: ignore[no-any-return]
        at += size
    return None


