"""The outer program: one generated Python function, straight-line code over local variables.

Each statement calls a fusion handle or an ATen operator bound in advance; a value is deleted after its last use, so
that the next statement can use its memory.
"""

from __future__ import annotations

import functools
import keyword
import linecache
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fuser import config, targets
from fuser.errors import Unsupported
from fuser.frontends import batching, sequences
from fuser.frontends.bodies import Call
from fuser.frontends.statements import Statement, moves_memory
from fuser.passes import order
from fuser.passes.classify import MARK, WRITTEN, base_of, graphs_of, is_mutable, is_ordered, runs_graphs
from fuser.passes.extract import GroupPlan, Plan
from fuser.reasons import because

_SERIAL = [0]


def _unsafe_view(x: torch.Tensor, shape: Sequence[int]) -> Any:
    """`x` in another shape, as a tensor that autograd does not treat as a view; a copy if its strides require that."""
    try:
        return torch.ops.aten._unsafe_view(x, shape)
    except RuntimeError:
        return torch.ops.aten._unsafe_view(x.contiguous(), shape)


# Views in a traced graph that other strides than the traced ones may not allow: eager's `reshape` then copies.
_COPIES_IF_NEEDED: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: _unsafe_view,
}
# torch's own functions for operators, which parse their arguments 0.5 to 1.6 µs faster than the overload does.
_QUICK: dict[Any, Any] = {
    torch.ops.aten.t.default: torch.t,
    torch.ops.aten.transpose.int: torch.transpose,
    torch.ops.aten.permute.default: torch.permute,
    torch.ops.aten.reshape.default: torch.reshape,
    torch.ops.aten.unsqueeze.default: torch.unsqueeze,
    torch.ops.aten.squeeze.dim: torch.squeeze,
    torch.ops.aten.select.int: torch.select,
    torch.ops.aten.detach.default: torch.detach,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.baddbmm.default: torch.baddbmm,
    torch.ops.aten.convolution.default: torch.convolution,
    torch.ops.aten.embedding.default: torch.embedding,
}
# The same for operators with one overload, if this torch has them by their own names.
_BOUND = (
    "_linalg_check_errors", "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd",
    "cumsum", "gather", "grid_sampler_2d", "native_batch_norm", "native_dropout", "native_group_norm",
    "native_layer_norm", "topk",
)  # fmt: skip
for _name in _BOUND:
    _packet, _function = getattr(torch.ops.aten, _name, None), getattr(torch._C._VariableFunctions, _name, None)
    if _packet is not None and _function is not None and "default" in _packet.overloads():
        _QUICK[_packet.default] = _function
_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.truediv: "/",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}


