"""Products on CUDA whose rows do not begin at multiples of 16 bytes, made of padded matrices.

cuBLAS's kernels for tensor cores load and store 16 bytes at a time. The logits of a vocabulary of 50,257 words have
rows of an odd length, for which cuBLAS has kernels of an older generation: on an H200, 8192x768x50257 in bfloat16 takes
6.6 ms, and 0.9 ms with 50,264 columns. So row lengths are padded with zeros to the next multiple of 16 bytes. The
result is a slice of the padded product. Kernels read the slice; a result of the graph is a copy of it.

Which is faster is measured once on each device, with copies of as many bytes as padding and slicing move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser import config
from fuser.lazy_dataclasses import dataclass
from fuser.passes.hints import are_numbers, size_hint
from fuser.passes.layouts import fake_mode_of
from fuser.passes.rounded_factors import HALVES, products_take_tf32

aten = torch.ops.aten
LEAST_WORK = 1 << 28  # multiplications, below which a call takes less than the launches of copies
DEVICE = "cuda"
_BYTES = 16  # that cuBLAS loads at once
_LARGEST_SHARE = 32  # a padded result takes at most this part of a device's memory
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
Padding = tuple[int, int]  # how many rows and columns are added to a matrix


@dataclass(frozen=True)
class Product:
    """A product `a @ b` of (rows, inner) and (inner, columns) that can be padded.

    a_turned, b_turned: the operand is the transpose of a row-major matrix. bias: it is an `addmm` with one number for
    each column. more: how many rows, inner elements and columns padding adds.
    """

    rows: int
    inner: int
    columns: int
    dtype: torch.dtype
    a_turned: bool
    b_turned: bool
    bias: bool
    more: tuple[int, int, int]

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.rows * self.inner * self.columns

    @property
    def a(self) -> Padding:
        """The padding of the left operand."""
        return self.more[0], self.more[1]

    @property
    def b(self) -> Padding:
        """The padding of the right operand."""
        return self.more[1], self.more[2]

    @property
    def result_bytes(self) -> int:
        """The size of the padded result in bytes."""
        return (self.rows + self.more[0]) * (self.columns + self.more[2]) * self.dtype.itemsize

    def key(self) -> tuple[Any, ...]:
        """The key of the product's class: rows count by their power of two, unless they are padded."""
        rows = self.rows if self.more[0] else (max(self.rows - 1, 0).bit_length(),)
        flags = self.a_turned, self.b_turned, self.bias
        return "aligned product", rows, self.inner, self.columns, str(self.dtype), flags, self.more

    def __str__(self) -> str:
        return f"product of {self.rows}×{self.inner}×{self.columns} {str(self.dtype)[6:]}"


def aligned_products(module: fx.GraphModule) -> int:
    """On CUDA, a product for tensor cores whose rows begin at odd addresses is made of padded matrices where faster."""
    if config.is_deterministic():
        return 0
    changed = 0
    made: dict[tuple[fx.Node, Padding], fx.Node] = {}
    for node in list(module.graph.nodes):
        product = product_of(node) if node.target in (aten.mm.default, aten.addmm.default) else None
        if product is not None and product.work >= LEAST_WORK and is_faster(product, node.meta["val"].device):
            _rewrite(node, product, made)
            changed += 1
    return changed


def product_of(node: fx.Node) -> Product | None:
    """The product that an `mm` or `addmm` makes; None where all rows are aligned, or a size to pad is a symbol."""
    args: Any = node.args
    values: list[Any] = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in (*args[-2:], node)]
    if node.kwargs or not all(map(_is_plain, values)):
        return None
    left, right, result = values
    a_turned, b_turned, aligned = _order(left), _order(right), _BYTES // result.dtype.itemsize
    if a_turned is None or b_turned is None or not are_numbers(left.shape[1], *right.shape):
        return None
    sizes = left.shape[0], *right.shape  # rows, inner, columns
    odd = [False, False, _is_odd(sizes[2], aligned)]  # whether a size is an unaligned row length of a matrix
    odd[0 if a_turned else 1] |= _is_odd(left.stride(int(a_turned)), aligned)
    odd[1 if b_turned else 2] |= _is_odd(right.stride(int(b_turned)), aligned)
    rows, inner, columns = (-n % aligned if is_odd and type(n) is int else 0 for n, is_odd in zip(sizes, odd))
    if not (rows or inner or columns):
        return None
    bias = len(args) == 3
    if bias and list(args[0].meta["val"].shape) != [sizes[2]]:
        return None
    more = rows, inner, columns
    return Product(size_hint(sizes[0]), sizes[1], sizes[2], result.dtype, a_turned, b_turned, bias, more)


