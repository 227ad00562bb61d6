"""Every pass on graphs whose sizes are symbols, backed and unbacked: eager's results, no failure and no guard added."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo import decorators

from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.passes import runner
from tests.versions import IS_OLD

pytestmark = pytest.mark.usefixtures("clean")
torch.manual_seed(0)
W, V, ROW = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
FILTER, SMALL, POINTS = torch.randn(4, 1, 3), torch.randn(4, 3, 3, 3), torch.randn(4, 3, 1, 1)


def products(x):
    y = x * 1.5
    row = ROW + y @ W
    return y.t() @ y, y @ y.t(), row, torch.addmm(ROW, y, V).relu(), F.gelu(F.linear(y, W, ROW)), torch.mv(y, ROW)


def batches(x):
    y = x[:, None, :] * 2
    square = W.expand(x.shape[0], 8, 8)
    outer = torch.einsum("ni,nj->nij", x, x), torch.outer(x[:, 0], ROW)
    return torch.bmm(y, square), torch.baddbmm(y, y, square), *outer


def attention(x):
    y = torch.stack([x, x * 2, x - 1])
    return torch.softmax(y @ y.transpose(-2, -1) / 3.0, -1) @ y


def convolutions(x):
    y = F.conv1d(x[:, None] * 2, FILTER, padding=1).relu()
    image = x[:, None, :, None].expand(-1, 3, 8, 6) * 1.0
    deep = F.conv2d(F.conv2d(image, SMALL, padding=1)[:, :3].relu(), POINTS)
    return y, F.conv1d(x.t()[None], torch.ones(2, 8, 1)), deep, F.batch_norm(deep, torch.zeros(4), torch.ones(4))


def norms(x):
    soft = x.softmax(1), x.log_softmax(0), torch.softmax(x, 0)
    return *soft, F.layer_norm(x, (8,), ROW, ROW), F.rms_norm(x, (8,)), F.normalize(x, dim=1)


def reductions(x):
    return x.sum(0), x.mean(1), x.amax(1), x.var(0), torch.linalg.vector_norm(x), x.sum()


def losses(x):
    target = torch.zeros(x.shape[0], dtype=torch.long)
    distances = F.mse_loss(x, x * 2), F.smooth_l1_loss(x, x + 1)
    return F.cross_entropy(x, target), F.nll_loss(x.log_softmax(1), target), *distances


def views(x):
    y = torch.cat([x, x * 2])
    halves = torch.cat([x[:, :4], x[:, 4:]], 1)
    return (
        y.view(-1) + 1, x.reshape(-1, 4).t() * 2, x.unsqueeze(0).expand(3, -1, -1) + 1, halves * 1, x[1:] + x[:-1],
        x[::2] * 2, F.pad(x, (1, 1, 2, 2)), x.flip(0) + 1, y[:, :3] * 2, x.t().contiguous().t() + 1, x.repeat(2, 1),
    )  # fmt: skip


def scatters(x):
    rows = torch.arange(x.shape[0]) % 7
    table = torch.zeros(7, 8).index_add(0, rows, x)
    put = torch.zeros(7, 8).index_put((rows,), x, accumulate=True).index_add(0, rows, x * 2)
    added = torch.zeros(7, 8).scatter_add(0, rows[:, None].expand(-1, 8), x)
    return table, put, added, W[rows] * x, x.gather(0, rows[:, None])


def lookups(x):
    words = (x[:, :2].detach().abs() * 3).long() % 8
    return F.embedding(words, W * x.sum()), torch.where(x > 0, x, 0.0), x.masked_fill(x > 0.5, 1.0), x.topk(2, 1)[0]


def draws(x):
    return F.dropout(x, 0.0) + 1, (torch.rand_like(x) < 2.0) * x


def lists(x):
    first, second = torch._foreach_add([x, x * 2, W], 1.0)[:2]
    return first.sigmoid(), second.tanh(), x.to(torch.float64).to(torch.float32) * 1, torch.full_like(x, 2.0) * x


FAMILIES = [
    products, batches, attention, convolutions, norms, reductions, losses, views, scatters, lookups, draws, lists,
]  # fmt: skip


@pytest.fixture
def watched(monkeypatch):
    """Has every pass report the guards that it adds; the list of those that did or were skipped."""
    found, run = [], runner._run

    def count(module):
        values = (v for n in module.graph.nodes for v in (n.meta.get("val"), n.meta.get("example_value")))
        mode = next((m for v in values if (m := getattr(v, "fake_mode", None)) is not None), None)
        return len(mode.shape_env.guards) if mode is not None and mode.shape_env is not None else 0

    def counted(module, p, unknown):
        before = count(module)
        record = run(module, p, unknown)
        if record.error or count(module) != before:
            found.append((p.item.name, record.error))
        return record

    monkeypatch.setattr(runner, "_run", counted)
    return found


def _input(kind, requires_grad):
    x = torch.rand(10, 8).requires_grad_(requires_grad)
    if kind == "unbacked":
        decorators.mark_unbacked(x, 0)
    elif kind == "backed":
        decorators.mark_dynamic(x, 0)
    return x


@pytest.mark.sampled(
    14,
    also=(
        "attention-unbacked-False", "batches-unbacked-True", "convolutions-unbacked-True", "lists-unbacked-True",
        "views-unbacked-True",
    ),
)  # fmt: skip
@pytest.mark.parametrize("kind, requires_grad", [("backed", True), ("unbacked", True), ("unbacked", False)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_family(family, kind, requires_grad, watched):
    if IS_OLD and family is convolutions and kind == "unbacked":
        pytest.skip("Dynamo of this torch cannot trace a convolution of an unbacked length")
    x = _input(kind, requires_grad)
    same = x.detach().clone().requires_grad_(requires_grad)
    got, want = torch.compile(family, backend=fuser_backend, fullgraph=True)(x), family(same)
    torch.testing.assert_close(got, want)
    if requires_grad:
        for results in (got, want):
            results = results if isinstance(results, tuple) else (results,)
            sum(r.sum() for r in results if r.requires_grad).backward()
        torch.testing.assert_close(x.grad, same.grad)
    assert not watched and [c for c in compilations() if c.groups]
