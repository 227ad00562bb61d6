"""Passes over the functional ATen graph, in the order in which they run."""

from __future__ import annotations

from fuser.passes.again import norms_apart
from fuser.passes.cleanup import drop_dead, merge_equal, remove_noops, return_written, split_to_slices
from fuser.passes.folding import join_pieces
from fuser.passes.runner import Pass, later

_ATTENTION = (
    "aten._scaled_dot_product_flash_attention_for_cpu aten._scaled_dot_product_flash_attention_for_cpu_backward"
)
_ON_CUDA = (
    "aten._scaled_dot_product_cudnn_attention aten._scaled_dot_product_cudnn_attention_backward "
    "aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_efficient_attention_backward"
)
_CUDA = "cuda"
_EMBEDDING = "aten.embedding_dense_backward"
_FLEX = "flex_attention flex_attention_backward"
_LIBRARY = "aten.mm aten.bmm aten.addmm aten.baddbmm aten.convolution aten.convolution_backward"
_PARTS = "aten.select_scatter aten.slice_scatter"

POST_GRAD: tuple[Pass, ...] = (
    Pass("return_written", return_written, calls="aten.copy_"),
    Pass("remove_noops", remove_noops),
    Pass("split_to_slices", split_to_slices),
    Pass("join_pieces", join_pieces),
    Pass("join_writes", later("written_pieces", "join_writes"), calls=_PARTS),
    Pass("merge_equal", merge_equal),
    Pass("fold_frozen", later("frozen_values", "fold_frozen"), setting="freeze"),
    Pass("norms_apart", norms_apart),
    Pass("serve_flex_attention", later("flex_attention", "serve_flex_attention"), calls=_FLEX),
    Pass("attention_by_blocks", later("attention_blocks", "attention_by_blocks"), calls=_ON_CUDA, rounds=True),
    Pass("attention_by_parts", later("attention_providers", "attention_by_parts"), calls=_ATTENTION, rounds=True),
    Pass("products_in_float32", later("wide_products", "products_in_float32"), calls=_LIBRARY, rounds=True),
    Pass("large_products", later("onednn", "large_products"), calls="aten.mm"),
    Pass("linear_to_onednn", later("onednn", "linear_to_onednn"), calls="aten.mm aten.addmm", rounds=True),
    Pass("fold_epilogues", later("onednn", "fold_epilogues"), calls="mkldnn._linear_pointwise"),
    Pass("pack_weights", later("freezing", "pack_weights"), setting="freeze"),
    Pass(
        "fold_into_cublas", later("cublas", "fold_into_cublas"), calls="aten.mm aten.addmm", device=_CUDA, rounds=True,
    ),
    Pass("slices_by_parts", later("sliced_products", "slices_by_parts"), calls="aten.mm aten.addmm", device=_CUDA),
    Pass(
        "bias_behind_convolution", later("conv_bias", "bias_behind_convolution"), calls="aten.convolution",
        device=_CUDA, rounds=True,
    ),
    Pass(
        "long_windows_to_products", later("long_windows", "long_windows_to_products"), calls="aten.convolution",
        device=_CUDA, rounds=True,
    ),
    Pass("add_rows_in_place", later("accumulate", "add_rows_in_place"), calls=_EMBEDDING, rounds=True),
    Pass("add_rows_to_zeros", later("accumulate", "add_rows_to_zeros"), calls=_EMBEDDING, rounds=True),
    Pass("read_written_parts", later("written_parts", "read_written_parts"), calls=f"{_PARTS} aten.diagonal_scatter"),
    Pass("drop_dead", drop_dead),
    Pass("write_through_views", later("written_views", "write_through_views"), calls="aten.copy_"),
    Pass("scatters_in_place", later("scatters", "scatters_in_place"), calls="aten.copy_"),
)
