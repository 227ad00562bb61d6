"""Shapes, dtypes and strides of elementwise results, as eager's TensorIterator has them.

torch answers the same question with its operators on meta tensors, in Python for most elementwise ones: that costs
0.1 ms an operator, and the first one imports the whole of dynamo. Chains of elementwise operators are what is compiled
most, so their rule is here; everything else asks torch (`graph.run_meta`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported

# How the result's dtype follows from the promoted operands: the same; float for integers; always bool.
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
_REFUSE_BOOL = frozenset({"aten.sub", "aten.rsub"})  # torch's meta functions take masks that eager refuses
_FLOAT_ONLY = frozenset({"aten.gelu", "aten.silu", "aten.frac"})


def elementwise_meta(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of an elementwise operator as a meta tensor; None where only torch knows."""
    if op in _REFUSE_BOOL and any(_is_bool(a) for a in args[:2]):
        raise Unsupported("eager subtracts no masks", op)
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
    """What eager's iterator has as operands, in its order: a number is a tensor without dims."""
    given = args[:2] if op in KINDS else args
    number = torch.empty((), device="meta")
    found = [a if isinstance(a, torch.Tensor) else number for a in given if isinstance(a, (torch.Tensor, int, float))]
    return found[::-1] if op == "aten.rsub" else found


def _is_operand(a: Any) -> bool:
    return isinstance(a, (torch.Tensor, int, float, str)) and not isinstance(a, torch.SymInt)


def _is_bool(a: Any) -> bool:
    return isinstance(a, bool) or (isinstance(a, torch.Tensor) and a.dtype is torch.bool)


def promoted(args: Sequence[Any]) -> torch.dtype:
    """The dtype that torch promotes one or two operands to."""
    operands = [a for a in args if isinstance(a, (torch.Tensor, int, float))]
    if len(operands) == 1 and isinstance(operands[0], torch.Tensor):
        return operands[0].dtype
    return torch.result_type(operands[0], operands[1])


def broadcast(sizes: Sequence[tuple[int, ...]], op: str) -> tuple[int, ...]:
    """The common size. Unsupported, so that eager gives its error, if there is none."""
    rank = max(len(s) for s in sizes)
    out = [1] * rank
    for size in sizes:
        for at, n in enumerate(size, rank - len(size)):
            if n != 1:
                if out[at] not in (1, n):
                    raise Unsupported(f"sizes {', '.join(map(str, sizes))} do not broadcast", op)
                out[at] = n
    return tuple(out)


