"""The rules of vector IR: what the verifier accepts, and what it says of each rule that is broken."""

from __future__ import annotations

import pytest

from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.cpu.vir.verifier import verify_kernel
from fuser.errors import VerifyError
from fuser.ir.ranges import NO_LOOPS
from fuser.ir.sizes import LOOP, expr, indirect, symbol

ROWS = ir.Scope(lambda n: ir.Name(f"t{n}"), NO_LOOPS)


def kernel(fill) -> ir.Kernel:
    out = Builder()
    fill(out)
    return ir.Kernel("k", tuple(out.statements))


def rows(out: Builder) -> None:
    """Sums of rows: units, a loop, a variable that is joined to, a routine and a tail for some machines."""
    out.add(ir.Pointer("float", "in0", ir.Slot("ptrs", 0), True))
    out.scratch("float", "lanes", 16, zero=True)
    out.open(ir.Routine("part", (("i64", "from"),)))
    out.let("i64", "next", ir.Name("from") + 1)
    out.close()
    out.open(ir.Units((("row", ir.Name("end")),)))
    out.var("float", "acc", 0)
    with out.block(ir.For("c", ir.Number(0), ir.Number(64), simd=True)):
        out.set("acc", ir.At(ir.Name("in0"), ir.Name("row") * 64 + "c"), "+")
    with out.block(ir.Only("FUSER_WIDE")):
        out.set(ir.At(ir.Name("lanes"), ir.Number(0)), "acc")
    with out.block(ir.Otherwise()):
        out.do("part", "row")
    out.close()


def test_a_whole_function_is_right():
    verify_kernel(kernel(rows))


def after_its_block(out):
    with out.block(ir.Plain()):
        out.let("i64", "a", 1)
    out.let("i64", "b", "a")


def before_its_declaration(out):
    out.let("i64", "b", "a")
    out.let("i64", "a", 1)


def of_a_loop_outside(out):
    with out.block(ir.For("c", ir.Number(0), ir.Number(4))):
        pass
    out.do("store", "c")


def unknown_array(out):
    out.add(ir.Fold("lanes", None, 16, 64, "sign", "+"))


def loop_that_goes_on(out):
    out.open(ir.For("c", None, ir.Number(4)))
    out.close()


def in_an_offset(out):
    out.add(ir.Pointer("float", "in0", ir.Slot("ptrs", 0), True))
    out.let("float", "t0", ir.Name("in0")[ir.Offset(expr(symbol("a0", LOOP)) * 4, "place", ROWS)])


def in_a_computed_index(out):
    out.add(ir.Pointer("float", "in0", ir.Slot("ptrs", 0), True))
    out.let("float", "t0", ir.Name("in0")[ir.Offset(expr(indirect(7)), "place", ROWS)])


def twice(out):
    out.let("i64", "a", 1)
    out.var("i64", "a", 2)


def constant(out):
    out.let("i64", "a", 1)
    out.set("a", 2)


def stray_else(out):
    out.let("i64", "a", 1)
    with out.block(ir.Else()):
        out.do("f")


def stray_otherwise(out):
    with out.block(ir.If(ir.Name("begin") < "end")):
        out.do("f")
    with out.block(ir.Otherwise()):
        out.do("g")


@pytest.mark.parametrize(
    "fill, message",
    [
        (after_its_block, "'a' is not declared"), (before_its_declaration, "'a' is not declared"),
        (of_a_loop_outside, "'c' is not declared"), (unknown_array, "'lanes' is not declared"),
        (in_an_offset, "'a0' is not declared"), (in_a_computed_index, "'t7' is not declared"),
        (loop_that_goes_on, "'c' is not declared"), (twice, "'a' is declared twice"),
        (constant, "assigns to 'a', a constant"), (stray_else, "Else.* follows no If"),
        (stray_otherwise, "Otherwise.* follows no Only"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)  # fmt: skip
def test_broken_rules(fill, message):
    with pytest.raises(VerifyError, match=message):
        verify_kernel(kernel(fill))


def test_every_declaration_counts():
    """A function without one of its declarations is refused, whichever it is."""
    whole = kernel(rows)
    for n, statement in enumerate(whole.body):
        if isinstance(statement, (ir.Pointer, ir.Scratch)):
            with pytest.raises(VerifyError, match=statement.name):
                verify_kernel(ir.Kernel("k", whole.body[:n] + whole.body[n + 1 :]))
