"""Exceptions. Each message names the thing, what was expected, and the cure."""

from __future__ import annotations

import errno


class FuserError(Exception):
    """Base of all errors that `fuser` raises deliberately."""


class GraphError(FuserError):
    """The graph passed to `register_fusion` cannot be registered."""


class UnknownKeyError(FuserError, KeyError):
    """A key that `register_fusion` did not return, or whose fusion is gone."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InputError(FuserError, TypeError):
    """A wrong number or type of inputs to a registered fusion."""


class AotError(FuserError, RuntimeError):
    """An ahead-of-time file that cannot be written, or must not be used."""


class ConfigError(FuserError, ValueError):
    """An unknown setting, or a value that it does not accept."""


class BackendError(FuserError, RuntimeError):
    """No backend for a device, or one that does not implement the protocol."""


class NotFusedError(FuserError, AssertionError):
    """A failed check of `require_fused` or `fuser.testing.assert_fused`. The message has the reasons."""


class PassError(FuserError, RuntimeError):
    """A pass that raised, or left a graph that is broken or has other shapes. The message names pass and node."""


class VerifyError(FuserError, AssertionError):
    """An IR or a plan that breaks its own rules: a defect of `fuser`."""


class BoundsError(FuserError, AssertionError):
    """A kernel with `config.check_bounds` that would access memory outside of its buffer: a defect of `fuser`."""


class LoweringError(FuserError):
    """A lowering, the scheduler or a generator raised something other than `Unsupported`: a defect, which is named."""


class TraceError(FuserError):
    """The tracer of a graph itself raised an error: a defect."""


class Unsupported(FuserError):
    """Something that is not fused. This is normal: the group is split or falls back, and the reason is kept.

    `reason` is one sentence; `node` names the graph node or op that it concerns, if any.
    """

    def __init__(self, reason: str, node: str | None = None) -> None:
        super().__init__(reason if node is None else f"{node}: {reason}")
        self.reason = reason
        self.node = node


class NotNow(Unsupported):
    """There is no kernel for this call; a later one may have one."""


class NotPrebuilt(Unsupported):
    """A kernel that can only be found, since nothing here compiles, but is not among the prebuilt ones."""


def is_defect(error: BaseException) -> bool:
    """Whether an error raised by a compilation is a fault of `fuser` itself."""
    if is_refusal(error):
        return False
    return not isinstance(error, FuserError) or isinstance(error, (LoweringError, VerifyError, BoundsError, TraceError))


_SCARCE = frozenset((errno.EAGAIN, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC))


def is_refusal(error: BaseException) -> bool:
    """Whether the system refused memory, files or disk space, even for an import: no fault of `fuser`."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SCARCE)


class CompileError(FuserError, RuntimeError):
    """A compiler that is missing, failed or hung. `log` holds its output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
