"""Operators by which TorchScript calls registered fusions: exact schemas, the handle itself as implementation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fuser import forks

NAMESPACE = "fuser_ts"
Handle = Callable[..., Any]


class Operator:
    """An operator that runs the fusion `key`. It leaves torch's tables when nobody holds this object any more."""

    def __init__(self, key: int, handle: Handle, name: str, arguments: tuple[str, ...], results: int) -> None:
        self.key = key
        self.handle = handle
        self.name = f"{NAMESPACE}::{name}"
        library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        taken = ", ".join(f"{t} i{n}" for n, t in enumerate(arguments))
        given = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        library.define(f"{name}({taken}) -> {given}")
        library.impl(name, handle, "CompositeImplicitAutograd")
        weakref.finalize(self, library._destroy).atexit = False


_lock = forks.lock()
_known: weakref.WeakValueDictionary[tuple[int, tuple[str, ...], int], Operator] = weakref.WeakValueDictionary()
_made = 0


def operator_for(key: int, handle: Handle, arguments: tuple[str, ...], results: int) -> Operator:
    """The operator that runs a registered fusion for arguments of these types. It holds the fusion."""
    global _made
    with _lock:
        found = _known.get((key, arguments, results))
        if found is None:
            _made += 1
            found = _known[key, arguments, results] = Operator(key, handle, f"group_{_made}", arguments, results)
        return found
