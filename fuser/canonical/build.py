"""Translates an FX graph to its canonical form, and to the rows that the fallback is built from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
import torch.fx

from fuser.canonical.builder import Builder, renumber
from fuser.canonical.calls import named_operator, translate
from fuser.canonical.graph import (
    ROUNDED,
    CanonicalGraph,
    CanonicalNode,
    Opaque,
    Ref,
    is_constant,
    map_refs,
    refs_of,
)  # fmt: skip
from fuser.canonical.lifting import as_literal, map_literals, plain
from fuser.canonical.modules import graph_of
from fuser.canonical.mutation import writes_statistics
from fuser.canonical.schemas import Kind
from fuser.canonical.structure import (
    Apart,
    Flattened,
    Results,
    Unflattened,
    exported_forms,
    form_of,
    is_flat,
    is_tuple_of_leaves,
    takes_of,
)  # fmt: skip
from fuser.errors import GraphError
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because

REQUIRED = object()  # the default of an input that has none


@dataclass(frozen=True, slots=True)
class Row:
    """One call as it was written, for the fallback. `args` and `kwargs` refer to other rows by `Ref`."""

    index: int
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered graph: its canonical form, and how it was written.

    `bound` are its first inputs: the tensors that the graph itself holds (parameters, buffers), then lifted numbers
    (see `lifting`), each with a row of its own. `inputs` and `defaults` are the placeholders, in order. `opaque` are
    Python objects that are compared by identity. `blocked` says, if not empty, why no kernel can run this graph.
    `writes`: it writes into inputs.

    `origins`: for each canonical node the row that it came from. `results`: for each row the canonical node of its
    value, or -1; `kinds`: what is known of that value. `impure`: the rows whose order matters, because they write, draw
    random numbers, or run Python. `writing`: those that may write.

    `container` builds the graph's return value from the tuple of its results; None if that is a tuple or a single
    value. `takes` converts an exported program's arguments to inputs; None if the arguments are the inputs.
    """

    graph: CanonicalGraph
    bound: tuple[Any, ...]
    inputs: tuple[str, ...]
    defaults: tuple[Any, ...]
    opaque: tuple[Any, ...]
    blocked: tuple[str, ...]
    pointwise: frozenset[int]
    rows: tuple[Row, ...]
    output: Any
    writes: bool = False
    origins: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    kinds: tuple[Kind, ...] = ()
    impure: frozenset[int] = frozenset()
    writing: frozenset[int] = frozenset()
    container: Callable[[Any], Any] | None = None
    takes: Flattened | None = None


