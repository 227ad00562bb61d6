"""Thin autograd nodes: one node whose forward and backward are the graph's own programs.

AOTAutograd's wrappers cost more than the kernels of a small graph. If its analysis finds nothing for them to do (no
alias, no written input, no subclass, no random state), later calls use a node of our own. The first call goes through
AOTAutograd, which builds its class of autograd function. The node's class derives from it, so that compiled autograd
finds the attributes it expects, and AOTAutograd compiles the first backward, under its own contexts. Tensors are saved
by autograd's own means: hooks, version checks and errors are eager's.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import Function as AutogradFunction

from fuser.frontends import higher_order
from fuser.frontends.failures import OF_OPERATORS, after_failure
from fuser.frontends.functional import Compiled
from fuser.frontends.program import Program
from fuser.frontends.replay import Replay
from fuser.frontends.training import Training
from fuser.frontends.unused_results import has_gradient, leaving_none, reaching, untold_when_traced
from fuser.passes.classify import is_view
from fuser.runtime.memory import Tally

Function = Callable[..., Any]
_C: Any = torch._C
_ATTEMPTS = 8  # first calls that may end without AOTAutograd's node, such as calls with fake tensors
_BOXED = bool(hasattr(AutogradFunction, "boxed_grads_call"))  # the engine passes gradients as one list, to be emptied


def thin(
    general: Function, gm: fx.GraphModule, steps: Training, repeats: bool, replay: Replay | None, by_eager: Tally
) -> Function:
    """A function that runs `general`, AOTAutograd's wrappers, for a first call, and the thin node after it.

    `repeats`: `gm` may run a second time in eager after an error; `replay`: its second run for the gradient of a
    gradient.
    The graph must have passed `dynamo.why_wrapped`.
    """
    apply: Function | None = None
    attempts = 0
    is_grad_enabled = _C.is_grad_enabled

    def start(args: tuple[Any, ...]) -> Any:
        nonlocal apply, attempts
        results = general(*args)
        made_by = _class_of(results) if attempts < _ATTEMPTS else None
        attempts += 1
        if made_by is not None:
            attempts = _ATTEMPTS
            node = _Node.of(made_by, steps, replay)
            apply = node.apply if node is not None else None
        return results

    def call(*args: Any) -> Any:
        if apply is None:
            return start(args)
        try:
            if is_grad_enabled():
                return apply(*args)
            with torch.enable_grad():  # the program enables gradients itself, inside a no-grad region
                return apply(*args)
        except OF_OPERATORS as error:
            if not repeats:
                raise
            return after_failure(error, gm, by_eager, args)

    return call


def _class_of(results: Any) -> Any:
    """AOTAutograd's class of the autograd function that returned these results; None if there is none."""
    for r in results if isinstance(results, (tuple, list)) else ():
        made_by = getattr(type(getattr(r, "grad_fn", None)), "_forward_cls", None)
        if hasattr(made_by, "compiled_fw"):
            return made_by
    return None


