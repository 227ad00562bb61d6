"""CUDA graphs for whole compiled callables: the second call of a class of inputs records, later ones replay.

A replay writes to the same memory as the recording did. So inputs are copied into memory of the recording's own, except
parameters and inputs that the callable itself writes to: those are recorded where they lie, and a call that brings them
elsewhere is of another class. And a recording whose earlier results somebody still holds is not replayed; another one
is made, up to a bound, beyond which calls run as they would without graphs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MOST_RECORDINGS = 8  # of one callable, all classes of inputs together
MOST_CLASSES = 64  # that are remembered
_log = logging.getLogger(__name__)
Function = Callable[..., Any]


def _references(t: torch.Tensor) -> int:
    """How many tensors and other holders share the memory of `t`."""
    storage = t.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,unused-ignore]
    return count


@dataclass
class Recording:
    """One graph, the memory of its inputs, and its results."""

    graph: Any
    inputs: list[tuple[int, torch.Tensor]]  # (argument, where it has to be copied)
    results: list[Any]  # tensors; ("argument", i); or plain values
    single: bool
    idle: list[int] = field(default_factory=list)  # references of each result while nobody else has it

    def is_free(self) -> bool:
        """Whether nobody holds a result of an earlier replay."""
        return [_references(r) for r in self.results if isinstance(r, torch.Tensor)] == self.idle

    def replay(self, args: Sequence[Any]) -> Any:
        """The results for `args`."""
        if self.inputs:
            torch._foreach_copy_([t for _, t in self.inputs], [args[i] for i, _ in self.inputs])
        self.graph.replay()
        out = [self._result(r, args) for r in self.results]
        return out[0] if self.single else tuple(out)

    @staticmethod
    def _result(r: Any, args: Sequence[Any]) -> Any:
        if isinstance(r, torch.Tensor):
            return r.detach()
        return args[r[1]] if isinstance(r, tuple) else r


@dataclass
class InputClass:
    """What is known of calls with inputs of one class."""

    calls: int = 0
    recordings: list[Recording] = field(default_factory=list)
    reason: str = ""  # why nothing is recorded


class Recorded:
    """A compiled callable that is recorded and replayed where that is possible; `reasons` say where it is not."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.reasons: dict[str, int] = {}
        self.n_recordings = 0
        self.n_replays = 0
        self._classes: dict[Any, InputClass] = {}
        self._written: set[int] = set()  # arguments that the callable writes to
        self._lock = threading.Lock()
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, *args: Any) -> Any:
        reason = why_not(args)
        if reason or not self._lock.acquire(blocking=False):
            return self._plain(args, reason or "another thread is replaying it")
        try:
            return self._call(args)
        finally:
            self._lock.release()

    def _plain(self, args: Sequence[Any], reason: str) -> Any:
        if reason not in self.reasons:
            _log.info("a compiled graph runs without CUDA graphs: %s", reason)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return self.function(*args)

    def _call(self, args: tuple[Any, ...]) -> Any:
        key = self._key(args)
        known = self._classes.get(key)
        if known is None:
            if len(self._classes) >= MOST_CLASSES:
                return self._plain(args, f"there were inputs of more than {MOST_CLASSES} classes")
            return self._first(args)
        if known.reason:
            return self._plain(args, known.reason)
        free = next((r for r in known.recordings if r.is_free()), None)
        if free is None:
            if self.n_recordings >= MOST_RECORDINGS:
                return self._plain(args, f"it has {MOST_RECORDINGS} recordings already")
            try:
                free = self._record(args)
            except Exception as e:
                said = str(e).strip().splitlines()
                known.reason = f"it cannot be recorded: {said[0] if said else type(e).__name__}"
                _recover()
                return self._plain(args, known.reason)
            known.recordings.append(free)
            self.n_recordings += 1
        self._order_streams()
        self.n_replays += 1
        return free.replay(args)

    def _first(self, args: tuple[Any, ...]) -> Any:
        """A class's first call runs as it is: kernels get compiled, and it is seen which inputs are written to."""
        before = [_version(a) for a in args]
        out = self.function(*args)
        self._written.update(i for i, (a, v) in enumerate(zip(args, before)) if v is None or _version(a) != v)
        self._classes.setdefault(self._key(args), InputClass()).calls += 1
        return out

    def _stays(self, i: int, a: torch.Tensor) -> bool:
        """Whether argument `i` is recorded where it lies."""
        kept = isinstance(a, torch.nn.Parameter) or getattr(a, "_dynamo_static_input_type", None) is not None
        return kept or i in self._written

    def _key(self, args: Sequence[Any]) -> Any:
        parts: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        for i, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                parts.append((a.shape, a.stride(), a.dtype, a.device, a.data_ptr() if self._stays(i, a) else 0))
            else:
                parts.append((type(a), a))
        return tuple(parts)

    def _order_streams(self) -> None:
        """A replay on another stream than the last one waits for that: both use the same memory."""
        stream = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _record(self, args: tuple[Any, ...]) -> Recording:
        own: list[Any] = list(args)
        inputs: list[tuple[int, torch.Tensor]] = []
        for i, a in enumerate(args):
            if isinstance(a, torch.Tensor) and not self._stays(i, a):
                own[i] = _like(a)
                inputs.append((i, own[i]))
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self.function(*own)
        single = not isinstance(out, (tuple, list))
        results = [_described(r, own, inputs) for r in ((out,) if single else out)]
        del out
        recording = Recording(graph, inputs, results, single)
        recording.idle = [_references(r) for r in results if isinstance(r, torch.Tensor)]
        return recording


def _recover() -> None:
    """A recording that failed leaves torch's random generator as if it still went on; one that succeeds ends that."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.empty(1, device="cuda").zero_()


def _version(a: Any) -> int | None:
    """How often a tensor was written to; None where nobody counts."""
    if not isinstance(a, torch.Tensor):
        return 0
    return None if a.is_inference() else int(a._version)


def _like(a: torch.Tensor) -> torch.Tensor:
    """Memory for copies of `a`, with its strides."""
    if any(stride == 0 and size > 1 for size, stride in zip(a.shape, a.stride())):
        raise ValueError("an input is expanded: several of its elements share memory")
    return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a.detach())


def _described(r: Any, own: Sequence[Any], inputs: Sequence[tuple[int, torch.Tensor]]) -> Any:
    """A result as `Recording.results` has it. ValueError for one that cannot be given back after a replay."""
    if not isinstance(r, torch.Tensor):
        if r is None or isinstance(r, (bool, int, float)):
            return r
        raise ValueError(f"a result is a {type(r).__name__}")
    for i, a in enumerate(own):
        if r is a:
            return ("argument", i)
    if r.device.type != "cuda":
        raise ValueError(f"a result is on {r.device}")
    memory = r.untyped_storage()._cdata
    if any(t.untyped_storage()._cdata == memory for _, t in inputs):
        raise ValueError("a result is a view of an input")
    return r


def why_not(args: Sequence[Any]) -> str:
    """Why a call with these arguments is not recorded; empty if it may be."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not tensors or any(not a.is_cuda for a in tensors):
        return "not all inputs are on a CUDA device"
    if len({a.device for a in tensors}) > 1 or tensors[0].device.index != torch.cuda.current_device():
        return "the inputs are not all on the current device"
    if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
        return "gradients are needed: training steps are not recorded"
    if any(type(a) not in (torch.Tensor, torch.nn.Parameter) for a in tensors):
        return "an input is a tensor subclass"
    if torch.cuda.is_current_stream_capturing():
        return "the caller is recording a graph itself"
    return ""
