"""`torch.compile(model, backend="fuser")`: from Dynamo's graph to a program of fused groups and ATen calls."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fuser import compiler, config, notices, targets
from fuser.compiler import CpuBackend
from fuser.errors import ConfigError, FuserError
from fuser.frontends import fakes, guarantees, plain_trace
from fuser.frontends.bodies import for_eager, passed_bodies
from fuser.frontends.example_values import HIDDEN, give_values, hides_gradient
from fuser.frontends.failures import guarded, say_unfused
from fuser.frontends.functional import Compiled, compile_functional, written_inputs
from fuser.frontends.noting import log_graph
from fuser.frontends.overlapping_operands import REASON as OPERANDS
from fuser.frontends.overlapping_operands import reads_what_it_writes
from fuser.frontends.overlaps import (
    BY_OFFSET,
    THROUGH,
    Watched,
    overlap_of_examples,
    reads_written_by_offset,
    writes_through,
)
from fuser.frontends.overlaps import REASON as OVERLAP
from fuser.frontends.records import CompiledGraph, compilations, forget_compilations, last_compilation, remember
from fuser.frontends.refused_writes import in_inference_mode, refused_write, writes_inference_tensors
from fuser.frontends.transforms import FORWARD, hide_transformed, is_in_forward_mode, levels_kept
from fuser.passes.calls import called, writers
from fuser.passes.checking import copied
from fuser.passes.classify import all_nodes
from fuser.passes.dispatched import in_fast_forms
from fuser.passes.registry import run_stage
from fuser.passes.runner import PassRecord
from fuser.progress import working
from fuser.reasons import because
from fuser.runtime import heap
from fuser.runtime.memory import Tally
from fuser.runtime.spans import span
from fuser.startup import import_at_rest, without_collection

if TYPE_CHECKING:
    from fuser.frontends.training import Training

__all__ = ["CompiledGraph", "compilations", "forget_compilations", "fuser_backend", "last_compilation"]

_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_RECORDED_MODES = ("reduce-overhead", "max-autotune")
_RACING_MODES = ("max-autotune", "max-autotune-no-cudagraphs")
Function = Callable[..., Any]
_SUBCLASS = "an input or output is a tensor subclass"

CpuBackend.warm_up()  # imported when a process compiles: it runs while Dynamo is imported and traces
import_at_rest("torch._dynamo")


def fuser_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Function:
    """Compile a graph captured by Dynamo; called by `torch.compile`.

    `options` are settings of `fuser.config` for this graph alone. On CUDA tensors, the modes "reduce-overhead" and
    "max-autotune" record calls as CUDA graphs, and "max-autotune" and "max-autotune-no-cudagraphs" set `max_autotune`;
    other modes change nothing. ConfigError for an unknown setting, value or mode.

    `options={"freeze": True}` packs weights once, for inference on the CPU. A weight that is written in place,
    replaced or loaded anew is packed again; `p.data.copy_()` and writes through NumPy or DLPack cannot be seen, so
    this is a promise that there are none.
    """
    checked = _checked_options({} if options is None else options, mode)
    if getattr(torch._functorch.config, "force_autograd_cache", False):  # what `aot_compile` returns can be saved
        from fuser.frontends.saved_functions import SavedFunction  # few processes save any

        return SavedFunction.of(gm, example_inputs, functools.partial(fuser_backend, options=options, mode=mode))
    racing = {"max_autotune": True} if mode in _RACING_MODES else {}
    heap.keep_warm()
    nodes = len(gm.graph.nodes)
    shown = working(lambda: f"a graph of {nodes} nodes")
    with config.override(**{**racing, **checked}), without_collection(), span("graph", nodes=nodes), shown:
        function = _compile(gm, example_inputs, {**racing, **checked}, mode in _RECORDED_MODES)
    return _with_options(function, checked) if checked else function


fakes.follow_dynamo(fuser_backend)


def _checked_options(options: dict[str, Any], mode: str | None) -> dict[str, Any]:
    try:
        if mode not in _MODES:
            raise ConfigError(f"mode={mode!r}: expected one of {', '.join(map(repr, _MODES))}")
        if not isinstance(options, dict):
            raise ConfigError(f"options={options!r}: expected a dict of settings, such as {{'numerics': 'eager'}}")
        return {name: config.check(name, value) for name, value in options.items()}
    except ConfigError as error:
        raise guarantees.in_dynamo(error) from None


def _with_options(function: Function, options: dict[str, Any]) -> Function:
    """`function` under `options`, because kernels are compiled at the first call of each class of arguments."""

    def call(*args: Any) -> Any:
        with config.override(**options):
            return function(*args)

    return call


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], recorded: bool
) -> Function:  # fmt: skip
    missing = compiler.why_not("cpu") if compiler.is_broken("cpu") else None
    if missing is not None and _devices(gm, example_inputs) <= {targets.HOST, "meta"}:
        notices.warn_once(f"{missing}; the groups concerned run by ATen")
        _remember_eager(missing, options)
        return for_eager(gm).forward
    if not config.enabled:
        return _run_eager(gm, because("disabled", "config.enabled is False"), options)
    if is_in_forward_mode():
        return _run_eager(gm, FORWARD, options)
    if any(isinstance(x, (list, tuple, dict)) for x in example_inputs):
        from fuser.frontends.containers import flattened, takes_containers  # few graphs have such inputs

        flat = flattened(gm, example_inputs)
        if flat is None:
            return _run_eager(
                gm, because("not_traced", "the graph has inputs that are containers of more than tensors"), options
            )
        return takes_containers(_compile(*flat, options, recorded), gm, example_inputs)
    if not isinstance(gm.graph.output_node().args[0], (tuple, list)):
        return _compile_single(gm, example_inputs, options, recorded)
    by_mode = writes_inference_tensors(gm, example_inputs)
    graph = _GraphCompiler(gm, example_inputs, options, recorded)
    function = graph.compile()
    return in_inference_mode(function, graph.eager.forward) if by_mode else function


def _compile_single(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], recorded: bool
) -> Function:  # fmt: skip
    """Compile a graph that returns one tensor, which Dynamo's graphs never do: like one that returns a tuple."""
    gm = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    output = gm.graph.output_node()
    output.args = ((output.args[0],),)
    gm.recompile()
    function = _GraphCompiler(gm, example_inputs, options, recorded).compile()
    return lambda *args: function(*args)[0]


