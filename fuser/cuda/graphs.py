"""CUDA graphs for compiled callables: the second call of a class of inputs records, later calls replay.

A replay reads and writes the same memory as the recording did. So inputs are copied into the recording's own memory,
except those whose address does not change between calls: parameters, inputs that the callable itself writes to, and
tensors that a forward's recording saved for its backward. Those are recorded in place; a call with other addresses
needs a recording of its own. A recording is not replayed while results of its earlier replay are referenced; another
one is made, up to a bound, beyond which calls run without graphs. Each recording has its own memory pool: in a shared
one, a replay's temporaries might overwrite another's results.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any

import torch

from fuser import config, forks
from fuser.lazy_dataclasses import dataclass
from fuser.runtime.background import COMPILERS

settings: Any = config  # its attributes are made from a table
MOST_RECORDINGS = 8  # of one callable, over all classes of inputs
MOST_CLASSES = 64  # most classes that are remembered
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device)
DEVICE = "cuda"
_log = logging.getLogger(__name__)
Function = Callable[..., Any]
Places = tuple[int, ...]


def _references(t: torch.Tensor) -> int:
    """The number of tensors and other owners that share the storage of `t`."""
    count: int = torch._C._storage_Use_Count(_memory(t))  # type: ignore[attr-defined,unused-ignore]
    return count


def _memory(t: torch.Tensor) -> int:
    """An identity of a tensor's storage, unique while the storage lives."""
    return int(t.untyped_storage()._cdata)


@dataclass
class Recording:
    """One graph, the memory of its inputs, and its results."""

    graph: Any
    inputs: list[tuple[int, torch.Tensor]]  # (argument, the tensor that it is copied to)
    results: list[Any]  # tensors; ("argument", i); or plain values
    single: bool
    owned: list[torch.Tensor] = field(default_factory=list)  # results in the recording's own memory
    idle: list[int] = field(default_factory=list)  # the reference count of each owned result while nobody else holds it

    def is_free(self) -> bool:
        """Whether no result of an earlier replay is referenced outside."""
        return all(_references(r) == n for r, n in zip(self.owned, self.idle))

    def replay(self, args: Sequence[Any]) -> Any:
        """Replay the graph with `args`; returns its results."""
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
    """The state of one class of inputs: recordings by the addresses of the inputs that are recorded in place."""

    recordings: dict[Places, list[Recording]] = field(default_factory=dict)
    reason: str = ""  # the reason if nothing is recorded


