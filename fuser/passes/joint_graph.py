"""Passes over the functional graph of forward and backward, in the order in which they run."""

from __future__ import annotations

from fuser.passes.foreach import split_foreach
from fuser.passes.runner import Pass

JOINT_GRAPH: tuple[Pass, ...] = (Pass("split_foreach", split_foreach),)
