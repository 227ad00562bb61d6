"""CUDA graphs around compiled callables: results as without, never overwritten while alive, bounded recordings.

Without a GPU, recordings are emulated (`emulated_graphs`).
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_graphs import emulate

from fuser import config, debug
from fuser.cuda import graphs as graphs_module
from fuser.cuda.graphs import MOST_RECORDINGS, Recorded
from fuser.frontends.dynamo import fuser_backend

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.cuda] if HAS_GPU else []  # on a GPU these are tests of it


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(11)
    if not HAS_GPU and not request.node.get_closest_marker("real"):
        emulate(monkeypatch)


def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.relu(x @ w)
    return y, y.sum(-1)


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(64, 32, device=DEVICE), requires_grad=False)


def rows(n: int = 16) -> torch.Tensor:
    return torch.randn(n, 64, device=DEVICE)


@pytest.mark.real
def test_without_a_gpu_it_is_the_function_itself() -> None:
    recorded = Recorded(step)
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    torch.testing.assert_close(recorded(x, w), step(x, w))
    assert recorded.n_recordings == 0
    assert recorded.reasons == {"not all inputs are on a CUDA device": 1}
    assert "1 calls without, because not all inputs are on a CUDA device" in str(recorded)


def test_results_stay_right_while_alive() -> None:
    recorded, w, kept = Recorded(step), weight(), []
    for _ in range(6):
        x = rows()
        kept.append((recorded(x, w), step(x, w)))
    for mine, right in kept:
        torch.testing.assert_close(mine, right)
    assert recorded.n_recordings == 5


def test_results_of_one_class_survive_another() -> None:
    """Recordings share no memory: the temporaries of one may not lie where another's results are."""
    recorded, w = Recorded(step), weight()
    for _ in range(2):
        for n in (16, 48):
            recorded(rows(n), w)
    x = rows(48)
    mine = recorded(x, w)
    for _ in range(3):
        recorded(rows(16), w)
    torch.testing.assert_close(mine, step(x, w))


def test_dead_results_are_used_again() -> None:
    recorded, w, out = Recorded(step), weight(), None
    for _ in range(20):
        x = rows()
        out = recorded(x, w)
        torch.testing.assert_close(out, step(x, w))
    assert recorded.n_recordings <= 2 and recorded.n_replays == 19 and out is not None


def test_a_view_of_a_result_keeps_it_alive() -> None:
    recorded, w, x = Recorded(step), weight(), rows()
    recorded(x, w)
    part = recorded(x, w)[0][3]
    right = part.clone()
    recorded(rows(), w)
    assert torch.equal(part, right)


def test_nothing_is_recorded_while_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording would keep ATen's kernels for good."""
    recorded, w, x = Recorded(step), weight(), rows()
    with config.override(compile_mode="background"):
        monkeypatch.setattr(graphs_module, "COMPILERS", SimpleNamespace(busy=1))
        for _ in range(3):
            torch.testing.assert_close(recorded(x, w), step(x, w))
        assert recorded.n_recordings == 0
        monkeypatch.setattr(graphs_module, "COMPILERS", SimpleNamespace(busy=0))
        torch.testing.assert_close(recorded(x, w), step(x, w))
    assert recorded.n_recordings == 1


def test_results_as_inputs() -> None:
    """A loop that feeds a result back: it is not overwritten before it is read."""
    recorded = Recorded(lambda x: x * 2 + 1)
    x = right = torch.ones(8, device=DEVICE)
    for _ in range(6):
        x, right = recorded(x), right * 2 + 1
        torch.testing.assert_close(x, right)
    assert recorded.n_recordings == 2


def count(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(x)
    return state * 2


def test_written_inputs_are_written() -> None:
    recorded = Recorded(count)
    state = torch.zeros(8, device=DEVICE)
    for n in range(1, 6):
        out = recorded(torch.ones(8, device=DEVICE), state)
        assert state.tolist() == [n] * 8 and out.tolist() == [2 * n] * 8
    assert recorded.n_recordings >= 1
    other = torch.full((8,), 10.0, device=DEVICE)
    assert recorded(torch.ones(8, device=DEVICE), other).tolist() == [22.0] * 8
    assert other.tolist() == [11.0] * 8 and state.tolist() == [5.0] * 8


def test_written_memory_that_is_shared_is_not_recorded() -> None:
    recorded = Recorded(count)
    state = torch.zeros(8, device=DEVICE)
    for _ in range(4):
        assert recorded(state, state).tolist() == [0.0] * 8
        state.fill_(0)
    assert recorded.n_recordings == 0 and any("shares memory" in reason for reason in recorded.reasons)


def test_many_sizes_are_bounded() -> None:
    recorded, w = Recorded(step), weight()
    for n in range(1, 20):
        for _ in range(3):
            x = rows(n)
            torch.testing.assert_close(recorded(x, w), step(x, w))
    assert recorded.n_recordings == MOST_RECORDINGS and any("recordings already" in r for r in recorded.reasons)


@pytest.mark.cuda
def test_memory_is_flat_over_many_sizes() -> None:
    recorded, w = Recorded(step), weight()
    for n in range(1, 30):
        for _ in range(3):
            recorded(rows(n), w)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        for n in range(1, 60):
            recorded(rows(n), w)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert after[0] <= before[0] and after[1] <= before[1] + (4 << 20)


@pytest.mark.cuda
def test_what_cannot_be_recorded_still_runs() -> None:
    recorded = Recorded(lambda x: x * float(x.sum().item()))
    for _ in range(3):
        x = torch.randn(8, device="cuda")
        torch.testing.assert_close(recorded(x), x * x.sum())
    assert recorded.n_recordings == 0 and any("cannot be recorded" in r for r in recorded.reasons)


def test_views_of_inputs_are_not_recorded() -> None:
    recorded = Recorded(lambda x: (x.t(), x + 1))
    for _ in range(3):
        x = rows()
        view, more = recorded(x)
        assert view.data_ptr() == x.data_ptr() and torch.equal(more, x + 1)
    assert recorded.n_recordings == 0 and any("view of an input" in r for r in recorded.reasons)


# -- compiled ---------------------------------------------------------------------------------------------------------
def compiled(fn: Any) -> Any:
    return torch.compile(fn, backend=lambda gm, inputs: fuser_backend(gm, inputs, mode="reduce-overhead"))


def alive(name: str) -> list[Recorded]:
    """The recorded callables of that name that were replayed."""
    gc.collect()
    return [r for r in debug.recorded() if r.name == name and r.n_replays]


def test_compiled_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).to(DEVICE).eval()
    run = compiled(model)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(8, 64, device=DEVICE)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert alive("inference")


