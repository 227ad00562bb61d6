"""Ahead of time: an exported program and its kernels in one file, which runs without compiler, Dynamo and Triton.

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
    """Write an exported program with its kernels to a file, for `load`.

    There are kernels for the sizes of its example inputs, for those sizes with one dynamic dim changed to another
    number or 1, and for the sizes of `examples`. All other sizes that the export allows run on ATen.

    Args:
        exported: what `torch.export.export` returned.
        path: the file to write, whole or not at all.
        examples: further inputs to compile for, as pairs of positional and keyword arguments, `(args, kwargs)`.
        key: signs the file. None takes the environment's `FUSER_AOT_KEY`; without that the file is not signed.
        options: settings of `fuser.config` for this compilation, by name.

    Returns:
        The path.

    Raises:
        AotError: `exported` is no exported program, a file cannot hold it, or the file cannot be written.
        ConfigError: an unknown setting, or a value that it cannot take.
        InputError: one of `examples` is no such pair or has another form than the program's inputs, or a wrong key.
        Exception: whatever eager raises for the program's example inputs.
    """
    compiling = importlib.import_module("fuser.aot.compiling")
    return str(compiling.compile_program(exported, path, examples, key, options or {}))


__all__ = ["AotError", "LoadedProgram", "compile", "load"]
