"""Lowers a canonical graph for example inputs to buffers with loops, and records the class of inputs that they serve.

Eager's shape functions run beside the lowering, on meta tensors like the examples. They give each result's dtype and
strides, and eager's errors. The symbolic sizes come from the lowerings; the two must agree.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import field
from typing import Any

import torch

from fuser import targets
from fuser.canonical.aliases import overloads_named
from fuser.canonical.graph import CanonicalGraph, CanonicalNode, Ref, map_refs, refs_of
from fuser.errors import FuserError, LoweringError, Unsupported
from fuser.ir.loop_body import loop_variables
from fuser.ir.nodes import Buffer, StorageBox, TensorBox, strides_of
from fuser.ir.ranges import recombined, simplify_divmod
from fuser.ir.sizes import ZERO, Expr, Sym, product, symbol
from fuser.kernel_spec import memory_order
from fuser.lazy_dataclasses import dataclass
from fuser.lowering import host, unit_dims
from fuser.lowering.context import LoweringContext, Number, Scalar
from fuser.lowering.corrections import PartsCorrected, corrected, is_composite, is_corrected
from fuser.lowering.decisive import reads_elements, rounded_nodes
from fuser.lowering.inputs import NumberInput, TensorInput, new_input
from fuser.lowering.known_shapes import AUTOCASTS, known_meta
from fuser.lowering.norms import rereads
from fuser.lowering.refused_numbers import check_numbers
from fuser.lowering.registry import find, supports
from fuser.lowering.scans import SCANS
from fuser.lowering.shapes import dense_strides, is_row_major, row_major
from fuser.lowering.without_dynamo import without_dynamo
from fuser.reasons import because


@dataclass
class Lowered:
    """The result of lowering: the context with its buffers, the inputs, and where each output is stored."""

    ctx: LoweringContext
    inputs: list[TensorInput | NumberInput]
    outputs: list[tuple[str, Any]]  # ("buffer", name) or ("input", argument number)


def lower_graph(
    graph: CanonicalGraph, examples: Sequence[Any], numerics: str = "fast", device_type: str | None = None
) -> Lowered:
    """Lower `graph` for inputs like `examples` (tensors, fake tensors or numbers). Raises Unsupported.

    `device_type` names the device if the examples are meta tensors.
    """
    state = begin(graph, examples, numerics, device_type)
    with torch._C.DisableTorchFunction():  # torch's default device must not affect constants made here
        for node in graph.calls:
            state.add(node, *lower_node(state, node))
    state.ctx.numerics = "eager" if _rounds(graph, state.rounded, state.metas) else numerics
    outputs = place_outputs(state)
    if unit_dims.may_decide(graph, state.metas):
        for number, record in enumerate(state.inputs):
            if isinstance(record, TensorInput):
                state.inputs[number] = unit_dims.keep(state.ctx, number, record, state.metas[number])
    return Lowered(state.ctx, state.inputs, outputs)


@dataclass
class State:
    """A graph during lowering: the values of the nodes so far, and for each its meta tensor, number or tuple."""

    graph: CanonicalGraph
    ctx: LoweringContext
    inputs: list[TensorInput | NumberInput]
    values: list[Any]
    metas: list[Any]
    readers: Counter[int]
    read: Counter[int]  # with repeats: a node that reads a value twice may not write it
    scanned: set[int]
    normed: set[int]
    rounded: Collection[int]
    numerics: str

    def add(self, node: CanonicalNode, value: Any, meta: Any) -> None:
        """Append the value and meta of the next node."""
        _claim(self.ctx, value, self.read[node.index])
        self.values.append(value)
        self.metas.append(meta)


def begin(
    graph: CanonicalGraph,
    examples: Sequence[Any],
    numerics: str,
    device_type: str | None = None,
    refused: Callable[[Any], tuple[Any, Any]] | None = None,
) -> State:
    """The state in which only the inputs have values. `refused(example)` is value and meta of an unsupported input.

    Raises Unsupported for such an input if there is no `refused`; LoweringError for a wrong number of inputs.
    """
    if len(examples) != graph.n_inputs:
        raise LoweringError(f"please report this: a graph of {graph.n_inputs} inputs is lowered for {len(examples)}")
    found = next((e.device.type for e in examples if isinstance(e, torch.Tensor)), targets.HOST)
    ctx = LoweringContext(numerics, targets.of(device_type or found))
    inputs: list[TensorInput | NumberInput] = []
    values, metas = [], []
    for number, example in enumerate(examples):
        try:
            record, value, meta = new_input(ctx, number, example)
            inputs.append(record)
        except Unsupported:
            if refused is None:
                raise
            value, meta = refused(example)
        values.append(value)
        metas.append(meta)
    readers = Counter(i for node in graph.calls for i in set(node.refs()))
    read = Counter(i for node in graph.calls for i in node.refs()) + Counter(refs_of(graph.output))
    scanned = {i for node in graph.calls if node.op in SCANS for i in node.refs()}
    normed = {next(iter(node.refs())) for node in graph.calls if rereads(node.op, node.args)}
    return State(graph, ctx, inputs, values, metas, readers, read, scanned, normed, rounded_nodes(graph), numerics)


def lower_node(state: State, node: CanonicalNode) -> tuple[Any, Any]:
    """The value and meta of the next node. Raises Unsupported."""
    ctx = state.ctx
    ctx.n_readers, ctx.is_scanned = state.readers[node.index], node.index in state.scanned
    ctx.is_normed = node.index in state.normed
    ctx.numerics = "eager" if node.index in state.rounded else state.numerics
    return _lower_node(ctx, node, state.values, state.metas)


def _rounds(graph: CanonicalGraph, rounded: Collection[int], metas: list[Any]) -> bool:
    """Whether some rounded node computes floats: then neither contraction nor approximation may change them."""
    made = (metas[n.index] for n in graph.calls if n.index in rounded and reads_elements(n.op))
    return any(isinstance(m, torch.Tensor) and m.is_floating_point() for v in made for m in leaves(v))


def _claim(ctx: LoweringContext, value: Any, times: int) -> None:
    for box in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(box, TensorBox):
            ctx.claims[id(box.storage)] += times


def _lower_node(ctx: LoweringContext, node: CanonicalNode, values: list[Any], metas: list[Any]) -> tuple[Any, Any]:
    if node.op == "getitem":
        source, at = node.args
        if not -len(values[source.index]) <= at < len(values[source.index]):
            raise Unsupported(
                because(
                    "eager_raises", f"there are {len(values[source.index])} results, and none at {at}: eager raises"
                ),
                node.op,
            )
        return values[source.index][at], metas[source.index][at]
    args = map_refs(node.args, lambda r: values[r.index])
    meta_args = map_refs(node.args, lambda r: metas[r.index])
    if host.is_host(node.op):
        return host.evaluate(ctx, node.op, args, meta_args)
    lowering = find(node.op)
    if lowering is None:
        raise Unsupported(supports(node.op) or "", node.op)
    kwargs = {k: map_refs(v, lambda r: values[r.index]) for k, v in node.kwargs}
    if any(isinstance(v, complex) for v in leaves((*args, *kwargs.values()))):
        raise Unsupported(because("dtype", "an operand is a complex number"), node.op)
    meta_kwargs = {k: map_refs(v, lambda r: metas[r.index]) for k, v in node.kwargs}
    _check_home(ctx, node.op, meta_args, meta_kwargs)
    meta_args, meta_kwargs = _on_meta(ctx, meta_args), _on_meta(ctx, meta_kwargs)
    meta_kwargs.pop("pin_memory", None)
    meta = run_meta(node.op, meta_args, meta_kwargs, device=ctx.target.like)
    check_numbers(node.op, meta_args, meta_kwargs)
    meta = corrected(node.op, ctx.target.like, meta, meta_args)
    ctx.op, ctx.origin = node.op.split(".", 2)[0] + "." + node.op.split(".", 2)[1], f"%{node.index} {node.op}"
    ctx.meta, ctx.arg_metas = meta, meta_args
    try:
        value = lowering(ctx, *args, **kwargs)
    except Unsupported as e:
        raise e if e.node else Unsupported(e.reason, node.op) from None
    except FuserError:
        raise
    except Exception as e:
        raise _why_it_failed(lowering, node.op, (ctx, *args), kwargs, e) from e
    _agree(ctx, node, value, meta)
    return value if may_share(node.op) else _apart(value, meta, _memories(tuple(leaves(meta_args)))), meta


def _why_it_failed(
    lowering: Callable[..., Any], op: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> FuserError:
    """Unsupported if the lowering does not support the arguments, else LoweringError for a defect of the lowering."""
    try:
        inspect.signature(lowering).bind(*args, **kwargs)
    except TypeError as e:
        return Unsupported(f"its lowering does not take these arguments: {e}", op)
    blind = isinstance(error, (AssertionError, AttributeError, NameError)) and not _names_a_number(error)
    if not blind and any(isinstance(v, (Expr, Scalar)) for v in leaves((args, kwargs))):
        return Unsupported("an argument that must be a constant is computed by an earlier call", op)
    where = f"{getattr(lowering, '__module__', '?')}.{getattr(lowering, '__qualname__', lowering)}"
    return LoweringError(f"please report this: {where}, for {op}, raised {type(error).__name__}: {error}")


def _names_a_number(error: Exception) -> bool:
    """Whether an error message shows that a symbolic number was used as a constant."""
    return any(f"'{kind.__name__}'" in str(error) for kind in (Expr, Scalar, Number))


def _apart(value: Any, meta: Any, given: set[int]) -> Any:
    """The value, in a StorageBox of its own if eager returns a copy of an input: later writes must not reach it."""
    if isinstance(value, (tuple, list)) and isinstance(meta, (tuple, list)):
        return [_apart(v, m, given) for v, m in zip(value, meta)]
    if isinstance(value, TensorBox) and value.storage.buffer.input_number >= 0 and _memory(meta) not in given:
        return TensorBox(StorageBox(value.storage.buffer), value.view)
    return value


def _check_home(ctx: LoweringContext, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Unsupported if eager makes a tensor on torch's default device, while the group is on another device."""
    if ctx.target.device_type == targets.HOST or kwargs.get("device") is not None:
        return
    if not any(isinstance(a, torch.Tensor) for a in leaves((args, kwargs))):
        raise Unsupported(
            because("devices", f"it makes a tensor on torch's default device, in a group on {ctx.target.device_type}"),
            op,
        )


