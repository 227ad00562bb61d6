"""C++ of vector IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuser.cpu.text import Lines, cpp_expr
from fuser.cpu.vir import calls
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import Sym
from fuser.lazy_dataclasses import dataclass
from fuser.ops import (
    CPP_TYPES,
    LOW,
    cell_helpers,
    compute_dtype,
    cpp_cell,
    cpp_combine,
    cpp_constant,
    cpp_convert,
    cpp_lanes,
    cpp_lanes_near,
    cpp_load,
    cpp_near,
    cpp_overtakes,
    cpp_round,
    cpp_step,
    cpp_store,
)

# The parameters of each function: pointers, int64 and float64 slots, its range of units, scratch memory, its status.
SIGNATURE = (
    "char* const* ptrs, const i64* s, const double* f, i64 begin, i64 end, char* scratch, i32* status"
)  # fmt: skip
_BINDS = {"*": 10, "/": 10, "%": 10, "+": 9, "-": 9, "<<": 8, "<": 7, "<=": 7, ">": 7, ">=": 7, "==": 6, "!=": 6,
          "&": 5, "^": 4, "|": 3, "&&": 2, "||": 1}  # fmt: skip
_ATOM, _UNARY, _PRODUCT, _SUM, _CHOICE, _LOOSE = 12, 11, 10, 9, 0, -1
_WRAPPED = (*LOW, torch.bool)  # dtypes that are loaded and stored by a call, or in parentheses
Term = tuple[str, int]  # a text, and how closely its outermost operator binds: see `_BINDS`
_TABLES: dict[str, Callable[..., str | None]] = {
    "op": cpp_cell, "lanes": cpp_lanes, "combine": cpp_combine, "overtakes": cpp_overtakes, "step": cpp_step,
    "near": cpp_near, "lanes_near": cpp_lanes_near,
}  # fmt: skip
_ARRAYS = ("fuser_zeros",)  # arrays that the generator's helpers define
INTEGERS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


class Printer:
    """Prints nodes as C++. `names` and `slots` replace the names of variables and arguments.

    `uses`: the helpers that the printed text calls.
    """

    def __init__(
        self, names: Mapping[str, str] | None = None, slots: Mapping[ir.Slot, str] | None = None,
        constants: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        """`constants`: for the id of a `Let`, the text that replaces the last argument of its value."""
        self.names, self.slots, self.constants = names or {}, slots or {}, constants or {}
        self.out = Lines()
        self.uses: set[str] = set()

    def _calls(self, text: str) -> str:
        """The text of a table cell; the helpers that it calls are added to `uses`."""
        self.uses.update(cell_helpers(text))
        return text

    def function(self, opening: str, kernel: ir.Kernel) -> Text:
        """The text of the function with the signature's start `opening` and the body of `kernel`."""
        self._braces(f"{opening}({SIGNATURE})", kernel.body)
        return Text(self.out.text(), frozenset(self.uses))

    # -- values: each with how closely its outermost operator binds ----------------------------------------------------
    def value(self, v: ir.Value) -> str:
        """The text of a value."""
        return _VALUES[type(v)](self, v)[0]

    def _in(self, v: ir.Value, least: int) -> str:
        """The text of a value, in parentheses if its operator binds less closely than `least`."""
        text, binds = _VALUES[type(v)](self, v)
        return text if binds >= least else f"({text})"

    def _name(self, v: ir.Name) -> Term:
        if v.name in _ARRAYS:
            self.uses.add(v.name)
        return self.names.get(v.name, v.name), _ATOM

    def _number(self, v: ir.Number) -> Term:
        if v.dtype is None:
            return str(v.number), _ATOM if v.number >= 0 else _UNARY
        return cpp_constant(v.number, v.dtype), _UNARY

    def _slot(self, v: ir.Slot) -> Term:
        return self.slots.get(v) or f"{v.kind}[{v.at}]", _ATOM

    def _offset(self, v: ir.Offset) -> Term:
        def name(s: Sym) -> str:
            if s.row is not None:
                return self.value(v.scope.ref(s.row))
            if v.scope.slots is not None:
                return self._slot(ir.Slot("s", v.scope.slots[s]))[0]
            return self.names.get(s.name, s.name)

        text = cpp_expr(v.e, name, v.of, v.scope.extents, self.uses)
        if len(v.e.terms) > 1:
            return text, _SUM
        return text, _ATOM if all(len(m) + (c != 1) <= 1 and c >= 0 for m, c in v.e.terms) else _PRODUCT

    def _at(self, v: ir.At) -> Term:
        return f"{self._in(v.array, _ATOM)}[{self.value(v.place)}]", _ATOM

    def _address(self, v: ir.Address) -> Term:
        return f"{self.value(v.buffer)} + ({self.value(v.place)})", _SUM

    def _unary(self, v: ir.Unary) -> Term:
        return f"{v.sign}{self._in(v.a, _UNARY)}", _UNARY

    def _binary(self, v: ir.Binary) -> Term:
        binds = _BINDS[v.sign]
        return f"{self._in(v.a, binds)} {v.sign} {self._in(v.b, binds + 1)}", binds

    def _select(self, v: ir.Select) -> Term:
        return f"{self._in(v.test, 1)} ? {self._in(v.a, 1)} : {self.value(v.b)}", _CHOICE

    def _cast(self, v: ir.Cast) -> Term:
        return f"({v.kind}){self._in(v.a, _UNARY)}", _UNARY

    def _op(self, v: ir.Op) -> Term:
        return self._cell(v, *map(self.value, v.args)), _LOOSE

    def _cell(self, v: ir.Op, *args: str) -> str:
        return self._calls(_TABLES[v.table](v.name, v.dtype, *args) or "")

    def _convert(self, v: ir.Convert) -> Term:
        text, binds = _VALUES[type(v.a)](self, v.a)
        changes = compute_dtype(v.source) is not compute_dtype(v.target) or v.target in LOW
        return self._calls(cpp_convert(v.source, v.target, text)), _UNARY if changes else binds

    def _round(self, v: ir.Round) -> Term:
        if v.vector:
            how = "tame_bfloat16" if v.tame and v.dtype is torch.bfloat16 else LOW[v.dtype]
            return self._helper(f"fuser_lanes_round_{how}", v.a), _ATOM
        return self._calls(cpp_round(v.dtype, self.value(v.a), v.tame)), _ATOM

    def _decode(self, v: ir.Decode) -> Term:
        if v.lone and v.dtype is torch.float16:
            return self._helper("fuser_lone_load_half", v.a), _ATOM
        text, binds = _VALUES[type(v.a)](self, v.a)
        return self._calls(cpp_load(v.dtype, text)), _ATOM if v.dtype in _WRAPPED else binds

    def _encode(self, v: ir.Encode) -> Term:
        if v.lone and v.dtype is torch.float16:
            return self._helper("fuser_lone_store_half", v.a), _ATOM
        text, binds = _VALUES[type(v.a)](self, v.a)
        return self._calls(cpp_store(v.dtype, text, v.exact)), _ATOM if v.dtype in _WRAPPED else binds

    # -- vectors -------------------------------------------------------------------------------------------------------
    def _splat(self, v: ir.Splat) -> Term:
        if isinstance(v.of, int):
            return f"(({calls.moved(v.of)}){{}} + {self._in(v.a, _PRODUCT)})", _ATOM
        return self._helper(f"fuser_lanes_all{'_flags' if v.of is torch.bool else ''}", v.a), _ATOM

    def _mask(self, v: ir.Mask) -> Term:
        if v.any:
            return f"({self._helper('FUSER_MASK', ir.Cast('lanes_i', v.flags))} != 0)", _ATOM
        return self._helper("FUSER_MASK", v.flags), _ATOM

    def _bound(self, v: ir.Bound) -> Term:
        self.uses.add("FUSER_BOUND")
        return f"FUSER_BOUND({self.value(v.a)}, {v.sign}, {self.value(v.b)})", _ATOM

    def _called(self, v: ir.Value) -> Term:
        return self._helper(*calls.VALUES[type(v)](v)), _ATOM

    def _helper(self, function: str, *args: ir.Value) -> str:
        self.uses.add(function)
        return f"{function}({', '.join(map(self.value, args))})"

    # -- statements ----------------------------------------------------------------------------------------------------
    def body(self, statements: tuple[ir.Statement, ...]) -> None:
        """Print statements in order."""
        for s in statements:
            if type(s) is ir.Block:
                self._block(s)
            else:
                self.out.add(_STATEMENTS[type(s)](self, s)) if type(s) is not ir.Fold else self._fold(s)

    def _let(self, s: ir.Let) -> str:
        const, name = "const " if s.const else "", self.names.get(s.name, s.name)
        if s.value is None:
            return f"{s.kind} {name};"
        if id(s) in self.constants:
            return f"{const}{s.kind} {name} = {self._with_constant(s.value, self.constants[id(s)])};"
        return f"{const}{s.kind} {name} = {self.value(s.value)};"

    def _with_constant(self, v: ir.Value, constant: str) -> str:
        """The text of a value whose last argument, a number, is replaced by `constant`."""
        if isinstance(v, ir.Splat):
            self.uses.add("fuser_lanes_all")
            return f"fuser_lanes_all({constant})"
        assert isinstance(v, ir.Op)
        return self._cell(v, *map(self.value, v.args[:-1]), constant)

    def _scratch(self, s: ir.Scratch) -> str:
        sizes = "".join(f"[{n}]" for n in s.sizes)
        aligned = f" __attribute__((aligned({s.aligned})))" if s.aligned else ""
        return f"{s.kind} {s.name}{sizes}{aligned}{' = {}' if s.zero else ''};"

    def _pointer(self, s: ir.Pointer) -> str:
        kind, name = f"{'const ' if s.const else ''}{s.kind}", self.names.get(s.name, s.name)
        if s.checked:
            elements, function = s.checked
            self.uses.add("fuser_checked")
            values = f'({kind}*){self.value(s.source)}, {self.value(elements)}, "{s.name}", {function}_bounds, status'
            return f"const fuser_checked<{kind}> {name} = {{{values}}};"
        return f"{kind}* __restrict {name} = ({kind}*){self._in(s.source, _UNARY)};"

    def _set(self, s: ir.Set) -> str:
        return f"{self.value(s.target)} {s.sign}= {self.value(s.value)};"

    def _calling(self, s: ir.Statement) -> str:
        return f"{self._helper(*calls.STATEMENTS[type(s)](s))};"

    def _return(self, s: ir.Return) -> str:
        return "return;"

    def _prefetch(self, s: ir.Prefetch) -> str:
        return f"__builtin_prefetch({', '.join((self.value(s.address), *map(str, s.how)))});"

    def _fold(self, s: ir.Fold) -> None:
        dtype = s.folded
        size = min(s.vector_bytes, s.lanes * dtype.itemsize)
        width = lanes = size // dtype.itemsize
        names = [f"a{i}" for i in range(s.lanes // width)]
        element = "u8" if dtype is torch.bool else CPP_TYPES[dtype]
        if s.table == "sign":
            element = _UNSIGNED.get(element, element)
        self.uses.add("FUSER_SHUFFLE")
        out = self.out
        out.open("")
        out.add(f"typedef {element} vec __attribute__((vector_size({size}), aligned({dtype.itemsize}), may_alias));")
        out.add(f"typedef {INTEGERS[dtype.itemsize]} indices __attribute__((vector_size({size})));")
        vectors = [f"((const vec*){s.array})[{i}]" for i in range(len(names))]
        if s.total is not None:
            out.add(f"typedef float part __attribute__((vector_size({size // 2}), aligned(4), may_alias));")
            parts = [f"((const part*){s.array})[{i}]" for i in range(len(names))]
            vectors = [f"__builtin_convertvector({part}, vec)" for part in parts]
        out.add("vec " + ", ".join(f"{n} = {v}" for n, v in zip(names, vectors)) + ";")
        while len(names) > 1:
            half = len(names) // 2
            for i in range(half):
                out.add(f"{names[i]} = {self._joined(s, names[i], names[i + half])};")
            names = names[:half]
        while width > 1:
            width //= 2
            partners = ", ".join(str(i ^ width) for i in range(lanes))  # shuffles inside 16 bytes take a cycle
            out.add(f"{{ const vec b = FUSER_SHUFFLE(indices, a0, {partners});")
            out.add(f"  a0 = {self._joined(s, 'a0', 'b')}; }}")
        out.add(f"{s.array}[0] = a0[0];" if s.total is None else f"{self.value(s.total)} += a0[0];")
        out.close()

    def _joined(self, s: ir.Fold, a: str, b: str) -> str:
        if s.table == "wins":
            return f"{b} {s.name} {a} ? {b} : {a}"
        return f"{a} {s.name} {b}" if s.table == "sign" else self._calls(cpp_combine(s.name, s.folded, a, b))

    # -- blocks --------------------------------------------------------------------------------------------------------
    def _block(self, b: ir.Block) -> None:
        _HEADS[type(b.head)](self, b.head, b.body)

    def _braces(self, opening: str, body: tuple[ir.Statement, ...], closing: str = "}") -> None:
        self.out.open(opening)
        self.body(body)
        self.out.close(closing)

    def _for(self, head: ir.For, body: tuple[ir.Statement, ...]) -> None:
        if head.unroll:
            self.out.add("#pragma GCC ivdep")  # g++ does not accept `omp simd` together with `unroll`
            self.out.add(f"#pragma GCC unroll {head.unroll}")
        elif head.simd:
            self.out.add(f"#pragma omp simd reduction({head.joins})" if head.joins else "#pragma omp simd")
        name, high, step = head.name, self._in(head.high, 7), self.value(head.step)
        start = f"i64 {name} = {self.value(head.low)}" if head.low is not None else ""
        test = f"{name} + {step} <= {high}" if head.whole else f"{name} < {high}"
        text = f"for ({start}; {test}; {f'++{name}' if step == '1' else f'{name} += {step}'})"
        if len(body) == 1 and not head.simd and type(body[0]) in (ir.Set, ir.Prefetch):
            self.out.add(f"{text} {_STATEMENTS[type(body[0])](self, body[0])}")
        else:
            self._braces(text, body)

    def _units(self, head: ir.Units, body: tuple[ir.Statement, ...]) -> None:
        digits = [(name, self.value(size)) for name, size in head.digits]
        self.out.add("i64 unit = begin;")
        for at, (name, size) in reversed(list(enumerate(digits))):
            self.out.add(f"i64 {name} = unit % ({size}); unit /= {size};" if at else f"i64 {name} = unit;")
        self.out.open("for (i64 u = begin; u < end; ++u)")
        self.body(body)
        text = ""
        for at, (name, size) in enumerate(digits):
            text = f"if (++{name} == ({size})) {{ {name} = 0; {text} }}" if at else f"++{name};"
        if text:
            self.out.add(text)
        self.out.close()

    def _segments(self, head: ir.Segments, body: tuple[ir.Statement, ...]) -> None:
        low, high = self.value(head.low), self.value(head.high)
        self.out.open(f"for (i64 from = {low}, to; from < {high}; from = to)")
        self.out.add(f"to = from + {head.longest} < {high} ? from + {head.longest} : {high};")
        for cut in head.cuts:
            self.out.add(f"{{ const i64 cut = {self.value(cut)}; to = cut > from && cut < to ? cut : to; }}")
        self.body(body)
        self.out.close()

    def _if(self, head: ir.If, body: tuple[ir.Statement, ...]) -> None:
        test = self.value(head.test)
        text = f"if (__builtin_expect({test}, 0))" if head.rare else f"if ({test})"
        if len(body) == 1 and type(body[0]) in _SHORT:
            self.out.add(f"{text} {_STATEMENTS[type(body[0])](self, body[0])}")
        else:
            self._braces(text, body)

    def _only(self, head: ir.Only, body: tuple[ir.Statement, ...]) -> None:
        self.uses.add(head.macro)
        self.out.add(f"#if {head.macro}")
        self.body(body)

    def _otherwise(self, head: ir.Otherwise, body: tuple[ir.Statement, ...]) -> None:
        self.out.add("#else")
        self.body(body)
        self.out.add("#endif")

    def _routine(self, head: ir.Routine, body: tuple[ir.Statement, ...]) -> None:
        params = ", ".join(f"{kind} {name}" for kind, name in head.params)
        inline = " __attribute__((always_inline))" if head.inline else ""
        self._braces(f"auto {head.name} = [&]({params}){inline}", body, "};")


# Integers wrap in unsigned vectors; the cells of their scalar ops have casts that vectors do not accept.
_UNSIGNED = {"i8": "u8", "i16": "u16", "i32": "u32", "i64": "u64"}
_VALUES: dict[type, Callable[[Printer, Any], Term]] = {
    ir.Name: Printer._name, ir.Number: Printer._number, ir.Slot: Printer._slot, ir.Offset: Printer._offset,
    ir.At: Printer._at, ir.Address: Printer._address, ir.Unary: Printer._unary, ir.Binary: Printer._binary,
    ir.Select: Printer._select, ir.Cast: Printer._cast, ir.Op: Printer._op, ir.Convert: Printer._convert,
    ir.Round: Printer._round, ir.Decode: Printer._decode, ir.Encode: Printer._encode, ir.Bound: Printer._bound,
    ir.Splat: Printer._splat, ir.Mask: Printer._mask, **dict.fromkeys(calls.VALUES, Printer._called),
}  # fmt: skip
_STATEMENTS: dict[type, Callable[[Printer, Any], str]] = {
    ir.Let: Printer._let, ir.Scratch: Printer._scratch, ir.Pointer: Printer._pointer, ir.Set: Printer._set,
    ir.Return: Printer._return, ir.Prefetch: Printer._prefetch, **dict.fromkeys(calls.STATEMENTS, Printer._calling),
}  # fmt: skip
_SHORT = (ir.Do, ir.Stream, ir.StreamEnd, ir.Transpose)
_HEADS: dict[type, Callable[[Printer, Any, tuple[ir.Statement, ...]], None]] = {
    ir.Plain: lambda printer, head, body: printer._braces("", body),
    ir.Else: lambda printer, head, body: printer._braces("else", body),
    ir.While: lambda printer, head, body: printer._braces(f"while ({printer.value(head.test)})", body),
    ir.For: Printer._for, ir.Units: Printer._units, ir.Segments: Printer._segments, ir.If: Printer._if,
    ir.Only: Printer._only, ir.Otherwise: Printer._otherwise, ir.Routine: Printer._routine,
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """The C++ text of a function, and the helpers that it calls."""

    text: str
    uses: frozenset[str]


def printed(kernel: ir.Kernel) -> Text:
    """The C++ text of the whole function, with the record of its bounds checks if it has them."""
    printer = Printer()
    if kernel.checked:
        printer.out.add(f'extern "C" {{ i64 {kernel.name}_bounds[3] = {{}}; }}')
    return printer.function(f'extern "C" void {kernel.name}', kernel)
