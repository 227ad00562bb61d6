"""C++ helpers that scan a block of a row: contiguous elements of `x` continue from a carry, into `y`.

Each step of a scan depends on the previous one, unless several are done together: a vector is scanned by itself, in a
logarithmic number of steps, and then combined with the carry. Vectors have 32 bytes everywhere, so that sums have the
same bits on every machine. `y` (and `at`, for indices) may be null, if only the final result is needed, or `x` itself.
"""

from __future__ import annotations

# Per element: its C++ type, the number in a vector, and the element type of vectors of indices of as many lanes.
_VECTORS = {
    "f64": ("double", 4, "i64"), "f32": ("float", 8, "i32"), "i64": ("i64", 4, "i64"), "i32": ("i32", 8, "i32"),
    "u64": ("u64", 4, "i64"),
}  # fmt: skip
_ENDS = {
    "f64": ("-__builtin_inf()", "__builtin_inf()"), "f32": ("-__builtin_inff()", "__builtin_inff()"),
    "i64": ("-9223372036854775807LL - 1", "9223372036854775807LL"), "i32": ("-2147483647 - 1", "2147483647"),
}  # fmt: skip


def _lanes(width: int, first: int) -> str:
    return ", ".join(str(first + lane) for lane in range(width))


def _vector(name: str) -> str:
    """The vector type, and its moves: a load, a store, a broadcast of a value, a broadcast of the last lane."""
    kind, width, _ = _VECTORS[name]
    last = ", ".join([str(width - 1)] * width)
    return f"""\
typedef {kind} fuser_vector_{name} __attribute__((vector_size(32)));
FUSER_FN void fuser_get_{name}(fuser_vector_{name}& v, const {kind}* x) {{ __builtin_memcpy(&v, x, 32); }}
FUSER_FN void fuser_put_{name}({kind}* y, const fuser_vector_{name}& v) {{ __builtin_memcpy(y, &v, 32); }}
FUSER_FN void fuser_fill_{name}(fuser_vector_{name}& v, {kind} x) {{ for (int k = 0; k < {width}; ++k) v[k] = x; }}
FUSER_FN void fuser_last_{name}(fuser_vector_{name}& v) {{
  v = FUSER_BLEND(fuser_vector_{_VECTORS[name][2]}, v, v, {last});
}}
"""


def _up(name: str, by: int) -> str:
    """The lanes of `v` moved up by `by`; lanes from `low` move in below."""
    width, mask = _VECTORS[name][1], f"fuser_vector_{_VECTORS[name][2]}"
    return f"FUSER_BLEND({mask}, low, v, {_lanes(width, width - by)})"


def _scan_vector(name: str, join: str) -> str:
    """Statements that scan the vector `v`; `join` combines it with `w`, the lanes before."""
    steps = [by for by in (1, 2, 4) if by < _VECTORS[name][1]]
    return " ".join(f"{{ const vec w = {_up(name, by)}; v = {join}; }}" for by in steps)


def _sum(kind: str, name: str, start: str, sign: str) -> str:
    """The running sum or product of floats (in double) or of 64-bit integers."""
    value, carry, suffix = ("float", "double", "f32") if name == "f64" else ("i64", "i64", "i64")
    vec = f"fuser_vector_{name}"
    if name == "f64":
        get = "{ four h; __builtin_memcpy(&h, x + i + 4 * k, 16); v = __builtin_convertvector(h, vec); }"
        put = "{ const four h = __builtin_convertvector(v, four); __builtin_memcpy(y + i + 4 * k, &h, 16); }"
        types = f"typedef {value} four __attribute__((vector_size(16))); typedef {vec} vec;"
    else:
        get = "fuser_get_u64(v, (const u64*)x + i + 4 * k);"
        put = "fuser_put_u64((u64*)y + i + 4 * k, v);"
        types = f"typedef {vec} vec;"
    return f"""\
FUSER_FN void fuser_scan_{kind}_{suffix}(const {value}* x, const i64 n, {carry}& carry, {value}* y) {{
  {types}
  vec c, low;
  fuser_fill_{name}(c, carry);
  fuser_fill_{name}(low, {start});
  i64 i = 0;
  for (; i + 8 <= n; i += 8) {{
    for (int k = 0; k < 2; ++k) {{
      vec v;
      {get}
      {_scan_vector(name, f"v {sign} w")}
      vec next = v;
      fuser_last_{name}(next);
      v = v {sign} c;
      c = c {sign} next;
      if (y) {put}
    }}
  }}
  {carry} acc = ({carry})c[0];
  for (; i < n; ++i) {{
    acc = ({carry})(({_VECTORS[name][0]})acc {sign} ({_VECTORS[name][0]})x[i]);
    if (y) y[i] = ({value})acc;
  }}
  carry = acc;
}}
"""


