"""`python -m tests.vision [--only REGEX] [--forward]`: torchvision's models through `fuse_script`, beside the scripts.

Prints a line for each model: forward and gradients right or not, groups, seconds. Exit code 1 if anything is wrong.
A number is right if it is as near to the script's as rounding allows, or no further from float64 than the script's.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.vision import models, operators

_FORWARD, _GRADIENT = 1e-3, 1e-2  # relative to the largest number of a tensor


def _run(model: Any, args: tuple[Any, ...], training: bool, detects: bool) -> tuple[list[Any], dict[str, Any]]:
    """Results' leaves, and gradients by name."""
    torch.manual_seed(1)
    model.train(training)
    if not training:
        with torch.no_grad():
            return pytree.tree_leaves(model(*args)), {}
    model.zero_grad()
    result = model(*args)
    leaves = pytree.tree_leaves(result[0] if detects else result)  # of a detection model its losses
    parts = [v for v in leaves if isinstance(v, torch.Tensor)]
    loss = sum((p * torch.linspace(0.5, 1.5, p.numel(), dtype=p.dtype).view(p.shape)).mean() for p in parts)
    loss.backward()
    return parts, {n: p.grad for n, p in model.named_parameters()}


def _distance(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest number; infinite where kinds or sizes differ."""
    if not isinstance(b, torch.Tensor):
        return 0.0 if a == b or (a is None and b is None) else float("inf")
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not b.is_floating_point():
        return 0.0 if a.equal(b) else float("inf")
    if not b.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    if not a.isfinite().equal(b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(0), b.nan_to_num(0)
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()


def _worst(got: Any, want: Any) -> float:
    """The largest distance of two lists or dicts of values."""
    if isinstance(want, dict):
        return max((_distance(got[k], v) for k, v in want.items()), default=0.0)
    if len(got) != len(want):
        return float("inf")
    return max(map(_distance, got, want), default=0.0)


def _doubled(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, value)


def _single(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, value)


def _problem(case: models.Case, script: Any, fused: Any, training: bool) -> str | None:
    """How the fused model's results or gradients differ from the script's; None if they do not."""
    torch.manual_seed(2)
    args = case.inputs()
    if case.detects and training:
        args = (*args, models.targets(case.name))
    states = copy.deepcopy(script.state_dict())
    seen = []
    for model in (script, fused, fused):
        model.load_state_dict(states)
        seen.append(_run(model, args, training, case.detects))
    script.load_state_dict(states)
    (want, grads), (got, found), (again, _) = seen
    errors = _worst(got, want) / _FORWARD, _worst(found, grads) / _GRADIENT
    if max(errors) > 1:
        exact, exact_grads = _run(copy.deepcopy(script).double(), _doubled(args), training, case.detects)
        exact, exact_grads = _single(exact), _single(exact_grads)
        ours, theirs = _worst(got, exact), _worst(want, exact)
        if ours > 2 * theirs and ours > _FORWARD:
            return f"results are off by {ours:.1e}, the script's by {theirs:.1e}"
        ours, theirs = _worst(found, exact_grads), _worst(grads, exact_grads)
        if ours > 2 * theirs and ours > _GRADIENT:
            return f"gradients are off by {ours:.1e}, the script's by {theirs:.1e}"
    if not training and _worst(again, got):
        return "two calls differ"
    return None


def examine(case: models.Case, modes: tuple[bool, ...]) -> tuple[bool, str]:
    """Whether a model is right in these modes (training or not), and a line about it."""
    import fuser

    torch.manual_seed(0)
    start = time.perf_counter()
    script = torch.jit.script(case.make().eval())
    fused = fuser.fuse_script(script)
    problems = {}
    for training in modes:
        name = "gradients" if training else "forward"
        try:
            problems[name] = _problem(case, script, fused, training)
        except Exception as e:
            problems[name] = f"{type(e).__name__}: {(str(e).strip() or '.').splitlines()[-1]}"
    groups = len(fused.eval().fusion.groups)
    said = ", ".join(f"{n} {'right' if p is None else f'WRONG ({p})'}" for n, p in problems.items())
    return not any(problems.values()), f"{said}; {groups} groups, {time.perf_counter() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vision", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression that a model's name matches")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    options = parser.parse_args()
    os.environ.setdefault("FUSER_CACHE_DIR", tempfile.mkdtemp(prefix="fuser-vision-"))
    warnings.filterwarnings("ignore")
    operators.prepare()
    import fuser

    fuser.config.random = "eager"  # dropout draws the script's numbers
    chosen = [c for c in models.cases() if re.search(options.only, c.name)]
    right = 0
    for case in chosen:
        try:
            good, line = examine(case, (False,) if options.forward else (False, True))
        except Exception as e:  # it has no script, or none that is fused
            good, line = False, f"{type(e).__name__}: {(str(e).strip() or '.').splitlines()[0]}"
        right += good
        print(f"{case.name}: {line}", flush=True)
    print(f"{right} of {len(chosen)} right")
    return int(right < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
