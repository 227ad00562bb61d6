"""The public packages whose functions and modules are programs here; nobody wrote them with this project in mind."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.vision import operators

FUNCTIONS = (
    "kornia.color", "kornia.enhance", "kornia.filters", "kornia.geometry", "kornia.geometry.calibration",
    "kornia.losses", "kornia.morphology", "kornia.metrics", "kornia.feature", "kornia.utils", "kornia.contrib",
    "torchmetrics.functional", "torchmetrics.functional.image", "torchmetrics.functional.classification",
    "torchmetrics.functional.regression", "torchmetrics.functional.pairwise", "torchmetrics.functional.segmentation",
    "torchmetrics.functional.clustering", "torchmetrics.functional.nominal", "torchmetrics.functional.retrieval",
    "torchmetrics.functional.detection", "torchvision.transforms.v2.functional", "torchvision.ops",
    "torch_geometric.utils", "monai.metrics", "monai.transforms.utils", "monai.networks.utils", "monai.data.box_utils",
)  # fmt: skip
MODULES = (
    "vit_pytorch", "x_transformers", "torch_geometric.nn", "torch_geometric.nn.conv", "torch_geometric.nn.models",
    "torch_geometric.nn.norm", "torch_geometric.nn.dense", "torch_geometric.nn.aggr", "torch_geometric.nn.pool",
    "monai.networks.blocks", "monai.networks.nets", "monai.networks.layers", "monai.losses", "kornia.filters",
    "kornia.losses", "kornia.enhance", "kornia.color", "kornia.feature", "torchvision.ops", "torchvision.transforms.v2",
)  # fmt: skip


def members() -> Iterator[tuple[str, Any]]:
    """Each function and class of modules once, by its name; packages that are not installed are left out."""
    operators.prepare()
    seen: set[Any] = set()
    for names, find in ((FUNCTIONS, _functions), (MODULES, _modules)):
        for module in names:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = list(find(importlib.import_module(module)))
            except ImportError as error:
                print(f"left out: {module}: {error}", flush=True)
                continue
            for name, member in found:
                if member not in seen:
                    seen.add(member)
                    yield name, member


def _is_own(member: Any, module: Any) -> bool:
    return (getattr(member, "__module__", None) or "").split(".")[0] == module.__name__.split(".")[0]


def _functions(module: Any) -> Iterator[tuple[str, Any]]:
    for name, member in sorted(vars(module).items()):
        if not name.startswith("_") and inspect.isfunction(member) and _is_own(member, module):
            yield f"{module.__name__}.{name}", member


def _modules(package: Any) -> Iterator[tuple[str, Any]]:
    parts = [package]
    for found in pkgutil.iter_modules(getattr(package, "__path__", [])):
        if not found.name.startswith(("_", "test")):
            try:
                parts.append(importlib.import_module(f"{package.__name__}.{found.name}"))
            except Exception:  # it asks for what is not installed
                continue
    for part in parts:
        for name, member in sorted(vars(part).items()):
            is_module = inspect.isclass(member) and issubclass(member, nn.Module) and not name.startswith("_")
            if is_module and _is_own(member, package):
                yield f"{member.__module__}.{name}", member