def _total(name: str, kind: str, carry: str) -> str:
    """The helper that adds a block's sum to the carry."""
    return f"""\
FUSER_FN void fuser_total_sum_{name}(const {kind}* x, const i64 n, {carry}& carry, {kind}*) {{
  {carry} total[32] = {{}};
  i64 i = 0;
  for (; i + 32 <= n; i += 32) {{
    _Pragma("omp simd")
    for (int k = 0; k < 32; ++k) total[k] += ({carry})x[i + k];
  }}
  for (int k = 0; i < n; ++i, ++k) total[k] += ({carry})x[i];
  for (int half = 16; half; half /= 2)
    for (int k = 0; k < half; ++k) total[k] += total[k + half];
  carry += total[0];
}}
"""


# Up to the first NaN, numbers are compared. After it only NaNs count.
_FIND_NAN = """\
  if (acc != acc) {
    k = 0;
  } else {
    PLACE any = 0;
    _Pragma("omp simd reduction(|:any)")
    for (i64 j = 0; j < n; ++j) any |= x[j] != x[j];
    if (any) for (k = 0; x[k] == x[k]; ++k) {}
  }
"""
_AFTER_NAN = """\
  if (i < n && acc == acc) acc = x[i];
  for (; i < n; ++i) {
    here = x[i] != x[i] ? base + i : here;
    if (y) y[i] = acc;
    if (at) at[i] = here;
  }
"""


def _extreme_vectors(name: str, over: str, start: str) -> str:
    """The whole vectors of a block. Indices are counted from the carried one, for which 0 (`none`) stands."""
    _, width, place = _VECTORS[name]
    number = _VECTORS[place][0]
    if place == "i32":
        puts = "for (int h = 0; h < 8; ++h) at[i + h] = before + q[h];"
    else:
        puts = "{ q = q + before; fuser_put_i64(at + i, q); }"
    return f"""\
    vec c, low;
    fuser_fill_{name}(c, acc);
    fuser_fill_{name}(low, {start});
    fuser_vector_{place} p, none, one;
    fuser_fill_{place}(p, 0);
    fuser_fill_{place}(none, 0);
    for (int h = 0; h < {width}; ++h) one[h] = ({number})(far + h);
    for (; i + {width} <= k; i += {width}) {{
      vec v;
      fuser_get_{name}(v, x + i);
      const vec own = v;
      {_scan_vector(name, f"w {over} v ? w : v")}
      vec next = v;
      fuser_last_{name}(next);
      v = c {over} v ? c : v;
      c = c {over} next ? c : next;
      if (y) fuser_put_{name}(y + i, v);
      if (at) {{
        fuser_vector_{place} q = own {over}= v ? one + ({number})i : none;
        {{
          typedef fuser_vector_{place} vec;
          const vec low = none;
          vec v = q;
          {_scan_vector(place, "w > v ? w : v")}
          q = v;
        }}
        fuser_vector_{place} last = q;
        fuser_last_{place}(last);
        q = p > q ? p : q;
        p = p > last ? p : last;
        {puts}
      }}
    }}
"""


def _extreme(how: str, name: str) -> str:
    """The running extreme, and the index of its last occurrence; a NaN stays, with the index of the last NaN."""
    kind, width, place = _VECTORS[name]
    over, start = (">", _ENDS[name][0]) if how == "max" else ("<", _ENDS[name][1])
    floating = name.startswith("f")
    return f"""\
FUSER_FN void fuser_scan_{how}_{name}(
    const {kind}* x, const i64 n, {kind}& carry, {kind}* y, i64& carried, const i64 base, i64* at) {{
  typedef fuser_vector_{name} vec;
  {kind} acc = carry;
  i64 i = 0, k = n, here = carried;
{_FIND_NAN.replace("PLACE", place) if floating else ""}\
  const i64 before = carried, far = base - before;
  if (k >= {width} && far < (1LL << 30)) {{
{_extreme_vectors(name, over, start)}\
    acc = c[0];
    here = before + p[0];
  }}
  for (; i < k; ++i) {{
    const {kind} v = x[i];
    const bool better = v {over}= acc;
    acc = better ? v : acc;
    here = better ? base + i : here;
    if (y) y[i] = acc;
    if (at) at[i] = here;
  }}
{_AFTER_NAN if floating else ""}\
  carry = acc;
  carried = here;
}}
"""


HELPERS: dict[str, str] = {
    # Lanes of two vectors; those of the second are numbered after those of the first.
    "FUSER_BLEND": """\
#if defined(__clang__) || __GNUC__ >= 12
#define FUSER_BLEND(I, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FUSER_BLEND(I, a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__})
#endif
""",
    **{f"fuser_vector_{name}": _vector(name) for name in _VECTORS},
    "fuser_scan_sum_f32": _sum("sum", "f64", "0.0", "+"),
    "fuser_scan_prod_f32": _sum("prod", "f64", "1.0", "*"),
    "fuser_scan_sum_i64": _sum("sum", "u64", "0", "+"),
    "fuser_total_sum_f32": _total("f32", "float", "double"),
    "fuser_total_sum_i64": _total("i64", "i64", "u64").replace("u64& carry", "i64& carry"),
    **{f"fuser_scan_{how}_{name}": _extreme(how, name) for how in ("max", "min") for name in _ENDS},
}
