"""Folding passes on traced graphs: each fires where it should, not where it must not, and changes no bit."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.frontends.dynamo import fuser_backend, last_compilation
from fuser.passes import folding
from fuser.passes.cleanup import drop_dead, remove_noops, split_to_slices
from fuser.passes.matmuls import add_to_addmm, addmm_to_add

aten = torch.ops.aten
X = torch.linspace(-2, 2, 24).view(4, 6)
Y = torch.linspace(1, 3, 24).view(4, 6)
HALF = X.half()


def traced(f, *args):
    """A functional ATen graph whose nodes carry fake values; the last results are negated, so that none is an alias."""
    module = make_fx(lambda *a: f(*a).neg(), tracing_mode="fake")(*args)
    drop_dead(module)
    return module


def same_bits(a, b):
    assert a.dtype == b.dtype and a.stride() == b.stride()
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(a), torch.signbit(b))


def run(rewrite, f, *args):
    """How many places a pass changes, and the operators left; the result must stay what it was, bit for bit."""
    module = traced(f, *args)
    changed = rewrite(module)
    drop_dead(module)
    module.graph.lint()
    module.recompile()
    same_bits(module(*args), f(*args).neg())
    return changed, [str(n.target.overloadpacket) for n in module.graph.nodes if n.op == "call_function"]


UNIFORM = {
    "ones as a factor": (lambda x, y: x.exp() * torch.ones(4, 6), True),
    "a number as a factor": (lambda x, y: 1 * x.exp(), True),
    "divided by one": (lambda x, y: x.exp() / torch.ones_like(x), True),
    "less nothing": (lambda x, y: x.exp() - torch.zeros(6), True),
    "computed from constants": (lambda x, y: x.exp() * (torch.full((4, 6), 3.0) * 2 - 5).expand(4, 6), True),
    "a choice that is made": (lambda x, y: torch.where(torch.ones(4, 6, dtype=torch.bool), x.exp(), y), True),
    "plus zero, which changes -0.0": (lambda x, y: (x * 0) + torch.zeros(4, 6), False),
    "times zero, which keeps NaN": (lambda x, y: x.log() * torch.zeros(4, 6), False),
    "ones that widen": (lambda x, y: x[:1].exp() * torch.ones(4, 6), False),
    "ones that promote": (lambda x, y: x.exp() * torch.ones(4, 6, dtype=torch.float64), False),
    "another number": (lambda x, y: x.exp() * torch.full((4, 6), 1.5), False),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_tensors_of_one_value(name):
    f, fires = UNIFORM[name]
    assert bool(run(folding.fold_uniform, f, X.clone(), Y)[0]) == fires


def test_constants_are_computed_in_their_own_dtype():
    changed, ops = run(folding.fold_uniform, lambda x: x + (torch.full((4, 6), 200, dtype=torch.uint8) + 100), X)
    assert changed == 1 and ops.count("aten.add") == 1


CASTS = {
    "there and back": (lambda x: x.exp().float().half(), True),
    "widened twice": (lambda x: x.exp().float().double(), True),
    "narrowed first": (lambda x: x.float().exp().half().float(), False),
    "to another half": (lambda x: x.exp().bfloat16().half(), False),
    "integers to floats": (lambda x: (x * 9).int().float().int(), False),
    "truth to numbers": (lambda x: (x > 0).int().float(), True),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts(name):
    f, fires = CASTS[name]
    assert bool(run(folding.merge_casts, f, HALF)[0]) == fires


VIEWS = {
    "there and back": (lambda x: x.exp().view(24).view(4, 6), 1),
    "permuted twice": (lambda x: x.exp().t().t(), 1),
    "three permutations": (lambda x: x.exp().view(2, 2, 6).permute(1, 2, 0).permute(1, 2, 0), 1),
    "squeezed again": (lambda x: x.exp().unsqueeze(1).squeeze(1), 1),
    "view of a view": (lambda x: x.exp().view(2, 12).view(3, 8), 1),
    "one view": (lambda x: x.exp().view(2, 12), 0),
    "a square transposed": (lambda x: x[:, :4].exp().t(), 0),
    "a square turned by a copy": (lambda x: x[:, :4].exp().t().reshape(16).view(4, 4), 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    f, changes = VIEWS[name]
    assert run(folding.merge_views, f, X)[0] == changes


PIECES = {
    "halves joined": (lambda x: torch.cat([x.exp()[:2], x.exp()[2:]]), 0),  # two different tensors until merged
    "a split joined": (lambda x: torch.cat(x.exp().split([1, 2, 3], 1), 1), 1),
    "a split turned round": (lambda x: torch.cat(x.exp().split(3, 1)[::-1], 1), 0),
    "a part left out": (lambda x: torch.cat(x.exp().split([1, 2, 3], 1)[:2], 1), 0),
    "joined along another dim": (lambda x: torch.cat(x.exp().split(3, 1), 0), 0),
    "a piece of what was joined": (lambda x: torch.cat([x.exp(), x.sin()]).narrow(0, 4, 4), 1),
    "a piece across the seam": (lambda x: torch.cat([x.exp(), x.sin()]).narrow(0, 3, 4), 0),
    "a piece that lies otherwise": (lambda x: torch.cat([x.exp(), x.sin()], 1).narrow(1, 6, 6), 0),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name):
    f, changes = PIECES[name]

    def rewrite(module):
        split_to_slices(module)
        return folding.join_pieces(module)

    assert run(rewrite, f, X)[0] == changes


@pytest.mark.parametrize("cut", [lambda x: x.split(2, 1), lambda x: x.chunk(3, 1), lambda x: x.unbind(1)])
def test_pieces_picked_one_by_one_are_slices(cut):
    changed, ops = run(split_to_slices, lambda x: cut(x.exp())[0] + cut(x.exp())[2], X)
    assert changed == 2 and set(ops) <= {"aten.exp", "aten.slice", "aten.select", "aten.add", "aten.neg"}


def test_results_and_inputs_keep_their_memory():
    def f(x):
        y = x.exp()
        return y.view(24).view(4, 6), y * torch.ones(4, 6), y.float(), torch.cat([y[:2], y[2:]])

    module = make_fx(f, tracing_mode="fake")(X)
    before = str(module.graph)
    for rewrite in (folding.fold_uniform, folding.merge_casts, folding.merge_views, folding.join_pieces):
        assert rewrite(module) == 0
    assert str(module.graph) == before
    assert run(folding.fold_uniform, lambda x: x * torch.ones(4, 6), X)[0] == 0


def test_a_copy_of_a_tensor_into_itself_goes():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    once = graph.call_function(aten.neg.default, (x,))
    once.meta["val"] = X
    graph.call_function(aten.copy_.default, (x, x))
    graph.call_function(aten.copy_.default, (x, once))
    graph.output((once,))
    module = torch.fx.GraphModule({}, graph)
    assert remove_noops(module) == 1
    assert sum(n.target is aten.copy_.default for n in graph.nodes) == 1


A, B, ROW, FULL = torch.randn(4, 5), torch.randn(5, 3), torch.randn(3), torch.randn(4, 3)
MATMULS = {
    "row added": (add_to_addmm, lambda a, b, row, full: a @ b + row, True),
    "row first": (add_to_addmm, lambda a, b, row, full: row + a @ b, True),
    "matrix added": (add_to_addmm, lambda a, b, row, full: a @ b + full, False),
    "row scaled": (add_to_addmm, lambda a, b, row, full: torch.add(a @ b, row, alpha=2), False),
    "product read twice": (add_to_addmm, lambda a, b, row, full: (c := a @ b) * (c + row), False),
    "addmm of a matrix": (addmm_to_add, lambda a, b, row, full: torch.addmm(full, a, b), True),
    "addmm of a row": (addmm_to_add, lambda a, b, row, full: torch.addmm(row, a, b), False),
    "addmm with factors": (addmm_to_add, lambda a, b, row, full: torch.addmm(full, a, b, beta=0.5), False),
}


@pytest.mark.parametrize("name", MATMULS)
def test_products_and_sums(name):
    rewrite, f, fires = MATMULS[name]
    module = traced(f, A, B, ROW, FULL)
    assert bool(rewrite(module)) == fires
    drop_dead(module)
    module.recompile()
    torch.testing.assert_close(module(A, B, ROW, FULL), -f(A, B, ROW, FULL))


@pytest.mark.parametrize("dtype, fires", [(torch.float64, True), (torch.bfloat16, False), (torch.float16, False)])
def test_a_product_of_halves_is_not_rounded_twice(dtype, fires):
    args = [t.to(dtype) for t in (A, B, ROW, FULL)]
    assert bool(addmm_to_add(traced(lambda a, b, row, full: torch.addmm(full, a, b), *args))) == fires


def test_in_the_pipeline():
    def f(x):
        y = torch.cat(x.exp().split([1, 2, 3], 1), 1)
        return (y.view(24).view(4, 6) * torch.ones(4, 6)).double().float().sin()

    torch._dynamo.reset()
    got = torch.compile(f, backend=fuser_backend)(X)
    torch.testing.assert_close(got, f(X))
    changed = {p.name: p.changed for p in last_compilation().passes}
    names = ("fold_uniform", "merge_casts", "merge_views", "join_pieces", "split_to_slices")
    assert all(changed[name] == 1 for name in names), changed
    torch._dynamo.reset()


def test_numbers_are_filled_in_on_the_device_that_computes_with_them():
    """What `torch.tensor(0.5)` inside a function makes lies on the CPU; beside CUDA tensors it would split groups."""

    def f(x, flags):
        low = torch.where(flags, torch.tensor(3), torch.tensor(-1e9, dtype=torch.float64))
        return torch.min(x, torch.tensor(0.5)) + low, torch.tensor(2) + 1

    with FakeTensorMode(allow_non_fake_inputs=True):
        for device, changed in (("cpu", 0), ("cuda", 3)):
            inputs = torch.empty(4, 3, device=device), torch.empty(4, 3, device=device, dtype=torch.bool)
            module = make_fx(f)(*inputs)
            assert folding.numbers_on_device(module) == changed
            module.graph.lint()
            for node in module.graph.nodes:
                if node.target is aten.full.default:
                    assert node.meta["val"].device == node.kwargs["device"] == inputs[0].device
    x, flags = torch.randn(4, 3), torch.rand(4, 3) > 0.5
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        if node.target is aten.full.default:
            node.kwargs = {**node.kwargs, "device": "cpu"}
    module.recompile()
    for got, want in zip(module(x, flags), f(x, flags), strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)
