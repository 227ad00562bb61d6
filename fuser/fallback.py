"""The fusion group on ATen: eager's own results and eager's own errors. This defines what is right.

The group's calls, in their original form, become the lines of one Python function, which is made on demand.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fuser import forks
from fuser.canonical import Ref, Registered, Row, refs_of
from fuser.canonical.mutation import in_place_twin


class Fallback:
    """A callable of the group's inputs, bound tensors first, that returns the graph's output, lists as tuples."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._lock = forks.lock()
        self._function: Callable[..., Any] | None = None
        self._source = ""

    def __call__(self, *args: Any) -> Any:
        function = self._function or self._make()
        return function(*args)

    @property
    def function(self) -> Callable[..., Any]:
        """The function that a call runs: plain Python, one line for each of the group's calls."""
        return self._function or self._make()

    @property
    def registered(self) -> Registered:
        """The group in its original form."""
        return self._registered

    @property
    def source(self) -> str:
        """The source of the function."""
        if self._function is None:
            self._make()
        return self._source

    @property
    def is_single(self) -> bool:
        """Whether the group is one operator apart from views; its result may be copied into its first argument."""
        return len([row for row in _in_place(self._registered).rows if _computes(row)]) == 1

    @property
    def direct(self) -> Callable[..., Any] | None:
        """For a single operator, the function with torch's own functions in place of overloads, as eager code calls
        them: they parse arguments 0.5 to 2 µs faster. None if there are none. It is not known whether both mean the
        same for all arguments."""
        own = _in_place(self._registered)
        calls = [row for row in own.rows if row.op == "call_function"]
        if not self.is_single or any(_computes(row) and _torch_function(row.target) is None for row in calls):
            return None
        source, names = _Writer(own, lambda target: _torch_function(target) or target).write()
        return self._compiled(source, names)

    def _compiled(self, source: str, names: dict[str, Any]) -> Callable[..., Any]:
        exec(compile(source, f"<fallback {self._registered.graph.hash[:12]}>", "exec"), names)
        made: Callable[..., Any] = names.pop("fallback")  # no cycle: the objects it holds are freed with it
        return made

    def _make(self) -> Callable[..., Any]:
        with self._lock:
            if self._function is None:
                source, names = _Writer(self._registered).write()
                self._source, self._function = source, self._compiled(source, names)
            return self._function


def _computes(row: Row) -> bool:
    """Whether a row is a call of anything but a view."""
    if row.op not in ("call_function", "call_method") or row.target is operator.getitem:
        return False
    schema = getattr(row.target, "_schema", None)
    return schema is None or not any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _in_place(registered: Registered) -> Registered:
    """The group in eager's in-place form: `x.relu_()` if one operator's result is copied into its first argument,
    which is read nowhere else. The group itself if it has another form."""
    calls = [row for row in registered.rows if row.op in ("call_function", "call_method")]
    if len(calls) != 2 or calls[1].target is not torch.ops.aten.copy_.default or not calls[0].args:
        return registered
    made, copy = calls
    written, twin = made.args[0], in_place_twin(made.target)
    inputs = [row.index for row in registered.rows if row.op == "placeholder"]
    if twin is None or not isinstance(written, Ref) or written.index not in inputs:
        return registered
    again = [*refs_of((made.args[1:], made.kwargs)), *refs_of(registered.output)]
    if copy.kwargs or copy.args != (written, Ref(made.index)) or {made.index, written.index} & {*again}:
        return registered
    own = Row(copy.index, "call_function", twin, made.args, made.kwargs)
    return replace(registered, rows=tuple(own if row is copy else row for row in registered.rows if row is not made))


