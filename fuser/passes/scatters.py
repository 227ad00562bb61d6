"""Makes scatters into inputs in place: a chain of k elements into n costs the scatters, and no copy of n elements.

AOTAutograd makes `x.index_add_(…)` a functional `index_add` whose result is copied back into `x` at the end, and a
write into a slice of `x` a `slice_scatter`. If all readers of an older content can run before the next write, the chain
writes `x` itself on ATen, as in eager. So does any operator with an in-place variant if `x` has gaps in memory: kernels
do not write such inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser.canonical.mutation import in_place_twin
from fuser.kernel_spec import memory_order
from fuser.passes.classify import MARK, is_view, is_write_back, op_name, views_first
from fuser.passes.cleanup import reaches_output
from fuser.passes.hints import numel_hint

aten = torch.ops.aten
# Views that exist for any strides of their argument, with the same elements.
_OF_ANY_STRIDES = frozenset(
    "aten.alias aten.detach aten.diagonal aten.expand aten.permute aten.select aten.slice aten.split "
    "aten.split_with_sizes aten.squeeze aten.t aten.transpose aten.unbind aten.unfold aten.unsqueeze".split()
)
SMALL = 16384  # tensors of at most so many elements, written in part, are recomputed whole in a kernel
_SCATTERS = (
    "index_add index_copy index_fill index_put _index_put_impl index_reduce scatter scatter_add scatter_reduce "
    "masked_scatter put"
)


def write_slice(
    x: torch.Tensor, source: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> torch.Tensor:
    """Write `source` into a slice of `x`; returns `x`."""
    aten.slice.Tensor(x, dim, start, end, step).copy_(source)
    return x


def write_selected(x: torch.Tensor, source: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    """Write `source` at one index along a dim of `x`; returns `x`."""
    aten.select.int(x, dim, index).copy_(source)
    return x


PARTS = {aten.slice_scatter.default: write_slice, aten.select_scatter.default: write_selected}
IN_PLACE = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for name in _SCATTERS.split()
    for overload in getattr(aten, name).overloads()
    if overload in getattr(aten, f"{name}_").overloads()
} | PARTS


def scatters_in_place(module: fx.GraphModule) -> int:
    """Chains of scatters that begin with an input and compute its new content write the input in place."""
    graph = module.graph
    position = {n: i for i, n in enumerate(graph.nodes)}
    returned = reaches_output(graph)
    changed = 0
    for copy in [n for n in graph.nodes if is_write_back(n) and len(n.args) == 2 and not n.kwargs]:
        target, value = copy.args
        assert isinstance(target, fx.Node)
        chain = _chain(target, _before_strides(target, value))
        if not chain or not _may_write(chain, target, {copy, value} - {chain[-1]}, position, returned):
            continue
        for node in chain:
            node.target = _in_place(node, target)
            node.meta[MARK] = True
        graph.erase_node(copy)
        if value is not chain[-1]:
            graph.erase_node(value)
        changed += 1
    return changed


def _before_strides(target: fx.Node, value: Any) -> Any:
    """The scatter's result that `value` copies into the strides of `target`, if nothing else reads it; else `value`."""
    if not isinstance(value, fx.Node) or value.target is not aten.copy.default or len(value.users) != 1:
        return value
    if len(value.args) != 2 or value.args[0] is not target or not isinstance(made := value.args[1], fx.Node):
        return value
    return made if _alike(made, target) and _in_place(made, target) is not None else value


def _chain(target: fx.Node, value: object) -> list[fx.Node]:
    """The scatters from the input `target` to `value`, in order; empty if other operators are in between."""
    found: list[fx.Node] = []
    while isinstance(value, fx.Node) and value.args and _in_place(value, target) is not None:
        found.append(value)
        value = value.args[0]
    ways = {node.target in IN_PLACE for node in found}
    return found[::-1] if value is target and (ways == {True} or len(found) == 1) else []


