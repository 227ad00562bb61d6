"""Checks of a loaded program's calls: their form, and the sizes that the export allows, with names in errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from fuser.canonical.portable import decode_value
from fuser.errors import InputError
from fuser.ir.sizes import LE, PUSH, SLOT, run_program

_MOST_RIGHT = 4096  # combinations of sizes that fulfilled the guards and are remembered
_NUMBERS = {"int": int, "float": float, "bool": bool}


class Signature:
    """Checks the leaves of a call. `leaves` and `ranges` are data that `compiling` writes.

    A leaf is {"name", "kind": "tensor", "dtype", "device", "sizes"}, where a size is a number, a symbol's name, None
    for any, or ["linear", symbol, a, b] for a * symbol + b; or {"name", "kind": "int", "value"}, a symbol or None; or
    {"name", "kind": "constant", "value"}.
    """

    def __init__(self, leaves: Sequence[Any], ranges: dict[str, Any], guards: Sequence[Any] = ()) -> None:
        self._guards = [(str(text), tuple(symbols), _program(code, len(symbols))) for text, symbols, code in guards]
        self._right: set[tuple[int, ...]] = set()  # values of all symbols that the guards allowed before
        self._ranges = {name: (low, high) for name, (low, high) in ranges.items()}
        self._leaves: list[tuple[str, str, Any, tuple[Any, ...]]] = []
        for leaf in leaves:
            kind, name = leaf["kind"], str(leaf["name"])
            if kind == "tensor":
                what = decode_value(leaf["dtype"]), str(leaf["device"])
                self._leaves.append((kind, name, what, tuple(map(_size, leaf["sizes"]))))
            else:
                value = leaf["value"] if kind != "constant" else decode_value(leaf["value"])
                self._leaves.append((kind, name, value, ()))

    def check(self, given: Sequence[Any]) -> None:
        """InputError, with the input's name and what the export allows, unless all leaves are valid."""
        symbols: dict[str, int] = {}
        later: list[tuple[str, int, int, Any]] = []
        for value, (kind, name, what, sizes) in zip(given, self._leaves, strict=True):
            if kind == "tensor":
                self._check_tensor(value, name, what, sizes, symbols, later)
            elif kind == "constant":
                if type(value) is not type(what) or value != what:
                    raise InputError(f"input {name} is {value!r}: the program was exported for {what!r} alone")
            else:
                self._check_number(value, name, kind, what, symbols)
        for name, dim, size, (symbol, a, b) in later:
            known = symbols.get(symbol)
            if known is None and (size - b) % a == 0:
                self._bind(symbols, symbol, (size - b) // a, f"dim {dim} of input {name} is {size}")
            elif known is None or a * known + b != size:
                raise InputError(f"dim {dim} of input {name} is {size}: the export expects {a} * {symbol} + {b}")
        if self._guards and (found := tuple(symbols.values())) not in self._right:
            self._check_guards(symbols)
            if len(self._right) < _MOST_RIGHT:
                self._right.add(found)

    def _check_guards(self, symbols: dict[str, int]) -> None:
        for text, names, code in self._guards:
            if symbols.keys() >= set(names) and not run_program(code, [symbols[n] for n in names]):
                given = ", ".join(f"{n} = {symbols[n]}" for n in names)
                raise InputError(f"the export requires {text} of its sizes: here {given}")

    def _check_tensor(
        self,
        value: Any,
        name: str,
        what: tuple[torch.dtype, str],
        sizes: tuple[Any, ...],
        symbols: dict[str, int],
        later: list[Any],
    ) -> None:
        dtype, device = what
        if not isinstance(value, torch.Tensor):
            raise InputError(f"input {name} is of type {type(value).__name__}: expected a tensor")
        if value.dtype is not dtype or value.device.type != device or value.dim() != len(sizes):
            raise InputError(
                f"input {name} is {value.dtype} on {value.device} of {value.dim()} dims: the program was exported for "
                f"{dtype} on {device} of {len(sizes)} dims"
            )
        for dim, (size, want) in enumerate(zip(value.shape, sizes)):
            if type(want) is int:
                if size != want:
                    raise InputError(f"dim {dim} of input {name} is {size}: the export allows {want} alone")
            elif type(want) is str:
                self._bind(symbols, want, size, f"dim {dim} of input {name} is {size}")
            elif want is not None:
                later.append((name, dim, size, want))

    def _check_number(self, value: Any, name: str, kind: str, symbol: Any, symbols: dict[str, int]) -> None:
        if type(value) is not _NUMBERS.get(kind):  # symbols stand for integers
            raise InputError(f"input {name} is of type {type(value).__name__}: expected {kind}")
        if symbol is not None:
            self._bind(symbols, symbol, cast(int, value), f"input {name} is {value}")

    def _bind(self, symbols: dict[str, int], symbol: str, value: int, what: str) -> None:
        known = symbols.setdefault(symbol, value)
        if known != value:
            raise InputError(f"{what}: the export expects {symbol} to be one number, and it is {known} before")
        low, high = self._ranges.get(symbol, (None, None))
        if (low is not None and value < low) or (high is not None and value > high):
            allowed = f"{low if low is not None else 'any'} to {high if high is not None else 'any'}"
            raise InputError(f"{what}: the export allows {allowed} ({symbol})")


def _program(code: Any, n_slots: int) -> tuple[int, ...]:
    """A checked program of `ir.sizes`. ValueError if it is ill-formed."""
    words, depth, i = [int(word) for word in code], 0, 0
    while i < len(words):
        takes = words[i] in (PUSH, SLOT)
        if not PUSH <= words[i] <= LE or (takes and i + 1 == len(words)) or (not takes and depth < 2):
            raise ValueError(f"{words} is no program")
        if words[i] == SLOT and not 0 <= words[i + 1] < n_slots:
            raise ValueError(f"{words} reads a size that does not exist")
        depth, i = (depth + 1, i + 2) if takes else (depth - 1, i + 1)
    if depth != 1:
        raise ValueError(f"{words} is no program")
    return tuple(words)


def _size(size: Any) -> Any:
    if isinstance(size, list):
        _, symbol, a, b = size
        return str(symbol), int(a), int(b)
    return size


__all__ = ["Signature"]
