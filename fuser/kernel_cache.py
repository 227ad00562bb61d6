"""Kernel specifications, and each one's kernels: the only owner of locks on them.

The registry finds a specification by its key or by what it computes. A specification's `KernelStore` compiles once for
each `ArgSpec`, whoever asks and however many ask at once; a failure is remembered with its reason and not tried again.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fuser.canonical import CanonicalGraph, Registered
from fuser.errors import FuserError, UnknownKeyError
from fuser.fallback import Fallback
from fuser.kernel_spec import ArgSpec, LaunchProgram
from fuser.splitting import Split


class FusedKernel(Protocol):
    """What a device's compiler gives: the way to launch it, its library, and its source for reading."""

    @property
    def program(self) -> LaunchProgram: ...
    @property
    def library(self) -> Any: ...
    @property
    def source(self) -> str: ...
    @property
    def name(self) -> str: ...


@dataclass
class KernelEntry:
    """What the store knows of one `ArgSpec`. `reason` is why there is no kernel, or no further one.

    `example` describes the arguments that it was first compiled for: (dtype, device type, size, stride), or a number.
    """

    spec: ArgSpec
    kernels: list[FusedKernel] = field(default_factory=list)
    reason: str | None = None
    compiling: bool = False
    seconds: float = 0.0
    example: tuple[Any, ...] = ()

    @property
    def state(self) -> str:
        """ "compiling", "ready" or "failed"."""
        if self.compiling:
            return "compiling"
        return "ready" if self.kernels else "failed"


class KernelStore:
    """The kernels of one specification, by `ArgSpec`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._entries: dict[ArgSpec, KernelEntry] = {}
        self._fallbacks: Counter[str] = Counter()
        self._splits: list[Split] = []
        self.native_fallbacks: Callable[[], Sequence[tuple[str, int]]] = tuple  # those that only a handle counts

    def get_or_compile(
        self, arg_spec: ArgSpec, compile_kernel: Callable[[], FusedKernel], have: int
    ) -> tuple[KernelEntry, bool]:
        """The entry of `arg_spec` with more than `have` kernels, or with a reason; True if this call compiled.

        While one thread compiles, others that ask for the same wait. `compile_kernel` raises an exception whose text is
        the reason; only what is not an `Exception` (an interrupt) passes through, and is not remembered.
        """
        with self._lock:
            entry = self._entries.setdefault(arg_spec, KernelEntry(arg_spec))
            while entry.compiling:
                self._changed.wait()
            if entry.reason is not None or len(entry.kernels) > have:
                return entry, False
            entry.compiling = True
        kernel, reason, began = None, None, time.perf_counter()
        try:
            kernel = compile_kernel()
        except Exception as e:
            reason = reason_of(e)
        finally:
            with self._lock:
                entry.compiling = False
                entry.seconds += time.perf_counter() - began
                entry.reason = reason
                if kernel is not None:
                    entry.kernels.append(kernel)
                self._changed.notify_all()
        return entry, kernel is not None

    def count(self, arg_spec: ArgSpec) -> int:
        """How many kernels `arg_spec` has so far."""
        with self._lock:
            entry = self._entries.get(arg_spec)
            return len(entry.kernels) if entry is not None else 0

    def reason(self, arg_spec: ArgSpec) -> str | None:
        """Why there is no kernel for `arg_spec`, or no further one; None while nobody knows of a reason."""
        with self._lock:
            entry = self._entries.get(arg_spec)
            return entry.reason if entry is not None else None

    def close(self, arg_spec: ArgSpec, reason: str) -> None:
        """Compile nothing more for `arg_spec`."""
        with self._lock:
            entry = self._entries.setdefault(arg_spec, KernelEntry(arg_spec))
            entry.reason = entry.reason or reason

    def disable(self, kernel: FusedKernel, reason: str) -> None:
        """Take a kernel away; nothing more is compiled for its `ArgSpec`."""
        with self._lock:
            for entry in self._entries.values():
                if any(k is kernel for k in entry.kernels):
                    entry.kernels = [k for k in entry.kernels if k is not kernel]
                    entry.reason = reason

    def note_fallback(self, reason: str) -> None:
        """Count one call that ran by ATen, whole or in part."""
        with self._lock:
            self._fallbacks[reason] += 1

    def note_split(self, split: Split) -> None:
        """Keep how the group was split for some arguments."""
        with self._lock:
            self._splits.append(split)

    @property
    def splits(self) -> tuple[Split, ...]:
        """How the group was split for arguments that no kernel takes, in the order of arrival."""
        with self._lock:
            return tuple(self._splits)

    @property
    def entries(self) -> tuple[KernelEntry, ...]:
        """What is known of each `ArgSpec` seen, in the order of arrival."""
        with self._lock:
            return tuple(self._entries.values())

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that ran by ATen, whole or in part, by reason. Calls that a kernel took are not seen here."""
        with self._lock:
            found = self._fallbacks.copy()
        for reason, calls in self.native_fallbacks():
            found[reason] += calls
        return dict(found)

    @property
    def kernels(self) -> tuple[FusedKernel, ...]:
        """All kernels, in the order in which their `ArgSpec`s arrived."""
        with self._lock:
            return tuple(k for e in self._entries.values() for k in e.kernels)

    @property
    def compile_seconds(self) -> float:
        """Wall time spent compiling, failures included."""
        with self._lock:
            return sum(e.seconds for e in self._entries.values())


