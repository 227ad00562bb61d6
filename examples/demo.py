"""GPT-2 through `torch.compile(backend="fuser")`: what was fused, how long it took, and whether it is right.

    python examples/demo.py [--layers 12] [--batch 2] [--tokens 256]

Exits with status 1 if the logits are not eager's.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# A checkout is enough: the package need not be installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch

from examples.gpt2 import GPT2Config, build

ROUNDS = 7
TOLERANCE = 1e-4  # of the largest logit: about ten times what two orders of summation differ by in twelve layers


def fused(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The model compiled; in a checkout that is not installed, by the backend's function instead of its name."""
    try:
        return torch.compile(model, backend="fuser")
    except torch._dynamo.exc.InvalidBackend:
        from fuser.frontends.dynamo import fuser_backend

        return torch.compile(model, backend=fuser_backend)


def timed(fn: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds, and the result."""
    start = time.perf_counter()
    out = fn(*args)
    return time.perf_counter() - start, out


def interleaved(fns: dict[str, Callable[..., Any]], ids: torch.Tensor) -> dict[str, float]:
    """Median seconds of each function, round by round."""
    samples: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(ROUNDS):
        for name, fn in fns.items():
            samples[name].append(timed(fn, ids)[0])
    return {name: statistics.median(s) for name, s in samples.items()}


def what_was_fused(report: Any) -> list[tuple[str, str]]:
    """Rows of the table from the package's own account of itself, the commonest reasons first."""
    rows = [
        ("fusion groups", f"{report.groups}, of {report.specs} kinds: equal groups share their kernels"),
        ("kernels compiled", str(report.kernels)),
        ("ops fused", str(report.ops_fused)),
        ("ops not fused", str(sum(report.ops_unfused.values()))),
    ]
    rows += [(f"  {n} ×", reason) for reason, n in report.ops_unfused.items()]
    calls = sum(report.fallback_calls.values())
    if calls:
        rows.append(("calls by ATen", f"{calls} of groups that were to be fused"))
        rows += [(f"  {n} ×", reason) for reason, n in report.fallback_calls.items()]
    return rows


def main() -> int:
    """Compile, check, time, print; 0 if the logits are right."""
    p = argparse.ArgumentParser(description="GPT-2 with random weights, compiled by fuser")
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--tokens", type=int, default=256)
    args = p.parse_args()
    if not 1 <= args.tokens <= GPT2Config.positions:
        p.error(f"--tokens {args.tokens}: expected 1 to {GPT2Config.positions}")
    model, ids = build(GPT2Config(layers=args.layers), args.batch, args.tokens)
    print(f"GPT-2, {args.layers} layers, {args.batch} x {args.tokens} tokens, fp32, {torch.get_num_threads()} threads")
    with torch.no_grad():
        expected = model(ids)
        compiled = fused(model)
        first, logits = timed(compiled, ids)
        steady = interleaved({"eager": model, "fuser": compiled}, ids)
    apart = (logits - expected).abs().max().item() / expected.abs().max().item()
    right = logits.shape == expected.shape and apart <= TOLERANCE
    import fuser.debug

    report = fuser.debug.report()
    rows = [
        *what_was_fused(report),
        ("first call", f"{first:.2f} s, tracing and one step included"),
        ("compile seconds", f"{report.compile_seconds:.2f} s for all kernels, summed over threads"),
        ("eager step", f"{steady['eager'] * 1e3:.0f} ms"),
        ("fused step", f"{steady['fuser'] * 1e3:.0f} ms, {steady['eager'] / steady['fuser']:.2f} x eager's speed"),
        (
            "logits",
            f"{'right' if right else 'WRONG'}: {apart:.1e} of the largest from eager's (at most {TOLERANCE:.0e})",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
