"""Rows of the tables and devices are asked for their properties: no name decides anything outside its own room."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuser
from fuser.ops import OPS, REDUCTIONS, SCANS

ROOT = Path(fuser.__file__).parent
ROWS = frozenset({*OPS, *REDUCTIONS, *SCANS})
FIELDS = {"op", "kind", "how", "pointwise", "folder"}  # fields of rows and plans that hold the name of a table's row
READERS = ("ir", "scheduler", "codegen", "cpu", "cuda", "runtime", "contests")
DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
# Torch's facts about eager on a device, which a target selects by `like`, and a setting's own words.
OF_EAGER = ("lowering/corrections.py", "lowering/known_shapes.py")
SETTINGS = ("config.sequences",)


@functools.cache
def texts() -> dict[str, str]:
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in sorted(ROOT.rglob("*.py"))}


def room(name: str) -> str:
    return name.split("/")[0]


def words(node: ast.AST, constants: dict[str, ast.AST]) -> set[str]:
    """The strings in an expression, and in the module's constants that it names."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.add(each.value)
        elif isinstance(each, ast.Name) and each.id in constants:
            found |= words(constants[each.id], {})
    return found


def constants_of(tree: ast.Module) -> dict[str, ast.AST]:
    out: dict[str, ast.AST] = {}
    for s in tree.body:
        targets = s.targets if isinstance(s, ast.Assign) else [s.target] if isinstance(s, ast.AnnAssign) else []
        if targets and s.value is not None:
            out |= {t.id: s.value for t in targets if isinstance(t, ast.Name)}
    return out


def is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in FIELDS


def decisions(tree: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Each comparison, membership or lookup by a row's name, with the strings on its other side."""
    constants = constants_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(map(is_field, (node.left, *node.comparators))):
            yield node.lineno, words(node, constants)
        elif isinstance(node, ast.Subscript) and is_field(node.slice):
            yield node.lineno, words(node.value, constants)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            if node.args and is_field(node.args[0]):
                yield node.lineno, words(node.func.value, constants)
        elif isinstance(node, ast.Match) and is_field(node.subject):
            yield node.lineno, {w for case in node.cases for w in words(case.pattern, constants)}


def of_rows(name: str, tree: ast.Module) -> list[str]:
    return [f"{name}:{line} {sorted(found & ROWS)}" for line, found in decisions(tree) if found & ROWS]


def of_devices(name: str, tree: ast.Module) -> list[str]:
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_cpu"):
            out.append(f"{name}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            plain = [s for s in sides if isinstance(s, ast.Constant | ast.Set | ast.Tuple | ast.List)]
            text = ast.unparse(node)
            if any(words(s, {}) & DEVICES for s in plain) and not text.startswith(SETTINGS):
                out.append(f"{name}:{node.lineno} {text}")
    return out


def test_no_generator_knows_a_row_by_its_name() -> None:
    readers = {name: text for name, text in texts().items() if room(name) in READERS}
    assert [found for name, text in readers.items() for found in of_rows(name, ast.parse(text))] == []


def test_no_other_room_compares_names_of_devices() -> None:
    others = {n: t for n, t in texts().items() if room(n) not in ("cpu", "cuda") and n not in OF_EAGER}
    naming = {n: t for n, t in others.items() if "is_cuda" in t or "is_cpu" in t or any(f'"{d}"' in t for d in DEVICES)}
    assert [found for name, text in naming.items() for found in of_devices(name, ast.parse(text))] == []


@pytest.mark.parametrize(
    "text",
    [
        'found = row.op == "where"', 'found = row.op in ("lt", "le")', '_KNOWN = {"lt": 1}\nfound = row.op in _KNOWN',
        '_KNOWN = {"lt": 1}\nfound = _KNOWN[row.op]', '_KNOWN = {"lt": 1}\nfound = _KNOWN.get(row.op)',
        'found = REDUCTIONS[r.kind].pointwise == "maximum"', 'match row.op:\n  case "add": pass',
    ],
)  # fmt: skip
def test_decisions_by_a_row_are_seen(text: str) -> None:
    assert of_rows("x.py", ast.parse(text))


@pytest.mark.parametrize("text", ['t.device.type == "cpu"', 't.device.type in ("cuda", "xpu")', "t.is_cuda"])
def test_decisions_by_a_device_are_seen(text: str) -> None:
    assert of_devices("x.py", ast.parse(text))