def result_strides(size: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Strides of the result: dims in memory in the order in which the operands have them.

    Source: `TensorIteratorBase::reorder_dimensions` and its fast paths (aten/src/ATen/TensorIterator.cpp).
    """
    same_size = all(tuple(t.shape) == size for t in tensors)
    if same_size and all(t.is_contiguous() for t in tensors):
        return dense_strides(size, list(range(len(size))))
    if same_size and len(size) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors):
        return dense_strides(size, [0, 2, 3, 1])
    if same_size and len({t.stride() for t in tensors}) == 1 and _is_dense(tensors[0]):
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


def _is_dense(t: torch.Tensor) -> bool:
    expected = 1
    for stride, n in sorted((s, n) for n, s in zip(t.shape, t.stride()) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True


def copies_overlap(x: torch.Tensor) -> bool:
    """Whether elements share memory in eager's copy of a tensor for `select_scatter` and the like, as windows do that
    overlap. It is a dense one of a tensor that is expanded. Strides interlaced without overlapping count as well."""
    reach = 0
    places = sorted((s, n) for n, s in zip(x.shape, x.stride()) if n > 1)
    if not x.numel() or not places or not places[0][0]:
        return False
    for stride, n in places:
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def dense_strides(size: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Dense strides with the dims of `order` from outermost to innermost, sizes of 0 counted as 1 as torch does."""
    out = [0] * len(size)
    running = 1
    for d in reversed(order):
        out[d] = running
        running *= max(size[d], 1)
    return tuple(out)


# -- where eager's kernels differ from its shape functions -------------------------------------------------------------
def _statistics(meta: Any, device: str, x: torch.Tensor, *params: Any) -> Any:
    """For halves the CPU's norms give statistics in float32 beside float32 parameters, else in the input's dtype."""
    if device != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
        return meta
    wide = any(isinstance(p, torch.Tensor) and p.dtype is torch.float32 for p in params)
    dtype = torch.float32 if wide else x.dtype
    return (meta[0], *(t.to(dtype) for t in meta[1:3]), *meta[3:])


def _layer_norm(meta: Any, device: str, x: torch.Tensor, shape: Any, *params: Any) -> Any:
    return _statistics(meta, device, x, *params)


def _kept_layout(meta: Any, x: torch.Tensor) -> Any:
    """A first result in the channels-last memory that `x` has."""
    layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d if x.dim() == 5 else None
    first = meta[0] if isinstance(meta, (tuple, list)) else meta
    if first is None or layout is None or x.is_contiguous() or not x.is_contiguous(memory_format=layout):
        return meta
    first = torch.empty_strided(first.shape, x.stride(), dtype=first.dtype, device="meta")
    return (first, *meta[1:]) if isinstance(meta, (tuple, list)) else first


def _group_norm(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    return _kept_layout(meta, x)


def _native_group_norm(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    return _kept_layout(_statistics(meta, device, x, *args), x)


def _norm_backward(meta: Any, device: str, grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    return _kept_layout(meta, x)


def _batch_norm(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """Outside of training the CPU's kernels return empty statistics, others those used."""
    meta = _statistics(meta, device, x, *args)
    if any(a is True for a in args):
        return meta
    channels = 0 if device == "cpu" else x.shape[1]
    return (meta[0], *(t.new_empty(channels) for t in meta[1:3]), *meta[3:])


def _batch_norm_functional(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """The new running statistics have the dtype of the old ones."""
    meta = _statistics(meta, device, x, *args)
    return (*meta[:3], *(t.to(old.dtype) for t, old in zip(meta[3:5], args[2:4])), *meta[5:])


def _roll(meta: Any, device: str, x: torch.Tensor, shifts: Any, dims: Sequence[int] = ()) -> Any:
    """The CPU's kernel joins two pieces, and so keeps channels-last memory or not, as sizes and shifts are."""
    if device == "cpu" and dims and x.dim() in (4, 5) and x.stride(1) == 1:
        raise Unsupported("roll of channels-last memory: the layout of ATen's result hangs on sizes and shifts")
    return meta


def _index(meta: Any, device: str, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """The dims of the indices lie in memory in the order in which they do in the indices, after the others if those are
    the larger ones: the rule of TensorIterator, for `x` with strides of 0 along the dims of the indices.

    Source: `make_info` in aten/src/ATen/native/TensorAdvancedIndexing.cpp.
    """
    named = {d: i for d, i in enumerate(indices) if i is not None}
    if not named or any(i.dtype in (torch.bool, torch.uint8) for i in named.values()):
        return meta
    dims, rest = list(named), [d for d in range(x.dim()) if d not in named]
    shape = broadcast([tuple(i.shape) for i in named.values()], "aten.index")
    common = [i.expand(shape) for i in named.values()]
    if device != "cpu" and len({i.stride() for i in common}) > 1:
        common = [i.contiguous() for i in common]
    before = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    ones = (1,) * before, (1,) * (len(rest) - before)
    strides = [x.stride(d) for d in rest]
    strides[before:before] = (0,) * len(shape)
    source = torch.empty_strided(meta.shape, strides, device="meta")
    spread = [i.reshape((*ones[0], *i.shape, *ones[1])) for i in common]
    size = tuple(meta.shape)
    return torch.empty_strided(size, result_strides(size, [source, *spread]), dtype=meta.dtype, device="meta")


def _contiguous(meta: Any, device: str, *args: Any) -> Any:
    """Whatever its arguments' layout."""
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta") if isinstance(meta, torch.Tensor) else meta


def _log_sigmoid(meta: Any, device: str, x: torch.Tensor) -> Any:
    """The CPU's kernel gives contiguous results, whatever its argument's layout."""
    if device != "cpu":
        return meta
    return tuple(map(_contiguous, meta, meta)) if isinstance(meta, tuple) else _contiguous(meta, device)


def _as_first(meta: Any, device: str, x: Any, *args: Any) -> Any:
    """As a copy of the first argument lies in memory, if the result is of its size."""
    if not isinstance(x, torch.Tensor) or not isinstance(meta, torch.Tensor) or meta.shape != x.shape:
        return meta
    return torch.empty_strided(meta.shape, x.clone().stride(), dtype=meta.dtype, device="meta")


def _as_second(meta: Any, device: str, _: Any, x: Any, *args: Any) -> Any:
    return _as_first(meta, device, x)


def _like(meta: Any, device: str, x: Any, *args: Any) -> Any:
    """The same in dims of one element; in others the shape function is right, for a layout that is asked for, too."""
    alike = all(n == 1 or a == b for n, a, b in zip(x.shape, meta.stride(), x.stride()))
    return _as_first(meta, device, x) if alike and _is_dense(x) else meta


def _pow(meta: Any, device: str, a: Any, b: Any) -> Any:
    """Powers of a number are contiguous."""
    return _in_order(meta, device, a, b) if isinstance(a, torch.Tensor) else _contiguous(meta, device)


def _in_order(meta: Any, device: str, *args: Any) -> Any:
    """Numbers among the arguments are no operands of the iterator."""
    return _iterated([a for a in args if isinstance(a, torch.Tensor)], meta, device)


def _in_reverse(meta: Any, device: str, *args: Any) -> Any:
    return _iterated([a for a in args if isinstance(a, torch.Tensor)][::-1], meta, device)


def _with_numbers(meta: Any, device: str, *args: Any) -> Any:
    """Numbers among the arguments are operands, too."""
    return _iterated(operands("", args), meta, device)


def _iterated(tensors: Sequence[torch.Tensor], meta: Any, device: str, common: torch.dtype | None = None) -> Any:
    """Strides of an elementwise result by the rule of TensorIterator, where it is one.

    The CPU casts operands of another dtype than the common one first: a copy of an expanded tensor is dense.
    Source: `compute_types` in aten/src/ATen/TensorIterator.cpp.
    """
    if not isinstance(meta, torch.Tensor):
        return meta
    size, common = tuple(meta.shape), common or meta.dtype
    if not tensors or size != broadcast([tuple(t.shape) for t in tensors], ""):
        return meta
    if device == "cpu" and common is not torch.bool and len(tensors) > 1:
        tensors = [t if t.dtype is common or not t.dim() or _is_dense(t) else _dense_copy(t) for t in tensors]
    return torch.empty_strided(size, result_strides(size, tensors), dtype=meta.dtype, device="meta")


def _dense_copy(t: torch.Tensor) -> torch.Tensor:
    size = tuple(t.shape)
    return torch.empty_strided(size, result_strides(size, [t]), dtype=t.dtype, device="meta")


_IN_ORDER = (
    "addcdiv addcmul angle celu clamp clamp_min clamp_max elu elu_backward erfinv gcd gelu_backward hardshrink "
    "hardshrink_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh_backward heaviside "
    "huber_loss hypot i0 igamma igammac isclose isneginf isposinf lcm leaky_relu lerp logaddexp logaddexp2 logit "
    "logit_backward max min mish mish_backward mse_loss native_dropout_backward nextafter polygamma _prelu_kernel "
    "round selu sigmoid_backward signbit silu_backward sinc smooth_l1_loss softplus softplus_backward softshrink "
    "softshrink_backward special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr "
    "special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 "
    "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtr special_ndtri "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 tanh_backward "
    "threshold"
)
_WITH_NUMBERS = (
    "bitwise_left_shift bitwise_right_shift copysign special_xlog1py special_zeta xlogy "
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
    "special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w"
)
_IN_REVERSE = "leaky_relu_backward threshold_backward"
_AS_FIRST = (
    "_conj_physical binary_cross_entropy deg2rad fill flip fliplr flipud hardtanh isreal nan_to_num rad2deg relu6 zero"
)
_LIKE = "empty_like full_like ones_like zeros_like"
_CONTIGUOUS = (
    "_log_softmax _log_softmax_backward_data _softmax_backward_data glu_backward huber_loss_backward masked_fill "
    "mse_loss_backward smooth_l1_loss_backward tril triu"
)
_LAYOUTS = (
    (_in_order, _IN_ORDER), (_with_numbers, _WITH_NUMBERS), (_in_reverse, _IN_REVERSE), (_as_first, _AS_FIRST),
    (_like, _LIKE), (_contiguous, _CONTIGUOUS),
)  # fmt: skip


CORRECTIONS: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}": rule for rule, names in _LAYOUTS for name in names.split()},
    "aten.pow": _pow,
    "aten.binary_cross_entropy_backward": _as_second,
    "aten.log_sigmoid": _log_sigmoid,
    "aten.log_sigmoid_forward": _log_sigmoid,
    "aten.roll": _roll,
    "aten.index": _index,
    "aten._unsafe_index": _index,
    "aten.native_layer_norm": _layer_norm,
    "aten.group_norm": _group_norm,
    "aten.native_group_norm": _native_group_norm,
    "aten.native_group_norm_backward": _norm_backward,
    "aten.native_batch_norm_backward": _norm_backward,
    "aten.native_batch_norm": _batch_norm,
    "aten._native_batch_norm_legit": _batch_norm,
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten._native_batch_norm_legit_functional": _batch_norm_functional,
}


def corrected(op: str, device: str, meta: Any, args: Sequence[Any]) -> Any:
    """What an operator's shape function gives, as eager's kernels on `device` have it."""
    packet = op.rsplit(".", 1)[0] if op.count(".") == 2 else op
    if packet in KINDS:
        common = promoted(args[:2]) if meta.dtype is torch.bool else meta.dtype
        return _iterated(operands(packet, args), meta, device, common)
    return CORRECTIONS[packet](meta, device, *args) if packet in CORRECTIONS else meta
