"""A second run of a graph in eager, for a gradient that is to be differentiated.

Before a call of the compiled function, its changes are noted: the state of the generators that it draws from, and the
content of inputs that it writes, if gradients depend on that. The second run draws the random numbers of the compiled
call. A `torch.autograd.Function` keeps its own backward, which eager differentiates.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.autograd.function import Function as AutogradFunction
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from fuser import targets
from fuser.frontends.bodies import for_eager, put_call, with_bodies
from fuser.passes.checking import copied
from fuser.passes.randomness import Draw, drawn_again, draws_numbers, packet_name, seeds_again
from fuser.runtime import launcher

Function = Callable[..., Any]
_OWN = "autograd_function_apply"  # Dynamo's operator for a `torch.autograd.Function`
_CHECKPOINT = "tag_activation_checkpoint"


class Noted(NamedTuple):
    """The state of a call: inputs as noted by `seen`, copies of inputs it writes and needs, generator states."""

    inputs: tuple[Any, ...]
    kept: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...] | None  # None while a CUDA graph is recorded


class Replay:
    """A graph that eager can run again. `written`: the inputs that it writes. `needed`: those whose content gradients
    depend on, None for all. `draws`: its random operators."""

    def __init__(
        self, gm: Any, written: frozenset[int] = frozenset(), needed: frozenset[int] | None = None,
        draws: Sequence[Draw] = (), casts: Function = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self.gm = without_marks(gm) if isinstance(gm, fx.GraphModule) else gm
        self.written, self.draws, self.casts = written, draws, casts
        self.needed = needed
        self._devices = tuple(dict.fromkeys(d.device for d in draws))
        self._kept = tuple(sorted(written if needed is None else written & needed))
        self._see = seen()
        self._states = [_generator(d).get_state for d in self._devices]
        self._on_gpu = not all(map(targets.is_host, self._devices))
        self.note: Function = self._note if self._devices or self._kept else self._see

    def _note(self, *args: Any) -> Noted:
        written = [args[i] for i in self._kept]
        if any(t.requires_grad for t in written):
            with torch.enable_grad():  # a copy has the history that its original had before the write
                kept = tuple(t.clone() for t in written)
        else:
            kept = tuple(t.clone() for t in written)
        states = None if self._on_gpu and _is_recording() else tuple(state() for state in self._states)
        return Noted(self._see(*args), kept, states)

    def inputs(self, noted: Any, required: Sequence[bool]) -> list[Any]:
        """The inputs of a call for a second run; RuntimeError if a needed one is gone or was written since."""
        kept = dict(zip(self._kept, noted.kept, strict=True)) if isinstance(noted, Noted) else {}
        pairs = noted.inputs if isinstance(noted, Noted) else noted
        found: list[Any] = []
        for i, (given, version) in enumerate(zip(pairs[::2], pairs[1::2], strict=True)):
            value: Any = given() if isinstance(given, weakref.ref) else given
            gone = value is None and given is not None
            if i in kept:
                value = kept[i]
            elif self.needed is None or i in self.needed:
                _check(value, gone, version)
            elif gone or i in self.written:
                value = _MISSING if gone else value.detach().clone().requires_grad_(required[i])
            found.append(value)
        return self._completed(found, required)

    def _completed(self, found: list[Any], required: Sequence[bool]) -> list[Any]:
        """The inputs, with zeros for those that are gone and whose content does not matter."""
        if not any(value is _MISSING for value in found):
            return found
        nodes = self.gm.graph.find_nodes(op="placeholder")
        sizes: dict[str, int] = {}
        for node, value in zip(nodes, found, strict=True):
            for name, size in zip(_sizes(node.meta.get("example_value")), _sizes(value), strict=False):
                sizes.setdefault(str(name), size)
        for i, node in enumerate(nodes):
            if found[i] is _MISSING:
                like = node.meta.get("example_value")
                _check(like, like is None, None)
                shape = [sizes.get(str(n), n) for n in _sizes(like)]
                _check(like, not all(isinstance(n, int) for n in shape), None)
                rank = like.dim()
                zeros = torch.empty_strided(shape[:rank], shape[rank:], dtype=like.dtype, device=like.device).zero_()
                found[i] = zeros.requires_grad_(required[i])
        return found

    def run(self, inputs: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """The results, and the new content of each input that the graph writes."""
        written = {i: inputs[i].clone() for i in self.written}
        with torch.enable_grad(), self.casts():
            results = self.gm.forward(*(written.get(i, value) for i, value in enumerate(inputs)))
        return list(results), written

    @contextlib.contextmanager
    def drawing(self, noted: Any) -> Iterator[None]:
        """Let random operators in the block draw the numbers of the call; the generators' states are restored."""
        if not self.draws:
            yield
            return
        if noted.states is None:
            raise RuntimeError(_NOT_AGAIN)
        now = {d: _generator(d).get_state() for d in self._devices}
        try:
            for device, state in zip(self._devices, noted.states, strict=True):
                _generator(device).set_state(state)
            with _Drawing(self.draws):
                yield
        finally:
            for device, state in now.items():
                _generator(device).set_state(state)


_MISSING = object()


def _sizes(value: Any) -> tuple[Any, ...]:
    """The sizes and strides of a tensor; a number as a tuple of itself."""
    if isinstance(value, torch.Tensor):
        return (*value.shape, *value.stride())
    return (value,) if isinstance(value, (int, torch.SymInt)) else ()


