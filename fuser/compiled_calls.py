"""Handles inside compiled functions: Dynamo takes a call of one into its graph, without a graph break."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fuser import forks

_DYNAMO = "torch._dynamo"
_lock = forks.lock()
_given: weakref.WeakSet[Any] = weakref.WeakSet()  # handles that Dynamo, not yet imported, does not know
_watching = False


def allow(handle: Any) -> None:
    """Let Dynamo take calls of `handle` into its graphs, now or when it is imported.

    While a backend traces, the handle is called with fake tensors and runs its graph on ATen.
    """
    while hasattr(handle, "inside"):  # the wrappers of a handle are Python, which Dynamo traces
        handle = handle.inside
    handle = getattr(handle, "func", handle)
    if _DYNAMO in sys.modules and not _is_loading():
        _allow(handle)
        return
    global _watching
    with _lock:
        _given.add(handle)
        if not _watching:
            _watching = True
            sys.meta_path.insert(0, _Watcher())


def _is_loading() -> bool:
    return bool(getattr(getattr(sys.modules[_DYNAMO], "__spec__", None), "_initializing", False))


def _allow(handle: Any) -> None:
    sys.modules[_DYNAMO].allow_in_graph(handle)


class _Watcher(importlib.abc.MetaPathFinder):
    """Tells Dynamo of all handles when it is first imported. It finds no modules itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:  # fmt: skip
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then(spec.loader.exec_module)  # type: ignore[assignment,method-assign]
        return spec


def _then(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        with _lock:
            given = list(_given)
            _given.clear()
        for handle in given:
            _allow(handle)

    return exec_module


__all__ = ["allow"]
