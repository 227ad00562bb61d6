"""Programs that once gave a wrong result or an exception, found by the fuzzer and by the database of operators."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F

from fuser import register_fusion
from fuser.frontends.dynamo import fuser_backend
from fuser.kernel_cache import REGISTRY
from tests.backend.fused import fuse, handle_of


def same(fn: Any, *inputs: Any, native: bool = True) -> None:
    """`fn` fused gives what it gives in eager, zeros' signs included; by a kernel if `native`."""
    handle, spec = fuse(fn, functional=True)
    want = fn(*inputs)
    got = handle(*inputs)
    if native:
        assert not spec.store.fallbacks
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
        zeros = b == 0
        assert torch.equal(torch.signbit(a)[zeros], torch.signbit(b)[zeros])


X = torch.arange(12.0).reshape(3, 4) - 5


def test_a_reduction_over_one_value_joins_no_other_reduction():
    same(lambda x: (x.unsqueeze(2).max(-1)[0], x.amin((0, 1), keepdim=True)), X[:, :1])
    same(lambda x, y: (torch.log_softmax(y, 0), torch.any(y, 1) + x), X[0, :2], X[:1, :2])
    same(lambda x: torch.argmax(torch.count_nonzero(x, -1)), X[:, :1])


def test_a_reduction_over_no_loops():
    same(lambda x: torch.count_nonzero(x), torch.tensor(3.0))
    same(lambda x: x.amin((0,), keepdim=True).mean((0,)), X[0])
    same(lambda x: (x.sum((0,), keepdim=True), x.argmax()), torch.tensor([-0.0]))


def test_any_of_uint8_is_uint8():
    same(lambda x: x.any(1), X.to(torch.uint8))
    same(lambda x: x.all(), X.to(torch.uint8))


def test_clamp_keeps_the_zero_of_its_argument():
    zeros = torch.tensor([-0.0, 0.0] * 20)
    same(lambda x: (x.clamp(0, 3), x.clamp(-2, 0), x.clamp(max=-0.0), F.hardtanh(x, 0, 1), F.relu6(x)), zeros)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_a_norm_is_compiled_for_the_size_that_it_names(norm):
    key = register_fusion(torch.fx.symbolic_trace(lambda x: norm(x * 2, (4,))))
    handle = REGISTRY.find(key).handle
    torch.testing.assert_close(handle(X), norm(X * 2, (4,)))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        handle(torch.randn(5, 6))


def test_a_weight_of_another_size_is_eagers_error():
    key = register_fusion(torch.fx.symbolic_trace(lambda x, w: F.layer_norm(x * 2, (4,), w)))
    handle = REGISTRY.find(key).handle
    handle(X, torch.ones(4))
    with pytest.raises(RuntimeError, match="weight"):
        handle(X, torch.ones(1))


def test_statistics_of_native_group_norm_have_no_more_dims_than_eagers():
    x = torch.randn(2, 6, 5)

    def norm(x):
        out = torch.native_group_norm(x, None, None, 2, 6, 5, 3, 1e-5)
        return operator.getitem(out, 0), operator.getitem(out, 1), operator.getitem(out, 2)

    same(norm, x)
    same(lambda x: F.group_norm(x, 1), x)


def test_an_empty_diagonal():
    same(lambda x: torch.diagonal(x, -2).flatten(0, 1) + 1, torch.randn(2, 3, 8))


def aliases(fn: Any, *inputs: torch.Tensor) -> None:
    """`fn` registered as it is: each result is an input, a view of one or neither, as in eager."""
    handle = handle_of(fn)
    got, want = handle(*inputs), fn(*inputs)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)):
        assert torch.equal(a, b) and a.stride() == b.stride()
        for x in inputs:
            assert (a is x) == (b is x)
            assert (a.untyped_storage()._cdata == x.untyped_storage()._cdata) == (
                b.untyped_storage()._cdata == x.untyped_storage()._cdata
            )


def test_positive_is_its_argument():
    aliases(lambda x: torch.positive(x), X)


def test_expand_to_the_same_size_is_a_view_and_not_the_tensor():
    aliases(lambda x: (x.expand(3, 4), x * 2), X)


def test_a_slice_of_everything_is_a_view_and_not_the_tensor():
    aliases(lambda x: (x[:], x[..., :], x[:, :] + 1), X)


