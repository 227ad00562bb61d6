"""Runs convolutional nets on the CPU in channels-last memory, where that is faster.

oneDNN supports any order. In channels-last the first convolution, transposed ones, poolings and 1x1 convolutions, which
become products, often take half the time or less. A contest measures each form of each convolution on this machine
(`conv_forms`). The graph is converted if that gains more than the copies cost where images enter and leave.
`config.convolution_layout = "channels_last"` uses a rule instead: graphs of two or more convolutions are converted. If
weights are larger than images, as in the last blocks, oneDNN reorders small images faster than large weights, and the
convolution stays contiguous.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import config, targets
from fuser.lazy_dataclasses import dataclass
from fuser.passes import conv_forms
from fuser.passes.conv_epilogues import following
from fuser.passes.conv_forms import LAST, LINEAR, OWN, PACKED, USUAL, Convolution
from fuser.passes.example_sizes import FREE, by_example
from fuser.passes.hints import are_numbers
from fuser.passes.layouts import Relayout, writes_at_end
from fuser.passes.onednn import FROZEN, OWN_MARK
from fuser.passes.onednn import PACKED as PACKED_MARK
from fuser.passes.providers import linear_op, takes_dtype

aten = torch.ops.aten
_FEWEST = 2  # convolutions; for the rule
_HEAVY_WEIGHTS = 4  # weights this many times larger than the images
_MOST_COPIED = 0.25  # share of the bytes that convolutions read and write
# Share of the convolutions' time. Contests miss an advantage of channels-last: with contiguous images oneDNN copies
# into fresh memory.
_LEAST_GAIN = 0.02
_CALL = 2e-6  # seconds of a kernel that copies almost nothing


def _is_plain_conv(node: fx.Node) -> bool:
    """Whether a node is a two-dimensional convolution of dense images on the CPU."""
    if node.op != "call_function" or node.target is not aten.convolution.default or node.kwargs:
        return False
    return _are_images(node.args[0], node)


def _are_images(*nodes: Any) -> bool:
    """Whether the nodes are non-empty batches of images on the CPU, of known sizes, that oneDNN supports."""
    values = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in nodes]
    return all(
        isinstance(v, torch.Tensor) and v.dim() == 4 and are_numbers(*v.shape) and v.numel()
        and targets.has(v.device, "onednn") and v.dtype in (torch.float32, torch.bfloat16) and takes_dtype(v.dtype)
        for v in values
    )  # fmt: skip


def _bytes(*nodes: Any) -> int:
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in nodes)


def _as_linear(walk: Relayout, node: fx.Node) -> fx.Node:
    """A 1x1 convolution as a matmul over the channels of all points."""
    x, w, bias, stride = node.args[:4]
    for dim, step in zip((2, 3), stride, strict=True):  # type: ignore[arg-type]
        if step != 1:
            x = walk.call(aten.slice.Tensor, x, dim, 0, sys.maxsize, step)
    x = walk.in_format(x, torch.channels_last)  # type: ignore[arg-type]
    _, _, height, width = x.meta["val"].shape
    rows, matrix = _rows_of(walk, x), _matrix_of(walk, w)
    product = walk.call(linear_op(), rows, matrix, bias, "none", [], "")
    return _images_from(walk, product, (height, width))


def _rows_of(walk: Relayout, images: fx.Node) -> fx.Node:
    """Images in channels-last memory as a matrix with a row of channels for each point."""
    points = walk.call(aten.permute.default, images, [0, 2, 3, 1])
    return walk.call(aten.view.default, points, [-1, images.meta["val"].shape[1]])


def _matrix_of(walk: Relayout, weight: Any) -> fx.Node:
    """The weight of a 1x1 convolution as a matrix (channels of results, channels of images)."""
    return walk.call(aten.view.default, weight, list(weight.meta["val"].shape[:2]))


def _images_from(walk: Relayout, rows: fx.Node, sizes: tuple[int, int]) -> fx.Node:
    """The reverse of `_rows_of`; sizes: height, width."""
    points = walk.call(aten.view.default, rows, [-1, *sizes, rows.meta["val"].shape[1]])
    images = walk.call(aten.permute.default, points, [0, 3, 1, 2])
    for view in (points, images):  # inside groups their sizes would make equal blocks differ
        view.meta["outside"] = True
    return images


def _gradients_as_products(walk: Relayout, node: fx.Node) -> set[fx.Node]:
    """Replace the gradients of a 1x1 convolution by products over all points. Returns the erased nodes."""
    mask: Any = node.args[10]
    made: dict[Any, fx.Node] = {}
    with walk.graph.inserting_before(node):
        grad, x = (walk.in_format(i, torch.channels_last) for i in node.args[:2])  # type: ignore[arg-type]
        grads = _rows_of(walk, grad)
        if mask[0]:
            product = walk.call(aten.mm.default, grads, _matrix_of(walk, node.args[2]))
            made[0] = _images_from(walk, product, tuple(x.meta["val"].shape[2:]))
        if mask[1]:
            product = walk.call(aten.mm.default, walk.call(aten.t.default, grads), _rows_of(walk, x))
            made[1] = walk.call(aten.view.default, product, list(node.args[2].meta["val"].shape))  # type: ignore[union-attr]
        if mask[2]:
            made[2] = walk.call(aten.sum.dim_IntList, grads, [0])
    users = list(node.users)
    for user in users:
        walk.replace(user, made[user.args[1]])
    walk.graph.erase_node(node)
    return {node, *users}


def _reads_computed(node: fx.Node) -> bool:
    """Whether all readers of a tuple of gradients take those that are computed."""
    return all(u.target is operator.getitem and node.args[10][u.args[1]] for u in node.users)  # type: ignore[index]


def _is_plain_backward(node: fx.Node) -> bool:
    """Whether a node computes the gradients of such a convolution."""
    if node.op != "call_function" or node.target is not aten.convolution_backward.default or node.kwargs:
        return False
    return _are_images(node.args[0], node.args[1])


@dataclass(frozen=True)
class _Plan:
    """The form of each convolution, and the seconds that the forms save without copies; None if not measured."""

    forms: dict[fx.Node, str]
    saved: float | None = None
    before: float = 0.0


def class_of(node: fx.Node) -> Convolution:
    """The class of a convolution or of its gradients, whose arguments come one position later."""
    backward = node.target is aten.convolution_backward.default
    first = 1 if backward else 0
    x, w = node.args[first : first + 2]
    out = node.args[0] if backward else node
    rest: Any = node.args[first + 2 : first + 9]
    bias, stride, padding, dilation, transposed, output_padding, groups = rest
    sizes: Any = [tuple(n.meta["val"].shape) for n in (x, w, out)]  # type: ignore[union-attr]
    lists: Any = [tuple(v) for v in (stride, padding, dilation, output_padding)]
    mask: Any = tuple(node.args[10]) if backward else None  # type: ignore[arg-type]
    found = Convolution(
        x=sizes[0], weight=sizes[1], out=sizes[2][1:], dtype=w.meta["val"].dtype, bias=bias is not None,  # type: ignore[union-attr]
        stride=lists[0], padding=lists[1], dilation=lists[2], transposed=bool(transposed), output_padding=lists[3],
        groups=groups, mask=mask, frozen=FROZEN in w.meta and not backward,  # type: ignore[union-attr]
    )  # fmt: skip
    behind = following(node) if conv_forms.why_not_own(found) is None else None
    return found if behind is None else dataclasses.replace(found, epilogue=behind.steps)


def _is_last(node: Any) -> bool:
    value = node.meta["val"]
    return value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


def _by_rule(found: list[fx.Node]) -> _Plan:
    """Contiguous if weights outweigh images, else channels-last; products for 1x1 convolutions."""
    return _Plan({node: _form_by_rule(node) for node in found})


def _form_by_rule(node: fx.Node) -> str:
    known = _is_plain_conv(node) and linear_op() is not None and LINEAR not in _not_of_free_sizes(node)
    if known and class_of(node).is_pointwise:
        return LINEAR
    return USUAL if _bytes(_weight_of(node)) > _HEAVY_WEIGHTS * _bytes(*_images_of(node)) else LAST


def _not_of_free_sizes(node: fx.Node) -> frozenset[str]:
    """The forms that a convolution cannot take because some of its sizes are free."""
    values = [image.meta.get(FREE) for image in _images_of(node)]
    values = [v for v in values if isinstance(v, torch.Tensor)]
    if not values:
        return frozenset()
    same = all(are_numbers(*v.shape[1:]) for v in values)  # for any number of images
    return frozenset({PACKED, OWN} if same else {PACKED, OWN, LINEAR})


def _weight_of(node: fx.Node) -> Any:
    return node.args[2 if node.target is aten.convolution_backward.default else 1]


def _images_of(node: fx.Node) -> tuple[Any, Any]:
    backward = node.target is aten.convolution_backward.default
    return (node.args[0], node.args[1]) if backward else (node.args[0], node)


def _by_times(found: list[fx.Node]) -> _Plan:
    """The fastest form of each convolution, where a contiguous one also costs copies of its images.

    Without a verdict of its contest, a convolution follows the rule and counts as saving nothing. If no contest had a
    verdict, all follow the rule.
    """
    forms, saved, before = {}, 0.0, 0.0
    rate = conv_forms.seconds_a_byte()
    known = {node: conv_forms.seconds(class_of(node)) for node in found}
    if not any(known.values()):
        return _by_rule(found)
    for node, times in known.items():
        if USUAL not in times or LAST not in times:
            forms[node] = _form_by_rule(node)
            continue
        images = _images_of(node)
        now = times[LAST if any(map(_is_last, (images[0], _weight_of(node)))) else USUAL]
        without = _not_of_free_sizes(node)
        costs = {form: time for form, time in times.items() if form not in without}
        costs[USUAL] += rate * _bytes(*images)
        forms[node] = min(costs, key=lambda name: costs[name])
        saved += now - times[forms[node]]
        before += now
    return _Plan(forms, saved, before)


def _convert(walk: Relayout, node: fx.Node, form: str) -> None:
    x: Any = node.args[0]
    order = torch.contiguous_format if form == USUAL else torch.channels_last
    with walk.graph.inserting_before(node):
        if form == LINEAR:
            new = _as_linear(walk, node)
        else:
            new = walk.call(node.target, walk.in_format(x, order), *node.args[1:])
    walk.replace(node, new)
    if form in (PACKED, OWN):
        new.meta[PACKED_MARK if form == PACKED else OWN_MARK] = True


def _convert_backward(walk: Relayout, node: fx.Node, form: str) -> set[fx.Node]:
    """Convert the gradients of a convolution; returns the erased nodes."""
    if form == LINEAR and _reads_computed(node):
        return _gradients_as_products(walk, node)
    order = torch.contiguous_format if form == USUAL else torch.channels_last
    with walk.graph.inserting_before(node):
        images = [walk.in_format(i, order) for i in node.args[:2]]  # type: ignore[arg-type]
    walk.update(node, *images, *node.args[2:])
    return set()


def convolutions_channels_last(module: fx.GraphModule) -> int:
    """Run a graph's convolutions and their neighbours in channels-last memory, if that is faster."""
    if config.convolution_layout == "eager":
        return 0
    if not any(_is_on_cpu(n) for n in module.graph.nodes) or not writes_at_end(module.graph):
        return 0
    return by_example(module, _convert_all)


