"""C++ helpers that read single elements of one or two bytes, as gathers of words: no machine gathers less than that.

The word around an element, aligned, lies in the same page, so what else is in it can be read too; it is shifted away.
"""

from __future__ import annotations

_NARROW = {"i8": 1, "u8": 1, "i16": 2, "u16": 2}

HELPERS = {
    "fuser_word": "typedef u32 fuser_word __attribute__((may_alias));\n",
    **{
        f"fuser_gather_{kind}": f"""\
FUSER_FN {kind} fuser_gather_{kind}(const {kind}* p, i64 i) {{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && defined(__AVX2__)
  const i64 at = (i64)((u64)p & 3) + {size} * i;
  return ({kind})(((const fuser_word*)((u64)p & ~3ULL))[at >> 2] >> (u32)((at & 3) * 8));
#else
  return p[i];
#endif
}}
"""
        for kind, size in _NARROW.items()
    },
}
