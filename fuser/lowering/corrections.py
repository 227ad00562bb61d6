"""Corrects torch's shape functions where eager's kernels differ: in the layout of results, and for some in the dtype.

A rule gets the shape function's result, the device type and the call's arguments, all as meta tensors. It returns the
result that eager's kernels give. These are facts about torch, so devices have torch's names here: `Target.eager` says
whose kernels a target follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuser.canonical.aliases import overloads_named
from fuser.errors import Unsupported
from fuser.lowering.shapes import KINDS, broadcast, dense_strides, is_dense, operands, promoted, result_strides


def _statistics(meta: Any, device: str, x: torch.Tensor, *params: Any) -> Any:
    """For 16-bit floats the CPU's norms return float32 statistics if a parameter is float32, else the input's dtype."""
    if device != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
        return meta
    wide = any(isinstance(p, torch.Tensor) and p.dtype is torch.float32 for p in params)
    dtype = torch.float32 if wide else x.dtype
    return (meta[0], *(t.to(dtype) for t in meta[1:3]), *meta[3:])


def _layer_norm(meta: Any, device: str, x: torch.Tensor, shape: Any, *params: Any) -> Any:
    return _statistics(meta, device, x, *params)


def suggests_channels_last(x: torch.Tensor) -> bool:
    """Whether eager's kernels treat `x` as channels-last: by the order of its strides, with or without gaps.

    Source: `is_channels_last_strides_2d_s4` and `_3d_s5` in c10/core/MemoryFormat.h.
    """
    if x.dim() not in (4, 5) or x.stride(1) == 0:
        return False
    least = 0
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.shape[d] == 0 or x.stride(d) < least or (d == 0 and least == x.stride(1)):
            return False
        least = x.stride(d) * max(x.shape[d], 1)
    return True


def _suggested(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """The first result is channels-last if `x` is and the device is the CPU; else it is row-major."""
    if isinstance(meta, (tuple, list)):
        return (_suggested(meta[0], device, x), *meta[1:])
    if meta is None:
        return None
    return _in_layout(meta, device == "cpu" and suggests_channels_last(x))


def _in_layout(meta: torch.Tensor, channels_last: bool) -> torch.Tensor:
    order = [0, *range(2, meta.dim()), 1] if channels_last else list(range(meta.dim()))
    return torch.empty_strided(meta.shape, dense_strides(meta.shape, order), dtype=meta.dtype, device="meta")


def _dropout_backward(meta: Any, device: str, grad: torch.Tensor, *args: Any) -> Any:
    """Not on the CPU: in the gradient's suggested layout. Source: masked_scale in ATen/native/cuda/Dropout.cu."""
    if device == "cpu":
        return _in_order(meta, device, grad, *args)
    return _in_layout(meta, suggests_channels_last(grad))


def _unless_row_major(meta: Any, device: str, x: torch.Tensor) -> Any:
    """On the CPU `_suggested`, but row-major if `x` is row-major; on other devices the shape function is right."""
    if device != "cpu":
        return meta
    return (_contiguous(meta[0], device), *meta[1:]) if x.is_contiguous() else _suggested(meta, device, x)


def _padded(meta: Any, device: str, x: torch.Tensor, pad: Any, mode: Any = "constant", *args: Any) -> Any:
    """The layout depends on the operator that pads in this mode."""
    return _suggested(meta, device, x) if mode in ("reflect", "replicate", *_EDGE_MODES) else meta


_EDGE_MODES = (1, 2)  # values of `_pad_enum`: reflect and replicate