def _is_on_cpu(node: fx.Node) -> bool:
    return node.target is aten.convolution.default and targets.has(node.meta["val"].device, "onednn")


def _convert_all(graph: fx.Graph, mode: FakeTensorMode) -> int:
    found = [n for n in graph.nodes if _is_plain_conv(n)]
    measured = config.convolution_layout == "measured" and not config.is_deterministic() and linear_op() is not None
    if not found or not measured and (len(found) < _FEWEST or any(n.args[6] for n in found)):
        return 0
    walk = Relayout(graph, mode)
    concerned = [n for n in graph.nodes if _is_plain_conv(n) or _is_plain_backward(n)]
    plan = _by_times(concerned) if measured else _by_rule(concerned)
    if plan.saved is not None and plan.saved <= 0:
        return 0
    most = _MOST_COPIED * sum(_bytes(n.args[0], n) for n in found)
    _walk_over(walk, plan)
    return len(found) if _is_worth_it(plan, walk, most) else 0


def _walk_over(walk: Relayout, plan: _Plan) -> None:
    """Convert the convolutions of a plan, and recompute the strides of all other nodes."""
    erased: set[fx.Node] = set()
    for node in list(walk.graph.nodes):
        if node in erased:
            continue
        if _is_plain_conv(node):
            _convert(walk, node, plan.forms[node])
        elif _is_plain_backward(node):
            erased |= _convert_backward(walk, node, plan.forms[node])
        else:
            walk.follow(node)


def _is_worth_it(plan: _Plan, walk: Relayout, most: float) -> bool:
    """Whether the conversion's copies cost less than the convolutions gain."""
    if plan.saved is None:
        return walk.copied <= most
    copies = walk.copied * conv_forms.seconds_a_byte() + walk.calls * _CALL
    return plan.saved - copies > _LEAST_GAIN * plan.before
