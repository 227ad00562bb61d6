"""Convolutions on CUDA whose windows neither overlap nor leave gaps: products of patches and weights.

So images become tokens in vision transformers, and networks halve their images. A copy puts the elements of each patch
side by side; the kernel that computes the image may store it so. The result is in channels-last memory, whose rows are
the tokens that transformers read; all kernels behind it follow. Where convolutions in groups are faster in row-major
memory, the result is copied: a step of Visformer, 64 images in bfloat16, took 20.8 ms of an H200 without the copy, and
17.2 without the product. cuDNN copies images of three channels twice: on an H200, 16 images of 3x518x518 in
patches of 14x14 to 768 channels take it 0.93 ms in bfloat16, a copy and a product 0.16.

Which is faster is measured once on each device, the product with a copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.lazy_dataclasses import dataclass
from fuser.passes.as_products import convolutions_to_products, is_backward, operands, replace_gradients
from fuser.passes.conv_orders import are_faster_last
from fuser.passes.conv_tensor_cores import takes_groups
from fuser.passes.layouts import Relayout

aten = torch.ops.aten
DEVICE = "cuda"
_LEAST_WORK = 1 << 26  # multiplications, below which launches decide
Patched = dict[Any, fx.Node]


@dataclass(frozen=True)
class Patches:
    """A convolution of images (images, channels, *count * kernel) by filters (filters, channels, *kernel).

    last: the images are in channels-last memory, so that patches keep their channels side by side.
    """

    images: int
    channels: int
    count: tuple[int, ...]
    kernel: tuple[int, ...]
    filters: int
    dtype: torch.dtype
    bias: bool
    last: bool

    @property
    def rows(self) -> int:
        """The number of patches."""
        return self.images * math.prod(self.count)

    @property
    def inner(self) -> int:
        """The number of elements of a patch."""
        return self.channels * math.prod(self.kernel)

    @property
    def order(self) -> list[int]:
        """Dims of (images, channels, rows, kernel rows, columns, kernel columns) in the order of a patch's elements."""
        n = len(self.kernel)
        places, elements = [2 + 2 * d for d in range(n)], [3 + 2 * d for d in range(n)]
        return [0, *places, *elements, 1] if self.last else [0, *places, 1, *elements]

    def key(self) -> tuple[Any, ...]:
        """The key of the class: patches count by their power of two."""
        rows = max(self.rows - 1, 0).bit_length()
        return "patches", rows, self.channels, self.kernel, self.filters, str(self.dtype), self.bias, self.last

    def __str__(self) -> str:
        sizes = "×".join(map(str, (self.channels, *self.kernel)))
        return f"product of {self.rows} patches of {sizes} by {self.filters} filters {str(self.dtype)[6:]}"


def patches_to_products(module: fx.GraphModule) -> int:
    """On CUDA, convolutions of patches and their gradients become products, where these are faster."""
    is_usual = functools.cache(functools.partial(_is_usual_faster, module.graph))
    return convolutions_to_products(module, patches_of, is_faster, functools.partial(_convert, {}, is_usual))


def _is_usual_faster(graph: fx.Graph) -> bool:
    """Whether convolutions in groups run faster in row-major memory, into which they would turn each image."""
    grouped = [n for n in graph.nodes if takes_groups(n)]
    return bool(grouped) and not are_faster_last(grouped)


