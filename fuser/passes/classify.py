"""Classifies a node of an ATen graph for grouping: fusible computation, free, or external with a reason.

A free node (a view, a tensor made from numbers alone) costs nothing inside a kernel. It is copied into each group that
reads it, and stays outside only for readers outside.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import fx

from fuser import compiler, config, examples, interface, refusals
from fuser.canonical import canonicalize
from fuser.errors import FuserError
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because, reason_of_call
from fuser.runtime.counting import COUNTS
from fuser.runtime.memory import Recent

aten = torch.ops.aten


# In the meta of a node that writes an input midway: readers of the input's old content run before it.
MARK = "writes_input"
# In the meta of a view of an input through which the graph writes: each call makes the view again, outside of groups.
WRITTEN = "written_view"
# In the meta of a node between library operators that is faster as its own kernel than fused with its producer.
APART = "apart"
# In the meta of a call of torch's own that a pass examined: why it is not fused.
WHY = "why_unfused"


class Kind(enum.Enum):
    """The role of a node in grouping."""

    INPUT = "input"  # placeholder, attribute
    FREE = "free"  # view or creation: copied to its readers
    COMPUTE = "compute"  # can be fused
    EXTERN = "extern"  # runs on ATen
    ITEM = "item"  # one result of a node with several
    OUTPUT = "output"


@dataclass(frozen=True)
class Verdict:
    """A node's kind, and the reason if it is external."""

    kind: Kind
    reason: str = ""


# Views whose schema does not declare them as such.
_UNSAFE_VIEWS = frozenset({aten._unsafe_view.default})
# Creation from numbers alone: recomputing it in each kernel is cheaper than storing it once.
_CREATION = frozenset({"aten.full", "aten.zeros", "aten.ones", "aten.arange", "aten.scalar_tensor", "prims.iota"})
# Operators that are lowered for some arguments only, so a lowering is tried; other refused calls split their group
# later.
_BY_ARGUMENTS = frozenset(
    "aten.index aten.index_put aten.index_add aten.index_reduce aten.put aten.scatter aten.scatter_add "
    "aten.scatter_reduce aten.masked_scatter aten.as_strided aten.bucketize aten.searchsorted aten.repeat_interleave "
    "aten._adaptive_avg_pool2d aten._adaptive_avg_pool3d aten.logspace".split()
)
# Calls that address elements by their offset in memory.
BY_PLACE = (aten.as_strided.default, aten.as_strided_scatter.default)
_SCATTERS = frozenset({aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.as_strided_scatter})
# Library calls, which are never lowered: own kernels would be slower.
_LIBRARY_OPS = (
    "aten.mm aten.addmm aten._addmm_activation aten.bmm aten.baddbmm aten.matmul aten.linear aten.mv aten.dot "
    "aten.addmv aten.convolution aten._convolution aten.conv1d aten.conv2d aten.conv3d "
    "aten._scaled_dot_product_flash_attention_for_cpu mkldnn._linear_pointwise mkldnn._convolution_pointwise"
)
LIBRARY = dict.fromkeys(_LIBRARY_OPS.split(), because("library", "a library's kernel does this better"))
# Higher-order operators whose graphs are compiled like any other (`frontends/bodies.py`).
ON_GRAPHS = frozenset("cond while_loop while_loop_stack_output scan map_impl invoke_subgraph hints_wrapper".split())
_BARE_DTYPES = frozenset(
    getattr(torch, n)
    for n in (
        *("float64 float32 float16 bfloat16 int8 int16 int32 int64 uint8 bool").split(),
        *("uint16 uint32 uint64 float8_e4m3fn float8_e5m2").split(),
    )
)


def op_name(target: Any) -> str:
    """`aten.add` for the overload `aten.add.Tensor`; a readable name for any other callable."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))


def qualified_name(target: torch._ops.OpOverload) -> str:
    """`aten::add.Tensor`: the name under which the dispatcher knows an overload."""
    return str(target.name())  # type: ignore[no-untyped-call]


# Namespaces of operators that are not user-defined.
BUILTIN = ("aten", "prims", "mkldnn", "onednn", "fuser", "c10d", "_c10d_functional")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's recorded value: none, one or several."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else []


def draws(target: Any) -> bool:
    """Whether each call of `target` draws new random numbers."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def may_draw(target: Any) -> bool:
    """Whether a call of `target` may draw random numbers; a higher-order operator may."""
    return draws(target) or isinstance(target, torch._ops.HigherOrderOperator)


def is_view(target: Any) -> bool:
    """Whether every call of `target` returns a view of its first argument and does nothing else."""
    if target in _UNSAFE_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    infos = [r.alias_info for r in target._schema.returns]
    return bool(infos) and all(i is not None and not i.is_write for i in infos)


