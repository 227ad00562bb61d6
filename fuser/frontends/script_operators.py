"""Operators by which TorchScript calls registered fusions: exact schemas, run by the native launcher or a handle."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fuser import forks
from fuser.runtime.launcher import native as native_launcher
from fuser.runtime.torch_abi import symbol

NAMESPACE = "fuser_ts"
Handle = Callable[..., Any]


class Operator:
    """An operator that runs the fusion `key`. It is removed from torch's tables when nothing references this object.

    `number` is its last argument if the native launcher implements it, else None: see `native/scripted.h`.
    """

    def __init__(self, key: int, handle: Handle, name: str, arguments: tuple[str, ...], results: int) -> None:
        self.key = key
        self.handle = handle
        self.name = f"{NAMESPACE}::{name}"
        native = _native_part(handle, arguments, results)
        self.number = None if native is None else native.number
        taken = [f"{t} i{n}" for n, t in enumerate(arguments)] + ["int number"] * (native is not None)
        given = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(f"{name}({', '.join(taken)}) -> {given}")
        if native is None:
            library.impl(name, handle, "CompositeImplicitAutograd")
        else:
            native.register(name)
        weakref.finalize(self, _leave, library, native).atexit = False


def _leave(library: Any, native: _Native | None) -> None:
    if native is not None:
        native.leave()
    library._destroy()


# -- by the native launcher --------------------------------------------------------------------------------------------
_LETTERS = {"Tensor": "t", "int": "i", "float": "f", "bool": "b"}


class _Native:
    """An operator's implementation in the native launcher."""

    def __init__(self, launcher: Any, number: int, address: int) -> None:
        self.number, self._launcher, self._address = number, launcher, address
        self._library = ctypes.c_void_p()

    def register(self, name: str) -> None:
        """Register this implementation of the operator `name` with torch. RuntimeError if torch refuses it."""
        functions = _torch_functions()
        assert functions is not None
        init, implement, _ = functions
        where = NAMESPACE.encode(), b"CompositeImplicitAutograd", __file__.encode(), 0
        if init(*where, ctypes.byref(self._library)) or implement(self._library, name.encode(), self._address):
            raise RuntimeError(f"torch does not take an implementation of {NAMESPACE}::{name}")

    def leave(self) -> None:
        """Remove the registration."""
        functions = _torch_functions()
        if functions is not None and self._library:
            functions[2](self._library)
        self._launcher.unscripted(self.number)


def _native_part(handle: Handle, arguments: tuple[str, ...], results: int) -> _Native | None:
    """The native implementation; None if this torch, these arguments or this handle have none."""
    launcher = native_launcher()
    if launcher is None or any(t not in _LETTERS for t in arguments) or not _is_usable(launcher):
        return None
    found = launcher.scripted(handle, "".join(_LETTERS[t] for t in arguments), results)
    return None if found is None else _Native(launcher, *found)


@functools.cache
def _torch_functions() -> tuple[Any, Any, Any] | None:
    """Functions of torch's stable interface: create a library of implementations, add one, delete the library."""
    names = ("aoti_torch_library_init_impl", "aoti_torch_library_impl", "aoti_torch_delete_library_object")
    addresses = [a for a in (symbol("libtorch_cpu.so", name) for name in names) if a is not None]
    if len(addresses) < len(names):
        return None
    text, pointer = ctypes.c_char_p, ctypes.c_void_p
    kinds = ((text, text, text, ctypes.c_uint32, pointer), (pointer, text, pointer), (pointer,))
    made = [ctypes.CFUNCTYPE(ctypes.c_int32, *k)(a) for k, a in zip(kinds, addresses, strict=True)]
    return made[0], made[1], made[2]


@functools.cache
def _is_usable(launcher: Any) -> bool:
    """Whether torch has the functions, and they and the launcher agree on the layout of tensors."""
    if _torch_functions() is None or not hasattr(launcher, "scripted"):
        return False
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    samples = [torch.empty(2, 3, dtype=d, device="cpu") for d in dtypes]
    samples += [samples[0].t(), samples[0][1:, ::2], torch.empty((), device="cpu")]
    return all(launcher.reads_alike(t) for t in samples)


# -- all operators
# -----------------------------------------------------------------------------------------------------
_lock = forks.lock()
_known: weakref.WeakValueDictionary[tuple[int, tuple[str, ...], int], Operator] = weakref.WeakValueDictionary()
_made = 0


def operator_for(key: int, handle: Handle, arguments: tuple[str, ...], results: int) -> Operator:
    """The operator that runs a registered fusion for arguments of these types. It keeps the fusion alive."""
    global _made
    with _lock:
        found = _known.get((key, arguments, results))
        if found is None:
            _made += 1
            found = _known[key, arguments, results] = Operator(key, handle, f"group_{_made}", arguments, results)
        return found
