"""CUDA graphs around compiled callables: results as without, never overwritten while alive, bounded recordings."""

from __future__ import annotations

import pytest
import torch

from fuser.cuda.graphs import MOST_RECORDINGS, Recorded


def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.relu(x @ w)
    return y, y.sum(-1)


def test_without_a_gpu_it_is_the_function_itself() -> None:
    recorded = Recorded(step)
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    torch.testing.assert_close(recorded(x, w), step(x, w))
    assert recorded.n_recordings == 0
    assert recorded.reasons == {"not all inputs are on a CUDA device": 1}


@pytest.mark.cuda
def test_results_stay_right_while_alive() -> None:
    recorded = Recorded(step)
    w = torch.nn.Parameter(torch.randn(64, 32, device="cuda"), requires_grad=False)
    kept = []
    for _ in range(6):
        x = torch.randn(16, 64, device="cuda")
        kept.append((recorded(x, w), step(x, w)))
    for mine, right in kept:
        torch.testing.assert_close(mine, right)
    assert recorded.n_recordings >= 2


@pytest.mark.cuda
def test_dead_results_are_used_again() -> None:
    recorded = Recorded(step)
    w = torch.nn.Parameter(torch.randn(64, 32, device="cuda"), requires_grad=False)
    out = None
    for _ in range(20):
        x = torch.randn(16, 64, device="cuda")
        out = recorded(x, w)
        torch.testing.assert_close(out, step(x, w))
    assert recorded.n_recordings <= 2 and recorded.n_replays == 19 and out is not None


@pytest.mark.cuda
def test_a_view_of_a_result_keeps_it_alive() -> None:
    recorded = Recorded(step)
    w = torch.nn.Parameter(torch.randn(64, 32, device="cuda"), requires_grad=False)
    x = torch.randn(16, 64, device="cuda")
    recorded(x, w)
    part = recorded(x, w)[0][3]
    right = part.clone()
    recorded(torch.randn(16, 64, device="cuda"), w)
    assert torch.equal(part, right)


@pytest.mark.cuda
def test_written_inputs_are_written() -> None:
    def count(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2

    recorded = Recorded(count)
    state = torch.zeros(8, device="cuda")
    for n in range(1, 6):
        out = recorded(torch.ones(8, device="cuda"), state)
        assert state.tolist() == [n] * 8 and out.tolist() == [2 * n] * 8
    assert recorded.n_recordings >= 1
    other = torch.full((8,), 10.0, device="cuda")
    assert recorded(torch.ones(8, device="cuda"), other).tolist() == [22.0] * 8
    assert other.tolist() == [11.0] * 8 and state.tolist() == [5.0] * 8


@pytest.mark.cuda
def test_many_sizes_are_bounded() -> None:
    recorded = Recorded(step)
    w = torch.nn.Parameter(torch.randn(64, 32, device="cuda"), requires_grad=False)
    for n in range(1, 40):
        for _ in range(3):
            x = torch.randn(n, 64, device="cuda")
            torch.testing.assert_close(recorded(x, w), step(x, w))
    assert recorded.n_recordings == MOST_RECORDINGS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for n in range(1, 40):
        recorded(torch.randn(n, 64, device="cuda"), w)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.cuda
def test_what_cannot_be_recorded_still_runs() -> None:
    recorded = Recorded(lambda x: x * float(x.sum().item()))
    for _ in range(3):
        x = torch.randn(8, device="cuda")
        torch.testing.assert_close(recorded(x), x * x.sum())
    assert recorded.n_recordings == 0 and any("cannot be recorded" in r for r in recorded.reasons)


@pytest.mark.cuda
def test_compiled_model() -> None:
    from fuser.frontends.dynamo import fuser_backend

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).cuda().eval()
    compiled = torch.compile(model, backend=lambda gm, inputs: fuser_backend(gm, inputs, mode="reduce-overhead"))
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(8, 64, device="cuda")
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
