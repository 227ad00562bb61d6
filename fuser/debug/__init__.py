"""Inspection: which groups were fused into which code, and why other operators were not."""

from fuser.contests.records import choices
from fuser.cuda.graphs import recorded
from fuser.debug.explaining import dump
from fuser.debug.explanation import Explanation
from fuser.debug.guarding import KernelGuards, guards
from fuser.debug.models import explain
from fuser.debug.opening import Trace, loop_to_fx, to_fx, trace
from fuser.debug.pipeline import PassTable, bisect_passes, passes
from fuser.debug.reporting import Report, report
from fuser.debug.reproducing import repro
from fuser.debug.scripts import graph_for
from fuser.debug.timing import Timing, measure

__all__ = [
    "Explanation", "KernelGuards", "PassTable", "Report", "Timing", "Trace", "bisect_passes", "choices", "dump",
    "explain", "graph_for", "guards", "loop_to_fx", "measure", "passes", "recorded", "report", "repro", "to_fx",
    "trace",
]  # fmt: skip
