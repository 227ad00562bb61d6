"""A script that reproduces one call of a fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuser.kernel_cache import REGISTRY
from fuser.reproduce import write_reproducer


def repro(key: int, inputs: Sequence[Any], folder: str) -> str:
    """Write a script into `folder` that runs the fusion `key` on `inputs`, by kernel and by ATen, and compares.

    Returns the script's path; its inputs lie beside it. InputError for wrong inputs, TypeError if the graph holds
    objects no script can name.
    """
    registration = REGISTRY.find(key)
    args = registration.arguments(inputs)
    return write_reproducer(registration.spec, args, f"fusion {key}", folder)


__all__ = ["repro"]