def _on_meta(ctx: LoweringContext, value: Any) -> Any:
    """The arguments with devices replaced by "meta". Unsupported for a device other than the group's."""
    if isinstance(value, torch.device):
        if value.type != ctx.target.device_type:
            raise Unsupported(
                because("devices", f"it makes a tensor on {value}, in a group on {ctx.target.device_type}")
            )
        return torch.device("meta")
    if isinstance(value, dict):
        return {k: _on_meta(ctx, v) for k, v in value.items()}
    return tuple(_on_meta(ctx, v) for v in value) if isinstance(value, tuple) else value


def run_meta(
    op: str, args: Sequence[Any], kwargs: dict[str, Any], fused: bool = True, device: str = targets.HOST
) -> Any:  # fmt: skip
    """Eager's shape function: the operator on meta tensors. Unsupported, with eager's message, if it raises.

    `fused`: all dtypes are those of kernels. `device`: the type of the device whose kernels eager calls.
    """
    known = known_meta(op, args, kwargs) if fused else None
    if known is not None:
        return known
    if op in AUTOCASTS:
        return AUTOCASTS[op](device, *args)
    target: Any = torch.ops
    for part in op.split("."):
        target = getattr(target, part)
    if not any(isinstance(a, torch.Tensor) for a in leaves((args, kwargs))):
        kwargs = {**kwargs, "device": "meta"}
    plain = all(is_row_major(a) for a in leaves((args, kwargs)) if isinstance(a, torch.Tensor))
    try:
        parts = PartsCorrected(device) if not plain and is_composite(op) else contextlib.nullcontext()
        with without_dynamo(), parts:
            return target(*args, **kwargs)
    except FuserError:
        raise
    except NotImplementedError as e:
        by_data = "data-independent" in str(e)
        raise Unsupported(
            because("data_size", "its result's size depends on data") if by_data else "it has no shape function", op
        ) from None
    except Exception as e:
        if not plain and is_corrected(op):  # the shape function makes a view where eager's kernel copies
            args, kwargs = map_leaves(row_major, (args, kwargs))
            return run_meta(op, args, kwargs, fused, device)
        raise Unsupported(
            because("eager_raises", f"eager raises {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"), op
        ) from None


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from leaves(v)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    else:
        yield value


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """The same nested tuples, lists and dicts, with `fn` applied to each leaf."""
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(fn, v) for v in value)
    return {k: map_leaves(fn, v) for k, v in value.items()} if isinstance(value, dict) else fn(value)


