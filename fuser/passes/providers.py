"""Chooses what computes a product on the CPU: a table of candidates, and one contest for each class of products.

A class consists of what times depend on: dtypes, sizes (rows by their power of two), memory order, bias, epilogue, and
whether the weight is frozen. Its contest runs once per machine, on operands of these sizes and orders, and its outcome
is kept on disk (`fuser.contests`). If a candidate leaves an activation to a kernel, a kernel of that activation alone
is timed with it. Calls alternate between copies of the weight, more than inner caches hold, because a program reads
each of its weights once.

For few rows the package's own kernel competes (`fuser.lowering.products`), with bias and activation fused. It wins
unless a library is clearly faster, since norms and residuals fuse with it, too, while a library call splits the kernel
in two.

If results must not depend on a clock (`config.is_deterministic`), and for very small products, ATen computes the
product.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuser import config, interface, targets
from fuser.attention.products import has_products
from fuser.contests import race
from fuser.contests.deciding import Decisions, numbers
from fuser.contests.race import Contestant
from fuser.cpu import packed
from fuser.cpu.epilogues import ACTIVATIONS
from fuser.cpu.packed import Activation
from fuser.lazy_dataclasses import dataclass
from fuser.passes.calls import own_operator
from fuser.targets import LEAST_WEIGHT

aten: Any = torch.ops.aten
LEAST_WORK = 1 << 23  # multiplications, below which calls of libraries other than ATen cost more than they gain
LEAST_FROZEN = 1 << 20  # the same where the weight is packed already
_MOST_WORK = 1 << 28  # multiplications per thread of one call in a contest: larger products compete on fewer rows
_FEWEST_ROWS = 64  # of a product in a contest
_COLD_BYTES, _MOST_COPIES = 1 << 25, 8
_COLDER_BYTES = 48 << 20  # for few rows, which are bound by memory: larger than last-level caches of most machines
ATEN, APART, ONEDNN, PACKED = "aten", "aten, bias apart", "onednn", "onednn packed"
OWN, OWN_PACKED = "own kernel", "own kernel, packed"
DTYPES = (torch.float32, torch.bfloat16)

EPILOGUES = frozenset(packed.EPILOGUES)  # which the package's kernels compute as epilogues
# The epilogues that oneDNN computes as accurately as ATen, on NaN and infinities too. Not its relu, hardtanh and
# hardsigmoid, which turn NaN into a number, nor its gelu by erf, which turns infinity into NaN.
OF_ONEDNN = EPILOGUES - {("gelu", "erf")}


@dataclass(frozen=True)
class Product:
    """`x @ w (+ bias)` of matrices on the CPU, `x` of (rows, inner) and `w` of (inner, columns).

    x_turned, w_turned: the operand is the transpose of a dense matrix. epilogue: oneDNN's name and algorithm of the
    activation that follows. read: a kernel reads the result, and adds a bias at no cost. frozen: `w` can be packed.
    """

    rows: int
    inner: int
    columns: int
    dtype: torch.dtype
    x_turned: bool = False
    w_turned: bool = True
    bias: bool = False
    epilogue: Activation | None = None
    read: bool = False
    frozen: bool = False

    @property
    def work(self) -> int:
        """Number of multiplications."""
        return self.rows * self.inner * self.columns

    def key(self) -> tuple[Any, ...]:
        """The key that products of one class share."""
        flags = self.x_turned, self.w_turned, self.bias, self.epilogue, self.bias and self.read, self.frozen
        return max(self.rows - 1, 0).bit_length(), self.inner, self.columns, str(self.dtype), flags

    def __str__(self) -> str:
        extra = [f"with {self.epilogue[0]}"] if self.epilogue else []
        extra += ["with bias"] if self.bias else []
        extra += ["frozen"] if self.frozen else []
        return " ".join([f"product of {self.rows}×{self.inner}×{self.columns} {str(self.dtype)[6:]}", *extra])


@dataclass(frozen=True)
class Operands:
    """Operands of a contest. `weights` are copies of one weight."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None

    def each(self, call: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        """A function without arguments that runs `call` with the copies of the weight in turn."""
        turns: Iterator[torch.Tensor] = itertools.cycle(self.weights)
        return lambda: call(next(turns))


@dataclass(frozen=True)
class Provider:
    """One candidate: its name, the products that it supports, its call, and the activations that it can fold."""

    name: str
    takes: Callable[[Product], bool]
    call: Callable[[Product, Operands], Callable[[], torch.Tensor]]
    folds: frozenset[Activation] = frozenset()


def linear_op() -> Any:
    """oneDNN's linear with an epilogue; None if this torch has none or oneDNN is switched off."""
    if not torch._C._has_mkldnn or not torch._C._get_mkldnn_enabled():
        return None
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return getattr(packet, "default", None)


def pack_op() -> Any:
    """oneDNN's reordering of a weight; None if this torch has none or oneDNN is switched off."""
    packet = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None) if linear_op() is not None else None
    return getattr(packet, "default", None)


