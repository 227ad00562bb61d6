"""One launch for many argument sets of a kernel: the same body, with arguments read from a table on the device.

The launcher writes the table, in 64-bit words: the number of each set's first program (`SETS` words; unused ones are
larger than any program's number), then the arguments of each set, in order. A program finds its set by its number.
"""

from __future__ import annotations

from dataclasses import replace

from fuser.cuda.nest import Function
from fuser.cuda.text import Param
from fuser.cuda.tiles import VECTOR

SETS = 128  # of a launch; native/batch.h has the same number (kMembers)
TABLE = Param("table", "pointer", "", "*i64", VECTOR)
_NAMES = {f"*{kind}": name for kind, name in (
    ("fp16", "tl.float16"), ("bf16", "tl.bfloat16"), ("fp32", "tl.float32"), ("fp64", "tl.float64"),
    ("i8", "tl.int8"), ("u8", "tl.uint8"), ("i16", "tl.int16"), ("i32", "tl.int32"), ("i64", "tl.int64"),
)}  # fmt: skip


def batched(f: Function) -> Function:
    """The kernel `f` for up to `SETS` argument sets; its only parameter is the table."""
    lines = [
        "member_pid = tl.program_id(0)",
        "member = fuser_find_member(table, member_pid)",
        "member_pid = member_pid - tl.load(table + member).to(tl.int32)",
        f"member = table + {SETS} + member.to(tl.int64) * {len(f.params)}",
        *(f"{p.name} = {_argument(p, i)}" for i, p in enumerate(f.params)),
    ]
    opening = "".join(f"    {line}\n" for line in lines)
    return replace(f, name=f"{f.name}_each", opening=opening, number="member_pid", params=(TABLE,))


def _argument(p: Param, i: int) -> str:
    word = f"tl.load(member + {i})"
    if p.kind == "pointer":
        value = f"{word}.to(tl.pointer_type({_NAMES[p.type]}))"
    elif p.kind == "float64":
        value = f"{word}.to(tl.float64, bitcast=True)"
    else:
        value = f"{word}.to({'tl.int32' if p.kind == 'int32' else 'tl.int64'})"
    return f"tl.multiple_of({value}, {p.divisor})" if p.divisor > 1 else value
