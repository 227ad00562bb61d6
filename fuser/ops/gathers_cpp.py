"""C++ helpers that gather elements of one or two bytes by gathers of words: no machine gathers narrower elements.

The aligned word around an element is in the same page, so the other bytes of it can be read too; they are shifted away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fuser.machines import Machine

_NARROW = {"i8": 1, "u8": 1, "i16": 2, "u16": 2}


def _gather(kind: str, machine: Machine) -> str:
    if not machine.gathers:
        return f"FUSER_FN {kind} fuser_gather_{kind}(const {kind}* p, i64 i) {{ return p[i]; }}\n"
    return f"""\
FUSER_FN {kind} fuser_gather_{kind}(const {kind}* p, i64 i) {{
  const i64 at = (i64)((u64)p & 3) + {_NARROW[kind]} * i;
  return ({kind})(((const fuser_word*)((u64)p & ~3ULL))[at >> 2] >> (u32)((at & 3) * 8));
}}
"""


HELPERS: dict[str, str | Callable[[Machine], str]] = {
    "fuser_word": "typedef u32 fuser_word __attribute__((may_alias));\n",
    **{f"fuser_gather_{kind}": partial(_gather, kind) for kind in _NARROW},
}
