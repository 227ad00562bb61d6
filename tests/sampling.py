"""Cases of a test of which `make test` runs a share: those that the mark `sampled` keeps."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

POSITION = pytest.StashKey[int]()


def position(item: pytest.Item) -> int:
    """The sum of the positions of a case's parameters, 0 without; the same whichever cases are run."""
    return item.stash.get(POSITION, 0)


def share(item: pytest.Item) -> int:
    """Of how many cases of its test `make test` runs one."""
    mark = item.get_closest_marker("sampled")
    return int(mark.args[0]) if mark is not None else 1


def is_named(item: pytest.Item) -> bool:
    """Whether the mark names the case: it runs lines of the package that no other case does."""
    mark = item.get_closest_marker("sampled")
    return mark is not None and hasattr(item, "callspec") and item.callspec.id in mark.kwargs.get("also", ())


def leave_out(items: list[pytest.Item]) -> None:
    """Remove what the mark leaves to `make sweeps`; nothing where a case is asked for by its name.

    A case stays if its position is a multiple of the share, or if the mark names it. So each value of a parameter has
    cases if another parameter has at least as many values as the share; a parameter by itself loses all values but one
    of so many.
    """
    if not items or os.environ.get("FUSER_TEST_ALL") or any("[" in arg for arg in items[0].config.args):
        return
    left = {item for item in items if position(item) % share(item) and not is_named(item)}
    items[0].config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def number(items: Sequence[object]) -> None:
    """Note the positions of all cases of a test. (`callspec.indices` of pytest 9 is the number of the case.)"""
    seen: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            given, total = item.callspec.params, 0
            for names in _axes(item):
                places = seen.setdefault(names, {})
                total += places.setdefault(tuple(id(given[n]) for n in names), len(places))
            item.stash[POSITION] = total


def _axes(item: pytest.Function) -> list[tuple[str, ...]]:
    """The names of a test's parameters; those of one mark come together, and vary together."""
    given = [mark.args[0] for mark in item.iter_markers("parametrize")]
    marked = [tuple(n.strip() for n in names.split(",")) if isinstance(names, str) else tuple(names) for names in given]
    of_fixtures = item.callspec.params.keys() - {name for names in marked for name in names}
    return [*marked, *((name,) for name in sorted(of_fixtures))]
