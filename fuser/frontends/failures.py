"""Graphs that raise although the traced program may not: eager runs instead, and the reason is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser import notices
from fuser.errors import FuserError
from fuser.frontends.transforms import levels_kept
from fuser.reasons import because
from fuser.runtime.memory import Tally

_log = logging.getLogger(__name__)
Function = Callable[..., Any]


# Errors of operators. Others are control flow, such as the one that ends a checkpoint's recomputation.
OF_OPERATORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)


def reason_of(error: BaseException) -> str:
    """The sentence about a graph that raised `error` at a call."""
    return because(
        "not_traced", f"the compiled graph raised {type(error).__name__}: {(str(error).strip() or '.').splitlines()[0]}"
    )


def say_unfused(reason: str) -> None:
    """Log that a graph runs unfused, once for each reason."""
    if notices.is_first(reason):
        _log.warning("a graph runs unfused: %s", reason)


def guarded(function: Function, gm: fx.GraphModule, by_eager: Tally) -> Function:
    """A compiled function of `gm`'s inputs. If it raises, `gm` runs in eager, and its result or error is returned.

    For graphs that may run a second time: they write nothing and draw no random numbers.
    """

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except OF_OPERATORS as error:
            return after_failure(error, gm, by_eager, args)

    return call


def after_failure(error: BaseException, gm: fx.GraphModule, by_eager: Tally, args: tuple[Any, ...]) -> Any:
    """Eager's result or error, after a compiled function raised `error`; the reason is noted.

    Errors that a second run would not avoid are raised again.
    """
    if isinstance(error, (torch.OutOfMemoryError, FuserError)):
        raise error
    try:
        with levels_kept():
            results = gm.forward(*args)  # not gm(): that also prints an error
    except OF_OPERATORS as eagers:
        raise eagers from None  # the user's own error, without the compiled function's as its context
    reason = reason_of(error)
    by_eager.note(reason)
    say_unfused(reason)
    return results
