"""Functional ATen graphs for inference, traced without AOTAutograd where it would do nothing but trace.

AOTAutograd runs a graph once to find writes and aliases, traces it in a second run, and makes writes functional. A
graph of plain tensors that neither writes inputs, nor draws random numbers, nor returns a view of an input needs one
run: each ATen call is recorded as it is dispatched. A write into a result that shares memory with no other tensor
becomes the operator that returns what is written. `tracing` gives this graph; it equals AOTAutograd's, node for node.
The tests compare the two.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuser import config, notices
from fuser.canonical.aliases import packet_named
from fuser.errors import TraceError, is_defect
from fuser.frontends.fakes import correct
from fuser.passes import sources
from fuser.passes.decompositions import decomposition_of

_C: Any = torch._C
_device, _detach = torch.ops.prim.device.default, torch.ops.aten.detach.default
_index = torch.ops.aten.index.Tensor
_NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Metadata that the nodes made from a node of Dynamo's graph inherit, as in torch's own tracers.
_KEPT = frozenset((*sources.NOTES, "custom", *getattr(fx.proxy, "_COPY_META_FIELDS", ())))
# Tags of operators whose results' sizes or values fake tensors cannot tell.
_REFUSED_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))


class _Refused(Exception):
    """This graph has to be traced by AOTAutograd."""


@contextlib.contextmanager
def tracing(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[fx.GraphModule | None]:
    """A block with the functional graph of Dynamo's graph `gm`, for calls without gradients.

    Its results are new tensors that share no memory with inputs or each other. None if AOTAutograd has to trace the
    graph. Modes, autocast and grad mode have to be those of AOTAutograd's call; the block runs under its modes.
    """
    with contextlib.ExitStack() as modes:
        yield _found(gm, example_inputs, modes)


def _found(
    gm: fx.GraphModule, example_inputs: Sequence[Any], modes: contextlib.ExitStack
) -> fx.GraphModule | None:  # fmt: skip
    recorder = _Recorder()
    try:
        mode = _mode_of(gm, example_inputs)
        if mode is None:
            return None
        _enter(mode, modes)
        return _run(gm, recorder)
    except _Refused:
        defect = recorder.defect
    except Exception as error:
        defect = error
    modes.close()
    _tell(defect)
    return None


def _enter(mode: Any, modes: contextlib.ExitStack) -> None:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.utils import preserve_rng_state

    correct(mode)
    for one in (preserve_rng_state(), mode, enable_python_dispatcher(), _mode_of_context(mode)):
        modes.enter_context(one)


def _tell(error: BaseException | None) -> None:
    """Report once that this module failed. TraceError if `config.strict` is set; else AOTAutograd traces the graph."""
    if error is None or not is_defect(error):
        return
    sentence = f"a trace of a graph raised {type(error).__name__}: {error}"
    if config.strict:
        raise TraceError(f"please report this: {sentence}") from error
    notices.warn_once(f"{sentence}. This is a defect of fuser; AOTAutograd traces the graph", "plain trace")


@contextlib.contextmanager
def _mode_of_context(mode: Any) -> Iterator[None]:
    """A block with `mode`, with which Dynamo traced, as the context's: Dynamo has replaced it for AOTAutograd."""
    context: Any = torch._guards.TracingContext.get()
    before, context.fake_mode = context.fake_mode, mode
    try:
        yield
    finally:
        context.fake_mode = before


def _mode_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """The mode of the graph's fake tensors; None if its inputs, or the state of the process, are not plain."""
    from torch._functorch import aot_autograd
    from torch._functorch import config as functorch_config

    context = torch._guards.TracingContext.try_get()
    if context is None or getattr(context, "fakify_first_call", False):
        return None
    if functorch_config.functionalize_rng_ops or getattr(aot_autograd, "aot_autograd_decompositions", None):
        return None
    if _C._is_any_autocast_enabled() or _C._are_functorch_transforms_active():
        return None
    if _C._len_torch_dispatch_stack() or _C._len_torch_function_stack():
        return None
    graded = torch.is_grad_enabled()
    if not all(type(x) in _TENSORS and _is_plain(x) and not (graded and x.requires_grad) for x in example_inputs):
        return None
    if len({id(x) for x in example_inputs}) < len(example_inputs):
        return None
    fakes = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            fakes.append(node.meta.get("example_value"))
        elif not _is_plain_call(node):
            return None
    if not fakes or len(fakes) != len(example_inputs) or len({id(f) for f in fakes}) < len(fakes):
        return None
    mode = getattr(fakes[0], "fake_mode", None)
    same = all(type(f) is FakeTensor and f.fake_mode is mode and _has_numbers(f) for f in fakes)
    return mode if same else None