@dataclass
class _State:
    """The state of one pass over a graph's nodes. `env`: each row's canonical value; `raw`: each node's row number."""

    builder: Builder
    module: torch.nn.Module | None
    env: list[Any] = field(default_factory=list)
    raw: dict[torch.fx.Node, int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    placeholders: list[tuple[int, str, Any]] = field(default_factory=list)
    bound: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    impure_rows: set[int] = field(default_factory=set)
    writing_rows: set[int] = field(default_factory=set)
    first: list[int] = field(default_factory=list)  # for each row the number of canonical nodes before it
    output: Any = None
    container: Callable[[Any], Any] | None = None
    takes: Flattened | None = None
    has_output: bool = False


def canonicalize(
    graph: torch.fx.Graph | torch.fx.GraphModule, functional: bool = False, in_place: bool = False,
    lifting: bool = False,
) -> Registered:  # fmt: skip
    """The canonical form of `graph`, in time linear in its nodes. GraphError describes a malformed graph.

    With `lifting`, constants that may be arguments become inputs.
    """
    module = graph if isinstance(graph, torch.fx.GraphModule) else getattr(graph, "owning_module", None)
    fx = graph.graph if isinstance(graph, torch.fx.GraphModule) else graph
    if not isinstance(fx, torch.fx.Graph):
        raise GraphError(
            f"a graph was expected, a torch.fx.Graph or GraphModule, and not {type(graph).__name__}: {_cure(graph)}"
        )
    state = _State(Builder(lifting), module)
    for node in fx.nodes:
        _visit(state, node)
    if not state.rows:
        raise GraphError("the graph is empty: expected placeholders, calls and an output")
    if not state.has_output:
        raise GraphError("the graph has no output node: end it with graph.output(value)")
    if not any(True for _ in refs_of(state.output)):
        raise GraphError("the graph returns nothing: expected an output of at least one of its nodes")
    _take_exported_forms(state, fx)
    return _finish(state, functional, in_place)


# By class name: how to get a graph from an object that is not one.
_CURES = {
    "ScriptFunction": "fuser.fuse_script(it) fuses it, fuser.frontends.torchscript.to_fx(it) makes a graph of it",
    "ScriptModule": "fuser.fuse_script(it) fuses it, fuser.frontends.torchscript.to_fx(it) makes a graph of it",
    "ExportedProgram": "its module() is one, and fuser.aot.compile(it, path) writes it with its kernels to a file",
    "OptimizedModule": "torch.compile made it: torch.compile(model, backend='fuser') fuses a model",
    "Node": "expected the whole graph, which is its .graph",
    "int": "keys go to run_fusion and fusion_handle",
}


def _cure(given: Any) -> str:
    names = (c.__name__ for c in type(given).__mro__)
    return next((_CURES[n] for n in names if n in _CURES), "torch.fx.symbolic_trace makes one of a module or function")


def _visit(state: _State, node: torch.fx.Node) -> None:
    if node.op == "call_module" and _inline(state, node):
        return
    apart = _results_apart(state, node) if node.op == "output" else {}
    index = len(state.rows)
    args = _raw(state, node, node.args)
    kwargs = {k: _raw(state, node, v) for k, v in node.kwargs.items()}
    state.raw[node] = index
    target = _fetch(state, node) if node.op == "call_module" else _target(node)
    state.rows.append(Row(index, node.op, target, args, kwargs))
    state.first.append(len(state.builder.nodes))
    if node.op == "output":
        if state.has_output:
            raise GraphError(f"the graph has a second output, {node.name!r}: expected one, with a tuple of results")
        state.output, state.has_output = args[0] if args else None, True
        _take_form(state, node, apart)
        state.env.append(None)
    else:
        state.env.append(_value(state, node, target, args, kwargs))


def _inline(state: _State, node: torch.fx.Node) -> bool:
    """Visit the calls that a module of torch makes, instead of the call of the module. False if they are not known."""
    module = _fetch(state, node)
    graph = graph_of(module)
    arguments = [a for a in node.args if isinstance(a, torch.fx.Node)]
    if graph is None or node.kwargs or len(arguments) != len(node.args):
        return False
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    result = graph.output_node().args[0]
    if len(inputs) != len(arguments) or not isinstance(result, torch.fx.Node):
        return False
    for given, inner in zip(arguments, inputs):
        state.raw[inner] = _raw(state, node, given).index
    outer, state.module = state.module, module
    for inner in graph.nodes:
        if inner.op not in ("placeholder", "output"):
            _visit(state, inner)
    state.module = outer
    state.raw[node] = state.raw[result]
    return True


def _raw(state: _State, user: torch.fx.Node, value: Any) -> Any:
    """`value` with nodes replaced by references to their rows; every node must have been visited."""
    if isinstance(value, torch.fx.Node):
        index = state.raw.get(value)
        if index is None:
            where = (
                "is defined after it: the graph is cyclic or out of order, and expected was every node after those it "
                "uses"
                if value.graph is user.graph
                else "belongs to another graph: expected nodes of this one"
            )
            raise GraphError(f"node {user.name!r} uses {value.name!r}, which {where} (Graph.lint() finds such nodes)")
        return Ref(index)
    if isinstance(value, (tuple, list)):
        items = [_raw(state, user, v) for v in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {k: _raw(state, user, v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_raw(state, user, v) for v in (value.start, value.stop, value.step)))
    return as_literal(value) if state.builder.lifting and user.op.startswith("call_") else value


def _target(node: torch.fx.Node) -> Any:
    if node.op != "call_function" or not isinstance(node.target, str):
        return node.target
    try:
        return named_operator(node.target)
    except GraphError as e:
        raise GraphError(f"node {node.name!r}: {e}") from None


def _value(state: _State, node: torch.fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    b = state.builder
    if node.op == "placeholder":
        default = args[0] if args else REQUIRED
        ref = b.add("input", (), (), _input_kind(node))
        state.placeholders.append((ref.index, str(node.target), default))
        return ref
    if node.op == "get_attr":
        return _attribute(state, node)
    before, written = len(b.nodes), _writes_so_far(b)
    if node.op == "call_module":
        here = tuple(_here(state, a) for a in args), {k: _here(state, v) for k, v in kwargs.items()}
        value: Any = b.opaque_call(f"call.module.{type(target).__name__}", target, *here)
    elif node.op in ("call_function", "call_method"):
        here = tuple(_here(state, a) for a in args), {k: _here(state, v) for k, v in kwargs.items()}
        try:
            value = translate(b, node.op, target, *here)
        except GraphError as e:
            raise GraphError(f"node {node.name!r}: {e}") from None
    else:
        raise GraphError(f"node {node.name!r} is of the unknown kind {node.op!r}: expected one of torch.fx's")
    if node.meta.get(ROUNDED):
        b.round_from(before)
    if any(i in b.impure for i in range(before, len(b.nodes))):
        state.impure_rows.add(len(state.rows) - 1)
    hidden = writes_statistics(node.op, node.target, node.args, node.kwargs)
    if hidden:
        state.impure_rows.add(len(state.rows) - 1)
    if hidden or _writes_so_far(b) > written:
        state.writing_rows.add(len(state.rows) - 1)
    return value


def _writes_so_far(b: Builder) -> int:
    """Number of calls so far that write, or of which nothing is known."""
    return len(b.mutations) + len(b.writes) + len(b.unknown)


def _here(state: _State, value: Any) -> Any:
    """A raw value with references to rows replaced by canonical values. Lists stay lists, as translations expect."""
    return map_refs(value, lambda r: state.env[r.index])


def _input_kind(node: torch.fx.Node) -> Kind:
    example = node.meta.get("val", node.meta.get("example_value"))
    numbers = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return Kind.NUMBER if isinstance(example, numbers) or node.type in (int, float, bool) else Kind.INPUT


def _fetch(state: _State, node: torch.fx.Node) -> Any:
    found: Any = state.module
    if found is None:
        raise GraphError(
            f"node {node.name!r} reads the attribute {node.target!r}, but the graph has no module that owns it: "
            "register a torch.fx.GraphModule"
        )
    for part in str(node.target).split("."):
        if not hasattr(found, part):
            raise GraphError(f"node {node.name!r} reads {node.target!r}, which the graph's module does not have")
        found = getattr(found, part)
    return found


def _attribute(state: _State, node: torch.fx.Node) -> Any:
    """A tensor becomes a new input, bound at registration; a plain value a constant; any other object is opaque."""
    value = _fetch(state, node)
    b = state.builder
    if isinstance(value, torch.Tensor):
        known = state.bound.get(id(value))
        if known is not None:
            return Ref(known[0])
        ref = b.add("input", (), (), Kind.TENSOR)
        state.bound[id(value)] = (ref.index, value)
        return ref
    if is_constant(value):
        return tuple(value) if isinstance(value, list) else value
    return b.add("attribute", (b.object(value),), (), Kind.ANY)


# -- the end of the pass -----------------------------------------------------------------------------------------------
def _finish(state: _State, functional: bool, in_place: bool) -> Registered:
    b = state.builder
    output = _tuples(_here(state, state.output))
    if not is_constant(output):
        output = b.spell(output)
    inputs = [i for i, _ in (*state.bound.values(), *b.lifted)] + [i for i, _, _ in state.placeholders]
    live = _live(b.nodes, set(refs_of(output)) | b.impure)
    order = [*inputs, *(i for i in sorted(live) if b.nodes[i].op != "input")]
    nodes, output = renumber(b.nodes, order, output)
    new = {old: i for i, old in enumerate(order)}
    _spell_defaults(b, state, nodes)
    rows = _live_rows(state)
    ends = [*state.first[1:], len(b.nodes)]
    made_by = [row for row, (a, z) in enumerate(zip(state.first, ends)) for _ in range(a, z)]
    for n, (index, _) in enumerate(b.lifted):
        made_by[index] = len(state.rows) + n
    values = [*state.env, *(Ref(index) for index, _ in b.lifted)]  # of all rows
    graph = CanonicalGraph(tuple(nodes), len(inputs), output, functional)
    return Registered(
        graph=graph,
        bound=(*(t for _, t in state.bound.values()), *(plain(value) for _, value in b.lifted)),
        inputs=tuple(name for _, name, _ in state.placeholders),
        defaults=tuple(default for _, _, default in state.placeholders),
        opaque=tuple(b.opaque),
        blocked=_reasons(b, graph, in_place),
        pointwise=frozenset(new[i] for i in b.pointwise if i in new),
        rows=rows,
        output=_tuples(state.output),
        writes=bool(b.writes),
        origins=tuple(made_by[old] for old in order),
        results=tuple(new.get(v.index, -1) if isinstance(v, Ref) else -1 for v in values),
        kinds=tuple(map(b.kind, values)),
        impure=frozenset(state.impure_rows),
        writing=frozenset(state.writing_rows),
        container=state.container,
        takes=state.takes,
    )


def _spell_defaults(b: Builder, state: _State, nodes: list[CanonicalNode]) -> None:
    """Add default values to the input nodes: they are part of what the graph computes."""
    first = len(state.bound) + len(b.lifted)
    for i, (_, _, default) in enumerate(state.placeholders):
        if default is not REQUIRED:
            nodes[first + i] = CanonicalNode(first + i, "input", (), (("default", b.spell(default)),))


def _results_apart(state: _State, output: torch.fx.Node) -> Apart:
    """For returned calls with several tensors: the class of the result, and new nodes whose rows read its items."""
    made: Apart = {}
    for node in output.all_input_nodes:
        row = state.raw.get(node, 0)
        value = state.env[row]
        if not isinstance(value, Ref) or value.index not in state.builder.results:
            continue
        items = []
        for number in range(state.builder.results[value.index]):
            item = torch.fx.Graph().call_function(operator.getitem)
            args = (Ref(row), number)
            state.raw[item] = len(state.rows)
            state.rows.append(Row(len(state.rows), "call_function", operator.getitem, args, {}))
            state.first.append(len(state.builder.nodes))
            state.env.append(_value(state, item, operator.getitem, args, {}))
            items.append(item)
        made[node] = _class_of_results(state, row, value), items
    return made


def _class_of_results(state: _State, row: int, value: Ref) -> type:
    """The class of a call's several results: torch's functions and methods have named ones; operators return tuples."""
    if isinstance(state.rows[row].target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return tuple
    name = state.builder.nodes[value.index].op.split(".")[1]
    found = getattr(torch.return_types, name, tuple)
    return found if isinstance(found, type) else tuple


def _take_form(state: _State, node: torch.fx.Node, apart: Apart) -> None:
    """Results in nested containers, or beside constants, become a tuple, and a form that rebuilds the containers."""
    numbers: dict[torch.fx.Node, int] = {}
    form = form_of(node.args[0], numbers, apart) if node.args else None
    if form is not None and apart:
        state.output = tuple(Ref(state.raw[n]) for n in numbers)
        plain = form[1] is tuple and is_flat(form) and len(form[2]) == len(numbers)
        state.container = None if plain else Results(form)
    elif form is None or not numbers or is_flat(form):
        state.container = _container(node.args[0]) if node.args else None
    else:
        state.output = tuple(Ref(state.raw[n]) for n in numbers)
        state.container = Results(form)


def _take_exported_forms(state: _State, graph: torch.fx.Graph) -> None:
    """For an exported program, whose graph has flat inputs and results: keep the forms of its arguments and results."""
    forms = exported_forms(graph)
    if forms is None:
        return
    state.takes = takes_of(forms[0])
    single = isinstance(state.output, tuple) and len(state.output) == 1 and state.container is None
    if forms[1].is_leaf() and single:
        state.output = state.output[0]
    elif not is_tuple_of_leaves(forms[1]) or state.container is not None:
        state.container = Unflattened(forms[1], state.container)


def _container(output: Any) -> Callable[[Any], Any] | None:
    if isinstance(output, list):
        return list
    make: Callable[[Any], Any] | None = getattr(type(output), "_make", None) if isinstance(output, tuple) else None
    return make


def _tuples(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_tuples(v) for v in value)
    return {k: _tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


def _live(nodes: Sequence[CanonicalNode], roots: set[int]) -> set[int]:
    live: set[int] = set()
    for node in reversed(nodes):
        if node.index in roots or node.index in live:
            live.add(node.index)
            live.update(node.refs())
    return live


def _live_rows(state: _State) -> tuple[Row, ...]:
    live = set(refs_of(state.output)) | state.impure_rows
    for row in reversed(state.rows):
        if row.index in live:
            live.update(refs_of(row.args))
            live.update(refs_of(row.kwargs))
    kept = []
    for row in state.rows:
        if row.op == "get_attr" and row.index in live:
            row = Row(row.index, row.op, _bound_value(state, row), (), {})
        if row.op == "placeholder" or (row.index in live and row.op != "output"):
            kept.append(row)
    if not state.builder.lifting:
        return tuple(kept)
    told = (Row(r.index, r.op, r.target, _told(state, r.args), _told(state, r.kwargs)) for r in kept)
    return (*_lifted_rows(state), *told)


def _lifted_rows(state: _State) -> list[Row]:
    """A row for each lifted number, which reads it like a bound tensor."""
    first, n = len(state.rows), len(state.bound)
    return [Row(first + i, "get_attr", Ref(n + i), (), {}) for i in range(len(state.builder.lifted))]


def _told(state: _State, value: Any) -> Any:
    """`value` with each lifted literal replaced by a reference to its row, and other literals by plain numbers."""
    lifted = [literal for _, literal in state.builder.lifted]

    def told(literal: Any) -> Any:
        found = next((n for n, known in enumerate(lifted) if known is literal), None)
        return plain(literal) if found is None else Ref(len(state.rows) + found)

    return map_literals(value, told)


def _bound_value(state: _State, row: Row) -> Any:
    """A `Ref` with the number of the bound tensor, or the constant itself."""
    value = state.env[row.index]
    if isinstance(value, Ref):
        for n, (index, _) in enumerate(state.bound.values()):
            if index == value.index:
                return Ref(n)
        held = state.builder.nodes[value.index].args[0]
        return state.builder.opaque[held.index] if isinstance(held, Opaque) else held
    return value


def _refusals(b: Builder, in_place: bool = False) -> tuple[str, ...]:
    written = b.mutations if in_place else [*b.mutations, *b.writes]
    out = [because("writes", f"{op} writes into a tensor") for op in dict.fromkeys(written)]
    return (*out, *(because("python", f"{op} is not an operator that can be fused") for op in dict.fromkeys(b.unknown)))


def _reasons(b: Builder, graph: CanonicalGraph, in_place: bool) -> tuple[str, ...]:
    out = list(_refusals(b, in_place))
    if len(graph.nodes) == graph.n_inputs:
        out.append(because("no_tensor", "the graph has no operations"))
    for i, value in enumerate(graph.outputs):
        if not isinstance(value, Ref):
            out.append(because("no_tensor", f"output {i} is not a tensor"))
    return tuple(out)


# -- a single node -----------------------------------------------------------------------------------------------------
def operators_of(node: torch.fx.Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the canonical operators of a call, the reasons why it cannot be fused), independent of the rest of its graph."""
    state = _State(Builder(), None)
    for argument in node.all_input_nodes:
        state.raw[argument] = len(state.env)
        state.env.append(state.builder.add("input", (), (), _kind_of(argument)))
    first = len(state.builder.nodes)
    args = tuple(_here(state, _raw(state, node, a)) for a in node.args)
    kwargs = {k: _here(state, _raw(state, node, v)) for k, v in node.kwargs.items()}
    translate(state.builder, node.op, _target(node), args, kwargs)
    b = state.builder
    return tuple(n.op for n in b.nodes[first:]), _refusals(b)


_MULTIPLE = (tuple, list)


def _kind_of(node: torch.fx.Node) -> Kind:
    """What is known of an argument's value: from its example if it has one, else from its own call."""
    example = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(example, torch.Tensor):
        return Kind.TENSOR
    if isinstance(example, _MULTIPLE):
        return Kind.TENSORS if all(isinstance(e, torch.Tensor) for e in example) else Kind.SIZES
    if node.op not in ("call_function", "call_method"):
        return _input_kind(node)
    b = Builder()
    unknown = [b.add("input", (), (), _input_kind(a)) for a in node.all_input_nodes]
    known = dict(zip(node.all_input_nodes, unknown))
    substitute: Any = known.__getitem__
    arguments: Any = torch.fx.node.map_arg((node.args, node.kwargs), substitute)
    args, kwargs = arguments
    try:
        return b.kind(translate(b, node.op, _target(node), args, kwargs))
    except GraphError:
        return Kind.ANY
