"""Attention with a score modification on CUDA: one kernel forward, two backward, compiled for each class of arguments.

All calls with equal graphs share handles, so that the layers of a model compile once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cachetools import LRUCache
from torch import fx

from fuser import config, forks, interface
from fuser.attention.blocks import Blocks
from fuser.attention.scores import Added, Mods, write_scores
from fuser.canonical.build import canonicalize
from fuser.canonical.graph import CanonicalGraph
from fuser.cuda import attention_source, fused_kernel
from fuser.cuda.attention_source import Asked
from fuser.cuda.matmul import precision
from fuser.errors import CompileError, NotNow, Unsupported
from fuser.kernel_spec import STATUS
from fuser.reasons import because
from fuser.runtime import launcher

aten = torch.ops.aten
_MOST_VARIANTS = 16  # kernels of one handle, for sizes with other divisors
_MOST_HANDLES = 256  # kernels of attention that a process keeps ready
_KEYS = ("keys_count", "keys", "full_keys_count", "full_keys")
_QUERIES = ("queries_count", "queries", "full_queries_count", "full_queries")
_WIDE = 1 << 31  # scores of a head from which their offsets need 64 bits
_handles: LRUCache[Any, Callable[..., Any]] = LRUCache(_MOST_HANDLES)
_lock = forks.lock()
_LN2 = math.log(2)


class Kernels:
    """The kernels of one attention. Unsupported or CompileError if there are none for the arguments."""

    def __init__(self, mods: Mods | Added, sums: bool) -> None:
        self.mods, self.sums = mods, sums
        self._graphs: dict[tuple[str, ...], CanonicalGraph] = {}
        self._own: dict[Any, Callable[..., Any]] = {}
        self._delta: Callable[..., Any] | None = None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, buffers: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """The result, and if requested, the logarithms to base 2 of the sums of exponentials."""
        names, lists, block = _listed(_KEYS, blocks.partial, blocks.full, blocks)
        found = self._run(("q", "k", "v", *names), block, (q, k, v, *lists, *buffers), buffers)
        return found[0], found[1] if self.sums else None

    def backward(
        self, given: Sequence[torch.Tensor], out: torch.Tensor, sums: torch.Tensor, grad: torch.Tensor | None,
        grad_sums: torch.Tensor | None, blocks: Blocks, buffers: Sequence[Any],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradients of the queries, keys and values `given`."""
        q, k, v = given
        grad = torch.zeros_like(out) if grad is None else grad
        delta = self._deltas(out, grad)
        if grad_sums is not None:
            delta = delta - grad_sums / _LN2
        names, lists, block = _listed(_KEYS, blocks.partial, blocks.full, blocks)
        if block is not None:
            if blocks.partial_q is None:
                raise Unsupported("a block mask without lists of queries")
            more, other, _ = _listed(_QUERIES, blocks.partial_q, blocks.full_q, blocks)
            names, lists = (*names, *more), (*lists, *other)
        others = ("q", "k", "v", "grad", "sums", "delta", *names)
        found = self._run(others, block, (q, k, v, grad, sums, delta, *lists, *buffers), buffers)
        return found[0], found[1], found[2]

    def _deltas(self, out: torch.Tensor, grad: torch.Tensor) -> Any:
        if self._delta is None:
            graph = fx.Graph()
            a, b = graph.placeholder("out"), graph.placeholder("grad")
            wide = [graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float32}) for x in (a, b)]
            both = graph.call_function(aten.mul.Tensor, tuple(wide))
            graph.output(graph.call_function(aten.sum.dim_IntList, (both, [-1])))
            self._delta = interface.register_handle(graph, functional=True)[1]
        return self._delta(out, grad)

    def _run(
        self, others: tuple[str, ...], block: tuple[int, int] | None, args: tuple[Any, ...], buffers: Sequence[Any]
    ) -> Any:  # fmt: skip
        graph = self._graphs.get(others)
        if graph is None:
            graph = self._graphs[others] = _graph(self.mods, len(buffers), others)
        wide = args[0].shape[2] * args[1].shape[2] >= _WIDE
        key = others, block, wide, precision(), args[0].device.index, config.key()
        handle = self._own.get(key)
        if handle is None:
            gradient = self.mods.gradient
            asked = Asked(others, self.mods.masks, gradient, block, self.sums and not gradient, key[3], wide)
            shared = graph.hash, asked, *key[4:]
            with _lock:  # reading an LRU cache changes it
                handle = _handles.get(shared) or _handles.setdefault(shared, _handle(graph, asked))
            self._own[key] = handle
        return handle(*args)


def _listed(
    names: Sequence[str], partial: Any, full: Any, blocks: Blocks
) -> tuple[tuple[str, ...], tuple[torch.Tensor, ...], tuple[int, int] | None]:  # fmt: skip
    """The names and tensors of the lists, and the size of a block; empty and None if one block is everything."""
    if partial is None:
        return (), (), None
    size = blocks.query_size, blocks.key_size
    return (tuple(names), (*partial, *full), size) if full is not None else (tuple(names[:2]), tuple(partial), size)


def _graph(mods: Mods | Added, buffers: int, others: tuple[str, ...]) -> CanonicalGraph:
    scores = write_scores(mods, buffers, torch.float32, others)
    scores.add_up()
    found = canonicalize(scores.graph, functional=True)
    if found.blocked or found.bound:
        raise Unsupported(found.blocked[0] if found.blocked else "a score modification holds a constant tensor")
    return found.graph


def _handle(graph: CanonicalGraph, asked: Asked) -> Callable[..., Any]:
    """A launcher's handle; arguments that no kernel accepts yet get a new kernel."""
    made: list[str] = []
    settings = config.snapshot()
    lock = forks.lock()

    def slow(args: tuple[Any, ...], status: int) -> Any:
        if status:
            raise NotNow(because("reported", f"a kernel reported: {STATUS.get(status, status)}"))
        if not config.enabled:
            raise NotNow(because("disabled", "config.enabled is False"))
        if torch.cuda.is_current_stream_capturing() or len(made) >= _MOST_VARIANTS:
            raise NotNow("no kernel takes these arguments, and none can be made now")
        with lock, config.override(**settings), torch.cuda.device(args[0].device):
            source = attention_source.make_source(graph, asked, args, config.numerics)
            form = f"{source.name} {source.program}"
            if form in made:
                raise CompileError(f"kernel {source.name} does not take the arguments that it was made for")
            made.append(form)
            kernel = fused_kernel.compile_source(source)
            handle.add_kernel(kernel.program, kernel.library)
        return handle(*args)

    handle: Any = launcher.make_handle(slow)
    found: Callable[..., Any] = handle
    return found
