"""Finds keywords that no overload of a call has: a mistake in the graph, reported when the graph is registered."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fuser.canonical.aliases import overloads_named

# Names that torch's argument parser accepts beside those of the schemas.
_EVERYWHERE = frozenset("out dtype device layout requires_grad pin_memory memory_format names self input".split())
_NUMPY = frozenset("axis keepdims x a x1 x2".split())


def unknown_keyword(target: Any, given: Iterable[str]) -> str | None:
    """A message about a keyword that `target`, a function of torch or a method's name, does not have; else None."""
    known = _known(target)
    wrong = [name for name in given if name not in known] if known is not None else []
    if not wrong or known is None:
        return None
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    documented = _of_packet(name) or known
    near = difflib.get_close_matches(wrong[0], documented, 1)
    own = sorted(documented.difference(_EVERYWHERE, _NUMPY))
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(own) or 'self, out'}"
    return f"{getattr(target, '__name__', target)} has no argument {wrong[0]!r}: {hint}"


def _known(target: Any) -> frozenset[str] | None:
    """All keywords of all forms of a call; None if they are not known."""
    if isinstance(target, str):
        method = getattr(torch.Tensor, target, None)
        return _of_python(method) if inspect.isfunction(method) else _of_builtin(method, target, torch)
    if not (getattr(target, "__module__", None) or "torch").startswith("torch"):
        return None
    if inspect.isbuiltin(target):
        return _of_builtin(target, getattr(target, "__name__", ""))
    return _of_python(target) if inspect.isfunction(target) else None


def _of_builtin(function: Any, name: str, beside: Any = None) -> frozenset[str] | None:
    """The keywords in the schemas, and the words in the binding's documentation, such as `as_tuple` of `nonzero`.

    A method's documentation may refer to the function of the same name in `beside`.
    """
    known = _of_packet(name) if function is not None else None
    texts = [f.__doc__ or "" for f in (function, getattr(beside, name, None))]
    return None if known is None else known.union(*(re.findall(r"\w+", text) for text in texts))


def _of_packet(name: str) -> frozenset[str] | None:
    overloads = overloads_named(name)
    return _EVERYWHERE | _NUMPY | {a.name for o in overloads for a in o._schema.arguments} if overloads else None


def _of_python(function: Callable[..., Any]) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return None if open_ended else frozenset(p.name for p in parameters if p.kind in named)


__all__ = ["unknown_keyword"]
