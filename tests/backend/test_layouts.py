"""Layouts: the same functions over every way in which tensors lie in memory, strides of the results included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fuser import debug, debug_get_fused_kernel_code, fusion_handle, register_fusion
from tests.backend.support import check_all, fused, graph_of

# name: (size, how a contiguous tensor of that size becomes what is tested)
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "contiguous": ((3, 4, 37), lambda t: t),
    "transposed": ((5, 33), lambda t: t.t()),
    "permuted": ((3, 4, 5, 17), lambda t: t.permute(2, 0, 3, 1)),
    "sliced": ((9, 40), lambda t: t[1::2, 3:35:2]),
    "expanded": ((4, 1, 19), lambda t: t.expand(4, 6, 19)),
    "expanded_all": ((1,), lambda t: t.expand(7, 5)),
    "zero_dim": ((), lambda t: t),
    "size_0": ((3, 0, 5), lambda t: t),
    "size_1": ((1, 1), lambda t: t),
    "channels_last": ((2, 5, 4, 3), lambda t: t.contiguous(memory_format=torch.channels_last)),
    "channels_last_3d": ((2, 3, 2, 4, 3), lambda t: t.contiguous(memory_format=torch.channels_last_3d)),
    "eight_dims": ((2, 1, 3, 2, 1, 2, 3, 5), lambda t: t.permute(7, 1, 0, 6, 3, 2, 5, 4)),
    "diagonal": ((6, 6, 11), lambda t: t.diagonal(0, 0, 1)),
    "overlapping": ((40,), lambda t: t.unfold(0, 8, 3)),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "unary": lambda a, b: a.neg() * 2,
    "both": lambda a, b: a + b,
    "mixed": lambda a, b: (a - b).abs() * b.double(),
    "compare": lambda a, b: a > b,
    "last": lambda a, b: a + b.mean(-1, keepdim=True),
    "where": lambda a, b: torch.where(a > 0, a, b),
}


def tensor(layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size, make = LAYOUTS[layout]
    return make((torch.randn(size) * 3).to(dtype))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_like_operands(layout):
    check_all(list(FUNCTIONS), list(FUNCTIONS.values()), tensor(layout), tensor(layout), floor=True)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [name for name, (size, _) in LAYOUTS.items() if size])
def test_beside_a_contiguous_operand(layout):
    """One operand strange, one contiguous, one that broadcasts, one without dims."""
    a = tensor(layout)
    b, row, point = torch.randn(a.shape), torch.randn(a.shape[-1:]), torch.tensor(2.5)
    names = ["ab", "ba", "row", "column", "point"]
    functions = [
        lambda a, b, row, point: a * b, lambda a, b, row, point: b - a, lambda a, b, row, point: (a + row).relu(),
        lambda a, b, row, point: a + b.mean(-1, keepdim=True), lambda a, b, row, point: a * point,
    ]  # fmt: skip
    check_all(names, functions, a, b, row, point, floor=True)


@pytest.mark.sampled(9, also=("torch.float16-channels_last",))
@pytest.mark.parametrize("layout", ["transposed", "sliced", "channels_last", "expanded", "size_0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_layouts_of_other_dtypes(layout, dtype):
    functions = [lambda a, b: a * b, lambda a, b: a == b, lambda a, b: a.to(torch.float32) + b]
    check_all(["mul", "eq", "cast"], functions, tensor(layout, dtype), tensor(layout, dtype))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("layout", [n for n, (size, _) in LAYOUTS.items() if n != "size_0"])
def test_reductions_of_layouts(layout):
    a = tensor(layout)
    functions: dict[str, Callable[..., Any]] = {"all": lambda a: a.sum(), "amax": lambda a: a.amax()}
    for d in range(min(a.dim(), 4)):
        functions[f"sum{d}"] = lambda a, d=d: a.sum(d)
        functions[f"argmax{d}"] = lambda a, d=d: a.argmax(d, keepdim=True)
    if a.dim() > 2:
        functions["mean02"] = lambda a: a.mean((0, 2))
    # A sum of n numbers of size 3 is as exact as a number of size 3 sqrt(n) can be.
    check_all(list(functions), list(functions.values()), a, floor=3 * math.sqrt(max(a.numel(), 1)), slack=2)


def test_one_kernel_for_all_sizes():
    """Sizes, 0 and 1 among them, go to the kernel of their class."""
    graph = graph_of([lambda a, b: (a + b).relu(), lambda a, b: a.sum(1)], 2)
    key = register_fusion(graph)
    for n, m in [(3, 5), (1, 5), (4, 1), (1, 1), (0, 3), (3, 0), (30, 129)]:
        a, b = torch.randn(n, m), torch.randn(n, m)
        out = fused(graph, [a, b])
        assert torch.equal(out[0], (a + b).relu())
        torch.testing.assert_close(out[1], a.sum(1))
    assert debug.report([key]).kernels == 1


def test_the_order_of_dims_in_memory_is_part_of_the_class():
    """A kernel made for one order of strides does not take another: results lie as eager's do."""
    graph = graph_of([lambda a: a * 2], 1)
    for a in (torch.randn(9, 40)[::2, ::2], torch.randn(40, 9)[::2, ::2].t(), torch.randn(9, 9, 40).diagonal()):
        assert fused(graph, [a])[0].stride() == (a * 2).stride()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64], ids=str)
def test_pixels_become_planes(dtype):
    """Rows of a few channels are taken apart, whole ones and parts of them, up to the last element of memory."""

    def planes(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 1).contiguous().float() / 255 - b[:, None]

    graph = graph_of([planes], 2)
    for channels, pixels in [(2, 300), (3, 129), (4, 128), (5, 131), (3, 1), (16, 40)]:
        x, b = (torch.rand(2, pixels, channels) * 255).to(dtype), torch.randn(channels)
        assert torch.equal(fused(graph, [x, b])[0], planes(x, b))
        part = (torch.rand(2, pixels, channels + 1) * 255).to(dtype)[:, :, 1:]
        assert torch.equal(fused(graph, [part, b])[0], planes(part, b))
    assert "apart_u" in debug_get_fused_kernel_code(graph, [torch.ones(2, 300, 3, dtype=dtype), torch.ones(3)])


def test_an_intermediate_has_the_order_of_the_result_that_reads_it_many_times():
    """Each element of an enlarged image reads an activation; in another order both kernels would transpose."""
    last = torch.channels_last
    x = torch.linspace(-3, 3, 2 * 24 * 10 * 12).reshape(2, 24, 10, 12).contiguous(memory_format=last)
    graph = make_fx(lambda x: torch.ops.aten.upsample_nearest2d(F.gelu(x), [20, 24], 2.0, 2.0))(x)
    key = register_fusion(graph)
    got, want = fusion_handle(key)(x), graph(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got.stride() == want.stride() and "transpose_u32" not in debug_get_fused_kernel_code(graph, [x])
