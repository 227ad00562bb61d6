"""Copies of scripted modules: C++ objects of the same types, and what the Python objects around them hold."""

from __future__ import annotations

import copy
from typing import Any

import torch

_C: Any = torch._C
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


def copied(cpp: Any) -> Any:
    """A copy of a C++ module with all of its submodules."""
    return _Copier().copied(cpp)


def copy_python_side(script: Any, made: Any) -> None:
    """What the Python objects around C++ modules hold: type, hooks, methods that only Python has, attributes."""
    for name, value in script.__dict__.items():
        if name in _HOOKS:
            made.__dict__[name] = copy.copy(value)
        elif name == "_concrete_type":
            made.__dict__[name] = value
        elif name not in made.__dict__ and not isinstance(value, _C.ScriptMethod):
            bound = getattr(value, "__self__", None) is script
            made.__dict__[name] = value.__func__.__get__(made) if bound else value
    for (_, old), (_, new) in zip(script.named_children(), made.named_children(), strict=True):
        copy_python_side(old, new)


class _Copier:
    """Copies C++ modules: own slots of the same types, parameters that share the originals' memory, own buffers."""

    def __init__(self) -> None:
        self.modules: dict[Any, Any] = {}
        self.tensors: dict[int, tuple[Any, Any]] = {}  # the originals are kept, so that no id is used twice

    def copied(self, cpp: Any) -> Any:
        """A copy of a module with all of its submodules."""
        if cpp not in self.modules:
            made = self.modules[cpp] = copy.copy(cpp)
            for name, module in _C.ModuleDict(cpp).items():
                made.setattr(name, self.copied(module))
            for name, tensor in _C.ParameterDict(cpp).items():
                made.setattr(name, self._value(tensor))
            attributes = _C.ConcreteModuleType.from_jit_type(cpp._type()).get_attributes()
            for name, (kind, _) in attributes.items():
                if kind.kind() in ("ListType", "DictType", "TupleType", "OptionalType", "TensorType"):
                    made.setattr(name, self._value(cpp.getattr(name)))
        return self.modules[cpp]

    def _value(self, value: Any) -> Any:
        """An attribute's value; TorchScript hands out containers by value, the tensors in them as they are."""
        if isinstance(value, (list, tuple, dict)):
            return torch.utils._pytree.tree_map_only(torch.Tensor, self._value, value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.tensors:
            is_parameter = isinstance(value, torch.nn.Parameter) or (value.requires_grad and value.is_leaf)
            shared = value.detach()
            made = torch.nn.Parameter(shared, value.requires_grad) if is_parameter else shared.clone()
            self.tensors[id(value)] = value, made
        return self.tensors[id(value)][1]
