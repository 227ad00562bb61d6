"""Logging: `TORCH_LOGS="fuser"` through torch's registry, or `FUSER_LOG` without it; silent by default.

Names: `fuser` (a line for each graph), `+fuser` (also for each kernel), and the artifacts in `ARTIFACTS`. torch reads
`TORCH_LOGS` when it is imported, before this package can register a name, and accepts any module name as a log. So
each artifact has a module of its name beside the package, and the logger of that name counts as well. After `import
fuser` the names are registered: `torch._logging.set_logs(modules={"fuser_why": True})`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

ARTIFACTS = {
    "fuser_why": "each operator that runs on ATen, with its line and the reason",
    "fuser_code": "the source of each kernel",
    "fuser_perf": "seconds of each kernel's compilation by stage, and contests with ATen",
}
NAMES = ("fuser", *ARTIFACTS)
LOG = logging.getLogger("fuser")
_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}
_artifacts: dict[str, logging.Logger] = {}
_own: list[logging.Handler] = []  # handlers for FUSER_LOG


def register() -> None:
    """Register the names with torch. With another form of registry, plain loggers with these names are used."""
    for name, description in ARTIFACTS.items():
        _artifacts[name] = _registered(name, description)
    internal: Any = sys.modules.get("torch._logging._internal")
    try:
        internal.log_registry.register_log("fuser", "fuser")
    except (AttributeError, TypeError):
        return


def _registered(name: str, description: str) -> logging.Logger:
    internal: Any = sys.modules.get("torch._logging._internal")
    try:
        internal.register_artifact(name, description, visible=True, off_by_default=True)
        found: logging.Logger = internal.getArtifactLogger("fuser", name)
    except (AttributeError, TypeError, ValueError):
        found = logging.getLogger(f"fuser.__{name}")
    return found


def check(text: Any) -> Any:
    """`text` if it is a list of names in the form of `TORCH_LOGS`; ValueError otherwise."""
    parts = [p.strip() for p in text.split(",") if p.strip()] if isinstance(text, str) else [repr(text)]
    wrong = [p for p in parts if p.lstrip("+-") not in NAMES]
    if wrong:
        raise ValueError(f"expected names from {', '.join(NAMES)}, with commas between, and + or - before a name")
    return text


def apply(text: str) -> None:
    """Write the logs named in `text` to stderr, in place of those named before."""
    for handler in _own:
        LOG.removeHandler(handler)
    named = [p.strip() for p in text.split(",") if p.strip()]
    if not named and not _own:
        return
    _own[:] = []
    LOG.setLevel(logging.NOTSET)
    LOG.propagate = not named
    for logger in _artifacts.values():
        logger.setLevel(logging.NOTSET)
        logger.propagate = False
    if named:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        LOG.addHandler(handler)
        _own.append(handler)
    for part in named:
        logger = _artifacts.get(part.lstrip("+-"), LOG)
        logger.setLevel(_LEVELS.get(part[0], logging.INFO if logger is LOG else logging.DEBUG))
        logger.propagate = logger is not LOG


def wants(artifact: str) -> bool:
    """Whether an artifact's logger is enabled."""
    logger = _logger(artifact)
    return logger is not None and logger.isEnabledFor(logging.DEBUG if logger.name != artifact else logging.INFO)


def say(artifact: str, text: Callable[[], str]) -> None:
    """Log an artifact if its logger is enabled."""
    if wants(artifact):
        logger = _logger(artifact)
        assert logger is not None
        logger.log(logging.INFO if logger.name == artifact else logging.DEBUG, "%s", text(), stacklevel=2)


def _logger(artifact: str) -> logging.Logger | None:
    """The logger that `TORCH_LOGS` enabled when torch was imported, else the registered one."""
    plain = logging.getLogger(artifact)
    return plain if plain.level in (logging.DEBUG, logging.INFO) else _artifacts.get(artifact)


_TRACED = any(os.environ.get(n) for n in ("TORCH_TRACE", "TORCH_DTRACE"))


def trace(name: str, text: Callable[[], str]) -> None:
    """Add an artifact to the file of `TORCH_TRACE`, which tlparse displays."""
    internal: Any = sys.modules.get("torch._logging._internal") if _TRACED else None
    if internal is not None:
        internal.trace_structured(
            "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False
        )


__all__ = ["ARTIFACTS", "LOG", "NAMES", "apply", "check", "register", "say", "trace", "wants"]
