"""`config.require_fused`: an operator on ATen, or too many kernels, is an error when a graph is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuser import config, interface
from fuser.errors import FuserError, NotFusedError
from fuser.frontends.records import CompiledGraph
from fuser.kernel_cache import REGISTRY
from fuser.kernel_spec import LaunchProgram
from fuser.passes.extract import GroupPlan

settings: Any = config  # its attributes are made from a table
ALLOWED = ("library", "bodies")  # codes of operators that may still run on ATen
_MOST = 12  # most operators that an error names


def check(record: CompiledGraph, groups: Sequence[GroupPlan] = ()) -> None:
    """NotFusedError if `config.require_fused` is set and the graph of `record` violates it.

    It waits for the kernels of the graph's groups, for the arguments seen while tracing.
    """
    if not settings.require_fused:
        return
    if record.route == "eager":
        raise in_dynamo(NotFusedError(f"require_fused: a graph runs in eager, because {record.reason}"))
    said = [
        f"{u.op} at {u.source or 'an unknown line'} [{u.code}]: {u.reason}"
        for u in record.unfused
        if u.code not in ALLOWED
    ]
    launches = 0
    for made, plan in zip(record.groups, groups):
        reason, count = _prepared(made.key, plan)
        launches += count
        if reason is not None:
            where = next((s for s in made.sources if s is not None), None)
            said.append(f"a group of {', '.join(made.ops[:6])} at {where or 'an unknown line'}: {reason}")
    complain(said, launches, settings.require_fused)


def complain(said: Sequence[str], kernels: int, most: int) -> None:
    """NotFusedError if `said` is not empty, or if there are more kernels than allowed."""
    if said:
        more = f"\n  and {len(said) - _MOST} more" if len(said) > _MOST else ""
        listed = "\n  ".join(said[:_MOST])
        raise in_dynamo(NotFusedError(f"require_fused: not all of it is fused\n  {listed}{more}"))
    if kernels > most:
        raise in_dynamo(NotFusedError(f"require_fused: it takes {kernels} kernels: expected {most} at most"))


def _prepared(key: int, plan: GroupPlan) -> tuple[str | None, int]:
    """(why a group has no kernel for the arguments seen while tracing or None, the loop nests that it launches)."""
    try:
        reason = interface.prepare(key, [n.meta.get("val") for n in plan.inputs]).result()
    except FuserError as error:
        return str(error), 0
    programs = [k.program for k in REGISTRY.find(key).spec.store.kernels]
    return reason, max((len(p.steps) for p in programs if isinstance(p, LaunchProgram)), default=0)


def in_dynamo(error: FuserError) -> FuserError:
    """The same error in a form that Dynamo passes on to the user, not wrapped in one of its own."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    found: FuserError = type(kind.__name__, (kind, ShortenTraceback), {"first_useful_frame": None})(str(error))
    return found


__all__ = ["ALLOWED", "check", "complain", "in_dynamo"]
