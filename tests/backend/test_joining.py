"""Joins, pads, turns and replaced parts: values, dtypes and strides as eager's, in every layout, by a kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser import interface
from tests.backend.fused import (
    check,
    check_each,
    check_falls_back,
    compare,
    fuse,
    handle_of,
    in_layouts,
    no_fallback,
    values,
)

X, Y = values(4, 5, 6), values(4, 5, 6).flip(0)

UNARY = {
    "pad": lambda x: F.pad(x, (1, 2, 0, -1, 3, 0), value=2.5),
    "pad_crop": lambda x: F.pad(x, (-1, -2)),
    "reflect": lambda x: F.pad(x, (2, 1, 1, 3), mode="reflect"),
    "reflect_one_dim": lambda x: F.pad(x, (5, 4), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2, 3, 0), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 6, 0, 2), mode="circular"),
    "flip": lambda x: x.flip(0, -1),
    "fliplr": lambda x: torch.fliplr(x) - torch.flipud(x),
    "rot90": lambda x: torch.rot90(x, 1, (0, 2)),
    "rot90_back": lambda x: torch.rot90(x, -1, (1, 2)) * 2,
    "rot180": lambda x: torch.rot90(x, 2, (0, 1)),
    "roll": lambda x: torch.roll(x, (2, -1), (1, 0)),
    "roll_read": lambda x: torch.roll(x, (-4, 1), (0, 2)) * x,
    "roll_flat": lambda x: torch.roll(x, 17),
    "roll_far": lambda x: torch.roll(x, -45, 1),
    "repeat": lambda x: x.repeat(2, 1, 3, 2),
    "tile": lambda x: torch.tile(x, (2,)),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, 3, 1),
    "repeat_interleave_flat": lambda x: torch.repeat_interleave(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "slice_scatter_itself": lambda x: torch.slice_scatter(x, x[1:4:2] * 2, 0, 0, 4, 3),
}

JOINS = {
    "cat": lambda x, y: torch.cat([x, y], 1),
    "cat_outer": lambda x, y: torch.cat([x, y]),
    "cat_read": lambda x, y: torch.cat([-x, y, x], -1) * 2,
    "cat_many": lambda x, y: torch.cat([x, y, x, y, y, x], 2) + 1,
    "cat_producers": lambda x, y: torch.cat([x * y, x - y], 1),
    "rotate_half": lambda x, y: torch.cat([-x[..., 3:], x[..., :3]], -1) * y + x,
    "stack": lambda x, y: torch.stack([x, y], 1),
    "stack_last": lambda x, y: torch.stack([x, y], -1),
    "stack_read": lambda x, y: torch.stack([x, y, x]).sum(0),
    "hstack": lambda x, y: torch.hstack([x, y]),
    "vstack": lambda x, y: torch.vstack([x, y]),
    "dstack": lambda x, y: torch.dstack([x, y]),
    "column_stack": lambda x, y: torch.column_stack([x[0, 0], y[:, 0].t()[:, :2]]),
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:2], 0, 1, 3),
    "slice_scatter_step": lambda x, y: torch.slice_scatter(x, y[:, :, :3], 2, 1, 6, 2) * 3,
    "select_scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, -2),
    "select_scatter_read": lambda x, y: torch.select_scatter(x, y[:, :, 1], 2, 0) + y,
    "diagonal_scatter": lambda x, y: torch.diagonal_scatter(x, y.diagonal(1), 1),
    "diagonal_scatter_below": lambda x, y: torch.diagonal_scatter(x, y.diagonal(-1, 2, 0), -1, 2, 0),
}


@pytest.mark.sampled(13, also=("repeat_interleave_flat", "rot180"))
@pytest.mark.parametrize("name", UNARY)
def test_one_tensor(name):
    cases = in_layouts(values(2, 8, 3, 5) if name == "pixel_shuffle" else X, gaps="scatter" not in name)
    check_each(UNARY[name], cases)


def test_results_with_gaps_in_memory_are_left_to_aten():
    x = values(4, 9)[:, 1:7]
    check_falls_back(lambda x: torch.select_scatter(x, x[0] * 2, 0, 1), x, reason="not dense")


@pytest.mark.sampled(12, also=("hstack",))
@pytest.mark.parametrize("name", JOINS)
def test_two_tensors(name):
    gaps = "scatter" not in name or "read" in name  # the result has its argument's strides, with their gaps
    check_each(JOINS[name], in_layouts(X, Y, gaps=gaps))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_dtypes(dtype):
    x, y = values(3, 4, dtype=dtype), values(3, 4, dtype=dtype).flip(1)

    def fn(x, y):
        padded = F.pad(x, (1, 1), value=1)
        return torch.cat([x, y], 1), torch.stack([x, y], 2), padded, torch.roll(x, 1, 0), torch.cat([x, y]).flip(1)

    check(fn, x, y)


def test_dtypes_are_promoted():
    args = values(2, 3), values(2, 3, dtype=torch.int32), values(2, 3, dtype=torch.float64)
    check(lambda a, b, c: (torch.cat([a, b]), torch.cat([b, a, c], 1), torch.stack([b, a])), *args)
    half = values(2, 3, dtype=torch.bfloat16)
    check(lambda a, b: torch.cat([a, b]) * 2, half, torch.full((2, 3), 1 / 3))


def test_channels_last_is_kept():
    x = values(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = values(2, 2, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x, y: (torch.cat([x, y], 1), F.pad(x, (1, 1, 2, 0)), torch.cat([x * 2, y], 1) + 1), x, y)


PADS = [(1, 1, 1, 1), (4, 3, 2, 1), (0, 0, 3, 4), (2, 0, 0, 0), (6, 6, 4, 4)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_pads_of_images(mode, last):
    """By themselves, of what is computed, and read by neighbours."""
    x = values(2, 3, 5, 7)
    x = x.to(memory_format=torch.channels_last) if last else x
    pads = [*PADS, *([] if mode == "circular" else [(-1, 2, -2, 1), (2, -1, 0, 3)])]
    padded = lambda x: [F.pad(x, p, mode=mode) for p in pads]  # noqa: E731
    check(padded, x)
    check(lambda x: [y[..., 1:, :-1] - y[..., :-1, 1:] for y in padded(torch.relu(x))], x)


def test_rolls_of_images():
    x = values(2, 3, 5, 7)
    turns = [((1,), (1,)), ((2, -3), (2, 3)), ((4, 6), (2, 3)), ((0, 5), (1, 2)), ((-9, 8), (2, 3))]
    turns += [((1, 2, 3), (3, 2, 3))]
    rolled = lambda x: [torch.roll(x, by, dims) for by, dims in turns]  # noqa: E731
    check(rolled, x)
    check(lambda x: [torch.relu(y) + x for y in rolled(x * 2)], x)


def test_strides_of_nothing():
    nothing = torch.empty(3, 0, 2)
    assert fuse(lambda x: torch.cat([x, x], 0))[0](nothing).stride() == (2, 2, 1)


def test_small_sizes():
    empty, one, row = torch.empty(0), torch.ones(1), values(5)
    check(lambda a, b, c: (torch.cat([a, b, c]), torch.cat([b, c]) + 1, torch.stack([b, b])), empty, one, row)
    nothing = torch.empty(3, 0)
    check(lambda x, y: (torch.cat([x, y], 1), torch.roll(x, 1, 1), x.flip(1), x.repeat(2, 2)), nothing, values(3, 2))
    number = torch.tensor(3.0)
    check(lambda x: (torch.stack([x, x]), x.repeat(3), x.flip(()) + 1, torch.hstack([x, x])), number)
    deep = values(1, 2, 1, 3, 1, 2, 2, 1)
    check(lambda x: (torch.cat([x, x], 3), torch.roll(x, 1, 5), x.flip(1, 3), x.repeat(1, 2, 1, 1, 1, 1, 2, 1)), deep)


def test_other_sizes_need_no_other_kernel():
    def fn(x, y):
        return torch.cat([x, y], 1) * 2, torch.roll(y, 1, 0), F.pad(x, (1, 2)), x.repeat(2, 1)

    handle, spec = fuse(fn)
    for rows, a, b in ((3, 4, 6), (5, 7, 2), (2, 31, 70), (17, 3, 9)):
        x, y = values(rows, a), values(rows, b)
        compare(handle(x, y), fn(x, y))
    no_fallback(spec)
    assert len(spec.store.kernels) == 1


def test_pieces_fuse_with_what_makes_and_reads_them():
    check(lambda x, y: torch.cat([-x[:, 3:], x[:, :3]], 1) * y + x, values(4, 6), values(4, 6), kernels=1)
    check(lambda x, y: torch.cat([x * 2, torch.relu(y)], 0), values(4, 6), values(5, 6), kernels=2)


def test_what_eager_refuses():
    x = values(3, 4)
    for fn in (lambda x: F.pad(x, (4, 0), mode="reflect"), lambda x: torch.cat([x, x.t()])):
        with pytest.raises(RuntimeError) as eager:
            fn(x)
        with pytest.raises(RuntimeError) as fused:
            check(fn, x)
        assert str(eager.value) == str(fused.value)


def test_repetitions_that_a_tensor_holds():
    check_falls_back(
        lambda x, n: torch.repeat_interleave(x, n, 0), values(3, 2), torch.tensor([1, 0, 2]), reason="repeat_interleave"
    )


def test_tensors_of_several_ranks_raise_as_in_eager() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x + 1, (x + 2).squeeze(0)), -1)

    handle = handle_of(function)
    torch.testing.assert_close(handle(torch.ones(0, 3)), function(torch.ones(0, 3)))
    with pytest.raises(RuntimeError, match="same number of dimensions"):
        handle(torch.ones(1, 3))


@pytest.mark.parametrize("first", [1, 20])
def test_a_repeated_dim_of_one_element_has_no_loop_of_its_own(first):
    """A loop over one element in each turn took 20 times eager's time; other sizes have another kernel."""
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.ops.aten.repeat.default(x, [2, 30])))
    for n in (first, 21 - first):
        x = torch.randn(40, n)
        torch.testing.assert_close(fuser.run_fusion(key, [x])[0], x.repeat(2, 30), rtol=0, atol=0)
    kernels = interface.REGISTRY.find(key).spec.store.kernels
    assert sorted("x0_1" in k.source for k in kernels) == [False, True]
