"""The fusion group, run by ATen: eager's own results and eager's own errors. Defines what "right" means.

The group's calls, as they were written, become the lines of one Python function, made when it is first needed.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import Any

import torch

from fuser import forks
from fuser.canonical import Ref, Registered, Row, refs_of


class Fallback:
    """A callable of the group's inputs, bound tensors first. Returns what the graph's output does, lists as tuples."""

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
        """What a call runs: plain Python, one line for each of the group's calls."""
        return self._function or self._make()

    @property
    def registered(self) -> Registered:
        """The group, as it was written."""
        return self._registered

    @property
    def source(self) -> str:
        """The function's text."""
        if self._function is None:
            self._make()
        return self._source

    def _make(self) -> Callable[..., Any]:
        with self._lock:
            if self._function is None:
                source, names = _Writer(self._registered).write()
                code = compile(source, f"<fallback {self._registered.graph.hash[:12]}>", "exec")
                exec(code, names)
                self._source, self._function = source, names.pop("fallback")  # no cycle: what it holds leaves with it
            return self._function


def is_plain_name(text: Any) -> bool:
    """Whether Python's source means `text` itself by it: other letters than ASCII's may stand for different ones."""
    if type(text) is not str or not text.isascii() or not text.isidentifier():
        return False
    return not keyword.iskeyword(text) and text != "__debug__"


class _Writer:
    """Spells the rows. Objects that have no literal become globals of the function."""

    def __init__(self, registered: Registered) -> None:
        self.registered = registered
        self.globals: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan")}
        self.known: dict[int, str] = {}
        self.last_use = self._last_uses()

    def _last_uses(self) -> dict[int, int]:
        """For each row, the last row that reads it; a value is dropped there, as eager code would drop it."""
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
        return f"{self.name_of(row.target)}({', '.join(args + named)})"

    def value(self, value: Any) -> str:
        if isinstance(value, Ref):
            return f"v{value.index}"
        if isinstance(value, tuple) and type(value) is tuple:
            inner = ", ".join(self.value(v) for v in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if type(value) is list:
            return f"[{', '.join(self.value(v) for v in value)}]"
        if type(value) is dict:
            return "{" + ", ".join(f"{k!r}: {self.value(v)}" for k, v in value.items()) + "}"
        if type(value) is slice:
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        if value is None or type(value) in (int, float, bool, str):
            return f"({value!r})" if type(value) in (int, float) else repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return repr(value)
        return self.name_of(value)

    def name_of(self, thing: Any) -> str:
        """The global under which the function finds `thing`."""
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
