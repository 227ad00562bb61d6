"""The slow path of a call: check the arguments, compute their `ArgSpec`, compile once or fall back.

A call goes to a specification's handle, which is native code. It looks for a kernel that matches the arguments and
runs it; only if there is none, it calls `Executor.slow`.
"""

from __future__ import annotations

import functools
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fuser import compiled_calls, compiler, config, examples, forks, notices, preparing, targets
from fuser.arguments import arg_spec, broadcasts, home_of, is_acceptable, why_unfit
from fuser.canonical import REQUIRED, Registered, canonicalize, skeleton
from fuser.errors import GraphError, InputError, NotFusedError, NotPrebuilt, Unsupported, is_defect
from fuser.kernel_cache import REGISTRY, Bound, Caller, Identity, KernelSpec, Registration, Registry
from fuser.kernel_spec import OUT_OF_BOUNDS, STATUS, ArgSpec
from fuser.kernel_store import FusedKernel, reason_of
from fuser.orders import MAX_FORMS, PENDING, Orders, in_background
from fuser.reasons import because
from fuser.runtime import foreign, launcher, process, torch_abi
from fuser.runtime.bounds import bounds_error
from fuser.runtime.handles import ALL_MAGNITUDES
from fuser.trials import MISS as _MISS
from fuser.trials import Trials, form_of

if TYPE_CHECKING:
    from fuser.splitting import Split

Function = Callable[..., Any]
# Most kernels of one ArgSpec for sizes that no earlier one accepts; further sizes run on ATen.
MAX_VARIANTS = 24
_NUMBERS = (bool, int, float)
_DRAWING = ("rand", "dropout", "bernoulli", ".normal", "uniform", "exponential", "multinomial", "poisson", "philox")


def may_repeat(spec: KernelSpec) -> bool:
    """Whether a call may run more than once: it writes no input and draws no random numbers."""
    return not spec.registered.writes and not _draws(spec)


def _draws(spec: KernelSpec) -> bool:
    return any(word in node.op for node in spec.graph.calls for word in _DRAWING)


# -- registration ------------------------------------------------------------------------------------------------------
def register(
    registry: Registry,
    graph: torch.fx.Graph | torch.fx.GraphModule,
    functional: bool = False,
    in_place: bool = False,
    by_name: bool = False,
) -> Registration:
    """The registration of a graph; see `interface.register_fusion`. `by_name`: inputs may be given by their names."""
    settings = config.key()

    def identity_of(registered: Registered) -> Identity:
        objects = (*map(id, registered.opaque), int(in_place and registered.writes))
        return registered.graph.hash, (*settings, torch.get_default_dtype()), objects

    registered = canonicalize(graph, functional, in_place)
    identity = identity_of(registered)
    form = None if registry.knows(identity) else skeleton(registered.graph)
    if form is not None and not registry.is_first(form, identity):
        registered = canonicalize(graph, functional, in_place, lifting=True)
        identity = identity_of(registered)

    def make_runner(key: int) -> tuple[Executor, Function]:
        runner = Executor(compiler.compile_upfront(registered, key, settings), registry)
        return runner, runner.make_handle()

    return registry.register(identity, registered, make_runner, by_name)


def restored(
    text: str,
    n_bound: int,
    functional: bool,
    in_place: bool,
    settings: tuple[tuple[str, Any], ...],
    bound: tuple[Any, ...] = (),
) -> Function:
    """The handle of a graph that `Executor.reduce` wrote, with its settings then. GraphError if the data is no graph.

    Settings that this version does not have are ignored.
    """
    from fuser.canonical import portable  # only for pickles

    try:
        graph = portable.decode_graph(json.loads(text), n_bound)
    except ValueError as e:
        raise GraphError(f"a pickled handle holds no graph: {e}") from None
    known = {s.name for s in config.SETTINGS}
    before, named = torch.get_default_dtype(), dict(settings)
    dtype = portable.decode_value({"dtype": str(named.get("dtype", before)).removeprefix("torch.")})
    try:
        torch.set_default_dtype(dtype)
        with config.override(**{k: v for k, v in named.items() if k in known}):
            made = register(REGISTRY, graph, functional, in_place, by_name=True).handle
    finally:
        torch.set_default_dtype(before)
    compiled_calls.allow(made)
    return Bound(made, *bound) if bound else made


