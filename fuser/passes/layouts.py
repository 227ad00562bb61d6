"""Changes memory layouts of tensors inside a graph: values are updated, views stay valid, results keep their strides.

A pass that gives an operator's result another layout calls `Relayout.follow` for the nodes after it. Strides are
recomputed by torch's own shape functions. A copy in the old layout is inserted if the new strides do not allow a view,
or if an operator may not support all strides. Results of the graph are copied back, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from fuser import targets
from fuser.canonical.schemas import is_pointwise
from fuser.errors import Unsupported
from fuser.lowering.corrections import corrected
from fuser.passes.calls import own_operator
from fuser.passes.classify import Kind, classify, is_view, is_write_back, op_name, tensors_of

aten = torch.ops.aten
_ANY_STRIDES = ("aten", "prims", "mkldnn")
_BATCH_NORMS = (aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit_functional.default)
# Operators of given strides, and those that ATen's CUDA kernels refuse for some: attention wants neighbours in its last
# dim, and the loss gives a gradient in row-major memory.
_OWN_STRIDES = frozenset(
    f"aten.{name}"
    for name in (
        "as_strided nll_loss2d_backward _efficient_attention_backward _efficient_attention_forward "
        "_flash_attention_backward _flash_attention_forward _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_backward"
    ).split()
)
_POOLS = ("fuser.avg_pool2d_backward", "fuser.max_pool_offsets", "fuser.max_pool_offsets_backward")
_LAST = 8  # the argument of `fuser::max_pool_offsets_backward` that says whether the result is in channels-last memory
_NORM_GRADIENTS = aten.native_batch_norm_backward.default
_GROUP_NORMS = {aten.native_group_norm.default: 0, aten.native_group_norm_backward.default: 1}  # the images' argument
_GATHERS = (aten._unsafe_index.Tensor, aten.index.Tensor)  # results are row-major where two indices are side by side
_FORMATS = (torch.contiguous_format, torch.channels_last)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake tensor mode of the graph's recorded values, or None."""
    for node in graph.nodes:
        for t in tensors_of(node.meta.get("val")):
            mode = getattr(t, "fake_mode", None)
            if isinstance(mode, FakeTensorMode):
                return mode
    return None


