"""Passes over the functional graph of forward and backward, in the order in which they run."""

from __future__ import annotations

from fuser.passes.folding import fold_uniform, merge_casts, merge_views, numbers_on_device
from fuser.passes.randomness import functional_random
from fuser.passes.runner import Pass, later

_ATTENTION = (
    "aten._scaled_dot_product_flash_attention_for_cpu aten._scaled_dot_product_cudnn_attention "
    "aten._scaled_dot_product_efficient_attention"
)
_COMPLEX = "aten.view_as_real aten.view_as_complex aten.complex aten.polar aten.angle aten.abs aten.sgn aten.eq"
_CONVOLUTION = "aten.convolution"
_CUDA = "cuda"
_FLEX = "flex_attention flex_attention_backward"
_MATRICES = "aten.mm aten.bmm aten.addmm aten.baddbmm"
_KINKS = "aten.threshold_backward aten.leaky_relu_backward aten.hardtanh_backward"
_NORMS = (
    "aten.native_layer_norm aten._fused_rms_norm aten._native_batch_norm_legit_functional "
    "aten._native_batch_norm_legit aten.native_group_norm"
)
_POOLS = "aten.max_pool2d_with_indices aten.max_pool3d_with_indices"

JOINT_GRAPH: tuple[Pass, ...] = (
    Pass("functional_random", functional_random),
    Pass("split_foreach", later("foreach", "split_foreach"), calls="aten._foreach_*"),
    Pass("diagonals_by_name", later("diagonals", "diagonals_by_name"), calls="aten.as_strided aten.as_strided_scatter"),
    Pass("complex_by_parts", later("complex_numbers", "complex_by_parts"), calls=_COMPLEX),
    Pass("drop_single_blocks", later("flex_attention", "drop_single_blocks"), calls=_FLEX),
    Pass("bound_attention", later("attention_reach", "bound_attention"), calls=_ATTENTION),
    Pass("numbers_on_device", numbers_on_device),
    Pass("fold_uniform", fold_uniform),
    Pass("merge_casts", merge_casts),
    Pass("merge_views", merge_views),
    Pass("small_products_to_sums", later("small_products", "small_products_to_sums"), calls=_MATRICES, rounds=True),
    Pass("add_to_addmm", later("matmuls", "add_to_addmm"), calls="aten.mm", rounds=True),
    Pass("addmm_to_add", later("matmuls", "addmm_to_add"), calls="aten.addmm", rounds=True),
    Pass(
        "patches_to_products", later("patches", "patches_to_products"), calls=_CONVOLUTION, device=_CUDA, rounds=True
    ),
    Pass(
        "aligned_products", later("aligned_products", "aligned_products"), calls="aten.mm aten.addmm", device=_CUDA,
        rounds=True,
    ),
    Pass("forget_statistics", later("statistics", "forget_statistics"), calls="aten.native_batch_norm_backward"),
    Pass("norms_again", later("norms", "norms_again"), calls="aten._native_batch_norm_legit_functional", rounds=True),
    Pass("keep_logits", later("losses", "keep_logits"), calls="aten._log_softmax", rounds=True),
    Pass("pools_by_offsets", later("pools", "pools_by_offsets"), calls=_POOLS),
    Pass("kinks_by_masks", later("kinks", "kinks_by_masks"), calls=_KINKS),
    Pass(
        "bias_gradients_apart", later("conv_bias", "bias_gradients_apart"), calls="aten.convolution_backward",
        device=_CUDA, rounds=True,
    ),
    Pass(
        "convolutions_channels_last", later("convolutions", "convolutions_channels_last"), calls=_CONVOLUTION,
        rounds=True,
    ),
    Pass(
        "tensor_cores_channels_last", later("conv_tensor_cores", "tensor_cores_channels_last"), calls=_CONVOLUTION,
        device=_CUDA, rounds=True,
    ),
    Pass(
        "grouped_points_to_products", later("grouped_points", "grouped_points_to_products"), calls=_CONVOLUTION,
        device=_CUDA, rounds=True,
    ),
    Pass(
        "depthwise_by_kernels", later("depthwise", "depthwise_by_kernels"), calls=_CONVOLUTION, device=_CUDA,
        rounds=True,
    ),
    Pass(
        "depthwise_gradients", later("depthwise_gradients", "depthwise_gradients"), calls="aten.convolution_backward",
        device=_CUDA, rounds=True,
    ),
    Pass("decompose_norms", later("norm_results", "decompose_norms"), calls=_NORMS, rounds=True),
)
