"""Symbolic sizes through `torch.compile`: eager's results for all of them, from few graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends.dynamo import fuser_backend


class Counted:
    """The backend, with the number of graphs that it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return fuser_backend(module, inputs)


def halves(x):
    """Sizes in arithmetic: the rows in pairs."""
    pairs = x.view(x.shape[0] // 2, -1)
    return torch.softmax(pairs * 2, -1) + pairs.shape[1]


def padded(x):
    """Columns filled up to a multiple of 8."""
    missing = -x.shape[1] % 8
    return F.pad(x.relu() + 1, (0, missing)).sum(0)


def flattened(x):
    return (x.reshape(-1, 2) * x.shape[0]).flatten().cos()


def joined(x):
    return torch.cat([x, x[: x.shape[0] // 2] * 2]).mean(1)


@pytest.mark.parametrize("f", [halves, padded, flattened, joined])
def test_sizes_in_arithmetic(f):
    torch._dynamo.reset()
    backend = Counted()
    g = torch.compile(f, backend=backend, dynamic=True)
    for rows, columns in ((4, 6), (10, 6), (6, 14), (12, 10), (8, 32)):
        x = torch.linspace(-1, 1, rows * columns).reshape(rows, columns)
        torch.testing.assert_close(g(x), f(x))
    assert backend.graphs <= 2, backend.graphs


def test_a_dimension_marked_unbacked():
    torch._dynamo.reset()
    backend = Counted()
    f = lambda x: torch.tanh(x * 3).sum(-1)  # noqa: E731
    g = torch.compile(f, backend=backend)
    for rows in (5, 1, 9, 2):
        x = torch.linspace(0, 1, rows * 4).reshape(rows, 4)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.testing.assert_close(g(x), f(x))
    assert backend.graphs == 1


def test_a_size_that_depends_on_data():
    torch._dynamo.reset()
    backend = Counted()

    def f(x):
        kept = x[x > 0]
        return (kept * 2 + 1).exp(), kept.sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        g = torch.compile(f, backend=backend)
        for x in (torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-1.0, 3.0, -2.0]), torch.tensor([-1.0, -3.0, -2.0])):
            for a, b in zip(g(x), f(x)):
                torch.testing.assert_close(a, b)
    assert backend.graphs == 1