class _Node:
    """Builds the autograd function class of one graph. `apply` is its C function, without Python's wrapper."""

    def __init__(self, made_by: Any, steps: Training, forward: Compiled, replay: Replay | None) -> None:
        self.steps, self.replay = steps, replay
        self.made_by, self.meta = made_by, made_by.metadata
        self.backward_given: Function | None = None
        assert forward.program is not None
        results = forward.program.results
        returned = self.meta.num_forward_returns
        self.returned, saved = results[:returned], results[returned:]
        self.saved = [n for n in saved if _is_tensor(n)]
        self.sizes = [n for n in saved if not _is_tensor(n)]
        self.differentiated = [i for i, info in enumerate(self.meta.output_info) if has_gradient(info)]
        reached = reaching(steps.reached, steps.read, self.differentiated)
        self.of_some = leaving_none(self._first_backward, reached, self.differentiated, self._is_by_eager)
        made: Any = types.new_class("CompiledFunction", (made_by,))
        self.cls = made
        self.cls.forward = staticmethod(steps.under_options("forward", self._forward(forward.program)))
        node: Any = self.cls._backward_cls
        node.symints, node._tensors_no_vc_check, node.opaque_objects = (), [], ()
        untold_when_traced(made)
        self._take_backward(self.of_some)
        apply: Function = super(AutogradFunction, self.cls).apply  # type: ignore[misc]
        dead = [i for i, info in enumerate(self.meta.input_info) if info.requires_grad and i in steps.dead]
        self.apply = detaching(apply, dead) if dead else apply

    @staticmethod
    def of(made_by: Any, steps: Training, replay: Replay | None) -> _Node | None:
        """The node for AOTAutograd's class; None if that class has other work to do at a call."""
        forward = steps.compiled.get("forward")
        meta = getattr(made_by, "metadata", None)
        if forward is None or forward.program is None or meta is None or not _is_known(made_by, meta):
            return None
        try:
            node = _Node(made_by, steps, forward, replay)
        except (AttributeError, TypeError):  # an unknown form of class
            return None
        order = [*node.saved, *node.sizes]
        fits = list(forward.program.results[len(node.returned) :]) == order and len(node.differentiated) == len(
            meta.subclass_tangent_meta
        )
        return node if fits else None

    # The forward.

    def _forward(self, program: Program) -> Function:
        """`forward(ctx, *inputs)`: run the program, then inform autograd."""
        name = program.spelled
        inputs = [name(p) for p in program.placeholders]
        grouped = {o for plan in program.plan.groups for o in plan.outputs if not is_view(o.target)}
        lines = self._run(program, inputs)
        if self.replay is not None:
            lines.insert(0, f"CTX.fuser_inputs = {program.bind(self.replay.note, 'seen')}({', '.join(inputs)})")
        written = [inputs[i] for i in self.meta.mutated_graph_handled_indices_seen_by_autograd]
        if written:  # by kernels, which autograd does not see
            counted = program.bind(torch.autograd.graph.increment_version, "count")
            lines.insert(0, f"{counted}(({', '.join(written)},))")
        for i, info in enumerate(self.meta.output_info):
            if "unsafe_view" in str(info.output_type):
                out = name(self.returned[i])
                lines.append(f"if {out}._is_view(): {out} = {program.bind(_unsafe_view, 'apart')}({out})")
        kept = [name(n) if n in grouped else f"{name(n)}.detach() if {name(n)}._is_view() else {name(n)}"
                for n in self.saved]  # fmt: skip
        lines.append(f"CTX.to_save = ({''.join(k + ', ' for k in kept)})")
        if self.sizes:
            lines.append(f"CTX.symints = ({''.join(name(n) + ', ' for n in self.sizes)})")
        fixed = [n for n, info in zip(self.returned, self.meta.output_info, strict=True)
                 if not info.requires_grad and _is_tensor(n)]  # fmt: skip
        if fixed:
            lines.append(f"CTX.non_differentiable = ({''.join(name(n) + ', ' for n in fixed)})")
            lines.append("CTX._materialize_non_diff_grads = False")
        lines.append("CTX.materialize_grads = False")
        lines.append(f"return ({''.join(name(n) + ', ' for n in self.returned)})")
        return program.compile_as([f"def forward({', '.join(['CTX', *inputs])}):"], lines)

    @staticmethod
    def _run(program: Program, inputs: Sequence[str]) -> list[str]:
        """Statements that assign the results to their names."""
        sequence = program.sequence(boxed=False)
        if sequence is None or not all(isinstance(r, fx.Node) for r in program.results):
            return list(program.body[:-1])  # without the return at its end
        names = "".join(program.spelled(r) + ", " for r in program.results)
        return [f"({names}) = {program.bind(sequence, 'sequence')}({', '.join(inputs)})"]

    # The backward.

    def _take_backward(self, function: Function) -> None:
        """Let the engine call `function(ctx, gradients)`, which empties the list, on every path to the node."""
        _leave_to_python(function)

        def apply(ctx: Any, *grads: Any) -> Any:
            return function(ctx, list(grads))

        _leave_to_python(apply)
        node: Any = self.cls._backward_cls
        if _BOXED:
            self.cls.backward, node.apply_boxed, node.apply = staticmethod(function), function, apply
        else:
            self.cls.backward, node.apply = staticmethod(apply), apply

    def _is_by_eager(self, grads: Sequence[Any]) -> bool:
        """Whether eager computes the gradients, with a graph of their own or many at once."""
        return self.replay is not None and (
            torch.is_grad_enabled()
            or _C._are_functorch_transforms_active()
            or any(map(higher_order.is_batched, grads))
        )

    def _first_backward(self, ctx: Any, grads: list[Any]) -> Any:
        """Run a backward before ours is known: AOTAutograd compiles it, or has done so in the meantime."""
        if self.steps.compiled.get("backward") is None or self.backward_given is None:
            batched = self.replay is not None and any(map(higher_order.is_batched, grads))
            if torch.is_grad_enabled() or _C._are_functorch_transforms_active() or batched:
                return self._again(ctx, grads)
            symints, saved = ctx.symints, ctx.saved_tensors
            given = [self._tangent(j, grads[i]) for j, i in enumerate(self.differentiated)]
            grads.clear()
            every = [*symints, *saved, *given]
            del saved, given
            found = tuple(self.made_by._backward_impl(ctx, every))
            self._adopt()
            return found
        return self.backward_given(ctx, grads)

    def _adopt(self) -> None:
        """Use the compiled backward if its inputs are those that the forward saves."""
        compiled = self.steps.compiled.get("backward")
        if self.backward_given is not None or compiled is None or compiled.program is None:
            return
        program = compiled.program
        saved = [n.name for n in (*self.sizes, *self.saved)]
        if len(program.placeholders) != len(saved) + len(self.differentiated):
            return
        if [p.name for p in program.placeholders[: len(saved)]] != saved:
            return
        function = self.steps.under_options("backward", self._backward(program))
        self.backward_given = function
        self._take_backward(function)

    def _backward(self, program: Program) -> Function:
        """`backward(ctx, gradients)`: the saved tensors, the program, the gradients of the inputs."""
        name, bind = program.spelled, program.bind
        n, m = len(self.sizes), len(self.sizes) + len(self.saved)
        names = [name(p) for p in program.placeholders]
        sequence = program.sequence(boxed=True)
        asked = [f"{bind(f, 'again')}()" for f in (_C.is_grad_enabled, _C._are_functorch_transforms_active)]
        if self.replay is not None:
            batched = bind(higher_order.is_batched, "again")
            asked += [f"{batched}(GRADS[{i}])" for i in self.differentiated]
        lines = [
            f"if {' or '.join(asked)}:",
            f"    return {bind(self._again, 'again')}(CTX, GRADS)",
        ]
        if self.differentiated:
            missing = " or ".join(f"GRADS[{i}] is None" for i in self.differentiated)
            lines += [f"if {missing}:", f"    return {bind(self.of_some, 'of_some')}(CTX, GRADS)"]
        if sequence is not None:
            lines.append(f"INPUTS = [{'*CTX.symints, ' if n else ''}{'*CTX.saved_tensors' if m > n else ''}]")
        else:
            lines += [f"({', '.join(names[:n])},) = CTX.symints"] if n else []
            lines += [f"({', '.join(names[n:m])},) = CTX.saved_tensors"] if m > n else []
        if hasattr(_C._FunctionBase, "maybe_clear_saved_tensors"):
            lines.append("CTX.maybe_clear_saved_tensors()")
        if self.meta.deterministic is not None and not self.meta.deterministic:
            asks = bind(_C._get_deterministic_algorithms, "asks")
            lines.append(f"if {asks}(): {bind(_refuse_deterministic, 'refuse')}()")
        for j, i in enumerate(self.differentiated):
            given = names[m + j]
            lines.append(f"{given} = GRADS[{i}]")
            like = f"{bind(self._tangent, 'tangent')}({j}, {given})"
            lines.append(f"if {self._is_other(bind, j, given)}: {given} = {like}")
            lines += [f"INPUTS.append({given})", f"del {given}"] if sequence is not None else []
        lines.append("GRADS.clear()")
        body = program.body if sequence is None else [f"return {bind(sequence, 'sequence')}(INPUTS)"]
        return program.compile_as(["def backward(CTX, GRADS):"], [*lines, *body])

    def _is_other(self, bind: Function, number: int, given: str) -> str:
        """An expression: whether a gradient has another type or layout than the traced one."""
        form = self.meta.subclass_tangent_meta[number].memory_format
        other = f"type({given}) is not {bind(torch.Tensor, 'tensor')} or "
        if form is None:
            return other + "False"
        if form.memory_format is torch.contiguous_format:
            return other + f"not {given}.is_contiguous()"
        if form.memory_format is not None:
            return "True"
        shape, stride = (bind(tuple(v), "form") for v in (form.size, form.stride))
        return other + f"{given}.stride() != {stride} or {given}.shape != {shape}"

    def _tangent(self, number: int, given: Any) -> Any:
        """A gradient as AOTAutograd would pass it to the backward; RuntimeError for an unexpected subclass."""
        from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

        if _C._functorch.is_legacy_batchedtensor(given):  # `is_grads_batched`: ATen runs the backward, in any layout
            return given
        found, _ = AOTDispatchAutograd.process_runtime_tangent(given, self.meta.subclass_tangent_meta[number])
        return found

    def _again(self, ctx: Any, grads: list[Any]) -> Any:
        """Run a backward that is to be differentiated or is under a transform: in eager, or one that raises."""
        if self.replay is not None:
            flat = list(grads)
            grads.clear()
            return higher_order.by_eager(self.replay, ctx, ctx.fuser_inputs, flat)
        if _C._are_functorch_transforms_active():
            raise RuntimeError(
                "fuser: the backward of this compiled function runs under a transform of torch.func, which only eager "
                "can do, and its graph cannot be run a second time: run the function without torch.compile"
            )

        def run() -> Any:
            return self.cls.backward(ctx, grads) if _BOXED else self.cls.backward(ctx, *grads)

        leaf = torch.empty(0, requires_grad=True)
        return _Once.apply(leaf, run)  # type: ignore[no-untyped-call]


