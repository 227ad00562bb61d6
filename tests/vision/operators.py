"""torchvision's operators in Python, for a torch that cannot load the wheel's binaries (they are builds for CUDA)."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_KEPT: list[torch.library.Library] = []


def has_ops() -> bool:
    """TorchScript compiles it in place of torchvision's own, which says no."""
    return True


def prepare() -> None:
    """Make torchvision importable, and its detection models scriptable. The binaries are used where they load."""
    if _KEPT or _loads():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    library.define("box_iou_rotated(Tensor boxes1, Tensor boxes2) -> Tensor")  # no model calls it
    library.impl("nms", nms, "CompositeExplicitAutograd")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    _KEPT.append(library)
    import torchvision

    torchvision.extension._has_ops = has_ops


def _loads() -> bool:
    try:
        import torchvision
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [n for n in sys.modules if n.startswith("torchvision")]:
            del sys.modules[name]
        return False
    return bool(torchvision.extension._has_ops())


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes (x1, y1, x2, y2) that no better one overlaps by more than the threshold, best first."""
    boxes = dets.detach().double()
    low, high = boxes[:, :2], boxes[:, 2:]
    area = (high - low).prod(1)
    edges = (torch.min(high[:, None], high) - torch.max(low[:, None], low)).clamp(min=0)
    shared = edges.prod(2)
    overlaps = shared / (area[:, None] + area - shared) > iou_threshold
    order = scores.detach().argsort(descending=True, stable=True)
    alive = torch.ones(len(boxes), dtype=torch.bool)
    kept = []
    for i in order.tolist():
        if alive[i]:
            kept.append(i)
            alive &= ~overlaps[i]
    return torch.tensor(kept, dtype=torch.int64)


def roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int,
    aligned: bool,
) -> Tensor:  # fmt: skip
    """torchvision's own form in Python, uncompiled."""
    plain = sys.modules["torchvision.ops.roi_align"]._roi_align.__wrapped__
    made: Tensor = plain(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned)
    return made
