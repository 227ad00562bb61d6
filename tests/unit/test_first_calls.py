"""What first calls of whole models do without: garbage collections."""

from __future__ import annotations

import gc

import torch

import fuser.passes


def test_no_garbage_is_collected_while_graphs_are_compiled():
    """A backward is compiled in its first call, when Dynamo and the compilation of the forward are over."""
    seen = []
    fuser.passes.register("post_grad", "sees_collector", lambda gm: seen.append(gc.isenabled()))
    try:
        x = torch.randn(64, requires_grad=True)
        torch.compile(lambda x: (x * 2).sin().exp().sum(), backend="fuser")(x).backward()
    finally:
        fuser.passes.unregister("sees_collector")
    assert seen == [False, False] and gc.isenabled()