def _torch_function(target: Any) -> Callable[..., Any] | None:
    """torch's own Python function for an operator's overload, if it has the same name; else None."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    homes = (torch._C._VariableFunctions, torch._C._nn, torch.Tensor)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


def text_of(value: Any, leaf: Callable[[Any], str]) -> str:
    """The Python of a canonical value: rows' results are variables v0, v1, …, and `leaf` writes all but containers."""
    if isinstance(value, Ref):
        return f"v{value.index}"
    if type(value) in (tuple, list):
        inner = ", ".join(text_of(v, leaf) for v in value)
        return f"[{inner}]" if type(value) is list else f"({inner},)" if len(value) == 1 else f"({inner})"
    if type(value) is dict:
        return "{" + ", ".join(f"{k!r}: {text_of(v, leaf)}" for k, v in value.items()) + "}"
    if type(value) is slice:
        return f"slice({', '.join(text_of(v, leaf) for v in (value.start, value.stop, value.step))})"
    return leaf(value)


def is_plain_name(text: Any) -> bool:
    """Whether `text` is a safe identifier: Python may normalise non-ASCII letters to others."""
    if type(text) is not str or not text.isascii() or not text.isidentifier():
        return False
    return not keyword.iskeyword(text) and text != "__debug__"


class _Writer:
    """Writes the rows as source. Objects without a literal become globals of the function."""

    def __init__(self, registered: Registered, called: Callable[[Any], Any] = lambda target: target) -> None:
        self.registered, self.called = registered, called
        self.globals: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan")}
        self.known: dict[int, str] = {}
        self.last_use = self._last_uses()

    def _last_uses(self) -> dict[int, int]:
        """For each row, the last row that reads it; the value is deleted there, as eager code would delete it."""
        last: dict[int, int] = {}
        for row in self.registered.rows:
            last[row.index] = row.index
            if row.op == "get_attr":
                continue
            for i in refs_of((row.args, row.kwargs)):
                last[i] = row.index
        for i in refs_of(self.registered.output):
            last.pop(i, None)
        return last

    def write(self) -> tuple[str, dict[str, Any]]:
        r = self.registered
        parameters = [f"b{n}" for n in range(len(r.bound))]
        lines: list[str] = []
        drops: dict[int, list[str]] = {}
        for index, at in self.last_use.items():
            drops.setdefault(at, []).append(f"v{index}")
        for row in r.rows:
            if row.op == "placeholder":
                parameters.append(f"v{row.index}")
                continue
            lines.append(f"v{row.index} = {self.call(row)}")
            if row.index in drops:
                lines[-1] += f"; del {', '.join(drops[row.index])}"
        lines.append(f"return {self.value(r.output)}")
        body = "\n    ".join(lines)
        return f"def fallback({', '.join(parameters)}):\n    {body}\n", self.globals

    def call(self, row: Row) -> str:
        if row.op == "get_attr":
            value = row.target
            return f"b{value.index}" if isinstance(value, Ref) else self.value(value)
        args = [self.value(a) for a in row.args]
        named = [f"{k}={self.value(v)}" for k, v in row.kwargs.items()]
        if not all(map(is_plain_name, row.kwargs)):
            named = [f"**{self.value(dict(row.kwargs))}"]
        if row.op == "call_method":
            method = f"{args[0]}.{row.target}" if is_plain_name(row.target) else f"getattr({args[0]}, {row.target!r})"
            return f"{method}({', '.join(args[1:] + named)})"
        return f"{self.name_of(self.called(row.target))}({', '.join(args + named)})"

    def value(self, value: Any) -> str:
        return text_of(value, self.leaf)

    def leaf(self, value: Any) -> str:
        if value is None or type(value) in (int, float, bool, str):
            return f"({value!r})" if type(value) in (int, float) else repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return repr(value)
        return self.name_of(value)

    def name_of(self, thing: Any) -> str:
        """The global name under which the function finds `thing`."""
        name = self.known.get(id(thing))
        if name is None:
            base = str(getattr(thing, "__name__", None) or type(thing).__name__).replace(".", "_")
            name = base if is_plain_name(base) and base not in _RESERVED else "fn"
            while name in self.globals or name[:1] in ("v", "b") and name[1:].isdigit():
                name = f"{name}_{len(self.globals)}"
            self.globals[name] = thing
            self.known[id(thing)] = name
        return name


_RESERVED = frozenset({"slice", "getattr", "fallback", "torch", "inf", "nan", "True", "False", "None"})
