"""Exceptions. Each message names the thing, what was expected, and the cure."""

from __future__ import annotations


class FuserError(Exception):
    """Base of every error that `fuser` raises on purpose."""


class GraphError(FuserError):
    """The graph handed to `register_fusion` is not one that can be registered."""


class UnknownKeyError(FuserError, KeyError):
    """A key that `register_fusion` never returned."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InputError(FuserError, TypeError):
    """A wrong number or type of inputs to a registered fusion."""


class ConfigError(FuserError, ValueError):
    """An unknown setting, or a value that it cannot take."""


class BackendError(FuserError, RuntimeError):
    """No backend for a device, or one that does not fulfil the protocol."""


class PassError(FuserError, RuntimeError):
    """A pass that raised, or left a graph that is broken or of another shape. The message names pass and node."""


class VerifyError(FuserError, AssertionError):
    """An IR or a plan that breaks its own rules: a defect of `fuser`."""


class BoundsError(FuserError, AssertionError):
    """A kernel with `config.check_bounds` that would reach outside of its buffer: a defect of `fuser`."""


class LoweringError(FuserError):
    """A lowering that raised something else than `Unsupported`: a defect of `fuser`. The message names it."""


class Unsupported(FuserError):
    """Something that is not fused. Normal: the group is split or falls back, and the reason is kept.

    `reason` is one sentence; `node` names the graph node or op it is about, if any.
    """

    def __init__(self, reason: str, node: str | None = None) -> None:
        super().__init__(reason if node is None else f"{node}: {reason}")
        self.reason = reason
        self.node = node


def is_defect(error: BaseException) -> bool:
    """Whether an error that a compilation raised is a fault of `fuser` itself."""
    return not isinstance(error, FuserError) or isinstance(error, (LoweringError, VerifyError, BoundsError))


class CompileError(FuserError, RuntimeError):
    """A compiler that is missing, failed or hung. `log` holds its output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
