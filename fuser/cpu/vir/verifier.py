"""The rules of vector IR, checked. Tests check every kernel: the setting is `check_ir`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.rewrite import walk
from fuser.errors import VerifyError
from fuser.ir.sizes import symbols

# Names that every function has: its parameters, a macro of the machine, an array of the generator's helpers.
GIVEN = frozenset("ptrs s f begin end scratch status FUSER_LANES fuser_zeros".split())
_FOLLOWS = {ir.Else: ir.If, ir.Otherwise: ir.Only}


def verify_kernel(kernel: ir.Kernel) -> None:
    """Check one function. VerifyError says which statement breaks which rule.

    Each name is declared before its use, in an enclosing block, and once in its block. So are the names in offsets and
    in the rows that these look up. Constants are never assigned; an `Else` follows an `If`, and an `Otherwise` an
    `Only`.
    """
    try:
        _Scope(None, dict.fromkeys(GIVEN, True)).verify(kernel.body)
    except VerifyError as e:
        raise VerifyError(f"kernel {kernel.name}: {e}") from None


class _Scope:
    """The variables of a block, each with whether it may be assigned to."""

    def __init__(self, outer: _Scope | None, own: dict[str, bool] | None = None) -> None:
        self.outer, self.own = outer, own or {}

    def find(self, name: str) -> bool | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.own:
                return scope.own[name]
            scope = scope.outer
        return None

    def declare(self, name: str, may_change: bool, statement: Any) -> None:
        if name in self.own:
            raise VerifyError(f"{name!r} is declared twice in one block, again by {_short(statement)}")
        self.own[name] = may_change

    def read(self, node: Any, statement: Any) -> None:
        for name in _names(node):
            if self.find(name) is None:
                raise VerifyError(f"{name!r} is not declared where {_short(statement)} uses it")

    def verify(self, body: Iterable[ir.Statement]) -> None:
        before: Any = None
        for statement in body:
            if isinstance(statement, ir.Block):
                wanted = _FOLLOWS.get(type(statement.head))
                if wanted is not None and not (isinstance(before, ir.Block) and isinstance(before.head, wanted)):
                    raise VerifyError(f"{_short(statement.head)} follows no {wanted.__name__}")
                self._block(statement)
            else:
                self._statement(statement)
            before = statement

    def _statement(self, s: Any) -> None:
        match s:
            case ir.Let(name=name, value=value, const=const):
                self.read(value, s)
                self.declare(name, not const, s)
            case ir.Scratch(name=name):
                self.declare(name, may_change=True, statement=s)
            case ir.Pointer(name=name, source=source, checked=checked):
                self.read(source, s)
                self.read(checked[0] if checked else None, s)
                self.declare(name, may_change=False, statement=s)
            case ir.Set(target=target, value=value):
                self.read(target, s)
                self.read(value, s)
                if isinstance(target, ir.Name) and not self.find(target.name):
                    raise VerifyError(f"{_short(s)} assigns to {target.name!r}, a constant")
            case ir.Fold(array=array, total=total):
                self.read((ir.Name(array), total), s)
            case _:
                self.read(s, s)

    def _block(self, block: ir.Block) -> None:
        head = block.head
        inner = _Scope(self)
        match head:
            case ir.For(name=name, low=low):
                self.read((low, head.high, head.step), head)
                if low is None:
                    self.read(ir.Name(name), head)
                else:
                    inner.own[name] = True
            case ir.Units(digits=digits):
                self.read(tuple(size for _, size in digits), head)
                inner.own.update(dict.fromkeys(("u", *(name for name, _ in digits)), False))
            case ir.Segments():
                self.read((head.low, head.high, *head.cuts), head)
                inner.own.update({"from": False, "to": False})
            case ir.Staged(results=results):
                self.read(ir.Name("stream"), head)
                self.read((head.count, *(r.memory for r in results)), head)
            case ir.Routine(name=name, params=params):
                self.declare(name, may_change=False, statement=head)
                inner.own.update({p: True for _, p in params})
            case _:
                self.read(getattr(head, "test", None), head)
        inner.verify(block.body)


def _names(node: Any) -> Iterator[str]:
    for each in node if isinstance(node, tuple) else (node,):
        for n in walk(each):
            if isinstance(n, ir.Name):
                yield n.name
            elif isinstance(n, ir.Offset):
                yield from _names_of(n)


def _names_of(offset: ir.Offset) -> Iterator[str]:
    for s in sorted(symbols(offset.e)):
        if s.row is not None:
            yield from _names(offset.scope.ref(s.row))
        elif offset.scope.slots is None:
            yield s.name


def _short(node: Any) -> str:
    text = repr(node)
    return text if len(text) < 160 else text[:157] + "..."


__all__ = ["GIVEN", "verify_kernel"]
