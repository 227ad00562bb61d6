"""Collects the statements of a vector IR function in order, with nested blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.values import Like, value


class Builder:
    """A list of statements, and the blocks around it that are still open."""

    def __init__(self) -> None:
        self.statements: list[ir.Statement] = []
        self._open: list[tuple[ir.Head, list[ir.Statement]]] = []

    def add(self, statement: ir.Statement) -> None:
        """Append one statement."""
        self.statements.append(statement)

    def open(self, head: ir.Head) -> None:
        """Open a block: later statements belong to it until `close`."""
        self._open.append((head, self.statements))
        self.statements = []

    def close(self) -> None:
        """Close the innermost open block."""
        head, outer = self._open.pop()
        outer.append(ir.Block(head, tuple(self.statements)))
        self.statements = outer

    @contextmanager
    def block(self, head: ir.Head) -> Iterator[None]:
        """Open a block with `head` for the statements made inside the `with`."""
        self.open(head)
        yield
        self.close()

    def let(self, kind: str, name: str, v: Like) -> None:
        """Declare a named constant."""
        self.statements.append(ir.Let(kind, name, value(v)))

    def var(self, kind: str, name: str, v: Like | None = None) -> None:
        """Declare a variable, without a value if `v` is None."""
        self.statements.append(ir.Let(kind, name, None if v is None else value(v), const=False))

    def scratch(self, kind: str, name: str, *sizes: int, aligned: int = 0, zero: bool = False) -> None:
        """Declare a local array."""
        self.statements.append(ir.Scratch(kind, name, sizes, aligned, zero))

    def set(self, target: Like, v: Like, sign: str = "") -> None:
        """Assign `v` to `target`, or combine both by the operator `sign`."""
        self.statements.append(ir.Set(value(target), value(v), sign))

    def do(self, function: str, *args: Like) -> None:
        """Call a function for its effect."""
        self.statements.append(ir.Do(ir.Call(function, tuple(map(value, args)))))

    def each(self, count: Like, *statements: ir.Statement, name: str = "l") -> None:
        """A loop over `count` lanes whose body is `statements`, on one line."""
        self.statements.append(ir.Block(ir.For(name, value(0), value(count)), statements))
