# ruff: noqa: UP045 (TorchScript reads these annotations)
"""What the first fuser fused, each program with right values and its number of groups."""

from __future__ import annotations

import itertools
import linecache
from typing import Optional

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fuser
from tests.unit import torchscript_corpus as corpus
from tests.unit.test_fuse_script import assert_alike, error_line
from tests.unit.torchscript_corpus import rand

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")


def milstm_cell(x, hx, cx, w_ih, w_hh, alpha, beta, bias):
    from_x = x.mm(w_ih)
    from_h = hx.mm(w_hh)
    gates = alpha * from_x * from_h + beta * from_x + beta * from_h + bias
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def drawn(x: Tensor):
    return (torch.rand_like(x) * x + 1).relu() * 2


def summed_to_size(x: Tensor, size: list[int]):
    return ((x * 2 + 1)._grad_sum_to_size(size) * 3).relu()


def optional_arguments(x: Tensor, w: Optional[Tensor] = None):
    y = (x * 2).clamp(None, 1.0) + 1
    if w is not None:
        y = y * w + w
    return y.relu()


def batch_norm(x: Tensor, mean: Tensor, var: Tensor):
    return F.batch_norm(x, mean, var, None, None, False).relu() * 2


def batch_norm_training(x: Tensor, mean: Tensor, var: Tensor):
    return F.batch_norm(x, mean, var, None, None, True).relu() * 2


def several_groups(x: Tensor, w: Tensor):
    y = (x * 2 + 1).relu()
    z = (y.mm(w) * 3 - 1).tanh()
    return z.mm(w).exp() + x


_X, _W = rand(4, 6), rand(6, 32)
_CELL = (rand(4, 6), rand(4, 8), rand(4, 8) + 1, rand(6, 32), rand(8, 32))

# program, inputs, groups
CASES = [
    (corpus.chunked, (_X,), 1), (corpus.concatenated, (_X, _X * 2), 1), (corpus.broadcast, (_X, _X[0], _X[:, :1]), 1),
    (corpus.compared, (_X, _X.abs()), 1), (corpus.zero_dim, (_X,), 1), (corpus.scalars, (_X, 3, 2.5, True), 1),
    (corpus.half_values, (_X,), 1), (corpus.integers, (_X,), 1), (corpus.empty, (_X,), 1),
    (corpus.transposed, (_X,), 1),
    (corpus.reduced, (_X,), 1), (corpus.several_results, (_X,), 1), (corpus.sizes_between, (_X,), 1),
    (corpus.lstm_cell, _CELL, 1), (milstm_cell, (*_CELL, rand(32), rand(32) + 1, rand(32) + 2), 1), (drawn, (_X,), 1),
    (summed_to_size, (_X, [6]), 2), (summed_to_size, (_X, [4, 6]), 2),
    (optional_arguments, (_X,), 2), (optional_arguments, (_X, _X), 2),
    (batch_norm, (_X, _X[0], _X[0].abs()), 1), (batch_norm_training, (_X, _X[0], _X[0].abs()), 1),
    (several_groups, (rand(4, 6), rand(6, 6)), 3), (corpus.branch_on_argument, (_X, True), 3),
    (corpus.loop, (_X, 3), 1), (corpus.loop_unbind, (_X,), 1), (corpus.nested_branches, (_X, 2, True), 4),
    (corpus.write_input, (_X,), 2), (corpus.write_view, (_X,), 2),
]  # fmt: skip


@pytest.mark.sampled(25, also=("3-compared",))
@pytest.mark.parametrize(
    ("program", "args", "groups"), CASES, ids=[f"{i}-{c[0].__name__}" for i, c in enumerate(CASES)]
)
def test_values_and_groups(program, args, groups):
    script = torch.jit.script(program)
    fused = fuser.fuse_script(script)
    for _ in range(2):
        copies = [tuple(a.clone() if isinstance(a, Tensor) else a for a in args) for _ in range(2)]
        torch.manual_seed(1)
        want = script(*copies[0])
        torch.manual_seed(1)
        assert_alike(fused(*copies[1]), want)
    assert len(fused.fusion.groups) == groups, fuser.debug.graph_for(fused)


def test_gate_sums_in_every_order():
    terms = ("x.mm(w_ih)", "hx.mm(w_hh)", "b_ih", "b_hh")
    args = (*_CELL, rand(32), rand(32) + 1)
    for order in itertools.permutations(terms):
        lines = (
            "def cell(x, hx, cx, w_ih, w_hh, b_ih, b_hh):",
            f"    gates = {' + '.join(order)}",
            "    i, f, g, o = gates.chunk(4, 1)",
            "    c = f.sigmoid() * cx + i.sigmoid() * g.tanh()",
            "    return o.sigmoid() * c.tanh(), c",
        )
        script = _scripted("\n".join(lines) + "\n")
        fused = fuser.fuse_script(script)
        assert len(fused.fusion.groups) == 1, order
        assert_alike(fused(*args), script(*args))


def _scripted(source: str):
    name = f"<script {hash(source)}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    space: dict[str, object] = {"__name__": "scripts"}
    exec(compile(source, name, "exec"), space)
    return torch.jit.script(space["cell"])


def test_one_graph_for_all_ranks_and_dtypes():
    script = torch.jit.script(corpus.branch_on_argument)
    fused = fuser.fuse_script(script)
    keys = {g.key for g in fused.fusion.groups}
    shapes = ((3,), (2, 3), (2, 3, 4), (), (0, 3))
    for shape, dtype in (*((s, torch.float32) for s in shapes), ((3,), torch.float64), ((3,), torch.bfloat16)):
        given = torch.ones(shape, dtype=dtype) * 0.3
        torch.testing.assert_close(fused(given, True), script(given, True))
    assert {g.key for g in fused.fusion.groups} == keys


def test_mixed_devices_raise_as_the_script():
    script = torch.jit.script(corpus.concatenated)
    fused = fuser.fuse_script(script)
    args = torch.ones(2, 3), torch.ones(2, 3, device="meta")
    with pytest.raises(RuntimeError) as want:
        script(*args)
    with pytest.raises(RuntimeError) as got:
        fused(*args)
    assert error_line(got.value) == error_line(want.value)


def test_errors_of_sizes():
    script = torch.jit.script(corpus.broadcast)
    fused = fuser.fuse_script(script)
    args = torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 3)
    for call in (script, fused):
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            call(*args)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return torch.relu(self.norm(x * 2) + 1) * 3


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_module(training):
    script = torch.jit.script(Norm().train(training))
    fused = fuser.fuse_script(script)
    given = rand(2, 3, 4, 4)
    assert_alike(fused(given), script(given))
    assert_alike(dict(fused.state_dict()), dict(script.state_dict()))
    assert len(fused.fusion.groups) == 1
    calls = [c for g in fused.fusion.groups for c in g.calls]
    assert ("aten::batch_norm" in calls) is not training
