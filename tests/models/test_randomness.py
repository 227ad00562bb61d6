"""Random numbers inside kernels: Philox as published, good numbers, and the promises about seeds and generators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import OpOverload
from torch.compiler import nested_compile_region
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import config
from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.ops.random import philox
from fuser.passes.decompositions import decomposition_table

N = 1 << 20


def compiled(fn, **options):
    return torch.compile(fn, backend=fuser_backend, options=options or None)


def words(text):
    return tuple(torch.tensor(int(w, 16)) for w in text.split())


@pytest.mark.parametrize(
    ("key", "counter", "block"),
    [  # the known answers of Random123, the authors' own library
        ("0 0", "0 0 0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_blocks(key, counter, block):
    assert [int(w) for w in philox(words(key), words(counter))] == [int(w) for w in words(block)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [(), (0, 3), (1,), (70_001,), (33, 65), (5, 1, 7)])
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_a_kernel_gives_the_operators_bits(size, seed):
    graph = fx.Graph()
    s, x = graph.placeholder("s"), graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.fuser.uniform_like.default, (s, 3, x)))
    key = fuser.register_fusion(graph)
    like = torch.zeros(size)
    for x in (like, like.transpose(0, -1) if like.dim() else like):
        (got,) = fuser.run_fusion(key, [torch.tensor(seed), x])
        want = torch.ops.fuser.uniform_like(torch.tensor(seed), 3, x)
        assert torch.equal(got, want)
    assert not fuser.interface.kernel_spec(key).store.fallbacks


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].abs().item()


def assert_uniform(u):
    """Moments, cells and neighbours within five standard deviations; the seeds are fixed."""
    sigma = 5 / u.numel() ** 0.5
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.double().mean() - 0.5) < sigma * 12**-0.5
    assert abs(u.double().var() - 1 / 12) < sigma * 180**-0.5
    counts = torch.histc(u, 256, 0, 1).double()
    expected = u.numel() / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * (2 * 255) ** 0.5
    for lag in (1, 2, 4, 8, 16, 1024):
        assert correlation(u.flatten()[lag:], u.flatten()[:-lag]) < sigma
    low = (u * 2**24).long() & 1
    assert abs(low.double().mean() - 0.5) < sigma / 2


def test_uniform_numbers_are_uniform_and_independent():
    draws = lambda x: (torch.rand_like(x), torch.rand_like(x), torch.rand(1024, 1024))  # noqa: E731
    f = compiled(lambda x: tuple(u.abs() for u in draws(x)))
    x = torch.empty(1024, 1024)
    drawn = [*f(x), *f(x)]
    assert not compilations()[-1].groups == () and "rand_like" not in compilations()[-1].source.lower()
    for u in drawn[:3]:
        assert_uniform(u)
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert correlation(a, b) < 5 / N**0.5


def test_normal_numbers_are_normal():
    f = compiled(
        lambda x: (-torch.randn_like(x), -torch.empty_like(x).normal_(-3.0, 2.0), -torch.empty_like(x).uniform_(-5, -2))
    )
    a, b, c = (t.double() for t in f(torch.empty(1024, 1024)))
    sigma = 5 / N**0.5
    for z in (a, (b - 3) / 2):
        assert z.isfinite().all()
        assert abs(z.mean()) < sigma and abs(z.var() - 1) < sigma * 2**0.5
        assert abs((z**3).mean()) < sigma * 15**0.5 and abs((z**4).mean() - 3) < sigma * 96**0.5
        assert abs((z.abs() < 0.6744897501960817).double().mean() - 0.5) < sigma / 2
        assert correlation(z.flatten()[1:], z.flatten()[:-1]) < sigma
    assert correlation(a, b) < sigma
    assert c.min() >= 2 and c.max() <= 5 and abs(c.mean() - 3.5) < sigma * 3 * 12**-0.5


def test_numbers_with_no_reader_are_eagers():
    """ATen draws faster than a kernel on few threads, and nothing is saved where nothing is fused."""

    def draw():
        return torch.randn(6, 10, 128), torch.rand(5), torch.empty(3, 4).normal_(2.0, 3.0), torch.randn(4, 2).t()

    f = compiled(draw)
    torch.manual_seed(3)
    want = draw()
    torch.manual_seed(3)
    assert all(map(torch.equal, f(), want)) and compilations()[-1].groups == ()


def test_what_is_drawn_is_fused_where_the_graph_has_no_inputs():
    f = compiled(lambda: torch.randn(6, 10, 128) * 3 - torch.rand(6, 10, 128))
    x, y = f(), f()
    assert not torch.equal(x, y) and abs(x.std() - 3) < 0.1 and abs(x.mean() + 0.5) < 0.2
    (group,) = compilations()[-1].groups
    assert "fuser.normal_like" in group.ops and not fuser.interface.kernel_spec(group.key).store.fallbacks


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_and_scales(p):
    f = compiled(lambda x: (F.dropout(x, p, True), F.dropout(x, p, True)))
    x = torch.randn(1024, 1024)
    a, b = f(x)
    for y in (a, b):
        kept = y != 0
        assert abs(kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / N) ** 0.5
        torch.testing.assert_close(y, x * kept / (1 - p))
    assert correlation(a != 0, b != 0) < 5 / N**0.5
    assert (compiled(lambda x: F.dropout(x, 1.0, True))(x) == 0).all()
    assert torch.equal(compiled(lambda x: F.dropout(x, 0.0, True))(x), x)


def test_bernoulli_follows_numbers_and_tensors():
    f = compiled(lambda p: (torch.bernoulli(p), torch.empty_like(p, dtype=torch.bfloat16).bernoulli_(0.25)))
    p = torch.linspace(0, 1, 1024).repeat(1024, 1)
    a, b = f(p)
    assert a.dtype is torch.float32 and b.dtype is torch.bfloat16
    assert set(a.unique().tolist()) == set(b.unique().tolist()) == {0.0, 1.0}
    assert (a[:, 0] == 0).all() and (a[:, -1] == 1).all()
    assert ((a.double().mean(0) - p[0]).abs() <= 6 * (p[0] * (1 - p[0]) / 1024).sqrt()).all()
    assert abs(b.double().mean() - 0.25) < 5 * (0.1875 / N) ** 0.5


def test_the_generators_seed_decides_and_its_state_moves_on():
    f = compiled(lambda x: F.dropout(torch.tanh(x), 0.5, True))
    x = torch.ones(4096)
    torch.manual_seed(7)
    first, second = f(x), f(x)
    assert not torch.equal(first, second)
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(f(x), first) and torch.equal(f(x), second) and torch.equal(torch.rand(3), after)
    torch.manual_seed(8)
    assert not torch.equal(f(x), first)
    state = torch.get_rng_state()
    third = f(x)
    torch.set_rng_state(state)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(f(x), third)
    finally:
        torch.set_num_threads(threads)


def test_eager_numbers_on_request():
    def fn(x):
        return F.dropout(x, 0.3, True) * 2, torch.rand_like(x), torch.randn(5)

    x = torch.ones(100)
    torch.manual_seed(3)
    want, state = fn(x), torch.get_rng_state()
    torch.manual_seed(3)
    got = compiled(fn, random="eager")(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(fuser.errors.ConfigError, match="random"):
        config.check("random", "other")


def test_no_operator_that_draws_is_taken_apart_by_torch():
    """Its decomposition may draw other numbers: that of `bernoulli` does on CUDA. That of `rrelu` is our own."""
    table = decomposition_table()
    drawing = {op for op in table if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags}
    assert drawing == {torch.ops.aten.rrelu_with_noise_functional.default}


DRAWS = [
    lambda p: torch.normal(p, p.abs() + 1), torch.rand_like, lambda p: torch.bernoulli(p.sigmoid()),
    nested_compile_region(lambda p: F.dropout(p, 0.5)),
]  # fmt: skip


@pytest.mark.parametrize("gradients", [False, True])
def test_numbers_are_drawn_in_the_programs_order(gradients):
    """The first draw of a pair needs what is computed beside the second one's result, in one group."""

    def fn(x):
        given = []
        for first, second in zip(DRAWS, [*DRAWS[1:], DRAWS[0]]):
            shared = x.sin() * (len(given) + 2)
            given += [first(shared), shared.exp() + second(torch.zeros(4, 6))]
        return given

    def results(f):
        torch.manual_seed(0)
        x = torch.linspace(0, 1, 24).view(4, 6).requires_grad_(gradients)
        given = f(x)
        if gradients:
            sum(t.sum() for t in given if t.requires_grad).backward()
        return [*given, x.grad, torch.get_rng_state()]

    torch.testing.assert_close(results(compiled(fn, random="eager")), results(fn))