def base_of(value: Any) -> Any:
    """The tensor of which a node is a view, through chains of views and lists of them, or the node itself."""
    while isinstance(value, fx.Node) and value.args and isinstance(value.args[0], fx.Node) and views_first(value):
        value = value.args[0]
    return value


def views_first(node: fx.Node) -> bool:
    """Whether a node is a view, or a list of views, of its first argument, or a piece taken from such a list."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    return isinstance(made, fx.Node) and is_view(made.target)


def is_mutable(node: fx.Node) -> bool:
    """Whether a node's call writes to an argument."""
    return MARK in node.meta or isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_read(node: fx.Node, by: Callable[[fx.Node], bool]) -> bool:
    """Whether `by` holds for a reader of a node or of a view of it."""
    found = [node]
    for n in found:
        if any(map(by, n.users)):
            return True
        found += [u for u in n.users if views_first(u) and u not in found]
    return False


def after_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a joint graph that depend on gradients of results, and so run in the backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def is_write(node: fx.Node) -> bool:
    """Whether a node is a copy into an input."""
    target = node.args[0] if node.target is aten.copy_.default else None
    return isinstance(target, fx.Node) and target.op == "placeholder"


def is_write_back(node: fx.Node) -> bool:
    """Whether a node is a copy into an input, and its own result is unused."""
    return not node.users and is_write(node)


def is_ordered(node: fx.Node) -> bool:
    """Whether a node is a call of an operator through `with_effects`."""
    hop = isinstance(node.target, torch._ops.HigherOrderOperator) and str(node.target) == "with_effects"
    return hop and isinstance(node.args[1], torch._ops.OpOverload)


def runs_graphs(node: fx.Node) -> str:
    """The name of the higher-order operator that a node calls, if its graphs are compiled; "" for other nodes."""
    target: Any = node.target
    if str(target) == "auto_functionalized_v2" and node.args:
        target = node.args[0]  # it calls an operator that writes arguments
    return str(target) if isinstance(target, torch._ops.HigherOrderOperator) and str(target) in ON_GRAPHS else ""


def all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of the graphs that its higher-order operators run."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def graphs_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The `get_attr` nodes of the graphs that are compiled for a higher-order operator; empty for other nodes."""
    if not runs_graphs(node):
        return ()
    module = node.graph.owning_module
    given = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node) and a.op == "get_attr"]
    return tuple(a for a in given if isinstance(getattr(module, str(a.target), None), fx.GraphModule))


def _tensor_reason(t: torch.Tensor) -> str | None:
    if t.layout is not torch.strided:
        return because("layout", f"a tensor has layout {t.layout}, only strided tensors are fused")
    if t.dtype not in _BARE_DTYPES:
        return because("dtype", f"a tensor has dtype {t.dtype}, which no kernel takes")
    return None


def _device_reason(tensors: list[torch.Tensor]) -> str | None:
    """Why tensors' devices rule out a kernel. A 0-dim CPU tensor beside another device's also stays on ATen."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        return because("devices", f"its tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
    for device in devices:
        if not interface.has_fusion_backend(device.type):
            return because("backend", f"no fusion backend for device {device.type!r} is registered")
    return None


def schema_reason(target: torch._ops.OpOverload) -> str | None:
    """Why no call of `target` is fused, by its schema and tags; None if some may be."""
    library = LIBRARY.get(op_name(target))
    if library is not None:
        return library
    if target._schema.is_mutable:
        return because("writes", "it writes one of its arguments")
    tags = target.tags
    if draws(target):
        return because("random", "it draws random numbers")
    by_data = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    if by_data and (op_name(target) not in _BY_ARGUMENTS or _is_refused(str(target))):
        return because("data_size", "its result's size or value depends on data")
    return None


def _is_refused(name: str) -> bool:
    from fuser.lowering.registry import REFUSED  # rarely needed

    return name in REFUSED


def _argument_reason(node: fx.Node) -> str | None:
    """Why a call cannot be lowered with its arguments, as far as their sizes are known; None if it can."""
    if op_name(node.target) not in _BY_ARGUMENTS and node.target is not aten.view.dtype:
        return None
    try:
        settings = config.key(), torch.get_default_dtype()
        key = settings, str(node.target), repr(fx.map_arg((node.args, node.kwargs), _like))
        found = _tried.get(key, "")
        if found == "":
            found = _tried[key] = _kept_reason(repr(key), node)
        return found
    except FuserError:  # a size that is not known before the call
        return None


_tried: MutableMapping[Any, str | None] = Recent()


def _like(node: fx.Node) -> Any:
    """The properties of an argument that a lowering may depend on."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return examples.concrete(value)
    return value.dtype, value.device.type, *(tuple(map(examples.concrete, n)) for n in (value.shape, value.stride()))


