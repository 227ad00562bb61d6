"""What one GPU shows, in sections: `python -m benchmarks.h200_report [--budget SECONDS] [--out FILE] [SECTION ...]`.

Each section is a process of its own with empty caches, stopped when its time is up; a row that fails does not stop the
others, and each result is printed as soon as it is there. Times are of the device, by CUDA events, with the
second-level cache flushed before each call, unless a line says "wall". Without a GPU: a dry run of small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.child import environment
from benchmarks.h200_timing import (
    BF16,
    DEVICE,
    DRY,
    Lines,
    attempt,
    compiled,
    copy_time,
    device_time,
    first_call,
    n,
    wall_time,
)

RIVAL = () if DRY else ("inductor",)
WORDS = 500 if DRY else 32000
MOST_OFF = 0.05  # relative, of bfloat16 through 16 layers; eager and TorchInductor differ by 0.02


# -- sections ---------------------------------------------------------------------------------------------------------
def copy_rate() -> Lines:
    """Forward rows of `benchmarks.h200` beside a copy of the same bytes."""
    from benchmarks import h200

    if DRY:
        return
    for row in h200.ROWS:
        def one(row: Any = row) -> Lines:
            r = h200.measure(row)
            yield {"row": r["row"], "ms": r["ms"], "of copy": r["of_copy"], "eager ms": r["eager_ms"],
                   "wrong": r["problem"], "first s": r["first_s"]}  # fmt: skip

        yield from attempt(row.name, one)


@dataclass(frozen=True)
class Backward:
    """A function of tensors that want gradients; `moved` is how many times its first argument's bytes must move."""

    name: str
    fn: Callable[..., torch.Tensor]
    make: Callable[[], tuple[torch.Tensor, ...]]
    moved: float
    others: tuple[Any, ...] = ()


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As Llama has it."""
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


BACKWARD = (
    Backward("gelu tanh bf16", lambda x: F.gelu(x, approximate="tanh"), lambda: (n(16384, 8192),), 3),
    Backward("swiglu bf16", lambda g, u: F.silu(g) * u, lambda: (n(16384, 8192), n(16384, 8192)), 5),
    Backward("softmax 8k bf16", lambda x: torch.softmax(x, -1), lambda: (n(16384, 8192),), 3),
    Backward("layer_norm 4k bf16", lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
             lambda: (n(16384, 4096), n(4096), n(4096)), 3),
    Backward("rms_norm 4k bf16", rms_norm, lambda: (n(16384, 4096), n(4096)), 3),
    Backward("rms_norm 2k bf16", rms_norm, lambda: (n(8192, 2048), n(2048)), 3),
    Backward("cross_entropy 32k bf16",
             lambda x: F.cross_entropy(x.float(), torch.arange(x.shape[0], device=x.device) % x.shape[1]),
             lambda: (n(8192, 32000),), 2),
    Backward("cross_entropy 128k bf16",
             lambda x: F.cross_entropy(x.float(), torch.arange(x.shape[0], device=x.device) % x.shape[1]),
             lambda: (n(4096, 128256),), 2),
)  # fmt: skip


def backward() -> Lines:
    """Backward alone, beside a copy of the bytes that it must move."""
    for row in BACKWARD:
        def one(row: Backward = row) -> Lines:
            args = tuple(t.requires_grad_() for t in row.make())
            found: dict[str, float] = {}
            right: Any = None
            problem = ""
            for name in ("eager", "fuser", *RIVAL):
                fn = compiled(name, row.fn)
                grad = torch.ones_like(fn(*args))
                grads = torch.autograd.grad(fn(*args), args, grad)
                if right is None:
                    right = grads
                elif name == "fuser":
                    errors = [float((a - b).norm() / (b.norm() + 1e-12)) for a, b in zip(grads, right)]
                    problem = f"gradients differ by {max(errors):.3g}" if max(errors) > 0.02 else ""
                found[name] = device_time(
                    lambda out, grad=grad: torch.autograd.grad(out, args, grad), lambda fn=fn: fn(*args)
                )
            copy = copy_time(int(row.moved * args[0].nbytes))
            yield {"row": row.name, "ms": 1e3 * found["fuser"], "of copy": copy / found["fuser"],
                   **({"x inductor": found["inductor"] / found["fuser"], "inductor of copy": copy / found["inductor"]}
                      if RIVAL else {}),
                   "x eager": found["eager"] / found["fuser"], "wrong": problem}  # fmt: skip

        yield from attempt(row.name, one)


def geomean() -> Lines:
    """The large rows of the `kernels` suite beside Inductor: device times, and wall times of calls in a row."""

    from benchmarks import checks, contestants
    from benchmarks.kernel_rows import ROWS, moved_bytes, seeded

    over: dict[str, list[float]] = {"device": [], "wall": []}
    for row in ROWS:
        def one(row: Any = row) -> Lines:
            args = row.make(seeded(row.name, "large", DEVICE), row.sizes[0 if DRY else 2])
            want = checks.run_on_clones(row.fn, args, row.mutates)
            moved, problem = moved_bytes(row, args, want), ""
            device, wall = {}, {}
            for name in ("fuser", "fuser handle", *(RIVAL or ("eager",))):
                if name == "fuser handle" and row.mutates:
                    continue
                torch._dynamo.reset()
                mine = checks.clones(args) if row.mutates else args
                fn = contestants.compile_for(name, row.fn)
                if name.startswith("fuser"):
                    got = checks.run_on_clones(fn, args, row.mutates)
                    problem = problem or checks.judge(got, want).problem or ""
                fn(*mine)
                device[name] = device_time(lambda fn=fn, mine=mine: fn(*mine))
                wall[name] = wall_time(lambda fn=fn, mine=mine: fn(*mine), 7, 20)
            best, rival = "fuser" if row.mutates else "fuser handle", (*RIVAL, "eager")[0]
            ratios = device[rival] / device[best], wall[rival] / wall[best]
            over["device"].append(ratios[0])
            over["wall"].append(ratios[1])
            yield {"row": row.name, "us": 1e6 * device[best], "of copy": copy_time(moved) / device[best],
                   f"x {rival}": ratios[0], f"x {rival}, wall": ratios[1],
                   f"torch.compile x {rival}, wall": wall[rival] / wall["fuser"], "wrong": problem}  # fmt: skip

        yield from attempt(row.name, one)
    yield from _means(over)


def exclusive_cumsum(x: torch.Tensor) -> torch.Tensor:
    """As KernelBench writes it: rows of an odd length are summed."""
    return torch.cumsum(torch.cat((torch.zeros_like(x[:, :1]), x), 1), 1)[:, :-1]


WIDTH_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "amin": lambda x: x.amin(-1),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "var": lambda x: x.var(-1),
    "x * x.sum(0)": lambda x: x * x.sum(0),
    "cumsum": lambda x: x.cumsum(-1),
    "exclusive cumsum": exclusive_cumsum,
}


WIDTHS, SCANNED_WIDTHS = (3, 10, 20, 50, 100, 200, 300, 1000, 1001), (10, 50, 300, 1000, 1001, 32768)


def widths() -> Lines:
    """Rows of 3 to 1001 and of 32768 elements, 64 Mi in all: lengths that 16, only 4, only 2, or none divides."""
    ratios: dict[str, list[float]] = {"long scans": [], "the others": []}
    for label, f in WIDTH_FUNCTIONS.items():
        for width in SCANNED_WIDTHS if "cumsum" in label else WIDTHS:
            for dtype in (torch.float32, BF16):
                def one(label: str = label, f: Any = f, width: int = width, dtype: torch.dtype = dtype) -> Lines:
                    x = n((64 << 20) // width, width, dtype=dtype)
                    want, found, off = f(x.double()), {}, {}
                    for name in ("eager", *RIVAL, "fuser"):
                        fn = compiled(name, f)
                        off[name] = (fn(x).double() - want).abs().max().item()
                        found[name] = device_time(lambda fn=fn: fn(x))
                    moved = x.nbytes + want.numel() * x.element_size()
                    ratio = found[(*RIVAL, "eager")[0]] / found["fuser"]
                    ratios["long scans" if width > 32000 else "the others"].append(ratio)
                    right = off["fuser"] <= 4 * off["eager"] + 1e-5 * want.abs().max().item()
                    wrong = "" if right else f"off float64 by {off['fuser']:.3g}, eager {off['eager']:.3g}"
                    yield {"row": f"{label} {width} {str(dtype)[6:]}", "ms": 1e3 * found["fuser"],
                           "of copy": copy_time(moved) / found["fuser"], "x inductor": ratio,
                           "x eager": found["eager"] / found["fuser"], "wrong": wrong}  # fmt: skip

                yield from attempt(f"{label} {width} {dtype}", one)
    yield from _means(ratios)


def _means(ratios: dict[str, list[float]]) -> Lines:
    for kind, values in ratios.items():
        if values:
            yield {"row": f"geometric mean, {kind}", "x": statistics.geometric_mean(values), "lowest": min(values),
                   "rows": len(values)}  # fmt: skip


def llama_model() -> nn.Module:
    """16 layers of 2048, 16 heads on 8 groups, SwiGLU of 5632, bfloat16, random weights."""
    from benchmarks.models import Llama

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Llama(1, 64, 4, 2, 96, WORDS) if DRY else Llama(16, 2048, 16, 8, 5632, WORDS)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    return model.to(BF16)


def _tokens(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(WORDS, (batch, 8 if DRY else tokens), device=DEVICE)


def llama() -> Lines:
    """Inference of 4 x 2048 tokens: own compile time (first call less aot_eager's), steady call."""
    model, ids = llama_model().eval(), _tokens(4, 2048)
    with torch.no_grad():
        yield from _contest(lambda fn: fn(ids), model, lambda out: out[:1], lambda: _in_float32(model, ids[:1]))


def _in_float32(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """What a model in halves would say in float32: eager in halves rounds every angle of a rotation, for one thing."""
    with sdpa_kernel(SDPBackend.MATH):
        return deepcopy(model).float()(ids)


def llama_training() -> Lines:
    """The training step of 4 x 2048 tokens: forward, loss, backward; gradients to None."""
    model, ids, targets = llama_model().train(), _tokens(4, 2048), _tokens(4, 2048)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.model(x).view(-1, WORDS), targets.view(-1))

    def run(fn: Any) -> Any:
        model.zero_grad(set_to_none=True)
        loss = fn(ids)
        loss.backward()
        return loss

    def gradients(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([loss.view(1), *(p.grad.flatten()[:256].float() for p in model.parameters())])

    yield from _contest(run, Step(), gradients)


def _off(got: torch.Tensor, want: torch.Tensor) -> dict[str, Any]:
    """How far results are from eager's, and whether that is more than halves explain."""
    error = float((got - want).norm() / want.norm())
    return {"off eager by": error, "wrong": "" if error < MOST_OFF else f"off eager's by {error:.3g}"}


def _off_float32(results: dict[str, torch.Tensor], name: str, exact: torch.Tensor) -> dict[str, Any]:
    """How far results are from float32's; more than eager's are is wrong."""
    error, eager = (float((results[n] - exact).norm() / exact.norm()) for n in (name, "eager"))
    return {"off float32 by": error, "wrong": "" if error < 1.1 * eager else f"eager is off by {eager:.3g}"}


def _contest(
    run: Callable[[Any], Any], model: nn.Module, read: Callable[[Any], torch.Tensor],
    in_float32: Callable[[], torch.Tensor] | None = None,
) -> Lines:  # fmt: skip
    """Each contestant's first call and steady time of `run`; `read` is what of its result is compared with eager's.

    Where `in_float32` gives the same in float32, eager is as much on trial as the others.
    """
    exact = in_float32().float().flatten() if in_float32 is not None else None
    first: dict[str, float] = {}
    steady: dict[str, float] = {}
    warm = compiled("aot_eager", lambda x: torch.relu(x * 2))  # dynamo itself is imported by now
    warm(torch.ones(4, device=DEVICE, requires_grad=torch.is_grad_enabled()))
    results: dict[str, torch.Tensor] = {}
    for name in ("eager", "aot_eager", "fuser", *RIVAL):
        def one(name: str = name) -> Lines:
            fn = compiled(name, model)
            first[name] = first_call(lambda: results.__setitem__(name, run(fn)))
            results[name] = read(results[name]).detach().float().flatten().clone()
            if name == "aot_eager":
                yield {"row": name, "first s": first[name]}
                return
            steady[name] = wall_time(lambda: run(fn), 11)
            line = {"row": name, "first s": first[name], "own compile s": first[name] - first.get("aot_eager", 0.0),
                    "step ms": 1e3 * steady[name]}  # fmt: skip
            off = _off(results[name], results["eager"]) if exact is None else _off_float32(results, name, exact)
            yield {**line, **off}

        yield from attempt(name, one)
        torch._dynamo.reset()
    if {"fuser", "inductor"} <= set(steady):
        own = {name: first[name] - first["aot_eager"] for name in ("fuser", "inductor")}
        yield {"row": "fuser beside inductor", "own compile, share": own["fuser"] / own["inductor"],
               "step, x faster": steady["inductor"] / steady["fuser"]}  # fmt: skip


def graphs() -> Lines:
    """One sequence of 64 tokens under CUDA graphs, and a training step of it; wall times."""
    model, ids = llama_model().eval(), _tokens(1, 64)
    found: dict[str, float] = {}
    with torch.no_grad():
        contestants = [("eager", None), ("fuser", None), *((name, "reduce-overhead") for name in ("fuser", *RIVAL))]
        for name, mode in contestants:
            def one(name: str = name, mode: str | None = mode) -> Lines:
                fn = compiled(name, model, mode)
                first = first_call(lambda: fn(ids))
                for _ in range(3):
                    got = fn(ids).float()
                label = f"{name} {mode or ''}".strip()
                found[label] = wall_time(lambda: fn(ids), 25)
                in_a_row = wall_time(lambda: fn(ids), 7, 20)
                yield {"row": label, "ms": 1e3 * found[label], "ms, 20 in a row": 1e3 * in_a_row, "first s": first,
                       **_off(got, model(ids).float())}  # fmt: skip
                if name == "fuser" and mode:
                    yield from _recorded()

            yield from attempt(f"{name} {mode}", one)
    mine, theirs = found.get("fuser reduce-overhead"), found.get("inductor reduce-overhead")
    if mine and theirs:
        yield {"row": "fuser beside inductor", "x faster": theirs / mine}
    yield from attempt("training", lambda: _small_training(model, ids))


def _small_training(model: nn.Module, ids: torch.Tensor) -> Lines:
    model.train()
    want = torch.empty(0)
    for name, mode in (("eager", None), ("fuser", None), ("fuser", "reduce-overhead")):
        fn = compiled(name, model, mode)

        def run(fn: Any = fn) -> None:
            model.zero_grad(set_to_none=True)
            fn(ids).float().square().mean().backward()

        for _ in range(6):
            run()
        got = torch.cat([p.grad.flatten()[:256].float() for p in model.parameters()])
        want = got if name == "eager" else want
        yield {"row": f"training step, {name} {mode or ''}", "ms": 1e3 * wall_time(run, 15), **_off(got, want)}
    yield from _recorded()


def _recorded() -> Lines:
    from fuser import debug

    for r in debug.recorded():
        yield {"row": "graph", "says": str(r)}


def sizes() -> Lines:
    """128 sizes through one norm with an activation: kernels compiled beside the classes that docs/cuda.md defines."""
    import fuser
    from benchmarks import contestants
    from fuser.cuda import tiles

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b))

    def other(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.silu(rms_norm(x, w))

    sets = {
        "128 numbers of rows": [(r, 2048) for r in range(2, 130)],
        "128 lengths of rows": [(64, 8 * k) for k in range(1, 129)],
        "128 odd lengths": [(64, 8 * k + 1) for k in range(1, 129)],
    }
    for f, weights in ((fn, 2), (other, 1)):
        for label, shapes in sets.items():
            def one(f: Any = f, weights: int = weights, shapes: Any = shapes, label: str = label) -> Lines:
                handle = contestants.register(torch.fx.symbolic_trace(_fresh(f, weights)))
                before, spent = fuser.num_compiled_kernels(), 0.0
                for r, c in shapes[:9] if DRY else shapes:
                    args = (n(r, c), *(n(c) for _ in range(weights)))
                    spent += first_call(lambda args=args: handle(*args))
                classes = {tiles.row_class(c) for _, c in shapes}
                yield {"row": f"{f.__name__ or 'norm'}, {label}", "kernels": fuser.num_compiled_kernels() - before,
                       "classes": len(classes), "s in all": spent}  # fmt: skip

            yield from attempt(label, one)


_SERIAL = [0]


def _fresh(f: Any, weights: int) -> Any:
    """A function like `f` that computes something of its own, so that no kernel is there yet."""
    _SERIAL[0] += 1
    offset = float(_SERIAL[0])
    return (lambda x, w: f(x, w) + offset) if weights == 1 else (lambda x, w, b: f(x, w, b) + offset)


def matmul() -> Lines:
    """Races of matmuls with what follows (`max_autotune`), what they cost, and cuBLASLt's own epilogues."""
    from fuser import debug

    class FeedForward(nn.Module):
        def __init__(self, width: int, hidden: int, act: Any) -> None:
            super().__init__()
            self.up, self.down, self.act = nn.Linear(width, hidden), nn.Linear(hidden, width), act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.act(self.up(x)))

    for rows in (16, 64, 512, 8192):
        for act in (nn.GELU(), nn.GELU("tanh"), nn.ReLU()):
            def one(rows: int = rows, act: Any = act) -> Lines:
                model = FeedForward(*((40, 40) if DRY else (2048, 8192)), act).to(DEVICE, BF16).eval()
                x, found, first = n(rows, 2048), {}, {}
                with torch.no_grad():
                    for name, mode in (("eager", None), ("fuser", None), ("fuser", "max-autotune-no-cudagraphs")):
                        fn = compiled(name, model, mode)
                        first[mode] = first_call(lambda fn=fn: fn(x))
                        found[f"{name} {mode or ''}".strip()] = device_time(lambda fn=fn: fn(x))
                yield {"row": f"{act} {rows} rows", **{k + " us": 1e6 * v for k, v in found.items()},
                       "race s": first["max-autotune-no-cudagraphs"]}  # fmt: skip

            yield from attempt(f"{act} {rows}", one)
    for choice in debug.choices():
        yield {"row": "choice", "says": str(choice)}
    yield from attempt("relu and NaN", _relu_and_nan)


