"""Large calls on the CPU have the kernels that they would choose, whatever was called before; small ones share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fuser
from fuser import compiler, interface, pipeline
from fuser.canonical import canonicalize
from fuser.debug.guarding import refusal_of

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "sums": lambda x: ((x * 2).sum(0), (x * 3).sum(1)),
    "bias": lambda x: (x + x[0]).relu() * 2,
    "reversed": lambda x: x.flip(1) + 1,
    "padded": lambda x: torch.nn.functional.pad(x, (1, 2, 1, 0)) * 2,
    "scan": lambda x: x.cumsum(0),
    "largest": lambda x: x.argmax(0),
}
# Sizes, and the most kernels behind the call: from 4096 elements on rows of 8, 9 and 32 elements begin other classes,
# and of 128 if they are reduced.
CALLS = ((64, 1024), 1), ((40, 3), 1), ((200, 9), 1), ((2000, 3), 2), ((2000, 9), 3), ((300, 90), 4), ((2000, 4), 5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_of_classes_of_rows(name: str) -> None:
    f = FUNCTIONS[name]
    key = fuser.register_fusion(torch.fx.symbolic_trace(f))
    for size, most in CALLS:
        x = torch.randn(size)
        want, got = f(x), fuser.run_fusion(key, (x,))
        for w, g in zip(torch.utils._pytree.tree_leaves(want), got, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-3)
        assert len(interface.kernel_spec(key).store.kernels) <= most
    assert len(interface.kernel_spec(key).store.kernels) > 1


def _generated(f: Callable[..., Any], calls: Sequence[tuple[torch.Tensor, ...]]) -> list[Any]:
    graph = canonicalize(torch.fx.symbolic_trace(f)).graph
    backend = compiler.find_backend("cpu")
    return [pipeline.generate(graph, args, backend) for args in calls]


def _takes(source: Any, args: tuple[torch.Tensor, ...]) -> bool:
    return refusal_of(source.program, [(x.dtype, "cpu", tuple(x.shape), x.stride()) for x in args]) is None


def _rows(size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return (torch.empty(size),)


def _columns(size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return (torch.empty(size[::-1]).t(),)


def _indexed(size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return torch.empty(size), torch.zeros(size[0], dtype=torch.int64)


SIZES = (64, 1024), (50000, 3), (20000, 8), (15000, 12), (6000, 20)
REDUCED = {"count", "any", "deviations", "norm", "place", "bfloat16"}  # (1000, 100) has a class of its own
SERVED: dict[str, tuple[Callable[..., Any], Callable[..., tuple[torch.Tensor, ...]]]] = {
    "scan of rows": (lambda x: x.cumsum(1), _rows),
    "scan of columns": (lambda x: x.cumsum(0), _rows),
    "largest of a scan": (lambda x: x.cummax(1)[0], _rows),
    "added rows": (lambda x, i: torch.zeros_like(x).index_add(0, i, x), _indexed),
    "gate": (lambda x: torch.nn.functional.glu(torch.cat([x, x], 1), 1), _rows),
    "count": (lambda x: (x > 0).sum(1), _rows),
    "any": (lambda x: (x > 2).any(1), _rows),
    "all of columns": (lambda x: (x > 0).all(0), _rows),
    "deviations": (lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), _rows),
    "turned": (lambda x: (x * 2).contiguous(), _columns),
    "norm": (lambda x: torch.nn.functional.layer_norm(x, (x.shape[1],)), _rows),
    "place": (lambda x: x.argmax(1), _rows),
    "bfloat16": (lambda x: torch.nn.functional.layer_norm(x.bfloat16(), (x.shape[1],)), _rows),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_kernel_takes_large_calls_only_if_it_is_the_one_they_would_choose(name: str) -> None:
    f, made = SERVED[name]
    sizes = [*SIZES, *([(1000, 100)] if name in REDUCED else [])]
    calls = [made(size) for size in sizes]
    sources = _generated(f, calls)
    for first, source in zip(sizes, sources, strict=True):
        for size, args, own in zip(sizes, calls, sources, strict=True):
            assert source.text == own.text or not _takes(source, args), f"{size} runs the kernel of {first}"


FEW = {
    "heads": (lambda x: (x + 1).transpose(0, 1).contiguous(), (4, 5, 6), (2000, 12, 6)),
    "scaled": (lambda x: x * x[0, :, :1] + x[0, :, 1:2], (4, 5, 6), (2000, 12, 6)),
    "every second": (lambda x: x[:, ::2] + 1, (20000, 8), (50000, 3)),
    "images": (lambda x: (x + 1).transpose(1, 2).contiguous(), (2000, 4, 5, 5), (16, 256, 7, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_short_rows_that_stay_a_loop_in_few_iterations_are_written_out_in_many(name: str) -> None:
    """The kernel of the first call has a loop of 4 to 6 iterations, which the second call would run many times."""
    f, few, many = FEW[name]
    calls = [(torch.empty(size),) for size in (few, many)]
    loop, written = _generated(f, calls)
    assert loop.text != written.text and not _takes(loop, calls[1])


@pytest.mark.parametrize("f", [lambda x: (x * 2).sum(0), lambda x: x.mean(0)])
def test_blocks_of_columns_are_set_and_flushed_as_far_as_they_are_taken(f: Callable[..., Any]) -> None:
    """A block is as wide as the first call's columns; loops over all its lanes took most of the time of few columns."""
    (source,) = _generated(f, [(torch.empty(64, 1024),)])
    width = int(re.search(r"float acc0\[(\d+)\]", source.text)[1])
    assert width > 64 and f"l < {width}" not in source.text and "l < (count + 15) / 16 * 16" in source.text


@pytest.mark.parametrize("dim", [None, 0])
def test_reductions_to_few_results_are_split_whatever_was_called_before(dim: int | None) -> None:
    """The kernel of a small call would leave a large one to one thread."""
    few, many = (torch.empty(8, 64),), (torch.empty(40000, 64),)
    small, large = _generated(lambda x: (x * x).sum(dim), [few, many])
    assert "_partial" not in small.text and "_partial" in large.text
    assert not _takes(small, many) and _takes(large, few)
