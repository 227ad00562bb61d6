"""Bounded memory of a long process: cached answers, sentences already printed, and calls counted by reason."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, MutableMapping, MutableSet
from typing import Any, TypeVar

from fuser import config, forks

settings: Any = config  # its attributes are made from a table
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
OTHERS = "other reasons"


class Recent(MutableMapping[K, V]):
    """A thread-safe dict; beyond `config.memo_limit` items the least recently used are dropped."""

    def __init__(self) -> None:
        self._items: OrderedDict[K, V] = OrderedDict()  # least recently used first
        self._lock = forks.lock()

    def __getitem__(self, key: K) -> V:
        with self._lock:
            self._items.move_to_end(key)
            return self._items[key]

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            while len(self._items) > settings.memo_limit:
                self._items.popitem(last=False)

    def __delitem__(self, key: K) -> None:
        with self._lock:
            del self._items[key]

    def __iter__(self) -> Iterator[K]:
        with self._lock:
            return iter(tuple(self._items))

    def __len__(self) -> int:
        return len(self._items)


class Seen(MutableSet[K]):
    """A thread-safe set; beyond `config.memo_limit` members the oldest are dropped."""

    def __init__(self, members: Iterable[K] = ()) -> None:
        self._members: Recent[K, None] = Recent()
        for member in members:
            self.add(member)

    def add(self, value: K) -> None:
        """Add a member as the newest."""
        self._members[value] = None

    def discard(self, value: K) -> None:
        """Remove a member if it is there."""
        self._members.pop(value, None)

    def __contains__(self, value: object) -> bool:
        return value in self._members

    def __iter__(self) -> Iterator[K]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


class Tally(Counter[str]):
    """Calls by reason; reasons beyond `config.memo_limit` different ones are counted together."""

    def note(self, reason: str) -> None:
        """Count one call for `reason`."""
        known = reason in self or len(self) < settings.memo_limit
        self[reason if known else OTHERS] += 1


__all__ = ["OTHERS", "Recent", "Seen", "Tally"]
