"""Kernel specifications and their registrations. The registry finds one by its key or by what it computes.

With `kernel_store.py`, which keeps the kernels of each, this module is the only owner of locks on them.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import cachetools
import torch

from fuser import forks
from fuser.canonical import CanonicalGraph, Flattened, Registered
from fuser.canonical.spelling import spelling_of
from fuser.errors import InputError, UnknownKeyError
from fuser.fallback import Fallback
from fuser.kernel_store import Counted, KernelStore
from fuser.lazy_dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """A registered fusion group: its computation, without devices or sizes, and the kernels compiled for it so far.

    `config` are the settings, at registration, that change generated code. `blocked` are the reasons, if any, why no
    kernel can run the group. `broadcast_groups` name the inputs that are combined in one elementwise computation and
    so have to broadcast together.
    """

    key: int
    graph: CanonicalGraph
    registered: Registered
    config: tuple[tuple[str, Any], ...]
    broadcast_groups: tuple[tuple[int, ...], ...]
    blocked: tuple[str, ...]
    fallback: Fallback
    store: KernelStore

    @property
    def hash(self) -> str:
        """The content hash of the canonical graph, the same in every process."""
        return self.graph.hash

    def __repr__(self) -> str:
        return f"KernelSpec({self.key}, {len(self.graph.calls)} ops, {len(self.store.kernels)} kernels)"


class Caller(NamedTuple):
    """The caller of a specification: a key, and the names of its inputs, which other keys may name otherwise."""

    key: int
    inputs: tuple[str, ...]


class Runner(Protocol):
    """Runs a specification: `slow` for calls that no kernel accepts, `prepare` to compile ahead.

    `handle` is the entry. It holds the runner, but the runner does not hold it. `complete` adds the defaults of
    missing inputs and rejects wrong ones; before that, `in_order` puts keyword arguments into their positions.
    Messages of both are about `caller`; without one, about the key that was registered first. `gradients` runs calls
    whose arguments require gradients; None for ATen.
    """

    spec: KernelSpec
    gradients: Callable[..., Any] | None

    @property
    def handle(self) -> Callable[..., Any]: ...

    def slow(self, args: tuple[Any, ...], status: int) -> Any: ...

    def reduce(self, own: Registered | None = None, bound: tuple[Any, ...] = ()) -> tuple[Any, ...]: ...

    def complete(self, args: tuple[Any, ...], caller: Caller | None = None) -> tuple[Any, ...]: ...

    def in_order(
        self, args: tuple[Any, ...], named: dict[str, Any], caller: Caller | None = None
    ) -> tuple[Any, ...]: ...  # fmt: skip

    def prepare(self, examples: Sequence[Any]) -> Future[str | None]: ...

    def reconsider(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Registration:
    """The meaning of a key: a specification, its bound inputs, its runner, and the handle that is called."""

    key: int
    inputs: tuple[str, ...]
    spec: KernelSpec
    bound: tuple[Any, ...]
    runner: Runner
    handle: Callable[..., Any]

    def arguments(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """All arguments of the specification for a call with `inputs`, or a single one. InputError if they are
        wrong."""
        if not isinstance(inputs, (list, tuple)):
            inputs = [inputs]
        takes: Flattened | None = getattr(self.handle, "takes", None)
        given = inputs if takes is None else takes(inputs, {})
        return self.runner.complete((*self.bound, *given), Caller(self.key, self.inputs))


Identity = tuple[str, tuple[Any, ...], tuple[int, ...]]
Full = tuple[Identity, tuple[Any, ...]]
_NUMBERS = (int, float, bool, complex)
_NUMBER_IN_OTHER_WORDS = (
    "an input is a number, and an equal graph with other operators, which may treat numbers differently, "
    "was registered first"
)
_GONE = 4096  # most keys of gone fusions that are remembered
_FORMS = 16384  # most graphs without some constants whose first occurrence is remembered


class _Way:
    """A handle around another one, `inside`, with its counts."""

    inside: Any

    @property
    def hits(self) -> int:
        return int(self.inside.hits)

    @property
    def misses(self) -> int:
        return int(self.inside.misses)

    @property
    def kernel_count(self) -> int:
        return int(self.inside.kernel_count)


class Bound(_Way, functools.partial):  # type: ignore[type-arg]
    """A handle with bound first inputs. A partial is native code, too."""

    @property
    def inside(self) -> Any:
        """The handle that is called with the bound inputs before the others."""
        return self.func


def _around(
    handle: Callable[..., Any], takes: Flattened | None, container: Callable[[Any], Any] | None
) -> Callable[..., Any]:  # fmt: skip
    """A handle that takes arguments and returns results in other containers than the graph's."""
    return handle if takes is None and container is None else _Around(handle, takes, container)