def _devices(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> set[str]:
    """The types of the devices on which a graph has tensors, as far as its nodes show."""
    found = [*example_inputs, *gm.parameters(), *gm.buffers()]
    for node in all_nodes(gm):
        value = node.meta.get("example_value", node.meta.get("val"))
        found += [value, node.kwargs.get("device")]
        found += value if isinstance(value, (tuple, list)) else []
    types = {v.device.type for v in found if isinstance(v, torch.Tensor)}
    return types | {torch.device(v).type for v in found if isinstance(v, (str, torch.device))}


def _run_eager(gm: fx.GraphModule, reason: str, options: dict[str, Any]) -> Function:
    say_unfused(reason)
    _remember_eager(reason, options)
    return for_eager(gm).forward


def _remember_eager(reason: str, options: dict[str, Any]) -> None:
    record = CompiledGraph("eager", reason, options=options)
    remember(record)
    log_graph(record)
    guarantees.check(record)


def _has_own_gradients(gm: fx.GraphModule) -> bool:
    from fuser.frontends.higher_order import has_own_gradients  # processes that only infer do not need it

    return has_own_gradients(gm)


class _GraphCompiler:
    """Compiles one graph, with its backward where gradients are needed; `recorded`: under CUDA graphs."""

    def __init__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], recorded: bool
    ) -> None:  # fmt: skip
        self.gm = gm
        self.recorded = recorded
        self.example_inputs = example_inputs
        self.options = options
        self.autocast = torch._C._is_any_autocast_enabled()  # it is switched off by the time of `compile_inference`
        self.casts: Function = contextlib.nullcontext
        if torch.is_grad_enabled():
            from fuser.frontends.replay import casts_now

            self.casts = casts_now()
        self.direct: Function | None = None
        self.written: frozenset[int] | None = None  # inputs written by the functional graph; None if its inputs differ
        self.by_eager = Tally()
        self.passes: tuple[PassRecord, ...] = ()
        self.eager = gm  # runs in place of the compiled graph
        self.differentiable = gm  # a graph that eager can differentiate twice, unlike fused attention

    def compile(self) -> Function:
        give_values(self.gm, self.example_inputs)
        if (reason := self._why_written_by_eager()) is not None:
            return _run_eager(self.gm, reason, self.options)
        if any(map(hides_gradient, all_nodes(self.gm))):
            return _run_eager(self.gm, HIDDEN, self.options)
        hide_transformed(self.gm)
        graphs = [self.gm.graph, *(m.graph for m in self.gm.modules() if isinstance(m, fx.GraphModule))]
        attends = any("softmax" in called(graph) for graph in graphs)
        before = fx.GraphModule(self.gm, copied(self.gm.graph)) if attends else None
        self.passes = (*run_stage("pre_grad", self.gm), *passed_bodies(self.gm))
        if before is not None and any(r.name == "fuse_attention" and r.changed for r in self.passes):
            self.differentiable = before
        self.eager, self.differentiable = for_eager(self.gm), for_eager(self.differentiable)
        if any(record.changed for record in self.passes):
            self.gm.recompile()
        try:
            if self._compile_plain():
                return self.direct or self.gm.forward
        except Exception as error:
            return _run_eager(self.gm, self._why_not_traced(error), self.options)
        return self._compile_traced()

    def _why_written_by_eager(self) -> str | None:
        """The reason why a call that writes is right in eager alone, if there is one."""
        found = writers(all_nodes(self.gm))
        if writes_through(found):
            return THROUGH
        return OPERANDS if reads_what_it_writes(found) else refused_write(found)

    def _compile_traced(self) -> Function:
        """Compile a graph that AOTAutograd traces."""
        if reads_written_by_offset(self.gm.graph):
            return _run_eager(self.gm, BY_OFFSET, self.options)
        from fuser.frontends.training import Training  # most graphs for inference need neither

        steps = Training(self.options, self.passes, self.recorded, self.by_eager)
        try:
            wrapped = self._trace(steps)
        except Exception as error:
            return _run_eager(self.gm, self._why_not_traced(error), self.options)
        if self.direct is not None and (self.direct == self.gm.forward or not self.written):
            return self.direct
        if steps.gains_nothing and not _has_own_gradients(self.gm):
            return self.gm.forward
        wrapped, written = self.direct or wrapped, self._written_inputs()
        if overlap_of_examples(self.example_inputs, written):
            return _run_eager(self.gm, OVERLAP, self.options)
        # DDP's graphs are split at its buckets, and Dynamo keeps AOTAutograd's analysis of each part that is counted.
        torch._dynamo.utils.counters["aot_autograd"]["total"] += 1
        written = frozenset(range(len(self.example_inputs))) if written is None else written
        if steps.cut:
            wrapped = self._trainable(wrapped, steps)
        if not written or len(self.example_inputs) == 1:
            return wrapped
        return Watched(wrapped, self.eager, self.example_inputs, written, self.by_eager).call

    def _trainable(self, wrapped: Function, steps: Training) -> Function:
        """AOTAutograd's function of a graph with gradients, twice differentiable, with a thin autograd node."""
        from fuser.frontends.higher_order import differentiable_twice  # processes that only infer need neither
        from fuser.frontends.thin import detaching, thin
        from fuser.frontends.unused_results import differentiated, reaching

        again, replay = self._may_run_again(steps), self._replay(steps)
        if replay is not None:
            meta: Any = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
            outputs, changed = getattr(meta, "output_info", ()), getattr(meta, "mutated_inp_runtime_indices", ())
            gradients = differentiated(meta)
            reached = reaching(steps.reached, steps.read, gradients)
            wrapped = differentiable_twice(wrapped, replay, outputs, changed, reached, gradients)
        if again:
            wrapped = guarded(wrapped, self.differentiable, self.by_eager)
        if not self._may_be_thin(steps):
            dead = self._dead_leaves(steps)
            return detaching(wrapped, dead) if dead else wrapped
        return thin(wrapped, self.differentiable, steps, again, replay, self.by_eager)

    def _dead_leaves(self, steps: Training) -> list[int]:
        """The inputs without a gradient that were leaves; AOTAutograd detaches only other ones, at later calls, too."""
        meta: Any = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
        if meta is None or meta.num_outputs_aliased or len(meta.input_info) != len(self.example_inputs):
            return []
        leaves = {i for i, info in enumerate(meta.input_info) if info.requires_grad and info.is_leaf}
        written = {i for i, info in enumerate(meta.input_info) if info.mutates_data or info.mutates_metadata}
        return sorted(steps.dead & leaves - written)

    def _replay(self, steps: Training) -> Any:
        """The eager replay of the graph for the gradient of a gradient; None if its results would differ."""
        from fuser.frontends.replay import Replay

        context: Any = torch._guards.TracingContext.try_get()
        inputs = len(self.example_inputs)
        own = any(True for _ in self.gm.parameters())
        if own or self.recorded and steps.random or steps.draws is None or not _are_distinct(self.example_inputs):
            return None
        if _metadata_reason(context, inputs, viewed=True, replayed=True) is not None:
            return None
        written = frozenset(i for i, info in enumerate(context.fw_metadata.input_info) if info.mutates_data)
        return Replay(self.differentiable, written, steps.needed, steps.draws, self.casts)

    def _why_not_traced(self, error: Exception) -> str:
        """The reason why AOTAutograd could not trace a program; raises errors meant for Dynamo or users."""
        from torch._dynamo.exc import TorchDynamoException

        if isinstance(error, (TorchDynamoException, FuserError)):
            raise error
        if overlap_of_examples(self.example_inputs, None):
            return OVERLAP
        return because(
            "not_traced", f"it cannot be traced: {type(error).__name__}: {(str(error).strip() or '.').splitlines()[0]}"
        )

    def _compile_plain(self) -> bool:
        """Compile a graph that needs no AOTAutograd. False if it needs it, or may."""
        if config.freeze or _holds_tensors(self.gm):
            return False
        with levels_kept(), in_fast_forms(), plain_trace.tracing(self.gm, self.example_inputs) as functional:
            if functional is None:
                return False
            self.written = frozenset()
            self._use(compile_functional(functional, ("joint_graph", "post_grad"), self.passes), None)
        return True

    def _trace(self, steps: Training) -> Function:
        corrected = fakes.corrected_traces(), fakes.loops_may_count(self.gm)
        with levels_kept(), corrected[0], corrected[1], in_fast_forms(), warnings.catch_warnings():
            # If the trace of a gradient raises, eager runs: the warning about its operator is of no use.
            warnings.filterwarnings("ignore", "Error detected in .*Backward")
            return steps.trace(self.gm, self.example_inputs, self.compile_inference)

    def _written_inputs(self) -> frozenset[int] | None:
        """The numbers of the inputs that AOTAutograd found to be written; None if they are unknown."""
        meta = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
        found = getattr(meta, "input_info", None)
        if found is None or len(found) != len(self.example_inputs):
            return self.written
        return frozenset(i for i, info in enumerate(found) if info.mutates_data or info.mutates_metadata)

    def _may_run_again(self, steps: Training) -> bool:
        """Whether a second run of Dynamo's graph in eager gives the same results and has no other effect."""
        reason = _metadata_reason(torch._guards.TracingContext.try_get(), len(self.example_inputs), viewed=True)
        own = any(True for _ in self.gm.parameters()) or _has_own_gradients(self.gm)
        other = own or steps.random or self.autocast
        return reason is None and not other and _are_distinct(self.example_inputs)

    def _may_be_thin(self, steps: Training) -> bool:
        """Whether AOTAutograd's wrappers have nothing to do in this graph's calls with gradients."""
        forward = steps.compiled.get("forward")
        if forward is None or self.recorded or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return False
        return self._why_wrapped(forward.module, gradients=True) is None

    def compile_inference(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
        """AOTAutograd's inference compiler: takes the functional graph, returns a function of a list of inputs."""
        from fuser.frontends.effects import drop_tokens, with_tokens  # only AOTAutograd's graphs have tokens,
        from fuser.frontends.views_of_inputs import view_written_inputs  # and views of written inputs

        tokens = _tokens()
        drop_tokens(gm, tokens)
        view_written_inputs(gm, with_tokens=False)
        if len(self.example_inputs) == sum(n.op == "placeholder" for n in gm.graph.nodes):
            self.written = written_inputs(gm.graph)
        if config.freeze:
            from fuser.passes.freezing import mark_frozen  # the libraries' packed weights depend on it

            mark_frozen(gm.graph, _static_inputs())
        compiled = compile_functional(gm, ("joint_graph", "post_grad"), self.passes)
        self._use(compiled, self._why_wrapped(gm))
        return with_tokens(compiled.recorded("inference") if self.recorded else compiled.boxed, tokens)

    def _use(self, compiled: Compiled, wrapper_reason: str | None) -> None:
        """Let calls run a compiled inference graph, directly if AOTAutograd's wrapper is not needed."""
        if wrapper_reason is not None and compiled.gains_nothing(self.options) and not self.recorded:
            self.direct, wrapper_reason = self.gm.forward, None
        elif compiled.program is not None and wrapper_reason is None:
            self.direct = compiled.alone or compiled.program.function
            if self.recorded:
                from fuser.cuda.graphs import Recorded  # for CUDA graphs alone

                self.direct = Recorded(self.direct, name="inference", written=compiled.written)
            if self.written:
                self.direct = _counting(self.direct, _seen_by_autograd())
            elif compiled.alone is None and not _draws(compiled.module.graph):
                self.direct = guarded(self.direct, self.eager, self.by_eager)
        route = "direct" if wrapper_reason is None else "wrapped"
        compiled.remember(route, wrapper_reason or "", self.options, by_eager=self.by_eager)

    def _why_wrapped(self, module: fx.GraphModule, gradients: bool = False) -> str | None:
        """The reason why AOTAutograd's runtime wrapper has to stay around the program; None if it would do nothing.

        With `gradients`, its autograd function alone is no reason.
        """
        tensors = [x for x in self.example_inputs if isinstance(x, torch.Tensor)]
        if getattr(torch._guards.TracingContext.try_get(), "fakify_first_call", False):
            return "the first call is with fake tensors"
        if _holds_tensors(self.gm):
            return "the graph holds parameters of its own"
        if not _are_distinct(self.example_inputs):
            return "one tensor is several inputs"
        if any(map(is_traceable_wrapper_subclass, (*tensors, *_results(self.gm)))):
            return _SUBCLASS  # torch 2.11 has no sign of it in the metadata of an inference graph
        if gradients and torch._C._are_functorch_transforms_active():
            return "a transform is at work"
        if not gradients and any(t.requires_grad for t in tensors) and torch.is_grad_enabled():
            return "an input requires gradients"
        if self.autocast:
            return "autocast is on"
        if len(self.example_inputs) != sum(n.op == "placeholder" for n in module.graph.nodes):
            return "the traced graph has other inputs"
        context = torch._guards.TracingContext.try_get()
        return _metadata_reason(context, len(self.example_inputs), ordered=not gradients, kept=True)


def _holds_tensors(gm: fx.GraphModule) -> bool:
    return any(True for _ in gm.parameters()) or any(True for _ in gm.buffers())


def _draws(graph: fx.Graph) -> bool:
    from fuser.frontends.training import draws  # graphs of one group do not ask

    return any(map(draws, graph.nodes))


def _results(gm: fx.GraphModule) -> list[Any]:
    """The example values of a graph's results, where Dynamo gives some."""
    found = [n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _tokens() -> int:
    """The number of tokens that AOTAutograd passes through the graph to order calls with effects."""
    meta = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    return len(getattr(meta, "tokens", ()))


def _seen_by_autograd() -> tuple[int, ...]:
    """The numbers of the graph's inputs whose writes in the graph autograd has to know of."""
    meta = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    return tuple(getattr(meta, "mutated_graph_handled_indices_seen_by_autograd", None) or ())


def _counting(function: Function, written: tuple[int, ...]) -> Function:
    """`function`, which writes these arguments in kernels, preceded by increments of their version counters."""

    def call(*args: Any) -> Any:
        torch.autograd.graph.increment_version([args[i] for i in written])
        return function(*args)

    return call if written else function


def _static_inputs() -> tuple[int, ...]:
    """The numbers of the graph's inputs that AOTAutograd found to be parameters or buffers."""
    meta = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    return tuple(getattr(meta, "static_input_indices", None) or ())


def _are_distinct(inputs: Sequence[Any]) -> bool:
    """Whether no tensor is passed as several inputs."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return len({id(t) for t in tensors}) == len(tensors)


def _metadata_reason(
    context: Any, inputs: int, ordered: bool = False, kept: bool = False, viewed: bool = False, replayed: bool = False
) -> str | None:  # fmt: skip
    """The reason that AOTAutograd's analysis gives why there is work before or after the graph; None if there is none.

    `ordered`: calls with effects are in order without tokens. `kept`: writes in the graph itself are in order.
    `viewed`: results may be views and have dynamic sizes, which AOTAutograd handles. `replayed`: the graph may change
    the content of inputs, and grad mode.
    """
    meta = getattr(context, "fw_metadata", None)
    if meta is None:
        return "the analysis of aliases and mutations is not at hand"
    try:
        nothing = {
            "an input is written": (
                sum(info.mutates_metadata or info.mutates_storage_metadata for info in meta.input_info)
                if replayed
                else meta.num_mutated_inp_runtime_indices + (0 if kept else meta.num_mutated_graph_handled_indices)
            ),
            because("view_result", "an output is a view of an input or of another output"): (
                0 if viewed else meta.num_outputs_aliased
            ),
            "an intermediate result is the base of an output": 0 if viewed else meta.num_intermediate_bases,
            "random number state is passed along": int(meta.is_rng_op_functionalized) + meta.num_graphsafe_rng_states,
            "effects are ordered by tokens": 0 if ordered else len(meta.tokens),
            "grad mode is changed": 0 if replayed else int(meta.grad_enabled_mutation is not None),
            "an output has sizes marked as dynamic": 0 if viewed else int(meta.dynamic_outputs),
            "inputs are added or merged": abs(len(meta.input_info) - inputs),
            because("subclass", "an input or output is a tensor subclass"): sum(
                type(m).__name__ != "PlainTensorMeta"
                for m in (*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta)
            ),
        }
    except (AttributeError, TypeError):
        return "the analysis of aliases and mutations has an unknown form"
    return next((reason for reason, count in nothing.items() if count), None)
