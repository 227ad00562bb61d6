"""Passes over the functional ATen graph, in the order in which they run."""

from __future__ import annotations

from fuser.passes.accumulate import add_rows_in_place, add_rows_to_zeros
from fuser.passes.attention_blocks import attention_by_blocks
from fuser.passes.attention_providers import attention_by_parts
from fuser.passes.cleanup import drop_dead, merge_equal, remove_noops, split_to_slices
from fuser.passes.conv_bias import bias_behind_convolution
from fuser.passes.cublas import fold_into_cublas
from fuser.passes.flex_attention import serve_flex_attention
from fuser.passes.folding import join_pieces
from fuser.passes.freezing import pack_weights
from fuser.passes.frozen_values import fold_frozen
from fuser.passes.norms import norms_apart
from fuser.passes.onednn import fold_epilogues, large_products, linear_to_onednn
from fuser.passes.runner import Pass
from fuser.passes.scatters import scatters_in_place
from fuser.passes.wide_products import products_in_float32
from fuser.passes.written_pieces import join_writes

POST_GRAD: tuple[Pass, ...] = (
    Pass("remove_noops", remove_noops),
    Pass("split_to_slices", split_to_slices),
    Pass("join_pieces", join_pieces),
    Pass("join_writes", join_writes),
    Pass("merge_equal", merge_equal),
    Pass("fold_frozen", fold_frozen),
    Pass("norms_apart", norms_apart),
    Pass("serve_flex_attention", serve_flex_attention),
    Pass("attention_by_blocks", attention_by_blocks),
    Pass("attention_by_parts", attention_by_parts),
    Pass("products_in_float32", products_in_float32),
    Pass("large_products", large_products),
    Pass("linear_to_onednn", linear_to_onednn),
    Pass("fold_epilogues", fold_epilogues),
    Pass("pack_weights", pack_weights),
    Pass("fold_into_cublas", fold_into_cublas),
    Pass("bias_behind_convolution", bias_behind_convolution),
    Pass("add_rows_in_place", add_rows_in_place),
    Pass("add_rows_to_zeros", add_rows_to_zeros),
    Pass("drop_dead", drop_dead),
    Pass("scatters_in_place", scatters_in_place),
)