class _Around(_Way):
    """See `_around`."""

    def __init__(
        self, handle: Callable[..., Any], takes: Flattened | None, container: Callable[[Any], Any] | None
    ) -> None:  # fmt: skip
        self.inside, self.takes, self.container = handle, takes, container

    def __call__(self, *args: Any, **named: Any) -> Any:
        takes, container = self.takes, self.container
        results = self.inside(*args, **named) if takes is None else self.inside(*takes(args, named))
        return results if container is None else container(results)


class _InOwnWords(_Way):
    """The handle of a graph whose inputs or calls have other names than those of the specification that it shares.

    Keywords and messages use the names of its own inputs. If its calls have other spellings, `own` runs calls with
    numbers: such spellings are equivalent for tensors only (see `canonical/spelling.py`).
    """

    def __init__(
        self, handle: Callable[..., Any], runner: Runner, registered: Registered, key: int, own: Fallback | None
    ) -> None:  # fmt: skip
        self.inside, self._runner, self._registered, self._own = handle, runner, registered, own
        self._caller = Caller(key, registered.inputs)

    def __call__(self, *args: Any, **named: Any) -> Any:
        bound = self._registered.bound
        if named:
            args = self._runner.in_order((*bound, *args), named, self._caller)[len(bound) :]
        if self._own is not None:
            for a in args:
                if type(a) in _NUMBERS:
                    self._runner.spec.store.note_fallback(_NUMBER_IN_OTHER_WORDS)
                    return self._own(*self._runner.complete((*bound, *args), self._caller))
        try:
            return self.inside(*args)
        except InputError as said:
            wrong = self._wrong((*bound, *args)) or said
        raise wrong

    def _wrong(self, args: tuple[Any, ...]) -> InputError | None:
        """The error about wrong arguments, with the names of this handle's inputs."""
        try:
            self._runner.complete(args, self._caller)
        except InputError as said:
            return said
        return None

    def __reduce__(self) -> Any:
        return self._runner.reduce(self._registered, self._registered.bound)

    def __copy__(self) -> _InOwnWords:
        return self

    def __deepcopy__(self, memo: Any) -> _InOwnWords:
        return self


def _bound(handle: Callable[..., Any]) -> tuple[Any, ...]:
    """The bound inputs of a handle that `Registry.register` made."""
    while isinstance(handle, _Way) and not isinstance(handle, Bound):
        handle = handle.inside
    return handle.args if isinstance(handle, Bound) else ()


@dataclass(eq=False)
class _Entry:
    """The registry's record of a key. It holds a handle only while `count` registrations are not undone.

    `offset`: the distance of the key from its first choice; None if the same key may be used again.
    """

    key: int
    inputs: tuple[str, ...]
    full: Full
    offset: int | None
    handle: weakref.ref[Callable[..., Any]]
    runner: weakref.ref[Runner]
    count: int = 0
    held: Registration | None = None


