"""What was fused, into which code, and why the rest was not."""

from fuser.debug.explaining import dump, explain
from fuser.debug.reporting import Report, report

__all__ = ["Report", "dump", "explain", "report"]