def _agree(ctx: LoweringContext, node: CanonicalNode, value: Any, meta: Any) -> None:
    """Unsupported unless the lowering's sizes and dtype are eager's; a difference is a defect."""
    if isinstance(value, TensorBox):
        mine = tuple(ctx.hint(s) for s in value.size)
        if mine != tuple(meta.shape) or value.dtype != meta.dtype:
            raise Unsupported(f"lowered to {value.dtype}{mine}, eager has {meta.dtype}{tuple(meta.shape)}", node.op)
    elif isinstance(value, (tuple, list)) and isinstance(meta, (tuple, list)):
        for v, m in zip(value, meta):
            _agree(ctx, node, v, m)


def place_outputs(state: State, refused: dict[int, str] | None = None) -> list[tuple[str, Any]]:
    """Where each output is stored. A view may be a copy only if eager's result aliases nothing visible to the caller.

    Raises Unsupported. With `refused`, records there instead which nodes cannot be outputs, and why.
    """
    ctx, graph, values, metas = state.ctx, state.graph, state.values, state.metas
    if not graph.functional and _hangs_on_layout(graph, values, metas):
        for known in list(ctx.hints):
            ctx.specialise(symbol(known.name, known.kind))
    inputs = {_memory(m): m for m in metas[: graph.n_inputs] if isinstance(m, torch.Tensor)}
    plain = _is_row_major(graph, metas)
    memories = Counter(_memory(m) for m in {id(m): m for m in metas}.values() if isinstance(m, torch.Tensor))
    placed = _Placed(state, dict(inputs), dict(ctx.writes), plain, memories)
    out: list[tuple[str, Any]] = []
    placed_at: dict[int, tuple[str, Any]] = {}  # a tensor that is returned twice is one tensor
    for o in graph.outputs:
        try:
            found = placed_at.get(o.index) if isinstance(o, Ref) else None
            found = _place(placed, o) if found is None else found
        except Unsupported as e:
            if refused is None or not isinstance(o, Ref):
                raise
            refused[o.index] = e.reason
            continue
        out.append(found)
        if isinstance(o, Ref):
            placed_at[o.index] = found
    return out


