"""Passes over the functional graph of forward and backward, in the order in which they run."""

from __future__ import annotations

from fuser.passes.convolutions import convolutions_channels_last
from fuser.passes.foreach import split_foreach
from fuser.passes.runner import Pass
from fuser.passes.statistics import forget_statistics

JOINT_GRAPH: tuple[Pass, ...] = (
    Pass("split_foreach", split_foreach),
    Pass("forget_statistics", forget_statistics),
    Pass("convolutions_channels_last", convolutions_channels_last),
)