def _is_plain(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dim() == 2
    if not plain or value.device.type != DEVICE:
        return False
    return value.dtype in HALVES or value.dtype is torch.float32 and products_take_tf32()


def _order(value: torch.Tensor) -> bool | None:
    """False for a matrix with contiguous rows, True for one with contiguous columns, None for others."""
    steps = [type(s) is int and s == 1 for s in value.stride()]
    return None if steps[0] == steps[1] else steps[0]


def _is_odd(step: Any, aligned: int) -> bool:
    return type(step) is int and step % aligned != 0


# -- the graph ---------------------------------------------------------------------------------------------------------
def _rewrite(node: fx.Node, product: Product, made: dict[tuple[fx.Node, Padding], fx.Node]) -> None:
    """Put a slice of the padded product in a node's place. `made` has the padded matrices of earlier products."""
    graph, mode = node.graph, fake_mode_of(node.graph)
    assert mode is not None

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(node):
            new = graph.call_function(target, args, kwargs)
        with mode:
            new.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return new

    def padded(source: Any, more: Padding, turned: bool) -> fx.Node:
        if not any(more):
            return source  # type: ignore[no-any-return]
        if turned:
            base = _turned(source) or call(aten.permute.default, source, [1, 0])
            return call(aten.permute.default, padded(base, more[::-1], turned=False), [1, 0])
        if (source, more) not in made:
            made[source, more] = call(aten.constant_pad_nd.default, source, [0, more[1], 0, more[0]], 0.0)
        return made[source, more]

    args: Any = node.args
    operands = [padded(args[-2], product.a, product.a_turned), padded(args[-1], product.b, product.b_turned)]
    if product.bias:
        columns = product.more[2]
        operands.insert(0, call(aten.constant_pad_nd.default, args[0], [0, columns], 0.0) if columns else args[0])
    new = call(node.target, *operands)
    for dim, size in enumerate((product.rows, product.columns)):
        if product.more[2 * dim]:
            new = call(aten.slice.Tensor, new, dim, 0, size)
    if product.more[0] or product.more[2]:
        new = call(aten.clone.default, new, memory_format=torch.contiguous_format)
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _turned(node: fx.Node) -> fx.Node | None:
    """The row-major matrix that a node transposes; None if it is no transposition."""
    base: Any = node.args[0] if node.target in _TURNS else None
    value = base.meta.get("val") if isinstance(base, fx.Node) else None
    return base if isinstance(value, torch.Tensor) and value.dim() == 2 and _order(value) is False else None


# -- the race ----------------------------------------------------------------------------------------------------------
def is_faster(product: Product, device: torch.device) -> bool:
    """Whether the padded product with its copies is faster on a device. The first product of a class is raced."""
    from fuser.cuda import choices

    if not torch.cuda.is_available():
        return False
    if product.result_bytes * _LARGEST_SHARE > torch.cuda.get_device_properties(device).total_memory:
        return False
    runs = functools.partial(runs_of, product, torch.device(DEVICE))
    found = choices.of_class(device, product.key(), runs, "as it is", str(product))
    return found is not None and found.winner == "padded"


def runs_of(product: Product, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The contestants on a device: the product as it is, and the padded one behind the copies that it needs."""
    new: Any = functools.partial(torch.empty, dtype=product.dtype, device=device)

    def operands(m: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
        a = new(k, m).normal_().t() if product.a_turned else new(m, k).normal_()
        b = new(n, k).normal_().t() if product.b_turned else new(k, n).normal_()
        return (new(n).normal_(), a, b) if product.bias else (a, b)

    call = torch.addmm if product.bias else torch.mm
    plain = operands(product.rows, product.inner, product.columns)
    wide = operands(*(n + more for n, more in zip((product.rows, product.inner, product.columns), product.more)))
    copied = [t.numel() for t, u in zip(wide[-2:], plain[-2:]) if t.shape != u.shape]
    if product.more[0] or product.more[2]:
        copied.append(product.rows * product.columns)
    sources, targets = [new(n) for n in copied], [new(n) for n in copied]

    def padded() -> Any:
        for target, source in zip(targets, sources):
            target.copy_(source)
        return call(*wide)

    return {"as it is": functools.partial(call, *plain), "padded": padded}