def _relu_and_nan() -> Lines:
    for dtype in (BF16, torch.float16, torch.float32) if not DRY else ():
        for m in (2, 64, 4096):
            a, b, bias = n(m, 512, dtype=dtype), n(512, 1024, dtype=dtype), n(1024, dtype=dtype)
            a[0] = float("nan")
            out = torch.ops.aten._addmm_activation(bias, a, b)
            yield {"row": f"cuBLASLt relu {dtype} {m} rows", "says": f"NaN kept: {bool(out[0].isnan().all())}"}


SECTIONS: dict[str, tuple[Callable[[], Lines], int]] = {
    "copy": (copy_rate, 90),
    "backward": (backward, 80),
    "geomean": (geomean, 150),
    "widths": (widths, 240),
    "llama": (llama, 90),
    "train": (llama_training, 150),
    "graphs": (graphs, 110),
    "sizes": (sizes, 60),
    "matmul": (matmul, 110),
}


# -- running ----------------------------------------------------------------------------------------------------------
def _text(line: dict[str, Any]) -> str:
    parts = [f"{line['row']:28}"]
    for key, value in line.items():
        if key == "row" or value is None or value == "":
            continue
        parts.append(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}")
    return "  ".join(parts)


def child(name: str) -> None:
    """One section, in this process."""
    from fuser.runtime import launcher

    launcher.wait(60)
    torch.manual_seed(0)
    out = os.environ.get("H200_JSON")
    for line in SECTIONS[name][0]():
        print(_text(line), flush=True)
        if out:
            with open(out, "a") as f:
                f.write(json.dumps({"section": name, **line}) + "\n")


