"""Fake tensors with the strides of eager's results.

Dynamo and AOTAutograd trace on fake tensors, whose strides decide which views are legal and which are copies. If
torch's shape functions give other strides than eager's kernels, a trace raises where eager works, or its views fail
when it runs. So the fake tensor modes that trace for this backend give each result the strides of
`lowering/corrections.py`. Other backends' modes are unchanged.

In Dynamo's own graphs, results that Dynamo takes for an input with the same fake tensor are corrected, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fuser.lowering.corrections import corrected, is_corrected
from fuser.lowering.shapes import is_row_major
from fuser.passes.dispatched import RESIZING

_MARK = "_fuser_plain_dispatch"
_clone = torch.ops.aten.clone.default
_empty_strided = torch.ops.aten.empty_strided.default
_as_strided = torch.ops.aten.as_strided.default
# For these, torch's fake tensors have other strides in dims of one element than its tensors.
_VIEWS = frozenset(getattr(torch.ops.aten, name).default for name in ("view", "_unsafe_view", "_reshape_alias"))


def correct(mode: Any) -> None:
    """Let a fake tensor mode give eager's strides."""
    if mode is None or _MARK in vars(mode):
        return
    plain = mode.dispatch

    def dispatch(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = _corrected_name(func)
        if func in _resized_gradients() and _has_symbols((args, kwargs)):
            return _gradient_of_input_size(plain, func, args, kwargs or {})
        if func in _VIEWS:
            return _viewed(plain, func, types, args, kwargs or {})
        if name is None:
            return plain(func, types, args, kwargs or {})
        found = _tried(plain, func, types, args, kwargs or {})
        return _with_strides(plain, name, found, args) if isinstance(found, (torch.Tensor, tuple, list)) else found

    setattr(mode, _MARK, plain)
    mode.dispatch = dispatch


# -- gradients of resized images ---------------------------------------------------------------------------------------
@functools.cache
def _resized_gradients() -> frozenset[Any]:
    """The operators that resized images are traced with (`passes/dispatched.py`), for which torch needs sizes that are
    numbers."""
    packets = [getattr(torch.ops.aten, f"{name}_backward", None) for name in RESIZING]
    return frozenset(packet.default for packet in packets if packet is not None)


def _has_symbols(values: Any) -> bool:
    """Whether a number, or a size or stride of a tensor, is a symbol. Slices may have symbolic strides only."""
    numbers = (n for v in pytree.tree_leaves(values) for n in (_geometry(v) if isinstance(v, torch.Tensor) else (v,)))
    return any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in numbers)


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return (*t.shape, *t.stride()) if t.layout is torch.strided else tuple(t.shape)


