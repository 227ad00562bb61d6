"""Docstrings of public functions: their sections name the function's parameters, result and errors as they are."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from dataclasses import dataclass, field

import pytest

import fuser.errors

MODULES = ("fuser", "fuser.aot", "fuser.cache", "fuser.debug", "fuser.passes", "fuser.testing")
SECTIONS = ("Args:", "Returns:", "Raises:")
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


FUNCTIONS = [
    pytest.param(module, getattr(module, name), id=f"{module.__name__}.{name}")
    for module in map(importlib.import_module, MODULES)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]


@dataclass
class Sections:
    """The sections of a docstring in their order, and the names of the entries in each."""

    order: list[str] = field(default_factory=list)
    entries: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Sections:
        made, section = cls(), ""
        for line in text.splitlines():
            entry = re.match(r" {4}(\*{0,2}\w+): \S", line)
            if line in SECTIONS:
                section = line
                made.order.append(line)
                made.entries[line] = []
            elif line and not line.startswith("    "):
                section = ""
            elif section and entry:
                made.entries[section].append(entry[1])
        return made


def is_error(module, name):
    """Errors of a module's own, such as `fuser.cache.ArchiveError`, are public there."""
    own = getattr(module, name, None) if name in module.__all__ else None
    found = own or getattr(fuser.errors, name, None) or getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception)


@pytest.mark.parametrize("module, function", FUNCTIONS)
def test_sections_say_what_the_signature_says(module, function):
    text = inspect.getdoc(function) or ""
    found = Sections.of(text)
    signature = inspect.signature(function)
    assert not text.startswith(SECTIONS) and found.order == [s for s in SECTIONS if s in found.order]
    assert found.entries.get("Args:", []) == [STARS.get(p.kind, "") + p.name for p in signature.parameters.values()]
    assert ("Returns:" in found.order) == (signature.return_annotation not in (None, "None"))
    wrong = [name for name in found.entries.get("Raises:", []) if not is_error(module, name)]
    assert not wrong and ("Raises:" in found.order) == bool(found.entries.get("Raises:"))


def test_sections_are_read():
    text = "One line.\n\nArgs:\n    x: a\n        note: two lines.\n    *args: others.\n\nReturns:\n    It: x."
    assert Sections.of(text).entries == {"Args:": ["x", "*args"], "Returns:": ["It"]}
    assert {"fuser.run_fusion", "fuser.cache.clear"} < {p.id for p in FUNCTIONS}
