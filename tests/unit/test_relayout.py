"""Values of nodes whose arguments change their memory order: those of torch's shape functions."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import examples
from fuser.frontends import fakes
from fuser.passes.layouts import Relayout
from fuser.passes.writing import Writer

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


@contextlib.contextmanager
def watched(mode: FakeTensorMode, monkeypatch):
    """The operators whose fake values are computed in the block."""
    asked, plain = [], mode.dispatch
    with monkeypatch.context() as patch:
        patch.setattr(mode, "dispatch", lambda func, *args, **named: asked.append(func) or plain(func, *args, **named))
        yield asked


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
        with watched(mode, monkeypatch) as asked:
            found, again = walk._value(node), walk._value(node)
        assert set(asked) <= {aten.empty_strided.default} and again is found
        for f, w in zip(found, want, strict=True):
            assert (f is None) == (w is None)
            assert f is None or (f.shape, f.stride(), f.dtype, f.device) == (w.shape, w.stride(), w.dtype, w.device)


def test_written_calls_of_equal_tensors_are_asked_once(monkeypatch):
    """What a value depends on is part of the question: sizes, strides, dtypes, numbers and their types."""
    mode, graph = FakeTensorMode(), fx.Graph()
    node = graph.placeholder("x")
    memories = []

    def asks(target, x, *args) -> bool:
        with mode:
            node.meta["val"] = x()
        call = graph.call_function(aten.neg.default, (node,))
        call.meta["val"] = node.meta["val"]
        with watched(mode, monkeypatch) as asked:
            made = Writer(call)(target, node, *args)
        any_asked, value = bool(asked), made.meta["val"]
        with mode:
            want = target(node.meta["val"], *args)
        assert (value.shape, value.stride(), value.dtype) == (want.shape, want.stride(), want.dtype)
        assert value.device == want.device and value.fake_mode is mode
        shares = value.untyped_storage()._cdata == node.meta["val"].untyped_storage()._cdata
        assert shares == (target in (aten.view.default, aten.alias.default))
        memories.append(value.untyped_storage())
        assert len({m._cdata for m in memories}) == len(memories)
        return any_asked

    tensor = lambda **kwargs: lambda: torch.empty(2, 4, 6, 8, **kwargs)  # noqa: E731
    assert [asks(aten.mul.Tensor, tensor(), 2) for _ in range(3)] == [True, False, False]
    others = [(tensor(dtype=torch.int32), 2), (tensor(dtype=torch.int32), 2.0), (tensor(), True)]
    others += [(tensor(memory_format=torch.channels_last), 2), (lambda: torch.empty(2, 4, 6, 7), 2)]
    assert [asks(aten.mul.Tensor, x, n) for x, n in others for _ in range(2)] == [True, False] * 5
    assert [asks(aten.view.default, tensor(), [8, -1]) for _ in range(2)] == [True, True]
    assert [asks(aten.alias.default, tensor()) for _ in range(2)] == [True, True]
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert asks(aten.mul.Tensor, tensor(), 2)
    assert [asks(aten.abs.default, tensor(dtype=torch.complex64)) for _ in range(2)] == [True, True]


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