def _gradient_of_input_size(plain: Callable[..., Any], func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """An empty tensor with the input's sizes, in the memory order that the operator gives for the example's sizes."""
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    example = func(**pytree.tree_map(_as_example, given))
    other = {4: torch.channels_last, 5: torch.channels_last_3d}.get(example.dim(), torch.contiguous_format)
    order = torch.contiguous_format if example.is_contiguous() else other
    grad = given["grad_output"]
    options = {"dtype": grad.dtype, "device": grad.device, "memory_format": order}
    return plain(torch.ops.aten.empty.memory_format, (), (given["input_size"],), options)


def _as_example(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes, strides = ([_as_example(n) for n in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


# -- strides -----------------------------------------------------------------------------------------------------------
@functools.cache
def _corrected_name(func: Any) -> str | None:
    """The name of an operator with new results whose strides torch's shape function may get wrong; else None."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable or func.is_view:
        return None
    name = str(func.overloadpacket)
    return name if is_corrected(name) else None


def _tried(plain: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A call's results; of row-major arguments if the shape function makes a view where eager's kernel copies."""
    try:
        return plain(func, types, args, kwargs)
    except (RuntimeError, ValueError) as error:
        if "view" not in str(error):
            raise

        def copy(t: torch.Tensor) -> Any:
            return plain(_clone, (), (t,), {"memory_format": torch.contiguous_format})

        return plain(func, types, *pytree.tree_map_only(torch.Tensor, copy, (args, kwargs)))


def _with_strides(plain: Callable[..., Any], name: str, found: Any, args: Sequence[Any]) -> Any:
    """`found`, a call's results, with eager's strides."""
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    made = [t for t in results if isinstance(t, torch.Tensor)]
    device = made[0].device.type if made else "cpu"
    try:
        if all(map(_is_plain, (*tensors, *made))):
            return found
        metas = pytree.tree_map_only(torch.Tensor, _on_meta, (found, tuple(args)))
        wanted = corrected(name, device, *metas)
    except Exception:  # sizes that depend on data, or arguments that no rule knows: torch's strides stay
        return found
    for i, (t, want) in enumerate(zip(results, [wanted] if isinstance(found, torch.Tensor) else wanted)):
        if isinstance(t, torch.Tensor) and want.shape == t.shape and tuple(want.stride()) != tuple(t.stride()):
            options = {"dtype": t.dtype, "device": t.device}
            results[i] = plain(_empty_strided, (), (t.shape, want.stride()), options)
    return results[0] if isinstance(found, torch.Tensor) else list(results) if type(found) is list else tuple(results)


def _viewed(plain: Callable[..., Any], func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view in other sizes, with eager's strides in dims of one element, too."""
    found = plain(func, types, args, kwargs)
    if _has_symbols((args, kwargs, found)) or min(found.shape, default=2) > 1 or _is_plain(args[0]):
        return found
    with torch._C._DisablePythonDispatcher():  # the symbolic rule of AOTAutograd's traces
        strides = func(_on_meta(args[0]), *args[1:], **kwargs).stride()
    if strides == found.stride():
        return found
    return plain(_as_strided, (), (args[0], found.shape, strides, args[0].storage_offset()), {})


def _is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor is row-major in dims of one element, too: no rule changes a call on such tensors."""
    return is_row_major(t) if all(type(n) is int for n in (*t.shape, *t.stride())) else t.is_contiguous()


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


# -- AOTAutograd -------------------------------------------------------------------------------------------------------
_corrects: contextvars.ContextVar[bool] = contextvars.ContextVar("fuser_corrects_fakes", default=False)


@contextlib.contextmanager
def corrected_traces() -> Iterator[None]:
    """Correct the fake tensors of AOTAutograd's traces in this block.

    Their mode is Dynamo's or that of fake inputs; without one, AOTAutograd makes one.
    """
    _follow_aot_autograd()
    token = _corrects.set(True)
    try:
        yield
    finally:
        _corrects.reset(token)


@functools.cache
def _follow_aot_autograd() -> None:
    from torch._functorch import aot_autograd

    plain: Callable[..., Any] = aot_autograd.construct_fake_mode  # type: ignore[attr-defined]

    @functools.wraps(plain)
    def construct(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        if _corrects.get():
            correct(made[0])
        return made

    aot_autograd.construct_fake_mode = construct  # type: ignore[attr-defined]


@contextlib.contextmanager
def loops_may_count(gm: fx.GraphModule) -> Iterator[None]:
    """Let traces in this block read numbers from tensors, if the graph calls `while_loop`.

    torch's gradient of a loop reads the number of the step, which Dynamo forbids unless the whole program is one
    graph.
    """
    mode = getattr(torch._guards.TracingContext.try_get(), "fake_mode", None)
    if mode is None or not any(getattr(n.target, "__name__", "") == "while_loop" for n in gm.graph.nodes):
        yield
        return
    before = getattr(mode, "allow_scalar_outputs", False)
    mode.allow_scalar_outputs = True
    try:
        yield
    finally:
        mode.allow_scalar_outputs = before


# -- Dynamo ------------------------------------------------------------------------------------------------------------
def follow_dynamo(backend: Callable[..., Any]) -> None:
    """Correct the fake tensors of every graph that Dynamo captures for `backend`, from its first call on."""
    from torch._dynamo.output_graph import OutputGraph

    plain = OutputGraph.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if _innermost(self.compiler_fn) is backend:
            correct(self.tracing_context.fake_mode)

    OutputGraph.__init__ = init  # type: ignore[method-assign]
    _keep_writes(OutputGraph, backend)


def _keep_writes(output_graph: Any, backend: Callable[..., Any]) -> None:
    """Keep writes into 0-dim float64 inputs in the graphs that Dynamo captures for `backend`.

    Dynamo drops inputs whose value became a constant. It takes a write without users for such an input, since both
    have the same fake tensor.
    """
    plain = getattr(output_graph, "remove_tensorify_specialized_graphargs", None)
    if plain is None:
        return

    @functools.wraps(plain)
    def remove(self: Any) -> None:
        hidden = []
        if _innermost(self.compiler_fn) is backend:
            hidden = [(n, n.meta.pop("example_value")) for n in self.graph.nodes if _looks_like_an_input(n)]
        plain(self)
        for node, value in hidden:
            node.meta["example_value"] = value

    output_graph.remove_tensorify_specialized_graphargs = remove


def _looks_like_an_input(node: fx.Node) -> bool:
    return node.op != "placeholder" and getattr(node.meta.get("example_value"), "item_memo", None) is not None


def _innermost(function: Any) -> Any:
    """The innermost function that a compiler function of Dynamo wraps."""
    for _ in range(8):
        inner = [getattr(function, name, None) for name in ("compiler_fn", "_torchdynamo_orig_backend", "__wrapped__")]
        inner = [f for f in inner if callable(f)]
        if not inner:
            break
        function = inner[0]
    return function