class Program:
    """Writes and compiles the outer function of one graph.

    `functions` are the groups' names and callables, in the order of `plan.groups`. `source` is the text. `calls`
    replace nodes that run graphs. `function(*inputs)` returns a tuple; so does `boxed([inputs])`, which empties its
    argument to free inputs early.
    """

    def __init__(
        self, module: fx.GraphModule, plan: Plan, functions: Sequence[tuple[str, Callable[..., Any]]],
        calls: Mapping[fx.Node, Call] | None = None,
    ) -> None:  # fmt: skip
        self.module = module
        self.calls = calls or {}
        self.plan = plan
        self.scope: dict[str, Any] = {}
        self._bound: dict[tuple[type, Any], str] = {}
        self._names: dict[fx.Node, str] = {}
        self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._graphs = {a for n in self.calls for a in graphs_of(n)}
        self._functions = functions
        self.body = self._body()
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._sequences: dict[bool, Callable[..., Any] | None] = {}

    @property
    def source(self) -> str:
        """The Python of the program."""
        return self._text(boxed=False)

    @property
    def function(self) -> Callable[..., Any]:
        """The program as a function of the inputs."""
        return self.sequence(boxed=False) or self._compile(boxed=False)

    @property
    def boxed(self) -> Callable[..., Any]:
        """The program as a function of a list of the inputs, which it empties."""
        found = self.sequence(boxed=True)
        if found is not None:
            return found
        function = self._compile(boxed=True)
        function._boxed_call = True  # type: ignore[attr-defined]
        return function

    def sequence(self, boxed: bool) -> Callable[..., Any] | None:
        """The program as a native sequence of steps; None if there is none."""
        if boxed not in self._sequences:
            self._sequences[boxed] = self._sequence(boxed) if self._may_be_sequence() else None
        return self._sequences[boxed]

    def _may_be_sequence(self) -> bool:
        values = [p.meta.get("val") for p in self.placeholders]
        on_cpu = all(targets.is_host(v.device) for v in values if isinstance(v, torch.Tensor))
        if config.sequences == "none" or (config.sequences == "cpu" and not on_cpu):
            return False
        if not sequences.are_possible() or any(s.node is not None and moves_memory(s.node) for s in self.statements):
            return False
        return all(n.op in ("placeholder", "get_attr", "call_function", "output") for n in self.module.graph.nodes)

    def _sequence(self, boxed: bool) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            return self._compile(boxed)(*args)

        made: Callable[..., Any] = sequences.make(self.statements, self.placeholders, self.results, self, slow, boxed)
        return made

    # Interface for a sequence's steps.

    def called(self, node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
        """The function that a node calls, and its arguments; for a call with an effect, the operator's own."""
        if is_ordered(node):
            return _function_of(node.args[1]), node.args[2:], node.kwargs
        if node in self.calls:
            return self.calls[node].function, self.calls[node].args, self.calls[node].kwargs
        return _function_of(node.target, WRITTEN in node.meta), node.args, node.kwargs

    def constant(self, node: fx.Node) -> Any:
        """The value of a `get_attr` node."""
        return _attribute(self.module, str(node.target))

    def step(self, statement: Statement) -> Callable[..., Any]:
        """A function from the values that a statement reads to a tuple of those it defines."""
        reads, defines = (", ".join(map(self._name, nodes)) for nodes in (statement.reads, statement.defines))
        return self.compile_as([f"def step({reads}):"], [statement.text, f"return ({defines}{',' if defines else ''})"])

    def compile_as(self, header: Sequence[str], lines: Sequence[str]) -> Callable[..., Any]:
        """The function with the first line `header` and the body `lines`, such as those of `body`."""
        return self._made("\n".join([*header, *("    " + b for b in lines), ""]), header[0].split("(")[0].split()[-1])

    # Names and literals.

    def spelled(self, node: fx.Node) -> str:
        """The variable name of a node's value."""
        return self._name(node)

    def bind(self, value: Any, hint: str) -> str:
        """A global name for a function or constant."""
        return self._bind(value, hint)

    def _name(self, node: fx.Node) -> str:
        name = self._names.get(node)
        if name is None:
            name = node.name if not keyword.iskeyword(node.name) else node.name + "_"
            self._names[node] = name
        return name

    def _bind(self, value: Any, hint: str) -> str:
        """A global name for a function or constant."""
        key = (type(value), id(value))
        name = self._bound.get(key)
        if name is None:
            name = self._bound[key] = f"{hint.upper()}_{len(self._bound)}"
            self.scope[name] = value
        return name

    def _literal(self, value: Any) -> str:
        match value:
            case fx.Node():
                return self._name(value)
            case tuple():
                return f"({''.join(self._literal(v) + ', ' for v in value)})"
            case list():
                return f"[{', '.join(map(self._literal, value))}]"
            case slice():
                return f"slice({self._literal(value.start)}, {self._literal(value.stop)}, {self._literal(value.step)})"
            case dict():
                return "{" + ", ".join(f"{k!r}: {self._literal(v)}" for k, v in value.items()) + "}"
            case float() if not math.isfinite(value):
                return self._bind(value, "float")
            case None | bool() | int() | float() | str():
                return repr(value)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                raise Unsupported(because("not_traced", f"a symbolic number {value} that is no node of the graph"))
        return self._bind(value, type(value).__name__)

    # Statements.

    def _call(self, node: fx.Node) -> str:
        if is_ordered(node):
            token, effect, *rest = node.args
            assert isinstance(effect, torch._ops.OpOverload)
            several = "*" if len(effect._schema.returns) > 1 else ""
            return f"({self._literal(token)}, {several}{self._called(effect, rest, node.kwargs)})"
        if node in self.calls:
            call = self.calls[node]
            given = [*map(self._literal, call.args), *(f"{k}={self._literal(v)}" for k, v in call.kwargs.items())]
            return f"{self._bind(call.function, runs_graphs(node))}({', '.join(given)})"
        args = [self._literal(a) for a in node.args]
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        infix = _INFIX.get(node.target)  # type: ignore[arg-type]
        if infix is not None and not node.kwargs:
            return f"{args[0]} {infix} {args[1]}"
        return self._called(node.target, node.args, node.kwargs, WRITTEN in node.meta)

    def _called(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], as_is: bool = False) -> str:
        given = [*map(self._literal, args), *(f"{k}={self._literal(v)}" for k, v in kwargs.items())]
        label = str(getattr(target, "__name__", "call")).replace(".", "_")
        call = _function_of(target, as_is)
        return f"{self._bind(call, label if label.isidentifier() else 'call')}({', '.join(given)})"

    def _outside(self, node: fx.Node, rank: int) -> Statement:
        if node.op == "get_attr":
            text = self._bind(_attribute(self.module, str(node.target)), "constant")
        elif node.op == "call_function":
            text = self._call(node)
        else:
            raise Unsupported(because("python", f"{node.op} {node.target} cannot be written as a call"))
        writes = [base_of(node.args[0])] if is_mutable(node) and node.args else []
        first = MARK in node.meta
        text = f"{self._name(node)} = {text}"
        reads = [n for n in node.all_input_nodes if node not in self.calls or n not in self._graphs]
        return Statement([node], reads, rank, text, writes, first=first, node=node)

    def _group(
        self, plan: GroupPlan, function: str, each: str | None, called: Callable[..., Any], numbers: tuple[Any, ...],
        rank: int,
    ) -> Statement:  # fmt: skip
        inputs = (*map(self._literal, numbers), *map(self._name, plan.inputs))
        results = tuple(map(self._name, plan.outputs))
        several = isinstance(plan.graph.output_node().args[0], tuple)
        target = f"({', '.join(results)},)" if several else results[0]
        call = batching.Call(each, inputs, results, several, batching.elements_made(plan)) if each else None
        text = f"{target} = {function}({', '.join(inputs)})"
        launch = plan, called, numbers, several
        writes = plan.written()
        return Statement(
            plan.outputs, plan.inputs, rank, text, writes, call, first=bool(writes), grouped=True, launch=launch
        )

    def _statements(self) -> list[Statement]:
        rank = {n: i for i, n in enumerate(self.module.graph.nodes)}
        found = [self._outside(n, rank[n]) for n in self.plan.outside if n not in self._graphs]
        names: dict[int, tuple[str, str | None]] = {}
        for plan, (name, call) in zip(self.plan.groups, self._functions, strict=True):
            function, numbers = _apart(call)
            if id(function) not in names:
                each = getattr(function, "each", None) if plan.inputs else None
                bound = self._bind(function, name)
                names[id(function)] = bound, self._bind(each, f"{name}_each") if each is not None else None
            found.append(self._group(plan, *names[id(function)], function, numbers, order.rank_of(plan, rank)))
        return self._batched(found)

    def _batched(self, statements: list[Statement]) -> list[Statement]:
        """The statements in execution order, with calls of one fusion batched."""
        found = batching.Order([s.call for s in statements], [s.rank for s in statements], order.needs(statements))
        if sum(map(len, found.runs)) != len(statements):
            raise Unsupported(because("not_traced", "the groups of this graph depend on each other in a circle"))
        used = {n for s in statements for n in s.reads} | set(self.module.graph.output_node().all_input_nodes)
        result = []
        for run in found.runs:
            members = [statements[i] for i in run]
            calls = [s.call for s in members if s.call is not None]
            if len(members) == 1:
                result += members
                continue
            defines = [n for s in members for n in s.defines]
            keep = not used.isdisjoint(defines)
            reads = dict.fromkeys(n for s in members for n in s.reads)
            writes = [n for s in members for n in s.writes]
            text = batching.together(calls, keep)
            result.append(Statement(defines if keep else (), tuple(reads), members[0].rank, text, writes))
        return result

    def _body(self) -> list[str]:
        output = self.module.graph.output_node()
        self.statements = statements = self._statements()
        (result,) = output.args
        results = result if isinstance(result, (tuple, list)) else (result,)
        self.results = tuple(results)
        last: dict[fx.Node, int] = {}
        for i, s in enumerate(statements):
            for node in (*s.defines, *s.reads):
                last[node] = i
        for node in output.all_input_nodes:
            last.pop(node, None)
        dead: dict[int, list[str]] = {}
        for node, i in last.items():
            dead.setdefault(i, []).append(self._name(node))
        lines = []
        for i, s in enumerate(statements):
            lines.append(s.text)
            if i in dead:
                lines.append(f"del {', '.join(dead[i])}")
        lines.append(f"return {self._literal(tuple(results))}")
        return lines

    def _text(self, boxed: bool) -> str:
        names = [self._name(p) for p in self.placeholders]
        lines = [f"def call({', '.join(names)}):"]
        if boxed:
            lines = ["def call(INPUTS):"]
            if names:
                lines.append(f"    ({', '.join(names)},) = INPUTS")
            lines.append("    INPUTS.clear()")
        return "\n".join([*lines, *("    " + b for b in self.body), ""])

    def _compile(self, boxed: bool) -> Callable[..., Any]:
        return self._made(self._text(boxed), "call")

    def _made(self, text: str, name: str) -> Callable[..., Any]:
        found = self._compiled.get(text)
        if found is None:
            _SERIAL[0] += 1
            filename = f"<fuser program {_SERIAL[0]}>"
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
            scope = dict(self.scope)
            exec(compile(text, filename, "exec"), scope)
            found = self._compiled[text] = scope[name]
        return found


