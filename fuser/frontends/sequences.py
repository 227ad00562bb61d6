"""The outer program as data for the native launcher: a sequence of steps, run without Python in between.

A step launches a group's kernel, makes a view, calls a matrix product or attention of ATen through torch's C shim, or
calls a Python function (`native/sequence.h`). Views that only kernels and these calls read are no tensors at all.
Where a sequence may not run natively (under a mode, a profiler, a tensor subclass), the program's generated function
runs.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.frontends import geometry
from fuser.frontends.geometry import Geometry
from fuser.frontends.statements import Statement
from fuser.passes.classify import is_ordered, is_view
from fuser.runtime import launcher, torch_abi

aten = torch.ops.aten
LAUNCH, VIEW, PRODUCT, ATTENTION, PYTHON, CONSTANT = range(6)  # Step::Kind of native/sequence_steps.h
_NONE = -1  # the slot of an unused result
_PRODUCTS: dict[Any, str] = {
    aten.mm.default: "mm", aten.bmm.default: "bmm", aten.addmm.default: "addmm", aten.baddbmm.default: "baddbmm",
}  # fmt: skip
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def are_possible() -> bool:
    """Whether the native launcher is ready and has sequences, and torch's shim and DLPack agree about tensors."""
    launcher.prepare()  # a graph without groups has no handle that would have done so
    native = launcher.native()
    return native is not None and _has_sequences(native)


@functools.cache
def _has_sequences(native: Any) -> bool:
    return bool(native.has_sequences()) and torch_abi.in_fresh_thread(lambda: _reads_alike(native))


def _reads_alike(native: Any) -> bool:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    samples = [torch.empty(2, 3, dtype=d, device="cpu") for d in dtypes]
    samples += [samples[0].t(), samples[0][1:, ::2], torch.empty((), device="cpu")]
    return all(native.reads_alike(t) for t in samples)


def make(
    statements: Sequence[Statement], placeholders: Sequence[fx.Node], results: Sequence[Any], calls: Any,
    slow: Callable[..., Any], boxed: bool,
) -> Any:  # fmt: skip
    """The sequence of a program's statements, which returns `results` as a tuple; `slow` is its generated function.

    `boxed`: it takes its inputs as one list. `calls` is the program, which gives the call of each statement.
    """
    native: Any = launcher.native()
    return native.Sequence(slow, boxed, len(placeholders), *_Builder(statements, placeholders, results, calls).built())


