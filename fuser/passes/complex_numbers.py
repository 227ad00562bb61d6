"""Rewrites complex arithmetic as arithmetic on real and imaginary parts, where real tensors enter or leave it.

Kernels compute real numbers. A rotary embedding by `view_as_complex(x) * frequencies`, the magnitudes of a spectrum or
a state-space model's kernel would run one operator at a time over the whole tensor. As parts they fuse with their
neighbours. Complex values between library operators, such as a product between two Fourier transforms, stay on ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuser.passes.hints import is_contiguous, same, size_hint
from fuser.passes.writing import Writer

aten: Any = torch.ops.aten
Part = Any  # a node, or a number
Pair = tuple[Part, Part]
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class _Left(Exception):
    """Raised to leave the calls as they are."""


def complex_by_parts(module: fx.GraphModule) -> int:
    """Complex arithmetic that begins or ends with real tensors becomes arithmetic on real and imaginary parts."""
    nodes = [n for n in module.graph.nodes if n.target in _RULES and _touches_complex(n)]
    return sum(_rewrite(module.graph, group) for group in _connected(nodes)) if nodes else 0


# -- which calls -------------------------------------------------------------------------------------------------------
def _is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in _REAL


def _touches_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or getattr(value, "fake_mode", None) is None:
        return False
    return _is_complex(node) or any(map(_is_complex, node.all_input_nodes))


def _connected(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The nodes in groups connected by complex values, each group in the order of the graph."""
    group = {n: n for n in nodes}

    def root(n: fx.Node) -> fx.Node:
        while group[n] is not n:
            n = group[n]
        return n

    for n in nodes:
        for a in n.all_input_nodes:
            if a in group and _is_complex(a):
                group[root(n)] = root(a)
    found: dict[fx.Node, list[fx.Node]] = {}
    for n in nodes:
        found.setdefault(root(n), []).append(n)
    yield from found.values()


def _is_worth_it(nodes: Sequence[fx.Node]) -> bool:
    """Whether the nodes compute a real result, or have several steps of arithmetic on values made of real tensors."""
    work = [n for n in nodes if n.target in _ARITHMETIC]
    ends = any(not _is_complex(n) for n in nodes)
    begins = any(n.target in _OF_REALS for n in nodes)
    return bool(work) and (ends or (begins and len(work) > 1))


# -- rewriting ---------------------------------------------------------------------------------------------------------
class _Parts:
    """Creates the parts of complex values before the node that is being rewritten."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.known: dict[fx.Node, Pair] = {}
        self.made: list[fx.Node] = []
        self.at: fx.Node
        self.dtype = torch.float32  # dtype of the result's parts

    def begin(self, node: fx.Node) -> None:
        """Insert new nodes before `node` from now on."""
        self.at, value = node, node.meta["val"]
        dtypes = [n.meta["val"].dtype for n in (node, *node.all_input_nodes) if _is_complex(n)]
        self.dtype = _REAL.get(value.dtype, _REAL[dtypes[0]])

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        before = self.at.prev
        try:
            node = Writer(self.at)(target, *args, **kwargs)
        except Exception as error:  # such as a view that the strides do not allow
            if self.at.prev is not before:
                self.graph.erase_node(self.at.prev)
            raise _Left from error
        self.made.append(node)
        return node

    def number(self, size: Any, value: float) -> fx.Node:
        """A tensor filled with one number."""
        return self(aten.full.default, size, value, dtype=self.dtype, device=self.at.meta["val"].device)

    def of(self, value: Any) -> Pair:
        """The parts of an operand, in the dtype of the result's parts."""
        if not isinstance(value, fx.Node):
            number = complex(value)
            return number.real, number.imag
        if not _is_complex(value):
            real = self.cast(value)
            return real, self(aten.zeros_like.default, real)
        if value not in self.known:
            tensor = value.meta["val"]
            plain = self(aten.resolve_conj.default, value) if tensor.is_conj() else value
            both = self(aten.view_as_real.default, plain)
            self.known[value] = tuple(self(aten.select.int, both, tensor.dim(), k) for k in (0, 1))  # type: ignore[assignment]
        real, imaginary = self.known[value]
        return self.cast(real), self.cast(imaginary)

    def cast(self, part: Part) -> Part:
        """A part in the dtype of the result's parts."""
        if not isinstance(part, fx.Node) or part.meta["val"].dtype is self.dtype:
            return part
        return self(aten._to_copy.default, part, dtype=self.dtype)

    # -- arithmetic on parts -------------------------------------------------------------------------------------------
    def add(self, a: Part, b: Part) -> Part:
        """a + b"""
        return self._binary(aten.add.Tensor, a, b, lambda: a + b)

    def sub(self, a: Part, b: Part) -> Part:
        """a - b"""
        if not isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self(aten.add.Tensor, self(aten.neg.default, b), a)
        return self._binary(aten.sub.Tensor, a, b, lambda: a - b)

    def mul(self, a: Part, b: Part) -> Part:
        """a * b"""
        return self._binary(aten.mul.Tensor, a, b, lambda: a * b)

    def div(self, a: Part, b: fx.Node) -> fx.Node:
        """a / b"""
        if isinstance(a, fx.Node):
            return self(aten.div.Tensor, a, b)
        return self(aten.mul.Tensor, self(aten.reciprocal.default, b), a)

    def _binary(self, target: Any, a: Part, b: Part, of_numbers: Callable[[], float]) -> Part:
        if isinstance(a, fx.Node):
            return self(target, a, b)
        return self(target, b, a) if isinstance(b, fx.Node) else of_numbers()

    def node(self, part: Part, like: fx.Node) -> fx.Node:
        """A part as a tensor with the sizes of `like`."""
        return part if isinstance(part, fx.Node) else self(aten.full_like.default, like, part)