def reason_of(error: Exception) -> str:
    """Why there is no kernel, from what its compilation raised."""
    if isinstance(error, FuserError):
        return getattr(error, "reason", None) or str(error)
    return f"a defect of fuser, {type(error).__name__}: {error}"


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """A fusion group, registered: what it computes, without devices or sizes, and the kernels made for it so far.

    `config` are the settings, in force at registration, that change generated code. `blocked` says, if not empty, why
    no kernel can run the group. `broadcast_groups` name the inputs that meet in one elementwise computation and so
    must broadcast together.
    """

    key: int
    graph: CanonicalGraph
    registered: Registered
    config: tuple[tuple[str, Any], ...]
    broadcast_groups: tuple[tuple[int, ...], ...]
    blocked: tuple[str, ...]
    fallback: Fallback
    store: KernelStore

    @functools.cached_property
    def partitions(self) -> tuple[tuple[int, ...], ...]:
        """For each input, the broadcast groups that it is in."""
        out: list[list[int]] = [[] for _ in range(self.graph.n_inputs)]
        for n, group in enumerate(self.broadcast_groups):
            for i in group:
                out[i].append(n)
        return tuple(map(tuple, out))

    @property
    def hash(self) -> str:
        """The canonical graph's content hash, the same in every process."""
        return self.graph.hash

    def __repr__(self) -> str:
        return f"KernelSpec({self.key}, {len(self.graph.calls)} ops, {len(self.store.kernels)} kernels)"


class Runner(Protocol):
    """What runs a specification: `handle(*args)`, `slow` for calls that no kernel takes, `prepare` to compile ahead.

    `complete` adds the defaults of inputs left out and refuses wrong ones.
    """

    @property
    def handle(self) -> Callable[..., Any]: ...

    def slow(self, args: tuple[Any, ...], status: int) -> Any: ...

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]: ...

    def prepare(self, examples: Sequence[Any]) -> Future[str | None]: ...


@dataclass(frozen=True, eq=False)
class Registration:
    """A key's meaning: a specification, what is bound to it, its runner, and the handle that calls take."""

    key: int
    spec: KernelSpec
    bound: tuple[Any, ...]
    runner: Runner
    handle: Callable[..., Any]


Identity = tuple[str, tuple[Any, ...], tuple[int, ...]]


def _contained(handle: Callable[..., Any], container: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args: container(handle(*args))


class Registry:
    """Every specification and registration of the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._specs: dict[Identity, tuple[KernelSpec, Runner]] = {}
        self._by_identity: dict[tuple[Identity, tuple[Any, ...]], Registration] = {}
        self._forms: dict[tuple[str, tuple[Any, ...], tuple[int, ...]], Identity] = {}
        self._by_key: dict[int, Registration] = {}

    def knows(self, identity: Identity) -> bool:
        """Whether there is a specification of what `identity` computes."""
        with self._lock:
            return identity in self._specs

    def is_first(self, form: str, identity: Identity) -> bool:
        """Whether no other graph came before that is of this form, the text of a graph without some constants."""
        with self._lock:
            return self._forms.setdefault((form, *identity[1:]), identity) == identity

    def register(
        self, identity: Identity, bound: tuple[Any, ...],
        make_spec: Callable[[int], tuple[KernelSpec, Runner]], container: Callable[[Any], Any] | None = None,
    ) -> Registration:  # fmt: skip
        """The registration of what `identity` computes on `bound`, tensors and numbers.

        `make_spec(key)` makes its specification if it is new. `container` makes what a call gives of the tuple of
        results, if it is no tuple.
        """
        full = identity, (*(id(v) if isinstance(v, torch.Tensor) else (type(v), v) for v in bound), container)
        with self._lock:
            known = self._by_identity.get(full)
            if known is not None:
                return known
            key = self._free_key(identity)
            if identity not in self._specs:
                self._specs[identity] = make_spec(key)
            spec, runner = self._specs[identity]
            # A partial is native code too; what is bound comes first among the inputs.
            handle = functools.partial(runner.handle, *bound) if bound else runner.handle
            handle = handle if container is None else _contained(handle, container)
            registration = Registration(key, spec, bound, runner, handle)
            self._by_identity[full] = self._by_key[key] = registration
            return registration

    def _free_key(self, identity: Identity) -> int:
        """A key made of the content hash, so that it is the same in every process that registers in the same order."""
        key = int(identity[0][:15], 16)
        while key in self._by_key:
            key += 1
        return key

    def find(self, key: int) -> Registration:
        """The registration of `key`. UnknownKeyError if there is none."""
        found = self._by_key.get(key) if isinstance(key, int) else None
        if found is None:
            raise UnknownKeyError(f"unknown key {key!r}: expected one that register_fusion returned in this process")
        return found

    def registrations(self, keys: Iterable[int] | None = None) -> tuple[Registration, ...]:
        """All registrations, or those of `keys`, in the order of registration."""
        if keys is not None:
            return tuple(self.find(k) for k in keys)
        with self._lock:
            return tuple(self._by_key.values())

    def specs(self) -> tuple[KernelSpec, ...]:
        """All specifications, in the order of registration."""
        with self._lock:
            return tuple(spec for spec, _ in self._specs.values())


REGISTRY = Registry()