def _kept_reason(question: str, node: fx.Node) -> str | None:
    """The result of `_try_lowering`, computed here or stored by an earlier process."""
    keeps = not config.check_ir and " at 0x" not in question
    kept = refusals.recall(question) if keeps else None
    if kept is None:
        kept = _try_lowering(node) or ""
        if keeps:
            refusals.remember(question, kept)
    return kept or None


def _try_lowering(node: fx.Node) -> str | None:
    from fuser.lowering.survey import survey  # needed for few operators, whose answers are kept

    graph = fx.Graph()
    env = {a: graph.placeholder(a.name) for a in node.all_input_nodes}
    for outer, inner in env.items():
        inner.meta["val"] = outer.meta.get("val")
    call, value = graph.node_copy(node, env.__getitem__), node.meta["val"]
    several = isinstance(value, (tuple, list))
    items = [i for i, v in enumerate(value) if isinstance(v, torch.Tensor)] if several else []
    graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in items) if several else call)
    like = examples.all_concrete([a.meta.get("val") for a in node.all_input_nodes])
    COUNTS.add("lowerings")
    found = survey(canonicalize(graph, functional=True).graph, like, config.numerics)
    return next(iter(found.refused.values()), None)


def _extern_reason(node: fx.Node) -> str | None:
    """Why a call of an ATen overload cannot be part of a kernel; None if it can."""
    target = node.target
    if MARK in node.meta:
        return because("writes", "it writes one of its arguments")
    if not isinstance(target, torch._ops.OpOverload):
        if graphs_of(node):
            return because("bodies", f"{runs_graphs(node)} runs graphs of its own, each of which is compiled")
        known: str | None = reason_of_call(target) or node.meta.get(WHY)
        return known or because("python", f"{op_name(target)} is not an ATen operator")
    reason = schema_reason(target)
    if reason is not None:
        return reason
    results = tensors_of(node.meta.get("val"))
    if not results:
        return because("no_tensor", "its result is not a tensor")
    args = [t for a in node.all_input_nodes for t in tensors_of(a.meta.get("val"))]
    for t in (*args, *results):
        reason = _tensor_reason(t)
        if reason is not None:
            return reason
    copied = args[:1] if is_scatter(target) else ()
    if _is_read_by_place(node) and any(map(has_gaps, (*copied, *results))):
        return because("layout", "as_strided reads its memory, which has gaps that a kernel's results have not")
    known = _device_reason([*args, *results]) or compiler.why_not_on(op_name(target), results[0].device.type)
    return known or _argument_reason(node)


def has_gaps(t: torch.Tensor) -> bool:
    """Whether a tensor's storage is larger than its elements, as of a slice."""
    memory, own = t.untyped_storage().nbytes(), t.numel() * t.dtype.itemsize
    return type(memory) is not int or type(own) is not int or memory != own  # a symbolic size is not known


def is_scatter(target: Any) -> bool:
    """Whether a call's result is its first argument with another part, with the same offset, strides and gaps."""
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket in _SCATTERS


def _is_read_by_place(node: fx.Node) -> bool:
    """Whether some call addresses the node's elements by their offset in memory, directly or through views."""
    return any(_viewed(n) is node for t in BY_PLACE for n in node.graph.find_nodes(op="call_function", target=t))


def _viewed(reader: fx.Node) -> Any:
    """The tensor of which a call's first argument is a view."""
    source: Any = reader.args[0]
    while source.op == "call_function" and views_first(source):
        source = source.args[0]
    return source


def _is_creation(node: fx.Node) -> bool:
    return op_name(node.target) in _CREATION and not any(tensors_of(a.meta.get("val")) for a in node.all_input_nodes)


def classify(node: fx.Node) -> Verdict:
    """The verdict on `node`, with a reason if it is external."""
    if node.op in ("placeholder", "get_attr"):
        return Verdict(Kind.INPUT)
    if node.op == "output":
        return Verdict(Kind.OUTPUT)
    if node.op != "call_function":
        return Verdict(Kind.EXTERN, because("python", f"{node.op} {node.target} is not a call of an ATen operator"))
    if node.target is operator.getitem:
        return Verdict(Kind.ITEM)
    reason = _extern_reason(node)
    if reason is not None:
        return Verdict(Kind.EXTERN, reason)
    several = isinstance(node.meta.get("val"), (tuple, list))
    if (is_view(node.target) and not several) or _is_creation(node):
        return Verdict(Kind.FREE)
    if is_view(node.target):
        return Verdict(Kind.EXTERN, because("several_views", "it returns several views at once"))
    return Verdict(Kind.COMPUTE)


def is_number(node: fx.Node) -> bool:
    """Whether the node computes sizes or other Python numbers rather than tensors."""
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_size_arithmetic(node: fx.Node) -> bool:
    """Whether the node computes a number from sizes, not from a tensor's data."""
    data = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.data_dependent_output in node.target.tags
    return is_number(node) and not data
