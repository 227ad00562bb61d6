"""One architecture in one mode: eager, float64 and fused, compared; and what the fused program cost."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend
from tests.distances import Distances
from tests.peers.judge import widened
from tests.zoo.architectures import Architecture, Inputs, drawn

MODES = ("inference", "batches", "dynamic", "autocast", "training", "generate")
OPTIONS = {"random": "eager"}
TOKENS = 6
DRAWS = 16  # of a model's inputs
_NOTHING = 1e-7  # of the largest result: what rounding leaves of a gradient that is zero


@dataclass
class Verdict:
    """What became of one model in one mode; times in seconds, `share` of operators in fused groups."""

    name: str
    mode: str
    status: str = "right"  # or "wrong", "raised", "not in eager"
    why: str = ""
    share: float = 0.0
    compile_seconds: float = 0.0  # the first call, less that of backend "aot_eager"
    rival_seconds: float = 0.0  # the same of TorchInductor, where asked for
    speed: float = 0.0  # eager's time by the fused program's


def _floats(value: Any) -> list[torch.Tensor]:
    found = [v for v in pytree.tree_leaves(_plain(value)) if isinstance(v, torch.Tensor)]
    return [v for v in found if v.is_floating_point()]


def _plain(value: Any) -> Any:
    """The first tensors of a library's output: caches and other objects are left out."""
    if hasattr(value, "to_tuple"):
        value = tuple(v for v in value.to_tuple() if isinstance(v, torch.Tensor))
    return value[0] if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor) else value


def _forward(model: Callable[..., Any], inputs: Inputs, autocast: bool = False) -> list[torch.Tensor]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return _floats(model(**inputs))


