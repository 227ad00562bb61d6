"""What the scheduler makes of graphs for CUDA, run by the interpreter of schedules: no GPU, no Triton."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cuda_cases import Case, key_gradient, turned
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser import config, interface
from fuser.debug.reference import interpret_schedule
from fuser.errors import Unsupported
from fuser.lowering.graph import Lowered, lower_graph
from fuser.scheduler import neighbours
from fuser.scheduler.schedule import Schedule, schedule


def scheduled(case: Case) -> tuple[Lowered, Schedule]:
    """A case's kernels for CUDA."""
    spec = interface.kernel_spec(interface.register_fusion(torch.fx.symbolic_trace(case.fn)))
    lowered = lower_graph(spec.graph, case.fake_args(), config.numerics)
    return lowered, schedule(lowered, config.max_body_rows)


def results(case: Case, lowered: Lowered, found: Schedule) -> tuple[torch.Tensor, ...]:
    out: Any = interpret_schedule(lowered, found, case.args("cpu"))
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


SHORT = {
    "two heads": Case("", key_gradient, lambda i: (i.normal(2, 6, 10, 16), i.normal(10, 16), i.normal(10, 16))),
    "sum": Case("", lambda x: x.view(5, 3, 7).sum(1), lambda i: (i.normal(15, 7),)),
    "half sum": Case("", lambda x: x.view(5, 3, 7).sum(1), lambda i: (i.normal(15, 7, dtype=torch.bfloat16),)),
    "sum of zeros": Case("", lambda x: x.view(2, 2, 2).sum(1), lambda i: (i.normal(4, 2) * -0.0,)),
    "sum of bools": Case("", lambda x: (x.view(5, 3, 7) > 0).sum(1), lambda i: (i.normal(15, 7),)),
    "product": Case("", lambda x: x.view(5, 3, 7).prod(1), lambda i: (i.below(9, 15, 7),)),
    "extremes": Case("", lambda x: (x.view(5, 3, 7).amax(1), x.view(5, 3, 7).amin(1)),
                     lambda i: (torch.where(i.normal(15, 7) > 1, torch.nan, i.normal(15, 7)),)),
    "two dims": Case("", lambda x: x.view(5, 2, 2, 7).mean((1, 2)), lambda i: (i.normal(20, 7),)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_reductions_over_few_points_are_arithmetic(name: str) -> None:
    case = SHORT[name]
    lowered, found = scheduled(case)
    assert len(found.plans) == 1 and not found.plans[0].reductions
    want = case.fn(*case.args("cpu"))
    for a, b in zip(results(case, lowered, found), want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
        assert torch.equal(torch.signbit(a.nan_to_num(1)), torch.signbit(b.nan_to_num(1)))


def test_long_reductions_and_reductions_along_memory_are_loops() -> None:
    for fn in (lambda x: x.view(3, 9, 8).sum(1), lambda x: x.view(9, 8, 3).sum(2)):
        _, found = scheduled(Case("", fn, lambda i: (i.normal(27, 8),)))
        assert [r.kind for p in found.plans for r in p.reductions] == ["sum"]


def test_few_points_of_costly_values_stay_a_loop_which_shares_the_loop_that_computes_them() -> None:
    """As arithmetic their sum would read five of them from memory, where no reader has room for five copies."""

    def costly(x: torch.Tensor) -> torch.Tensor:
        for n in range(1, 12):
            x = (x * (1 + n / 16)).clamp(-n, n) + x.sin()
        return x

    case = Case("", lambda x: costly(x.view(5, 6, 7)).sum(1), lambda i: (i.normal(30, 7),))
    lowered, found = scheduled(case)
    assert len(found.plans) == 1 and [r.kind for r in found.plans[0].reductions] == ["sum"]
    torch.testing.assert_close(results(case, lowered, found)[0], case.fn(*case.args("cpu")))


def test_rows_are_reduced_apart_from_results_that_are_stored_across_rows() -> None:
    """Each of the row's elements would be a store of its own; a kernel of tiles transposes them."""

    def gated(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x * y
        copied = torch.ops.aten.clone.default(product.transpose(1, 2), memory_format=torch.contiguous_format)
        return product.sum((0, 2)), copied

    case = Case("", gated, lambda i: (i.normal(16, 196, 384), i.normal(16, 196, 384)))
    _, found = scheduled(case)
    assert sorted(bool(p.reductions) for p in found.plans) == [False, True]
    few = Case("", gated, lambda i: (i.normal(1, 14, 384), i.normal(1, 14, 384)))
    lowered, found = scheduled(few)
    assert len(found.plans) == 1
    for a, b in zip(results(few, lowered, found), few.fn(*few.args("cpu")), strict=True):
        torch.testing.assert_close(a, b)


def test_columns_are_split_if_one_operand_lies_along_rows() -> None:
    """Tiles of columns read both; the first sum, of the operand along rows alone, does not make them rows."""

    def gradient(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dims = 0, 2, 3
        return g - g.mean(dims, keepdim=True) - x * (g * x).mean(dims, keepdim=True)

    case = Case("", gradient, lambda i: (i.normal(32, 64, 14, 14), turned(i.normal(32, 64, 14, 14))))
    _, found = scheduled(case)
    assert [bool(p.reductions) for p in found.plans] == [True, True, False]

    def normalised(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (g - g.sum((0, 2, 3), keepdim=True)) * x  # only what waits for the sum is read along columns

    _, found = scheduled(Case("", normalised, case.make))
    assert [bool(p.reductions) for p in found.plans] == [True, False]


@pytest.mark.parametrize(("padded", "divisions"), [(True, 1), (False, 9)])
def test_gradients_of_average_pools_divide_once(padded: bool, divisions: int) -> None:
    def gradient(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        how = [3, 3], [1, 1], [1, 1], False, padded, None
        return torch.ops.aten.avg_pool2d_backward.default(g, x, *how)

    case = Case("", gradient, lambda i: (i.normal(2, 3, 8, 9), i.normal(2, 3, 8, 9)))
    lowered, found = scheduled(case)
    assert [r.op for r in found.plans[0].rows].count("div") == divisions
    torch.testing.assert_close(results(case, lowered, found)[0], case.fn(*case.args("cpu")))


def enlarged(*given: torch.Tensor) -> torch.Tensor:
    """Four images, each with a bias, three of them enlarged to the first one's size, as one tensor."""
    aten, out = torch.ops.aten, []
    for x, bias in zip(given[:4], given[4:], strict=True):
        y = x.view(2, 64, *x.shape[2:]) + bias.view(1, 64, 1, 1)
        out.append(y if x is given[0] else aten.upsample_bilinear2d.default(y, [16, 16], False))
    return torch.cat(out, 1)


def test_branches_are_not_cut_where_a_kernel_has_no_room_for_all_of_them() -> None:
    """What crosses a cut is stored in float32: each branch's result has half of its bytes."""
    with FakeTensorMode():
        images = [torch.empty(2, 64, n, n, dtype=torch.bfloat16, device="cuda") for n in (16, 8, 4, 2)]
        args = *images, *(torch.empty(64, dtype=torch.bfloat16, device="cuda") for _ in images)
        op = torch.ops.aten.upsample_bilinear2d.default
        graph = make_fx(enlarged, {op: decomposition_table[op]})(*args)
    spec = interface.kernel_spec(interface.register_fusion(graph))
    found = schedule(lower_graph(spec.graph, args, config.numerics), config.max_body_rows)
    assert len(found.plans) > 1 and [b.dtype for b in found.buffers] == [torch.bfloat16]


def pooled_part(g: torch.Tensor, x: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sums over channels and points of a concatenation, of which a part is the gradient of a pool."""
    how = [3, 3], [2, 2], [1, 1], False, True, None
    y = torch.cat([a, torch.ops.aten.avg_pool2d_backward.default(g, x, *how)], 1)
    return y / (y * w).sum((0, 2, 3), keepdim=True)


def test_parts_of_a_concatenation_are_not_computed_at_all_points_of_it() -> None:
    """A reader runs the pool's windows for all channels, and would run them again for the quotients."""
    case = Case("", pooled_part, lambda i: (
        turned(i.normal(4, 16, 4, 4)), turned(i.normal(4, 16, 8, 8)), turned(i.normal(4, 112, 8, 8)),
        turned(i.normal(4, 128, 8, 8)),
    ))  # fmt: skip
    lowered, found = scheduled(case)
    readers = [p for p in found.plans if any(r.op == "load" and r.attr[0] == "in0" for r in p.rows)]
    assert len(readers) == 1 and not readers[0].reductions
    torch.testing.assert_close(results(case, lowered, found)[0], case.fn(*case.args("cpu")))


def test_few_long_rows_are_split_over_programs_and_then_written_by_another_kernel():
    case = Case("", lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), lambda i: (i.normal(16, 1 << 17),))
    _, found = scheduled(case)
    assert [len(p.reductions) for p in found.plans] == [2, 0]  # a row's mean and variance in one reading
    many = Case("", case.fn, lambda i: (i.normal(40, 1 << 17),))
    assert len(scheduled(many)[1].plans) == 1


def test_few_long_columns_are_split_like_rows():
    def normalised(x):
        return (x - x.mean(0)) / x.var(0)

    _, found = scheduled(Case("", normalised, lambda i: (i.normal(1 << 13, 64),)))
    assert [bool(p.reductions) for p in found.plans] == [True, False]
    assert len(scheduled(Case("", normalised, lambda i: (i.normal(1 << 8, 64),)))[1].plans) == 1


def test_columns_of_a_copy_in_another_order_are_split():
    """The copy is no tensor in memory: its row-major strides do not hide that columns are read."""

    def normalised(rows):
        x = rows.view(32, 16, 16, 2, 2, 64).permute(0, 5, 1, 3, 2, 4)
        x = torch.ops.aten.clone.default(x, memory_format=torch.contiguous_format).view(32, 64, 32, 32)
        return x.permute(0, 2, 3, 1) / x.sum((0, 2, 3))

    _, found = scheduled(Case("", normalised, lambda i: (i.normal(1 << 13, 256),)))
    assert [bool(p.reductions) for p in found.plans] == [True, False]


@pytest.mark.parametrize(
    "dtype, rows, columns, kernels",
    [(torch.bfloat16, 4096, 1024, 2), (torch.float32, 4096, 1024, 2), (torch.float32, 4096, 2048, 1),
     (torch.float32, 1 << 16, 1000, 2), (torch.float32, 1 << 16, 4096, 1), (torch.bfloat16, 1 << 16, 4096, 2)],
)  # fmt: skip
def test_columns_that_few_programs_would_read_are_split(dtype, rows, columns, kernels):
    """A program takes columns of 128 bytes. What the cache holds is read again by as few as 64 of them."""

    class Large(Case):
        def fake_args(self):
            with FakeTensorMode():
                return (torch.empty(rows, columns, dtype=dtype, device="cuda"),)

    _, found = scheduled(Large("", lambda x: x * x.sum(0), lambda i: ()))
    assert len(found.plans) == kernels


@pytest.mark.parametrize("rows, columns, kernels", [(3136, 2048, 2), (3136, 1 << 15, 1), (512, 2048, 1)])
def test_columns_of_several_tensors_are_split(rows, columns, kernels):
    """A loop over several tensors has few loads in flight; registers hold 512 rows."""

    class Large(Case):
        def fake_args(self):
            with FakeTensorMode():
                return tuple(torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    _, found = scheduled(Large("", lambda x, y: x - y * (x * y).sum(0), lambda i: ()))
    assert len(found.plans) == kernels


@pytest.mark.parametrize("kernel, stride, padding", [(3, 1, 1), (3, 1, 0), (5, 1, 2), (5, 2, 2), (3, 3, 1)])
@pytest.mark.parametrize("height, width", [(8, 12), (10, 6), (9, 8), (12, 7), (9, 7)])
def test_windows_of_several_neighbours(kernel, stride, padding, height, width, monkeypatch):
    """Results of neighbours are those of single ones, also where a comparison with an edge always holds."""
    monkeypatch.setattr(neighbours, "FEWEST", 1)

    def f(x, y):
        pooled = torch.nn.functional.avg_pool2d(x, kernel, stride, padding, count_include_pad=False)
        return pooled * 2, torch.ops.aten.avg_pool2d_backward(
            pooled.neg(), y, [kernel] * 2, [stride] * 2, [padding] * 2, False, False, None
        )  # fmt: skip

    def images(i):
        return tuple(i.normal(2, 16, height, width).contiguous(memory_format=torch.channels_last) for _ in range(2))

    case = Case("", f, images)
    lowered, found = scheduled(case)
    for a, b in zip(results(case, lowered, found), f(*case.args("cpu")), strict=True):
        torch.testing.assert_close(a, b)
    several = [len(p.stores) > len({s.buffer for s in p.stores}) for p in found.plans]
    if stride == 1 and padding:
        assert several == [height % 2 == 0 or width % 2 == 0] * 2
    if stride == kernel:
        assert not any(several)


def test_few_long_rows_are_a_class_of_sizes():
    """What a first call's sizes decide holds for all calls of its kernel."""

    def f(x, y):
        return x - y * (x * y).sum(0)

    class Large(Case):
        def __init__(self, sizes):
            super().__init__("", f, lambda i: ())
            object.__setattr__(self, "sizes", sizes)

        def fake_args(self):
            with FakeTensorMode():
                return tuple(torch.empty(*self.sizes, device="cuda") for _ in range(2))

    for sizes, is_long, are_few in (((3136, 2048), True, True), ((3136, 1 << 15), True, False), ((400, 64), False, 0)):
        lowered, _ = scheduled(Large(sizes))
        guards = {(kind, str(a), str(b)) for kind, a, b in lowered.ctx.guards}
        assert (("le", "513", "x0_0") in guards) == is_long, guards
        assert any(kind == "lt" and b == "512" for kind, _, b in guards) == are_few, guards


def test_a_variance_of_something_else_than_the_sum_is_split_by_itself():
    def f(x):
        return (x - x.abs().mean(-1, keepdim=True)).square().sum(-1)

    _, found = scheduled(Case("", f, lambda i: (i.normal(16, 1 << 17),)))
    assert [len(p.reductions) for p in found.plans] == [1, 1]


@pytest.mark.parametrize("words, rows, dtype, mine", [
    (50005, 1024, torch.bfloat16, False), (50005, 1024, torch.float32, True), (30522, 8192, torch.float16, True),
    (512, 64, torch.bfloat16, True),
])  # fmt: skip
def test_few_sums_of_halves_in_a_large_table_are_left_to_aten(words, rows, dtype, mine):
    """They gather in a copy of twice the width, which takes longer to convert than ATen takes to sort the rows."""

    class Large(Case):
        def fake_args(self):
            with FakeTensorMode():
                rows_of = torch.empty(rows, 768, dtype=dtype, device="cuda")
                return rows_of, torch.empty(rows, dtype=torch.int64, device="cuda")

    case = Large("", lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, words, -1, False), lambda i: ())
    if mine:
        assert scheduled(case)[1].plans
    else:
        with pytest.raises(Unsupported, match="few sums of torch.bfloat16 in a large tensor"):
            scheduled(case)


@pytest.mark.parametrize("dtype, size, neighbours", [
    (torch.bfloat16, 50257, 1), (torch.bfloat16, 50258, 2), (torch.bfloat16, 50260, 8), (torch.bfloat16, 50272, 8),
    (torch.float32, 50257, 1), (torch.float32, 50260, 4),
])  # fmt: skip
def test_a_thread_folds_what_it_loads_at_once(dtype, size, neighbours):
    class Long(Case):
        def fake_args(self):
            with FakeTensorMode():
                classes = torch.empty(512, dtype=torch.int64, device="cuda")
                return torch.empty(512, size, dtype=dtype, device="cuda"), classes

    case = Long("", lambda x, t: torch.nn.functional.cross_entropy(x.float(), t), lambda i: ())
    text = case.source(case.fake_args()).text
    (shape,) = set(re.findall(r"lane\d+ = tl.reshape\(.*, (\[.*\])\)", text))
    assert shape.endswith(f", {neighbours}]"), shape