def _rewrite(graph: fx.Graph, nodes: Sequence[fx.Node]) -> int:
    if not _is_worth_it(nodes):
        return 0
    inside = set(nodes)
    parts, instead = _Parts(graph), dict[fx.Node, fx.Node]()
    try:
        for node in nodes:
            parts.begin(node)
            found = _RULES[node.target](parts, *node.args, **node.kwargs)
            if not _is_complex(node):
                instead[node] = _checked(node, found)
                continue
            parts.known[node] = found
            if node.target not in _VIEWS and any(u not in inside for u in node.users):
                instead[node] = _checked(node, _joined(parts, node, found))
    except _Left:
        for made in reversed(parts.made):
            graph.erase_node(made)
        return 0
    for node, new in instead.items():
        new.meta = {**node.meta, **new.meta}
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
    for made in reversed(parts.made):
        if not made.users:
            graph.erase_node(made)
    return 1


def _checked(node: fx.Node, new: fx.Node) -> fx.Node:
    a, b = node.meta["val"], new.meta["val"]
    if a.dtype is not b.dtype or not same(a.shape, b.shape) or not same(a.stride(), b.stride()):
        raise _Left
    return new


def _joined(parts: _Parts, node: fx.Node, pair: Pair) -> fx.Node:
    """A complex tensor made of two parts, with the strides of `node`."""
    value = node.meta["val"]
    like = next((p for p in pair if isinstance(p, fx.Node)), None)
    if like is None:
        raise _Left
    both = [parts.node(p, like) for p in pair]
    if is_contiguous(value):
        return parts(aten.view_as_complex.default, parts(aten.stack.default, both, value.dim()))
    order = sorted(range(value.dim()), key=lambda d: (-size_hint(value.stride()[d]), d))
    turned = [parts(aten.permute.default, p, order) for p in both]
    made = parts(aten.view_as_complex.default, parts(aten.stack.default, turned, value.dim()))
    return parts(aten.permute.default, made, [order.index(d) for d in range(value.dim())])


# -- rules: from a call's arguments to the parts of its result, or to a real result ------------------------------------
def _add(p: _Parts, a: Any, b: Any, *, alpha: Any = 1) -> Pair:
    (x, y), (u, v) = _both(p, a, b, alpha)
    return p.add(x, u), p.add(y, v)


def _sub(p: _Parts, a: Any, b: Any, *, alpha: Any = 1) -> Pair:
    (x, y), (u, v) = _both(p, a, b, alpha)
    return p.sub(x, u), p.sub(y, v)


def _both(p: _Parts, a: Any, b: Any, alpha: Any) -> tuple[Pair, Pair]:
    if alpha != 1:
        raise _Left
    return p.of(a), p.of(b)


def _mul(p: _Parts, a: Any, b: Any) -> Pair:
    (x, y), (u, v) = p.of(a), p.of(b)
    return p.sub(p.mul(x, u), p.mul(y, v)), p.add(p.mul(x, v), p.mul(y, u))


def _div(p: _Parts, a: Any, b: Any) -> Pair:
    """Divide, scaled by the larger part of the divisor, so that its square neither overflows nor underflows."""
    (x, y), (u, v) = p.of(a), p.of(b)
    if not isinstance(u, fx.Node):
        like = next(part for part in (x, y) if isinstance(part, fx.Node))
        u, v = (p.node(part, like) for part in (u, v))
    largest = p(aten.maximum.default, p(aten.abs.default, u), p(aten.abs.default, v))
    s, t = p.div(u, largest), p.div(v, largest)
    below = p.add(p.mul(u, s), p.mul(v, t))
    above = p.add(p.mul(x, s), p.mul(y, t)), p.sub(p.mul(y, s), p.mul(x, t))
    return p.div(above[0], below), p.div(above[1], below)


def _square(p: _Parts, a: Any, exponent: Any) -> Pair:
    if exponent != 2:
        raise _Left
    return _mul(p, a, a)


def _abs(p: _Parts, a: Any) -> fx.Node:
    return p(aten.hypot.default, *p.of(a))


def _angle(p: _Parts, a: Any) -> fx.Node:
    real, imaginary = p.of(a)
    return p(aten.atan2.default, imaginary, real)


def _exp(p: _Parts, a: Any) -> Pair:
    real, imaginary = p.of(a)
    return _polar(p, p(aten.exp.default, real), imaginary)