def _step(model: nn.Module, call: Callable[..., Any], inputs: Inputs) -> list[torch.Tensor]:
    """Results, gradients by parameter, and buffers after one backward; random numbers from the same seed."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    outputs = _floats(call(**inputs))
    loss = sum((o.float() if o.dtype is not torch.float64 else o).square().mean() for o in outputs)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    # AOTAutograd gives zeros where eager leaves the gradient of an unused parameter out
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [*(o.detach() for o in outputs), *gradients, *(b.clone() for b in model.buffers() if b.is_floating_point())]


def problem(
    got: list[torch.Tensor], want: list[torch.Tensor], exact: list[torch.Tensor],
    is_as_exact: Callable[[int], bool] = lambda k: False,
) -> str:  # fmt: skip
    """Empty if no result is further from float64 than twice eager's distance plus 2 ulp of its largest element.

    A gradient that is nothing but rounding, as of a bias before a norm, is measured by the largest result. Of the many
    results of a training step one may miss this by chance: `is_as_exact(k)` then judges result `k` over more draws.
    """
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    noise = max((e[e.isfinite()].abs().max().item() for e in exact if e.isfinite().any()), default=0.0)
    for k, (a, b, e) in enumerate(zip(got, want, exact)):
        if a.shape != b.shape or a.dtype is not b.dtype:
            return f"result {k}: {a.dtype}{tuple(a.shape)} instead of {b.dtype}{tuple(b.shape)}"
        if not b.numel():
            continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return f"result {k}: not finite where eager is"
        low = lambda x, e=e: torch.where(e.isfinite(), x.double() - e, 0.0).abs().max().item()  # noqa: E731
        scale = e[e.isfinite()].abs().max().item() if e.isfinite().any() else 0.0
        mine, theirs = low(a), low(b)
        floor = noise if scale < _NOTHING * noise else scale
        if mine > 2 * theirs + 2 * torch.finfo(b.dtype).eps * floor and not is_as_exact(k):
            return f"result {k} of {tuple(b.shape)}: {mine:.2e} off float64 where eager is {theirs:.2e}, of {scale:.1e}"
    return ""


def _share() -> float:
    """The part of all operators that stands in fused groups."""
    fused = sum(len(g.ops) for r in compilations() for g in r.groups)
    apart = sum(len(r.unfused) for r in compilations())
    return fused / max(fused + apart, 1)


def _compile(model: Any, backend: Any, dynamic: bool | None = None) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = OPTIONS if backend is fuser_backend else None
    return torch.compile(model, backend=backend, dynamic=dynamic, **({"options": options} if options else {}))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _speed(eager: Callable[[], Any], fused: Callable[[], Any], rounds: int = 7) -> float:
    """Eager's time by the fused program's: the median over interleaved rounds."""
    eager(), fused()
    ratios = sorted(_seconds(eager) / _seconds(fused) for _ in range(rounds))
    return ratios[rounds // 2]


class _Run:
    """One architecture in one mode: how a module, or what was compiled from it, is called."""

    def __init__(self, architecture: Architecture, mode: str) -> None:
        torch.manual_seed(0)
        self.architecture, self.mode = architecture, mode
        model = architecture.build()
        self.eager = model.train() if mode == "training" else model.eval()
        self.ours, self.wide = copy.deepcopy(model), copy.deepcopy(model).double()
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if attention == "flex_attention":  # torch's graph of it cannot be widened
            self.wide.set_attn_implementation("eager")

    def results(self, module: nn.Module, call: Any, inputs: Inputs) -> list[torch.Tensor]:
        """Results of a call; with gradients and buffers in training."""
        if self.mode == "training":
            return _step(module, call, inputs)
        return _forward(call, inputs, self.mode == "autocast")

    def exact(self, inputs: Inputs) -> list[torch.Tensor]:
        """The results in float64."""
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        return list(widened(lambda: self.results(self.wide, self.wide, wide), ()))

    def is_as_exact(self, fused: Callable[..., Any], k: int) -> bool:
        """Whether result `k` is within twice eager's distance from float64 plus 2 ulp over all draws.

        Distances are root mean squares, relative to the largest element of all draws.
        """
        distances = Distances()
        for draw in range(DRAWS):
            with drawn(draw):
                inputs = self.architecture.inputs(2)
            restored = [copy.deepcopy(m.state_dict()) for m in (self.ours, self.eager, self.wide)]
            got, want = (self.results(m, c, inputs)[k] for m, c in ((self.ours, fused), (self.eager, self.eager)))
            exact = self.exact(inputs)[k]
            for m, state in zip((self.ours, self.eager, self.wide), restored):
                m.load_state_dict(state)
            if not torch.equal(got.isfinite(), want.isfinite()) or not distances.add(got, want, exact):
                return False
        return distances.is_right

    def first_call(self, module: nn.Module, backend: Any) -> tuple[Callable[..., Any], list[torch.Tensor], float]:
        """A compiled program, the results of its first call, and its seconds."""
        call = _compile(module, backend, True if self.mode == "dynamic" else None)
        start = time.perf_counter()
        got = self.results(module, call, self.architecture.inputs(2))
        return call, got, time.perf_counter() - start


def check(architecture: Architecture, mode: str, rival: bool = False, timed: bool = True) -> Verdict:
    """Run one architecture in one mode."""
    forget_compilations()
    verdict = Verdict(architecture.name, mode)
    if mode == "generate":
        return _generate(architecture, verdict)
    run = _Run(architecture, mode)
    try:
        want = run.results(run.eager, run.eager, architecture.inputs(2))
    except Exception as error:
        verdict.status, verdict.why = "not in eager", f"{type(error).__name__}: {error}"
        return verdict
    fused, got, seconds = run.first_call(run.ours, fuser_backend)
    verdict.why = problem(got, want, run.exact(architecture.inputs(2)), lambda k: run.is_as_exact(fused, k))
    if mode in ("batches", "dynamic"):
        inputs = architecture.inputs(3)
        want, got = run.results(run.eager, run.eager, inputs), run.results(run.ours, fused, inputs)
        verdict.why = verdict.why or problem(got, want, run.exact(inputs))
    verdict.status = "wrong" if verdict.why else "right"
    verdict.share = _share()
    if timed and mode in ("inference", "training"):
        _time(run, fused, seconds, rival, verdict)
    return verdict


def _time(run: _Run, fused: Callable[..., Any], seconds: float, rival: bool, verdict: Verdict) -> None:
    inputs = run.architecture.inputs(2)
    verdict.speed = _speed(
        lambda: run.results(run.eager, run.eager, inputs), lambda: run.results(run.ours, fused, inputs)
    )  # fmt: skip
    *_, traced = run.first_call(copy.deepcopy(run.eager), "aot_eager")
    verdict.compile_seconds = seconds - traced
    if rival:
        with contextlib.suppress(Exception):  # a rival that fails has no time
            *_, theirs = run.first_call(copy.deepcopy(run.eager), "inductor")
            verdict.rival_seconds = theirs - traced


def _generate(architecture: Architecture, verdict: Verdict) -> Verdict:
    """Greedy tokens with a static cache, forward compiled: the same as eager's."""
    torch.manual_seed(0)
    model: Any = architecture.build().eval()
    ids = architecture.inputs(2)
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "cache_implementation": "static"}
    try:
        want = model.generate(**ids, **settings)
    except Exception as error:
        verdict.status, verdict.why = "not in eager", f"{type(error).__name__}: {error}"
        return verdict
    model.forward = _compile(model.forward, fuser_backend)
    got = model.generate(**ids, **settings)
    verdict.share = _share()
    if not torch.equal(got, want):
        verdict.status, verdict.why = "wrong", f"tokens {got.tolist()} instead of {want.tolist()}"
    return verdict
