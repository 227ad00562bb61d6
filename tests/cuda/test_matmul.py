"""Matmuls with what follows as one kernel: what can be joined, what compiles, and who wins the race for it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from importlib import util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_cases import Inputs
from matmul_cases import ADDMM, BF16, MATMULS, MM, with_tile
from test_cubins import usage

from benchmarks import checks
from fuser import config
from fuser.contests import records
from fuser.cuda import choices, fused_kernel, matmul
from fuser.cuda.choices import Choice
from fuser.cuda.matmul import MatmulTile
from fuser.errors import Unsupported
from fuser.frontends import matmuls
from fuser.frontends.dynamo import fuser_backend
from fuser.frontends.records import last_compilation
from fuser.runtime import launcher

WITHOUT_TRITON = pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed")
TILES = (MatmulTile(128, 128, 64, 8, 4), MatmulTile(64, 64, 64, 4, 5))


@WITHOUT_TRITON
@pytest.mark.parametrize("capability", (80, 90))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_compiles(tile: MatmulTile, capability: int, tmp_path: pathlib.Path) -> None:
    case = with_tile(MATMULS["addmm gelu bf16"], tile)
    (entry,) = fused_kernel.compile_entries(case.source(case.fake_args()), capability)
    used = usage(entry, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] * entry.threads <= 65536, used
    assert entry.threads == 32 * tile.warps and entry.shared <= (227 if capability == 90 else 163) << 10


def source(case: Any) -> str:
    return str(case.source(case.fake_args()).text)


def test_sizes_decide_about_masks() -> None:
    even, odd = source(MATMULS["mm even"]), source(MATMULS["mm relu"])
    assert "ak = tl.load(a)" in even and "& mx" not in even
    assert "other=0.0" in odd and "(k0 + k < n_k)" in odd and ", my & mx)" in odd


@pytest.mark.parametrize(
    "follow",
    (
        lambda x: torch.softmax(x, -1),
        lambda x: torch.cat((x[:, 4:], x[:, :4]), 1) * 2,
        lambda x: x + x.t(),
        lambda x: x * torch.ones(3, 1, 1),
    ),
)
def test_what_cannot_be_joined(follow: Any) -> None:
    case = dataclasses.replace(MATMULS["mm even"], follow=follow, make=lambda i: (i.normal(32, 48), i.normal(48, 32)))
    with pytest.raises(Unsupported, match="what follows"):
        case.source(case.args("cpu"))


def test_an_empty_inner_axis_is_left_to_aten() -> None:
    case = dataclasses.replace(MATMULS["mm even"], make=lambda i: (i.normal(32, 0), i.normal(0, 32)))
    with pytest.raises(Unsupported):
        case.source(case.args("cpu"))


# -- choices -------------------------------------------------------------------------------------------------------
def test_the_incumbent_stays_unless_something_is_clearly_faster() -> None:
    assert choices.decide({"aten": 100.0, "a": 98.0}, "aten").winner == "aten"
    won = choices.decide({"aten": 100.0, "a": 80.0, "b": 70.0}, "aten", [("c", "too large")])
    assert won.winner == "b" and won.times[0] == ("b", 70.0) and "1 did not compile" in won.reason


def test_choices_are_kept_on_disk(fresh_cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    name = choices.name_of("graph", (1, 2))
    assert choices.find(name) is None and name != choices.name_of("graph", (1, 3))
    made = Choice("64x64x64 warps 4 stages 5", "raced", (("64x64x64 warps 4 stages 5", 1.5), ("aten", 2.0)), "mm")
    choices.keep(name, made)
    monkeypatch.setattr(records, "_made", {})
    assert choices.find(name) == made and choices.choices() == (made,)
    (file,) = pathlib.Path(fresh_cache_dir).rglob("*.choice.json")
    file.write_text("{}")
    monkeypatch.setattr(records, "_made", {})
    assert choices.find(name) is None


# -- in compiled programs ------------------------------------------------------------------------------------------
def feed_forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.addmm(b, x, w)) @ v


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of CPU tensors are treated like those of CUDA tensors, up to the race."""
    monkeypatch.setattr(matmuls, "_is_matmul", lambda n: n.target in (MM, ADDMM) and not n.kwargs)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_a_joined_program_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    torch.manual_seed(3)
    args = [torch.randn(s) for s in ((20, 16), (16, 24), (24,), (24, 8))]
    with torch.no_grad(), config.override(linear_backend="aten"):
        out = torch.compile(feed_forward, backend=fuser_backend, options={"max_autotune": True})(*args)
    found = last_compilation()
    assert found is not None and "MATMUL" in found.source and found.groups[0].ops[0] == "aten.addmm", found
    torch.testing.assert_close(out, feed_forward(*args))