def test_contiguous_of_a_contiguous_tensor_is_the_tensor():
    aliases(lambda x: (x.contiguous(), x + 1), X)


def test_a_tensor_without_dims_as_index_gives_a_view():
    aliases(lambda x, i: (x[i], x + 1), X, torch.tensor(1))
    aliases(lambda x, i: x[:, i], X, torch.tensor(1))


def test_a_negative_pad_of_a_size_that_is_too_small_is_eagers_error():
    handle = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(lambda x: F.pad(x, (-1, 1)) + 1))).handle
    torch.testing.assert_close(handle(X), F.pad(X, (-1, 1)) + 1)
    with pytest.raises(RuntimeError, match="narrow"):
        handle(torch.zeros(3, 0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_reductions_of_integers_along_rows(dtype):
    x = torch.randint(0, 9, (5, 70), generator=torch.Generator().manual_seed(1)).to(dtype)
    same(lambda x: (x.sum(1), x.prod(1), x.amax(1), x.amin(1)), x)
    same(lambda x: (x.sum(), (x != 0).sum(1), torch.count_nonzero(x)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_of_native_layer_norm_have_eagers_dtype(dtype):
    def norm(x, w):
        out = torch.native_layer_norm(x, (4,), w, None, 1e-5)
        return operator.getitem(out, 0), operator.getitem(out, 1), operator.getitem(out, 2)

    x = X.to(dtype)
    for w in (torch.ones(4), torch.ones(4, dtype=dtype)):
        key = register_fusion(torch.fx.symbolic_trace(norm), functional=True)
        got, want = REGISTRY.find(key).handle(x, w), norm(x, w)
        assert [t.dtype for t in got] == [t.dtype for t in want]
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        assert not REGISTRY.find(key).spec.store.fallbacks


def calls_agree(fn: Any, *calls: Any, functional: bool = False) -> None:
    """Each call in turn gives eager's sizes, strides and values, by whichever kernel the earlier ones left."""
    handle = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn), functional=functional)).handle
    for inputs in calls:
        got, want = handle(*inputs), fn(*inputs)
        assert got.shape == want.shape and torch.equal(got, want)
        strides = [(a, b) for a, b, n in zip(got.stride(), want.stride(), want.shape) if n > 1]
        strides = strides if want.numel() else []
        assert all(a == b for a, b in strides), (got.stride(), want.stride())


def test_of_zeros_in_a_column_the_first_is_the_extreme():
    zeros = torch.tensor([0.0, -0.0, -0.0, 0.0, -1.0, -0.0]).repeat(40).reshape(15, 16)
    same(lambda x: (torch.max(x, 0)[0], torch.min(x, 0)[0]), zeros)


@pytest.mark.parametrize("first", [(0, 12), (4, 0), (1, 12), (3, 1)])
def test_strides_for_few_elements_do_not_stay_for_more(first):
    more = (torch.ones(first),), (torch.ones(3, 12),), (torch.ones(12, 3).t(),)
    calls_agree(lambda x: (x + 1)[:, ::2], *more)
    calls_agree(lambda x: (x + 1).t(), *more)


def test_a_part_that_was_all_is_no_dense_result_for_more():
    calls_agree(lambda x: torch.narrow(x + 1, 1, 0, 2), (torch.ones(3, 2),), (torch.ones(3, 5),))


def test_any_index_into_nothing_is_refused():
    index = torch.tensor([0, 1])
    for fn in (lambda x, i: x[i], lambda x, i: torch.index_select(x, 0, i), lambda x, i: F.embedding(i, x)):
        handle = handle_of(fn, functional=True)
        for x in (torch.zeros(4, 2), torch.zeros(0, 0), torch.zeros(1, 2)):
            try:
                want = fn(x, index)
            except (IndexError, RuntimeError):
                with pytest.raises((IndexError, RuntimeError)):
                    handle(x, index)
            else:
                assert torch.equal(handle(x, index), want)


def test_pooling_of_no_channels_is_eagers_error():
    handle = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(lambda x: F.avg_pool2d(x, 2, 1)))).handle
    for size in ((4, 3, 5), (0, 3, 5)):
        try:
            want = F.avg_pool2d(torch.ones(size), 2, 1)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                handle(torch.ones(size))
        else:
            assert torch.equal(handle(torch.ones(size)), want)


