"""Background work for one specification, and the calls that run on ATen until it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from fuser import config, examples, forks
from fuser.kernel_cache import KernelSpec
from fuser.kernel_spec import ALIGNMENT, ArgSpec
from fuser.reasons import because
from fuser.runtime.background import COMPILERS, yielding
from fuser.trials import form_of

# Forms of calls (dtypes, sizes, strides) that are remembered as sent to ATen, so that they cost almost nothing.
MAX_FORMS = 1024
PENDING = because("pending", "its kernel is being compiled in the background")
POOL = COMPILERS


def in_background() -> bool:
    """Whether calls run on ATen while kernels are compiled. Deterministic results must not depend on timing."""
    return config.compile_mode == "background" and not torch.are_deterministic_algorithms_enabled()


def wait(timeout: float | None = None) -> bool:
    """Wait until no background compilation runs, for `timeout` seconds at most. Returns whether none does."""
    return POOL.wait(timeout)


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """A block that delays other threads as little as possible."""
    from fuser import elsewhere  # only for background compilations

    with yielding(), elsewhere.preferred():
        yield


class Orders:
    """The orders of one specification: a kernel of an `ArgSpec`, or for None the split of a blocked group.

    `make(key, args, have)` carries out an order, if more than `have` kernels are wanted; it returns None, or why there
    is no kernel. `handle` gives the entry, which an order holds until it is done.
    """

    def __init__(
        self, spec: KernelSpec, handle: Callable[[], Any], make: Callable[[ArgSpec | None, Any, int], str | None]
    ) -> None:  # fmt: skip
        self._spec, self._handle, self._make = spec, handle, make
        self._lock = forks.rlock()  # of `_pending`, and of forms sent to ATen in the meantime
        self._prepared: dict[ArgSpec | None, Future[str | None]] = {}
        self._pending: set[ArgSpec | None] = set()
        self._n_meanwhile = 0
        self._made_for: set[Any] = set()  # calls for which a kernel was made
        forks.follow(self)

    def order(self, key: ArgSpec | None, args: Callable[[], tuple[Any, ...]], have: int) -> Future[str | None]:
        """Order `key`, unless it is ordered already."""
        with self._lock:
            if key not in self._pending:
                self._pending.add(key)
                settings = config.snapshot()
                # The handle is held, so that the kernel's owner lives until then.
                self._prepared[key] = POOL.submit(lambda _: self._serve(key, args, have, settings), self._handle())
            return self._prepared[key]

    def _serve(
        self, key: ArgSpec | None, make_args: Callable[[], tuple[Any, ...]], have: int, settings: dict[str, Any]
    ) -> str | None:  # fmt: skip
        """Carry out an order; calls that ran on ATen until then try again. Returns None, or why there is no kernel."""
        try:
            waits = settings["compile_mode"] == "wait"
            with config.override(**settings), contextlib.nullcontext() if waits else _beside():
                return self._make(key, make_args(), have)
        finally:
            with self._lock:
                self._pending.discard(key)
                self._ask_again()

    def leave_meanwhile(self, key: ArgSpec | None, args: tuple[Any, ...], have: int) -> None:
        """Order `key`. Until it is done, calls of the form of `args` run on ATen at no further cost."""
        with self._lock:  # no order may end between the question and the entry
            if key is not None and key not in self._pending:
                self._close_if_blind(key, args)
            outlines = tuple(map(examples.outline, args))
            self.order(key, lambda: tuple(map(examples.stand_in, outlines)), have)
            refuse, native = getattr(self._handle(), "refuse", None), getattr(self._spec.fallback, "function", None)
            pending = key in self._pending  # else there are no threads, and it is done
            if refuse is not None and native is not None and pending and self._n_meanwhile < MAX_FORMS:
                self._n_meanwhile += refuse(native, PENDING, args)

    def _ask_again(self) -> None:
        if self._n_meanwhile:
            getattr(self._handle(), "pardon", lambda reason: None)(PENDING)

    def _close_if_blind(self, key: ArgSpec, args: tuple[Any, ...]) -> None:
        """Compile nothing more for a call whose own kernel did not accept it."""
        call = form_of(args), tuple(a.data_ptr() % ALIGNMENT for a in args if isinstance(a, torch.Tensor))
        if call in self._made_for:
            self._spec.store.close(key, because("variants", "its kernel does not take the inputs it was compiled for"))
        elif len(self._made_for) < MAX_FORMS:
            self._made_for.add(call)

    def after_fork(self) -> None:
        """Drop the orders in a forked child, which has no threads to carry them out."""
        self._pending.clear()
        self._made_for.clear()
        self._ask_again()


__all__ = ["MAX_FORMS", "PENDING", "POOL", "Orders", "in_background", "wait"]
