"""The sizes that an export allows, as data, and examples of the classes of sizes for which kernels are compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuser.canonical.portable import encode_value
from fuser.errors import AotError
from fuser.ir.sizes import ADD, EQ, FLOORDIV, LE, LT, MAX, MIN, MOD, MUL, NE, PUSH, SLOT

_AT_LEAST = 2  # an export's lower bound of 2 means that 0 and 1 were not tried; its own checks allow them


class Sizes:
    """The inputs of an exported program. `signature.Signature` reads its `leaves` and `ranges`."""

    def __init__(
        self, exported: torch.export.ExportedProgram, inputs: Sequence[fx.Node], guards: Sequence[Any]
    ) -> None:  # fmt: skip
        self.leaves: list[dict[str, Any]] = []
        self.ranges: dict[str, list[int | None]] = {}
        self._limits = {str(symbol): _limits(found) for symbol, found in exported.range_constraints.items()}
        self._hints: dict[str, int] = {}
        self.guards = _guards(guards)
        specs = [s for s in exported.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
        for node, spec in zip(inputs, specs, strict=True):
            self.leaves.append(self._leaf(node, getattr(spec.arg, "value", None)))

    def _leaf(self, node: fx.Node, constant: Any) -> dict[str, Any]:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes = [self._size(n) for n in value.shape]
            dtype, device = encode_value(value.dtype), value.device.type
            return {"name": node.name, "kind": "tensor", "dtype": dtype, "device": device, "sizes": sizes}
        if isinstance(value, torch.SymInt):
            found = self._size(value)
            return {"name": node.name, "kind": "int", "value": found if isinstance(found, str) else None}
        return {"name": node.name, "kind": "constant", "value": encode_value(constant if value is None else value)}

    def _size(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        symbols = sorted(expression.free_symbols, key=str)
        for symbol in symbols:
            self.ranges[str(symbol)] = self._limits.get(str(symbol), [None, None])
        if len(symbols) == 1:
            (symbol,) = symbols
            if expression == symbol:
                self._hints.setdefault(str(symbol), size.node.hint or _AT_LEAST)
                return str(symbol)
            a, b = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
            if a.is_Integer and b.is_Integer and a > 0 and expression == a * symbol + b:
                return ["linear", str(symbol), int(a), int(b)]
        return None

    def variants(self, leaves: Sequence[Any]) -> Iterator[list[Any]]:
        """Inputs like `leaves` with one dynamic size changed to another number, or 1, if the export allows it."""
        found = self._found(leaves)
        for symbol, now in found.items():
            low, high = self.ranges.get(symbol, [None, None])
            for other in (1, now + 3, 2 * now):
                if other != now and (low is None or other >= low) and (high is None or other <= high):
                    yield [self._resized(v, leaf, {**found, symbol: other}) for v, leaf in zip(leaves, self.leaves)]

    def _found(self, leaves: Sequence[Any]) -> dict[str, int]:
        out: dict[str, int] = {}
        for value, leaf in zip(leaves, self.leaves):
            for n, size in zip(value.shape, leaf["sizes"]) if leaf["kind"] == "tensor" else ():
                if isinstance(size, str):
                    out.setdefault(size, int(n))
                elif isinstance(size, list):
                    out.setdefault(size[1], (int(n) - size[3]) // size[2])
        return out

    def _resized(self, value: Any, leaf: dict[str, Any], numbers: dict[str, int]) -> Any:
        if leaf["kind"] == "int":
            return numbers.get(leaf["value"], value)
        if leaf["kind"] != "tensor":
            return value
        for dim, size in enumerate(leaf["sizes"]):
            want = numbers[size] if isinstance(size, str) else None
            if isinstance(size, list):
                want = size[2] * numbers[size[1]] + size[3]
            if want is not None and want != value.shape[dim] and value.shape[dim]:
                at = torch.arange(want, device=value.device) % value.shape[dim]
                value = value.index_select(dim, at)
        return value


def guards_of(exported: torch.export.ExportedProgram) -> tuple[Any, ...]:
    """The export's requirements on sizes beside their ranges, as sympy expressions."""
    values = [n.meta.get("val") for n in exported.graph_module.graph.nodes if n.op == "placeholder"]
    modes = [v.fake_mode for v in values if hasattr(v, "fake_mode")]
    env = modes[0].shape_env if modes else None
    return tuple(g.expr for g in env.guards) if env is not None else ()


def _guards(guards: Sequence[Any]) -> list[list[Any]]:
    """[text, symbols, program of `ir.sizes` over these] of each guard. AotError for one that has no such form."""
    found: list[list[Any]] = []
    for guard in guards:
        symbols = sorted(map(str, guard.free_symbols))
        code = _code(guard, symbols)
        if code is None:
            raise AotError(f"the export requires {guard} of its sizes, which a file cannot say")
        found.append([str(guard), symbols, code])
    return found


_FUNCTIONS = {
    "Mod": MOD, "PythonMod": MOD, "FloorDiv": FLOORDIV, "Max": MAX, "Min": MIN, "Equality": EQ, "Unequality": NE,
    "LessThan": LE, "StrictLessThan": LT, "GreaterThan": LE, "StrictGreaterThan": LT, "Add": ADD, "Mul": MUL,
    "And": MIN, "Or": MAX,
}  # fmt: skip


def _code(e: Any, symbols: list[str]) -> list[int] | None:
    """A sympy expression of integers as a program; None for an unknown function."""
    if e.is_Symbol:
        return [SLOT, symbols.index(str(e))]
    if getattr(e, "is_Integer", False):
        return [PUSH, int(e)]
    name, args = type(e).__name__, list(e.args)
    if name == "Pow" and getattr(args[1], "is_Integer", False) and 1 < args[1] < 9:
        name, args = "Mul", [args[0]] * int(args[1])
    if name not in _FUNCTIONS or not args:
        return None
    if name in ("GreaterThan", "StrictGreaterThan"):
        args.reverse()
    codes = [_code(a, symbols) for a in args]
    out: list[int] = []
    for n, code in enumerate(codes):
        if code is None:
            return None
        out += code if n == 0 else [*code, _FUNCTIONS[name]]
    return out


def _limits(found: Any) -> list[int | None]:
    """[low, high] of a range; None for no limit."""
    low, high = (int(n) if getattr(n, "is_Integer", False) else None for n in (found.lower, found.upper))
    return [None if low is not None and low <= _AT_LEAST else low, high]


__all__ = ["Sizes"]
