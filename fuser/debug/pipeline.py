"""The passes: which there are, in which order, and which one breaks a result."""

from __future__ import annotations

from collections.abc import Callable

from fuser import config
from fuser.errors import InputError
from fuser.passes.registry import disabled_names, numbered
from fuser.passes.runner import is_enabled


class PassTable(tuple[tuple[int, str, str, bool, str], ...]):
    """Rows of number, stage, name, whether it runs under the current settings, and one line on what it does."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [f"{n:3} {stage:12} {name:28} {'' if on else 'off':4} {line}" for n, stage, name, on, line in self]
        return "\n".join(rows)


def passes() -> PassTable:
    """All passes in the order in which they run, those of users included.

    Returns:
        A `PassTable`: rows of number, stage, name, whether it runs under the current settings, and one line on it.

    Raises:
        ConfigError: `config.disable_passes` names a pass that does not exist.
    """
    disabled = disabled_names()
    return PassTable((p.number, p.stage, p.item.name, is_enabled(p, disabled), p.item.doc) for p in numbered())


def bisect_passes(is_right: Callable[[], bool]) -> str | None:
    """The pass that breaks a result, found by compiling with the first passes only.

    Args:
        is_right: a function without arguments that compiles and judges anew at each call. Dynamo's caches are emptied
            before.

    Returns:
        The name of the pass with which `is_right()` turns False; None if it is True with all of them.

    Raises:
        InputError: `is_right` cannot be called.
        ValueError: it is False without any pass: the fault is elsewhere.
        Exception: whatever `is_right` raises.
    """
    if not callable(is_right):
        raise InputError(f"bisect_passes was given a {type(is_right).__name__}: expected a function without arguments")

    def holds(limit: int) -> bool:
        import torch._dynamo

        torch._dynamo.reset()
        before = config.pass_limit
        config.set(pass_limit=limit)
        try:
            return is_right()
        finally:
            config.set(pass_limit=before)
            torch._dynamo.reset()

    every = numbered()
    if holds(len(every)):
        return None
    if not holds(0):
        raise ValueError("the result is wrong without any pass too: none of them is to blame")
    good, bad = 0, len(every)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return every[bad - 1].item.name
