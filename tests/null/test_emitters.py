"""The CPU generator stays composed of small parts: how deep its classes are, and how much each one is."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import textwrap

import fuser.cpu
from fuser.cpu.vir import nodes
from fuser.cpu.vir.printer import Printer

MOST_BASES, MOST_MEMBERS = 2, 50
LONGEST_FILE = 500
PER_NODE = {Printer}  # with a method for each kind of node


def classes():
    for module in modules():
        yield from (c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__)


def modules():
    for found in pkgutil.walk_packages(fuser.cpu.__path__, "fuser.cpu."):
        yield importlib.import_module(found.name)


def members(kind: type) -> set[str]:
    """The names of a class: methods, fields, and what its methods set."""
    names = {n for n in dir(kind) if not n.startswith("__")}
    for each in kind.__mro__[:-1]:
        if each.__module__.startswith(("fuser.", "tests.")):
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
            targets = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            names |= {t.attr for t in targets if isinstance(t.value, ast.Name) and t.value.id == "self"}
    return names


def test_classes_are_flat_and_small():
    kinds = [n for n in vars(nodes).values() if dataclasses.is_dataclass(n)]
    found = list(classes())
    assert len(found) > 60
    for kind in found:
        bases = [b for b in kind.__mro__[1:] if b.__module__.startswith("fuser.")]
        most = MOST_MEMBERS + len(kinds) if kind in PER_NODE else MOST_MEMBERS
        assert len(bases) <= MOST_BASES, f"{kind.__name__} has the bases {bases}"
        own = members(kind)
        assert len(own) <= most, f"{kind.__name__} has {len(own)} members"


class Example:
    """Two names of its own, and a method."""

    def __init__(self) -> None:
        self.a = self.b = 1

    def method(self) -> int:
        """Nothing else."""
        return self.a


def test_members_count_what_methods_set():
    assert members(Example) == {"a", "b", "method"}


def test_files_are_short():
    for module in modules():
        lines = len(inspect.getsource(module).splitlines())
        assert lines <= LONGEST_FILE, f"{module.__name__} has {lines} lines"
