"""Collects statements of the vector IR in order, block in block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.values import Like, value


class Builder:
    """A list of statements, the last of which may be blocks that are still open."""

    def __init__(self) -> None:
        self.statements: list[ir.Statement] = []
        self._open: list[tuple[ir.Head, list[ir.Statement]]] = []

    def add(self, statement: ir.Statement) -> None:
        """One statement."""
        self.statements.append(statement)

    def open(self, head: ir.Head) -> None:
        """What follows belongs to a block."""
        self._open.append((head, self.statements))
        self.statements = []

    def close(self) -> None:
        """The innermost open block ends."""
        head, outer = self._open.pop()
        outer.append(ir.Block(head, tuple(self.statements)))
        self.statements = outer

    @contextmanager
    def block(self, head: ir.Head) -> Iterator[None]:
        """What is made inside belongs to a block."""
        self.open(head)
        yield
        self.close()

    def let(self, kind: str, name: str, v: Like) -> None:
        """A constant with a name."""
        self.statements.append(ir.Let(kind, name, value(v)))

    def var(self, kind: str, name: str, v: Like | None = None) -> None:
        """A variable."""
        self.statements.append(ir.Let(kind, name, None if v is None else value(v), False))

    def scratch(self, kind: str, name: str, *sizes: int, aligned: int = 0, zero: bool = False) -> None:
        """A local array."""
        self.statements.append(ir.Scratch(kind, name, sizes, aligned, zero))

    def set(self, target: Like, v: Like, sign: str = "") -> None:
        """An assignment, or `target` joined with a value by `sign`."""
        self.statements.append(ir.Set(value(target), value(v), sign))

    def do(self, function: str, *args: Like) -> None:
        """A call for its effect."""
        self.statements.append(ir.Do(ir.Call(function, tuple(map(value, args)))))

    def each(self, count: Like, *statements: ir.Statement, name: str = "l") -> None:
        """A loop over `count` lanes, as short as it is."""
        self.statements.append(ir.Block(ir.For(name, value(0), value(count)), statements))
