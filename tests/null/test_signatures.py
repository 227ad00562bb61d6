"""Arguments of routines: a name is bound where it first appears, and has to be equal wherever it appears again."""

from __future__ import annotations

import torch

from fuser.cpu.signatures import Signature
from fuser.kernel_spec import Bind, Check


def test_names_are_bound_once():
    call = Signature()
    call.integers("columns")
    call.float("scale")
    call.tensor("x", torch.float32, ("rows", "columns"), ("step", 1))
    call.tensor("w", torch.bfloat16, ("rows", call["columns"] * 2))
    call.tensor("to", torch.float32, ("rows",), written=True)
    call.result("out", torch.bfloat16, ("columns", "rows"))
    program = call.program("entry", call["rows"], call["rows"], call["columns"])
    columns, rows, step = 0, 1, 2
    number, scale, x, w, to = program.inputs
    assert (number.kind, number.slot, scale.kind, scale.slot) == ("int", columns, "float", 0)
    one = Check((0, 1))
    assert x.sizes == (Bind(rows), Check((1, columns))) and x.strides == (Bind(step), one)
    assert w.sizes[0] == Check((1, rows)) and w.strides == (w.sizes[1], one)
    assert to.strides == (one,) and program.outputs == (("input", 4), ("buffer", 0)) and not program.single
    assert (program.n_slots, program.n_floats) == (3, 1)
    (made,) = program.buffers
    assert made.sizes == ((1, columns), (1, rows)) and made.strides == ((1, rows), (0, 1)) and made.output


def test_each_name_has_a_constant_or_a_pointer():
    call = Signature()
    call.tensor("x", torch.bfloat16, ("rows", "inner"), ("step", 1))
    call.float("scale")
    call.result("out", torch.float32, ("rows",))
    head, *lines = call.opening("entry").split(") {\n")
    assert "void entry(" in head
    assert "".join(lines).splitlines() == [
        "  const i64 rows = s[0], inner = s[1], step = s[2];",
        "  const u16* const x = (const u16*)ptrs[0];",
        "  const float scale = (float)f[0];",
        "  float* const out = (float*)ptrs[1];",
    ]
