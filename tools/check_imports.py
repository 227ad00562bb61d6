"""Imports of the package point one way: `python tools/check_imports.py [folder of the package]`.

Reads every module with `ast`, runs none. Prints each violation as `file:line`, what was imported, the rule and the
cure; exits 1 if there is one. Function-local imports count like the others: one that hides a cycle is still a cycle.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# ---- the rules, as data --------------------------------------------------------------------------

# From the bottom up. A module may import from its own layer and from those below. Names are relative to the package;
# a name covers everything under it, the longest match wins, and "" is the package's own __init__.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("lazy_dataclasses", "startup"),
    ("errors", "extensions", "forks", "machines", "notices", "reasons", "logs"),
    ("config",),
    ("ir.sizes",),
    ("canonical",),
    ("kernel_spec", "targets"),  # up to here: records and settings, free for all
    ("ops",),
    ("ir",),
    ("canonical",),
    ("lowering",),
    ("scheduler",),
    ("codegen", "contests", "cpu", "cuda", "runtime"),
    (
        "arguments", "bundles", "compile_server", "compiled_calls", "compiler", "elsewhere", "examples",
        "executor", "orders", "kernel_cache", "kernel_store", "fallback", "progress",
        "pipeline", "plans", "preparing", "refusals", "reproduce", "splitting", "verify", "trials",
    ),  # fmt: skip
    ("interface", "metrics", "cache"),
    ("attention",),
    ("passes",),
    ("frontends",),
    ("aot",),
    ("debug",),
    ("testing",),
    ("", "__main__"),
)

# Neighbours of one layer that must not know each other: (who, may not import, cure).
STRANGERS: tuple[tuple[str, str, str], ...] = (
    ("cpu", "cuda", "move what both devices need into codegen/"),
    ("cuda", "cpu", "move what both devices need into codegen/"),
    ("codegen", "cpu", "codegen/ is what both devices share: pass the device's part in as an argument"),
    ("codegen", "cuda", "codegen/ is what both devices share: pass the device's part in as an argument"),
    ("runtime", "cuda", "runtime/ serves every device: let the device folder call it"),
    ("runtime", "cpu", "runtime/ serves every device: let the device folder call it"),
)

# Exceptions upwards, each with its reason: (who, what it may import).
ALLOWED: tuple[tuple[str, str], ...] = (
    ("passes", "debug"),  # a pass may hand its before and after to debug's dump
    ("frontends", "debug"),
)

# Packages of others: (module, where it may be imported, cure). Nowhere: ().
RESTRICTED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("torch._inductor", (), "write it here: TorchInductor is a rival in benchmarks/, not a part"),
    ("triton", ("cuda",), "only cuda/ knows Triton: put this behind a function of cuda/"),
)

# Packages that `import fuser` must not load: import them inside the functions that need them. Where a whole module is
# only loaded lazily, it is listed.
LAZY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sympy", ()),
    ("torch._dynamo", ("frontends", "passes")),
    ("triton", ("cuda",)),
)

# Spelling of a device's language in string constants, a hint and no failure: (marks, where it belongs).
SPELLING: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("#include", "#pragma", "static_cast<", "reinterpret_cast<"), ("cpu", "ops")),
    (("@triton.jit", "tl.load", "tl.store"), ("cuda", "ops")),
)


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported name. `module` is absolute; `lazy` is inside a function, `typing` under TYPE_CHECKING."""

    file: Path
    line: int
    module: str
    lazy: bool = False
    typing: bool = False


@dataclass(frozen=True)
class Finding:
    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def covers(prefix: str, module: str) -> bool:
    """Whether the dotted `module` is `prefix` or lies under it."""
    return module == prefix or module.startswith(prefix + ".")


