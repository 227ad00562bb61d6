"""The package's `dataclass` beside the standard library's: the same classes, with methods made when first called."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from dataclasses import FrozenInstanceError, field

import pytest

from fuser import lazy_dataclasses

SETTINGS = [
    {}, {"eq": False}, {"frozen": True}, {"frozen": True, "eq": False}, {"frozen": True, "slots": True},
    {"slots": True},
]  # fmt: skip
METHODS = ("__init__", "__eq__", "__hash__")


def classes(dataclass, settings):
    """A class with every kind of field, and one that inherits, has a method of its own and is complete at the end."""

    @dataclass(**settings)
    class Point:
        x: int
        y: int = 2
        seen: list = field(default_factory=list, compare=False)
        name: str = field(default="p", kw_only=True)
        hidden: int = field(default=7, init=False, repr=False)

    @dataclass(**settings)
    class Solid(Point):
        z: float = field(default=0.5, hash=False)
        made: list = field(init=False, default_factory=list)

        def __post_init__(self):
            self.made.append(self.z)

        def __repr__(self):
            return f"solid at {self.x}"

    for made in (Point, Solid):  # `pickle` finds it by its name
        made.__qualname__ = made.__name__ = f"{made.__name__}_{dataclass.__module__.split('.')[0]}"
        setattr(sys.modules[__name__], made.__name__, made)
    return Point, Solid


def said(function):
    try:
        return function()
    except Exception as error:
        return type(error)


def behaviour(cls):
    def look(*args, **kwargs):
        made = cls(*args, **kwargs)
        other, less = cls(*args, **kwargs), cls(args[0] + 1)
        return [
            repr(made).replace(cls.__name__, "C"), made == other, made == less, made != 3, made.seen is other.seen,
            said(lambda: hash(made) == hash(other)), said(lambda: setattr(made, "x", 5)), made.x,
            said(lambda: delattr(less, "y")), said(lambda: less.y), dataclasses.asdict(other),
            [f.name for f in dataclasses.fields(made)], cls.__match_args__, hasattr(made, "__dict__"),
            dataclasses.asdict(dataclasses.replace(other, y=9)) if "init=False" not in str(args) else None,
            dataclasses.asdict(copy.deepcopy(other)), dataclasses.asdict(pickle.loads(pickle.dumps(other))),
        ]  # fmt: skip

    calls = [
        ((1,), {}),
        ((1, 5), {"name": "q"}),
        ((3, 4, [1]), {}),
        ((), {}),
        ((1, 2, [], 4.0, 5, 6), {}),
        ((1,), {"w": 1}),
        ((1,), {"x": 2}),
    ]
    return [said(lambda args=args, kwargs=kwargs: look(*args, **kwargs)) for args, kwargs in calls]


@pytest.mark.parametrize("few", [0, 1, 4, 1000])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_classes_are_as_the_standard_ones(monkeypatch, settings, few):
    """Objects filled field by field, by compiled methods, and by both."""
    monkeypatch.setattr(lazy_dataclasses, "_FEW", few)
    mine, standard = classes(lazy_dataclasses.dataclass, settings), classes(dataclasses.dataclass, settings)
    for a, b in zip(mine, standard, strict=True):
        for name in METHODS:
            assert (getattr(a, name) is None) == (getattr(b, name) is None), name
        found = behaviour(a)
        assert found == behaviour(b) == behaviour(a)
        assert isinstance(found[0], list), found[0]


def test_methods_are_compiled_when_they_are_called_often(monkeypatch):
    made = []
    plain = lazy_dataclasses._compiled
    monkeypatch.setattr(
        lazy_dataclasses, "_compiled", lambda cls, name, *rest: made.append(name) or plain(cls, name, *rest)
    )

    @lazy_dataclasses.dataclass(frozen=True)
    class Pair:
        a: int
        b: int

    assert made == []
    pairs = [Pair(1, i) for i in range(lazy_dataclasses._FEW)]
    assert made == []
    pairs.append(Pair(1, len(pairs)))
    assert made == ["__init__"]
    assert len({*pairs, *pairs}) == len(pairs) and made.count("__hash__") == 1 and made.count("__init__") == 1
    with pytest.raises(FrozenInstanceError, match="'a'"):
        pairs[0].a = 1
    with pytest.raises(TypeError, match="Pair.__init__"):
        Pair(1)