@dataclass
class _Placed:
    """The outputs placed so far. `seen`: the value that has each memory; `memories`: how many values share it.

    `given`: the buffers that are outputs, with eager's memory and the size. Outputs that are separate in eager, or of
    another shape, need buffers of their own.
    """

    state: State
    seen: dict[int, Any]
    written: dict[str, int]
    plain: bool
    memories: Counter[int]
    given: dict[str, tuple[int, Sequence[Expr]]] = field(default_factory=dict)


def _place(placed: _Placed, o: Any) -> tuple[str, Any]:
    """Where one output is stored. Raises Unsupported."""
    ctx, graph, metas = placed.state.ctx, placed.state.graph, placed.state.metas
    value = placed.state.values[o.index] if isinstance(o, Ref) else o
    if not isinstance(value, TensorBox):
        raise Unsupported(because("no_tensor", f"an output that is no tensor but {type(value).__name__}"))
    meta, buffer = metas[o.index], value.storage.buffer
    whole = value.view is None
    if buffer.name in placed.written and whole:
        return "input", placed.written[buffer.name]
    shared = placed.seen.get(_memory(meta))
    if whole and buffer.input_number >= 0 and (shared is meta or graph.functional):
        if o.index >= graph.n_inputs and not graph.functional:
            _keep_choice(ctx, value, meta)
        return "input", buffer.input_number
    if shared is not None and not graph.functional and not (whole and shared is value):
        raise Unsupported(
            because("view_result", "an output is a view: eager's shares memory with an input or with another output")
        )
    if buffer.name in ctx.perhaps_views and not graph.functional:
        raise Unsupported(
            because("view_result", "an output is x[i] by a tensor without dims: a view if Python takes it for a number")
        )
    placed.seen.setdefault(_memory(meta), value)
    if not graph.functional:
        _keep_dense(ctx, value, meta, placed.plain, placed.memories[_memory(meta)] > 1)
    ready = buffer.input_number < 0 and (_has_layout(ctx, buffer, meta) if whole else _is_reshaped(ctx, value, meta))
    as_given = _memory(meta), value.size
    ready = ready and placed.given.setdefault(buffer.name, as_given) == as_given
    if ready and not whole:
        ctx.result_sizes[buffer.name] = value.size
    name = buffer.name if ready else _copy(ctx, value, meta)
    _keep_units(ctx, name, value, meta)
    return "buffer", name