def _native_group_norm(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    return _suggested(_statistics(meta, device, x, *args), device, x)


def _batch_norm_backward(meta: Any, device: str, grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    """On other devices than the CPU: channels-last only in training, and if `x` is channels-last without gaps."""
    if device == "cpu" or meta[0] is None:
        return _suggested(meta, device, x)
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    last = layout is not None and args[5] is True and x.is_contiguous(memory_format=layout)
    return (_as_first(meta[0], device, x) if last else _contiguous(meta[0], device), *meta[1:])


def _suggested_by_second(meta: Any, device: str, grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    return _suggested(meta, device, x)


def _batch_norm(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """Outside of training the CPU's kernels return empty statistics; other kernels return the ones used."""
    meta = _unless_row_major(_statistics(meta, device, x, *args), device, x)
    if any(a is True for a in args):
        return meta
    channels = 0 if device == "cpu" else x.shape[1]
    return (meta[0], *(t.new_empty(channels) for t in meta[1:3]), *meta[3:])


def _batch_norm_functional(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """The new running statistics have the dtype of the old ones."""
    meta = _unless_row_major(_statistics(meta, device, x, *args), device, x)
    return (*meta[:3], *(t.to(old.dtype) for t, old in zip(meta[3:5], args[2:4])), *meta[5:])


def _whole_batch_norm(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    return _unless_row_major((meta,), device, x)[0]


def _roll(meta: Any, device: str, x: torch.Tensor, shifts: Any, dims: Sequence[int] = ()) -> Any:
    """The CPU's kernel joins two pieces; whether the result is channels-last depends on sizes and shifts."""
    if device == "cpu" and dims and x.dim() in (4, 5) and x.stride(1) == 1:
        raise Unsupported("roll of channels-last memory: ATen's layout depends on sizes and shifts")
    return meta


def _index(meta: Any, device: str, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """The result's layout by TensorIterator's rule, for `x` with stride 0 along the indexed dims.

    The indexed dims keep the memory order that they have in the indices. They are inner dims if the others are larger.

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
    """Row-major for any layout of the arguments."""
    if isinstance(meta, (tuple, list)):
        return tuple(_contiguous(m, device) for m in meta)
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta") if isinstance(meta, torch.Tensor) else meta


def _any_all(meta: Any, device: str, x: torch.Tensor, dims: Any = None, *args: Any) -> Any:
    """Of no dims the shape function gives the input's strides; eager's kernels allocate row-major results."""
    is_of_none = dims is not None and not isinstance(dims, int) and not dims
    return _contiguous(meta, device) if is_of_none else meta


def _log_sigmoid(meta: Any, device: str, x: torch.Tensor) -> Any:
    """The CPU's kernel returns contiguous results for any layout of its argument."""
    if device != "cpu":
        return meta
    return _contiguous(meta, device)


def _as_first(meta: Any, device: str, x: Any, *args: Any) -> Any:
    """The strides of a copy of the first argument, if the result has its size."""
    if not isinstance(x, torch.Tensor) or not isinstance(meta, torch.Tensor) or meta.shape != x.shape:
        return meta
    return torch.empty_strided(meta.shape, x.clone().stride(), dtype=meta.dtype, device="meta")


def _as_second(meta: Any, device: str, _: Any, x: Any, *args: Any) -> Any:
    return _as_first(meta, device, x)


def _like(meta: Any, device: str, x: Any, *args: Any) -> Any:
    """The first argument's strides also in dims of one element; for a requested layout the shape function is right."""
    alike = all(n == 1 or a == b for n, a, b in zip(x.shape, meta.stride(), x.stride()))
    return _as_first(meta, device, x) if alike and is_dense(x) else meta


def _pow(meta: Any, device: str, a: Any, b: Any) -> Any:
    """Powers of a number are contiguous. A bool tensor to the power of a bool stays a bool tensor."""
    if isinstance(b, bool) and isinstance(a, torch.Tensor) and a.dtype is torch.bool:
        meta = meta.to(torch.bool)
    return _in_order(meta, device, a, b) if isinstance(a, torch.Tensor) else _contiguous(meta, device)


def _in_order(meta: Any, device: str, *args: Any) -> Any:
    """TensorIterator's strides, where numbers among the arguments are not operands."""
    return _iterated([a for a in args if isinstance(a, torch.Tensor)], meta, device)


def _in_reverse(meta: Any, device: str, *args: Any) -> Any:
    return _iterated([a for a in args if isinstance(a, torch.Tensor)][::-1], meta, device)


def _with_numbers(meta: Any, device: str, *args: Any) -> Any:
    """TensorIterator's strides, where numbers among the arguments are operands, too."""
    return _iterated(operands("", args), meta, device)


def _iterated(tensors: Sequence[torch.Tensor], meta: Any, device: str, common: torch.dtype | None = None) -> Any:
    """The strides of an elementwise result by TensorIterator's rule; `meta` if it does not have the broadcast size.

    The CPU first casts operands to the common dtype: a copy of an expanded tensor is dense. Source: `compute_types` in
    aten/src/ATen/TensorIterator.cpp.
    """
    if not isinstance(meta, torch.Tensor):
        return meta
    size, common = tuple(meta.shape), common or meta.dtype
    if not tensors or size != broadcast([tuple(t.shape) for t in tensors], ""):
        return meta
    if device == "cpu" and common is not torch.bool and len(tensors) > 1:
        tensors = [t if t.dtype is common or not t.dim() or is_dense(t) else _dense_copy(t) for t in tensors]
    return torch.empty_strided(size, result_strides(size, tensors), dtype=meta.dtype, device="meta")


def _where(meta: Any, device: str, condition: torch.Tensor, *args: Any) -> Any:
    """Eager casts the two values, not the condition."""
    chosen = [a for a in args if isinstance(a, torch.Tensor)]
    cast = [t if t.dtype is meta.dtype or is_dense(t) else _dense_copy(t) for t in chosen]
    return _iterated([condition, *cast], meta, device, torch.bool)


def _glu(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """In the order of the two halves."""
    half = torch.empty_strided(meta.shape, x.stride(), dtype=x.dtype, device="meta")
    return _iterated([half, half], meta, device)


def _dense_copy(t: torch.Tensor) -> torch.Tensor:
    size = tuple(t.shape)
    return torch.empty_strided(size, result_strides(size, [t]), dtype=t.dtype, device="meta")


def _of_target(meta: Any, device: str, x: Any, target: Any, *args: Any) -> Any:
    """The strides of 1 - target, which eager computes first and then overwrites."""
    return _as_first(meta, device, target)


def _in_place_on_first(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    return _iterated([x], meta.to(x.dtype), device)


def _soft_margin_loss_backward(meta: Any, device: str, grad: Any, x: Any, target: Any, *args: Any) -> Any:
    """The strides of target * exp(-target * x), which eager computes first and then overwrites."""
    product = _iterated([_dense_copy(target), x], meta, device)
    return _iterated([target, _iterated([product], meta, device)], meta, device)


def _into_first(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """Written into a tensor like the first argument, unless the result is larger."""
    return _as_first(meta, device, x) if meta.shape == x.shape else _in_order(meta, device, x, *args)


def _huber_loss(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """In the dtype of the first argument."""
    return _into_first(meta.to(x.dtype), device, x, *args)


def _loss_backward(meta: Any, device: str, grad: Any, x: Any, target: Any, *args: Any) -> Any:
    """Written into a row-major tensor of the input's size, unless the result is larger."""
    same = meta.shape == x.shape
    return _contiguous(meta, device) if same else _iterated([x, target, grad], meta, device)


def _log_sigmoid_backward(meta: Any, device: str, grad: Any, x: Any, buffer: Any) -> Any:
    tensors = (x, buffer, grad) if device == "cpu" else (x, grad)
    return _as_first(meta, device, grad) if meta.shape == grad.shape else _iterated(tensors, meta, device)


def _all_as_first(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    return tuple(_as_first(m, device, x) for m in meta)


def _of_parts(meta: Any, device: str, *args: Any) -> Any:
    """In the operands' order, although the result has another dtype."""
    return _iterated(args, meta, device, args[0].dtype)


def _in_two_steps(meta: Any, device: str, x: torch.Tensor, *args: Any) -> Any:
    """Computed from an intermediate result with the strides of `x`."""
    return _iterated([_iterated([x], meta, device)], meta, device)


def _ldexp(meta: Any, device: str, x: Any, exponent: Any) -> Any:
    """`x` times a row-major power of 2. A 0-dim power keeps its dtype beside integers."""
    common = torch.result_type(x, exponent)
    meta = meta.to(common) if common.is_floating_point else meta
    return _iterated([x, _contiguous(exponent, device)], meta, device)


def _rot90(meta: Any, device: str, x: torch.Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """A flipped copy, transposed for odd `k`."""
    if k % 4 == 0:
        return _contiguous(meta, device)
    copy = x.clone()
    return copy.transpose(*dims) if k % 2 else copy


_IN_ORDER = (
    "addcdiv addcmul angle celu clamp clamp_min clamp_max elu elu_backward erfinv gcd gelu_backward hardshrink "
    "hardshrink_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh_backward heaviside "
    "hypot i0 igamma igammac isclose isneginf isposinf lcm leaky_relu lerp logaddexp logaddexp2 logit logit_backward "
    "max min mish mish_backward mse_loss nextafter polygamma round selu sigmoid_backward "
    "signbit silu_backward sinc smooth_l1_loss softplus softplus_backward softshrink softshrink_backward "
    "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e "
    "special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 "
    "special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1 special_spherical_bessel_j0 tanh_backward threshold"
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
    "_conj_physical binary_cross_entropy deg2rad fill flip fliplr flipud hardtanh index_fill isreal nan_to_num rad2deg "
    "relu6 zero uniform cauchy exponential geometric log_normal"
)
_LIKE = "empty_like full_like ones_like zeros_like rand_like randint_like randn_like"
_CONTIGUOUS = (
    "_log_softmax _log_softmax_backward_data _softmax_backward_data glu_backward masked_fill grid_sampler_2d "
    "native_layer_norm_backward nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd one_hot tril triu "
    "diag_embed isin poisson rrelu rrelu_with_noise renorm"
)
_SUGGESTED = (
    "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle reflection_pad2d reflection_pad3d "
    "replication_pad2d replication_pad3d group_norm max_unpool2d"
)
_SUGGESTED_BY_SECOND = (
    "native_group_norm_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad2d_backward replication_pad3d_backward"
)
_LAYOUTS = (
    (_in_order, _IN_ORDER), (_with_numbers, _WITH_NUMBERS), (_in_reverse, _IN_REVERSE), (_as_first, _AS_FIRST),
    (_like, _LIKE), (_contiguous, _CONTIGUOUS), (_suggested, _SUGGESTED),
    (_suggested_by_second, _SUGGESTED_BY_SECOND),
)  # fmt: skip


CORRECTIONS: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}": rule for rule, names in _LAYOUTS for name in names.split()},
    "aten.pow": _pow,
    "aten.any": _any_all,
    "aten.all": _any_all,
    "aten.binary_cross_entropy_with_logits": _of_target,
    "aten.complex": _of_parts,
    "aten.frexp": _all_as_first,
    "aten.huber_loss": _huber_loss,
    "aten.huber_loss_backward": _loss_backward,
    "aten.log_sigmoid_backward": _log_sigmoid_backward,
    "aten.mse_loss_backward": _loss_backward,
    "aten.normal": _contiguous,
    "aten.isfinite": _in_two_steps,
    "aten.ldexp": _ldexp,
    "aten.native_dropout_backward": _dropout_backward,
    "aten.polar": _of_parts,
    "aten.rot90": _rot90,
    "aten.sort": _all_as_first,
    "aten.where": _where,
    "aten.glu": _glu,
    "aten.special_ndtr": _in_two_steps,
    "aten.smooth_l1_loss_backward": _loss_backward,
    "aten._prelu_kernel": _into_first,
    "aten.soft_margin_loss": _in_place_on_first,
    "aten.soft_margin_loss_backward": _soft_margin_loss_backward,
    "aten.pad": _padded,
    "aten._pad_enum": _padded,
    "aten.binary_cross_entropy_backward": _as_second,
    "aten.log_sigmoid": _log_sigmoid,
    "aten.log_sigmoid_forward": _log_sigmoid,
    "aten.roll": _roll,
    "aten.index": _index,
    "aten._unsafe_index": _index,
    "aten.native_layer_norm": _layer_norm,
    "aten.batch_norm": _whole_batch_norm,
    "aten.native_group_norm": _native_group_norm,
    "aten.native_batch_norm": _batch_norm,
    "aten.native_batch_norm_backward": _batch_norm_backward,
    "aten._native_batch_norm_legit": _batch_norm,
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten._native_batch_norm_legit_functional": _batch_norm_functional,
}


def is_corrected(op: str) -> bool:
    """Whether torch's shape function of "aten.add" or "aten.add.Tensor" may be wrong."""
    packet = ".".join(op.split(".")[:2])
    return packet in KINDS or packet in CORRECTIONS


def corrected(op: str, device: str, meta: Any, args: Sequence[Any]) -> Any:
    """An operator's meta result with the strides and dtype of eager's kernels on `device`."""
    packet = op.rsplit(".", 1)[0] if op.count(".") == 2 else op
    if packet in CORRECTIONS:
        return CORRECTIONS[packet](meta, device, *args)
    if packet not in KINDS:
        return meta
    common = promoted(args[:2]) if meta.dtype is torch.bool else meta.dtype
    return _iterated(operands(packet, args), meta, device, common)


class PartsCorrected(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which each operator that a composite operator calls returns a meta tensor with eager's strides."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch would import Dynamo, to wrap `__torch_dispatch__` and keep Dynamo out of it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run one call on meta tensors and correct its result."""
        found = func(*args, **(kwargs or {}))
        plain = func._schema.is_mutable or func.is_view
        return found if plain else corrected(str(func.overloadpacket), self.device, found, args)


@functools.cache
def is_composite(op: str) -> bool:
    """Whether eager decomposes "aten.kl_div" into other operators, each with a layout of its own."""
    overloads = overloads_named(op.split(".")[1]) if op.startswith("aten.") and not is_corrected(op) else ()
    return any(_is_taken_apart(o.name()) for o in overloads)  # type: ignore[no-untyped-call]


def _is_taken_apart(name: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:  # an overload of TorchScript
        return False
