"""Values of nodes whose arguments change their memory order: those of torch's shape functions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import examples
from fuser.frontends import fakes
from fuser.passes.layouts import Relayout

aten = torch.ops.aten
ORDERS = (torch.contiguous_format, torch.channels_last)


def norm_gradient(mode: FakeTensorMode, wanted: list[bool], training: bool):
    """A graph of one batch norm's gradients, with the values of row-major tensors."""
    graph = fx.Graph()
    sizes = [(2, 4, 6, 8), (2, 4, 6, 8), *[(4,)] * 5]
    inputs = [graph.placeholder(f"x{i}") for i in range(len(sizes))]
    with mode:
        for node, size in zip(inputs, sizes, strict=True):
            node.meta["val"] = torch.empty(size)
        node = graph.call_function(aten.native_batch_norm_backward.default, (*inputs, training, 1e-5, wanted))
        node.meta["val"] = node.target(*(n.meta["val"] for n in inputs), training, 1e-5, wanted)
    return graph, inputs, node


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, True], [True, False, False]])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_batch_norms_have_values_without_the_decomposition(monkeypatch, wanted, training):
    mode = FakeTensorMode()
    fakes.correct(mode)
    for grad, x in itertools.product(ORDERS, repeat=2):
        graph, inputs, node = norm_gradient(mode, wanted, training)
        walk = Relayout(graph, mode)
        with mode:
            for given, order in zip(inputs, (grad, x)):
                given.meta["val"] = torch.empty(2, 4, 6, 8, memory_format=order)
        want = walk._compute(node.target, tuple(n.meta["val"] for n in inputs) + node.args[len(inputs) :], {})
        with monkeypatch.context() as patch:
            patch.setattr(walk, "_compute", lambda *args: pytest.fail("a shape function was run"))
            found = walk._value(node)
        for f, w in zip(found, want, strict=True):
            assert (f is None) == (w is None)
            assert f is None or (f.shape, f.stride(), f.dtype, f.device) == (w.shape, w.stride(), w.dtype, w.device)


def test_the_arguments_of_a_kernel_share_a_mode(monkeypatch):
    """A mode takes a millisecond to make, and a whole model has thousands of arguments."""
    made = []
    plain = FakeTensorMode.__init__
    with FakeTensorMode():
        like = [*(torch.empty(n + 2, 3).t() for n in range(5)), 1.5, torch.empty(1)]
    monkeypatch.setattr(FakeTensorMode, "__init__", lambda self, *a, **k: made.append(self) or plain(self, *a, **k))
    found = examples.all_concrete(like)
    assert len(made) == 1 and {t.fake_mode for t in found if isinstance(t, torch.Tensor)} == set(made)
    other = examples.all_concrete(like)  # made in another thread
    assert len(made) == 2 and other[0].fake_mode is made[1]
    for f, given in zip(found, like, strict=True):
        assert f == given if isinstance(f, float) else (f.shape, f.stride()) == (given.shape, given.stride())
    assert examples.all_concrete([1, torch.ones(2)])[0] == 1 and len(made) == 2