class Recorded:
    """A compiled callable that is recorded and replayed where possible; `reasons` say why calls are not.

    `written` are the arguments that it writes to; None: they are found at the first call. `boxed`: it takes its
    arguments as one list, which it empties, and its results may be views of them. `lender` is the forward of this
    backward: tensors that the forward saved keep their addresses.
    """

    def __init__(
        self, function: Function, *, name: str = "", written: Iterable[int] | None = None, boxed: bool = False,
        lender: Recorded | None = None,
    ) -> None:  # fmt: skip
        self.function, self.name, self.boxed = function, name, boxed
        self.reasons: dict[str, int] = {}
        self.n_recordings = 0
        self.n_replays = 0
        self.lent: set[int] = set()  # addresses of the recordings' results, and of the arguments recorded in place
        self._lender = lender
        self._classes: dict[Any, InputClass] = {}
        self._known: dict[int, weakref.ref[Any]] = {}  # parameters, by argument number
        self._finds_written = written is None
        self._written: set[int] = set(written or ())
        self._lock = forks.lock()
        self._stream: Any = None
        self._boxed_call = boxed
        _all.add(self)

    def __call__(self, *args: Any) -> Any:
        values: Sequence[Any] = args[0] if self.boxed else args
        if not self._lock.acquire(blocking=False):
            return self._plain(values, "another thread is replaying it")
        try:
            return self._call(values)
        finally:
            self._lock.release()

    def __str__(self) -> str:
        why = "; ".join(f"{n} calls without, because {reason}" for reason, n in self.reasons.items())
        counts = f"{self.n_recordings} recordings, {self.n_replays} replays"
        return f"{self.name or 'a callable'}: {counts}; {why or 'no calls without'}"

    def _run(self, values: Sequence[Any]) -> Any:
        return self.function(values) if self.boxed else self.function(*values)

    def _plain(self, values: Sequence[Any], reason: str) -> Any:
        if reason not in self.reasons:
            _log.info("%s runs without CUDA graphs: %s", self.name or "a compiled graph", reason)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return self._run(values)

    def _call(self, values: Sequence[Any]) -> Any:
        key, places = self._key(values)
        known = self._classes.get(key)
        mine = known.recordings.get(places) if known is not None else None
        if mine is None or torch.is_grad_enabled():  # else it was asked before
            reason = why_not(values)
            if reason:
                return self._plain(values, reason)
        if is_capturing():
            return self._plain(values, "the caller is recording a graph itself")
        if known is None:
            if len(self._classes) >= MOST_CLASSES:
                return self._plain(values, f"there were inputs of more than {MOST_CLASSES} classes")
            return self._first(key, values)
        if known.reason:
            return self._plain(values, known.reason)
        free = next((r for r in mine or () if r.is_free()), None)
        if free is None:
            if settings.compile_mode == "background" and COMPILERS.busy:  # a recording would keep using ATen's kernels
                return self._plain(values, "kernels are being compiled in the background")
            if self.n_recordings >= MOST_RECORDINGS:
                return self._plain(values, f"it has {MOST_RECORDINGS} recordings already")
            try:
                free = self._record(values)
            except Exception as e:
                said = str(e).strip().splitlines()
                known.reason = f"it cannot be recorded: {said[0] if said else type(e).__name__}"
                _recover()
                return self._plain(values, known.reason)
            known.recordings.setdefault(places, []).append(free)
            self.n_recordings += 1
        self._order_streams()
        self.n_replays += 1
        out = free.replay(values)
        if isinstance(values, list):
            values.clear()
        return out

    def _first(self, key: Any, values: Sequence[Any]) -> Any:
        """Run the first call of a class unrecorded: kernels are compiled, and written inputs are found."""
        if not self._classes:
            self._known = {i: weakref.ref(a) for i, a in enumerate(values) if type(a) is torch.nn.Parameter}
            key = self._key(values)[0]
        if self._finds_written:
            seen = tuple(values)
            before = [_version(a) for a in seen]
            out = self._run(values)
            self._written.update(i for i, (a, v) in enumerate(zip(seen, before)) if v is None or _version(a) != v)
            self._classes[key] = InputClass(reason=self._why_shared(seen))
            return out
        self._classes[key] = InputClass(reason=self._why_shared(values))
        return self._run(values)

    def _why_shared(self, values: Sequence[Any]) -> str:
        """The reason if a written input shares memory with another input, which copies would not; else ""."""
        tensors = {i: _memory(a) for i, a in enumerate(values) if isinstance(a, torch.Tensor)}
        for i in self._written:
            if i in tensors and list(tensors.values()).count(tensors[i]) > 1:
                return "an input that it writes to shares memory with another input"
        return ""

    def _stays(self, i: int, a: torch.Tensor) -> bool:
        """Whether argument `i` is recorded in place."""
        if i in self._written or isinstance(a, torch.nn.Parameter):
            return True
        if self._lender is not None and a.data_ptr() in self._lender.lent:
            return True
        return getattr(a, "_dynamo_static_input_type", None) is not None

    def _key(self, values: Sequence[Any]) -> tuple[Any, Places]:
        """The class of `values`, and the addresses of those recorded in place. Known parameters are not inspected."""
        parts: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), current_device()]
        places: list[int] = []
        known = self._known
        for i, a in enumerate(values):
            if i in known and known[i]() is a:
                places.append(values[i].data_ptr())
            elif isinstance(a, torch.Tensor):
                parts.append((i, type(a), a.shape, a.stride(), a.dtype, a.device))
                if self._stays(i, a):
                    places.append(~i)
                    places.append(a.data_ptr())
            else:
                parts.append((type(a), a))
        return tuple(parts), tuple(places)

    def _order_streams(self) -> None:
        """Make the current stream wait for the last replay's stream: both use the same memory."""
        stream = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _record(self, values: Sequence[Any]) -> Recording:
        own: list[Any] = list(values)
        inputs: list[tuple[int, torch.Tensor]] = []
        for i, a in enumerate(values):
            if isinstance(a, torch.Tensor) and not self._stays(i, a):
                own[i] = _like(a)
                inputs.append((i, own[i]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = self._run(list(own))
        single = not isinstance(out, (tuple, list))
        results = [self._described(r, own, inputs) for r in ((out,) if single else out)]
        del out
        foreign = {_memory(a) for i, a in enumerate(own) if isinstance(a, torch.Tensor) and a is values[i]}
        recording = Recording(graph, inputs, results, single)
        recording.owned = [r for r in results if isinstance(r, torch.Tensor) and _memory(r) not in foreign]
        recording.idle = [_references(r) for r in recording.owned]
        self.lent.update(r.data_ptr() for r in recording.owned)
        self.lent.update(a.data_ptr() for a, b in zip(values, own) if isinstance(a, torch.Tensor) and a is b)
        return recording

    def _described(self, r: Any, own: Sequence[Any], inputs: Sequence[tuple[int, torch.Tensor]]) -> Any:
        """A result in the form of `Recording.results`. ValueError if it cannot be returned after a replay."""
        if not isinstance(r, torch.Tensor):
            if r is None or isinstance(r, (bool, int, float)):
                return r
            raise ValueError(f"a result is a {type(r).__name__}")
        for i, a in enumerate(own):
            if r is a:
                return ("argument", i)
        if r.device.type != DEVICE:
            raise ValueError(f"a result is on {r.device}")
        if not self.boxed and any(_memory(t) == _memory(r) for _, t in inputs):
            raise ValueError("a result is a view of an input")
        return r


_all: weakref.WeakSet[Recorded] = weakref.WeakSet()


def recorded() -> tuple[Recorded, ...]:
    """The live callables that run under CUDA graphs.

    Returns:
        A `Recorded` for each; its text says how often it was replayed, and why not.
    """
    return tuple(_all)


def current_device() -> int:
    """The current CUDA device; -1 if this process has not used CUDA."""
    return torch.cuda.current_device() if _is_ready() else -1


def is_capturing() -> bool:
    """Whether the current stream is being captured."""
    return _is_ready() and torch.cuda.is_current_stream_capturing()


def _is_ready() -> bool:
    """Whether this process has used a CUDA device."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call,unused-ignore]


def _recover() -> None:
    """Let torch's random generator leave the recording state after a failed recording, by a successful one."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.empty(1, device="cuda").zero_()


def _version(a: Any) -> int | None:
    """The version counter of a tensor; 0 for other values, None if writes are not counted."""
    if not isinstance(a, torch.Tensor):
        return 0
    return None if a.is_inference() else int(a._version)


def _like(a: torch.Tensor) -> torch.Tensor:
    """New memory for copies of `a`, with its strides. ValueError if `a` is expanded."""
    if any(stride == 0 and size > 1 for size, stride in zip(a.shape, a.stride())):
        raise ValueError("an input is expanded: several of its elements share memory")
    return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a.detach())


def why_not(args: Sequence[Any]) -> str:
    """The reason why a call with these arguments is not recorded; "" if it may be."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not tensors or any(a.device.type != DEVICE for a in tensors):
        return "not all inputs are on a CUDA device"
    if any(type(a) not in _PLAIN for a in tensors):
        return "an input is a tensor subclass"
    if len({a.device for a in tensors}) > 1 or tensors[0].device.index != torch.cuda.current_device():
        return "the inputs are not all on the current device"
    if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
        return "gradients of what it gives are needed"
    other = next((a for a in args if not isinstance(a, (torch.Tensor, *_VALUES))), None)
    if other is not None:
        return f"an input is a {type(other).__name__}"
    return ""
