"""Warnings to the user: one for each cause, at the user's own line, and never an exception.

A program that turns warnings into errors would be stopped where eager does not stop it; there the sentence is logged.
"""

from __future__ import annotations

import logging
import sys
import warnings

_log = logging.getLogger("fuser")
_said: dict[str, None] = {}  # causes of warnings, oldest first
_logged: dict[str, None] = {}  # of lines in the log
_MOST = 4096  # causes that are remembered; sentences that name sizes are unlimited
_muted = False


def mute(on: bool) -> None:
    """Suppress warnings or not: failures while the process ends are caused by its end."""
    global _muted
    _muted = on


def is_first(cause: str) -> bool:
    """Whether this is the first time that a cause is asked about: its line is logged once."""
    return _is_new(_logged, cause)


def _is_new(known: dict[str, None], cause: str) -> bool:
    if cause in known:
        return False
    known[cause] = None
    if len(known) > _MOST:
        known.pop(next(iter(known)), None)
    return True


def warn_once(sentence: str, cause: str | None = None) -> None:
    """Warn with `sentence`, unless there was a warning with the same cause; None: with the same sentence."""
    if _is_new(_said, sentence if cause is None else cause):
        warn(sentence)


def warn(sentence: str) -> None:
    """Warn with `sentence`; log it instead if warnings are errors."""
    if _muted:
        return
    try:
        warnings.warn(f"fuser: {sentence}", RuntimeWarning, stacklevel=_outside())
    except RuntimeWarning:
        _log.warning(sentence)


def _outside() -> int:
    """The stack level, from `warn`, of the first frame outside of this package."""
    level, package = 2, __name__.partition(".")[0]
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level
