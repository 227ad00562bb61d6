"""Which composite operators AOTAutograd decomposes: those that neither a kernel nor a library computes whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import compiler, targets
from fuser.passes import resizing
from fuser.passes.classify import LIBRARY, op_name

# Kept whole for ATen: their decompositions gather element by element, or replace one pass of a library by many.
_KEPT_FOR_ATEN = frozenset(
    (
        "aten._scaled_dot_product_attention_math aten.upsample_bicubic2d aten.upsample_bilinear2d "
        "aten.upsample_linear1d aten.upsample_nearest1d aten.upsample_nearest2d aten.upsample_nearest3d "
        "aten.upsample_trilinear3d aten._upsample_nearest_exact1d aten._upsample_nearest_exact2d "
        "aten._upsample_nearest_exact3d aten._upsample_bilinear2d_aa aten._upsample_bicubic2d_aa aten.grid_sampler_2d "
        "aten.im2col aten.col2im aten.max_pool2d_with_indices aten.max_pool3d_with_indices aten.avg_pool2d "
        "aten.avg_pool3d aten._adaptive_avg_pool2d aten._adaptive_avg_pool3d aten._euclidean_dist aten._cdist_forward "
        "aten.embedding_bag aten._embedding_bag aten.index_add aten.index_copy aten.lstm aten.gru aten.native_dropout "
        "aten.unsafe_split aten.unsafe_split_with_sizes aten.max_unpool2d aten.max_unpool3d "
        "aten._weight_norm_interface aten.multilabel_margin_loss_forward aten.reflection_pad3d_backward"
    ).split()
)


def _encoder_layer(*args: Any, **kwargs: Any) -> Any:
    from fuser.passes.fast_paths import encoder_layer  # few programs have one

    return encoder_layer(*args, **kwargs)


_FAST: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    **resizing.decompositions(),
}
FROM_OUTSIDE: dict[Any, Callable[..., Any]] = {}  # by overload; see `extending.register_decomposition`


@functools.cache
def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """The table for AOTAutograd: torch's core decompositions, without operators that are kept whole.

    Composites that the dispatcher decomposes during tracing need no row. `core_aten_decompositions` lists them anyway,
    and finding them costs 0.08 s of the first compilation.
    """
    import torch._decomp as decomp

    core = getattr(decomp, "_core_aten_decompositions_post_autograd", None) or decomp.core_aten_decompositions
    torchs = dict(core())
    names = {op: op_name(op) for op in torchs}
    kept = {*_KEPT_FOR_ATEN, *LIBRARY, *compiler.lowered_of(names.values())}
    table = {op: f for op, f in torchs.items() if names[op] not in kept and not _draws(op)}
    unfold_backward = torch.ops.aten.unfold_backward.default
    if unfold_backward in table:
        table[unfold_backward] = functools.partial(_unfold_backward, table[unfold_backward])
    for isin in (torch.ops.aten.isin.Tensor_Tensor, torch.ops.aten.isin.Tensor_Scalar):
        if isin in table:
            table[isin] = functools.partial(_row_major, table[isin])
    for pad in (torch.ops.aten.reflection_pad1d_backward.default, torch.ops.aten.reflection_pad2d_backward.default):
        if pad in table:
            table[pad] = functools.partial(_unless_on_cpu, table[pad])
    rrelu = torch.ops.aten.rrelu_with_noise_functional.default
    table[rrelu] = functools.partial(_rrelu, rrelu)
    return {**table, **_FAST, **FROM_OUTSIDE}


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """The entry of `decomposition_table` for one overload, or None. Operators kept whole do not build the table."""
    if op in FROM_OUTSIDE or op in _FAST:
        return FROM_OUTSIDE.get(op) or _FAST[op]
    if op is not torch.ops.aten.rrelu_with_noise_functional.default and _is_kept(op_name(op)):
        return None
    return decomposition_table().get(op)


def _draws(op: Any) -> bool:
    """Whether an operator draws random numbers: torch's decomposition may draw others (`bernoulli` on CUDA)."""
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def _is_kept(name: str) -> bool:
    return name in _KEPT_FOR_ATEN or name in LIBRARY or bool(compiler.lowered_of((name,)))


def _row_major(general: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `general`, row-major as in eager."""
    return general(*args, **kwargs).contiguous()


def _unless_on_cpu(general: Callable[..., Any], grad: Any, *args: Any) -> Any:
    """The result of `general`; on the CPU ATen's kernel is two to four times as fast as its selections and sums."""
    return NotImplemented if targets.is_host(grad.device) else general(grad, *args)


def _rrelu(functional: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Decompose for a tensor that is not row-major: eager's result is row-major, the functional operator's is not."""
    return NotImplemented if x.is_contiguous() else functional(x.contiguous(), *args, **kwargs)


def _unfold_backward(
    general: Callable[..., Any], grad: Any, input_size: Sequence[Any], dim: int, size: Any, step: Any
) -> Any:  # fmt: skip
    """Place windows that do not overlap side by side, with zeros between: nothing is added, so -0 stays -0 as in eager.

    `general`: torch's decomposition, for overlapping windows and symbolic sizes.
    """
    d = dim % max(len(input_size), 1)
    numbers = (*input_size, *grad.shape, size, step)
    if not input_size or not all(type(n) is int for n in numbers) or step < size:
        return general(grad, input_size, dim, size, step)
    windows = (input_size[d] - size) // step + 1
    if list(grad.shape) != [*input_size[:d], windows, *input_size[d + 1 :], size]:
        return general(grad, input_size, dim, size, step)
    pad = torch.ops.aten.constant_pad_nd.default
    rows = pad(grad, [0, step - size]).movedim(-1, d + 1).flatten(d, d + 1)
    missing = input_size[d] - windows * step  # the last window's zeros may be too many or too few
    return pad(rows, [0, 0] * (len(input_size) - 1 - d) + [0, missing]).contiguous()
