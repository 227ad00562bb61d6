"""Runs ordered lists of passes: on and off by name, timed, the graph checked after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from fuser.errors import VerifyError


@dataclass(frozen=True)
class Pass:
    """A rewrite of a graph module in place; `function` returns how many places it changed."""

    name: str
    function: Callable[[fx.GraphModule], int]


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: places changed and seconds."""

    name: str
    changed: int
    seconds: float


_disabled: set[str] = set()


def set_pass_enabled(name: str, enabled: bool) -> None:
    """Turn a pass on or off by its name, for the process."""
    if enabled:
        _disabled.discard(name)
    else:
        _disabled.add(name)


def run_passes(module: fx.GraphModule, passes: Iterable[Pass]) -> tuple[PassRecord, ...]:
    """Run the enabled passes in order; VerifyError names a pass that leaves a broken graph."""
    records = []
    for p in passes:
        if p.name in _disabled:
            continue
        start = time.perf_counter()
        changed = p.function(module)
        if changed:
            _check(module, p.name)
        records.append(PassRecord(p.name, changed, time.perf_counter() - start))
    return tuple(records)


def _check(module: fx.GraphModule, name: str) -> None:
    try:
        module.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"pass {name!r} left a graph that does not hold together: {error}") from error
