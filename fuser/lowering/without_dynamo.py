"""Runs shape functions without importing Dynamo.

Many of torch's shape functions are references under `torch._disable_dynamo`, which imports `torch._dynamo` at its first
call: 1.1 s, in a process that may never compile with it. The wrapper looks for the function to call in an attribute of
the wrapped function, `__dynamo_disable`. Before Dynamo is imported nothing can trace, so the function itself is right.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch._compile
import torch._refs
import torch._refs.nn.functional
import torch._refs.special

from fuser import forks

_ATTRIBUTE = "__dynamo_disable"
_MODULES = (torch._refs, torch._refs.nn.functional, torch._refs.special)


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """In this block, torch's references run without importing Dynamo; no effect if it is imported already."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    with SHARED.block():
        yield


def _mark() -> None:
    for plain in _wrapped():
        plain.__dict__.setdefault(_ATTRIBUTE, plain)


def _restore() -> None:
    for plain in _wrapped():
        if plain.__dict__.get(_ATTRIBUTE) is plain:
            del plain.__dict__[_ATTRIBUTE]


SHARED = forks.Shared(_mark, _restore)


@functools.cache
def _wrapped() -> tuple[Callable[..., Any], ...]:
    """The functions under `torch._disable_dynamo` among torch's references."""
    source = torch._compile._disable_dynamo.__code__.co_filename
    found: dict[int, Callable[..., Any]] = {}
    for module in _MODULES:
        for value in list(vars(module).values()):
            while isinstance(value, types.FunctionType):
                inner = _behind(value)
                if value.__code__.co_filename == source and isinstance(inner, types.FunctionType):
                    found[id(inner)] = inner
                value = inner
    return tuple(found.values())


def _behind(wrapper: types.FunctionType) -> Any:
    """The function that a wrapper calls. `__wrapped__` may skip wrappers in between; torch's hold it as `fn`."""
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=False))
    return cells["fn"].cell_contents if "fn" in cells else getattr(wrapper, "__wrapped__", None)