def _function_of(target: Any, as_is: bool = False) -> Any:
    """The function called for a node's target: it accepts other strides than the traced ones, with few Python frames.

    `as_is` keeps it a view: it raises for strides that do not allow it.
    """
    target = target if as_is else _COPIES_IF_NEEDED.get(target, target)
    return _QUICK.get(target) or getattr(target, "_op", target)  # the bare builtin: one Python frame less


class Listing(Program):
    """The statements of an outer program as data, in execution order; nothing is written or compiled."""

    def __init__(self, module: fx.GraphModule, plan: Plan, functions: Sequence[tuple[str, Any]]) -> None:
        super().__init__(module, plan, functions)
        self._by_outputs = {g.outputs: (g, f) for g, (_, f) in zip(plan.groups, functions, strict=True)}

    def in_order(self) -> list[tuple[tuple[fx.Node, ...], Any]]:
        """For each statement the nodes it defines, and its callee: a node, or (a group's function, the inputs)."""
        found: list[tuple[tuple[fx.Node, ...], Any]] = []
        for s in self._statements():
            if s.grouped:
                plan, function = self._by_outputs[s.defines]
                found.append((s.defines, (function, plan.inputs)))
            elif is_ordered(s.defines[0]):
                raise Unsupported(f"{s.defines[0].name} has an effect whose order matters")
            else:
                found.append((s.defines, s.defines[0]))
        return found

    def several(self, defines: tuple[fx.Node, ...]) -> bool:
        """Whether the group that defines these nodes returns a tuple."""
        return isinstance(self._by_outputs[defines][0].graph.output_node().args[0], tuple)

    @staticmethod
    def target_of(node: fx.Node) -> Any:
        """The operator that a node calls, in a form that accepts other strides than the traced ones."""
        target: Any = node.target
        copies = target in _COPIES_IF_NEEDED and WRITTEN not in node.meta
        return torch.ops.aten.reshape.default if copies else target


def _apart(function: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A handle and the numbers bound before its arguments: calls with different numbers can be batched."""
    if isinstance(function, functools.partial) and all(isinstance(a, (int, float)) for a in function.args):
        return function.func, function.args
    return function, ()


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
