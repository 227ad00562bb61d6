"""A script that reproduces one call of a fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuser.kernel_cache import REGISTRY
from fuser.reproduce import write_reproducer


def repro(key: int, inputs: Sequence[Any], folder: str) -> str:
    """Write a script that runs a fusion on these inputs, with its kernel and on ATen, and compares the results.

    Args:
        key: what `register_fusion` returned.
        inputs: one value for each placeholder of the graph, in order. A single tensor may stand alone.
        folder: where to write; made if there is none.

    Returns:
        The script's path. Its inputs are stored beside it, in a file of the same name with the ending ".pt".

    Raises:
        UnknownKeyError: the key is not registered in this process.
        InputError: wrong inputs.
        TypeError: the graph holds Python objects that no script can name.
        OSError: the folder cannot be made or written.
    """
    registration = REGISTRY.find(key)
    args = registration.arguments(inputs)
    return write_reproducer(registration.spec, args, f"fusion {key}", folder)


__all__ = ["repro"]