def run(name: str, seconds: float, out: str) -> None:
    """One section in a process of its own, stopped after `seconds`."""
    print(f"\n== {name}: {(SECTIONS[name][0].__doc__ or '').splitlines()[0]}", flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="h200-") as cache:
        env = {**environment(cache), "H200_JSON": os.path.abspath(out) if out else ""}
        command = [sys.executable, "-m", "benchmarks.h200_report", "--child", name]
        process = subprocess.Popen(command, env=env, start_new_session=True)
        try:
            code = process.wait(seconds)
            said = "" if code == 0 else f", exit status {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said = ", stopped: its time was up"
    print(f"-- {name}: {time.perf_counter() - began:.0f} s{said}", flush=True)


def main() -> None:
    """Run the sections that the command line names; all by default."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.h200_report", description=__doc__.splitlines()[0])
    p.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    p.add_argument("--budget", type=float, default=360.0, help="seconds for all sections together")
    p.add_argument("--out", default="", metavar="FILE", help="write a line of JSON for each result")
    p.add_argument("--child", choices=SECTIONS, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        child(args.child)
        return
    unknown = [s for s in args.sections if s not in SECTIONS]
    if unknown:
        p.error(f"{unknown[0]!r} is no section: expected some of {', '.join(SECTIONS)}")
    end = time.perf_counter() + args.budget
    name = "no GPU, a dry run" if DRY else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {time.strftime('%Y-%m-%d')}")
    for name in args.sections or SECTIONS:
        left = end - time.perf_counter()
        if left < 10:
            print(f"-- {name}: left out, the budget of {args.budget:.0f} s is spent")
            continue
        run(name, min(left, SECTIONS[name][1]), args.out)


if __name__ == "__main__":
    main()
