"""Ahead of time: an exported program with its kernels in one file, which runs without compiler, Dynamo and Triton.

See docs/ahead_of_time.md.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fuser.aot.loading import LoadedProgram, load
from fuser.errors import AotError

if TYPE_CHECKING:
    import torch


def compile(
    exported: torch.export.ExportedProgram,
    path: str | os.PathLike[str],
    *,
    examples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = (),
    key: bytes | str | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """Write `exported` with kernels to the file `path`, for `load`. The path.

    There are kernels for the sizes of its example inputs, for those sizes where one dynamic dim is another number or 1,
    and for the sizes of `examples`, pairs of positional and keyword arguments. All other sizes that the export allows
    run by ATen. `key` signs the file; without it, the environment's `FUSER_AOT_KEY` does, if set. `options` are
    settings of `fuser.config`. AotError says what a file cannot hold.
    """
    compiling = importlib.import_module("fuser.aot.compiling")
    return str(compiling.compile_program(exported, path, examples, key, options or {}))


__all__ = ["AotError", "LoadedProgram", "compile", "load"]
