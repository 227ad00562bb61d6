"""Copies of scripted modules: C++ objects of the same types, and the state of the Python objects around them."""

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
    return _Copier(cpp).copied(cpp)


def copy_python_side(script: Any, made: Any) -> None:
    """Copy the state of the Python object of a C++ module: type, hooks, Python-only methods, attributes."""
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
    """Copies C++ modules: own slots of the same types, parameters that share the originals' memory, own buffers.

    Buffers and attributes that share memory also share it in the copy; views of a parameter stay views of it.
    """

    def __init__(self, cpp: Any) -> None:
        self.modules: dict[Any, Any] = {}
        self.tensors: dict[int, tuple[Any, Any]] = {}  # the originals are kept, so that no id is reused
        self.storages: dict[int, tuple[Any, Any]] = {}  # by their addresses, with their copies
        self._shared: set[int] = set()
        found: dict[int, list[Any]] = {}
        self._read(cpp, found, set())
        for at, tensors in found.items():
            if any(map(_is_parameter, tensors)):
                self._shared.add(at)
                continue
            storage = tensors[0].untyped_storage()
            if len(tensors) > 1 or storage.nbytes() <= tensors[0].nbytes:  # one view of more memory is copied alone
                self.storages[at] = storage, storage.clone()

    def copied(self, cpp: Any) -> Any:
        """A copy of a module with all of its submodules."""
        if cpp not in self.modules:
            made = self.modules[cpp] = copy.copy(cpp)
            for name, module in _C.ModuleDict(cpp).items():
                made.setattr(name, self.copied(module))
            for name, value in _values(cpp):
                made.setattr(name, torch.utils._pytree.tree_map_only(torch.Tensor, self._tensor, value))
        return self.modules[cpp]

    def _read(self, cpp: Any, found: dict[int, list[Any]], seen: set[Any]) -> None:
        """The distinct tensors of a module and its submodules, by their storage."""
        if cpp in seen:
            return
        seen.add(cpp)
        for _, value in _values(cpp):
            for tensor in torch.utils._pytree.tree_leaves(value):
                if _has_memory(tensor):
                    others = found.setdefault(tensor.untyped_storage()._cdata, [])
                    if not any(tensor is other for other in others):
                        others.append(tensor)
        for _, module in _C.ModuleDict(cpp).items():
            self._read(module, found, seen)

    def _tensor(self, value: Any) -> Any:
        """A tensor's copy; TorchScript returns containers by value, but the tensors in them by reference."""
        if id(value) not in self.tensors:
            self.tensors[id(value)] = value, self._made(value)
        return self.tensors[id(value)][1]

    def _made(self, value: Any) -> Any:
        plain = value.detach()
        if _is_parameter(value):
            return torch.nn.Parameter(plain, value.requires_grad)
        at = value.untyped_storage()._cdata if _has_memory(value) else 0
        if at in self._shared:
            return plain
        if at not in self.storages:
            return plain.clone()
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(self.storages[at][1], value.storage_offset(), value.shape, value.stride())


def _values(cpp: Any) -> list[tuple[str, Any]]:
    """A module's own parameters, buffers and attributes that may hold tensors."""
    found = list(_C.ParameterDict(cpp).items())
    for name, (kind, _) in _C.ConcreteModuleType.from_jit_type(cpp._type()).get_attributes().items():
        if kind.kind() in ("ListType", "DictType", "TupleType", "OptionalType", "TensorType"):
            found.append((name, cpp.getattr(name)))
    return found


def _is_parameter(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter) or (value.requires_grad and value.is_leaf)


def _has_memory(value: Any) -> bool:
    """Whether a value is a tensor with memory that another tensor may view."""
    own = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized
    return own and not (value.is_conj() or value.is_neg() or value.is_meta)
