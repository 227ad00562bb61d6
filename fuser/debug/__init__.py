"""What was fused, into which code, and why the rest was not."""

from fuser.debug.explain import dump, explain
from fuser.debug.report import Report, report

__all__ = ["Report", "dump", "explain", "report"]
