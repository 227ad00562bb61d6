"""Calls that may return their very argument, and a change of its sizes behind them: both names have the new sizes."""

from __future__ import annotations

import pytest
import torch

import fuser

pytestmark = pytest.mark.usefixtures("clean")

SAME = {
    "to": lambda x: x.to(torch.float32),
    "to another's": lambda x: x.to(torch.empty(0)),
    "to a device": lambda x: x.to("cpu"),
    "float": lambda x: x.float(),
    "type": lambda x: x.type(torch.float32),
    "type as": lambda x: x.type_as(torch.empty(0)),
    "contiguous": lambda x: x.contiguous(),
    "at least": lambda x: torch.atleast_2d(x),
    "broadcast": lambda x: torch.broadcast_tensors(x, x)[0],
    "itself": lambda x: x,
    "positive": lambda x: +x,
    "detached": lambda x: x.detach(),  # a tensor of its own, as all below
    "expanded": lambda x: x.expand(x.shape),
    "viewed": lambda x: x.view(x.shape),
    "cast": lambda x: x.to(torch.float64),
}
CHANGES = {
    "t": lambda x: x.t_(),
    "transpose": lambda x: x.transpose_(0, 1),
    "swapaxes": lambda x: x.swapaxes_(0, 1),
    "swapdims": lambda x: torch.ops.aten.swapdims_(x, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze_(0),
    "squeeze": lambda x: x.unsqueeze_(1).squeeze_(1),
    "strided": lambda x: x.as_strided_((2, 2), (1, 3)),
    "resize": lambda x: x.resize_(2, 2),
    "written": lambda x: x.mul_(2),
}


def seen(function):
    x = torch.arange(51.0).reshape(17, 3)
    return [(t.dtype, t.shape, t.stride(), t.tolist()) for t in (*function(x), x)]


@pytest.mark.sampled(23, also=("to another's-squeeze", "type-written"))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("same", SAME)
def test_both_names_change(same, change):
    def first(x):
        a = x.view_as(x.view(x.shape[0], 3))
        b = SAME[same](a)
        CHANGES[change](b)
        return a.sum(-1), b + 1, a * 2

    def second(x):
        a = x * 2 + 1
        b = SAME[same](a)
        CHANGES[change](a)
        return a.sum(-1), b + 1, (b - 3) * 2

    for program in (first, second):
        handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(program)))
        try:
            want = seen(program)
        except RuntimeError:
            continue  # eager refuses that
        assert seen(handle) == want
