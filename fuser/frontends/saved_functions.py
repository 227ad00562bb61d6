"""Graphs of `torch.compile(…).aot_compile`: Dynamo saves a backend's result and calls it in another process.

A saved function is Dynamo's graph with fake inputs. It is compiled at its first call there; its kernels are on disk.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor, FakeTensorMode

from fuser import forks
from fuser.passes.checking import copied

Function = Callable[..., Any]
_CACHING = ("force_autograd_cache", "strict_autograd_cache", "bundled_autograd_cache", "bypass_autograd_cache_key")


class SavedFunction(SerializableCallable):
    """A compiled graph that can be saved; `backend` compiles it."""

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], backend: Function, function: Function | None = None
    ) -> None:  # fmt: skip
        self._graph = graph
        self._inputs = inputs
        self._backend = backend
        self._function = function
        self._lock = forks.lock()

    @classmethod
    def of(cls, gm: fx.GraphModule, inputs: Sequence[Any], backend: Function) -> SavedFunction:
        """Compile a graph that Dynamo is going to save."""
        fakes = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]  # their sizes are symbols
        graph = _without_examples(gm)
        with _without_cached_graphs():
            return cls(graph, fakes, backend, backend(gm, inputs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the graph."""
        if self._function is None:
            with self._lock:
                self._compile()
        return self._function(*args, **kwargs)  # type: ignore[misc]

    def _compile(self) -> None:
        if self._function is None:
            mode = next((x.fake_mode for x in self._inputs if isinstance(x, FakeTensor)), None)
            with tracing(TracingContext(mode)), _without_cached_graphs():
                self._function = self._backend(_without_examples(self._graph), self._inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedFunction) -> bytes:
        """The graph, its inputs as fake tensors, and its backend as bytes."""
        from torch.fx._graph_pickler import GraphPickler, Options

        parts = GraphPickler.dumps((fn._graph, list(fn._inputs)), Options(ops_filter=None))
        return pickle.dumps((parts, fn._backend))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedFunction:
        """The function from which these bytes were made."""
        from torch.fx._graph_pickler import GraphPickler
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        saved, backend = pickle.loads(data)
        loaded: Any = GraphPickler.loads(saved, FakeTensorMode(shape_env=ShapeEnv()))
        graph, inputs = loaded
        return cls(graph, inputs, backend)


def _without_examples(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that passes may change, without values and stacks that cannot be saved."""
    new = fx.GraphModule(gm, copied(gm.graph))
    for node in new.graph.nodes:
        for name in ("nn_module_stack", "source_fn_stack", "example_value"):
            node.meta.pop(name, None)
    return new


def _without_cached_graphs() -> contextlib.AbstractContextManager[Any]:
    """A block without AOTAutograd's cache, which accepts only TorchInductor's graphs, even while it is forced."""
    known = {name: False for name in _CACHING if hasattr(torch._functorch.config, name)}
    made: contextlib.AbstractContextManager[Any] = torch._functorch.config.patch(known)
    return made
