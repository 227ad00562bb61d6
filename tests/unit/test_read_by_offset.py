"""`as_strided` sees the memory of its argument, not its elements alone: no pass may put an equal tensor there."""

from __future__ import annotations

import pytest
import torch

from fuser.frontends.dynamo import fuser_backend


def written(v, part, write):
    u = v * 1
    write(part(u))
    return part(u)


COPIES = {  # each has elements of its argument, or a part of it, in memory of its own
    "clone": lambda v: v.clone(),
    "factor of one": lambda v: v * 1,
    "cast": lambda v: v.double().float(),
    "copy": lambda v: v.to(torch.float32, copy=True),
    "piece of a join": lambda v: torch.cat([v, v])[: v.shape[0]],
    "joined pieces": lambda v: torch.cat(v.chunk(2), 0),
    "part of a scatter": lambda v: torch.slice_scatter(v, v[1:] * 3, 0, 1)[1:],
    "part of a selection": lambda v: torch.select_scatter(v, v[1] * 3, 0, 1)[1:],
    "diagonal": lambda v: (v * 1).diagonal(),
    "written rows": lambda v: written(v, lambda u: u[1:], lambda p: p.mul_(3)),
    "copied rows": lambda v: written(v, lambda u: u[1:], lambda p: p.copy_(v[1:])),
    "filled columns": lambda v: written(v, lambda u: u[:, 1:], lambda p: p.fill_(3)),
}
PARTS = {"rows": lambda x: x[1:], "rows of a result": lambda x: (x * 2)[1:]}


@pytest.mark.parametrize("part", PARTS)
def test_copies_that_are_read_by_offset_have_memory_of_their_own(part):
    def f(x):
        return [copy(PARTS[part](x)).as_strided((2, 2), (2, 1), 1) * 1 for copy in COPIES.values()]

    torch._dynamo.reset()
    x = torch.randn(6, 6)
    for name, got, want in zip(COPIES, torch.compile(f, backend=fuser_backend)(x), f(x), strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def read_before(x):
    seen = x.as_strided((2, 2), (3, 1))
    x.add_(1)
    return seen * 1, x * 1


def read_after(x):
    x.add_(1)
    return x.as_strided((2, 2), (3, 1)).clone(), x * 1


def write_by_offset(x):
    seen = x.as_strided((2, 2), (3, 1))
    seen.add_(1)
    return x * 1, seen * 1


def write_elsewhere(x):
    x.as_strided((2, 2), (3, 1), 1).mul_(3)
    return (x * 1,)


@pytest.mark.parametrize("function", (read_before, read_after, write_by_offset, write_elsewhere))
def test_written_inputs_with_gaps_are_read_by_offset(function):
    for part in (lambda base: base.view(4, 12)[:, ::2], lambda base: base[3:27].view(4, 6)):
        torch._dynamo.reset()
        base = torch.arange(48.0)
        other = base.clone()
        got = torch.compile(function, backend=fuser_backend)(part(base))
        want = function(part(other))
        torch.testing.assert_close([*got, base], [*want, other])
