"""Runs graphs that are stored as data (see canonical/portable.py), call by call: the outer program of a loaded file."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuser.aot.own import FUNCTIONS
from fuser.canonical.portable import decode_value, target_of
from fuser.errors import GraphError
from fuser.runtime.loops import LOOPS, Form

Function = Callable[..., Any]
_NONE: tuple[int, ...] = ()


class Rows:
    """A callable of the graph's inputs, bound ones first. It keeps nothing of a call between calls.

    `groups` are called by ["group", number, …] rows, the graph's bodies by ["loop", name, …] rows. GraphError if
    `graph` is not such data.
    """

    def __init__(self, graph: Any, n_bound: int, groups: Sequence[Function] = ()) -> None:
        self._constants: list[Any] = []
        self._groups = groups
        self._steps: list[tuple[Function, Function, int, tuple[int, ...]]] = []
        try:
            self._read(graph, n_bound)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as e:
            raise GraphError(f"this is no graph that fuser.aot wrote: {e}") from None

    def __call__(self, *args: Any) -> Any:
        if len(args) != self._n_inputs:
            raise TypeError(f"a graph of {self._n_inputs} inputs was given {len(args)}")
        values = self._template.copy()
        values[: self._n_inputs] = args
        for function, take, at, dead in self._steps:
            values[at] = function(*take(values))
            for i in dead:
                values[i] = None
        (result,) = self._result(values)
        return result

    # Slots: the inputs, then a value for each call, then constants. `_slot` gives the slot of a row.

    def _read(self, graph: Any, n_bound: int) -> None:
        rows = graph["rows"]
        bodies = [(Rows(b["graph"], 0, self._groups), _forms(b["forms"])) for b in graph.get("bodies", ())]
        self._slot: list[int] = []
        self._calls: list[tuple[Function, list[Any], int]] = []
        inputs = iter(range(n_bound, n_bound + sum(row[0] == "input" for row in rows)))
        self._n_inputs = n_bound + sum(row[0] == "input" for row in rows)
        self._next: int = self._n_inputs
        for kind, what, *rest in rows:
            if kind == "input":
                self._slot.append(next(inputs))
            elif kind == "bound":
                if not 0 <= what < n_bound:
                    raise GraphError(f"bound input {what} of {n_bound} does not exist")
                self._slot.append(what)
            elif kind == "constant":
                self._slot.append(self._place(decode_value(what)))
            elif kind == "loop":
                steps = [bodies[n] for n in rest[2]]
                loop = LOOPS[what](*(body for body, _ in steps), steps[0][1])
                self._slot.append(self._call(loop, rest[0], rest[1]))
            else:
                self._slot.append(self._call(self._function(kind, what), rest[0], rest[1]))
        result = self._place(self._decoded(graph["output"]))
        self._finish(result)

    def _function(self, kind: str, what: Any) -> Function:
        if kind == "group":
            group: Function = self._groups[what]
            return group
        if kind == "method":
            if not isinstance(what, str) or what.startswith("_") or not hasattr(torch.Tensor, what):
                raise GraphError(f"{what!r} is no method of tensors")
            return _Method(what)
        if kind != "call":
            raise GraphError(f"{kind!r} is no kind of a row")
        target = FUNCTIONS.get(str(what)) or target_of(str(what))
        found: Function = getattr(target, "_op", target)  # an overload's bare builtin: one Python frame less
        return found

    def _decoded(self, data: Any) -> Any:
        return decode_value(data, self._ref)

    def _ref(self, index: int) -> Any:
        if not 0 <= index < len(self._slot):
            raise GraphError(f"a row reads value {index} before it is made")
        return _Slot(self._slot[index])

    def _call(self, function: Function, args: Any, kwargs: Any) -> int:
        given, named = list(self._decoded(args)), dict(self._decoded(kwargs))
        if named:
            function = _Named(function, tuple(map(str, named)))
            given += named.values()
        taken = [self._place(value) for value in given]
        return self._add(function, taken)

    def _add(self, function: Function, taken: list[Any]) -> int:
        slot, self._next = self._next, self._next + 1
        self._calls.append((function, taken, slot))
        return slot

    def _place(self, value: Any) -> int:
        """The slot that holds `value` when it is read: a number for values, `~number` for constants."""
        if isinstance(value, _Slot):
            return value.number
        if not any(True for _ in _slots(value)):
            self._constants.append(value)
            return ~(len(self._constants) - 1)
        if isinstance(value, dict):
            keys = tuple(value)
            return self._add(lambda *vs: dict(zip(keys, vs)), [self._place(v) for v in value.values()])
        if isinstance(value, slice):
            return self._add(slice, [self._place(v) for v in (value.start, value.stop, value.step)])
        make: Function = _as_list if isinstance(value, list) else _as_tuple
        return self._add(make, [self._place(v) for v in value])

    def _finish(self, result: Any) -> None:
        def at(slot: int) -> int:
            return slot if slot >= 0 else self._next + ~slot

        last: dict[int, int] = {}
        for n, (_, taken, slot) in enumerate(self._calls):
            for i in (*taken, slot):
                if i >= 0:
                    last[i] = n
        last.pop(result, None)
        dead: dict[int, list[int]] = {}
        for slot, n in last.items():
            dead.setdefault(n, []).append(slot)
        self._template = [None] * self._next + self._constants
        self._steps = [
            (function, _taker([at(i) for i in taken]), slot, tuple(dead.get(n, _NONE)))
            for n, (function, taken, slot) in enumerate(self._calls)
        ]
        self._result = _taker([at(result)])
        del self._calls, self._slot, self._constants, self._groups


def _forms(data: Any) -> tuple[Form, ...] | None:
    """The forms of the rows that a body writes."""
    return data and tuple(
        Form(decode_value(dtype), decode_value(device), tuple(n if isinstance(n, int) else (n[0], n[1]) for n in sizes))
        for dtype, device, sizes in data
    )


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number


class _Named:
    """A call whose last arguments are keyword arguments."""

    def __init__(self, function: Function, names: tuple[str, ...]) -> None:
        self.function, self.names = function, names

    def __call__(self, *args: Any) -> Any:
        n = len(args) - len(self.names)
        return self.function(*args[:n], **dict(zip(self.names, args[n:])))


class _Method:
    """A call of a tensor's method."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, first: Any, *args: Any) -> Any:
        return getattr(first, self.name)(*args)


def _slots(value: Any) -> Iterator[_Slot]:
    if isinstance(value, _Slot):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _slots(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _slots(v)
    elif isinstance(value, slice):
        yield from _slots((value.start, value.stop, value.step))


def _as_list(*values: Any) -> list[Any]:
    return list(values)


def _as_tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _taker(slots: list[int]) -> Function:
    """A function from all values to the tuple of those in `slots`."""
    if not slots:
        return lambda values: ()
    if len(slots) == 1:
        (only,) = slots
        return lambda values: (values[only],)
    return operator.itemgetter(*slots)


__all__ = ["Rows"]
