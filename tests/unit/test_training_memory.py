"""What a training step keeps: the tensors between forward and backward, and gradients that are added in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.runtime import pool, warm

pytestmark = pytest.mark.usefixtures("clean")


def saved_elements(f, own):
    """Elements of the tensors that are saved for the backward of f(), but for those of `own`, each memory once."""
    known = {t.untyped_storage().data_ptr() for t in own}
    found = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in known:
            found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = f()
    loss.backward()
    return sum(t.untyped_storage().nbytes() for t in found.values()) // 4


def compiled(f):
    return torch.compile(f, backend=fuser_backend)


def test_an_activation_between_two_products_is_computed_again():
    torch.manual_seed(0)
    up, down = nn.Linear(32, 128), nn.Linear(128, 32)
    x = torch.randn(64, 32)

    def loss(x):
        return down(F.gelu(up(x))).square().sum()

    own = [*up.parameters(), *down.parameters(), x]
    loss(x).backward()
    eager = [p.grad.clone() for p in own[:4]]
    for p in own[:4]:
        p.grad = None
    f = compiled(loss)
    f(x)
    few = 64 * (128 + 32) + 1
    assert saved_elements(lambda: f(x), own) <= few < saved_elements(lambda: loss(x), own) - 64 * 100
    torch.testing.assert_close([p.grad / 2 for p in own[:4]], eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", [False, True])
def test_a_loss_saves_its_logits_once(cut):
    torch.manual_seed(0)
    head, x, target = nn.Linear(8, 1000, bias=False), torch.randn(4, 8, 8, requires_grad=True), torch.arange(32)

    def loss(x):
        logits = head(x)
        logits, to = (logits[:, :-1], target.view(4, 8)[:, 1:]) if cut else (logits, target)
        return F.cross_entropy(logits.flatten(0, 1), to.flatten())

    own = [head.weight, x, target]
    eager = torch.autograd.grad(loss(x), (head.weight, x))
    f = compiled(loss)
    got = torch.autograd.grad(f(x), (head.weight, x))
    torch.testing.assert_close(got, eager)
    assert 32 * 1000 <= saved_elements(lambda: f(x), own) < 32 * 1000 + 200, "the product's result, and no other matrix"


class Tied(nn.Module):
    """A head that shares its weights with the embedding."""

    def __init__(self, padding=None):
        super().__init__()
        self.words = nn.Embedding(300, 64, padding_idx=padding)

    def forward(self, ids):
        return F.linear(self.words(ids).sigmoid(), self.words.weight)


def tied_gradients(model, ids, f):
    model.zero_grad()
    (f(model, ids) * torch.linspace(-1, 1, 300)).sum().backward()
    return model.words.weight.grad.clone()


@pytest.mark.parametrize(("padding", "in_place"), [(None, True), (3, False)])
def test_rows_of_an_embedding_are_added_in_place(padding, in_place):
    torch.manual_seed(0)
    model, ids = Tied(padding), torch.randint(300, (4, 50)) % 40  # words come several times
    eager = tied_gradients(model, ids, lambda m, i: m(i))
    exact = tied_gradients(model.double(), ids, lambda m, i: m(i))
    f = torch.compile(lambda m, i: m(i), backend=fuser_backend)
    got = tied_gradients(model.float(), ids, f)
    assert (got - exact).abs().max() <= 4 * (eager - exact).abs().max() + 1e-6
    assert torch.equal(tied_gradients(model, ids, f), got)
    assert ("INDEX_ADD_" in compilations()[1].source) is in_place


@pytest.mark.parametrize(("rows", "padding", "few"), [(16384, None, True), (16384, 3, False), (4096, None, False)])
def test_the_gradient_of_a_sparse_table_begins_as_untouched_pages(rows, padding, few):
    torch.manual_seed(0)
    words = nn.Embedding(rows, 512, padding_idx=padding)
    ids = torch.randint(rows, (2, 40)) // 64 * 64  # some words come twice

    def loss(ids):
        return words(ids).sin().square().sum()

    (eager,) = torch.autograd.grad(loss(ids), words.weight)
    f = compiled(loss)
    for _ in range(2):
        (got,) = torch.autograd.grad(f(ids), words.weight)
        torch.testing.assert_close(got, eager)
    (backward,) = (g for g in compilations() if g.stage == "backward")
    assert ("ZEROS" in backward.source) is few
    f(ids).backward()
    f(ids).backward()
    torch.testing.assert_close(words.weight.grad, 2 * eager)


def test_nothing_large_is_kept_warm_in_training():
    torch.manual_seed(0)
    warm.outputs.trim()
    x = torch.randn(warm.WARM_MIN // 4 + 64, requires_grad=True)
    f = compiled(lambda x: x.sin().exp())
    f(x).sum().backward()
    assert warm.outputs.stats()["held"] == 0
    with torch.no_grad():
        f(x)
    assert warm.outputs.stats()["held"] == 1
    warm.outputs.trim()


def test_the_gradient_of_a_table_is_made_last_and_alone():
    torch.manual_seed(0)
    words, up = nn.Embedding(4096, 256), nn.Linear(256, 256)
    ids, scale = torch.randint(4096, (2, 32)), torch.rand(256, requires_grad=True)

    def loss(ids):
        return up(words(ids).sigmoid() * scale).square().sum()

    own = [words.weight, *up.parameters(), scale]
    eager = torch.autograd.grad(loss(ids), own)
    got = torch.autograd.grad(compiled(loss)(ids), own)
    torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)
    (backward,) = (g for g in compilations() if g.stage == "backward")
    groups = [g.ops for g in backward.groups]
    assert ("aten.embedding_dense_backward",) in groups, groups
    lines = [line.strip() for line in backward.source.splitlines() if "= FUSION" in line or "= MM" in line]
    assert len(lines) > 2 and lines[-1].startswith("embedding_dense_backward = "), lines


def test_temporaries_of_a_step_leave_nothing_in_the_pool():
    torch.manual_seed(0)
    pool.trim()
    x = torch.randn(512, 2048, requires_grad=True)

    def loss(x):
        return (x.sin().sum(0) * torch.softmax(x.exp(), 0).sum(1, keepdim=True)).square().sum()

    f = compiled(loss)
    f(x).backward()
    before = pool.stats()["hits"] + pool.stats()["misses"]
    f(x).backward()
    assert pool.stats()["hits"] + pool.stats()["misses"] == before
    with torch.no_grad():
        f(x)
        f(x)
    assert pool.stats()["hits"] + pool.stats()["misses"] > before, "the same kernels, where results are kept warm"
