"""Shapes, dtypes and strides of elementwise results by the rules of eager's TensorIterator.

torch's operators on meta tensors give the same, but mostly in Python: that costs 0.1 ms per operator, and the first
call imports all of Dynamo. Chains of elementwise operators are compiled most, so their rule is here; for other
operators torch is asked (`graph.run_meta`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.reasons import because

# The result's dtype, given that of the promoted operands: the same; float for integers; always bool.
SAME, FLOAT, BOOL = "same", "float", "bool"
_SAME = (
    "add sub mul rsub maximum minimum fmax fmin remainder fmod bitwise_and bitwise_or bitwise_xor neg abs relu sign "
    "sgn floor ceil trunc frac bitwise_not gelu silu square floor_divide"
)
_FLOAT = (
    "div true_divide exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc sqrt rsqrt reciprocal sigmoid atan2 lgamma digamma"
)
_BOOL = "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite"
KINDS: dict[str, str] = {
    f"aten.{name}": kind for kind, names in ((SAME, _SAME), (FLOAT, _FLOAT), (BOOL, _BOOL)) for name in names.split()
}
_REFUSE_BOOL = frozenset({"aten.sub", "aten.rsub"})  # torch's meta functions accept masks that eager refuses
_FLOAT_ONLY = frozenset({"aten.gelu", "aten.silu", "aten.frac"})


def elementwise_meta(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of an elementwise operator as a meta tensor; None if torch has to be asked."""
    if ".".join(op.split(".")[:2]) in _REFUSE_BOOL and any(_is_bool(a) for a in args[:2]):
        raise Unsupported("eager subtracts no bools", op)
    kind = KINDS.get(op)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if kind is None or kwargs.get("dtype") is not None or kwargs.get("rounding_mode") is not None:
        return None
    if not tensors or not set(kwargs) <= {"alpha", "approximate"} or not all(_is_operand(a) for a in args[:2]):
        return None
    dtype = promoted(args[:2])
    if op.startswith("aten.bitwise") and dtype.is_floating_point:
        return None
    if op in _FLOAT_ONLY and not dtype.is_floating_point:
        return None
    bool_result = op in ("aten.add", "aten.mul") or op.startswith("aten.bitwise")
    if dtype is torch.bool and kind == SAME and not bool_result:
        return None
    if kind == FLOAT and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    elif kind == BOOL:
        dtype = torch.bool
    size = broadcast([tuple(t.shape) for t in tensors], op)
    return torch.empty_strided(size, result_strides(size, operands(op, args)), dtype=dtype, device="meta")


def operands(op: str, args: Sequence[Any]) -> list[torch.Tensor]:
    """The operands of eager's iterator, in its order; a number is a 0-dim tensor."""
    given = args[:2] if op in KINDS else args
    number = torch.empty((), device="meta")
    found = [a if isinstance(a, torch.Tensor) else number for a in given if isinstance(a, (torch.Tensor, int, float))]
    return found[::-1] if op == "aten.rsub" else found


def _is_operand(a: Any) -> bool:
    return isinstance(a, (torch.Tensor, int, float, str)) and not isinstance(a, torch.SymInt)


def _is_bool(a: Any) -> bool:
    return isinstance(a, bool) or (isinstance(a, torch.Tensor) and a.dtype is torch.bool)


def promoted(args: Sequence[Any]) -> torch.dtype:
    """The dtype to which torch promotes one or two operands."""
    operands = [a for a in args if isinstance(a, (torch.Tensor, int, float))]
    if len(operands) == 1 and isinstance(operands[0], torch.Tensor):
        return operands[0].dtype
    return torch.result_type(operands[0], operands[1])


def broadcast(sizes: Sequence[tuple[int, ...]], op: str) -> tuple[int, ...]:
    """The common size. Unsupported if there is none, so that eager raises its error."""
    rank = max(len(s) for s in sizes)
    out = [1] * rank
    for size in sizes:
        for at, n in enumerate(size, rank - len(size)):
            if n != 1:
                if out[at] not in (1, n):
                    raise Unsupported(
                        because("eager_raises", f"sizes {', '.join(map(str, sizes))} do not broadcast"), op
                    )
                out[at] = n
    return tuple(out)


def result_strides(size: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Strides of the result: its dims are stored in the operands' order.

    Source: `TensorIteratorBase::reorder_dimensions` and its fast paths (aten/src/ATen/TensorIterator.cpp).
    """
    same_size = all(tuple(t.shape) == size for t in tensors)
    if same_size and all(t.is_contiguous() for t in tensors):
        return dense_strides(size, list(range(len(size))))
    if same_size and len(size) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors):
        return dense_strides(size, [0, 2, 3, 1])
    if same_size and len({t.stride() for t in tensors}) == 1 and is_dense(tensors[0]):
        return tuple(tensors[0].stride())
    strides = [_expanded_strides(size, t) for t in tensors]
    perm = list(range(len(size)))[::-1]  # fastest first
    for i in range(1, len(perm)):
        at = i
        for other in range(i - 1, -1, -1):
            verdict = _compare(strides, size, perm[other], perm[at])
            if verdict > 0:
                perm[other], perm[at] = perm[at], perm[other]
                at = other
            elif verdict < 0:
                break
    return dense_strides(size, perm[::-1])


def _compare(strides: list[tuple[int, ...]], size: tuple[int, ...], faster: int, slower: int) -> int:
    for s in strides:
        a, b = s[faster], s[slower]
        if a == 0 or b == 0:
            continue
        if a != b:
            return -1 if a < b else 1
        if size[faster] > size[slower]:
            return 1
    return 0


def _expanded_strides(size: tuple[int, ...], t: torch.Tensor) -> tuple[int, ...]:
    lead = len(size) - t.dim()
    own = [0 if n == 1 and size[lead + d] != 1 else s for d, (n, s) in enumerate(zip(t.shape, t.stride()))]
    return (0,) * lead + tuple(own)


def is_dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their memory without overlap, in some order of the dims."""
    expected = 1
    for stride, n in sorted((s, n) for n, s in zip(t.shape, t.stride()) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True


def is_row_major(t: torch.Tensor) -> bool:
    """Whether a tensor of known size is contiguous, also by its strides in dims of 0 or 1 elements."""
    return t.stride() == dense_strides(tuple(t.shape), range(t.dim()))


def row_major(value: Any) -> Any:
    """A contiguous meta tensor of a tensor's size; anything else unchanged."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value


def copies_overlap(x: torch.Tensor) -> bool:
    """Whether elements share memory in eager's copy of a tensor for `select_scatter` and the like.

    Overlapping windows do; the copy of an expanded tensor is dense. Interlaced strides without overlap count as
    sharing.
    """
    reach = 0
    places = sorted((s, n) for n, s in zip(x.shape, x.stride()) if n > 1)
    if not x.numel() or not places or not places[0][0]:
        return False
    for stride, n in places:
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def order_like(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dims from outermost to innermost in the order of `stride`; the last dim is innermost if it must be dense."""
    inner = sorted(range(len(size)), key=lambda d: (stride[d], -d))
    last = len(size) - 1
    if math.prod(size[d] for d in inner[: inner.index(last)]) != 1:
        inner = [last, *(d for d in inner if d != last)]
    return tuple(reversed(inner))


def dense_strides(size: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Dense strides with the dims in `order`, outermost first; a size of 0 counts as 1, as in torch."""
    out = [0] * len(size)
    running = 1
    for d in reversed(order):
        out[d] = running
        running *= max(size[d], 1)
    return tuple(out)