# -- one specification's calls -----------------------------------------------------------------------------------------
class Executor:
    """Runs one specification: `handle(*args)` is the entry; it calls `slow` if no kernel accepts the call.

    The handle holds the executor. Nothing here may reference the handle or the executor: see `Registry`.
    """

    def __init__(self, spec: KernelSpec, registry: Registry) -> None:
        self.spec = spec
        self.registry = registry  # of the pieces into which it may be split
        self._local = threading.local()
        self.admitted: list[FusedKernel] = []  # kernels in the handle, by their numbers in it
        self._handle: Callable[[], Function | None] = lambda: None
        self._lock = forks.lock()
        self._default_dtype = torch.get_default_dtype()
        me = weakref.ref(self)  # a trial is judged within a call, which holds the executor; so is an order

        def admit(kernel: FusedKernel, magnitudes: int, number: int | None) -> int:
            return cast(Executor, me())._admit(kernel, magnitudes, number)

        def leave(args: tuple[Any, ...], reason: str, function: Function | None) -> bool:
            return cast(Executor, me())._refuse(args, reason, first=True, function=function)

        def make(key: ArgSpec | None, args: tuple[Any, ...], have: int) -> str | None:
            return preparing.make(cast(Executor, me()), key, args, have)

        self._trials = Trials(spec, admit, leave)
        self._orders = Orders(spec, lambda: cast(Executor, me()).handle, make)
        self._foreign = foreign.Kernels()
        self._refused: dict[tuple[Any, ...], tuple[str, Function]] = {}  # by form: the reason, what runs
        self._missing: str | None = None  # the reason if calls ran on ATen because a device has no compiler
        self.splits: dict[ArgSpec | None, Split | None] = {}  # None: of all calls, if the group is blocked
        self.gradients: Function | None = None  # runs calls whose arguments require gradients; None for ATen

    def make_handle(self) -> Function:
        """The entry of the specification. The executor and its kernels live as long as it is held."""
        made: Function = launcher.make_handle(self.slow)
        known = self._handle = weakref.ref(made)
        self.spec.store.native_fallbacks = lambda: getattr(known(), "refused", ())
        return made

    @property
    def handle(self) -> Function:
        """The entry; if nothing holds it any more, a new one that no call will reach."""
        return self._handle() or cast(Function, launcher.make_handle(self.slow))

    def reduce(self, own: Registered | None = None, bound: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """The pickled form of the handle: its graph as data, which `restored` registers. PicklingError if there is
        none.

        Bound tensors become the first inputs of the pickled graph; pickle writes their values beside it. `own` is the
        graph as this handle's caller wrote it, if an equal graph was registered first.
        """
        from fuser.canonical import portable  # only for pickles

        r = own or self.spec.registered
        try:
            text = json.dumps(portable.encode_graph(r), allow_nan=False)
        except GraphError as e:
            raise pickle.PicklingError(f"the handle of fusion {self.spec.key} cannot be pickled: {e}") from None
        in_place = r.writes and not any("writes into a tensor" in reason for reason in r.blocked)
        settings = (*self.spec.config, ("dtype", str(self._default_dtype)))
        return restored, (text, len(r.bound), r.graph.functional, in_place, settings, bound)

    @torch_abi.untraced
    def slow(self, args: tuple[Any, ...], status: int, named: dict[str, Any] | None = None) -> Any:
        """The result of a call that no kernel accepted. InputError for wrong arguments, else whatever eager does.

        `named` are keyword arguments; no kernel has been tried with them.
        """
        if named:
            return self.handle(*self.in_order(args, named))
        if status == OUT_OF_BOUNDS:
            raise bounds_error((k.library, k.program) for k in self.spec.store.kernels)
        if status:
            return self._fall_back(args, because("reported", f"a kernel reported: {STATUS.get(status, status)}"))
        if getattr(self._local, "probing", False):
            return _MISS
        if torch_abi.is_inspected():
            with _disable_current_modes():
                return self.handle(*args)
        form = form_of(args) if self._refused else None
        refused = self._refused.get(form) if form is not None else None
        if refused is not None:
            return self._fall_back(args, *refused)
        filled = self.complete(args)
        if len(filled) != len(args):
            return self.handle(*filled)
        if self.gradients is not None and self._is_differentiated(args):
            return self.gradients(*args)
        reason = self._why_not(args)
        if reason is not None and reason == self._missing:
            self._leave(args, reason)
            return self._fall_back(args, reason)
        if self.spec.blocked:
            return self._run_blocked(args, reason)
        if reason is not None:
            return self._fall_back(args, reason)
        return self._compile_and_run(args)

    def _is_differentiated(self, args: tuple[Any, ...]) -> bool:
        """Whether kernels would accept these arguments if they required no gradient."""
        if not torch.is_grad_enabled() or not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return False
        with torch.no_grad():
            return self._why_not(args) is None

    def _run_blocked(self, args: tuple[Any, ...], why_not: str | None) -> Any:
        """The result of a call of a group with a call that is never fused. It is split at the first suitable call."""
        (reason, *_), splits = self.spec.blocked, self.splits
        if None not in splits and why_not is None:
            if in_background():
                return self._run_meanwhile(None, args, 0)
            with self._lock:
                if None not in splits:
                    splits[None] = self.split(args)
        function = self._function(None)
        if None in splits or self._is_hopeless:
            self._refuse(args, reason, function=function)
        return self._fall_back(args, reason, function)

    @functools.cached_property
    def _is_hopeless(self) -> bool:
        from fuser import pipeline, splitting
        from fuser.lowering.survey import Survey

        return splitting.is_hopeless(self.spec.registered, pipeline.refusals(self.spec.graph, Survey()))

    def _function(self, key: ArgSpec | None) -> Function:
        """The function for calls that no kernel accepts: the group in pieces, or else all of it on ATen."""
        found = self.splits.get(key)
        return found.function if found is not None else self.spec.fallback

    def _refuse(
        self, args: tuple[Any, ...], reason: str, first: bool = False, function: Function | None = None
    ) -> bool:  # fmt: skip
        """Send calls of this form to `function` or ATen from now on, without asking again.

        All calls if the group is blocked; with `first`, also those that a kernel accepts. Returns whether the launcher
        does so; with `first`, no calls are sent to ATen unless it does.
        """
        known = False
        if config.require_fused:  # each such call raises an error, which native code cannot do
            return False
        refuse, native = getattr(self.handle, "refuse", None), getattr(self.spec.fallback, "function", None)
        if refuse is not None and native is not None:
            blocked = bool(self.spec.blocked)
            if blocked or len(self._refused) < MAX_FORMS:
                plain = function is None or function is self.spec.fallback
                known = refuse(native if plain else function, reason, len(args) if blocked else args, first)
        form = form_of(args)
        if form is not None and len(self._refused) < MAX_FORMS and (known or not first):
            self._refused[form] = reason, function or self.spec.fallback
        return known

    def split(self, args: tuple[Any, ...], why: Exception | None = None) -> Split | None:
        """The group in pieces around the calls that no kernel computes for `args`; None if that is of no use.

        `why` is the error of its compilation. Each piece is a group of its own, which may be split again.
        """
        lasting = isinstance(why, Unsupported) and not isinstance(why, NotPrebuilt)
        try:
            from fuser.splitting import split

            with config.override(**dict(self.spec.config)):
                found = compiler.find_refused(self.spec, args, reason_of(why) if why is not None and lasting else None)
                if any(reason.startswith("eager raises") for reason in found.refused.values()):
                    return None
                made = split(self.spec.registered, found, self._register_piece)
        except Exception as e:
            if is_defect(e):
                _say_once(reason_of(e))
            if is_defect(e) and config.strict:
                raise
            return None
        if made is not None:
            self.spec.store.note_split(made)
        return made

    def _register_piece(self, graph: torch.fx.Graph) -> tuple[int, Function]:
        made = register(self.registry, graph, functional=self.spec.graph.functional)
        return made.key, made.handle

    def in_order(
        self, args: tuple[Any, ...], named: dict[str, Any], caller: Caller | None = None
    ) -> tuple[Any, ...]:  # fmt: skip
        """All arguments in the order of inputs. InputError for a keyword that is no input, or is already given."""
        r = self.spec.registered
        key, names = caller or (self.spec.key, r.inputs)
        given = len(args) - len(r.bound)
        wrong = [name for name in named if name not in names[max(given, 0) :]]
        if wrong:
            why = "is given already" if wrong[0] in names else f"is none of its inputs ({', '.join(names)})"
            raise InputError(f"fusion {key} was called with the keyword {wrong[0]!r}, which {why}")
        left = zip(names[given:], r.defaults[given:], strict=True)
        return self.complete((*args, *(named.get(name, default) for name, default in left)), caller)

    def complete(self, args: tuple[Any, ...], caller: Caller | None = None) -> tuple[Any, ...]:
        """`args` with defaults for missing ones. InputError if there are too many, too few, or one has a wrong type."""
        r = self.spec.registered
        key, names = caller or (self.spec.key, r.inputs)
        n_bound = len(r.bound)
        given = len(args) - n_bound
        if given < len(r.inputs):
            args = (*args, *r.defaults[max(given, 0) :])
        if given > len(r.inputs) or any(a is REQUIRED for a in args):
            required = sum(d is REQUIRED for d in r.defaults)
            wanted = f"{required}" if required == len(r.inputs) else f"{required} to {len(r.inputs)}"
            raise InputError(
                f"fusion {key} was called with {given} inputs: expected {wanted} ({', '.join(names)})"
            )
        for i, a in enumerate(args[n_bound:]):
            if not is_acceptable(a) and a is not r.defaults[i]:
                raise InputError(
                    f"input {i} ({names[i]}) of fusion {key} is of type {type(a).__name__}: "
                    "expected a tensor or a number"
                )
        return args

    def _why_not(self, args: tuple[Any, ...]) -> str | None:
        if not config.enabled:
            return because("disabled", "fusion is switched off (config.enabled is False)")
        if not torch_abi.plain_context():
            return because("mode", "a mode, a transform, autocast or a forward derivative is at work in this thread")
        if torch.get_default_dtype() is not self._default_dtype:
            return because("default_dtype", "torch's default dtype is another than at registration")
        device = self.device_of(args)
        reason = why_unfit(args, device)
        if device is not None and reason is None:
            reason = self.why_not_device(device) or self._why_no_broadcast(args)
        return reason

    def device_of(self, args: Sequence[Any]) -> str | None:
        """The device type of the first tensor argument, else of the tensors that the graph makes; None without any."""
        device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), None)
        return device if device is not None else home_of(self.spec.graph)

    def why_not_device(self, device: str) -> str | None:
        """None if kernels of a device type can be made now, else the reason."""
        reason = compiler.why_not(device)
        if reason is not None and compiler.is_broken(device):
            _say_once(reason)
            self._missing = reason
        return reason

    def _leave(self, args: tuple[Any, ...], reason: str) -> None:
        """Send calls to ATen until `reconsider`: all of them if there is no other device."""
        refuse, native = getattr(self.handle, "refuse", None), getattr(self.spec.fallback, "function", None)
        if refuse is not None and native is not None:
            refuse(native, reason, args if torch.cuda.is_available() else len(args))

    def reconsider(self) -> None:
        """Check again whether there is a compiler."""
        if self._missing is not None:
            getattr(self.handle, "pardon", lambda reason: None)(self._missing)

    def _why_no_broadcast(self, args: tuple[Any, ...]) -> str | None:
        for group in self.spec.broadcast_groups:
            shapes = [args[i].shape for i in group if isinstance(args[i], torch.Tensor)]
            if not broadcasts(shapes):
                return because("eager_raises", f"sizes {', '.join(str(tuple(s)) for s in shapes)} do not broadcast")
        return None

    def _compile_and_run(self, args: tuple[Any, ...]) -> Any:
        key = arg_spec(args, self.spec.config)
        store = self.spec.store
        # Another thread may have added one since the handle was called; all counted here are in the handle.
        have = store.count(key)
        if have:
            result = self._probe(args)
            if result is not _MISS:
                return result
        if in_background() and store.reason(key) is None and have < MAX_VARIANTS:
            return self._run_meanwhile(key, args, have)
        while True:
            if have >= MAX_VARIANTS:
                store.close(key, because("variants", f"more than {MAX_VARIANTS} kernels for inputs of one class"))
            entry, compiled = store.get_or_compile(key, lambda: self.compile(args, key), have)
            entry.example = entry.example or tuple(map(examples.described, args))
            if entry.reason is not None and len(entry.kernels) <= have:
                self._refuse(args, entry.reason, function=self._function(key))
                return self._fall_back(args, entry.reason, self._function(key))
            result = self._probe(args)
            if result is not _MISS:
                return result
            have = len(entry.kernels)
            if compiled:
                store.close(
                    key,
                    because(
                        "variants", f"kernel {entry.kernels[-1].name} does not take the inputs it was compiled for"
                    ),
                )

    # Background compilation: see `preparing.py`.

    def prepare(self, like: Sequence[Any]) -> Future[str | None]:
        """Compile in the background for arguments like `like`. The result is None, or why there is no kernel."""
        args = examples.all_concrete(like)
        return self._orders.order(arg_spec(args, self.spec.config), lambda: args, 0)

    def _run_meanwhile(self, key: ArgSpec | None, args: tuple[Any, ...], have: int) -> Any:
        """The result of a call on ATen, until the background has made its kernel."""
        self._orders.leave_meanwhile(key, args, have)
        return self._fall_back(args, PENDING)

    def compile(self, args: tuple[Any, ...], key: ArgSpec) -> FusedKernel:
        """A new kernel for arguments of the class `key`. What fails is remembered and raised."""
        try:
            kernel = self._made(args)
            try:
                self._take(kernel, args)
            except OSError:  # its library has left the cache: this kernel stays with the process
                with config.override(cache_dir=""):
                    kernel = self._made(args)
                    self._take(kernel, args)
        except Exception as e:
            if process.is_ending():  # the process ends, and its compilers with it
                raise
            if not isinstance(e, Unsupported):
                _say_once(reason_of(e))
            self.splits[key] = self.split(args, e)
            if isinstance(e, NotPrebuilt) and self.splits[key] is None:
                _say_once(e.reason)
            raise
        return kernel

    def _made(self, args: tuple[Any, ...]) -> FusedKernel:
        with config.override(**dict(self.spec.config)):
            return compiler.compile_runtime(self.spec, args)

    def _take(self, kernel: FusedKernel, args: tuple[Any, ...]) -> None:
        """Let calls run a new kernel, on trial if needed. OSError if its library cannot be loaded."""
        runtime = foreign.runtime_of(kernel.program)
        if runtime is not None:
            self._foreign.add(kernel.program, kernel.library, runtime)
            return
        target = targets.known(self.device_of(args) or "")
        timed = target is not None and target.races and not dict(self.spec.config).get("check_bounds")
        slowest = config.slowest if timed and not _draws(self.spec) else 0.0
        verified = config.verify if may_repeat(self.spec) else 0
        if verified or slowest:
            self._trials.add(kernel, verified, slowest)
        else:
            self._admit(kernel, ALL_MAGNITUDES, None)

    def _admit(self, kernel: FusedKernel, magnitudes: int, number: int | None) -> int:
        """Let calls of these magnitudes run `kernel`; `number` is its number in the handle if any. Returns the
        number."""
        handle: Any = self.handle
        if number is not None:
            handle.widen(number, magnitudes)
            return number
        added: int = handle.add_kernel(kernel.program, kernel.library, magnitudes)
        self.admitted[added:] = [kernel]
        return added

    def _probe(self, args: tuple[Any, ...]) -> Any:
        """The result of a kernel, or `_MISS` if none accepts the call."""
        self._local.probing = True
        try:
            result = self.handle(*args)
        finally:
            self._local.probing = False
        if result is not _MISS:
            return result
        found = self._foreign.run(args)
        if found is None:
            return self._trials.run(args)
        status, result = found
        return (
            self._fall_back(args, because("reported", f"a kernel reported: {STATUS.get(status, status)}"))
            if status
            else result
        )

    def _fall_back(self, args: tuple[Any, ...], reason: str, function: Function | None = None) -> Any:
        self.spec.store.note_fallback(reason)
        if config.require_fused:
            raise NotFusedError(f"require_fused: a call of fusion {self.spec.key} runs on ATen: {reason}")
        return (function or self.spec.fallback)(*args)


def _say_once(reason: str) -> None:
    notices.warn_once(f"{reason}; the groups concerned run by ATen")