def _in_place(node: fx.Node, target: fx.Node) -> Any:
    """The in-place operator on ATen for a call that writes the input `target`; None to leave the call to a kernel."""
    if node.target in IN_PLACE:
        return IN_PLACE[node.target]
    twin = in_place_twin(node.target) if _has_gaps(target.meta.get("val")) else None
    return None if twin is None or torch.Tag.nondeterministic_seeded in twin.tags else twin


def _has_gaps(x: Any) -> bool:
    """Whether a tensor has static strides, and gaps in memory."""
    if not isinstance(x, torch.Tensor) or not all(type(n) is int for n in (*x.shape, *x.stride())):
        return False
    return x.numel() > 0 and memory_order(x.shape, x.stride()) is None


def _may_write(
    chain: list[fx.Node], target: fx.Node, copies: set[Any], position: dict[fx.Node, int], returned: set[fx.Node]
) -> bool:  # fmt: skip
    """Whether all readers of an older content run before the next write, and no write reads its own target otherwise.

    `copies` are the nodes after the chain that copy its result.
    """
    versions = [target, *chain]
    views = [_views(version) for version in versions]
    aliases = {*versions, *(v for found in views for v in found)}
    if not aliases.isdisjoint(returned - {target, *views[0]}):  # the input is returned with its last content
        return False
    if not all(_can_have_strides_of(target, node, found) for node, found in zip(chain, views[1:])):
        return False
    for node, version, found in zip(chain, versions, views):
        if not _alike(node, target) or (node.target in PARTS and not _is_small_part(node)):
            return False
        if _count(node, version) != 1 or any(a in aliases for a in node.all_input_nodes if a is not version):
            return False
        readers = {u for v in (version, *found) for u in v.users} - found - {node} - copies
        if any(position[u] > position[node] for u in readers if u.op != "output"):
            return False
    return True


def _can_have_strides_of(target: fx.Node, version: fx.Node, views: set[fx.Node]) -> bool:
    """Whether the readers of `version` and of its views read the same elements if it has the strides of `target`."""
    if list(map(str, target.meta["val"].stride())) == list(map(str, version.meta["val"].stride())):
        return True
    readers = {u for v in (version, *views) for u in v.users}
    return all(r.op == "output" or _reads_any_strides(r) for r in readers)


def _reads_any_strides(node: fx.Node) -> bool:
    """Whether a call finds the elements of its arguments by their indices, not by their offsets in memory."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return node.target in PARTS.values()
    if is_view(node.target):
        return op_name(node.target) in _OF_ANY_STRIDES
    return node.target is not aten.as_strided_scatter.default


def _count(node: fx.Node, argument: fx.Node) -> int:
    """How often a node has `argument` among its arguments, in lists too."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return sum(a is argument for a in found)


def _views(node: fx.Node) -> set[fx.Node]:
    """All views of a node, and views of those."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user not in found and views_first(user):
                found.add(user)
                stack.append(user)
    return found


def _alike(node: fx.Node, target: fx.Node) -> bool:
    """Whether two strided tensors have equal shapes, dtypes and devices, by their text. Adds no guard."""
    a, b = node.meta.get("val"), target.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or b.layout is not torch.strided:
        return False
    return a.dtype == b.dtype and a.device == b.device and list(map(str, a.shape)) == list(map(str, b.shape))


def _is_small_part(node: fx.Node) -> bool:
    source = node.args[1]
    assert isinstance(source, fx.Node)
    return is_small_part(source.meta.get("val"), node.meta.get("val"))


def is_small_part(part: Any, whole: Any) -> bool:
    """Whether ATen writes a part into a tensor faster than a kernel recomputes the whole tensor."""
    return numel_hint(whole) > SMALL and 4 * numel_hint(part) <= numel_hint(whole)


__all__ = ["IN_PLACE", "is_small_part", "scatters_in_place"]
