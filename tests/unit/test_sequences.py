"""Compiled graphs as native sequences: the bits of the generated Python, views that autograd sees, memory that ends."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends import geometry, sequences
from fuser.frontends.dynamo import fuser_backend
from fuser.frontends.geometry import Geometry
from fuser.runtime import launcher

aten = torch.ops.aten
native_only = pytest.mark.skipif(not launcher.wait() or not launcher.native().has_sequences(), reason="no launcher")


# -- Views by rule -----------------------------------------------------------------------------------------------------
def _tensor(rng):
    n = rng.randint(0, 4)
    sizes = [rng.choice([1, 2, 3, 4, 6]) for _ in range(n)]
    t = torch.empty([s + rng.randint(0, 1) for s in sizes])
    for d in range(n):
        t = t.narrow(d, 0, sizes[d])
    return t.permute(*rng.sample(range(n), n)) if n else t


def _sizes(rng, count):
    sizes = []
    while count > 1 and len(sizes) < 4:
        sizes.append(rng.choice([k for k in range(1, count + 1) if count % k == 0]))
        count //= sizes[-1]
    sizes.append(count)
    if rng.random() < 0.3:
        sizes[rng.randrange(len(sizes))] = -1
    return sizes


def _expanded(rng, t):
    return [rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 2))] + [
        rng.choice([-1, s, 3 if s == 1 else s]) for s in t.shape
    ]


def _cases(rng, t):
    """Arguments for each rule, some of them wrong."""
    n = t.dim()
    dim = lambda: rng.randint(-n, n - 1) if n else 0  # noqa: E731
    bounds = rng.choice([None, 0, 1, -1, 5]), rng.choice([None, 2, -1, 100, 0]), rng.choice([1, 2, 3])
    return {
        aten.transpose.int: (dim(), dim()),
        aten.permute.default: (rng.sample(range(n), n),),
        aten.slice.Tensor: (dim(), *bounds)[: rng.randint(0, 4)],
        aten.select.int: (dim(), rng.randint(-3, 3)),
        aten.squeeze.dim: (dim(),),
        aten.squeeze.dims: (rng.sample(range(n), rng.randint(0, n)),),
        aten.unsqueeze.default: (rng.randint(-n - 1, n),),
        aten.expand.default: (_expanded(rng, t),),
        aten.view.default: (_sizes(rng, t.numel()),),
        aten._unsafe_view.default: (_sizes(rng, t.numel()),),
    }


def test_views_lie_where_atens_do():
    rng, found = random.Random(0), 0
    for _ in range(300):
        t = _tensor(rng)
        cases = _cases(rng, t)
        for target in geometry._RULES:
            args = cases.get(target, ())
            got = geometry.of_view(target, Geometry(tuple(t.shape), tuple(t.stride())), args)
            if got is None:
                continue
            want = target(t, *args)
            assert (tuple(want.shape), tuple(want.stride())) == (got.sizes, got.strides), (target, t.shape, args)
            assert want.storage_offset() - t.storage_offset() == got.offset, (target, t.shape, t.stride(), args)
            found += 1
    assert found > 2500


# -- Whole graphs ------------------------------------------------------------------------------------------------------
def attend(x, w, heads=4):
    q, k, v = (x @ w.t()).chunk(3, -1)
    q, k, v = (t.view(*t.shape[:2], heads, -1).transpose(1, 2) for t in (q, k, v))
    half = q.shape[-1] // 2
    q = torch.cat([q[..., half:].sin(), q[..., :half].cos()], -1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2).relu() * x, out[:, 0]


def _counted(program, boxed):
    sequence = program.sequence(boxed)
    return sequence, {k: sequence.kinds.count(k) for k in set(sequence.kinds)}


@native_only
def test_inference_gives_the_bits_of_the_generated_function(programs):
    x, w = torch.randn(2, 5, 32), 0.1 * torch.randn(96, 32)
    f = torch.compile(attend, backend=fuser_backend, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(f(x, w), attend(x, w))
        with torch.profiler.profile():
            want = f(x, w)
        got = f(x, w)
    (program,) = programs
    sequence, kinds = _counted(program, False)
    assert sequence.runs >= 2 and kinds["launch"] >= 2 and kinds["product"] == kinds["attention"] == 1
    assert kinds["view"] >= 4
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@native_only
def test_training_runs_sequences_forward_and_backward(programs):
    def step(f, x, w):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        a, b = f(x, w)
        (a.sum() + b.square().sum()).backward()
        return a.detach(), b.detach(), x.grad, w.grad

    x, w = torch.randn(2, 5, 32), 0.1 * torch.randn(96, 32)
    f = torch.compile(attend, backend=fuser_backend, dynamic=False)
    for _ in range(3):
        got = step(f, x, w)
    with torch.profiler.profile():
        want = step(f, x, w)
    assert len(programs) == 2
    for program, boxed in zip(programs, (False, True), strict=True):
        assert _counted(program, boxed)[0].runs >= 1
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(got, step(attend, x, w))


@native_only
def test_inputs_of_a_backward_end_with_their_last_reader(programs):
    def chain(x, *weights):
        for w in weights:
            x = torch.relu(x @ w)
        return x

    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]
    f = torch.compile(chain, backend=fuser_backend, dynamic=False)
    for _ in range(2):
        f(torch.randn(8, 16, requires_grad=True), *weights).sum().backward()
    backward = programs[1].sequence(True)
    inputs = [torch.randn(tuple(p.meta["val"].shape)) for p in programs[1].placeholders]
    references, before = list(map(weakref.ref, inputs)), backward.runs
    with torch.no_grad():
        results = backward(inputs)
    assert inputs == [] and backward.runs == before + 1 and len(results) == 4
    assert all(r() is None for r in references)


@native_only
def test_writes_of_results_are_counted_for_what_shares_their_memory(programs):
    """A result that is a view is one to autograd: a write through it is seen by what saved the other."""

    def f(x):
        y = x * 2
        return y, y.view(-1)[2:5], y.t().split(2)[1]

    compiled = torch.compile(f, backend=fuser_backend, dynamic=False)
    with torch.no_grad():
        x = torch.randn(3, 4)
        for _ in range(2):
            y, part, other = compiled(x)
        assert part.data_ptr() == other.data_ptr() == y.data_ptr() + 8
        for view in (part, other):
            before = y._version
            view.add_(1)
            assert y._version == before + 1


@native_only
def test_symbolic_sizes_run_as_steps_of_python(programs):
    x, w = torch.randn(2, 5, 32), 0.1 * torch.randn(96, 32)
    f = torch.compile(attend, backend=fuser_backend, dynamic=True)
    with torch.no_grad():
        for n in (5, 6, 9):
            x = torch.randn(2, n, 32)
            torch.testing.assert_close(f(x, w), attend(x, w))
    assert any(s.runs for p in programs for s in p._sequences.values() if s is not None)


# -- Calls with several results, and in order --------------------------------------------------------------------------
@native_only
@pytest.mark.parametrize("gradients", [False, True])
def test_results_of_one_call_are_read_without_steps(programs, gradients):
    well = torch.eye(8) * 3 + torch.randn(4, 8, 8).sin() * 0.1

    def solved(a, b):
        for _ in range(2):
            b = torch.linalg.solve(a, b)
        return b, *a.sort(-1), torch.linalg.inv_ex(a)[0]

    f = torch.compile(solved, backend=fuser_backend)
    for _ in range(2):
        a = well.clone().requires_grad_(gradients)
        got = f(a, well.mT)
    want = solved(well, well.mT)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        torch.testing.assert_close(x.detach(), y, rtol=1e-5, atol=1e-5)
    sequence = programs[0].sequence(gradients)
    targets = [s.node.target for s in programs[0].statements if s.node is not None]
    calls = [t for t in targets if isinstance(t, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))]
    assert sequence.runs and sequence.step_count <= len(calls) < len(targets)


@native_only
def test_an_item_of_a_tuple_that_is_returned_whole_is_a_step(programs):
    gm = torch.fx.symbolic_trace(lambda x: torch.ops.aten.sort.default(x))
    x = torch.randn(5, 3)
    got = torch.compile(gm, backend=fuser_backend)(x)
    assert all(torch.equal(a, b) for a, b in zip(got, x.sort(), strict=True))


def test_a_launcher_that_is_not_ready_is_asked_again(monkeypatch):
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "native", lambda: None)
        patch.setattr(launcher, "prepare", lambda: asked.append(1))
        assert not sequences.are_possible() and asked == [1]
    assert sequences.are_possible() == bool(launcher.wait() and launcher.native().has_sequences())