class _Once(AutogradFunction):
    """The results of a backward as tensors whose graph cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, leaf: Any, run: Function) -> Any:
        with torch.no_grad():
            return run()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "fuser: the graph of this function cannot be run a second time, so the gradient of its gradient cannot be "
            "computed: run the function without torch.compile"
        )


def detaching(function: Function, dead: Sequence[int]) -> Function:
    """`function` for a graph that gives the inputs `dead` no gradient.

    With an edge to the graph that made such an input, a backward would run that graph's nodes, too, and keep it alive.
    A state that a step detaches from the step before is an example.
    """

    def detached(*args: Any) -> Any:
        inputs = list(args)
        for i in dead:
            inputs[i] = inputs[i].detach()
        return function(*inputs)

    return detached


def _unsafe_view(x: torch.Tensor) -> Any:
    """The same memory as a tensor that autograd does not treat as a view."""
    return torch.ops.aten._unsafe_view(x, x.shape)


def _refuse_deterministic() -> None:
    raise RuntimeError(
        "fuser: this backward runs under torch.use_deterministic_algorithms(True), and its forward was compiled "
        "without: call the function again after the change"
    )


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _is_known(made_by: Any, meta: Any) -> bool:
    """Whether AOTAutograd saves and passes only tensors and sizes."""
    implemented = getattr(made_by, "_backward_impl", None)
    if implemented is None or list(inspect.signature(implemented).parameters) != ["ctx", "all_args"]:
        return False
    apart = "num_tensors_saved_with_no_vc_check", "num_opaque_objects_saved_for_bw", "num_backward_tokens"
    if any(getattr(meta, name, 0) for name in apart) or getattr(meta, "dynamic_saved_tensors_idxs", None):
        return False
    return bool(meta.num_forward_returns == len(meta.output_info))


def _leave_to_python(function: Any) -> None:
    """Let Dynamo trace neither a function nor its callees: a backward may run after a graph break."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    code = getattr(inspect.unwrap(function), "__code__", None)
    for each in (code, getattr(function, "__code__", None)):
        if each is not None:
            eval_frame.set_code_exec_strategy(each, eval_frame._FrameExecStrategy(skip, skip))


__all__: Sequence[str] = ["detaching", "thin"]