def _check(value: Any, gone: bool, version: int | None) -> None:
    if gone:
        raise RuntimeError(
            "fuser: the gradient of a gradient needs the inputs of the compiled function, and one of them is gone: "
            "keep a reference to it until the second backward"
        )
    if version is not None and value._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: an "
            f"input of a function compiled by fuser is at version {value._version}; expected {version}"
        )


_NOT_AGAIN = (
    "fuser: the random numbers of this function cannot be drawn again, so the gradient of its gradient cannot be "
    "computed: run the function without torch.compile"
)


def _is_recording() -> bool:
    """Whether the current stream records a CUDA graph, in which a generator's state is not a number."""
    return bool(torch.cuda.is_current_stream_capturing())


def _generator(device: torch.device) -> torch.Generator:
    if targets.is_host(device):
        return torch.default_generator
    found: torch.Generator = torch.get_device_module(device).default_generators[device.index or 0]
    return found


class _Drawing(TorchDispatchMode):
    """Gives each random operator, in order, the numbers that the compiled graph drew for it."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = list(draws)
        self._seeds = seeds_again(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        draw = self._left.pop(0) if self._left else None
        if draw is None or not _may_be(draw, func):
            raise RuntimeError(_NOT_AGAIN)
        if draw.seed is None:
            return func(*args, **kwargs)
        in_place = func._schema.is_mutable
        like = args[0]
        if not isinstance(like, torch.Tensor):
            like = torch.empty_like(func(*args, **{**kwargs, "device": "meta"}), device=draw.device)
        made = drawn_again(draw, self._seeds[draw.device][draw.seed], func, args, like)
        return args[0].copy_(made) if in_place else made


def _may_be(draw: Draw, func: Any) -> bool:
    """Whether a call in eager may correspond to that of the graph."""
    name, traced = packet_name(func), packet_name(draw.target)
    return name == traced or name == "bernoulli" and traced in ("native_dropout", "rand")


def seen() -> Function:
    """A function that notes inputs without keeping them alive, native if possible: see `Replay.inputs`."""
    native = launcher.native()
    return _seen if native is None else cast(Function, native.seen)


def _seen(*args: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for a in args:
        tensor = isinstance(a, torch.Tensor)
        found += [weakref.ref(a) if tensor else a, a._version if tensor and not a.is_inference() else None]
    return tuple(found)


def casts_now() -> Function:
    """A context manager factory that restores the present autocast state."""
    states = [
        (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d))
        for d in ("cpu", "cuda") if torch.amp.autocast_mode.is_autocast_available(d)
    ]  # fmt: skip

    @contextlib.contextmanager
    def casts() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in states:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled))
            yield

    return casts


def without_marks(gm: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph in a form that eager can differentiate twice.

    Checkpointed regions are inlined, so nothing is drawn or computed a second time, and each `torch.autograd.Function`
    keeps the history of the tensors that it saves.
    """
    gm = for_eager(gm)
    found = with_bodies(gm, without_marks, lambda n: n.op == "call_function" and str(n.target) in (_OWN, _CHECKPOINT))
    if found is gm:
        return gm
    for node in list(found.graph.nodes):
        if node.op == "call_function" and str(node.target) == _OWN:
            node.target = applied
            name = str(node.args[1].target)
            body = getattr(found, name)
            node.kwargs = {**node.kwargs, "once": any(map(_is_once, body.graph.nodes))}
            setattr(found, name, _with_gradients(body))
        elif node.op == "call_function" and str(node.target) == _CHECKPOINT:
            put_call(node, node.args[1:])
    found.recompile()
    return found


def _is_once(node: fx.Node) -> bool:
    """Whether the program's line of a node in a backward is inside `once_differentiable`."""
    return f'"{once_differentiable.__code__.co_filename}"' in (node.meta.get("stack_trace") or "")


def _with_gradients(backward: fx.GraphModule) -> fx.GraphModule:
    """A backward that Dynamo traced with gradients disabled, made differentiable.

    The no-grad block around the whole graph is removed. The program's own blocks in it enable gradients at their end.
    """
    found = fx.GraphModule(backward, copied(backward.graph))
    modes = [n for n in found.graph.nodes if n.target is torch._C._set_grad_enabled]
    if len(modes) < 2 or modes[0].args[0] or not modes[-1].args[0] or len(modes) % 2:
        return backward
    for node in (modes[0], modes[-1]):
        found.graph.erase_node(node)
    for node in modes[2:-1:2]:  # the end of one of the program's blocks
        node.args = (True,)
    found.recompile()
    return found


def applied(
    forward: Function, backward: Function, *operands: Any, non_differentiable_idx: Sequence[int] = (),
    dirty_idx: Sequence[int] = (), once: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """A `torch.autograd.Function` made of Dynamo's two graphs. Inputs and results that it saves keep their history.

    `once`: its backward cannot be differentiated, and raises if it is.
    """

    class Applied(AutogradFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results, saved = forward(*args)
            every = results if isinstance(results, (tuple, list)) else (results,)
            ctx.mark_dirty(*(every[i] for i in dirty_idx))
            ctx.mark_non_differentiable(*(every[i] for i in non_differentiable_idx))
            ctx.save_for_backward(*(s if isinstance(s, torch.Tensor) else None for s in saved))
            ctx.others = [None if isinstance(s, torch.Tensor) else s for s in saved]
            return results

    def gradients(ctx: Any, *grads: Any) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        return backward(*grads, *(other if tensor is None else tensor for tensor, other in pairs))

    Applied.backward = staticmethod(once_differentiable(gradients) if once else gradients)  # type: ignore[assignment]
    return Applied.apply(*operands)  # type: ignore[no-untyped-call]


__all__ = ["Noted", "Replay", "casts_now", "seen"]
