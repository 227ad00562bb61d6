"""Graphs that copy into their inputs: kernels that store there, with eager's results and never too early."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

import fuser
from fuser import config, interface
from fuser.frontends.dynamo import fuser_backend, last_compilation

aten = torch.ops.aten
X, Y, Z = torch.randn(64, 32), torch.randn(64, 32), torch.tensor(3.0)


class Writer:
    """Spells a graph: `w(op, ...)` calls an operator, `w.write(input, value)` copies into an input."""

    def __init__(self, inputs: int) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(f"a{i}") for i in range(inputs)]

    def __call__(self, op, *args):
        return self.graph.call_function(op, args)

    def write(self, target, value):
        return self(aten.copy_.default, target, value)


def store_of(key):
    return interface.kernel_spec(key).store


def run(build, *args, in_place=True):
    """Results and inputs afterwards, checked against eager; the fusion's key and which results are inputs."""
    w = Writer(len(args))
    w.graph.output(tuple(build(w, *w.inputs)))
    key = fuser.register_fusion(w.graph, in_place=in_place)
    theirs = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) for a in args]
    mine = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) for a in args]
    got = fuser.run_fusion(key, mine)
    want = fx.GraphModule(torch.nn.Module(), w.graph)(*theirs)
    torch.testing.assert_close([*got, *mine], [*want, *theirs])
    return key, [any(g is m for m in mine) for g in got]


def kernels(key):
    """How many loop nests the kernel has that was compiled last."""
    assert not store_of(key).fallbacks
    return store_of(key).kernels[-1].n_kernels


def product(w, x, y):
    return [w.write(x, w(aten.mul.Tensor, w(aten.add.Tensor, x, y), 2.0))]


def doubled(w, x, y):
    return [w.write(x, w(aten.mul.Tensor, y, 2.0))]


def swapped(w, x, y):
    u, v = w(aten.neg.default, x), w(aten.sin.default, y)
    return [w.write(x, v), w.write(y, u)]


def flipped(w, x, y):
    return [w.write(x, w(aten.flip.default, x, [0]))]


def transposed(w, x, y):
    return [w.write(x, w(aten.t.default, w(aten.mul.Tensor, x, y)))]


def scanned(w, x, y):
    extremes = w(aten.cummin.default, x, 1)
    places = w(operator.getitem, extremes, 1)
    total = w(aten.cumsum.default, y, 1)
    return [w.write(x, w(operator.getitem, extremes, 0)), w.write(y, total), places, total]


def normalised(w, x, y):
    m = w(aten.amax.default, x, [1], True)
    return [w.write(x, w(aten.sub.Tensor, x, m)), m]


def read_by_another_kernel(w, x, y):
    s = w(aten.amax.default, w(aten.mul.Tensor, x, x), [0])
    return [w.write(x, w(aten.add.Tensor, x, s)), w(aten.amax.default, w(aten.neg.default, x), [1])]


def test_one_kernel_reads_and_writes():
    key, same = run(product, X, Y)
    assert kernels(key) == 1 and same == [True]
    assert "buf" not in store_of(key).kernels[0].source, "no memory but the inputs"


def test_exchange():
    key, same = run(swapped, X, Y)
    assert kernels(key) == 1 and same == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [True, False])
def test_scans_go_into_what_they_read(rows, dtype):
    """Along rows and along columns; of which the last result is returned besides."""
    x, y = torch.randn(3, 1100, generator=torch.Generator().manual_seed(1)).to(dtype), torch.ones(3, 1100, dtype=dtype)
    key, same = run(scanned, *((x, y) if rows else (x.t(), y.t())))
    assert kernels(key) >= 2 and same[:2] == [True, True]


def test_rows_are_normalised_in_place():
    key, same = run(normalised, X, Y)
    assert kernels(key) == 1 and same[0] is True


@pytest.mark.parametrize("build", [flipped, read_by_another_kernel], ids=lambda f: f.__name__)
def test_read_elsewhere_is_copied_at_the_end(build):
    key, same = run(build, X, Y)
    assert kernels(key) >= 2 and same[0] is True


def test_square_transposed_onto_itself():
    key, _ = run(transposed, X[:32], Y[:32])
    assert kernels(key) == 2


