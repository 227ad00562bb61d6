"""`torch.nn.functional` and other functions written in Python, translated from their own signatures to ATen calls.

A translation has the Python parameters of its function, so that Python binds names and defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fuser.canonical.builder import Builder, Untranslatable

Row = Callable[..., Any]
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _refuse_if(condition: Any, what: str) -> None:
    if condition:
        raise Untranslatable(what)


def _reduction(reduction: str, size_average: Any, reduce: Any) -> int:
    _refuse_if(size_average is not None or reduce is not None, "size_average and reduce are of the old interface")
    _refuse_if(reduction not in REDUCTIONS, f"reduction={reduction!r}")
    return REDUCTIONS[reduction]


def _plain(name: str, parameters: str = "") -> Row:
    """A function whose arguments after `input` are the operator's, in order, optionally followed by `inplace`."""
    names = parameters.split()

    def row(b: Builder, input: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        if len(args) > len(names):
            *args, inplace = args  # type: ignore[assignment]
        values = {**dict(zip(names, args)), **kwargs}
        _refuse_if(set(values) - set(names), f"unknown arguments {sorted(set(values) - set(names))}")
        given = []
        for n in names:  # up to the first that is left at its default
            if n not in values:
                break
            given.append(values.pop(n))
        return b.aten(f"{name}_" if inplace else name, input, *given, **values)

    return row


def _loss(name: str, *extra: tuple[str, Any]) -> Row:
    """loss(input, target, size_average, reduce, reduction, *extra): in the operator, reduction comes third."""

    def row(
        b: Builder, input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        rest = {**dict(extra), **dict(zip([n for n, _ in extra], args)), **kwargs}
        _refuse_if(rest.pop("weight", None) is not None, "a loss with weights")
        return b.aten(name, input, target, _reduction(reduction, size_average, reduce), *rest.values())

    return row


def _softmax(name: str) -> Row:
    def row(b: Builder, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        _refuse_if(dim is None, "a softmax whose dim is left to be guessed")
        return b.aten(name, input, dim, dtype)

    return row


def _dropout(b: Builder, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    _refuse_if(not isinstance(training, bool) or not isinstance(p, (int, float)), "dropout with unknown arguments")
    _refuse_if(not 0 <= p <= 1, "a probability outside [0, 1]")
    return b.aten("dropout_" if inplace else "dropout", input, p, True) if training else input


def _layer_norm(
    b: Builder, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    return b.aten("layer_norm", input, normalized_shape, weight, bias, eps)


def _rms_norm(b: Builder, input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    return b.aten("rms_norm", input, normalized_shape, weight, eps)


def _group_norm(
    b: Builder, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    return b.aten("group_norm", input, num_groups, weight, bias, eps)


def _batch_norm(
    b: Builder, input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    _refuse_if(training is not False, "batch_norm in training, which writes its running statistics")
    return b.aten("batch_norm", input, weight, bias, running_mean, running_var, False, momentum, eps, True)


def _instance_norm(
    b: Builder, input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    writes = use_input_stats is not False and (running_mean is not None or running_var is not None)
    _refuse_if(writes, "instance_norm that writes its running statistics")
    return b.aten(
        "instance_norm", input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, True
    )  # fmt: skip


def _embedding(
    b: Builder, input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    _refuse_if(max_norm is not None, "an embedding with max_norm, which writes its weight")
    _refuse_if(padding_idx is not None and padding_idx < 0, "a padding_idx from the end")
    return b.aten("embedding", weight, input, -1 if padding_idx is None else padding_idx, scale_grad_by_freq, sparse)


def _cross_entropy(
    b: Builder, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    how = _reduction(reduction, size_average, reduce)
    return b.aten("cross_entropy_loss", input, target, weight, how, ignore_index, label_smoothing)


def _nll_loss(
    b: Builder, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    return b.aten("nll_loss_nd", input, target, weight, _reduction(reduction, size_average, reduce), ignore_index)


def _binary_cross_entropy_with_logits(
    b: Builder, input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", pos_weight: Any = None,
) -> Any:  # fmt: skip
    how = _reduction(reduction, size_average, reduce)
    return b.aten("binary_cross_entropy_with_logits", input, target, weight, pos_weight, how)


def _kl_div(
    b: Builder, input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
    log_target: bool = False,
) -> Any:  # fmt: skip
    how = _reduction(reduction, size_average, reduce)
    return b.aten("kl_div", input, target, how, log_target=log_target)


def _huber_loss(
    b: Builder, input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> Any:
    _refuse_if(weight is not None, "a loss with weights")
    return b.aten("huber_loss", input, target, _reduction(reduction, None, None), delta)


def _softsign(b: Builder, input: Any) -> Any:
    return b.aten("div", input, b.aten("add", b.aten("abs", input), 1))


def _tanhshrink(b: Builder, input: Any) -> Any:
    return b.aten("sub", input, b.aten("tanh", input))


def _normalize(b: Builder, input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    _refuse_if(out is not None, "normalize into out")
    norm = b.aten("clamp_min", _norm(b, input, p, dim, keepdim=True), eps)
    return b.aten("div", input, b.aten("expand_as", norm, input))


def _norm(
    b: Builder, input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    _refuse_if(out is not None or (isinstance(p, str) and p != "fro"), "this norm")
    _refuse_if(p == "fro" and isinstance(dim, (tuple, list)) and len(dim) > 2, "a Frobenius norm over many dims")
    return b.aten("linalg_vector_norm", input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


def _split(b: Builder, tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    return b.aten("split", tensor, split_size_or_sections, dim)


def _method_split(b: Builder, tensor: Any, split_size: Any, dim: int = 0) -> Any:
    return b.aten("split", tensor, split_size, dim)


def _pad(b: Builder, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    return b.aten("pad", input, pad, mode, value)


def _einsum(b: Builder, equation: Any, *operands: Any) -> Any:
    _refuse_if(not isinstance(equation, str), "einsum without an equation")
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    return b.aten("einsum", equation, tuple(tensors))


def _broadcast_tensors(b: Builder, *tensors: Any) -> Any:
    many = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    return b.aten("broadcast_tensors", tuple(many))


def _tensors(name: str) -> Row:
    """A function of any number of tensors, given separately or as a list."""

    def row(b: Builder, *tensors: Any, **kwargs: Any) -> Any:
        many = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
        return b.aten(name, tuple(many), **kwargs)

    return row


def _atleast(name: str) -> Row:
    many = _tensors(name)
    return lambda b, *tensors: b.aten(name, tensors[0]) if len(tensors) == 1 else many(b, *tensors)


def _max_pool2d(
    b: Builder, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    _refuse_if(return_indices, "a pooling that returns indices")
    return b.aten("max_pool2d", input, kernel_size, () if stride is None else stride, padding, dilation, ceil_mode)


def _adaptive_avg_pool2d(b: Builder, input: Any, output_size: Any) -> Any:
    sizes = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)
    _refuse_if(None in sizes, "a pooling that keeps one size")
    return b.aten("adaptive_avg_pool2d", input, sizes)




FUNCTIONALS: dict[Any, Row] = {
    F.relu: _plain("relu"), F.relu6: _plain("relu6"), F.elu: _plain("elu", "alpha"), F.selu: _plain("selu"),
    F.celu: _plain("celu", "alpha"), F.leaky_relu: _plain("leaky_relu", "negative_slope"), F.silu: _plain("silu"),
    F.mish: _plain("mish"), F.hardswish: _plain("hardswish"), F.hardsigmoid: _plain("hardsigmoid"),
    F.hardtanh: _plain("hardtanh", "min_val max_val"), F.threshold: _plain("threshold", "threshold value"),
    F.sigmoid: _plain("sigmoid"), F.tanh: _plain("tanh"), F.glu: _plain("glu", "dim"),
    F.softsign: _softsign, F.tanhshrink: _tanhshrink,
    F.softmax: _softmax("softmax"), F.log_softmax: _softmax("log_softmax"), F.dropout: _dropout,
    F.layer_norm: _layer_norm, F.rms_norm: _rms_norm, F.group_norm: _group_norm, F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm, F.normalize: _normalize, F.embedding: _embedding,
    F.cross_entropy: _cross_entropy, F.nll_loss: _nll_loss, F.kl_div: _kl_div,
    F.mse_loss: _loss("mse_loss", ("weight", None)), F.l1_loss: _loss("l1_loss", ("weight", None)),
    F.smooth_l1_loss: _loss("smooth_l1_loss", ("beta", 1.0)), F.huber_loss: _huber_loss,
    F.binary_cross_entropy_with_logits: _binary_cross_entropy_with_logits,
    F.pad: _pad, F.max_pool2d: _max_pool2d, F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    torch.norm: _norm, torch.split: _split, torch.functional.split: _split, torch.einsum: _einsum,
    torch.meshgrid: _tensors("meshgrid"), torch.block_diag: _tensors("block_diag"),
    torch.atleast_1d: _atleast("atleast_1d"), torch.atleast_2d: _atleast("atleast_2d"),
    torch.atleast_3d: _atleast("atleast_3d"),
    torch.broadcast_tensors: _broadcast_tensors, torch.Tensor.norm: _norm, torch.Tensor.split: _method_split,
}  # fmt: skip