@pytest.mark.parametrize(
    "fn",
    (
        lambda x, w, b, v: (lambda y: (torch.relu(y), y))(x @ w),
        lambda x, w, b, v: (lambda y: (torch.relu(y), y @ v))(x @ w),
    ),
)
def test_matmuls_that_others_read_stay_apart(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    torch.manual_seed(3)
    args = [torch.randn(s) for s in ((20, 16), (16, 24), (24,), (24, 8))]
    with torch.no_grad(), config.override(linear_backend="aten"):
        out = torch.compile(fn, backend=fuser_backend, options={"max_autotune": True})(*args)
    assert "MATMUL" not in last_compilation().source
    torch.testing.assert_close(out, fn(*args))


def test_the_winner_runs_from_the_second_call_on(fresh_cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race is held once for a class of sizes, and in no later process; with stand-ins for kernels and clock."""
    on_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda d: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(matmuls, "_LEAST_WORK", 1)
    monkeypatch.setattr(records, "_made", {})
    ran: list[str] = []
    races: list[int] = []

    def handle(self: Any, tile: MatmulTile, args: Any) -> Any:
        return lambda *args: (ran.append(str(tile)), self.plain(*args))[1]

    def race(runs: Any, incumbent: str, failed: Any) -> Choice:
        races.append(len(runs))
        return Choice(list(runs)[1], "raced", (("aten", 2.0),))

    monkeypatch.setattr(matmuls.Raced, "_handle", handle)
    monkeypatch.setattr(choices, "race", race)

    def calls() -> None:
        torch.manual_seed(3)
        with torch.no_grad(), config.override(linear_backend="aten"):
            run = torch.compile(feed_forward, backend=fuser_backend, options={"max_autotune": True}, dynamic=True)
            for m in (20, 25, 30, 40):
                args = [torch.randn(s) for s in ((m, 16), (16, 24), (24,), (24, 8))]
                torch.testing.assert_close(run(*args), feed_forward(*args))

    calls()
    tiles = [str(matmul.candidates(m, torch.float32)[0]) for m in (20, 25, 30, 40)]
    assert ran == tiles and races == [1 + len(matmul.candidates(m, torch.float32)) for m in (20, 40)]
    assert [c.what for c in choices.choices()][0].startswith("addmm gelu of 20×16×24")
    torch._dynamo.reset()
    monkeypatch.setattr(records, "_made", {})
    calls()
    assert len(races) == 2 and ran == 2 * tiles


# -- on a GPU --------------------------------------------------------------------------------------------------------
def run(case: Any, args: tuple[Any, ...]) -> Any:
    kernel = fused_kernel.compile_source(case.source(args))
    handle = launcher.make_handle(lambda args, status: pytest.fail("the kernel does not take its own arguments"))
    handle.add_kernel(kernel.program, kernel.library)
    return handle(*args)


@pytest.mark.cuda
@pytest.mark.parametrize("tile", (MatmulTile(16, 32, 64, 4, 3), *TILES), ids=str)
@pytest.mark.parametrize("name", MATMULS)
def test_as_right_as_eager(name: str, tile: MatmulTile) -> None:
    case = with_tile(MATMULS[name], tile)
    args = case.args("cuda")
    problem = case.problem(run(case, args), args)
    assert problem is None, problem


@pytest.mark.cuda
@pytest.mark.parametrize("tile", [t for _, tiles in matmul.HALVES for t in tiles], ids=str)
def test_every_candidate(tile: MatmulTile) -> None:
    case = with_tile(MATMULS["addmm gelu bf16"], tile)
    i = Inputs("cuda", torch.Generator().manual_seed(5))
    m, k, n = 300, 512, 640
    a, b = i.normal(m, k, dtype=BF16), i.normal(n, k, dtype=BF16).t()
    args = (a, b, i.normal(n, dtype=BF16), i.normal(m, n, dtype=BF16))
    eager, exact = checks.tensors(case.fn(*args)), checks.tensors(case.fn(*checks.to_float64(args)))
    verdict = checks.judge(checks.tensors(run(case, args)), eager, exact)
    assert verdict.problem is None, verdict.problem


@pytest.mark.cuda
def test_max_autotune() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    model = model.cuda().bfloat16().eval()
    compiled = torch.compile(model, backend=lambda gm, x: fuser_backend(gm, x, mode="max-autotune"))
    exact_model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
    exact_model.load_state_dict(model.state_dict())
    exact_model = exact_model.double()
    with torch.no_grad():
        for rows in (64, 512, 512, 500, 500):
            x = torch.randn(rows, 1024, device="cuda", dtype=BF16)
            out, eager, exact = compiled(x), model(x), exact_model(x.double())
            assert checks.judge([out], [eager], [exact]).problem is None
    assert "MATMUL" in last_compilation().source
    assert any(c.times for c in choices.choices())