def _is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is strided and holds real numbers."""
    return x.layout is torch.strided and not (x.is_quantized or x.is_complex() or x.is_neg() or x._is_zerotensor())


def _has_numbers(x: torch.Tensor) -> bool:
    return all(type(n) is int for n in (*x.shape, *x.stride(), x.storage_offset()))


def _is_plain_call(node: fx.Node) -> bool:
    """Whether a node calls a function that returns only tensors: others change process state, or read sizes."""
    if node.op == "output":
        return True
    plain = node.op in ("call_function", "call_method") and not isinstance(node.target, torch._ops.HigherOrderOperator)
    return plain and _holds_tensors(node.meta.get("example_value"))


def _run(gm: fx.GraphModule, recorder: _Recorder) -> fx.GraphModule:
    values: dict[fx.Node, Any] = {}
    results: Any = ()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = recorder.take(node.meta["example_value"])
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            results = args[0]
            break
        recorder.begin({name: node.meta[name] for name in _KEPT if name in node.meta})
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            values[node] = args[0][args[1]]
            continue
        with recorder, _programs_own():
            if node.op == "call_method":
                value = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)
        if not _holds_tensors(value):
            raise _Refused
        values[node] = value
    return recorder.finish(results)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_holds_tensors, value))
    return type(value) is FakeTensor and _has_numbers(value)


@contextlib.contextmanager
def _programs_own() -> Iterator[None]:
    """A block that runs the program's functions, or torch's: AOTAutograd reports their errors."""
    try:
        yield
    except Exception as error:
        raise _Refused from error


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each ATen call as a node of a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.notes: dict[str, Any] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []  # else an id may be reused
        self._inputs: set[int] = set()  # the storages of the inputs
        self._shared: Counter[int] = Counter()  # the number of results in each storage
        self._written: set[int] = set()  # storages
        self.defect: Exception | None = None  # this class's error, which torch would pass on as an operator's
        self._created: Any = None  # the newest result, if Dynamo's current node created it

    def take(self, fake: torch.Tensor) -> torch.Tensor:
        """Add the next input of the graph."""
        node = self.graph.create_node("placeholder", f"arg{len(self._alive)}_1")
        node.meta["val"] = fake.detach() if fake.requires_grad else fake
        self._nodes[id(fake)] = node
        self._alive.append(fake)
        self._inputs.add(_storage(fake))
        return fake

    def begin(self, notes: dict[str, Any]) -> None:
        """Start a node of Dynamo: the next calls get these notes."""
        self.notes, self._created = notes, None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        try:
            return self._note(func, args, kwargs or {})
        except _Refused:
            raise
        except Exception as error:
            self.defect = error
            raise

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is _device:
            return func(*args, **kwargs)
        if func is _detach and args[0] is self._created:  # the last step of torch's functions that create tensors
            return args[0]
        computing = _computing(func)
        if computing is not None:
            return self._write(computing, args, kwargs)
        replacement = _decomposition(func, args)
        if replacement is not None:
            with self, _programs_own():
                value = replacement(*args, **kwargs)
            if value is not NotImplemented:
                return value
        known, named = self._as_nodes(_without_defaults(func, args)), {k: self._as_nodes(v) for k, v in kwargs.items()}
        with _programs_own():
            value = func(*args, **kwargs)
        self._created = value if _creates(func) else None
        node = self.graph.create_node("call_function", func, known, named, func.overloadpacket.__name__)
        self._give(node, value)
        if isinstance(value, (tuple, list)):
            for i, one in enumerate(value):
                if one is not None:
                    self._give(self.graph.create_node("call_function", operator.getitem, (node, i), {}), one)
                    self._number(one)
        else:
            self._number(value)
        return value

    def _write(self, computing: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Let the node of a written value stand for the tensor that it writes, which shares no memory with others."""
        target = args[0]
        where = _storage(target)
        if id(target) not in self._nodes or where in self._inputs or self._shared[where] != 1:
            raise _Refused
        value = self._note(computing, args, kwargs)
        if value is target or _look(value) != _look(target):
            raise _Refused
        self._written.add(where)
        self._nodes[id(target)] = self._nodes[id(value)]
        return target

    def _give(self, node: fx.Node, value: Any) -> None:
        node.meta.update(self.notes, val=value)

    def _number(self, value: Any) -> None:
        """Let the newest node stand for a call's result, a new fake tensor."""
        if type(value) is not FakeTensor or value.requires_grad or id(value) in self._nodes or not _has_numbers(value):
            raise _Refused
        where = _storage(value)
        if where in self._written:  # the graph's value would share a storage with the value before the write
            raise _Refused
        self._shared[where] += 1
        self._nodes[id(value)] = next(iter(reversed(self.graph.nodes)))
        self._alive.append(value)

    def _as_nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = self._nodes.get(id(value))
            if node is None:  # a tensor that the graph holds
                raise _Refused
            return node
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._as_nodes, value)) if type(value) in (tuple, list) else list(value)
        if not isinstance(value, _NUMBERS):
            raise _Refused
        return value

    def finish(self, results: Any) -> fx.GraphModule:
        """The graph with these results; it raises if they share memory."""
        storages = [_storage(r) for r in results]
        if len(set(storages)) < len(storages) or not self._inputs.isdisjoint(storages):
            raise _Refused
        self.graph.output(tuple(self._nodes[id(r)] for r in results))
        self.graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), self.graph)


