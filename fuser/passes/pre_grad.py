"""Passes over Dynamo's graph, before autograd, in the order in which they run."""

from __future__ import annotations

from fuser.passes.normalise import drop_identities, keep_loss_weights, name_written, put_known_numbers
from fuser.passes.runner import Pass, later
from fuser.passes.written_layouts import copy_as_eager, keep_written_layouts

PRE_GRAD: tuple[Pass, ...] = (
    Pass("put_known_numbers", put_known_numbers),
    Pass("keep_written_layouts", keep_written_layouts),
    Pass("copy_as_eager", copy_as_eager),
    Pass("name_written", name_written),
    Pass("drop_identities", drop_identities),
    Pass("keep_loss_weights", keep_loss_weights, calls="l1_loss"),
    Pass(
        "fuse_attention", later("attention", "fuse_attention"), calls="softmax scaled_dot_product_attention",
        rounds=True,
    ),
    Pass("fold_batch_norms", later("batch_norms", "fold_batch_norms"), calls="batch_norm", rounds=True),
)
