"""Users' lowerings and ops, as part of the names of kept kernels: a changed function does not find old code."""

from __future__ import annotations

import hashlib
import inspect
import pathlib
from collections.abc import Iterable

_KNOWN: dict[str, str | None] = {}  # by name: the text of an addition; None if it cannot be read


def note(name: str, *parts: object) -> None:
    """Record the addition `name`, defined by `parts`: values by their text, functions by their source files."""
    texts = [_text(part) for part in parts]
    _KNOWN[name] = None if None in texts else "\0".join(map(str, texts))


def forget(name: str) -> None:
    """Remove the addition `name`."""
    _KNOWN.pop(name, None)


def without(names: Iterable[str]) -> list[str]:
    """The `names` that are the package's own."""
    return [name for name in names if name not in _KNOWN]


def any_known() -> bool:
    """Whether users added anything: other processes do not have it."""
    return bool(_KNOWN)


def mark() -> str | None:
    """An identifier of this process's additions; "" if there are none, None if their text is unknown."""
    if None in _KNOWN.values():
        return None
    return hashlib.blake2b(repr(sorted(_KNOWN.items())).encode(), digest_size=16).hexdigest() if _KNOWN else ""


def _text(part: object) -> str | None:
    if not callable(part):
        return repr(part)
    closed: dict[str, object] = inspect.getclosurevars(part).nonlocals if inspect.isfunction(part) else {}
    if any(not isinstance(value, (int, float, str, bool, type(None))) for value in closed.values()):
        return None
    try:
        file = pathlib.Path(inspect.getsourcefile(part) or "")
        return f"{getattr(part, '__qualname__', part)} {sorted(closed.items())}\n{file.read_text()}"
    except (OSError, TypeError, ValueError):
        return None


__all__ = ["any_known", "forget", "mark", "note", "without"]