def _without_defaults(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Positional arguments without trailing defaults, as the dispatcher passes them."""
    n = len(args)
    for declared in reversed(func._schema.arguments[:n]):
        value, default = args[n - 1], declared.default_value
        if not declared.has_default_value() or type(value) is not type(default) or value != default:
            break
        n -= 1
    return tuple(args[:n])


@functools.cache
def _creates(func: Any) -> bool:
    """Whether an operator creates a tensor from a shape, as `zeros` and `zeros_like` do."""
    return any(a.name == "pin_memory" for a in func._schema.arguments)


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _look(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device


@functools.cache
def _computing(func: Any) -> Any:
    """The operator that returns what `func` writes into its first argument; None if there is none or it is random."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    namespace, _, name = schema.name.partition("::")
    writes = [a.is_write for a in schema.arguments]
    if namespace != "aten" or not name.endswith("_") or writes != [True] + [False] * (len(writes) - 1):
        return None
    found = getattr(packet_named(name[:-1]), func._overloadname, None)
    if found is None or found._schema.is_mutable or [str(r.type) for r in found._schema.returns] != ["Tensor"]:
        return None
    return found if _takes(found._schema) == _takes(schema) else None


def _takes(schema: Any) -> list[tuple[str, str, Any]]:
    return [(a.name, str(a.type), a.default_value) for a in schema.arguments]


def _decomposition(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The decomposition of an operator without side effects, if it has one. Raises for other operators."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
        raise _Refused
    if func._schema.is_mutable or not (_REFUSED_TAGS.isdisjoint(func.tags) or func is _index and _are_indices(args[1])):
        raise _Refused
    replacement = decomposition_of(func)
    if replacement is None and func._can_decompose():
        raise _Refused
    return replacement


def _are_indices(indices: Sequence[Any]) -> bool:
    """Whether the tensors of an index are indices, not masks, whose number of selected elements is unknown."""
    return all(i is None or i.dtype in (torch.int64, torch.int32) for i in indices)


__all__ = ["tracing"]