class _Builder:
    """Slots, lifetimes and steps of one program."""

    def __init__(
        self, statements: Sequence[Statement], placeholders: Sequence[fx.Node], results: Sequence[Any], calls: Any
    ) -> None:  # fmt: skip
        self.statements, self.calls = statements, calls
        self.placeholders, self.results = tuple(placeholders), tuple(results)
        self.kept = {r for r in results if isinstance(r, fx.Node)}
        self.real = self._real()
        self.views: dict[fx.Node, tuple[fx.Node, Geometry]] = {}  # native views: their root and geometry
        self.items: dict[fx.Node, dict[Any, fx.Node]] = {}  # calls with several results: the reader of each, by index
        self.effects: set[fx.Node] = set()  # calls under `with_effects` that are calls of the operator itself
        self.tokens: dict[Any, Any] = {}  # the token that replaces each call's token: the one it was given
        self.skipped: set[fx.Node] = set()  # nodes without steps
        for s in statements:
            if s.node is not None:
                self._look_at(s.node)
        self.kept = {k for k in map(self._origin, self.kept) if isinstance(k, fx.Node)}
        self.dead, self.unused = self._lifetimes()
        self.slots: dict[fx.Node, int] = {p: i for i, p in enumerate(placeholders)}
        self.free = [self.slots[p] for p in self.unused]
        self.count = len(placeholders)

    # Which nodes may be native.

    def _real(self) -> set[fx.Node]:
        """Nodes that have to be ATen tensors: results, written tensors, and the bases of these if they are views.

        Autograd counts writes only through views that it knows.
        """
        found: set[fx.Node] = set()
        for node in [*self.kept, *(w for s in self.statements for w in s.written)]:
            while node not in found:
                found.add(node)
                shares = is_view(node.target) or node.target is operator.getitem  # of views with several results
                if not shares or not node.args or not isinstance(node.args[0], fx.Node):
                    break
                node = node.args[0]
        return found

    def _look_at(self, node: fx.Node) -> None:
        if is_ordered(node):
            self._look_at_effect(node)
        elif node.target is _ATTENTION and not _is_native_attention(node):
            return
        elif (count := _results_of(node.target)) > 1:
            self._take_apart(node, node.users, count)
        elif geometry.is_known(node.target) and node not in self.real and isinstance(node.args[0], fx.Node):
            root, where = self.views.get(node.args[0], (node.args[0], _geometry(node.args[0].meta.get("val"))))
            found = None if where is None or node.kwargs else geometry.of_view(node.target, where, node.args[1:])
            if found is not None:
                self.views[node] = root, found

    def _take_apart(self, node: fx.Node, readers: Iterable[fx.Node], count: int, first: int = 0) -> None:
        """Give each result of a call a slot of its own, if only its items are read; they start with item `first`."""
        found = {r.args[1] - first: r for r in readers if r.target is operator.getitem and type(r.args[1]) is int}
        if len(found) == len(list(readers)) and set(found) <= set(range(count)):
            self.items[node] = found
            self.skipped.update(readers)

    def _look_at_effect(self, node: fx.Node) -> None:
        """Replace a call with an effect by a call of the operator: statements are ordered without tokens."""
        tokens = [r for r in node.users if r.target is operator.getitem and r.args[1] == 0]
        operator_called: Any = node.args[1]
        self._take_apart(node, [r for r in node.users if r not in tokens], _results_of(operator_called), 1)
        if node in self.items:
            self.effects.add(node)
            self.skipped.update(tokens)
            self.tokens.update(dict.fromkeys(tokens, self._origin(node.args[0])))

    def _origin(self, value: Any) -> Any:
        """A value; for a token that no step makes, the value that it stands for: an input, or None."""
        return self.tokens.get(value, value) if isinstance(value, fx.Node) else value

    # Lifetimes and slots.

    def _lifetimes(self) -> tuple[dict[int, list[fx.Node]], list[fx.Node]]:
        """The last reads of each statement, and inputs that none reads. A view keeps its root alive."""
        last: dict[fx.Node, int] = {}
        for i, s in enumerate(self.statements):
            if s.node in self.skipped:
                continue
            token = s.node.args[0] if s.node in self.effects else None
            for node in map(self._origin, s.reads):
                if isinstance(node, fx.Node) and node is not self._origin(token):
                    last[node] = i
        for view, (root, _) in self.views.items():
            if view in last:
                last[root] = max(last.get(root, 0), last[view])
        dead: dict[int, list[fx.Node]] = {}
        for node, i in last.items():
            if node not in self.kept:
                dead.setdefault(i, []).append(node)
        self.read = set(last) | self.kept
        return dead, [p for p in self.placeholders if p not in self.read]

    def _slot(self, node: fx.Node) -> int:
        """A new slot for a value that a statement defines."""
        if node not in self.read:
            return _NONE
        if self.free:
            slot = heapq.heappop(self.free)
        else:
            slot, self.count = self.count, self.count + 1
        self.slots[node] = slot
        return slot

    # Steps.

    def built(self) -> tuple[int, tuple[Any, ...], tuple[Any, ...], tuple[int, ...]]:
        """The number of slots, the steps, the results, and the inputs that no step reads."""
        heapq.heapify(self.free)
        steps = []
        unused = tuple(self.slots[p] for p in self.unused)
        for i, s in enumerate(self.statements):
            if s.node in self.skipped or s.node in self.views and s.node not in self.read:
                continue
            step = self._step(s)
            freed = [self.slots[n] for n in self.dead.get(i, ())]
            for slot in freed:
                heapq.heappush(self.free, slot)
            kind, callable_, arguments, names, outs, several, special = step
            steps.append((kind, callable_, arguments, names, outs, several, tuple(freed), special))
        return self.count, tuple(steps), tuple(map(self._argument, self.results)), unused

    def _argument(self, value: Any) -> tuple[Any, ...]:
        value = self._origin(value)
        if isinstance(value, fx.Node):
            return (self.slots[value],)
        if isinstance(value, (list, tuple)) and any(isinstance(v, (fx.Node, list, tuple)) for v in value):
            return isinstance(value, tuple), tuple(map(self._argument, value))
        return None, list(value) if isinstance(value, list) else value

    def _arguments(self, args: Sequence[Any], kwargs: Any = None) -> tuple[tuple[Any, ...], tuple[str, ...] | None]:
        named = dict(kwargs or {})
        given = tuple(map(self._argument, [*args, *named.values()]))
        return given, tuple(named) or None

    def _step(self, s: Statement) -> tuple[Any, ...]:
        if s.launch is not None:
            plan, function, numbers, several = s.launch
            arguments, names = self._arguments([*numbers, *plan.inputs])
            return LAUNCH, function, arguments, names, tuple(map(self._slot, plan.outputs)), several, ()
        if s.node is None or is_ordered(s.node) and s.node not in self.effects:
            arguments, _ = self._arguments(s.reads)
            return PYTHON, self.calls.step(s), arguments, None, tuple(map(self._slot, s.defines)), True, ()
        return self._call(s.node)

    def _call(self, node: fx.Node) -> tuple[Any, ...]:
        if node.op == "get_attr":
            return CONSTANT, None, ((None, self.calls.constant(node)),), None, (self._slot(node),), False, ()
        call, args, kwargs = self.calls.called(node)
        arguments, names = self._arguments(args, kwargs)
        if node in self.items:
            kind, special = (ATTENTION, _attention(node)) if node.target is _ATTENTION else (PYTHON, ())
            target: Any = node.args[1] if node in self.effects else node.target
            found, count = self.items[node], _results_of(target)
            outs = tuple(self._slot(found[i]) if i in found else _NONE for i in range(count))
            return kind, call, arguments, names, outs, count > 1, special
        kind, special = self._special(node)
        return kind, call, arguments, names, (self._slot(node),), False, special

    def _special(self, node: fx.Node) -> tuple[int, tuple[Any, ...]]:
        """The kind of a call with one result, and the launcher's data beside its arguments."""
        if node in self.views:
            root, where = self.views[node]
            expected = _geometry(root.meta.get("val"))
            assert expected is not None
            dims = (*where.sizes, *where.strides)
            return VIEW, (self.slots[root], (*expected.sizes, *expected.strides), dims, where.offset)
        product = _PRODUCTS.get(node.target)
        numbers: dict[str, Any] = dict(node.kwargs)
        if product is not None and all(type(v) in (int, float) for v in numbers.values()):
            return PRODUCT, (product, float(numbers.get("beta", 1)), float(numbers.get("alpha", 1)))
        return PYTHON, ()


@functools.cache
def _results_of(target: Any) -> int:
    """The number of results of an operator, as far as known before it runs; 1 for other functions."""
    return len(target._schema.returns) if isinstance(target, torch._ops.OpOverload) else 1


def _is_native_attention(node: fx.Node) -> bool:
    fits = len(node.args) <= 5 and not any(isinstance(a, fx.Node) for a in node.args[3:])
    return fits and node.kwargs.get("attn_mask") is None


def _attention(node: fx.Node) -> tuple[float, ...]:
    """Dropout, causality and scale (nan if none) of an attention."""
    given: list[Any] = [*node.args[3:], *(0.0, False)[len(node.args) - 3 :]]
    scale: Any = node.kwargs.get("scale")
    return float(given[0]), float(given[1]), float("nan") if scale is None else float(scale)


def _geometry(value: Any) -> Geometry | None:
    """The traced geometry of a value if its sizes are known, else None; calls are compared with it."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes, strides = tuple(value.shape), tuple(value.stride())
    return Geometry(sizes, strides) if all(type(n) is int for n in (*sizes, *strides)) else None


__all__ = ["are_possible", "make"]
