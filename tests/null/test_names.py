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


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in texts().items()}


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
    readers = {name: tree for name, tree in trees().items() if room(name) in READERS}
    assert [found for name, tree in readers.items() for found in of_rows(name, tree)] == []


def test_no_other_room_compares_names_of_devices() -> None:
    others = {n: t for n, t in texts().items() if room(n) not in ("cpu", "cuda") and n not in OF_EAGER}
    naming = {n: t for n, t in others.items() if "is_cuda" in t or "is_cpu" in t or any(f'"{d}"' in t for d in DEVICES)}
    assert [found for name in naming for found in of_devices(name, trees()[name])] == []


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


# Functions whose booleans are values: constants of kernels, arguments of operators, defaults, settings.
OF_VALUES = {"Setting", "aten", "arg", "call", "constant", "eval", "get", "tensor", "write", "_constant_before"}
NATIVE = {"event", "set_enabled"}  # functions of the native launcher take no names


def definitions() -> set[str]:
    nodes = (n for tree in trees().values() for n in ast.walk(tree))
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)} - OF_VALUES - NATIVE


def by_place(name: str, tree: ast.Module, known: set[str]) -> list[str]:
    """Each call of a function of the package that gets True or False by its place, beside other arguments."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > 1:
            f = node.func
            called = f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else ""
            if called in known and any(isinstance(a, ast.Constant) and type(a.value) is bool for a in node.args):
                out.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    return out


def test_booleans_are_given_by_name() -> None:
    known = definitions()
    assert [found for name, tree in trees().items() for found in by_place(name, tree, known)] == []


def numbers_in_names(name: str, tree: ast.Module) -> list[str]:
    """Each number that is read back out of a symbol's name."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "int")
    return [f"{name}:{n.lineno} {ast.unparse(n)}" for n in calls if n.args and ".name[" in ast.unparse(n.args[0])]


def test_no_number_is_read_out_of_a_name() -> None:
    """A symbol of a computed index has its row. An axis gets a number above all others, to be a new one."""
    found = [line for name, tree in trees().items() for line in numbers_in_names(name, tree)]
    assert [line for line in found if not line.startswith("cpu/rounds.py")] == []


def taken_apart(name: str, tree: ast.Module) -> list[str]:
    """Each decision by a part of the name of an operator that is lowered."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            of = node.value
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            of = node.comparators[0]
        else:
            of = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else node
        if of is not node and ast.unparse(of) == "ctx.op":
            out.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    return out


def test_no_lowering_takes_the_name_of_an_operator_apart() -> None:
    """But for the number of dims in names of pools."""
    lowerings = {name: tree for name, tree in trees().items() if room(name) == "lowering"}
    found = [line for name, tree in lowerings.items() for line in taken_apart(name, tree)]
    assert [line for line in found if not line.startswith("lowering/pooling.py")] == []


def test_such_calls_are_seen() -> None:
    for text in ('kind = ctx.op.removeprefix("aten.")', "kind = ctx.op[-3:]", 'root = "std" in ctx.op'):
        assert taken_apart("x.py", ast.parse(text))
    assert by_place("x.py", ast.parse("reduce(x, True)"), {"reduce"})
    assert by_place("x.py", ast.parse("nest.loop(None, False)"), {"loop"})
    assert numbers_in_names("x.py", ast.parse("found = int(s.name[1:])"))
