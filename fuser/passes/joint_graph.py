"""Passes over the functional graph of forward and backward, in the order in which they run."""

from __future__ import annotations

from fuser.passes.attention_reach import bound_attention
from fuser.passes.conv_tensor_cores import tensor_cores_channels_last
from fuser.passes.convolutions import convolutions_channels_last
from fuser.passes.flex_attention import drop_single_blocks
from fuser.passes.folding import fold_uniform, merge_casts, merge_views, numbers_on_device
from fuser.passes.foreach import split_foreach
from fuser.passes.kinks import kinks_by_masks
from fuser.passes.losses import keep_logits
from fuser.passes.matmuls import add_to_addmm, addmm_to_add
from fuser.passes.norm_results import decompose_norms
from fuser.passes.norms import norms_again
from fuser.passes.pools import pools_by_offsets
from fuser.passes.randomness import functional_random
from fuser.passes.runner import Pass
from fuser.passes.statistics import forget_statistics

JOINT_GRAPH: tuple[Pass, ...] = (
    Pass("functional_random", functional_random),
    Pass("split_foreach", split_foreach),
    Pass("drop_single_blocks", drop_single_blocks),
    Pass("bound_attention", bound_attention),
    Pass("numbers_on_device", numbers_on_device),
    Pass("fold_uniform", fold_uniform),
    Pass("merge_casts", merge_casts),
    Pass("merge_views", merge_views),
    Pass("add_to_addmm", add_to_addmm),
    Pass("addmm_to_add", addmm_to_add),
    Pass("forget_statistics", forget_statistics),
    Pass("norms_again", norms_again),
    Pass("keep_logits", keep_logits),
    Pass("pools_by_offsets", pools_by_offsets),
    Pass("kinks_by_masks", kinks_by_masks),
    Pass("convolutions_channels_last", convolutions_channels_last),
    Pass("tensor_cores_channels_last", tensor_cores_channels_last),
    Pass("decompose_norms", decompose_norms),
)
