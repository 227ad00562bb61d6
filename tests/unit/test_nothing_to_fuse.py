"""Graphs in which nothing is fused: they cost what dynamo costs, and alias as in eager."""

import pytest
import torch

from fuser.frontends import dynamo


def parts(m):
    return m[:, :3, :3], m[:, :3, 3:]


def turned(m):
    return m.transpose(1, 2)


def sorted_and_flat(m):
    return m.reshape(-1), m.sort(-1)[0]


def itself(m):
    return m, m.view(-1, 16), m.detach()


def written(m):
    m.resize_(len(m), 2, 8)
    return m.view(-1)


def chunks(m):
    return m.chunk(2, 1)


PROGRAMS = (parts, turned, sorted_and_flat, itself, written, chunks)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_as_in_eager(program, dynamic, gradient):
    """Values, strides, aliases of inputs, gradients; writes into results reach the inputs."""
    compiled = torch.compile(lambda m: program(m), backend="fuser", dynamic=dynamic)
    for n in (2, 3, 2):
        m = torch.randn(n, 4, 4)
        ours, theirs = (m.clone().requires_grad_(gradient and program is not written) for _ in range(2))
        got, want = compiled(ours), program(theirs)
        for a, b in zip(got, want) if isinstance(want, tuple) else ((got, want),):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride() and a.requires_grad == b.requires_grad
            assert _offset(a, ours) == _offset(b, theirs)
            if not (gradient and program is chunks):  # eager forbids it
                with torch.no_grad():
                    a.add_(1)
                    b.add_(1)
        torch.testing.assert_close(ours, theirs)


def _offset(a, source):
    """Where a view begins in its source, in bytes; None for other tensors."""
    return None if a._base is None else a.data_ptr() - source.data_ptr()


def test_dynamo_s_graph_runs():
    torch.compile(lambda m: parts(m), backend="fuser")(torch.randn(2, 4, 4))
    record = dynamo.last_compilation()
    assert record.route == "direct" and not record.groups


MODULES = {
    "convolution": lambda: (torch.nn.Conv2d(3, 4, 1), torch.randn(2, 3, 8, 8)),
    "embedding": lambda: (torch.nn.Embedding(16, 8), torch.arange(6)),
    "product": lambda: (torch.nn.Linear(16, 8, bias=False), torch.randn(2, 16)),
}


@pytest.mark.parametrize("name", MODULES)
def test_training(name):
    """A step's gradients, twice through one graph, too."""
    module, x = MODULES[name]()
    compiled = torch.compile(lambda x: module(x), backend="fuser")
    found = []
    for f in (compiled, module):
        module.zero_grad()
        for _ in range(2):
            result = f(x)
            result.sum().backward(retain_graph=True)
            result.pow(2).sum().backward()
        found.append((result.detach(), module.weight.grad))
    torch.testing.assert_close(*found)


def test_a_step_of_one_convolution_is_dynamo_s():
    module, x = MODULES["convolution"]()
    torch.compile(lambda x: module(x), backend="fuser")(x).sum().backward()
    record = dynamo.last_compilation()
    assert (record.route, record.stage, record.groups) == ("direct", "forward", ())
