"""What readers compute themselves: slices, gathered elements, parts read under a mask."""

import math

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser.interface import kernel_spec
from fuser.lowering.graph import lower_graph
from fuser.scheduler.schedule import schedule
from tests.backend.fused import fuse


def run(fn, *args):
    graph = torch.fx.symbolic_trace(fn)
    (out,) = fuser.run_fusion(fuser.register_fusion(graph), list(args))
    return out


def code(fn, *args):
    return fuser.debug_get_fused_kernel_code(torch.fx.symbolic_trace(fn), list(args))


def gates(x, y, b):
    i, f, g, o = (x + y + b).chunk(4, 1)
    return torch.sigmoid(i) * torch.tanh(g) + torch.sigmoid(f) * o


def test_parts_of_a_sum_are_computed_where_they_are_read():
    x, y, b = torch.randn(8, 64), torch.randn(8, 64), torch.randn(64)
    out = run(gates, x, y, b)
    torch.testing.assert_close(out, gates(x, y, b))
    assert code(gates, x, y, b).count('extern "C" void') == 1


def picked(x, t):
    return torch.log_softmax(x, -1).gather(1, t)


@pytest.mark.parametrize("classes", [7, 500])
def test_few_elements_of_a_large_result_are_computed_alone(classes):
    x, t = torch.randn(32, classes), torch.randint(classes, (32, 1))
    out = run(picked, x, t)
    torch.testing.assert_close(out, picked(x, t))


def looked_up(x, i):
    return F.softplus(x.exp())[i].neg()


def test_a_costly_result_that_is_looked_up_often_is_computed_once():
    """A place may be looked up any number of times: each would compute the element again."""
    x = torch.randn(100)
    often, seldom = torch.randint(100, (40, 50)), torch.randint(100, (6,))
    for i, kernels in ((often, 2), (seldom, 1)):
        torch.testing.assert_close(run(looked_up, x, i), looked_up(x, i))
        assert code(looked_up, x, i).count('extern "C" void') == kernels


def rope(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def test_joined_parts_of_a_computed_value():
    x, c = torch.randn(2, 5, 16), torch.randn(5, 16)
    out = run(lambda a, b: rope(a + 1, b, b), x, c)
    torch.testing.assert_close(out, rope(x + 1, c, c))


def halves(x, weight):
    y = torch.relu((x - x.mean(-1, keepdim=True)).sin().exp() * weight)
    return y, y.view(64, -1, 2)[:, :, 0].clone(), y.view(64, -1, 2)[:, ::3].sum(1)


def test_what_lies_in_memory_anyway_is_read_there():
    """A part of a result is read from it: computed again, it would need in memory what the result was made of."""
    x, weight = torch.randn(64, 96), torch.randn(96)
    graph = torch.fx.symbolic_trace(halves)
    key = fuser.register_fusion(graph)
    torch.testing.assert_close(list(fuser.run_fusion(key, [x, weight])), list(halves(x, weight)))
    lowered = lower_graph(kernel_spec(key).graph, (x, weight), "fast")
    results = {name for _, name in lowered.outputs}
    between = [b for b in schedule(lowered, 256).buffers if b.name not in results]
    assert all(math.prod(map(lowered.ctx.hint, b.size)) < x.numel() for b in between)


def test_a_shifted_and_masked_part():
    x = torch.randn(6, 10)
    out = run(lambda a: F.pad((a * 2 + 1)[:, 2:], (1, 2), value=3.0), x)
    torch.testing.assert_close(out, F.pad((x * 2 + 1)[:, 2:], (1, 2), value=3.0))


def in_place(p, g):
    return F.softmax(p.square(), -1) + g


def as_exact_as_eager(fn, *args):
    """Eager's softmax of squares is up to 4e-6 off, which depends on the vectors of the machine."""
    exact = fn(*(a.double() for a in args))
    mine, its = ((out.double() - exact).abs().max().item() for out in (run(fn, *args), fn(*args)))
    assert mine <= its + 2e-7 * exact.abs().max().item()


@pytest.mark.parametrize("rows", [3, 6200])
def test_results_past_the_cache(rows):
    """From 24 MiB of results on they are written past the cache, on odd row lengths too."""
    p, g = torch.randn(rows, 1023), torch.randn(1023)
    as_exact_as_eager(in_place, p, g)
    out = run(lambda a, b: (a + b, a * b)[1], p, g)
    assert torch.equal(out, p * g)
    as_exact_as_eager(lambda a, b: torch.softmax(a, 0) * b, p, g)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_rows_named_by_indices_are_asked_for_ahead(tokens):
    """The last row has no next one; a bad index raises eager's error."""
    index, table, w = torch.randint(50, (tokens,)), torch.randn(50, 96), torch.randn(96)

    def norm(i, t, w):
        return F.layer_norm(F.embedding(i, t), (96,), w)

    torch.testing.assert_close(run(norm, index, table, w), norm(index, table, w))
    index[-1] = 50
    with pytest.raises(IndexError):
        run(norm, index, table, w)


@pytest.mark.parametrize("shape", [(4, 0, 5), (0, 6, 5), (4, 6, 0)])
def test_an_empty_tensor_in_a_kernel_made_for_an_expanded_one(shape):
    """Strides of empty tensors mean nothing, so it fits; what the kernel loads outside the empty loop is not there."""

    def total(x):
        return x.sum(1) + 1

    graph = torch.fx.symbolic_trace(total)
    key = fuser.register_fusion(graph)
    for x in (torch.randn(1, 1, 1).expand(4, 6, 5), torch.randn(shape)):
        (out,) = fuser.run_fusion(key, [x])
        torch.testing.assert_close(out, total(x))


def test_what_is_looked_up_for_many_readings_is_kept():
    """A bias that a table holds is looked up once, not again for each window; few readings look it up themselves."""

    def scores(x: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + table[index].permute(2, 0, 1), -1)

    table, index = torch.randn(9, 3), torch.randint(9, (20, 20))
    for windows, kernels in ((32, 2), (2, 1)):
        x = torch.randn(windows, 3, 20, 20)
        torch.testing.assert_close(run(scores, x, table, index), scores(x, table, index))
        source = code(scores, x, table, index)
        assert source.count('extern "C" void') == kernels
    rows = source[source.index('extern "C" void') :]
    assert rows.count("in2[") == 1  # the second pass reads what the first has looked up


def rolled(u, steps):
    for _ in range(steps):
        u = u + 0.1 * (u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1) - 4 * u) - u * u * u
    return u


