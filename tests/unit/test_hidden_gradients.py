"""Custom operators without a gradient of their own: in eager gradients flow through what their kernels call."""

from __future__ import annotations

import pytest
import torch

from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend
from fuser.frontends.example_values import HIDDEN

LIBRARY = torch.library.Library("fuser_hidden", "DEF")
for schema, kernel, fake in (
    ("doubled(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like),
    ("doubled_(Tensor(a!) x) -> ()", lambda x: None if x.mul_(2) is None else None, lambda x: None),
    ("both(Tensor[] xs) -> Tensor[]", lambda xs: [x * 3 for x in xs], lambda xs: [torch.empty_like(x) for x in xs]),
):
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], kernel, "CPU")
    torch.library.register_fake(f"fuser_hidden::{schema.partition('(')[0]}", fake, lib=LIBRARY)
own = torch.ops.fuser_hidden


def in_place(x):
    y = x.sin()
    own.doubled_(y)
    return y.exp()


@pytest.mark.parametrize("f", [lambda x: own.doubled(x.sin()).exp(), in_place, lambda x: own.both([x.sin()])[0].exp()])
def test_gradients_are_eagers(f):
    def found(g):
        x = torch.linspace(-1, 1, 8).requires_grad_()
        g(x).sum().backward()
        return x.grad

    forget_compilations()
    torch._dynamo.reset()
    fused = torch.compile(f, backend=fuser_backend)
    torch.testing.assert_close(found(fused), found(f))
    assert any(c.reason == HIDDEN for c in compilations())
    with torch.no_grad():  # no gradient is lost: the operator stands between kernels
        x = torch.linspace(-1, 1, 8)
        torch.testing.assert_close(fused(x), f(x))
    assert compilations()[-1].reason != HIDDEN
