"""Scripts under autocast: TorchScript's own pass inserts the casts into the graph, which is then fused like any other.

TorchScript's interpreter runs the graph of that pass with autocast still on. A fused graph runs with autocast off, so
that kernels can be used. That is the same only if autocast changes no operator of the graph beyond the pass's casts;
any other script runs unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fuser.frontends.script_memory import every_node
from fuser.frontends.script_nodes import FENCES, Node
from fuser.lowering import registry

_C: Any = torch._C
_NEEDED = ("_jit_pass_autocast", "_DisableAutocast", "_dispatch_has_kernel_for_dispatch_key")
_DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
State = tuple[tuple[bool, torch.dtype], ...]

# Composites of other operators, none of which autocast changes.
_COMPOSITES = frozenset(
    "_autocast_to_full_precision _autocast_to_reduced_precision _fused_rms_norm adaptive_avg_pool1d "
    "adaptive_avg_pool2d adjoint atleast_1d atleast_2d atleast_3d avg_pool1d batch_norm broadcast_tensors "
    "broadcast_to chunk clip column_stack concat concatenate contiguous diag diff dropout dsplit dstack expand_as "
    "feature_dropout flatten fliplr flipud float hsplit hstack instance_norm isclose isfinite isreal item "
    "log_sigmoid log_softmax mH mT max max_pool1d max_pool2d meshgrid min moveaxis movedim narrow numpy_T one_hot "
    "pad positive ravel relu6 repeat_interleave reshape reshape_as row_stack selu size softmax split square squeeze "
    "std std_mean swapaxes swapdims take_along_dim tensor_split tile to type_as unbind unflatten var var_mean "
    "view_as vsplit vstack where zeros_like".split()
)
# Autocast casts their arguments to a common dtype, as they do themselves.
_PROMOTING = frozenset({"cat", "stack"})


def state() -> State | None:
    """This thread's autocast state; None if scripts run unchanged under it."""
    if any(not hasattr(_C, name) for name in _NEEDED):
        return None
    found = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)
    return found if any(enabled for enabled, _ in found) else None


def with_casts(inlined: Any) -> Any:
    """A copy of a graph with the casts of this thread's autocast."""
    graph = inlined.copy()
    _C._jit_pass_autocast(graph)
    if torch.is_autocast_enabled("cuda"):
        _cast_softmax(graph)
    return graph


def _cast_softmax(graph: Any) -> None:
    """Cast softmax to float32, as autocast does on a GPU: TorchScript's pass leaves that to autocast itself."""
    for node in every_node(graph):
        if node.kind() == "aten::softmax" and node.inputsSize() == 3 and node.inputsAt(2).type().kind() == "NoneType":
            with graph.insert_point_guard(node):
                flags = [graph.insertConstant(True), graph.insertConstant(False)]
                cast = graph.create("aten::_autocast_to_full_precision", [node.inputsAt(0), *flags], 1)
                graph.insertNode(cast)
            node.replaceInput(0, cast.output())


def asks(graph: Any) -> str | None:
    """The reason why a graph depends on autocast being on, which crashes TorchScript's pass; None if it does not."""
    kinds = ("aten::is_autocast_enabled", "aten::is_autocast_cpu_enabled")
    return next((f"{n.kind()} runs in the script" for n in every_node(graph) if n.kind() in kinds), None)


def why_not(graph: Any) -> str | None:
    """The reason why a graph with casts computes something else with autocast off; None if it does not."""
    keys = [key for device, key in _DEVICES.items() if torch.is_autocast_enabled(device)]
    changed: dict[str, bool] = {}  # by schema: whether the pass inserts its casts
    for node in every_node(graph):
        kind = node.kind()
        if kind in FENCES:
            return f"{kind} runs in the script"
        schema = node.schema()
        if not kind.startswith("aten::") or schema == "(no schema)":
            continue
        if _is_indifferent(schema, tuple(keys)) or _is_cast_here(node):
            continue
        if schema not in changed:
            changed[schema] = _is_cast(node)
        if not changed[schema]:
            return f"autocast may change {kind} beyond the casts that TorchScript writes"
    return None


def _is_cast_here(node: Node) -> bool:
    reads = [v for v in node.inputs() if "Tensor" in v.type().str()]
    return bool(reads) and all(v.node().kind().startswith("aten::_autocast_to_") for v in reads)


@functools.cache
def _is_indifferent(schema: str, keys: tuple[str, ...]) -> bool:
    """Whether autocast does not change an operator."""
    parsed = _C.parse_schema(schema)
    name = parsed.name.removeprefix("aten::")
    full = f"{parsed.name}.{parsed.overload_name}".rstrip(".")
    if not any("Tensor" in a.type.str() for a in (*parsed.arguments, *parsed.returns)) or name in _PROMOTING:
        return True
    try:
        if any(_C._dispatch_has_kernel_for_dispatch_key(full, key) for key in keys):
            return False
        composite = _C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    except RuntimeError:  # an operator of TorchScript's interpreter only, on lists and numbers
        return True
    if composite:
        return name in _COMPOSITES
    return not any("Tensor" in r.type.str() for r in parsed.returns) or registry.supports(f"aten.{name}") is None


def _is_cast(node: Node) -> bool:
    """Whether the pass casts the inputs of a node of unknown dtypes."""
    graph = _C.Graph()
    made: dict[Any, Any] = {}

    def taken(value: Any) -> Any:
        if value not in made:
            if value.node().kind() in ("prim::Constant", "prim::ListConstruct"):
                clone = graph.insertNode(graph.createClone(value.node(), taken))
                made[value] = clone.output()
            else:
                made[value] = graph.addInput()
                made[value].setType(value.type())
        return made[value]

    graph.insertNode(graph.createClone(node, taken))
    before = sum(1 for _ in graph.nodes())
    _C._jit_pass_autocast(graph)
    return sum(1 for _ in graph.nodes()) > before


def without_autocast(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function, with autocast off."""
    with _C._DisableAutocast():
        return function(*args, **kwargs)


__all__ = ["State", "state", "why_not", "with_casts", "without_autocast"]