def test_a_scatter_does_not_overwrite_its_own_indices():
    index = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0])

    def fn(x):
        counts = torch.index_add(x, 0, x, x)
        return torch.index_fill(counts, 0, counts, 0)

    same(fn, index)
    same(lambda x: torch.scatter(torch.scatter(x, 0, x, 0), 0, torch.scatter(x, 0, x, 0), 1), index)


def test_what_is_a_view_to_a_kernel_alone_is_a_result():
    key = register_fusion(torch.fx.symbolic_trace(lambda x: torch.repeat_interleave(x + 1, 2, 1)))
    got = REGISTRY.find(key).handle(X)
    assert torch.equal(got, torch.repeat_interleave(X + 1, 2, 1)) and got.is_contiguous()
    assert not REGISTRY.find(key).spec.store.fallbacks


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 4, 5, 6), (2, 1, 5, 6), (2, 3, 2, 5, 6)])
def test_roll_gives_eagers_layout(shape):
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    for x in (torch.randn(shape), torch.randn(shape).contiguous(memory_format=layout)):
        for shifts, dims in ((1, 2), ((1, 2), (0, 2)), (0, 1)):
            def fn(x, shifts=shifts, dims=dims):
                return torch.roll(x, shifts, dims)

            got = handle_of(fn)(x)
            torch.testing.assert_close(got, fn(x), rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scatters_of_halves_gather_in_float32(dtype):
    ones, places = torch.ones(2, dtype=dtype), torch.zeros(3000, dtype=torch.int64)
    powers = torch.tensor([300.0, 300.0, 1 / 512, 1 / 512], dtype=dtype)

    def fn(x, places, many, some):
        first = places[:4]
        return (
            torch.scatter_add(x, 0, places, many), torch.scatter_reduce(x, 0, first, some, "prod"),
            torch.index_add(x, 0, places, many), torch.index_put(x, (places,), many, accumulate=True),
        )  # fmt: skip

    got = handle_of(fn)(ones, places, torch.ones(3000, dtype=dtype), powers)
    exact = fn(ones.double(), places, torch.ones(3000, dtype=torch.float64), powers.double())
    for a, b in zip(got, exact):
        torch.testing.assert_close(a, b.to(dtype))


def test_an_index_gives_the_result_its_own_layout():
    index = torch.arange(24).remainder(3).reshape(4, 3, 2).permute(2, 1, 0)
    wide = torch.randn(3, 8, 5)
    for x in (wide[:, 0, 0], wide, wide.permute(0, 2, 1), wide[:, :1]):
        for fn in (lambda x, i: x[i], lambda x, i: x.transpose(0, -1)[..., i], lambda x, i: x[None, i, ..., None]):
            got = handle_of(fn)(x, index)
            torch.testing.assert_close(got, fn(x, index), rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("fn", [torch.flatten, lambda x: x.contiguous(), lambda x: x.reshape(-1)[None]])
def test_a_copy_that_eager_makes_for_some_layouts_only(fn):
    """The kernel for a piece of a larger tensor does not serve one whose elements lie one behind the other."""
    handle, wide = handle_of(lambda x: (fn(x), x + 1)), torch.randn(8, 8)
    pieces = wide[:2, :2], wide[:1, :1], wide.flatten()[:8].view(2, 4), wide[:1, :3], wide[:3, :1], wide[:2, :4]
    for x in pieces:
        own = x.untyped_storage().data_ptr()
        got, want = handle(x)[0], fn(x)
        assert (got.untyped_storage().data_ptr() == own) == (want.untyped_storage().data_ptr() == own)
        torch.testing.assert_close(got, want, rtol=0, atol=0, check_stride=True)


def test_a_scatter_of_nothing_where_a_mask_holds():
    """For the kernel of a source that has elements, too."""
    mask = torch.tensor([True, False, True])
    handle = handle_of(lambda x, mask, source: torch.masked_scatter(x, mask, source))
    assert torch.equal(handle(X[0, :3], mask, X[1]), X[0, :3].masked_scatter(mask, X[1]))
    assert torch.equal(handle(X[0, :3], ~mask & mask, X[1, :0]), X[0, :3])
    with pytest.raises(RuntimeError, match="Number of elements"):
        handle(X[0, :3], mask, X[1, :0])
    with pytest.raises(RuntimeError, match="Number of elements"):
        handle(X[0, :3], mask, X[1, :1])


def test_a_layout_that_eager_makes_for_some_sizes_only():
    """The kernel for sizes of 0 and 1, which have every layout, does not serve those that have not."""
    handle = handle_of(lambda x, y: (x.contiguous(memory_format=torch.channels_last), y + 1))
    for size in ((1, 1, 1, 0), (2, 2, 2, 4), (3, 1, 2, 4), (3, 3, 1, 1), (1, 2, 3, 4), (1, 1, 1, 1)):
        x = torch.randn(size)
        got, want = handle(x, X)[0], x.contiguous(memory_format=torch.channels_last)
        assert (got is x) == (want is x)
        torch.testing.assert_close(got, want, rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax])
def test_a_softmax_along_a_dim_that_is_not_there(fn):
    handle = handle_of(lambda x: fn((x * x).squeeze(1), 1, dtype=torch.float32))
    handle(X)
    with pytest.raises(IndexError, match="Dimension out of range"):
        handle(X[:, :1])


def test_a_part_that_is_not_there(recwarn):
    """An error as in eager, and no defect of a kernel."""
    handle = handle_of(lambda x: x.unbind(0)[2] * 2)
    assert torch.equal(handle(X), X[2] * 2)
    with pytest.raises(IndexError):
        handle(X[:2])
    assert not recwarn.list


def test_an_empty_result_of_several_parts(recwarn):
    """Both parts are stored at the same place."""
    handle = handle_of(lambda x: torch.cat((x.t().contiguous(), x.t(), x.t()), 0))
    assert handle(X[:, :0]).shape == (0, 3)
    assert handle(X[:0]).shape == (12, 0)
    assert not recwarn.list


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size, step", [(1, 2), (2, 2), (2, 3), (1, 5), (5, 5)])
def test_a_write_through_windows_keeps_the_signs_of_zeros(size, step):
    def fn(x):
        y = x * 0
        y.unfold(1, size, step).neg_()
        return y

    for dim in (5, 7):
        x = torch.ones(2, dim)
        got, want = torch.compile(fn, backend=fuser_backend)(x), fn(x)
        assert torch.equal(torch.signbit(got), torch.signbit(want))
        assert got.stride() == want.stride()


@torch.no_grad()
def test_a_written_input_is_read_for_its_value_in_the_same_layout_only():
    """The index's result lies as its arguments do: the transposed input, not the input before it was transposed."""

    def fn(x, y):
        x.transpose_(0, 1)
        x.select(0, -1).fill_(1)
        return x.movedim(2, 0)[(x,)], torch.maximum(x, y)

    mine, own = (torch.arange(16).remainder(4).reshape(2, 2, 4) for _ in range(2))
    got = fuser_backend(torch.fx.symbolic_trace(fn), [mine, X[0].long()])(mine, X[0].long())
    torch.testing.assert_close(got[0], fn(own, X[0].long())[0], rtol=0, atol=0, check_stride=True)
    torch.testing.assert_close(mine, own, rtol=0, atol=0)


@pytest.mark.sampled(3)
@torch.no_grad()
@pytest.mark.parametrize(
    "copied",
    [
        lambda x: torch.flip(x, (-1,)), lambda x: torch.rot90(x, 1), lambda x: torch.fliplr(x).t(),
        lambda x: torch.ops.aten.permute_copy(x, [1, 0]), lambda x: torch.roll(x, 3, 0), lambda x: x.repeat(2, 1),
        lambda x: x.t().contiguous(), lambda x: x.t().reshape(12), lambda x: x.view(3, 4),
    ],
    ids=["flip", "rot90", "fliplr", "permute_copy", "roll", "repeat", "contiguous", "reshape", "view"],
)  # fmt: skip
def test_what_eager_copies_of_an_input_does_not_see_a_later_write(copied):
    """The last is a view, and does."""

    def fn(x):
        before, sines = copied(x), x.sin()
        x.add_(1)
        return before, sines

    mine, own = X[:3].clone(), X[:3].clone()
    got, want = fuser_backend(torch.fx.symbolic_trace(fn), [mine])(mine), fn(own)
    for a, b in (*zip(got, want), (mine, own)):
        torch.testing.assert_close(a, b)


def test_a_part_replaced_in_windows_that_overlap():
    """Eager's copy has the same strides: what is written to one window shows in its neighbour."""
    x = torch.arange(9.0)

    def fn(x):
        return torch.select_scatter(x.unfold(0, 3, 2), torch.tensor([-1.0, -2.0, -3.0]), 0, 1)

    torch.testing.assert_close(handle_of(fn)(x), fn(x), rtol=0, atol=0)
    same(lambda x, y: torch.select_scatter(x.expand(2, 4), y, 0, 1) + 1, X[:1], X[1])


@pytest.mark.parametrize("x", [X.t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), X])
def test_a_log_sigmoid_is_contiguous(x):
    assert handle_of(lambda x: F.logsigmoid(x))(x).stride() == F.logsigmoid(x).stride()
    torch.testing.assert_close(handle_of(lambda x: F.logsigmoid(x))(x), F.logsigmoid(x))