def padded(u, steps):
    for _ in range(steps):
        p = F.pad(u, (1, 1, 1, 1))
        u = torch.tanh(u) + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)
    return u


def differences(u, steps):
    for _ in range(steps):
        u = F.pad(u[1:] * u[1:] - 2 * u[:-1], (0, 0, 0, 1)) * 0.5 + u.flip(0) + u.flip(1)
    return u


def in_steps(stencil, steps):
    return lambda u: stencil(u, steps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stencil", [rolled, padded, differences])
def test_steps_of_a_stencil_are_not_computed_anew_for_each_neighbour(stencil):
    """Twice the steps are twice the operations, and not their square."""

    x, found = torch.rand(40, 36) / 2, []
    for steps in (2, 4, 8):
        graph = torch.fx.symbolic_trace(in_steps(stencil, steps))
        key = fuser.register_fusion(graph)
        torch.testing.assert_close(list(fuser.run_fusion(key, [x])), [graph(x)])
        plans = schedule(lower_graph(kernel_spec(key).graph, (x,), "fast"), 256).plans
        found.append(sum(len(plan.rows) for plan in plans))
    assert found[1] - found[0] <= 1.1 * found[0] and found[2] - found[1] <= 1.1 * 2 * found[0]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_a_costly_number_for_each_plane_is_computed_once(last):
    """Next to each other in memory are columns, or channels: along these it would be computed anew for each pixel."""
    x, m = torch.randn(2, 24, 6, 5), torch.randn(2, 24)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    planes = lambda x, m: x * torch.erf(m)[:, :, None, None]  # noqa: E731
    torch.testing.assert_close(run(planes, x, m), planes(x, m))
    assert code(planes, x, m).count('extern "C" void') == (2 if last else 1)
    channels = lambda x, m: x * torch.erf(m)[:, None, None]  # noqa: E731
    torch.testing.assert_close(run(channels, x, m[0]), channels(x, m[0]))
    assert code(channels, x, m[0]).count('extern "C" void') == 1


@pytest.mark.parametrize(("batch", "kernels"), [(2, 1), (64, 2)])
def test_costly_numbers_of_positions_are_made_once_for_many_readers(batch, kernels):
    """What comes from indices alone needs no memory, but sines for each row of a batch take longer than reading."""

    def placed(x):
        at = torch.arange(128)[:, None] * torch.exp(torch.arange(64) * -0.01)
        return x + torch.sin(at)

    x = torch.randn(batch, 128, 64)
    handle, spec = fuse(placed, examples=(x,))
    torch.testing.assert_close(handle(x), placed(x))
    assert spec.store.kernels[-1].n_kernels == kernels


def test_numbers_of_positions_that_cost_little_need_no_memory():
    def biased(x):
        return x - 0.5 * (torch.arange(64) - 3)

    x = torch.randn(64, 128, 64)
    handle, spec = fuse(biased, examples=(x,))
    torch.testing.assert_close(handle(x), biased(x))
    assert spec.store.kernels[-1].n_kernels == 1


ACTIVATIONS = {
    "softshrink": lambda x: torch.where(x.abs() > 0.5, x - x.sign() * 0.5, x * 0),
    "hardshrink": lambda x: torch.where(x.abs() > 0.5, x, x * 0),
    "clamp": lambda x: x.clamp(-1, 1),
    "long": lambda x: torch.where(x > 0, x * 2 - x.abs(), torch.where(x < -1, x + 1, x * 0.5)) * 0.5,
    "longer": lambda x: ((x.abs() > 0.5) & (x < 4)).float() * (x.abs() - x.sign() * 0.5) + x * 0.25,
}
WINDOWS = {
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1), "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool 5": lambda x: F.avg_pool2d(x, 5, 1), "avg_pool 2": lambda x: F.avg_pool2d(x, 2),
    "differences": lambda x: x[..., 1:] - x[..., :-1],
    "laplacian": lambda x: x[..., 2:] + x[..., :-2] - 2 * x[..., 1:-1],
}  # fmt: skip


@pytest.mark.sampled(10, also=("hardshrink-laplacian",))
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_reader_computes_all_its_neighbours_or_none(activation, window):
    """Where only some would fit into its loops, the result has to be in memory for the others: all are read there."""
    x = torch.randn(1, 4, 20, 36)

    def both(x):
        return WINDOWS[window](ACTIVATIONS[activation](x))

    handle, spec = fuse(both, functional=True)
    torch.testing.assert_close(handle(x), both(x))
    lowered = lower_graph(spec.graph, [x], "fast")
    for plan in schedule(lowered, 256).plans:
        read = {r.attr[0] for r in plan.rows if r.op == "load"}
        assert read == {"in0"} or "in0" not in read, (plan.name, read)