def test_compiled_function_that_writes() -> None:
    run = compiled(count)
    state = torch.zeros(8, device=DEVICE)
    with torch.no_grad():
        for n in range(1, 6):
            out = run(torch.ones(8, device=DEVICE), state)
            assert state.tolist() == [n] * 8 and out.tolist() == [2 * n] * 8


class Block(torch.nn.Module):
    """A little of everything: matmuls, norms, a residual, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.norm, self.batch = torch.nn.LayerNorm(32), torch.nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def trained(model: torch.nn.Module, run: Any, keep: bool, set_to_none: bool) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    losses, kept = [], []
    for _ in range(7):
        x = torch.randn(16, 32, generator=generator).to(DEVICE)
        out = run(x)
        loss = (out * out.detach().roll(1, 0)).mean() + out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item())
        if keep:
            kept.append((out, out.detach().clone()))
    assert all(torch.equal(mine.detach(), right) for mine, right in kept)
    return losses


@pytest.mark.parametrize(("keep", "set_to_none"), ((False, True), (True, False)))
def test_training(keep: bool, set_to_none: bool) -> None:
    models = [Block().to(DEVICE) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    eager = trained(models[0], models[0], keep, set_to_none)
    mine = trained(models[1], compiled(models[1]), keep, set_to_none)
    assert mine == pytest.approx(eager, rel=1e-4)
    for (name, a), b in zip(models[0].state_dict().items(), models[1].state_dict().values()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert alive("forward") and alive("backward")


@pytest.mark.skipif(not HAS_GPU, reason="an emulated recording draws numbers when it is made, which moves the seed on")
def test_replays_draw_new_random_numbers_that_the_seed_repeats() -> None:
    run = compiled(lambda x: torch.nn.functional.dropout(x * 2, 0.25, True))
    x = torch.ones(64, 96, device=DEVICE, requires_grad=True)

    def masks(n: int) -> list[torch.Tensor]:
        found = []
        for _ in range(n):
            y = run(x)
            (grad,) = torch.autograd.grad(y.sum(), x)
            kept = y.detach() != 0
            torch.testing.assert_close(grad, kept * (2 / 0.75))  # the backward's mask is the forward's
            found.append(kept.clone())
            del y, grad
        return found

    masks(5)
    torch.manual_seed(5)
    first = masks(4)
    torch.manual_seed(5)
    again = masks(4)
    assert all(map(torch.equal, first, again))
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])
    assert all(0.7 < kept.float().mean() < 0.8 for kept in first)
    assert alive("forward") and alive("backward")


def test_gradients_that_add_up() -> None:
    torch.manual_seed(1)
    model = Block().to(DEVICE)
    run = compiled(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    xs = [torch.randn(16, 32, device=DEVICE) for _ in range(6)]
    for x in xs:
        run(x).square().mean().backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.load_state_dict(state)
    model.zero_grad()
    for x in xs:
        model(x).square().mean().backward()
    for a, b in zip(mine, model.parameters()):
        torch.testing.assert_close(a, b.grad, rtol=1e-3, atol=1e-5)


def test_two_forwards_before_their_backwards() -> None:
    model = Block().to(DEVICE)
    run = compiled(model)
    for _ in range(5):
        a, b = torch.randn(16, 32, device=DEVICE), torch.randn(16, 32, device=DEVICE)
        first, second = run(a), run(b)
        grads = torch.autograd.grad(second.square().mean() + first.mean(), list(model.parameters()))
        with torch.no_grad():
            for p in model.parameters():
                p.grad = None
        right = torch.autograd.grad(model(b).square().mean() + model(a).mean(), list(model.parameters()))
        for mine, theirs in zip(grads, right):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