def test_groups_of_one_value_are_refused_after_others():
    handle = handle_of(lambda x: F.group_norm(x, 2))
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(handle(x), F.group_norm(x, 2))
    with pytest.raises(ValueError, match="more than 1 value"):
        handle(torch.randn(1, 2, 1, 1))


PARTS = {
    "one": (lambda x, i: torch.sin(x[i])[1, 2:3] + 0, True),
    "rows": (lambda x, i: x[i][:2] + 1, True),
    "columns": (lambda x, i: x[i][:, :2] + 1, True),
    "transposed": (lambda x, i: x[i].sin().t().contiguous() + 1, True),
    "repeated": (lambda x, i: x[i][:, None].expand(3, 2, 4) + 1, True),
    "diagonal": (lambda x, i: torch.diagonal(x[i][:, :3]) + 1, True),
    "padded": (lambda x, i: F.pad(x[i], (0, 0, 1, -1)), True),
    "by another index": (lambda x, i: x[i][i % 2], True),
    "size alone": (lambda x, i: torch.zeros_like(x[i]), False),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PARTS)
def test_an_index_out_of_range_is_an_error_where_only_a_part_is_read(name):
    fn, native = PARTS[name]
    good, bad = torch.tensor([2, 0, 1]), torch.tensor([0, 1, 3])
    same(fn, X, good, native=native)
    handle = handle_of(fn, functional=True)
    with pytest.raises(IndexError):
        handle(X, bad)