def _not_a_key(key: object) -> str:
    """The sentence about a value that `register_fusion` did not return in this process."""
    if key is None or isinstance(key, (int, float, str, list, tuple)):
        return f"unknown key {key!r}: expected one that register_fusion returned in this process"
    cure = "register_fusion(graph) gives the key of a graph, and fuser.explain(model, *inputs) tells of a model"
    return f"a {type(key).__name__} is no key: expected a number that register_fusion returned in this process; {cure}"


class Registry:
    """Every live specification and registration of the process.

    A registration lives as long as its handle: the registry, frontends, users and running calls hold handles. The
    handle holds the runner, and with it the specification, its kernels and bound inputs; nothing of these holds the
    handle, so all are freed together with the last reference to it.
    """

    def __init__(self) -> None:
        self._lock = forks.rlock()
        self._specs: dict[Identity, tuple[weakref.ref[Callable[..., Any]], weakref.ref[Runner]]] = {}
        self._by_full: dict[Full, _Entry] = {}
        self._by_key: dict[int, _Entry] = {}
        self._forms: cachetools.LRUCache[bytes, Identity] = cachetools.LRUCache(_FORMS)
        self._gone: cachetools.LRUCache[int, None] = cachetools.LRUCache(_GONE)
        self.compiled = Counted()  # kernels compiled or taken from disk, including freed ones
        self._floor = 0  # least distance of such a key from its first choice, so that no freed key is used again
        # Freed entries, noted by handles when they die, which may be at any time and in any thread.
        self._leaving: collections.deque[_Entry | Identity] = collections.deque()

    def knows(self, identity: Identity) -> bool:
        """Whether there is a live specification with this identity."""
        with self._lock:
            return self._spec_of(identity) is not None

    def is_first(self, form: str, identity: Identity) -> bool:
        """Whether no other graph had this form before, the text of a graph without some constants."""
        digest = hashlib.blake2b(repr((form, identity[1:])).encode(), digest_size=16).digest()
        with self._lock:
            return bool(self._forms.setdefault(digest, identity) == identity)

    def register(
        self,
        identity: Identity,
        registered: Registered,
        make_runner: Callable[[int], tuple[Runner, Any]],
        by_name: bool = False,
    ) -> Registration:
        """The registration of a graph with this identity; it lives as long as the caller holds it.

        `make_runner(key)` makes the runner and the handle of its specification if that is new. `by_name`: its handle
        also takes inputs by the names of its own graph.
        """
        bound, spelling = registered.bound, spelling_of(registered)
        tensors_by_id = (id(v) if isinstance(v, torch.Tensor) else (type(v), v) for v in bound)
        around = registered.takes, registered.container
        names = registered.inputs if by_name else ()
        full = identity, (*tensors_by_id, *around, spelling, names)
        with self._lock:
            self._sweep()
            entry = self._by_full.get(full)
            known = _registration(entry) if entry is not None else None
            if known is not None:
                return known
            key, offset = self._free_key((identity, spelling, names), bool(bound or any(around) or any(identity[2])))
            way_in = self._spec_of(identity)
            if way_in is None:
                made_runner, way_in = make_runner(key)
                made_runner.spec.store.compiled = self.compiled
                leave = functools.partial(_append, self._leaving, identity)
                self._specs[identity] = weakref.ref(way_in, leave), weakref.ref(made_runner)
            found = self._specs[identity][1]
            runner = found()
            assert runner is not None  # its entry holds it
            handle = Bound(way_in, *bound) if bound else way_in  # bound inputs come first
            respelled = spelling != spelling_of(runner.spec.registered)
            if respelled or names and names != runner.spec.registered.inputs:
                own = Fallback(registered) if respelled else None
                handle = _InOwnWords(handle, runner, registered, key, own)
            handle = _around(handle, *around)
            entry = _Entry(key, registered.inputs, full, offset, weakref.ref(handle), found)
            entry.handle = weakref.ref(handle, functools.partial(_append, self._leaving, entry))
            self._by_full[full] = self._by_key[key] = entry
            made = _registration(entry)
            assert made is not None  # its handle is held here
            return made

    def _spec_of(self, identity: Identity) -> Callable[..., Any] | None:
        """The entry of a specification, if it is alive."""
        known = self._specs.get(identity)
        return known[0]() if known is not None else None

    def _free_key(self, spelled: tuple[Identity, str, tuple[str, ...]], is_bound: bool) -> tuple[int, int | None]:
        """A key that no other registration has or had, and its distance from the first choice.

        It is derived from a hash, so it is the same in every process that registers in the same order. A registration
        without objects of this process is its hash: registered again, it gets the same key.
        """
        (content, settings, _), spelling, names = spelled
        text = repr((content, settings, spelling, names, is_bound))
        first = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
        offset = self._floor if is_bound else 0
        while first + offset in self._by_key:
            offset += 1
        return first + offset, offset if is_bound else None

    def _sweep(self) -> None:
        """Remove freed entries. Called under the lock."""
        while self._leaving:
            left = self._leaving.popleft()
            if isinstance(left, _Entry):
                if self._by_key.get(left.key) is left:
                    del self._by_key[left.key]
                if self._by_full.get(left.full) is left:
                    del self._by_full[left.full]
                self._gone[left.key] = None
                self._floor = max(self._floor, (left.offset or 0) + 1) if left.offset is not None else self._floor
            elif left in self._specs and self._specs[left][0]() is None:
                del self._specs[left]

    def hold(self, registration: Registration) -> None:
        """Keep a registration until `release` was called as often as this."""
        with self._lock:
            entry = self._by_key[registration.key]
            entry.count += 1
            entry.held = registration

    def release(self, key: int) -> int:
        """Undo one registration of `key`. Returns the bytes that only it held, as far as known here.

        UnknownKeyError if there is none.
        """
        with self._lock:
            self.find(key)
            entry = self._by_key[key]
            if not entry.count:
                raise UnknownKeyError(
                    f"fusion {key} is not registered any more: it leaves with the last of its handles, which are held"
                )
            entry.count -= 1
            held = entry.held
            entry.held = held if entry.count else None
            tensors = held.bound if held is not None and entry.held is None else ()
            size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
        del held, tensors  # outside of the lock: this may free all of it
        return size

    def find(self, key: int) -> Registration:
        """The registration of `key`. UnknownKeyError if there is none."""
        entry = self._by_key.get(key) if isinstance(key, int) else None
        found = (entry.held or _registration(entry)) if entry is not None else None
        if found is not None:
            return found
        if entry is not None or isinstance(key, int) and key in self._gone:
            raise UnknownKeyError(
                f"fusion {key} is gone: it was unregistered, and nobody holds a handle of it any more; register its "
                "graph again, which gives the key to use"
            )
        raise UnknownKeyError(_not_a_key(key))

    def registrations(self, keys: Iterable[int] | None = None) -> tuple[Registration, ...]:
        """All registrations, or those of `keys`, in the order of registration."""
        if keys is not None:
            return tuple(self.find(k) for k in keys)
        with self._lock:
            self._sweep()
            found = [_registration(entry) for entry in self._by_key.values()]
        return tuple(r for r in found if r is not None)

    def specs(self) -> tuple[KernelSpec, ...]:
        """All specifications, in the order of registration."""
        with self._lock:
            self._sweep()
            runners = [runner() for _, runner in self._specs.values()]
        return tuple(runner.spec for runner in runners if runner is not None)


def _append(queue: collections.deque[Any], left: Any, _: Any) -> None:
    queue.append(left)


def _registration(entry: _Entry) -> Registration | None:
    """The registration of an entry, made from its handle; None if that is freed."""
    if entry.held is not None:
        return entry.held
    handle, runner = entry.handle(), entry.runner()
    if handle is None or runner is None:
        return None
    return Registration(entry.key, entry.inputs, runner.spec, _bound(handle), runner, handle)


REGISTRY = Registry()