def _keep_units(ctx: LoweringContext, name: str, value: TensorBox, meta: torch.Tensor) -> None:
    """Give an output in buffer `name` eager's strides in dims of one element: libraries recognise layouts by them."""
    order = memory_order(meta.shape, meta.stride())
    if order is None or 1 not in meta.shape or not meta.numel() or is_row_major(meta):
        return
    if dense_strides(tuple(meta.shape), order) == meta.stride():
        ctx.result_orders[name] = order
        for e, n in zip(ctx.size_of(value), meta.shape):
            if n == 1:
                ctx.specialise(e)


def _has_layout(ctx: LoweringContext, buffer: Buffer, meta: torch.Tensor) -> bool:
    """Whether a buffer has eager's strides; True if these are not dense, which no buffer can have."""
    order = memory_order(meta.shape, meta.stride())
    mine = [ctx.hint(s) for s in buffer.stride]
    return order is None or all(n <= 1 or a == b for n, a, b in zip(meta.shape, mine, meta.stride()))


def _is_reshaped(ctx: LoweringContext, value: TensorBox, meta: torch.Tensor) -> bool:
    """Whether a view is its whole row-major buffer in another shape, and eager's result is row-major."""
    buffer, view = value.storage.buffer, value.view
    if view is None or not meta.is_contiguous() or buffer.order not in (None, tuple(range(len(buffer.size)))):
        return False
    if buffer.name in dict(ctx.writes):
        return False
    index = loop_variables(len(view.size))
    sizes = {s: n for i, n in zip(index, view.size) if (s := i.as_symbol()) is not None}
    own = sum((i * s for i, s in zip(view.reindex(index), buffer.stride)), ZERO)
    seen = sum((i * s for i, s in zip(index, strides_of(view.size))), ZERO)
    whole = ctx.canon(product(view.size)) == ctx.canon(product(buffer.size))
    return whole and recombined(simplify_divmod(ctx.canon(own), sizes)) == ctx.canon(seen)


def _keep_choice(ctx: LoweringContext, value: TensorBox, meta: torch.Tensor) -> None:
    """Specialise dims of 0 or 1 elements, so that an operator that returns its argument does so in every call.

    With such dims several orders are equal, and `x.contiguous(memory_format=...)` may return `x`.
    """
    for e, n in zip(ctx.size_of(value), meta.shape):
        if n <= 1:
            ctx.specialise(e)


def _hangs_on_layout(graph: CanonicalGraph, values: list[Any], metas: list[Any]) -> bool:
    """Whether eager copies memory that the caller sees, but would return a view for other sizes or strides.

    `x.flatten()` and `x.contiguous()` copy only if needed.
    """
    calls = {node.index: node for node in graph.calls}
    roots: Counter[int] = Counter()
    copies: list[int] = []
    for at in {o.index for o in graph.outputs if isinstance(o, Ref)}:
        copied = False
        while (source := _viewed(calls.get(at), values, metas)) is not None:
            copied |= isinstance(metas[at], torch.Tensor) and _memory(metas[at]) not in _memories(metas[source])
            at = source
        roots[at] += 1
        copies += [at] if copied else []
    return any(at < graph.n_inputs or roots[at] > 1 for at in copies)


