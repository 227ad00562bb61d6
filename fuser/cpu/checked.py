"""Functions that check each offset into a buffer: `config.check_bounds`.

A buffer is then not a pointer but a class that can only be subscripted, so every access is checked. Only plain loops
are written: vectors, tiles, pieces and prefetches take addresses of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuser.ir.sizes import ZERO, Expr, minimum, product
from fuser.kernel_spec import OUT_OF_BOUNDS

# `found` is what `runtime/bounds.py` reads: buffer, offset and elements of the first access outside.
CHECKED_HELPER = f"""\
static u64 fuser_nowhere[8] __attribute__((aligned(64)));
template <class T> struct fuser_checked {{
  T* p;
  i64 n;
  const char* name;
  i64* found;
  i32* status;
  T& operator[](i64 i) const {{
    if ((u64)i < (u64)n) return p[i];
    if (!found[0]) {{ found[1] = i; found[2] = n; found[0] = (i64)name; }}
    *status = {OUT_OF_BOUNDS};
    return *(T*)fuser_nowhere;
  }}
}};
"""


def span(size: Sequence[Expr], stride: Sequence[Expr]) -> Expr:
    """The number of elements from a tensor's first to its last one in memory; 0 if it has none."""
    last = ZERO
    for n, s in zip(size, stride, strict=True):
        last = last + (n - 1) * s
    return product(minimum(n, 1) for n in size) * (last + 1)


__all__ = ["CHECKED_HELPER", "span"]