def product_op() -> Any:
    """The operator of products that the package's kernels compute."""
    return own_operator("product")


def takes_dtype(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of a dtype fast on this machine."""
    if dtype is torch.bfloat16:
        return linear_op() is not None and has_products(dtype)
    return dtype is torch.float32


def _aten(p: Product, o: Operands) -> Callable[[], torch.Tensor]:
    bias = o.bias
    if bias is None:
        return o.each(lambda w: torch.mm(o.x, w))
    return o.each(lambda w: torch.addmm(bias, o.x, w))


def _apart(p: Product, o: Operands) -> Callable[[], torch.Tensor]:
    return o.each(lambda w: torch.mm(o.x, w))


def _onednn(p: Product, o: Operands) -> Callable[[], torch.Tensor]:
    op, (name, algorithm) = linear_op(), _onednns(p)
    if p.x_turned:  # a kernel copies it first
        return o.each(lambda w: op(o.x.contiguous(), w.t(), o.bias, name, [], algorithm))
    return o.each(lambda w: op(o.x, w.t(), o.bias, name, [], algorithm))


def _onednns(p: Product) -> Activation:
    """The epilogue that oneDNN computes for a product."""
    return p.epilogue if p.epilogue in OF_ONEDNN else ("none", "")


def _packed(p: Product, o: Operands) -> Callable[[], torch.Tensor]:
    op, pack = linear_op(), pack_op()
    name, algorithm = _onednns(p)
    made = dataclasses.replace(o, weights=tuple(pack(w.t()) for w in o.weights))
    return made.each(lambda w: op(o.x, w, o.bias, name, [], algorithm))


def _own(p: Product, o: Operands) -> Callable[[], torch.Tensor]:
    call = _own_kernel(p.bias, p.epilogue)
    with config.override(slowest=0.0, compile_mode="wait"):  # no trial, and at once
        call(o.x, o.weights[0], *(() if o.bias is None else (o.bias,)))
    return o.each(lambda w: call(o.x, w, *(() if o.bias is None else (o.bias,))))


def _own_kernel(bias: bool, epilogue: Activation | None) -> Callable[..., torch.Tensor]:
    """A function of (x, w, bias) that runs a kernel of the package."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    out = graph.call_function(product_op(), (graph.placeholder("bias") if bias else None, x, w))
    graph.output(out if epilogue is None else _activated(graph, out, epilogue))
    call: Callable[..., torch.Tensor] = interface.fusion_handle(interface.register_fusion(graph))
    return call


def _activated(graph: fx.Graph, x: fx.Node, epilogue: Activation) -> fx.Node:
    target, arguments, named = ACTIVATIONS[packed.EPILOGUES[epilogue]]
    return graph.call_function(target, (x, *arguments), named)


def _own_packed(p: Product, o: Operands) -> Callable[[], torch.Tensor]:
    made = dataclasses.replace(o, weights=tuple(packed.pack(w.t()) for w in o.weights))
    return made.each(lambda w: packed.product(o.x, w, p.columns, o.bias, p.epilogue))


def is_for_few_rows(p: Product) -> bool:
    """Whether a kernel of the package can compute a product, if it is the fastest."""
    few = p.rows <= targets.of(targets.HOST).product_rows and p.inner * p.columns >= LEAST_WEIGHT
    return few and p.w_turned and not p.x_turned


def _can_pack(p: Product) -> bool:
    return p.frozen and p.w_turned and not p.x_turned


def _can_pack_itself(p: Product) -> bool:
    many = p.rows > targets.of(targets.HOST).product_rows
    return _can_pack(p) and many and packed.why_not(p.dtype, p.inner) is None


PROVIDERS: tuple[Provider, ...] = (
    Provider(ATEN, lambda p: True, _aten),
    Provider(APART, lambda p: p.bias and p.read and p.dtype is torch.float32, _apart),
    Provider(ONEDNN, lambda p: linear_op() is not None and p.work >= LEAST_WORK, _onednn, OF_ONEDNN),
    Provider(PACKED, lambda p: _can_pack(p) and pack_op() is not None, _packed, OF_ONEDNN),
    Provider(OWN_PACKED, _can_pack_itself, _own_packed, EPILOGUES),
    Provider(OWN, is_for_few_rows, _own, EPILOGUES),
)
_products = Decisions("product")


def choose(product: Product) -> str:
    """The name of the candidate for a class of products: a known decision, or the winner of a contest that runs now."""
    least = LEAST_FROZEN if product.frozen else LEAST_WORK
    if is_for_few_rows(product):
        least = LEAST_WEIGHT
    if product.work < least or not takes_dtype(product.dtype) or config.is_deterministic():
        return ATEN
    fit = [p for p in PROVIDERS if p.takes(product)]
    if len(fit) == 1:
        return fit[0].name
    names = [p.name for p in fit]
    favoured = OWN if OWN in names else ""
    return _products.choice(product.key(), names, str(product), lambda: _contestants(product, fit), favoured).winner


def _contestants(product: Product, fit: Sequence[Provider]) -> dict[str, Contestant]:
    operands = operands_of(product)
    return {p.name: _contestant(p, product, operands) for p in fit}


def _contestant(provider: Provider, product: Product, operands: Operands) -> Contestant:
    """The timed call of a candidate, and a function of its whole result."""
    try:
        call = provider.call(product, operands)
    except Exception as error:
        return race.failing(error)
    bias, epilogue = operands.bias, product.epilogue

    def result() -> torch.Tensor:
        out = call()
        if provider.name == APART and bias is not None:
            out = out + bias
        return out if epilogue is None or epilogue in provider.folds else packed.activated(epilogue, out)

    if epilogue is None or epilogue in provider.folds:
        return Contestant(call, result)
    kernel = _activation(epilogue)
    with config.override(slowest=0.0, compile_mode="wait"):
        kernel(operands.x.new_zeros(operands.x.shape[0], product.columns))  # `call` would use the next weight
    return Contestant(lambda: kernel(call()), result)


@functools.cache
def _activation(epilogue: Activation) -> Callable[..., torch.Tensor]:
    """A kernel of the package for an activation alone."""
    graph = fx.Graph()
    graph.output(_activated(graph, graph.placeholder("x"), epilogue))
    call: Callable[..., torch.Tensor] = interface.fusion_handle(interface.register_fusion(graph))
    return call


def operands_of(product: Product) -> Operands:
    """Operands of a class, the same each time: a few thousand normal numbers, repeated."""
    per_row = product.inner * product.columns
    rows = min(product.rows, max(_MOST_WORK * torch.get_num_threads() // per_row, _FEWEST_ROWS))
    weight_bytes = per_row * product.dtype.itemsize
    copies = max(1, min(_MOST_COPIES, -(-_COLD_BYTES // weight_bytes)))
    if is_for_few_rows(product):
        copies = -(-_COLDER_BYTES // weight_bytes)
    flat = numbers(copies * per_row, product.dtype, 1)
    weights = tuple(_matrix_of(part, product.inner, product.w_turned) for part in torch.split(flat, per_row))
    bias = numbers(product.columns, product.dtype, 2) if product.bias else None
    return Operands(_matrix(rows, product.inner, product.x_turned, product.dtype, 0), weights, bias)


def _matrix(rows: int, columns: int, turned: bool, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _matrix_of(numbers(rows * columns, dtype, seed), rows, turned)


def _matrix_of(flat: torch.Tensor, rows: int, turned: bool) -> torch.Tensor:
    return flat.view(-1, rows).t() if turned else flat.view(rows, -1)


__all__ = [
    "APART", "ATEN", "OF_ONEDNN", "ONEDNN", "OWN", "OWN_PACKED", "PACKED", "Operands", "Product", "Provider", "choose",
    "linear_op", "pack_op",
]  # fmt: skip
