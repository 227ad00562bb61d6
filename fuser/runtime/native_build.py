"""Finding or building the launcher's extension module."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import pathlib
import shlex
import sysconfig
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fuser import config
from fuser.errors import CompileError
from fuser.runtime import compilers, files, libraries, prebuilt, process
from fuser.runtime.encode import LAYOUT

settings: Any = config  # its attributes are made from a table

SOURCE = pathlib.Path(__file__).with_name("launcher.cpp")  # it includes native/*.h
MODULE = "fuser.runtime._launcher"
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden")


def installed() -> ModuleType | None:
    """The extension built with the package, if it loads and fits this source; else None."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        return None
    return module if getattr(module, "LAYOUT", None) == LAYOUT else None


@functools.cache
def _source() -> bytes:
    return b"".join(part.read_bytes() for part in (SOURCE, *sorted(SOURCE.parent.glob("native/*.h"))))


def _key(compiler: compilers.Command) -> str:
    path = compiler[0]
    found = os.stat(path)
    parts = [
        sysconfig.get_config_var("SOABI") or "", *compiler, os.path.realpath(path),
        str(found.st_size), str(found.st_mtime_ns), *FLAGS,
    ]  # fmt: skip
    return hashlib.sha256(_source() + "\0".join(parts).encode()).hexdigest()[:24]


def portable_name() -> str:
    """The file name of a launcher for this Python and this source among prebuilt ones, whatever compiled it."""
    text = _source() + "\0".join((sysconfig.get_config_var("SOABI") or "", *FLAGS)).encode()
    return f"{hashlib.sha256(text).hexdigest()[:24]}.so"


def load(path: pathlib.Path) -> ModuleType:
    """The extension module in the file `path`. ImportError if it is not one."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def cached(cache_dir: str) -> ModuleType | None:
    """The extension that an earlier process left in the cache folder, or a prebuilt one; None if there is none."""
    for compiler in () if compilers.why_none() or not cache_dir else compilers.find():
        with contextlib.suppress(OSError, ImportError):
            path = files.folder(cache_dir, "native") / f"{_key(compiler)}.so"
            if _is_kept(path):
                return load(path)
    for folder in prebuilt.for_cpu():
        if _is_kept(folder.path / "native" / portable_name()):
            with contextlib.suppress(ImportError):
                return load(folder.path / "native" / portable_name())
    return None


def _is_kept(path: pathlib.Path) -> bool:
    try:
        return files.read(path) is not None and not libraries.is_cut(path)
    except OSError:  # removed by another process
        return False


@contextlib.contextmanager
def _folder(cache_dir: str) -> Iterator[pathlib.Path]:
    """The folder to build in: in the cache, or a temporary one if there is no cache or it is read-only."""
    if cache_dir:
        with contextlib.suppress(OSError):
            folder = files.folder(cache_dir, "native")
            if os.access(folder, os.W_OK):
                yield folder
                return
    with files.temporary_folder() as path:
        yield path


def build(cache_dir: str) -> ModuleType:
    """Compile and load the extension. CompileError, with every compiler's log, if no compiler succeeds."""
    logs = []
    for compiler in compilers.find():
        with _folder(cache_dir) as folder:
            path = folder / f"{_key(compiler)}.so"
            try:
                with files.claim(path, settings.compile_timeout_seconds):  # another process may be building it
                    with contextlib.suppress(ImportError):
                        if _is_kept(path):
                            return load(path)
                    return _compile(compiler, path)
            except (CompileError, ImportError) as e:
                logs.append(f"{shlex.join(compiler)}: {e}")
    raise CompileError(f"the native launcher could not be built: {'; '.join(logs)}", "\n".join(logs))


def _compile(compiler: compilers.Command, path: pathlib.Path) -> ModuleType:
    """Compile to a temporary file and load it; only a file that loads is moved to `path`, atomically."""
    include = sysconfig.get_paths()["include"]
    with files.working_folder(path.parent) as work:
        part = work / path.name
        _run([*compiler, *FLAGS, f"-I{include}", str(SOURCE), "-o", str(part)])
        module = load(part)
        files.put(part, path)
        return module


def _run(command: list[str]) -> None:
    with process.temporaries_in(os.path.dirname(command[command.index("-o") + 1])):
        code, output = process.run(command, settings.compile_timeout_seconds)
    if code:
        log = output.strip()
        last = log.splitlines()[0] if log else "no message"
        raise CompileError(f"{command[0]} ended with code {code}: {last}", log)
