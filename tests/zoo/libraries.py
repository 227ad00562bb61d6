"""What the zoo's libraries need before they are imported."""

from __future__ import annotations

import logging
import os
import warnings

import torch

_KEPT: list[torch.library.Library] = []


def prepare() -> None:
    """Quiet, offline, and importable where torchvision is a CUDA build and torch is not.

    `timm` and `transformers` import torchvision, whose Python part wants two operators to exist; no model of the
    zoo calls them.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms") and not _KEPT:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
