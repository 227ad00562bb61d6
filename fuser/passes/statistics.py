"""Batch norms in training: drops arguments that their backward does not use."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
_MEAN, _VAR, _TRAIN = 3, 4, 7  # positions of arguments


def forget_statistics(module: fx.GraphModule) -> int:
    """The backward of a batch norm in training mode is given no running statistics: it uses the batch's own.

    Saving them for it would make them results of the forward, and a result is not written in place.
    """
    changed = 0
    for node in module.graph.nodes:
        if node.target is not aten.native_batch_norm_backward.default or node.kwargs or not node.args[_TRAIN]:
            continue
        if node.args[_MEAN] is not None or node.args[_VAR] is not None:
            node.update_arg(_MEAN, None)
            node.update_arg(_VAR, None)
            changed += 1
    return changed
