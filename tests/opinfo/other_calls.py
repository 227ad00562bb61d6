"""A handle is called with tensors that it was not registered for: other sizes, dims, dtypes, strides and indices.

It does what eager does with them, or raises where eager raises. A kernel that takes a weight which is too short reads
behind its end; one that broadcasts what eager refuses hides a mistake.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence

import torch

import fuser
from tests import compare
from tests.opinfo import runner
from tests.opinfo.runner import NATIVE, SKIPPED, WRONG, Outcome, Sample

VARIANTS = 8  # other calls of each sample
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex64, torch.float16)
INDICES = (-1, -1000, 1_000_000)
# Eager crashes with such arguments, or its result is whatever was in memory, or depends on an order that is not there.
UNTRIED = (
    "lu_unpack _segment_reduce linalg.ldl_solve batch_norm native_batch_norm _native_batch_norm_legit embedding_bag "
    "_batch_norm_with_update nanmedian max_pool2d_with_indices_backward multi_margin_loss multilabel_margin_loss "
    "searchsorted bucketize histogramdd empty empty_like empty_permuted empty_strided new_empty new_empty_strided "
    "resize_ resize_as_ bmm.triton_optimized"
).split()
# What eager says where it has no kernel for a dtype or for strides: a result is welcome.
NO_KERNEL = ("not implemented for", "is_contiguous(memory_format)")


def run(name: str, sample: Sample) -> Outcome:
    """What goes otherwise than in eager."""
    last = name.removeprefix("nn.functional.")
    want, error = runner.alone_eagerly(sample)
    if last.startswith(tuple(UNTRIED)) or error is not None or sample.undefined != ():
        return Outcome(SKIPPED, "eager does not say what it does")
    graph = runner.call_graph(sample, want)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            key = fuser.register_fusion(module)
            fuser.run_fusion(key, compare.copy_inputs(sample.tensors))
        except Exception as e:
            return Outcome(SKIPPED, f"no handle: {type(e).__name__}")
        problems = []
        for what, tensors in chosen(name, sample.tensors):
            problem = _problem(module, key, tensors)
            if problem:
                sizes = [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
                problems.append(f"{what}: {sizes}: {problem}")
    return Outcome(WRONG if problems else NATIVE, "; ".join(problems), problems)


def _problem(module: torch.fx.GraphModule, key: int, tensors: Sequence[torch.Tensor]) -> str | None:
    mine, own = compare.copy_inputs(tensors), compare.copy_inputs(tensors)
    got, failed = _tried(lambda: list(fuser.run_fusion(key, mine)))
    want, error = _tried(lambda: compare.leaves(torch.fx.Interpreter(module).run(*own)))
    if error is not None:
        says = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        fits = failed is not None or any(words in str(error) for words in NO_KERNEL)
        return None if fits else f"a result, where eager raises {says!r}"
    if failed is not None:
        return f"raises {type(failed).__name__}: {str(failed).splitlines()[:1]}"

    def exact() -> list[torch.Tensor]:
        wide = [t.double() if t.is_floating_point() else t for t in compare.copy_inputs(tensors)]
        torch.manual_seed(runner.SEED)
        return compare.leaves(torch.fx.Interpreter(module).run(*wide))

    found = compare.differences(got, want, exact) or compare.differences(mine, own)
    return "; ".join(found) or None


def _tried(function):
    torch.manual_seed(runner.SEED)
    try:
        return function(), None
    except Exception as e:
        return None, e


def chosen(name: str, tensors: Sequence[torch.Tensor]) -> list[tuple[str, list[torch.Tensor]]]:
    """Some of the calls, the same in every run."""
    made = list(variants(tensors))
    random.Random(f"{name} {[tuple(t.shape) for t in tensors]}").shuffle(made)
    return made[:VARIANTS]


def variants(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """What is changed, and the tensors of a call."""
    for i, t in enumerate(tensors):
        if type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_conj():
            continue

        def instead(new, i=i):
            return [new if j == i else x for j, x in enumerate(tensors)]

        size = list(t.shape)
        for d, n in enumerate(size):
            for other in sorted({n + 1, max(n - 1, 0), 1, 0, 2 * n} - {n}):
                yield f"size {other} in dim {d} of {i}", instead(resized(t, [*size[:d], other, *size[d + 1 :]]))
                if len(tensors) > 1:
                    yield f"size {other} for all {n} in dim {d}", [with_size(x, d, n, other) for x in tensors]
            if n:
                yield f"{i} without dim {d}", instead(t.select(d, 0).clone())
        yield f"{i} with one more dim", instead(t[None].clone())
        if len(size) > 1:
            yield f"{i} transposed", instead(t.mT.clone())
        if size:
            yield f"{i} expanded", instead(resized(t, [1] * len(size)).expand(size))
        if not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool) and t.numel():
            for value in INDICES:
                new = t.clone(memory_format=torch.contiguous_format)
                new.view(-1)[new.numel() // 2] = value
                yield f"{value} in {i}", instead(new)
        for dtype in DTYPES:
            if dtype is not t.dtype:
                yield f"{i} as {dtype}", instead(t.to(dtype))


def with_size(t: torch.Tensor, d: int, n: int, other: int) -> torch.Tensor:
    """`t` with another size in dim `d` where it has size `n` there."""
    plain = type(t) is torch.Tensor and t.layout is torch.strided and t.dim() > d and t.shape[d] == n
    return resized(t, [*t.shape[:d], other, *t.shape[d + 1 :]]) if plain else t


def resized(t: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """The elements of `t`, over and over, in another size."""
    flat = t.detach().reshape(-1)
    flat = flat if flat.numel() else torch.ones(1, dtype=t.dtype)
    n = torch.Size(size).numel()
    return flat.repeat(-(-max(n, 1) // flat.numel()))[:n].reshape(size).clone()
