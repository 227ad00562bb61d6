"""Passes over dynamo's graph, before autograd, in the order in which they run."""

from __future__ import annotations

from fuser.passes.runner import Pass

PRE_GRAD: tuple[Pass, ...] = ()
