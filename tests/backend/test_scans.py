"""Running sums, products and extremes along every dim."""

from __future__ import annotations

import pytest
import torch

from fuser import config
from fuser.debug.reference import interpret_lowered, interpret_schedule, verify_lowered
from fuser.lowering.graph import lower_graph
from fuser.scheduler.schedule import schedule
from tests.backend.fused import check, check_each, compare, flat, fuse, in_layouts, no_fallback, values

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
X = values(4, 5, 6) / 16


def both(results):
    return results[0], results[1]


def flat_of(fn):
    return lambda x: tuple(flat(fn(x)))


SCANS = {
    "cumsum": lambda x: tuple(x.cumsum(d) for d in range(3)),
    "cumprod": lambda x: tuple(x.cumprod(d) for d in range(3)),
    "logcumsumexp": lambda x: (x.logcumsumexp(0), x.logcumsumexp(-1)),
    "cummax": lambda x: (both(x.cummax(0)), both(torch.cummax(x, 2))),
    "cummin": lambda x: (both(x.cummin(1)), x.cummin(-1)[1]),
    "of_what_is_computed": lambda x: (torch.relu(x) * 2 + 1).cumsum(1) - x.sum(1, keepdim=True),
    "diff": lambda x: (torch.diff(x), x.diff(dim=0)),
    "of_a_part": lambda x: (x[:, 1:4].cumsum(2), x.transpose(0, 1).cumsum(0)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SCANS)
def test_scans(name):
    check_each(SCANS[name], in_layouts(X), tol=CLOSE)


def test_special_values():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, 3.0, 2.0], [-inf, -inf, 0.0, inf], [5.0, 5.0, nan, nan], [-0.0, 0.0, -0.0, inf]])

    def fn(x):
        sums = x.cumsum(1), x.cumprod(0), x.logcumsumexp(1), x.logcumsumexp(0)
        return flat((both(x.cummax(1)), both(x.cummin(1)), both(x.cummax(0)), sums))

    check(fn, x, tol=CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.bool])
