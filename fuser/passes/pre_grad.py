"""Passes over dynamo's graph, before autograd, in the order in which they run."""

from __future__ import annotations

from fuser.passes.attention import fuse_attention
from fuser.passes.normalise import name_written
from fuser.passes.runner import Pass

PRE_GRAD: tuple[Pass, ...] = (
    Pass("name_written", name_written),
    Pass("fuse_attention", fuse_attention),
)