def test_a_view_that_other_sizes_refuse():
    fn = lambda x: x.chunk(2, -1)[1].view((1, 1, -1)) + 0  # noqa: E731
    handle = handle_of(fn, functional=True)
    for size in ((17, 3), (1, 6), (5, 3)):
        x = torch.randn(size)
        assert torch.equal(handle(x), fn(x))
    for size in ((18, 4), (5, 6)):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            handle(torch.randn(size))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["add", "lt", "div", "maximum", "atan2"])
def test_layouts_after_casts_of_expanded_tensors(name):
    op = getattr(torch, name)
    halves = torch.randn(120).as_strided((2, 4, 3, 5), (1, 2, 8, 24)).to(torch.float16)
    for dtype in (torch.int32, torch.float16, torch.float64):
        other = torch.arange(60).to(dtype).as_strided((2, 4, 3, 5), (0, 15, 5, 1))
        for a, b in ((other, halves), (halves, other), (other[:1], halves), (other[:, 1:2], halves)):
            got = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(lambda x, y: op(x, y)))).handle(a, b)
            assert got.stride() == op(a, b).stride()


def test_what_follows_a_group_norm_has_its_layout():
    x = torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last)
    fn = lambda x: F.avg_pool2d(F.group_norm(x, 2), 2, 1)  # noqa: E731
    got = handle_of(fn)(x)
    assert got.stride() == fn(x).stride()


def test_a_product_does_not_overflow_on_its_way_to_zero():
    x = torch.full((3, 70), 200.0)
    x[0, 69] = x[1, 0] = 0.0
    got = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(lambda x: x.prod(1)), functional=True)).handle(x)
    assert got[0] == 0 and got[1] == 0 and got[2] == float("inf")


def test_eager_searches_among_no_masks():
    handle = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(lambda x, y: torch.bucketize(x, y)))).handle
    assert handle(torch.zeros(0, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)).shape == (0,)
    with pytest.raises((RuntimeError, NotImplementedError), match="Bool"):
        handle(torch.zeros(3, dtype=torch.bool), torch.zeros(4, dtype=torch.bool))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whole", [torch.int64, torch.int32, torch.int16])