def test_dtypes(dtype):
    x = values(4, 6, dtype=dtype)

    def fn(x):
        sums = x.cumsum(0), x.cumprod(1), x.cumsum(1, dtype=torch.float32)
        return flat((sums, both(x.cummax(1)), both(x.cummin(0))))

    check(fn, x, tol=CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_from_the_truth_than_eager(dtype):
    x = (values(7, 300) / 64).to(dtype)
    fn = lambda x: (x.cumsum(1), x.cumsum(0), x.logcumsumexp(1))  # noqa: E731
    handle, spec = fuse(fn)
    for got, eager, exact in zip(handle(x), fn(x), fn(x.double())):
        assert got.dtype is dtype
        assert (got.double() - exact).abs().max() <= (eager.double() - exact).abs().max()
    no_fallback(spec)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


def with_ties(*size, dtype):
    """Small whole numbers, and of floats some NaNs, infinities and zeros of both signs."""
    g = torch.Generator().manual_seed(sum(size))
    x = torch.randint(0, 7, size, generator=g).to(dtype)
    if dtype.is_floating_point:
        special = torch.tensor([float("nan"), -float("inf"), float("inf"), -0.0, 0.0], dtype=dtype)
        some = torch.randint(0, 400, size, generator=g)
        x = torch.where(some < 5, special[some.clamp_max(4)], x - 3)
    return x


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes_and_their_places_come_from_one_pass(dtype):
    """In any loops, with ties, NaN and zeros of both signs, and where somebody computes what is scanned."""

    def fn(x):
        of_columns, of_rows, of_what_is_computed = x.cummax(0), x.cummin(1), (x * 1).cummax(2)
        return flat((both(of_columns), both(of_rows), both(of_what_is_computed), of_rows[1] + 1))

    handle, spec = fuse(fn)
    for size in ((3, 5, 7), (2, 1, 700), (9, 40, 3), (1, 3, 0)):
        x = with_ties(*size, dtype=dtype)
        for got, eager in zip(handle(x), fn(x)):
            compare(got, eager, tol={"rtol": 0, "atol": 0})
            if dtype.is_floating_point and got.dtype is dtype:
                assert torch.equal(got.signbit() & ~got.isnan(), eager.signbit() & ~eager.isnan())
    no_fallback(spec)
    x = with_ties(3, 5, 7, dtype=dtype)
    lowered = lower_graph(spec.graph, (x,))
    plan = schedule(lowered, config.max_body_rows)
    assert sorted(p.ordered.how for p in plan.plans if p.ordered) == ["argmax", "argmax", "argmin"]
    compare(interpret_schedule(lowered, plan, (x,)), fn(x))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_rows(dtype):
    """Rows of several blocks, of one and of less than a vector: read as they are, with steps between, or computed."""

    def fn(x):
        apart = x[:, ::2].cummax(1)
        return flat((both(x.cummax(1)), x.cummin(1)[0], (x * 1).cummin(1)[1], both(apart), x[:, 3:].cumsum(1)))

    handle, spec = fuse(fn)
    for size in ((3, 1100), (40, 47), (2, 513), (300, 16), (2, 7), (4, 5000)):
        x = with_ties(*size, dtype=dtype)
        if size[1] == 5000 and dtype.is_floating_point:  # a row with no NaN, and one of nothing else
            x[0], x[1] = x[0].nan_to_num(1.0, 1.0, 1.0), float("nan")
        exact = x[:, 3:].double().cumsum(1).to(dtype) if dtype.is_floating_point else x[:, 3:].cumsum(1)
        *got, sums = handle(x)
        for mine, eager in zip(got, fn(x)):
            compare(mine, eager)
            if dtype.is_floating_point and mine.dtype is dtype:
                assert torch.equal(mine.signbit() & ~mine.isnan(), eager.signbit() & ~eager.isnan())
        compare(sums, exact)
    no_fallback(spec)
    names = {torch.float64: "f64", torch.int64: "i64"}
    name = names.get(dtype, "f32" if dtype.is_floating_point else "i32")
    assert any(f"fuser_scan_max_{name}(" in k.source for k in spec.store.kernels)


def test_a_scan_reads_what_is_joined_and_what_others_look_up_too():
    """Neither is computed point by point in the scan."""
    x, i = values(40, 24), torch.randint(0, 40, (40, 24), generator=torch.Generator().manual_seed(5))

    def fn(x, i):
        joined, looked_up = torch.cat((x, x * 2, x), 1), x.gather(0, i)
        return joined.cumsum(1), joined + 1, looked_up.cummax(0)[0], looked_up * looked_up

    spec = check(fn, x, i, tol=CLOSE)
    lowered = lower_graph(spec.graph, (x, i))
    plans = schedule(lowered, config.max_body_rows).plans
    assert not any(r.args or r.op == "indirect" for p in plans if p.ordered for r in p.rows)


@pytest.mark.parametrize("fn", [lambda x: x.exp().cumsum(1), lambda x: x.exp().logcumsumexp(1)], ids=["sum", "log"])
def test_costly_values_are_computed_a_block_at_a_time(fn):
    """In order: float64 has eager's own bits but for those of the function."""
    handle, spec = fuse(fn)
    for size in ((9, 300), (1, 40_000), (4, 256), (5, 3), (2, 0)):
        x = values(*size, dtype=torch.float64)
        compare(handle(x), fn(x), tol={"rtol": 1e-13, "atol": 0})
    x = torch.cat((values(3, 100) / 8, torch.full((3, 1), float("nan"))), 1)
    compare(handle(x), fn(x), tol=CLOSE)
    no_fallback(spec)
    assert all("auto fill" in k.source for k in spec.store.kernels if k.name.startswith("scan_logaddexp"))


def test_products_of_a_long_row_in_order():
    """What is infinite stays so, also where what comes later would be 0 by itself; and the other way round."""
    up, down = torch.full((50_000,), 2.0), torch.full((50_000,), 0.5)
    fn = lambda x, y: (x.cumprod(0), y.cumprod(0))  # noqa: E731
    handle, spec = fuse(fn)
    for n in (50_000, 20_000, 1500):
        args = torch.cat((up[:n], down)), torch.cat((down[:n], up))
        compare(handle(*args), fn(*args), tol={"rtol": 1e-6, "atol": 0})
    no_fallback(spec)


def test_small_sizes():
    check(lambda x: (x.cumsum(0), x.cumprod(0) * 2, x.cummax(0)[1]), torch.tensor(3.0))
    check(lambda x: (x.cumsum(0), x.cumsum(1), x.cumprod(1), x.cummax(0)[1]), torch.empty(0, 3))
    check(lambda x: flat((x.cumsum(0), x.cumsum(1), both(x.cummax(0)), both(x.cummin(1)))), values(1, 5))
    check(lambda x: (x.cumsum(3), x.cumprod(0), x.cummax(5)[1]), values(1, 2, 1, 3, 1, 2, 2, 1))


def test_other_sizes_need_no_other_kernel():
    fn = lambda x: x.cumsum(0) + x.cummax(1)[0]  # noqa: E731
    handle, spec = fuse(fn)
    for size in ((4, 6), (2, 90), (300, 7), (60, 64)):
        x = values(*size)
        compare(handle(x), fn(x), tol=CLOSE)
    no_fallback(spec)
    assert len(spec.store.kernels) == 1


@pytest.mark.parametrize("rows", [(), (3,), (9,)], ids=str)
def test_few_long_rows(rows):
    """Rows that are cut into chunks: the same bits on any threads, and sums as exact as float64 makes them."""
    fn = lambda x, i: flat((x.cumsum(-1), x.logcumsumexp(-1), i.cumsum(-1), both(x.cummax(-1))))  # noqa: E731
    handle, spec = fuse(fn)
    for n in (262_145, 4_097, 40_000, 3, 0):
        x, i = torch.randn(*rows, n), torch.randint(-(2**62), 2**62, (*rows, n))
        if n > 1000:
            x[..., 0], x[..., 3 * n // 4] = -float("inf") if n > 50_000 else 1.0, float("nan")
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(handle(x, i))
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*results))
        sums, logs, whole, top, at = results[0]
        compare(sums, x.double().cumsum(-1).float(), tol={"rtol": 3e-7, "atol": 1e-9})
        compare(logs, x.double().logcumsumexp(-1).float(), tol={"rtol": 3e-7, "atol": 1e-6})
        assert torch.equal(whole, i.cumsum(-1))
        compare((top, at), both(x.cummax(-1)))
    no_fallback(spec)