def test_number_of_a_step():
    def build(w, x, step):
        late = w(aten.add.Tensor, step, 1.0)
        return [w.write(x, w(aten.mul.Tensor, x, w(aten.pow.Scalar, 0.9, late))), w.write(step, late)]

    key, same = run(build, X, Z)
    assert same == [True, True] and not store_of(key).fallbacks


def test_later_reads_see_what_was_written():
    def build(w, x, row, y):
        return [w.write(x, row), w(aten.add.Tensor, x, y)]

    for x in (X, X.bfloat16(), X.double()):
        _, same = run(build, x, Y[0].clone(), Y)
        assert same == [True, False]


def test_layouts():
    key, _ = run(product, X.t(), Y.t())
    assert kernels(key) == 1
    run(product, X.t(), Y.t().contiguous())
    run(doubled, torch.randn(64, 64)[:, ::2], Y)
    run(doubled, X[:, :0], Y[:, :0])


def test_without_the_promise_aten_writes():
    key, same = run(product, X, Y, in_place=False)  # another specification than with the promise
    assert not store_of(key).kernels and same == [True]
    assert "writes into a tensor" in next(iter(store_of(key).fallbacks))


def test_second_write_is_left_to_aten():
    def twice(w, x, y):
        w.write(x, y)
        return [w.write(x, w(aten.neg.default, y))]

    key, _ = run(twice, X, Y)
    assert "second time" in next(iter(store_of(key).fallbacks))


def test_checked_index_never_leaves_half_written_inputs():
    def build(w, x, y, i):
        return [w.write(x, w(aten.index_select.default, y, 0, i))]

    index = torch.randint(64, (64,))
    run(build, X, Y, index)
    index[-1] = 64
    with pytest.raises((IndexError, RuntimeError)):
        run(build, X, Y, index)


def test_verification_writes_once():
    with config.override(verify=2):
        key, _ = run(swapped, X + 1, Y)
    assert not store_of(key).fallbacks


# Through torch.compile.
def compare(f, *args):
    mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
    versions = [a._version for a in mine]
    torch.testing.assert_close(torch.compile(f, backend=fuser_backend)(*mine), f(*theirs))
    torch.testing.assert_close(mine, theirs)
    return [a._version > v for a, v in zip(mine, versions)]


def test_written_inputs_count_up_and_are_fused(clean):
    def f(x, y):
        x.add_(y).mul_(2)
        y.copy_(x.sin())
        return x.square().sum()

    assert compare(f, X, Y) == [True, True]
    assert "aten.copy_" not in [u.op for u in last_compilation().unfused]


def test_readers_outside_come_before_the_write(clean):
    def f(x, y):
        z = x @ y
        w = torch.mm(z, x)
        x.mul_(z)
        return w, x @ y

    compare(f, X[:32], Y[:32])


def test_reader_outside_that_also_needs_the_new_value(clean):
    def f(x):
        y = (x * 2 + 1).relu()
        z = x @ y.t()
        x.copy_(y)
        return z

    compare(f, X[:32])
    assert last_compilation().groups


def test_result_that_was_written_back_is_no_alias(clean):
    def f(x):
        y = x * 2
        x.copy_(y)
        return y

    x = X.clone()
    y = torch.compile(f, backend=fuser_backend)(x)
    torch.testing.assert_close((x, y), (X * 2, X * 2))
    y.zero_()
    torch.testing.assert_close(x, X * 2)


def test_write_through_a_view(clean):
    def f(x, y):
        x[2:5].add_(y[2:5])
        x.t()[0].fill_(7)
        return y + x

    compare(f, X, Y)


def test_aliased_inputs(clean):
    def f(x, y):
        x.add_(1)
        return y * 2

    a, b = X.clone(), X.clone()
    got = torch.compile(f, backend=fuser_backend)(a, a[:32])
    torch.testing.assert_close(got, f(b, b[:32]))
    torch.testing.assert_close(a, b)


def test_what_is_made_of_nothing_is_written_into_inputs():
    def f(x, y):
        torch.eye(6, 8, out=x)
        torch.mul(torch.ones(6, 8).tril(), 3, out=y)
        return x * 2, y + 1

    given, want = ([torch.full((6, 8), 7.0) for _ in "xy"] for _ in range(2))
    got = torch.compile(f, backend=fuser_backend)(*given)
    torch.testing.assert_close((got, given), (f(*want), want), rtol=0, atol=0)
    assert last_compilation().route != "eager" and last_compilation().groups
