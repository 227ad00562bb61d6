"""Stands in for the compiler where it is not there yet: every group runs on ATen, equal graphs share a key."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
from torch import fx

import fuser
from fuser import lowering

_MORE = (
    "aten._softmax aten._log_softmax aten.native_layer_norm aten.native_group_norm aten.sum aten.mean aten.amax "
    "aten._native_batch_norm_legit_no_training aten.var_mean aten.embedding aten.cat aten.arange aten.full aten.view "
    "aten._unsafe_view aten.permute aten.transpose aten.t aten.expand aten.slice aten.select aten.unsqueeze "
    "aten.squeeze aten.gather aten.index aten.tril aten.triu aten.scalar_tensor aten.var aten.argmax aten.any aten.all"
).split()


def _supports(name: str) -> str | None:
    namespace, _, packet = name.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if name in _MORE:
        return None
    if found is not None and any(torch.Tag.pointwise in getattr(found, o).tags for o in found.overloads()):
        return None
    return f"no lowering for {name}"


class _Interface(types.ModuleType):
    """`fuser.interface` with the fallback alone."""

    def __init__(self) -> None:
        super().__init__("fuser.interface")
        self.graphs: dict[str, int] = {}
        self.modules: list[fx.GraphModule] = []

    def has_fusion_backend(self, device_type: str) -> bool:
        return device_type == "cpu"

    def register_fusion(self, graph: Any) -> int:
        graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
        names: dict[fx.Node, str] = {}
        text = []
        for n in graph.nodes:
            names[n] = f"v{len(names)}"
            shown = fx.node.map_arg((n.args, n.kwargs), lambda a: _Shown(names[a]))
            text.append(f"{n.op} {n.target if n.op == 'call_function' else ''} {shown}")
        key = self.graphs.setdefault("\n".join(text), len(self.graphs))
        if key == len(self.modules):
            self.modules.append(fx.GraphModule(torch.nn.Module(), graph))
        return key

    def fusion_handle(self, key: int) -> Any:
        return self.modules[key].forward


class _Shown(str):
    __repr__ = str.__str__


def install() -> None:
    """Put the stand-ins in place of what is missing."""
    if importlib.util.find_spec("fuser.interface") is None:
        module = _Interface()
        sys.modules["fuser.interface"] = module
        fuser.interface = module  # type: ignore[attr-defined]
    if not hasattr(lowering, "supports"):
        lowering.supports = _supports  # type: ignore[attr-defined]


install()