def test_backward_and_checkpoints_see_the_same_mask():
    def part(x):
        return F.dropout(torch.tanh(x), 0.5, True) * x

    def fn(x):
        y = checkpoint(part, x, use_reentrant=False)
        return y, checkpoint(part, x + 1, use_reentrant=False)

    x = torch.linspace(0.5, 2, 4096).requires_grad_()
    y, z = compiled(fn)(x)
    (y.sum() + z.sum()).backward()
    kept = torch.stack([y.detach() != 0, z.detach() != 0])
    assert (0.4 < kept.float().mean(1)).all() and (kept.float().mean(1) < 0.6).all() and not torch.equal(*kept)

    wide = torch.stack([x.detach(), x.detach() + 1]).double().requires_grad_()
    (torch.tanh(wide) * wide * kept * 2).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad.sum(0).float(), rtol=1e-5, atol=1e-5)


def test_what_is_left_to_aten():

    def fn(x):
        return torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float16), torch.randint(0, 9, (3,))

    torch.manual_seed(5)
    want = fn(None)
    torch.manual_seed(5)
    torch.testing.assert_close(compiled(fn)(torch.ones(2)), want, rtol=0, atol=0)


def test_layers_with_dropout_share_their_kernels_and_need_no_aten():
    def fn(x, weights):
        for w in weights:
            x = x + F.dropout(F.gelu(torch.mm(x, w)), 0.1, True)
        return x

    x, weights = torch.randn(16, 32), [torch.randn(32, 32, requires_grad=True) for _ in range(4)]
    compiled(fn)(x, weights).sum().backward()
    forward = next(c for c in compilations() if c.stage == "forward")
    assert len(set(forward.keys)) <= 3 < len(forward.groups)
    assert "native_dropout" not in forward.source