def module_name(file: Path, root: Path) -> str:
    """`root/ir/sizes.py` -> `ir.sizes`; a package's `__init__.py` is the package; the root's own is ''."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class ImportReader(ast.NodeVisitor):
    """Collects the imports of one file, those made by `import_module("…")` and `torch._inductor.…` by attribute too."""

    def __init__(self, file: Path, package: str, modules: dict[str, Path], own: str) -> None:
        self.file, self.package, self.modules = file, package, modules
        self.parts = [package, *own.split(".")] if own else [package]
        if file.name != "__init__.py":
            self.parts = self.parts[:-1]
        self.found: list[Import] = []
        self.depth = 0
        self.typing = False

    def add(self, node: ast.AST, module: str) -> None:
        self.found.append(Import(self.file, node.lineno, module, self.depth > 0, self.typing))  # type: ignore[attr-defined]

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            start = self.parts[: len(self.parts) - node.level + 1]
            base = ".".join([*start, base] if base else start)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            inside = full.removeprefix(self.package + ".")
            # `from fuser import config` names a module, `from fuser.config import check` something within one;
            # `from torch import _inductor` can be told by its restricted name only.
            is_module = covers(self.package, full) and inside in self.modules
            restricted = any(full == name for name, *_ in (*RESTRICTED, *LAZY))
            self.add(node, full if is_module or restricted else base)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self.add(node, str(node.args[0].value))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and f"{node.value.id}.{node.attr}" in {name for name, *_ in RESTRICTED}:
            self.add(node, f"{node.value.id}.{node.attr}")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not ast.unparse(node.test).endswith("TYPE_CHECKING"):
            self.generic_visit(node)
            return
        before, self.typing = self.typing, True
        for child in node.body:
            self.visit(child)
        self.typing = before
        for child in node.orelse:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef


# ---- judging -------------------------------------------------------------------------------------


def layer_of(module: str) -> tuple[int, str] | None:
    """(height, name) of the layer that `module` (relative to the package) belongs to; None if the table misses it."""
    if not module:
        return len(LAYERS) - 1, ""
    hits = [(i, n) for i, names in enumerate(LAYERS) for n in names if n and covers(n, module)]
    return max(hits, key=lambda hit: len(hit[1]), default=None)


def check_layer(own: str, imp: Import, target: str) -> str | None:
    """Why `own` may not import `target` (both relative to the package), or None."""
    mine, theirs = layer_of(own), layer_of(target)
    if mine is None or theirs is None:
        missing = own if mine is None else target
        return f"{missing!r} is in no layer. Cure: give it its place in LAYERS of {Path(__file__).name}"
    for who, whom, cure in STRANGERS:
        if covers(who, own) and covers(whom, target):
            return f"{who}/ must not know {whom}/. Cure: {cure}"
    if theirs[0] <= mine[0] or any(covers(a, own) and covers(b, target) for a, b in ALLOWED):
        return None
    if not target:
        return "no such module, or a name of the package's front. Cure: import the module that defines the name"
    return (
        f"{mine[1]!r} lies below {theirs[1]!r}, and imports point downwards. "
        f"Cure: move what both need into {mine[1]!r} or lower, or take it as an argument"
    )


def check_others(own: str, imp: Import) -> Iterator[str]:
    """Why `own` may not import this package of others."""
    for name, where, cure in RESTRICTED:
        if covers(name, imp.module) and not any(covers(w, own) for w in where):
            yield f"{name} is imported {'only in ' + ', '.join(where) if where else 'nowhere'}. Cure: {cure}"
    for name, where in LAZY:
        if covers(name, imp.module) and not (imp.lazy or imp.typing or any(covers(w, own) for w in where)):
            yield f"`import fuser` must not load {name}. Cure: import it inside the function that needs it"


def find_cycles(edges: dict[str, dict[str, Import]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components, of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, {}):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return [group for group in found if len(group) > 1]


def check_cycles(edges: dict[str, dict[str, Import]], package: str) -> Iterator[Finding]:
    for group in find_cycles(edges):
        inside = [(imp, a, b) for a in group for b, imp in edges[a].items() if b in group]
        imp, a, b = inside[0]
        names = ", ".join(f"{package}.{n}" if n else package for n in group)
        text = f"imports {imp.module}: {names} import each other. Cure: move what they share into a module below them"
        yield Finding(imp.file, imp.line, text)


def target_module(module: str, package: str, modules: Iterable[str]) -> str:
    """The part of `fuser.ir.loops.LoopBody` that is a module, relative to the package: `ir.loops`."""
    known = set(modules)
    parts = module.split(".")[1:]
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def loaded_with(module: str) -> Iterator[str]:
    """The modules that importing `module` runs: itself, and its packages' `__init__`, the root's left out."""
    parts = module.split(".") if module else []
    for n in range(len(parts), 0, -1):
        yield ".".join(parts[:n])


def read_imports(tree: ast.AST, file: Path, package: str, modules: dict[str, Path], own: str) -> list[Import]:
    reader = ImportReader(file, package, modules, own)
    reader.visit(tree)
    return list(dict.fromkeys(reader.found))


def check_package(root: Path) -> list[Finding]:
    """All violations in the package that lies in `root`, sorted by file and line."""
    package = root.name
    modules = {module_name(f, root): f for f in sorted(root.rglob("*.py"))}
    findings: list[Finding] = []
    edges: dict[str, dict[str, Import]] = {name: {} for name in modules}
    for own, file in modules.items():
        for imp in read_imports(ast.parse(file.read_text(), str(file)), file, package, modules, own):
            if not covers(package, imp.module):
                findings += [Finding(file, imp.line, f"imports {imp.module}: {why}") for why in check_others(own, imp)]
                continue
            target = target_module(imp.module, package, modules)
            why = check_layer(own, imp, target)
            if why is not None:
                findings.append(Finding(file, imp.line, f"imports {imp.module}: {why}"))
            elif not imp.typing:
                for loaded in loaded_with(target):
                    if not covers(loaded, own):
                        edges[own].setdefault(loaded, imp)
    findings += check_cycles(edges, package)
    return sorted(set(findings), key=lambda f: (str(f.file), f.line, f.text))


def spelling_hints(root: Path) -> list[Finding]:
    """String constants, other than docstrings, that look like a device's language where it does not belong."""
    hints = []
    for file in sorted(root.rglob("*.py")):
        own = module_name(file, root)
        tree = ast.parse(file.read_text(), str(file))
        statements = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in statements:
                continue
            for marks, where in SPELLING:
                mark = next((m for m in marks if m in node.value), None)
                if mark and not any(covers(w, own) for w in where):
                    hints.append(Finding(file, node.lineno, f"hint: {mark!r} is spelled outside {', '.join(where)}"))
    return hints


def main() -> int:
    parser = argparse.ArgumentParser(description="check that the package's imports point one way")
    parser.add_argument("package", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent / "fuser")
    root = parser.parse_args().package
    if not (root / "__init__.py").exists():
        print(f"{root}: expected the folder of a package, with an __init__.py")
        return 2
    for hint in spelling_hints(root):
        print(hint)
    findings = check_package(root)
    for finding in findings:
        print(finding)
    count = len(list(root.rglob("*.py")))
    print(f"{len(findings)} wrong imports" if findings else f"imports of {count} modules point one way")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
