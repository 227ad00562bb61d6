"""`fuser.explain`: the explanation of a function or module, or of all that this process compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch

from fuser import interface
from fuser.debug.explaining import explain_key
from fuser.debug.explanation import Explanation
from fuser.debug.gathering import (
    explanation_of,
    frames,
    graph_break_count,
    graph_breaks,
    guard_failures,
    recompilations,
)
from fuser.errors import InputError
from fuser.frontends.records import CompiledGraph, collected, compilations
from fuser.kernel_cache import REGISTRY

Function = Callable[..., Any]


def explain_model(function: Function, /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain a call of `function`, a function or module, with these arguments; it is compiled anew and called.

    What `torch.compile` compiled before is not changed. Buffers of a module and the states of random generators are
    restored; other effects of the call remain. If gradients are needed, the backward is compiled as well. A compiled
    function without arguments is not called: the explanation is of what is compiled so far.

    Args:
        function: a function, a module, or what `torch.compile` returned.
        *args: positional arguments of the call.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`: graphs, groups, kernels, graph breaks, and each operator on ATen with its reason. Sizes are
        bytes, times seconds.

    Raises:
        InputError: `function` cannot be called.
        Exception: whatever the call raises.
    """
    if not callable(function):
        raise InputError(
            f"explain was given a {type(function).__name__}: expected a function, a module or a compiled one, and its "
            "arguments; fuser.debug.explain(key) tells of a registered graph"
        )
    inner = _inside(function)
    if inner is not function and not args and not kwargs:
        return _of_compiled(inner)
    return _of_call(inner, args, kwargs)


def explain(key: int | None = None) -> Any:
    """Explain a fusion, or all that this process compiled.

    Args:
        key: what `register_fusion` returned; None explains the whole process.

    Returns:
        The text on one fusion: graph, classes of arguments, kernels, and calls on ATen with their reasons. Without a
        key, an `Explanation`, with sizes in bytes and times in seconds.

    Raises:
        UnknownKeyError: the key is not registered in this process.
    """
    if key is not None:
        return explain_key(key)
    records = compilations()
    known = {k for r in records for k in r.keys}
    known |= {k for r in REGISTRY.registrations() for made in r.spec.store.splits for k in made.keys}
    others = [r for r in REGISTRY.registrations() if r.key not in known]
    return explanation_of(records, graph_breaks(), recompilations(), others)


def _inside(function: Function) -> Function:
    """The function that was given to `torch.compile`, or `function` itself."""
    found = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None)
    return found if callable(found) else function


# -- a call ------------------------------------------------------------------------------------------------------------
def _of_call(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Explanation:
    import torch._dynamo.convert_frame

    from fuser.frontends.dynamo import fuser_backend

    @functools.wraps(fuser_backend)  # a function of its own, so that Dynamo compiles for it and keeps its other entries
    def explained(gm: torch.fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Function:
        return fuser_backend(gm, inputs, **given)

    breaks, failures = graph_break_count(), guard_failures()
    limits: dict[str, Any] = {
        n: 1 << 16 for n in ("recompile_limit", "accumulated_recompile_limit") if hasattr(torch._dynamo.config, n)
    }
    codes: list[CodeType] = []
    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: codes.append(code))
    try:
        with collected() as records, _as_before(function), torch._dynamo.config.patch(limits):
            result = torch.compile(function, backend=explained)(*args, **kwargs)
            _compile_backward(result)
        interface.wait()
        own = {r.compile_id for r in records}
        again = [r for r in recompilations(failures) if r.failed in own]
        return explanation_of(records, graph_breaks(breaks), again)
    finally:
        hook.remove()
        _forget(codes, explained)


def _forget(codes: Sequence[CodeType], backend: Function) -> None:
    """Empty Dynamo's entries for frames compiled for `backend`, so that their code is freed and no call checks them."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        for code in codes:
            for entry in _debug_get_cache_entry_list(code):
                if _innermost(entry.backend) is backend:
                    state: Any = entry.guard_manager.extra_state
                    state.invalidate(entry, DeletedGuardManagerWrapper("it was compiled to be explained"))
    except (AttributeError, ImportError, TypeError, RuntimeError):  # another version of torch: the entries stay
        return


def _innermost(backend: Any) -> Any:
    """The function that was given to `torch.compile`, inside Dynamo's wrappers."""
    for _ in range(8):
        inside = [getattr(backend, name, None) for name in ("compiler_fn", "_torchdynamo_orig_backend")]
        backend = next(filter(callable, inside), backend)
    return backend


@contextlib.contextmanager
def _as_before(function: Function) -> Iterator[None]:
    """Restore the buffers of a module, and the states of random generators, at the end of the block."""
    buffers = list(function.buffers()) if isinstance(function, torch.nn.Module) else []
    with torch.no_grad():
        saved = [b.clone() for b in buffers]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else ()):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, saved):
                    buffer.copy_(value)


def _compile_backward(result: Any) -> None:
    """Run the backward of a call's results once, without changing any `.grad`."""
    found = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = list(dict.fromkeys(leaf for t in found for leaf in _leaves_of(t)))
    if found and leaves:
        torch.autograd.grad(found, leaves, [torch.ones_like(t) for t in found], allow_unused=True)


def _leaves_of(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensors for which a backward from `t` accumulates gradients."""
    seen, found, stack = set[Any](), list[torch.Tensor](), [t.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(variable)
        stack += [n for n, _ in node.next_functions]
    return found


# -- what is compiled --------------------------------------------------------------------------------------------------
def _of_compiled(function: Function) -> Explanation:
    """The explanation of the graphs compiled so far for frames of `function`, or of modules inside it."""
    ranges = [_lines(code) for code in _codes(function)]

    def is_own(at: str) -> bool:
        file, _, line = at.rpartition(":")
        return any(file == own and first <= int(line or 0) <= last for own, first, last in ranges)

    known = frames()
    records = [r for r in _latest(compilations()) if is_own(known.get(r.compile_id, ""))]
    breaks = [b for b in graph_breaks() if b.source is not None and is_own(str(b.source))]
    again = [r for r in recompilations() if is_own(r.at)]
    notes = () if records else ("nothing of it was compiled so far, or too long ago: call it, or give arguments",)
    return explanation_of(records, breaks, again, notes=notes)


def _latest(records: Sequence[CompiledGraph]) -> list[CompiledGraph]:
    """The records that still own their compilation's name: after `torch._dynamo.reset` names start again."""
    begun: dict[str, int] = {}
    bodies = 0  # they come before the graph that runs them
    for n, r in enumerate(records):
        if r.stage != "backward" and not r.body:
            begun[r.compile_id] = n - bodies
        bodies = bodies + 1 if r.body else 0
    return [r for n, r in enumerate(records) if n >= begun.get(r.compile_id, 0)]


def _codes(function: Function) -> set[CodeType]:
    made = [type(m).forward for m in function.modules()] if isinstance(function, torch.nn.Module) else [function]
    found: set[CodeType] = set()
    for each in made:
        each = each.func if isinstance(each, functools.partial) else getattr(each, "__func__", each)
        code = getattr(each, "__code__", None) or getattr(type(each).__call__, "__code__", None)
        found |= {code} if isinstance(code, CodeType) else set()
    return found


def _lines(code: CodeType) -> tuple[str, int, int]:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_filename, code.co_firstlineno, max(lines, default=code.co_firstlineno)


__all__ = ["explain", "explain_model"]
