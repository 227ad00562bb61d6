"""Several samples through one `torch.compile(backend="fuser")`, each compared with eager as if it were alone.

Most of the time of a sample alone is the fixed cost of Dynamo and of a C++ compiler's start. So the calls of a batch
become the lines of one function. The samples share no tensor, and groups hold connected operators only, so each sample
has kernels of its own; their sources are compiled in one run of the compiler.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from fuser import compiler, config
from fuser.cpu import fused_kernel, toolchain
from fuser.errors import CompileError
from fuser.frontends.dynamo import fuser_backend
from fuser.frontends.records import compilations, forget_compilations
from fuser.kernel_cache import REGISTRY
from tests import compare
from tests.opinfo import runner
from tests.opinfo.runner import ATEN, NATIVE, PARTLY, WRONG, Outcome, Sample

IDLE = 0.08  # seconds without another kernel after which those that wait are compiled
MOST = 64  # kernels in one library


class Together(compiler.CpuBackend):
    """The CPU's backend; kernels asked for at about the same time are compiled as one source."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[fused_kernel.Source, Future[Any]]] = queue.Queue()
        threading.Thread(target=self._loop, daemon=True).start()

    def compile(self, source: fused_kernel.Source) -> Any:
        found: Future[Any] = Future()
        self._waiting.put((source, found))
        return found.result()

    def _loop(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < MOST:
                try:
                    batch.append(self._waiting.get(timeout=IDLE))
                except queue.Empty:
                    break
            self._compile(batch)

    def _compile(self, batch: list[tuple[fused_kernel.Source, Future[Any]]]) -> None:
        joined = [_renamed(source, f"s{n}_") for n, (source, _) in enumerate(batch)]
        try:
            text = "\n".join(f"namespace n{n} {{\n{text}\n}}" for n, (text, _) in enumerate(joined))
            library = toolchain.compile_library((text,))
        except CompileError:
            for source, found in batch:
                try:
                    found.set_result(fused_kernel.compile_source(source))
                except CompileError as e:
                    found.set_exception(e)
            return
        for (source, found), (text, program) in zip(batch, joined):
            found.set_result(
                fused_kernel.FusedKernel(source.name, program, text, library, source.n_kernels, source.reasons)
            )


def _renamed(source: fused_kernel.Source, prefix: str) -> tuple[str, Any]:
    """The text and the launch program with other names for the entries."""
    text = source.text
    for name in {s.entry for s in source.program.steps}:
        text = re.sub(rf"\b{name}\b", prefix + name, text)
    steps = tuple(dataclasses.replace(s, entry=prefix + s.entry) for s in source.program.steps)
    return text, dataclasses.replace(source.program, steps=steps)


# -- one function of many calls ----------------------------------------------------------------------------------------
class _Writer:
    """Source code for values: tensors are parameters, small constants are spelled, all else is a global name."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}
        self.n_tensors = 0

    def spell(self, v: Any) -> str:
        """An expression for `v`."""
        if isinstance(v, torch.Tensor):
            self.n_tensors += 1
            return f"t{self.n_tensors - 1}"
        if v is None or type(v) in (int, bool, str) or (type(v) is float and math.isfinite(v)):
            return repr(v)
        if type(v) is list:
            return f"[{', '.join(map(self.spell, v))}]"
        if type(v) is tuple:
            return f"({''.join(self.spell(x) + ',' for x in v)})"
        if type(v) is dict:
            return f"{{{', '.join(f'{k!r}: {self.spell(x)}' for k, x in v.items())}}}"
        if type(v) is slice:
            return f"slice({self.spell(v.start)}, {self.spell(v.stop)}, {self.spell(v.step)})"
        name = f"c{len(self.scope)}"
        self.scope[name] = v
        return name


def function_of(samples: Sequence[Sample]) -> Callable[..., Any]:
    """A function of all samples' tensors, in order, to the tuple of their results."""
    writer = _Writer()
    lines = []
    for i, s in enumerate(samples):
        function = writer.spell(s.function)
        args = [writer.spell(a) for a in s.args] + [f"{k}={writer.spell(a)}" for k, a in s.kwargs.items()]
        lines.append(f"    r{i} = {function}({', '.join(args)})")
    names = ", ".join(f"t{i}" for i in range(writer.n_tensors))
    results = "".join(f"r{i}," for i in range(len(samples)))
    text = "\n".join([f"def batch({names}):", *lines, f"    return ({results})\n"])
    exec(compile(text, "<samples>", "exec"), writer.scope)
    made: Callable[..., Any] = writer.scope["batch"]
    return made


# -- running -----------------------------------------------------------------------------------------------------------
def run_batch(samples: Sequence[Sample]) -> tuple[list[Outcome], bool]:
    """An outcome for each sample, and whether Dynamo broke the function into several graphs."""
    outcomes: list[Outcome | None] = [None] * len(samples)
    with torch.no_grad(), warnings.catch_warnings(), config.override(random="eager"):
        warnings.simplefilter("ignore")
        fit = []
        for i, s in enumerate(samples):
            value, error = runner.alone_eagerly(s)
            if error is not None:
                outcomes[i] = runner.run(s, "compile")
            elif not any(isinstance(v, torch.Tensor) for v in compare.leaves(value)):
                outcomes[i] = Outcome(runner.SKIPPED, "no tensor comes out")
            else:
                fit.append(i)
        found, broken = _run([samples[i] for i in fit]) if fit else ([], False)
        for i, outcome in zip(fit, found):
            outcomes[i] = outcome
    return [o for o in outcomes if o is not None], broken


def _run(samples: list[Sample]) -> tuple[list[Outcome], bool]:
    function = function_of(samples)
    tensors = [s.tensors for s in samples]
    own = [compare.copy_inputs(t) for t in tensors]
    mine = [compare.copy_inputs(t) for t in tensors]
    torch.manual_seed(runner.SEED)
    want = function(*(t for ts in own for t in ts))
    forget_compilations()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(runner.SEED)
    try:
        got = torch.compile(function, backend=fuser_backend)(*(t for ts in mine for t in ts))
    except Exception as e:
        if len(samples) == 1:
            text = str(e).partition("\n")[0]
            return [Outcome(WRONG, "raises", [f"raises {type(e).__name__}: {text}"])], False
        half = len(samples) // 2
        (a, broken_a), (b, broken_b) = _run(samples[:half]), _run(samples[half:])
        return a + b, broken_a or broken_b
    status, reason = _how_it_ran()
    outcomes = [Outcome(status, reason) for _ in samples]
    for s, outcome, a, b, x, y in zip(samples, outcomes, mine, own, got, want):
        outcome.problems = _differences(s, a, b, compare.leaves(x), compare.leaves(y))
    aliases = [compare.alias_pattern(sum(i, []), compare.leaves(o)) for i, o in ((mine, got), (own, want))]
    if aliases[0] != aliases[1] and not any(o.problems for o in outcomes):
        outcomes[-1].problems = ["results of different samples share memory"]
    for outcome in outcomes:
        if outcome.problems:
            outcome.status, outcome.reason = WRONG, status
    return outcomes, bool(torch._dynamo.utils.counters["graph_break"])


def _differences(sample: Sample, mine: Any, own: Any, got: list[Any], want: list[Any]) -> list[str]:
    runner.forget_undefined(sample, (got, want), (mine, own))
    problems = runner.differences(sample, got, want, mine, own)
    aliases = compare.alias_pattern(mine, got), compare.alias_pattern(own, want)
    return problems or ([f"aliasing {aliases[0]} instead of {aliases[1]}"] if aliases[0] != aliases[1] else [])


def _how_it_ran() -> tuple[str, str]:
    """Of all graphs since the history was emptied: native, partly or ATen, and the first reason."""
    records = compilations()
    if not records:
        return ATEN, "dynamo made no graph"
    reasons = [r.reason for r in records if r.route == "eager"]
    reasons += [u.reason for r in records for u in r.unfused]
    for key in {k for r in records for k in r.keys}:
        reasons += REGISTRY.find(key).spec.store.fallbacks
    fused = sum(r.ops_fused for r in records)
    if fused and not reasons:
        return NATIVE, ""
    return (PARTLY if fused else ATEN), next(iter(reasons), "")