def test_a_number_cut_by_way_of_an_integer_has_no_sign_of_zero(whole):
    x = torch.tensor([-0.0, 0.0, -0.7, 0.3, 1.5, -2.5] * 20)
    same(lambda x: x.clamp(0, 2) - x.clamp(0, 2).to(whole), x)
    same(lambda x: x.to(whole).to(torch.float32), x)
    same(lambda x: x.clamp(-1, 1).to(whole).to(torch.float32) * 1, x)
    same(lambda x: x.double().clamp(-3, 3).to(whole).to(torch.float64), x)
    same(lambda x: (x.clamp(-1, 1).to(whole) >> 0).to(torch.float32), x)
    same(lambda x: torch.stack((torch.bitwise_or(x.clamp(-1, 1).to(whole), 0), x), 1).tril(-1), x)
    same(lambda x: torch.where(x > -3, x.clamp(-1, 1).to(whole), 5).to(torch.float32), x)


def test_an_index_into_computed_rows_that_are_all_the_same_is_checked():
    fn = lambda c, x, i: F.embedding(i, torch.where(c, x.sum(), x.amax(0)))  # noqa: E731
    c, x = torch.tensor([[True]]).expand(4, 1), torch.randn(5, 6)
    handle = handle_of(fn, functional=True)
    torch.testing.assert_close(handle(c, x, torch.tensor([0, 3])), fn(c, x, torch.tensor([0, 3])))
    with pytest.raises(IndexError):
        handle(c, x, torch.tensor([0, 4]))


def test_a_rounded_row_that_is_computed_once_for_all_rows():
    def fn(a, b):
        c = torch.asinh(torch.sin(1 - torch.sigmoid(b - 1)))
        return torch.fmax(a, b), torch.sin(1 - torch.sigmoid(b - 1)).to(torch.bfloat16), c

    a, b = torch.randn(33, 40).to(torch.float16)[:, ::2], torch.randn(20).expand(33, 20)
    key = register_fusion(torch.fx.symbolic_trace(fn), functional=True)
    got = REGISTRY.find(key).handle(a, b)
    assert REGISTRY.find(key).spec.store.kernels  # it once did not compile
    for x, y in zip(got, fn(a, b)):
        torch.testing.assert_close(x, y)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 40, 200, 1000, 9001])