def writes_at_end(graph: fx.Graph) -> bool:
    """Whether the only writes are copies into inputs at the end."""
    overloads = (n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return all(is_write_back(n) for n in overloads if n.target._schema.is_mutable)


def is_static(graph: fx.Graph) -> bool:
    """Whether all sizes and strides are numbers, and the only writes are copies into inputs at the end."""
    if not writes_at_end(graph):
        return False
    for node in graph.nodes:
        for t in tensors_of(node.meta.get("val")):
            if t.layout is torch.strided and not all(isinstance(n, int) for n in (*t.shape, *t.stride())):
                return False
    return True


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with its own nodes, so that a rewrite can be discarded."""
    new = fx.Graph()
    result = new.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(result, tuple)
    new.output(result[0])
    new.output_node().meta = dict(graph.output_node().meta)
    return new


def _strides(value: Any) -> list[Any]:
    """The strides of all tensors in a value, including dims of size 1: results keep eager's strides."""
    return [t.stride() for t in tensors_of(value)]


def _is_in_order(value: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether the elements of a value have the same offsets as in `old`, a tensor of the same sizes."""
    pairs = zip(value.shape, value.stride(), old.stride(), strict=True)
    return all(new == was for n, new, was in pairs if n > 1)


class Relayout:
    """One walk over a graph in order. `copied` counts the bytes of the inserted copies.

    `calls` counts the copies that are separate kernels: a copy of a computed value is stored by the kernel that
    computes it. `stored`: such copies do not count bytes either.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, stored: bool = False) -> None:
        self.graph, self.mode, self.stored = graph, mode, stored
        self.before: dict[fx.Node, Any] = {}  # old values of nodes whose strides changed
        self.copied = self.calls = 0
        self._copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        self._known: dict[Any, Any] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call at the graph's insertion point, with its value."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self._value(node)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace `old` by `new`, which has the same sizes, and record the old strides."""
        new.meta = {**old.meta, **new.meta}
        was = self.before.pop(old, old.meta["val"])
        if _strides(was) != _strides(new.meta["val"]):
            self.before[new] = was
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def update(self, node: fx.Node, *args: Any) -> None:
        """Replace a node's arguments by ones of the same sizes, and record the old strides of its results."""
        node.args = args
        self._set(node, self._value(node))

    def _set(self, node: fx.Node, value: Any) -> None:
        """Replace a node's value, and record the old one if its strides differ."""
        old, node.meta["val"] = node.meta.get("val"), value
        if _strides(old) != _strides(value):
            self.before[node] = old

    def in_format(self, node: fx.Node, form: torch.memory_format) -> fx.Node:
        """The node, or a copy of it, in a memory format. All readers share one copy."""
        value = node.meta["val"]
        if value.is_contiguous(memory_format=form):
            return node
        found = self._copies.get((node, form))
        if found is None:
            found = self._copies[node, form] = self.call(aten.clone.default, node, memory_format=form)
            self._count(node)
        return found

    def _count(self, node: fx.Node) -> None:
        """Count the copy of a node."""
        value = node.meta["val"]
        source = node.args[0] if node.target is operator.getitem else node
        alone = classify(source).kind is not Kind.COMPUTE  # type: ignore[arg-type]
        self.calls += alone
        if alone or not self.stored:
            self.copied += value.numel() * value.element_size()

    def follow(self, node: fx.Node) -> None:
        """Recompute a node's value after its arguments' strides changed, or restore its arguments' old strides."""
        if node.op == "output":
            with self.graph.inserting_before(node):
                node.args = (fx.map_arg(node.args[0], self._as_before),)
            return
        if _is_copy_of_image(node):
            node.update_kwarg("memory_format", torch.channels_last)
            self._set(node, self._value(node))
            return
        if _is_buffer_for_image(node):
            node.update_arg(2, list(node.args[0].meta["val"].stride()))  # type: ignore[union-attr]
            self._set(node, self._value(node))
            return
        if _is_normed_image(node):
            self._follow_image(node)
            return
        if not any(a in self.before for a in node.all_input_nodes) or is_write_back(node):
            return
        if not _adapt(node) and _is_particular(node):
            self._restore(node, node.all_input_nodes)
            return
        try:
            new = self._value(node)
        except (RuntimeError, ValueError):  # a view that the new strides do not allow
            self._restore(node, node.all_input_nodes, dense=True)
            new = self._value(node)
        self._set(node, new)
        if node not in self.before and _gathers_points(node):
            self._follow_image(node)

    def _follow_image(self, node: fx.Node) -> None:
        """Copy the row-major images that an operator makes of channels-last ones into their order.

        The kernel that computes them stores the copy. Otherwise it would read or write each number in its own line.
        """
        with self.graph.inserting_after(node):
            copy = self.call(aten.clone.default, node, memory_format=torch.channels_last)
        copy.meta = {**node.meta, **copy.meta}
        node.replace_all_uses_with(copy, lambda user: user is not copy)
        self.before[copy] = node.meta["val"]

    def _restore(self, node: fx.Node, args: Iterable[fx.Node], dense: bool = False) -> None:
        with self.graph.inserting_before(node):
            for arg in args:
                if arg in self.before:
                    node.replace_input_with(arg, self._as_before(arg, dense))

    def _as_before(self, node: fx.Node, dense: bool = False) -> fx.Node:
        """The node in its old strides; `dense`: a row-major copy in place of strides with gaps, as of a slice."""
        old = self.before.get(node)
        if old is None:
            return node
        form = None
        if isinstance(old, torch.Tensor):
            form = next((f for f in _FORMATS if old.is_contiguous(memory_format=f)), None)
        if dense and form is None and isinstance(old, torch.Tensor) and not _is_in_order(node.meta["val"], old):
            return self.in_format(node, torch.contiguous_format)
        if _is_in_order(node.meta["val"], old):
            new = node
        else:
            new = self.in_format(node, form) if form is not None else self._turned(node, old)
        return new if new.meta["val"].stride() == old.stride() else self._restrided(new, old)

    def _turned(self, node: fx.Node, old: Any) -> fx.Node:
        """A copy of a node with its dims in memory in the order of those of `old`, such as a transposed matrix."""
        order = sorted(range(old.dim()), key=old.stride, reverse=True) if isinstance(old, torch.Tensor) else []
        if not order or not old.permute(order).is_contiguous():
            raise Unsupported(f"{node.name} cannot be copied back into strides of its own")
        rows = self.in_format(self.call(aten.permute.default, node, order), torch.contiguous_format)
        return self.call(aten.permute.default, rows, [order.index(d) for d in range(len(order))])

    def _restrided(self, node: fx.Node, old: torch.Tensor) -> fx.Node:
        """A view of a node with the strides of `old`, which differ only in dims of size 1."""
        view = self.call(aten.as_strided.default, node, list(old.shape), list(old.stride()))
        view.meta["outside"] = True  # inside groups its numbers would make equal blocks differ
        return view

    def _value(self, node: fx.Node) -> Any:
        """The node's value by torch's shape functions, cached by the arguments' signature."""
        args: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        if node.target is operator.getitem:
            return args[0][args[1]]
        if node.target in _BATCH_NORMS and "val" in node.meta:
            return (self._fake(args[0], args[0].device), *node.meta["val"][1:])  # torch's own takes ten milliseconds
        key = node.target, signature(args), signature(kwargs)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._compute(node.target, args, kwargs, node.meta.get("val"))
        return found

    def _compute(self, target: Any, args: Any, kwargs: Any, old: Any = None) -> Any:
        """The value of a call; `old` is one of the same sizes, if there is any."""
        by_rule = target is _NORM_GRADIENTS and old is not None  # torch's own is a decomposition of 40 calls
        if not by_rule and not _is_simple(target):
            with self.mode:
                return target(*args, **kwargs)
        with unset_fake_temporarily():  # torch's C++ on meta tensors: twenty times faster than fake ones
            if by_rule:
                name = "aten.native_batch_norm_backward"
                result = corrected(name, args[1].device.type, *_on_meta((tuple(old), args)))
            else:
                result = target(*_on_meta(args), **_on_meta(kwargs))
        device = next(t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        return pytree.tree_map_only(torch.Tensor, lambda t: self._fake(t, device), result)

    def _fake(self, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        return new_fake(self.mode, t, device)


def new_fake(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor like another, with memory of its own. A call that makes one takes ten times as long."""
    with unset_fake_temporarily():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        return FakeTensor(mode, meta, device)


def _on_meta(value: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), value
    )


def signature(value: Any) -> Any:
    """A hashable form of arguments; tensors of the same sizes, strides, dtype and device are equal."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(signature, value))
    if isinstance(value, dict):
        return tuple((k, signature(v)) for k, v in value.items())
    return type(value), value


def _is_simple(target: Any) -> bool:
    """Whether a target is a view or elementwise, with a shape function that ignores devices and kernels."""
    return target is aten.clone.default or is_view(target) or is_pointwise(target)


def _is_particular(node: fx.Node) -> bool:
    """Whether a node may have another meaning, or fail, for other strides of its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    if node.target.namespace not in _ANY_STRIDES or op_name(node.target) in _OWN_STRIDES:
        return True
    return is_view(node.target) and node.target.overloadpacket in (aten.view_as_real, aten.view_as_complex)


def _adapt(node: fx.Node) -> bool:
    """Let a pool or its gradient follow its images' order. Returns whether the node is one that does.

    ATen's gradient of a padded average pool takes padding for 0 on CUDA if the images are in channels-last memory
    (torch 2.11). The package's operator is right with a kernel and without one.
    """
    name = op_name(node.target)
    if name == "aten.avg_pool2d_backward":
        _, x, _, _, padding, *_ = node.args
        if not targets.like_host(x.meta["val"].device) and any(padding):  # type: ignore[union-attr, arg-type]
            node.target = own_operator("avg_pool2d_backward")
            return True
    if name == "fuser.max_pool_offsets_backward":
        offsets: Any = node.args[1].meta["val"]  # type: ignore[union-attr]
        node.update_arg(_LAST, offsets.dim() == 4 and is_last(offsets))
    return name in _POOLS


def _is_copy_of_image(node: fx.Node) -> bool:
    """Whether a node copies images in channels-last memory to row-major memory, as group norms ask for.

    The copy can stay in their order: what reads it follows.
    """
    if node.target is not aten.clone.default or node.kwargs.get("memory_format") is not torch.contiguous_format:
        return False
    value: Any = node.args[0].meta.get("val")  # type: ignore[union-attr]
    return _is_image(value) and is_last(value) and not value.is_contiguous()


def _is_buffer_for_image(node: fx.Node) -> bool:
    """Whether a node is row-major memory for images like its argument's, which are in channels-last memory.

    Autograd makes it for the gradient of what a view was written into, and copies the gradient there.
    """
    if node.target is not aten.new_empty_strided.default:
        return False
    value: Any = node.meta.get("val")
    like: Any = node.args[0].meta.get("val")  # type: ignore[union-attr]
    if not _is_image(value) or not _is_image(like) or value.shape != like.shape or value.dtype is not like.dtype:
        return False
    return value.is_contiguous() and not is_last(value) and is_last(like)


def _is_normed_image(node: fx.Node) -> bool:
    """Whether a node is the row-major result or gradient, as ATen gives it on CUDA, of a group norm of images in
    channels-last memory."""
    norm: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    at = _GROUP_NORMS.get(norm.target) if norm is not None else None
    if at is None or not _is_image(node.meta.get("val")) or is_last(node.meta["val"]):
        return False
    return is_last(norm.args[at].meta["val"])


def _gathers_points(node: fx.Node) -> bool:
    """Whether a node gathers images from images in channels-last memory."""
    if node.target not in _GATHERS or not _is_image(node.meta["val"]):
        return False
    source: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    return _is_image(source) and is_last(source)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


def is_last(value: torch.Tensor) -> bool:
    """Whether images are in channels-last memory."""
    return value.is_contiguous(memory_format=torch.channels_last)