def _viewed(node: CanonicalNode | None, values: list[Any], metas: list[Any]) -> int | None:
    """The value of which a node may be a view, or which it may return, by eager's choice; None for other nodes."""
    if node is None or not node.args or not isinstance(node.args[0], Ref) or node.op.endswith("_copy"):
        return None
    source = node.args[0].index
    own, other = (_boxes(values[i]) for i in (node.index, source))
    if node.op in COPIES_IF_NEEDED:
        return source if metas[source].dtype is metas[node.index].dtype else None
    if not may_share(node.op) and not _memories(metas[node.index]) & _memories(metas[source]):
        return None
    return source if {id(b.storage.buffer) for b in own} & {id(b.storage.buffer) for b in other} else None


# These return their argument if there is nothing to do.
COPIES_IF_NEEDED = frozenset({"aten.contiguous", "aten.to", *AUTOCASTS})


@functools.cache
def may_share(op: str) -> bool:
    """Whether a result may share its first argument's memory, by the operator's schema; `repeat` always copies."""
    overloads = overloads_named(op.removeprefix("aten.")) if op.startswith("aten.") else ()
    returns = (r for o in overloads for r in o._schema.returns)
    return not overloads or any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _boxes(value: Any) -> list[TensorBox]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, TensorBox)]


def _memories(meta: Any) -> set[int]:
    return {_memory(m) for m in (meta if isinstance(meta, (tuple, list)) else (meta,)) if isinstance(m, torch.Tensor)}


def _is_row_major(graph: CanonicalGraph, metas: list[Any]) -> bool:
    """Whether every result is row-major for all sizes: the inputs are contiguous, and no value is a view."""
    tensors = [m for m in metas if isinstance(m, torch.Tensor)]
    shared = len(set(map(_memory, tensors))) < len(tensors)
    given = [v for n in graph.calls for v in (*n.args, *(v for _, v in n.kwargs))]
    formats = any(isinstance(v, torch.memory_format) for v in given)
    return not shared and not formats and all(
        m.is_contiguous() for m in metas[: graph.n_inputs] if isinstance(m, torch.Tensor)
    )  # fmt: skip


def _keep_dense(ctx: LoweringContext, value: TensorBox, meta: torch.Tensor, plain: bool, viewed: bool) -> None:
    """Unsupported if eager's output is not dense. Adds guards, so that it is dense in every call.

    `viewed`: eager's output is a view, of all elements in the example. Strides of dims of 0 or 1 elements say nothing
    about calls with larger dims: unless all results are `plain`, such sizes become constants.
    """
    if meta.numel() and memory_order(meta.shape, meta.stride()) is None:
        raise Unsupported(
            because("view_result", f"an output whose memory is not dense: eager's strides are {tuple(meta.stride())}")
        )
    buffer = value.storage.buffer
    if viewed and value.view is not None and buffer.input_number < 0:
        ctx.assume("eq", ctx.numel(value), product(buffer.size))
    if not plain and (meta.dim() > 1 or meta.numel() and meta.stride() != (1,)):
        for e, n in zip(ctx.size_of(value), meta.shape):
            if n <= 1:
                ctx.specialise(e)


def _memory(meta: torch.Tensor) -> int:
    """An identifier of a tensor's storage in eager; views of one tensor share it."""
    return int(meta.untyped_storage()._cdata)


def _copy(ctx: LoweringContext, value: TensorBox, meta: torch.Tensor) -> str:
    ctx.meta, ctx.op, ctx.origin = meta, "copy", "copy of a view"
    size = ctx.size_of(value)
    copy = ctx.pointwise(size, value.dtype, ctx.loader(value, size, value.dtype), ctx.order_of_meta())
    return copy.storage.buffer.name


__all__ = ["COPIES_IF_NEEDED", "Lowered", "NumberInput", "Sym", "TensorInput", "lower_graph", "run_meta"]
