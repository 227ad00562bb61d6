"""A `dataclass` like the standard library's whose methods are compiled later: each when it is called often enough.

The standard decorator compiles up to seven functions for each class, 0.1 ms each, whether or not a process needs the
class. That was a third of the time of `import fuser` and the first kernel. Type checkers see the standard decorator.

Restrictions for these classes: no `InitVar`, no `order`, and subclasses use the same decorator.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

_MISSING = dataclasses.MISSING


def _compiled(cls: type, name: str, head: str, lines: list[str], scope: dict[str, Any]) -> Any:
    """Compile the function with the signature `head` and these lines as the method `name` of the class."""
    exec("\n ".join([head, *lines]), scope)
    function = scope[name]
    function.__qualname__ = f"{cls.__qualname__}.{name}"
    function.__module__ = cls.__module__
    setattr(cls, name, function)
    return function


def _init(cls: Any, frozen: bool) -> Any:
    scope: dict[str, Any] = {"_set": object.__setattr__, "_none": _MISSING}
    positional: list[str] = []
    named: list[str] = []
    lines: list[str] = []
    for i, f in enumerate(dataclasses.fields(cls)):
        value = f.name
        if f.default_factory is not _MISSING:
            scope[f"_make{i}"] = f.default_factory
            value = f"_make{i}() if {f.name} is _none else {f.name}" if f.init else f"_make{i}()"
        elif not f.init:
            if "__slots__" not in vars(cls) or f.default is _MISSING:
                continue  # the class has the default, or there is none
            scope[f"_given{i}"], value = f.default, f"_given{i}"
        if f.init:
            has_default = f.default is not _MISSING or f.default_factory is not _MISSING
            scope[f"_given{i}"] = _MISSING if f.default is _MISSING else f.default
            (named if f.kw_only else positional).append(f.name + (f"=_given{i}" if has_default else ""))
        lines.append(f"_set(self, {f.name!r}, {value})" if frozen else f"self.{f.name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    head = ", ".join(["self", *positional, *(["*"] if named else []), *named])
    return _compiled(cls, "__init__", f"def __init__({head}):", lines or ["pass"], scope)


def _eq(cls: Any, frozen: bool) -> Any:
    mine, other = (_tuple(whose, [f.name for f in dataclasses.fields(cls) if f.compare]) for whose in ("self", "other"))
    lines = ["if other.__class__ is not self.__class__: return NotImplemented", f"return {mine} == {other}"]
    return _compiled(cls, "__eq__", "def __eq__(self, other):", lines, {})


def _hash(cls: Any, frozen: bool) -> Any:
    names = [f.name for f in dataclasses.fields(cls) if (f.compare if f.hash is None else f.hash)]
    return _compiled(cls, "__hash__", "def __hash__(self):", [f"return hash({_tuple('self', names)})"], {})


def _tuple(whose: str, names: list[str]) -> str:
    return f"({''.join(f'{whose}.{name}, ' for name in names)})"


_MAKERS: dict[str, Callable[[Any, bool], Any]] = {"__init__": _init, "__eq__": _eq, "__hash__": _hash}


_FEW = 4  # objects of a class made without a compiled method; compiling one takes as long as 20 of them


def _add(cls: Any, name: str, frozen: bool) -> None:
    """Give the class a method that compiles the real one, replaces itself by it, and calls it.

    The first few objects are filled field by field: in a process of one kernel most classes have no more.
    """
    left = _FEW if name == "__init__" else 0

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or not _fill(cls, frozen, self, args, kwargs):
            return _MAKERS[name](cls, frozen)(self, *args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"{cls.__qualname__}.{name}"
    setattr(cls, name, method)


def _fill(cls: Any, frozen: bool, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Do what the compiled `__init__` does, or nothing if that would raise; returns whether it was done."""
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields if f.init and not f.kw_only]
    taken = {f.name for f in fields if f.init}
    given = {**dict(zip(names, args)), **kwargs}
    if len(given) != len(args) + len(kwargs) or not given.keys() <= taken:
        return False
    needed = (f for f in fields if f.init and f.default is _MISSING and f.default_factory is _MISSING)
    if any(f.name not in given for f in needed):
        return False
    put = object.__setattr__ if frozen else setattr
    for f in fields:
        if f.name in given:
            put(self, f.name, given[f.name])
        elif f.default_factory is not _MISSING:
            put(self, f.name, f.default_factory())
        elif f.default is not _MISSING and (f.init or "__slots__" in vars(cls)):
            put(self, f.name, f.default)
    if hasattr(cls, "__post_init__"):
        self.__post_init__()
    return True


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _refuse_set(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for f, value in zip(dataclasses.fields(self), state):
        object.__setattr__(self, f.name, value)


def _with_fields(cls: Any, slots: bool) -> Any:
    """The standard library's class without methods.

    The standard decorator searches string annotations for words such as `ClassVar`, which takes half of its time. If
    there are none, it gets other annotations during that call.
    """
    make = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)
    cls.__doc__ = cls.__doc__ or cls.__name__  # else it would write a signature there, which takes 0.2 ms
    types = vars(cls).get("__annotations__")
    if not types or any(not isinstance(t, str) or "ClassVar" in t for t in types.values()):
        return make(cls)
    cls.__annotations__ = dict.fromkeys(types, object)
    cls = make(cls)
    cls.__annotations__ = types
    for name, text in types.items():
        cls.__dataclass_fields__[name].type = text
    return cls


def _lazy(cls: Any, frozen: bool, eq: bool, slots: bool) -> Any:
    own = set(vars(cls))
    unhashed = vars(cls).get("__hash__", _MISSING) is None and "__eq__" in own  # as Python sets it beside an `__eq__`
    cls = _with_fields(cls, slots)
    wanted = {"__init__": True, "__eq__": eq, "__hash__": eq and frozen}
    if unhashed:
        own.discard("__hash__")
    for name, is_wanted in wanted.items():
        if is_wanted and name not in own:
            _add(cls, name, frozen)
    if eq and not frozen and "__hash__" not in own:
        cls.__hash__ = None
    shared: dict[str, Any] = {"__repr__": _repr}
    if frozen:
        shared |= {"__setattr__": _refuse_set, "__delattr__": _refuse_delete}
    if frozen and slots:
        shared |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, function in shared.items():
        if name not in own:
            setattr(cls, name, function)
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, slots=False):
        """Like `dataclasses.dataclass`; methods are compiled when they are first called."""
        return _lazy(cls, frozen, eq, slots) if cls is not None else lambda c: _lazy(c, frozen, eq, slots)


__all__ = ["dataclass"]
