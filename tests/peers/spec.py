"""How a program of this folder is described: a function, its inputs by shape and kind, and what it is meant for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.device import test_device

Size = int | str
FIRST, SECOND = 6, 9  # what "N" stands for in the first call and in the second


@dataclass(frozen=True)
class Input:
    """One input: `kind` is "normal", "uniform", "positive", "int" or "bool"; a size "N" is the batch's."""

    kind: str
    size: tuple[Size, ...]
    below: int = 0
    grad: bool = True

    def make(self, n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The tensor, with "N" as `n`."""
        size = [n if s == "N" else int(s) for s in self.size]
        how = {"generator": generator, "device": "cpu"}
        if self.kind == "int":
            return torch.randint(self.below, size, **how).to(test_device())
        if self.kind == "bool":
            return (torch.rand(size, **how) < 0.6).to(test_device())
        x = torch.rand(size, **how) if self.kind == "uniform" else torch.randn(size, **how)
        x = x.abs() + 0.1 if self.kind == "positive" else x
        return x.to(test_device(), dtype)


def f(*size: Size, grad: bool = True) -> Input:
    """Normal floats; `grad`: whether their gradient is compared."""
    return Input("normal", size, grad=grad)


def u(*size: Size, grad: bool = True) -> Input:
    """Floats in [0, 1)."""
    return Input("uniform", size, grad=grad)


def p(*size: Size, grad: bool = True) -> Input:
    """Floats of at least 0.1."""
    return Input("positive", size, grad=grad)


def i(below: int, *size: Size) -> Input:
    """int64 numbers in [0, below)."""
    return Input("int", size, below, False)


def b(*size: Size) -> Input:
    """Flags, six of ten set."""
    return Input("bool", size, grad=False)


@dataclass(frozen=True)
class Peer:
    """A program; `grad`: it has gradients; `halves`: eager has it for 16-bit floats too."""

    name: str
    family: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    grad: bool = True
    halves: bool = True

    def make_inputs(self, n: int, dtype: torch.dtype, draw: int = 0) -> list[torch.Tensor]:
        """Fresh inputs, always the same for one program, size, dtype and draw."""
        generator = torch.Generator("cpu").manual_seed(sum(self.name.encode()) * 31 + n + 1000003 * draw)
        return [x.make(n, dtype, generator) for x in self.inputs]


PEERS: dict[str, Peer] = {}


def peer(*inputs: Input, grad: bool = True, halves: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a program of the module it stands in."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        family = function.__module__.rpartition(".")[2]
        name = f"{family}/{function.__name__}"
        if name in PEERS:
            raise ValueError(f"two programs are called {name}: give one another name")
        needs = grad and any(x.grad and x.kind in ("normal", "uniform", "positive") for x in inputs)
        PEERS[name] = Peer(name, family, function, inputs, needs, halves)
        return function

    return register