def test_the_interpreters_agree():
    for name in ("cumsum", "cummax", "of_what_is_computed"):
        fn = flat_of(SCANS[name])
        _, spec = fuse(fn)
        lowered = lower_graph(spec.graph, (X,))
        plan = schedule(lowered, config.max_body_rows)
        verify_lowered(lowered, plan)
        want = fn(X)
        compare(interpret_lowered(lowered, (X,)), want, tol=CLOSE)
        compare(interpret_schedule(lowered, plan, (X,)), want, tol=CLOSE)


@pytest.mark.parametrize("dim", [0, 1])
def test_every_float16_goes_through_a_chain(dim):
    """Each of them, NaN and subnormal ones too, is read and stored as it is: alone, and in lanes."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).unsqueeze(dim)
    fn = lambda x: torch.cumsum(torch.cat((x, x), dim), dim)  # noqa: E731
    handle, spec = fuse(fn)
    out, eager = handle(x).select(dim, 0), fn(x).select(dim, 0)
    no_fallback(spec)
    assert ("fuser_piece_to_half" if dim == 0 else "fuser_lone_load_half") in spec.store.kernels[0].source
    assert torch.equal(out.isnan(), x.flatten().isnan()) and torch.equal(out.nan_to_num(7.0), eager.nan_to_num(7.0))
    assert torch.equal(handle(x).nan_to_num(7.0), fn(x).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_runs_backwards_or_stands_still(dtype):
    x = (torch.arange(3 * 70) % 13 - 6).view(3, 70).to(dtype) / 2

    def fn(x):
        back = x.flip(1).cumsum(1), x.flip(1).cumsum(0), x.flip(0, 1).cummax(1)[1], (x.flip(1) + x).cummin(1)[0]
        under = torch.nn.functional.pad(x, (0, 0, 2, 1)).cumsum(0), x[:, :1].expand(-1, 40).cumsum(1)
        return (*back, *under, x[:, :1].expand(-1, 40).cummax(1)[1])

    handle, spec = fuse(fn)
    for part in (x, x[:2, :33].contiguous()):
        compare(handle(part), fn(part), tol={"rtol": 1e-3, "atol": 1e-3})
    no_fallback(spec)


WHOLE = {
    **{name: getattr(torch, name) for name in ("cumsum", "cumprod", "logcumsumexp")},
    "cummax": lambda x, d: both(torch.cummax(x, d)), "cummin": lambda x, d: both(torch.cummin(x, d)),
    "sum": torch.sum, "prod": torch.prod, "mean": torch.mean, "var": torch.var, "norm": lambda x, d: x.norm(dim=d),
    "softmax": torch.softmax, "logsumexp": torch.logsumexp, "all": torch.all, "count": torch.count_nonzero,
    "cat": lambda x, d: torch.cat([x, x + 1], d), "flip": lambda x, d: x.flip(d) * 2,
    "roll": lambda x, d: x.roll(1, d) * 2,
    "pad": lambda x, d: torch.nn.functional.pad(x, (1, 1)) * 2,
    "added": lambda x, d: x.new_zeros(4).index_put((torch.zeros_like(x, dtype=torch.int64),), x, accumulate=True),
    "scatter": lambda x, d: x.new_zeros(4, 4).scatter_add(d, torch.zeros_like(x, dtype=torch.int64), x),
}  # fmt: skip

FLOATS_ONLY = ("mean", "var", "norm", "softmax", "logsumexp", "logcumsumexp", "added", "scatter")


@pytest.mark.sampled(22, also=("cummax-3",))
@pytest.mark.parametrize("first", [3, 17, 400])
@pytest.mark.parametrize("name", WHOLE)
def test_of_an_empty_dim_nothing_is_read(name, first):
    """Seed 91017164: a kernel made for many elements read one that they all share, where there were none."""
    y = torch.arange(5.0)  # a result that is not empty, for which the others are looked at, too
    for dim, dtype in ((0, torch.bool), (0, torch.float32), (1, torch.float32)):
        if dtype is torch.bool and name in FLOATS_ONLY:
            continue
        made = torch.logical_not if dtype is torch.bool else torch.exp
        fn = lambda x, y: (WHOLE[name](made(x if dim == 0 else x.t()), dim), y * 2)  # noqa: B023, E731
        shared = torch.ones(3, dtype=dtype).expand(first, 3)
        nothing = torch.empty(0, dtype=dtype).as_strided((0, 3), (0, 1))  # at address 0
        handle, _ = fuse(fn, functional=True)
        for x in (shared, nothing):
            compare(handle(x, y), fn(x, y), tol={"rtol": 1e-5, "atol": 1e-6})
