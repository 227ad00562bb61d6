"""Cases: torchvision's models with random weights and small inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model, its arguments for inference and for training. `detects`: it finds boxes, and has losses of its own."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    detects: bool = False


def _images(size: int, batch: int = 2) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.rand(batch, 3, size, size),)


def _video() -> tuple[Tensor]:
    return (torch.rand(1, 3, 8, 64, 64),)


def _scenes(*sizes: tuple[int, int]) -> Callable[[], tuple[list[Tensor]]]:
    return lambda: ([torch.rand(3, *size) for size in sizes],)


def targets(model: str) -> list[dict[str, Tensor]]:
    """What two images show, of at least 64×64: boxes, classes, and what else the model learns from."""
    found = []
    for first in (4.0, 10.0):
        boxes = torch.tensor([[first, 6, first + 30, 50], [20, first, 60, first + 40]])
        made = {"boxes": boxes, "labels": torch.tensor([1, 2 if "keypoint" not in model else 1])}
        if "mask" in model:
            masks = torch.zeros(2, 96, 96, dtype=torch.uint8)
            for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
                mask[y1:y2, x1:x2] = 1
            made["masks"] = masks
        if "keypoint" in model:
            points = boxes[:, None, :2] + torch.rand(2, 17, 2) * (boxes[:, None, 2:] - boxes[:, None, :2])
            made["keypoints"] = torch.cat([points, torch.ones(2, 17, 1)], 2)
        found.append(made)
    return found


def cases() -> list[Case]:
    """All of them; torchvision has to be importable."""
    from torchvision import models
    from torchvision.models import detection, optical_flow, segmentation, video

    inception = functools.partial(models.inception_v3, aux_logits=False, init_weights=False)
    plain: dict[str, tuple[Any, ...]] = {
        "alexnet": (models.alexnet, 96), "vgg11_bn": (models.vgg11_bn, 48), "resnet18": (models.resnet18, 64),
        "resnext50_32x4d": (models.resnext50_32x4d, 64), "wide_resnet50_2": (models.wide_resnet50_2, 64),
        "densenet121": (models.densenet121, 64), "squeezenet1_1": (models.squeezenet1_1, 64),
        "inception_v3": (inception, 96), "googlenet": (models.googlenet, 64),
        "mobilenet_v2": (models.mobilenet_v2, 64), "mobilenet_v3_small": (models.mobilenet_v3_small, 64),
        "mnasnet0_5": (models.mnasnet0_5, 64), "shufflenet_v2_x0_5": (models.shufflenet_v2_x0_5, 64),
        "efficientnet_b0": (models.efficientnet_b0, 64), "regnet_y_400mf": (models.regnet_y_400mf, 64),
        "convnext_tiny": (models.convnext_tiny, 64), "vit_b_32": (models.vit_b_32, 224),
        "swin_t": (models.swin_t, 64), "maxvit_t": (models.maxvit_t, 224),
    }  # fmt: skip
    made = [Case(name, lambda f=f: f(weights=None), _images(size)) for name, (f, size) in plain.items()]
    own: dict[str, Any] = {"weights": None, "weights_backbone": None}
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        f = getattr(segmentation, name)
        made.append(Case(name, lambda f=f: f(**own), _images(64)))
    made.append(Case("r3d_18", lambda: video.r3d_18(weights=None), _video))
    pairs = _images(128)
    made.append(Case("raft_small", lambda: optical_flow.raft_small(weights=None), lambda: (*pairs(), *pairs())))
    # The thresholds let random weights find something.
    few = {**own, "min_size": 96, "max_size": 128}
    regions = {**few, "rpn_pre_nms_top_n_test": 60, "rpn_post_nms_top_n_test": 20, "rpn_pre_nms_top_n_train": 60}
    regions |= {"rpn_post_nms_top_n_train": 30, "box_score_thresh": 0.0, "box_detections_per_img": 8}
    single = {**few, "score_thresh": 0.0, "topk_candidates": 40, "detections_per_img": 10}
    ssd = {**own, "score_thresh": 0.0, "topk_candidates": 20, "detections_per_img": 10, "num_classes": 5}
    found: dict[str, dict[str, Any]] = {
        "fasterrcnn_resnet50_fpn": regions, "fasterrcnn_mobilenet_v3_large_fpn": regions,
        "maskrcnn_resnet50_fpn": regions, "keypointrcnn_resnet50_fpn": regions,
        "retinanet_resnet50_fpn": single, "fcos_resnet50_fpn": single,
        "ssd300_vgg16": ssd, "ssdlite320_mobilenet_v3_large": ssd,
    }  # fmt: skip
    for name, options in found.items():
        f = getattr(detection, name)
        made.append(Case(name, lambda f=f, o=options: f(**o), _scenes((96, 96), (96, 96)), True))
    return made
