"""`python -m tests.opinfo.modes dynamic+grad+layouts`: the database in batches, in other modes than the runner's.

A mode is one of these words, or several joined by `+`:
  dynamic    every size is symbolic
  grad       gradients, of a weighted sum of all results
  layouts    inputs are slices of larger tensors, turned, or repeated without memory of their own
  autocast   the CPU's, in bfloat16
  inference  `torch.inference_mode`
Prints a line for each sample that differs from eager, in the same mode, or raises. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fuser import config
from fuser.frontends.dynamo import fuser_backend
from fuser.frontends.records import forget_compilations
from tests import compare
from tests.opinfo import batches, database, runner
from tests.opinfo.runner import Sample

WORDS = frozenset({"dynamic", "grad", "layouts", "autocast", "inference"})
BATCH = 24  # samples in one function
# No values to compare, or written by the judge, which may not be done to an input that needs gradients.
LEFT_OUT = database.UNDEFINED


class Modes:
    """Samples under the modes that `words` name."""

    def __init__(self, words: Sequence[str]) -> None:
        unknown = set(words) - WORDS
        if unknown:
            raise SystemExit(f"unknown mode {sorted(unknown)[0]!r}: expected some of {', '.join(sorted(WORDS))}")
        self.words = frozenset(words)
        self.gradients = "grad" in self.words

    def context(self) -> contextlib.ExitStack:
        """What both eager and the compiled function run under."""
        stack = contextlib.ExitStack()
        if "autocast" in self.words:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        if "inference" in self.words:
            stack.enter_context(torch.inference_mode())
        elif not self.gradients:
            stack.enter_context(torch.no_grad())
        return stack

    def samples(self, op: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[str, Sample]]:
        """The first samples of an operator that eager takes, with their names."""
        drawn = op.sample_inputs("cpu", dtype, requires_grad=self.gradients)
        for n in range(count):
            try:
                sample = next(drawn)
            except StopIteration:
                return
            except Exception:
                return  # the database cannot make these
            made = runner.make_sample(op, sample, database.undefined(op, sample))
            tensors = tuple(self._laid(t, n) for t in made.tensors)
            made = Sample(made.call, tensors, made.function, made.args, made.kwargs, made.undefined)
            if self._is_fit(made):
                yield f"{database.full_name(op)} {str(dtype)[6:]} {n}", made

    def _laid(self, t: torch.Tensor, n: int) -> torch.Tensor:
        own = t.detach()
        if "layouts" in self.words and t.dim() and t.layout is torch.strided:
            own = laid_out(own, n)
        return own.requires_grad_() if t.requires_grad else own

    def _is_fit(self, sample: Sample) -> bool:
        try:
            with self.context():
                torch.manual_seed(runner.SEED)
                results = sample.call(*copies(sample.tensors))
            if self.gradients:
                loss = loss_of(results)
                if loss is None:
                    return False
                loss.backward()
        except Exception:
            return False
        return any(isinstance(v, torch.Tensor) for v in compare.leaves(results))

    def problems(self, named: Sequence[tuple[str, Sample]]) -> list[str]:
        """What goes otherwise than in eager, over samples that become one function."""
        samples = [s for _, s in named]
        function = batches.function_of(samples)
        own, mine = ([copies(s.tensors) for s in samples] for _ in range(2))
        with self.context():
            want = self._run(function, own)
            forget_compilations()
            torch._dynamo.reset()
            dynamic = True if "dynamic" in self.words else None
            try:
                got = self._run(torch.compile(function, backend=fuser_backend, dynamic=dynamic), mine)
            except Exception as error:
                if len(named) == 1:
                    return [f"{named[0][0]}: raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"]
                half = len(named) // 2
                return self.problems(named[:half]) + self.problems(named[half:])
        found = []
        for (name, sample), a, b, x, y in zip(named, mine, own, got, want):
            differences = batches._differences(sample, a, b, compare.leaves(x), compare.leaves(y))
            if not differences and self.gradients:
                low = torch.bfloat16 if "autocast" in self.words else compare.lowest(sample.tensors)
                exact = functools.partial(exact_gradients, sample)
                differences = compare.differences(gradients(a), gradients(b), exact, low=low)
            found += [f"{name}: {differences[0]}"] if differences else []
        return found

    def _run(self, function: Any, tensors: list[list[torch.Tensor]]) -> Any:
        torch.manual_seed(runner.SEED)
        results = function(*(t for ts in tensors for t in ts))
        if self.gradients:
            loss = loss_of(results)
            assert loss is not None
            loss.backward()
        return results


def laid_out(t: torch.Tensor, n: int) -> torch.Tensor:
    """The same sizes in another layout; the elements too, but for repeated ones."""
    if n % 3 == 0:
        slices = tuple(slice(1, 1 + s) for s in t.shape)
        return t.new_zeros([s + 2 for s in t.shape])[slices].copy_(t)
    if n % 3 == 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    return t[:1].expand(t.shape) if t.shape[0] else t


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the same layout and content, leaves where those are."""
    made = compare.copy_inputs([t.detach() for t in tensors])
    return [c.requires_grad_() if t.requires_grad else c for c, t in zip(made, tensors)]


def loss_of(results: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """A sum of all results that need gradients, with other weights for each element."""
    tensors = [t for t in compare.leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
    reals = [(t.real if t.is_complex() else t).to(dtype) for t in tensors]
    terms = [(t * torch.linspace(0.5, 1.5, t.numel()).to(dtype).reshape(t.shape)).sum() for t in reals]
    return sum(terms[1:], terms[0]) if terms else None


def gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of leaves, 0 where there is none."""
    return [torch.zeros(()) if t.grad is None else t.grad for t in tensors if t.requires_grad]


def exact_gradients(sample: Sample) -> list[torch.Tensor]:
    """The gradients, computed in float64."""
    torch.manual_seed(runner.SEED)
    wide = compare.in_float64(copies(sample.tensors))
    wide = [w.detach().requires_grad_(t.requires_grad) for w, t in zip(wide, sample.tensors)]
    with torch.autocast("cpu", enabled=False):
        loss = loss_of(sample.call(*wide), torch.float64)
    assert loss is not None
    loss.backward()
    return gradients(wide)


def run(modes: Modes, ops: Sequence[Any], dtypes: Sequence[torch.dtype], count: int) -> Iterator[tuple[int, list[str]]]:
    """How many samples a batch had, and what was wrong in it."""
    drawn = (
        named
        for op in ops if op.name not in LEFT_OUT
        for dtype in dtypes if dtype in op.supported_dtypes("cpu")
        for named in modes.samples(op, dtype, count)
    )  # fmt: skip
    with warnings.catch_warnings(), config.override(random="eager"):
        warnings.simplefilter("ignore")
        while batch := list(itertools.islice(drawn, BATCH)):
            yield len(batch), modes.problems(batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes")
    parser.add_argument("--ops", nargs="*", default=[], help="only operators whose name starts with one of these")
    parser.add_argument("--dtypes", nargs="*", default=["float32"])
    parser.add_argument("--samples", type=int, default=4, help="at most so many of each operator and dtype")
    options = parser.parse_args()
    ops = [o for o in database.operators() if not options.ops or o.name.startswith(tuple(options.ops))]
    total = wrong = 0
    dtypes = [getattr(torch, d) for d in options.dtypes]
    for count, found in run(Modes(options.modes.split("+")), ops, dtypes, options.samples):
        total, wrong = total + count, wrong + len(found)
        for line in found:
            print("WRONG", line[:300], flush=True)
    print(f"{total} samples, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