def _polar(p: _Parts, length: Any, angle: Any) -> Pair:
    return p.mul(length, p(aten.cos.default, angle)), p.mul(length, p(aten.sin.default, angle))


def _log(p: _Parts, a: Any) -> Pair:
    return p(aten.log.default, _abs(p, a)), _angle(p, a)


def _sgn(p: _Parts, a: Any) -> Pair:
    length = _abs(p, a)
    none, zero = p(aten.eq.Scalar, length, 0), p.number([], 0)
    first, second = (p(aten.where.self, none, zero, p.div(part, length)) for part in p.of(a))
    return first, second


def _conj(p: _Parts, a: Any) -> Pair:
    real, imaginary = p.of(a)
    return real, p(aten.neg.default, imaginary)


def _where(p: _Parts, mask: Any, a: Any, b: Any) -> Pair:
    (x, y), (u, v) = p.of(a), p.of(b)
    return p(aten.where.self, mask, x, u), p(aten.where.self, mask, y, v)


def _eq(p: _Parts, a: Any, b: Any) -> fx.Node:
    (x, y), (u, v) = p.of(a), p.of(b)
    overload = aten.eq.Tensor if isinstance(u, fx.Node) else aten.eq.Scalar
    if not isinstance(x, fx.Node):
        raise _Left
    return p(aten.logical_and.default, p(overload, x, u), p(overload, y, v))


def _created(value: float) -> Callable[..., Pair]:
    def rule(p: _Parts, size: Any, fill: Any = value, **_: Any) -> Pair:
        number = complex(fill)
        return p.number(size, number.real), p.number(size, number.imag)

    return rule


def _of_pairs(p: _Parts, x: Any) -> Pair:
    dim = x.meta["val"].dim() - 1
    return p(aten.select.int, x, dim, 0), p(aten.select.int, x, dim, 1)


def _pairs(p: _Parts, a: Any) -> fx.Node:
    return p(aten.stack.default, [*p.of(a)], a.meta["val"].dim())


def _cast(p: _Parts, a: Any, **options: Any) -> Pair:
    if set(options) - {"dtype"} or p.at.meta["val"].dtype not in _REAL:
        raise _Left
    return p.of(a)


def _clone(p: _Parts, a: Any, **_: Any) -> Pair:
    return p.of(a)


def _each(target: Any) -> Callable[..., Any]:
    """The rule for an operator that applies to each part separately."""

    def rule(p: _Parts, a: Any, *args: Any, **kwargs: Any) -> Pair:
        if "dtype" in kwargs:
            raise _Left
        real, imaginary = p.of(a)
        return p(target, real, *args, **kwargs), p(target, imaginary, *args, **kwargs)

    return rule


def _each_of(target: Any) -> Callable[..., Any]:
    """The rule for an operator that joins a list, applied to each part separately."""

    def rule(p: _Parts, tensors: Any, *args: Any) -> Pair:
        pairs = [p.of(t) for t in tensors]
        return p(target, [a for a, _ in pairs], *args), p(target, [b for _, b in pairs], *args)

    return rule


_VIEWS = {
    target: _each(target)
    for target in (
        aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.squeeze.default, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
        aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default,
    )
} | {aten._conj.default: _conj}  # fmt: skip
_OF_REALS: dict[Any, Callable[..., Any]] = {
    aten.view_as_complex.default: _of_pairs, aten.complex.default: lambda p, a, b: (p.cast(a), p.cast(b)),
    aten.polar.default: lambda p, a, b: _polar(p, p.cast(a), p.cast(b)),
}  # fmt: skip
_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add, aten.add.Scalar: _add, aten.sub.Tensor: _sub, aten.sub.Scalar: _sub,
    aten.mul.Tensor: _mul, aten.mul.Scalar: _mul, aten.div.Tensor: _div, aten.div.Scalar: _div,
    aten.reciprocal.default: lambda p, a: _div(p, 1.0, a), aten.pow.Tensor_Scalar: _square, aten.abs.default: _abs,
    aten.angle.default: _angle, aten.exp.default: _exp, aten.log.default: _log, aten.sgn.default: _sgn,
    aten.neg.default: _each(aten.neg.default), aten.where.self: _where, aten.eq.Scalar: _eq, aten.eq.Tensor: _eq,
    aten.conj_physical.default: _conj, aten.sum.dim_IntList: _each(aten.sum.dim_IntList),
    aten.sum.default: _each(aten.sum.default), aten.mean.dim: _each(aten.mean.dim),
    aten.polar.default: _OF_REALS[aten.polar.default],
}  # fmt: skip
_RULES: dict[Any, Callable[..., Any]] = {
    **_VIEWS, **_OF_REALS, **_ARITHMETIC,
    aten.view_as_real.default: _pairs, aten._to_copy.default: _cast, aten.clone.default: _clone,
    aten.zeros.default: _created(0), aten.ones.default: _created(1), aten.full.default: _created(0),
    aten.cat.default: _each_of(aten.cat.default), aten.stack.default: _each_of(aten.stack.default),
}  # fmt: skip

__all__ = ["complex_by_parts"]