def test_extremes_of_rows_with_nans_infinities_and_zeros(dtype, size):
    x = torch.randn(12, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    x[0], x[1], x[2, size // 2], x[3, -1], x[4, 0] = -torch.inf, torch.inf, torch.nan, torch.nan, torch.nan
    x[5], x[6, 3], x[7, 3], x[8] = torch.nan, torch.inf, -torch.inf, torch.arange(size) % 2 * -0.0
    same(lambda x: (torch.amax(x, 1), torch.amin(x, 1), torch.amax(x * 1, (0, 1)), torch.amin(x * 1, (0, 1))), x)
    same(lambda x: (torch.amax(x * 1, (0, 1)), torch.amin(x * 1, (0, 1))), x[6:])


@pytest.mark.parametrize("rows", [(), (3,)], ids=str)
def test_the_first_nan_of_a_long_row_is_found(rows):
    """It may be in any chunk of the row, on any threads."""
    fn = lambda x: (x.max(-1)[0], x.max(-1)[1], x.argmin(-1))  # noqa: E731
    key = register_fusion(torch.fx.symbolic_trace(fn), functional=True)
    for places in ([7, 9, 30_000], [30_001, 70_000], [99_999], [4096], []):
        x = torch.randn(*rows, 100_000, generator=torch.Generator().manual_seed(len(places)))
        for place in places:
            x[(0,) * len(rows)][place] = float("nan")
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for got, eager in zip(REGISTRY.find(key).handle(x), fn(x)):
                torch.testing.assert_close(got, eager, equal_nan=True, rtol=0, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conditions_on_the_index_in_loops_over_halves(dtype, compare):
    def kept(x: Any, last: Any) -> Any:
        held = compare(torch.arange(x.shape[-1]), last[:, None])
        return torch.where(held, x * 1.5, x), torch.where(held, x, 0.0)

    ends = [0, 5, 130, -1, 2**63 - 1, -(2**63), 2**63 - 2]
    same(kept, torch.ones(7, 200, dtype=dtype), torch.tensor(ends))
    same(lambda x: (x * 1.5).tril(), torch.ones(70, 70, dtype=dtype))


def test_a_constant_joins_rows_of_both_halves():
    def kept(a: Any, b: Any, last: Any) -> Any:
        held = torch.arange(a.shape[-1]) < last[:, None]
        return torch.where(held, a, 1.5), torch.where(held, b, 1.5)

    x = torch.full((8, 20), 0.5)
    same(kept, x.half(), x.bfloat16(), torch.arange(8) * 3)


def test_scans_of_what_is_the_same_along_a_row():
    rows = torch.randn(70, 1).expand(70, 65)
    same(lambda x: (torch.cumprod(x, -1), torch.cumsum(x, -1), torch.cummax(x, -1)[1]), rows)
    same(lambda x: torch.cummin(torch.full_like(x, 2.0), 1)[0], rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scans_of_rows_that_are_turned_round(dtype):
    x = torch.arange(5000) * 7 % 5 - 2.0
    key = register_fusion(torch.fx.symbolic_trace(lambda x: torch.cumprod(torch.flip(x, (0,)), -1)), functional=True)
    for size in (5000, 2, 17, 513):
        y = x[:size].to(dtype)
        assert torch.equal(REGISTRY.find(key).handle(y), torch.cumprod(torch.flip(y, (0,)), -1))


def test_more_indices_than_dims():
    for fn in (
        lambda x: (x * 2)[0, :] + 1, lambda x: (x * 2)[:, :] + 1, lambda x: (x * 2)[0, :, ...] + 1,
        lambda x: (x * 2)[:, ..., 0] + 1, lambda x: (x * 2)[None, ..., :, 0] + 1,
    ):  # fmt: skip
        handle = handle_of(fn, functional=True)
        assert torch.equal(handle(X), fn(X))
        with pytest.raises(IndexError):
            handle(X[0])


def test_what_is_padded_from_nothing_is_row_major():
    fn = lambda x: torch.pow(F.pad(x, (0, 1, 0, 0)), 2)  # noqa: E731
    handle = handle_of(fn)
    for size in ((2, 2, 2, 4), (2, 2, 2, 0), (2, 2, 2, 3)):
        x = torch.randn(size).contiguous(memory_format=torch.channels_last)
        assert handle(x).stride() == fn(x).stride()
    fn = lambda x: F.pad(torch.bitwise_not(x), (1, 0))  # noqa: E731
    handle = handle_of(fn)
    for size in ((1, 3, 4, 4), (1, 2, 1, 1), (1, 3, 1, 4)):
        x = torch.ones(size, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
        assert handle(x).stride() == fn(x).stride()


@pytest.mark.parametrize("op", [torch.special.i0, torch.special.i1, torch.special.i0e, torch.special.i1e])
def test_bessel_functions_of_what_is_infinite(op):
    inf = float("inf")
    same(lambda x: op(x), torch.tensor([inf, -inf, float("nan"), 1e30, -1e30, 200.0, 80.0, -80.0, 3.0, 0.0]))


def test_too_few_elements_for_a_mask_that_are_all_the_same():
    fn = lambda x, m: torch.masked_scatter(x, m, x.new_zeros(8))  # noqa: E731
    handle = handle_of(fn, functional=True)
    m = torch.arange(30) % 4 == 0
    assert torch.equal(handle(torch.ones(30), m), fn(torch.ones(30), m))
    with pytest.raises(RuntimeError, match="Number of elements of source"):
        handle(torch.ones(30), m | (torch.arange(30) == 2))


def test_layouts_of_windows_by_their_number_and_width():
    fn = lambda x: (x.unfold(1, 3, 1) * 2, x.unfold(1, 3, 1).transpose(1, 2) + 1)  # noqa: E731
    handle = handle_of(fn)
    for n in (4, 5, 6, 9, 4):
        x = torch.randn(2, n)
        for a, b in zip(handle(x), fn(x)):
            assert torch.equal(a, b) and a.stride() == b.stride()


def test_a_condition_that_is_a_constant_selects_halves():
    x, y = torch.randn(9).to(torch.float16), torch.randn(9).to(torch.float16)
    same(lambda x, y: torch.where(x.new_zeros(()).bool(), x, y), x, y)
    same(lambda x, y: (torch.where(x.new_ones((), dtype=torch.bool), x, y), (x.float() * 2)), x, y)


def test_what_is_hot_is_row_major():
    i = torch.arange(16).reshape(2, 2, 2, 2) % 5
    fn = lambda i: F.one_hot(i.transpose(1, -4), 5)  # noqa: E731
    got = handle_of(fn)(i)
    assert torch.equal(got, fn(i)) and got.stride() == fn(i).stride()


def test_flags_of_a_constant_beside_computed_halves():
    x = torch.randn(4, 16).to(torch.float16)
    same(lambda x: (x * 1.5, torch.signbit(x.new_zeros((4, 16), dtype=torch.int64)).expand_as(x).clone()), x)


def test_strides_of_sizes_that_are_known_from_later_inputs():
    fn = lambda i, x: torch.addcmul(torch.cat((x, x), -2), i, i, value=2)  # noqa: E731
    same(fn, torch.arange(4).reshape(1, 1, 4, 1), torch.randn(2, 2, 2, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", [torch.logical_and, torch.logical_or, torch.logical_xor])
def test_what_is_not_zero_before_it_takes_the_dtype_of_the_others(op):
    t, byte, half = torch.tensor, torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.float16)
    pairs = [
        (t(256), byte), (t(257), byte), (t(1e-50, dtype=torch.float64), half.float()), (t(1e-10), half),
        (t(1e-10), t(1.0).half()), (t(0.5), byte), (t(2**31), half), (t(256), half.bool()), (t([1e-10]), half),
    ]  # fmt: skip
    for a, b in pairs:
        same(lambda x, y: op(x, y), a, b)
        same(lambda x, y: op(x, y), b + 1, a)


def test_sorted_values_in_other_dims_than_eager_takes():
    bucketize = handle_of(lambda x, b: torch.bucketize(x, b))
    searchsorted = handle_of(lambda b, x: torch.searchsorted(b, x))
    for x, b in ((X, X), (X, X[0, 0]), (X[0], X), (X[0, 0], X), (X[None], X)):
        with pytest.raises(RuntimeError, match="boundaries tensor must be 1 dimension"):
            bucketize(x, b)
        if b.dim() != x.dim():
            with pytest.raises(RuntimeError, match=r"torch.searchsorted\(\)"):
                searchsorted(b, x)
    square = handle_of(lambda x: torch.bucketize(x.squeeze(-1), x.squeeze(-1)))
    assert torch.equal(square(X[:, :1]), torch.arange(3))
    with pytest.raises(RuntimeError, match="boundaries tensor must be 1 dimension"):
        square(X[:, :2])


def test_joins_of_single_channels_are_row_major():
    for fn in (lambda x: torch.cat((x, x), 1), lambda x: torch.cat((x * 2, x, x), 2)):
        handle = handle_of(fn)
        for size in ((2, 4, 3, 5), (1, 4, 3, 5), (2, 1, 3, 1), (2, 1, 3, 4), (2, 4, 1, 1), (1, 1, 3, 1)):
            x = torch.randn(size).contiguous(memory_format=torch.channels_last)
            assert torch.equal(handle(x), fn(x))
            wide = [d for d, n in enumerate(fn(x).shape) if n > 1]
            assert [handle(x).stride(d) for d in wide] == [fn(x).stride(d) for d in wide], size


@pytest.mark.parametrize("nan", [float("inf"), -float("inf"), 0.5])
def test_a_replacement_is_not_replaced_again(nan):
    same(lambda x: x.nan_to_num(nan, 3.0, -2.0), torch.tensor([1.0, float("inf"), -float("inf"), float("nan")] * 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scales_beyond_the_range_of_one_power_of_two(dtype):
    """Eager's `ldexp` of floats by integers scales exactly: numbers below the normal ones, 0 and infinity, too."""
    most = 2200 if dtype is torch.float64 else 300
    exponents = torch.cat((torch.arange(-most, most, 7), torch.tensor([2**31, 2**53 + 1, -(2**31) - 1, -(2**63)])))
    numbers = torch.tensor([0.0, -0.0, 1.5, -3.7, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4, torch.inf])
    x = numbers.to(dtype)[:, None]
    handle, spec = fuse(lambda x, n: torch.ldexp(x, n))
    for n in (exponents, exponents.int()):
        torch.testing.assert_close(handle(x, n), torch.ldexp(x, n), rtol=0, atol=0, equal_nan=True)
    assert not spec.store.fallbacks