def patches_of(node: fx.Node) -> Patches | None:
    """The patches that a convolution or its gradients read; None for other nodes."""
    found = operands(node)
    if found is None:
        return None
    args, x, weight = found
    (stride, padding, dilation), groups = args[3:6], args[8]
    if groups != 1:
        return None
    sizes, kernel = (*x.shape, *weight.shape), tuple(weight.shape[2:])
    if x.dim() not in (4, 5) or not all(type(s) is int for s in sizes) or not x.numel() or math.prod(kernel) == 1:
        return None
    if tuple(stride) != kernel or any(padding) or any(d != 1 for d in dilation):
        return None
    if any(s % k for s, k in zip(x.shape[2:], kernel)):
        return None
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    last = not x.is_contiguous() and x.is_contiguous(memory_format=form)
    count = tuple(s // k for s, k in zip(x.shape[2:], kernel))
    has_bias = bool(args[2]) if is_backward(node) else args[2] is not None
    return Patches(x.shape[0], x.shape[1], count, kernel, weight.shape[0], x.dtype, has_bias, last)


# -- the graph ---------------------------------------------------------------------------------------------------------
def _rows(walk: Relayout, node: fx.Node, order: Sequence[int], rows: int) -> fx.Node:
    """A tensor with its dims in another order, as a matrix of `rows` rows."""
    turned = walk.call(aten.permute.default, node, list(order))
    if not turned.meta["val"].is_contiguous():
        turned = walk.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return walk.call(aten.view.default, turned, [rows, -1])


def _matrix_of_patches(walk: Relayout, x: fx.Node, p: Patches, made: Patched) -> fx.Node:
    """(patches, elements of a patch); one for all readers of the images."""
    found = made.get((x, p.kernel))
    if found is None:
        parts = [n for pair in zip(p.count, p.kernel) for n in pair]
        apart = walk.call(aten.view.default, x, [p.images, p.channels, *parts])
        found = made[x, p.kernel] = _rows(walk, apart, p.order, p.rows)
    return found


def _matrix_of_filters(walk: Relayout, weight: fx.Node, p: Patches, made: Patched) -> fx.Node:
    """(filters, elements of a patch)."""
    if weight not in made:
        order = [0, *range(2, 2 + len(p.kernel)), 1] if p.last else range(2 + len(p.kernel))
        made[weight] = _rows(walk, weight, order, p.filters)
    return made[weight]


def _convert(made: Patched, is_usual: Callable[[], bool], walk: Relayout, node: fx.Node, p: Patches) -> None:
    if is_backward(node):
        _convert_gradients(walk, node, p, made)
        return
    x, weight, bias, *_ = node.args
    patches = _matrix_of_patches(walk, x, p, made)  # type: ignore[arg-type]
    turned = walk.call(aten.permute.default, _matrix_of_filters(walk, weight, p, made), [1, 0])  # type: ignore[arg-type]
    operands = [patches, turned] if bias is None else [bias, patches, turned]
    product = walk.call(aten.mm.default if bias is None else aten.addmm.default, *operands)
    image = walk.call(aten.view.default, product, [p.images, *p.count, p.filters])
    image = walk.call(aten.permute.default, image, [0, len(p.count) + 1, *range(1, len(p.count) + 1)])
    if is_usual():
        image = walk.call(aten.clone.default, image, memory_format=torch.contiguous_format)
    walk.replace(node, image)


def _convert_gradients(walk: Relayout, node: fx.Node, p: Patches, made: Patched) -> None:
    grad, x, weight, *_ = node.args
    n = len(p.kernel)
    rows = _rows(walk, grad, [0, *range(2, 2 + n), 1], p.rows)  # type: ignore[arg-type]

    def of_images() -> fx.Node:
        product = walk.call(aten.mm.default, rows, _matrix_of_filters(walk, weight, p, made))  # type: ignore[arg-type]
        whole = [p.images, p.channels, *(n for pair in zip(p.count, p.kernel) for n in pair)]
        apart = walk.call(aten.view.default, product, [whole[d] for d in p.order])
        back = walk.call(aten.permute.default, apart, [p.order.index(d) for d in range(len(whole))])
        copied = walk.call(aten.clone.default, back, memory_format=torch.contiguous_format)
        return walk.call(aten.view.default, copied, list(x.meta["val"].shape))  # type: ignore[union-attr]

    def of_filters() -> fx.Node:
        turned = walk.call(aten.permute.default, rows, [1, 0])
        product = walk.call(aten.mm.default, turned, _matrix_of_patches(walk, x, p, made))  # type: ignore[arg-type]
        if not p.last:
            return walk.call(aten.view.default, product, [p.filters, p.channels, *p.kernel])
        apart = walk.call(aten.view.default, product, [p.filters, *p.kernel, p.channels])
        return walk.call(aten.permute.default, apart, [0, n + 1, *range(1, n + 1)])

    replace_gradients(walk, node, (of_images, of_filters, lambda: walk.call(aten.sum.dim_IntList, rows, [0])))


# -- the race ----------------------------------------------------------------------------------------------------------
def is_faster(p: Patches, device: torch.device) -> bool:
    """Whether the product is faster on a device. The first convolution of a class is raced."""
    from fuser.cuda import choices

    if p.rows * p.inner * p.filters < _LEAST_WORK:
        return False
    found = choices.of_class(device, p.key(), lambda: runs_of(p), "convolution", str(p))
    return found is not None and found.winner == "product"


def runs_of(p: Patches, device: str = DEVICE) -> dict[str, Callable[[], Any]]:
    """The contestants on a device: the convolution, and the product behind the copy of the patches."""
    new: Any = functools.partial(torch.randn, dtype=p.dtype, device=device)
    form = torch.channels_last if len(p.kernel) == 2 else torch.channels_last_3d
    x = new(p.images, p.channels, *(c * k for c, k in zip(p.count, p.kernel)))
    weight = new(p.filters, p.channels, *p.kernel)
    bias = new(p.filters) if p.bias else None
    if p.last:
        x, weight = x.contiguous(memory_format=form), weight.contiguous(memory_format=form)
    zeros = [0] * len(p.kernel)
    patches, filters = new(p.rows, p.inner), new(p.filters, p.inner)
    source = new(p.rows, p.inner)

    def product() -> Any:
        patches.copy_(source)
        return patches @ filters.t() if bias is None else torch.addmm(bias, patches, filters.t())

    ones = [1] * len(p.kernel)
    behind = list(p.kernel), zeros, ones, False, zeros, 1
    return {"convolution": lambda: aten.convolution.default(x, weight, bias, *behind), "product": product}
