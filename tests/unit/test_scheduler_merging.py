"""Kernels that read the same tensors become one, also where the loops that start them have no tensor in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import config
from fuser.lowering.graph import lower_graph
from fuser.scheduler.schedule import Schedule, schedule
from tests.backend.fused import check, fuse
from tests.backend.planned import on_device

N = 300
MAPS, ROWS = (4, 16, 12, 12), (256, N)


def normed(x: torch.Tensor, dims: Any) -> torch.Tensor:
    return (x - x.mean(dims, keepdim=True)) / x.std(dims, keepdim=True)


def rms_gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    scaled = g * 1.5
    return r * (scaled - x * r * r * (scaled * x).mean(-1, keepdim=True))


def similarity(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of windows as large as the image, by structure."""
    a, b, dims = x.mean((2, 3)), y.mean((2, 3)), (2, 3)
    both = (x * y).mean(dims) - a * b
    return (2 * a * b + 0.01) * (2 * both + 0.03) / ((a * a + b * b + 0.01) * (x.var(dims) + y.var(dims) + 0.03))


ONE_KERNEL: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "cosine": (lambda x, y: F.cosine_similarity(x, y, dim=-1), ROWS),
    "cosine of norms": (lambda x, y: (F.normalize(x) * F.normalize(y)).sum(-1), ROWS),
    "two norms": (lambda x, y: F.layer_norm(x, (N,)) + F.layer_norm(y, (N,)), ROWS),
    "distillation": (lambda x, y: (x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum(-1), ROWS),
    "mixture": (lambda x, y: ((x.softmax(-1) + y.softmax(-1)) / 2).log().mul(x.softmax(-1)).sum(-1), ROWS),
    "correlation": (lambda x, y: (normed(x, -1) * normed(y, -1)).sum(-1), ROWS),
    "correlation of columns": (lambda x, y: (normed(x, 0) * normed(y, 0)).sum(0), ROWS),
    "gradient of an rms norm": (rms_gradient, ROWS),
    "similarity of images": (similarity, MAPS),
}


def scheduled(fn: Callable[..., Any], shape: tuple[int, ...], device: str) -> Schedule:
    args = [on_device(torch.empty(shape), device) for _ in range(2)]
    return schedule(lower_graph(fuse(fn)[1].graph, args, config.numerics), config.max_body_rows)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_what_reads_the_same_tensors_is_one_kernel(name: str, device: str) -> None:
    fn, shape = ONE_KERNEL[name]
    found = scheduled(fn, shape, device)
    assert len(found.plans) == 1, found.reasons
    assert not found.reasons  # why its loops were kept apart at first is no longer so
    (plan,) = found.plans
    reduced = {a.sym for a in plan.reduced_axes}
    read = [r.attr[0] for r, syms in zip(plan.rows, plan.varies) if r.op == "load" and syms & reduced]
    assert len(read) == len(set(read)) == 2, read


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_its_results_are_right(name: str) -> None:
    fn, shape = ONE_KERNEL[name]
    check(fn, torch.randn(shape), torch.randn(shape), tol={"rtol": 2e-5, "atol": 2e-5}, kernels=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_read_again_and_again_lies_as_its_readers_go(device: str) -> None:
    """A bias of each head, looked up once for all windows, has its heads outermost."""

    def scores(x: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        bias = table[index.view(-1)].view(49, 49, 3).permute(2, 0, 1)
        return torch.softmax(x + bias, -1)

    shapes = (torch.empty(64, 3, 49, 49), torch.empty(169, 3), torch.empty(49, 49, dtype=torch.int64))
    graph = fuse(scores)[1].graph
    found = schedule(
        lower_graph(graph, [on_device(t, device) for t in shapes], config.numerics), config.max_body_rows
    )
    if device == "cpu":
        assert len(found.plans) == 2 and any(b.order == (1, 0) for b in found.buffers), found.buffers
    g = torch.Generator().manual_seed(0)
    x, table = torch.randn(64, 3, 49, 49, generator=g), torch.randn(169, 3, generator=g)
    index = torch.randint(0, 169, (49, 49), generator=g)
    check(scores, x, table, index, tol={"rtol": 2e-6, "atol": 2e-6})


def test_a_small_tensor_in_common_makes_no_one_kernel() -> None:
    x, w = (64, 512), (512,)
    args = [on_device(torch.empty(s), "cuda") for s in (x, x, w)]
    graph = fuse(lambda x, y, w: (F.rms_norm(x, (512,), w), F.rms_norm(y, (512,), w)))[1].graph
    assert len(schedule(lower_graph(graph, args, config.numerics), config.max_body_rows).plans) == 2


def test_a_kernel_between_two_that_needs_the_first_and_is_needed_by_the_second_keeps_them_apart() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = x.square().sum(-1, keepdim=True)
        other = (y * first.sum()).amax(0)
        return x * other.sum() + first

    check(function, torch.rand(64, 512), torch.rand(64, 512), tol={"rtol": 2e-5, "atol": 1e-4})


def test_a_buffer_is_filled_before_it_is_changed() -> None:
    """The copy that a scatter starts from reads what another loop reads, but cannot run as late as that."""
    x = torch.tensor([1, 0, 1, 2])
    check(lambda x: (torch.index_add(x, -1, x, x), torch.remainder(x, 3)), x)
