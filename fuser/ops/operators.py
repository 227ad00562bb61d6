"""Operators of namespace `fuser` by which graphs request what kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("fuser", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(schema: str, eager: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """Define the operator of a schema, which computes `eager`; `meta` gives its results without their elements."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, meta, "Meta")


__all__ = ["operator"]
