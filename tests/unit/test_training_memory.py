"""What a training step keeps: the tensors between forward and backward, and gradients that are added in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.frontends.recompute import ELEMENTWISE, READERS
from fuser.lowering.registry import LOWERINGS, VIEWS
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


ACTIVATIONS = {
    "celu": F.celu, "elu": F.elu, "gelu": F.gelu, "hardshrink": F.hardshrink, "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "hardtanh": lambda x: F.hardtanh(x) * x, "leaky_relu": lambda x: F.leaky_relu(x) * x,
    "logsigmoid": F.logsigmoid, "mish": F.mish, "relu": lambda x: F.relu(x) * x, "relu6": lambda x: F.relu6(x) * x,
    "selu": F.selu, "sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus, "softshrink": F.softshrink,
    "tanh": lambda x: torch.tanh(x) * x, "threshold": lambda x: F.threshold(x, 0.1, 2.0) * x,
    "prelu": lambda x: F.prelu(x, x.detach()[0, :1]), "huber": lambda x: F.huber_loss(x, x.detach() + 1) * x,
    "pad": lambda x: F.pad(x, (0, 1)).sin()[:, :-1], "roll": lambda x: x.roll(1, 1).sin(),
    "tril": lambda x: x.tril().sin(),
    "pixels": lambda x: F.pixel_shuffle(x.view(64, 8, 4, 4), 2).sin().view_as(x),
    "flip": lambda x: x.flip(0).sin(),
}  # fmt: skip
NORMS = {
    "softmax": lambda x: F.softmax(x, -1).square() * 64, "layer_norm": lambda x: F.layer_norm(x, (128,)),
    "group_norm": lambda x: F.group_norm(x.view(64, 8, 16), 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "avg_pool": lambda x: F.avg_pool2d(x.view(64, 8, 4, 4), 2) * 2, "norm": lambda x: x.norm(dim=-1),
}  # fmt: skip


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_behind_a_product_elementwise_work_is_computed_again(name):
    """Whichever it is, one tensor of the product's size is saved, or less."""
    f = ACTIVATIONS[name]
    torch.manual_seed(0)
    x, w, v = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True), torch.randn(64, 128)
    loss = compiled(lambda: (f(f(F.linear(x, w)) + 0.5) * v).sum())
    loss()
    assert saved_elements(loss, [x, w, v]) <= 64 * 128 + 16


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NORMS)
def test_what_a_norm_reads_is_computed_again(name):
    torch.manual_seed(0)
    x, w = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True)
    loss = compiled(lambda: NORMS[name](F.hardswish(F.silu(F.linear(x, w)))).sum())
    loss()
    assert saved_elements(loss, [x, w]) < 64 * 128 * (2.1 if name == "softmax" else 1.1)


@pytest.mark.sampled(4, also=("leaky_relu",))
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "relu6", "hardtanh"])
def test_of_a_kink_a_mask_is_saved(name):
    torch.manual_seed(0)
    x, w, v = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True), torch.randn(64, 128)
    loss = compiled(lambda: (getattr(F, name)(F.linear(x, w)) * v).sum())
    loss()
    assert saved_elements(loss, [x, w, v]) <= 64 * 128 // 4


def test_what_is_saved_does_not_depend_on_what_was_compiled_before():
    """torch's list of elementwise operators is made once, of those that the process has met."""
    from torch._functorch import partitioners

    known = partitioners.pointwise_ops()
    late = torch.ops.aten.erfinv
    kept = [p for p in known if p is not late]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioners, "pointwise_ops", lambda: kept)
        x, w, v = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True), torch.randn(64, 128)
        loss = compiled(lambda: (torch.erfinv(F.linear(x, w).tanh() * 0.5) * v).sin().sum())
        loss()
        assert saved_elements(loss, [x, w, v]) <= 64 * 128 + 16


# Operators that are written to memory or read what is: joins, scatters, scans, lookups, windows that overlap.
WRITTEN = """
    _unsafe_index _unsafe_index_put _unsafe_masked_index _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d alias_copy avg_pool1d
    block_diag bucketize cat copy_ cummax cummin cumprod cumsum detach_copy diag_embed diagonal_copy
    diagonal_scatter dist embedding embedding_dense_backward empty_permuted empty_strided eye im2col index_add
    index_copy index_fill index_put index_reduce index_select linalg_cross linspace log_softmax logcumsumexp
    logspace masked_scatter max_pool3d_with_indices max_pool3d_with_indices_backward narrow_copy new_empty
    new_empty_strided nll_loss2d_backward nll_loss2d_forward put repeat_interleave rot90
    rrelu_with_noise_functional scatter scatter_add scatter_reduce searchsorted softmax split_copy
    split_with_sizes split_with_sizes_copy stack t_copy take trace unbind unbind_copy unfold_copy unsafe_split
    unsafe_split_with_sizes upsample_nearest1d upsample_nearest2d upsample_nearest3d zero
"""


def test_the_cut_knows_every_operator_with_a_lowering():
    """Who adds a lowering says whether the backward may compute it again (fuser/frontends/recompute.py)."""
    from torch._functorch.partitioners import get_default_op_list

    torchs, own = get_default_op_list().fusible_ops, ELEMENTWISE | READERS
    written = {f"aten.{name}" for name in WRITTEN.split()}
    packets = {name: getattr(torch.ops.aten, name[5:], None) for name in LOWERINGS if name.count(".") == 1}
    traced = {name for name, p in packets.items() if p is not None and not _is_composite(p)}
    assert not {name for name in traced - own - VIEWS - written if packets[name] not in torchs}
    # Of operators with the tag "pointwise" torch's list has those that this process has met.
    assert own <= set(LOWERINGS)
    assert not {name for name in own if packets[name] in torchs and not _is_pointwise(packets[name])}


def _is_pointwise(packet):
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def _is_composite(packet):
    """Whether the dispatcher takes it apart in a trace."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    overloads = [o for o in overloads if torch._C._dispatch_has_kernel(o.name())]
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(o.name(), "CompositeImplicitAutograd") for o in overloads)
