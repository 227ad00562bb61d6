"""What happens when no kernel takes a call: check the arguments, find out their `ArgSpec`, compile once or fall back.

A call goes to a specification's handle, which is native code. It looks for a kernel that takes the arguments and runs
it; only where there is none, it calls `Executor.slow`.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fuser import compiler, config
from fuser.canonical import REQUIRED, CanonicalGraph, text_of
from fuser.errors import InputError, Unsupported
from fuser.kernel_cache import FusedKernel, KernelEntry, KernelSpec, reason_of
from fuser.kernel_spec import STATUS, ArgSpec, TensorSpec
from fuser.runtime import launcher, torch_abi
from fuser.verify import MISS as _MISS
from fuser.verify import Trials

# Kernels of one ArgSpec, for sizes that none so far takes, before the rest is left to ATen.
MAX_VARIANTS = 24
# Forms of calls (dtypes, sizes, strides) that are remembered as left to ATen, so that they cost next to nothing.
MAX_FORMS = 1024
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (bool, int, float)
_DRAWING = ("rand", "dropout", "bernoulli", ".normal", "uniform", "exponential", "multinomial", "poisson", "philox")


# -- what arguments are like -------------------------------------------------------------------------------------------
def arg_spec(args: Sequence[Any], settings: tuple[tuple[str, Any], ...]) -> ArgSpec:
    """The class of `args`: no sizes, but which of them are equal, 0 or 1.

    A size is 0, 1 or "s<n>", where n counts different sizes in order of appearance over all arguments. A stride is
    0, 1, "d<k>" if it is size times stride of dim k (so a contiguous tensor is d1 d2 … 1), "x" where it has no meaning
    (the size is at most 1), else "t". Numbers are "int", "float" or "bool".
    """
    seen: dict[int, str] = {}
    return ArgSpec(tuple(_one_arg(a, seen) for a in args), settings)


def _one_arg(a: Any, seen: dict[int, str]) -> Any:
    if not isinstance(a, torch.Tensor):
        return type(a).__name__
    sizes, strides = tuple(a.shape), a.stride()
    tokens = tuple(s if s <= 1 else seen.setdefault(s, f"s{len(seen)}") for s in sizes)
    return TensorSpec(a.dtype, a.device.type, tokens, _stride_tokens(sizes, strides))


def _stride_tokens(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
    spans = {size * stride: k for k, (size, stride) in reversed(list(enumerate(zip(sizes, strides)))) if size > 1}
    out: list[Any] = []
    for size, stride in zip(sizes, strides):
        if size <= 1:
            out.append("x")
        elif stride <= 1:
            out.append(stride)
        else:
            out.append(f"d{spans[stride]}" if stride in spans else "t")
    return tuple(out)


def home_of(graph: CanonicalGraph) -> str | None:
    """The device type on which a graph that reads no tensor makes its own; None if it does not say so everywhere.

    A call that leaves the device open follows torch's default device, which may change between two calls.
    """
    homes = set()
    for node in graph.calls:
        if not any(True for _ in node.refs()) and not node.op.startswith(("host.", "sizes.")):
            named = dict(node.kwargs).get("device")
            homes.add(named.type if isinstance(named, torch.device) else "")
    return "cpu" if homes == {"cpu"} else None


def why_unfit(args: Sequence[Any], home: str | None = None) -> str | None:
    """None if a kernel may run on these arguments, else the reason why ATen must. `home`: see `home_of`."""
    device: str | None = None
    grad = torch.is_grad_enabled()
    for i, a in enumerate(args):
        if not isinstance(a, torch.Tensor):
            if type(a) not in _NUMBERS:
                return f"input {i} is a {type(a).__name__}"
            if type(a) is int and not -(1 << 63) <= a < 1 << 63:
                return f"input {i} is an integer of more than 64 bits"
            continue
        reason = _why_unfit_tensor(a, grad)
        if reason is not None:
            return f"input {i} {reason}"
        if device is not None and str(a.device) != device:
            return f"inputs are on {device} and on {a.device}"
        device = str(a.device)
    return None if device is not None or home is not None else NO_TENSOR


def _why_unfit_tensor(a: torch.Tensor, grad: bool) -> str | None:
    if type(a) not in _PLAIN_TENSORS:
        return f"is of the tensor subclass {type(a).__name__}"
    if torch._C._functorch.is_functorch_wrapped_tensor(a):
        return "is inside a transform of torch.func"
    if a.layout is not torch.strided:
        return f"has the layout {a.layout}"
    if grad and a.requires_grad:
        return "requires a gradient, which kernels do not compute"
    if a.is_quantized or a.is_nested:
        return "is quantized or nested"
    return "is lazily conjugated or negated" if a.is_conj() or a.is_neg() else None


NO_TENSOR = "there is no tensor among the inputs"


def _form_of(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What tells calls apart but for numbers' values and memory's alignment; None where a tensor is no plain one."""
    form: list[Any] = []
    for a in args:
        if type(a) in _PLAIN_TENSORS and a.layout is torch.strided and not (a.is_nested or a.dtype.is_complex):
            form.append((a.shape, a.stride(), a.dtype, a.device))
        elif isinstance(a, torch.Tensor):
            return None
        else:
            form.append(type(a))
    return tuple(form)


def may_repeat(spec: KernelSpec) -> bool:
    """Whether a call may run more than once: it writes into no input and draws no random numbers."""
    draws = any(word in node.op for node in spec.graph.calls for word in _DRAWING)
    return not spec.registered.writes and not draws


# -- one specification's calls -----------------------------------------------------------------------------------------
class Executor:
    """Runs one specification: `handle(*args)` is the way in, `slow` what it calls when no kernel takes the call."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self._local = threading.local()
        self._added: dict[int, FusedKernel] = {}
        self.handle: Callable[..., Any] = launcher.make_handle(self.slow)
        self._prepared: dict[ArgSpec, Future[str | None]] = {}
        self._default_dtype = torch.get_default_dtype()
        self._trials = Trials(spec, self._add, functools.partial(self._refuse, first=True))
        self._refused: dict[tuple[Any, ...], str] = {}  # why calls of this form run by ATen
        spec.store.native_fallbacks = lambda: getattr(self.handle, "refused", ())

    def slow(self, args: tuple[Any, ...], status: int) -> Any:
        """The result of a call that no kernel took. InputError for wrong arguments, else whatever eager does."""
        if status:
            return self._fall_back(args, f"a kernel reported: {STATUS.get(status, status)}")
        if getattr(self._local, "probing", False):
            return _MISS
        form = _form_of(args) if self._refused else None
        refused = self._refused.get(form) if form is not None else None
        if refused is not None:
            return self._fall_back(args, refused)
        filled = self.complete(args)
        if len(filled) != len(args):
            return self.handle(*filled)
        blocked = self.spec.blocked
        reason = blocked[0] if blocked else self._why_not(args)
        if blocked:
            self._refuse(args, blocked[0])
        if reason is not None:
            return self._fall_back(args, reason)
        return self._compile_and_run(args)

    def _refuse(self, args: tuple[Any, ...], reason: str, first: bool = False) -> None:
        """Leave calls of this form to ATen from now on, without asking again; all calls if the group is blocked.

        With `first` those, too, that a kernel takes.
        """
        refuse, function = getattr(self.handle, "refuse", None), getattr(self.spec.fallback, "function", None)
        if refuse is not None and function is not None:
            blocked = bool(self.spec.blocked)
            if blocked or len(self._refused) < MAX_FORMS:
                refuse(function, reason, len(args) if blocked else args, first)
        form = _form_of(args)
        if form is not None and len(self._refused) < MAX_FORMS:
            self._refused[form] = reason

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`args` with the defaults of those left out. InputError if there are too many, too few, or of a wrong type."""
        r = self.spec.registered
        n_bound = len(r.bound)
        given = len(args) - n_bound
        if given < len(r.inputs):
            args = (*args, *r.defaults[max(given, 0) :])
        if given > len(r.inputs) or any(a is REQUIRED for a in args):
            required = sum(d is REQUIRED for d in r.defaults)
            wanted = f"{required}" if required == len(r.inputs) else f"{required} to {len(r.inputs)}"
            raise InputError(
                f"fusion {self.spec.key} was called with {given} inputs: expected {wanted} ({', '.join(r.inputs)})"
            )
        for i, a in enumerate(args[n_bound:]):
            if not _is_acceptable(a) and a is not r.defaults[i]:
                raise InputError(
                    f"input {i} ({r.inputs[i]}) of fusion {self.spec.key} is of type {type(a).__name__}: "
                    "expected a tensor or a number"
                )
        return args

    def _why_not(self, args: tuple[Any, ...]) -> str | None:
        if not config.enabled:
            return "fusion is switched off (config.enabled is False)"
        if not torch_abi.plain_context():
            return "a mode, a transform, autocast or a forward derivative is at work in this thread"
        if torch.get_default_dtype() is not self._default_dtype:
            return "torch's default dtype is another than at registration"
        device = self._device_of(args)
        reason = why_unfit(args, device)
        if device is not None and reason is None:
            reason = self._why_not_device(device) or self._why_no_broadcast(args)
        return reason

    def _device_of(self, args: Sequence[Any]) -> str | None:
        device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), None)
        return device if device is not None else home_of(self.spec.graph)

    def _why_not_device(self, device: str) -> str | None:
        reason = compiler.why_not(device)
        if reason is not None and compiler.is_broken(device):
            _warn_once(reason)
        return reason

    def _why_no_broadcast(self, args: tuple[Any, ...]) -> str | None:
        for group in self.spec.broadcast_groups:
            shapes = [args[i].shape for i in group if isinstance(args[i], torch.Tensor)]
            if not _broadcasts(shapes):
                return f"sizes {', '.join(str(tuple(s)) for s in shapes)} do not broadcast"
        return None

    def _compile_and_run(self, args: tuple[Any, ...]) -> Any:
        key = arg_spec(args, self.spec.config)
        store = self.spec.store
        # One may have come since the handle was called; those counted here are in the handle already.
        have = store.count(key)
        if have:
            result = self._probe(args)
            if result is not _MISS:
                return result
        while True:
            if have >= MAX_VARIANTS:
                store.close(key, f"more than {MAX_VARIANTS} kernels for inputs of one class")
            entry, compiled = store.get_or_compile(key, lambda: self._compile(args), have)
            entry.example = entry.example or tuple(map(_described, args))
            if entry.reason is not None and len(entry.kernels) <= have:
                self._refuse(args, entry.reason)
                return self._fall_back(args, entry.reason)
            result = self._probe(args)
            if result is not _MISS:
                return result
            have = len(entry.kernels)
            if compiled:
                store.close(key, f"kernel {entry.kernels[-1].name} does not take the inputs it was compiled for")

    def prepare(self, examples: Sequence[Any]) -> Future[str | None]:
        """Compile in the background for arguments like `examples`. The result is None or why there is no kernel."""
        settings = {s.name: getattr(config, s.name) for s in config.SETTINGS}
        args = tuple(map(_concrete, examples))
        spec = arg_spec(args, self.spec.config)
        running = self._prepared.get(spec)
        if running is None or running.done():  # a second thread would do nothing but wait for the first
            running = self._prepared[spec] = _pool().submit(self._prepare, args, settings)
        return running

    def _prepare(self, args: tuple[Any, ...], settings: dict[str, Any]) -> str | None:
        with config.override(**settings):
            device = self._device_of(args)
            if device is None:
                return NO_TENSOR
            reason = self.spec.blocked[0] if self.spec.blocked else self._why_not_device(device)
            if reason is not None or not config.enabled:
                return reason or "fusion is switched off (config.enabled is False)"
            key = arg_spec(args, self.spec.config)
            entry, _ = self.spec.store.get_or_compile(key, lambda: self._compile(args), 0)
            entry.example = entry.example or tuple(map(_described, args))
            return None if entry.kernels else entry.reason

    def _compile(self, args: tuple[Any, ...]) -> FusedKernel:
        try:
            with config.override(**dict(self.spec.config)):
                kernel = compiler.compile_runtime(self.spec, args)
            slowest = config.slowest if self._device_of(args) == "cpu" else 0.0
            if (config.verify or slowest) and may_repeat(self.spec):
                self._trials.add(kernel, config.verify, slowest)
            else:
                self._add(kernel)
        except Exception as e:
            if not isinstance(e, Unsupported):
                _warn_once(reason_of(e))
            raise
        return kernel

    def _add(self, kernel: FusedKernel) -> None:
        """Let calls run `kernel`."""
        self.handle.add_kernel(kernel.program, kernel.library)  # type: ignore[attr-defined]

    def _probe(self, args: tuple[Any, ...]) -> Any:
        """The result of a kernel, or `_MISS` if none takes the call."""
        self._local.probing = True
        try:
            result = self.handle(*args)
        finally:
            self._local.probing = False
        return self._trials.run(args) if result is _MISS else result

    def _fall_back(self, args: tuple[Any, ...], reason: str) -> Any:
        self.spec.store.note_fallback(reason)
        return self.spec.fallback(*args)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads that compile ahead; the C++ compilers they wait for run beside Python."""
    return ThreadPoolExecutor(config.compile_workers or os.cpu_count() or 1, thread_name_prefix="fuser-compile")


def _concrete(example: Any) -> Any:
    """A symbolic number or a fake tensor as one with the sizes it was traced with; no memory is written."""
    if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if example.node.hint is None:
            raise Unsupported("a size among the inputs depends on data and is not known ahead")
        return example.node.hint
    if not isinstance(example, torch.Tensor) or type(example) in _PLAIN_TENSORS:
        return example
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    size = [_concrete(n) for n in example.shape]
    stride = [_concrete(n) for n in example.stride()]
    with unset_fake_temporarily(), FakeTensorMode():
        return torch.empty_strided(size, stride, dtype=example.dtype, device=example.device)


def _described(a: Any) -> Any:
    if not isinstance(a, torch.Tensor):
        return a
    return a.dtype, a.device.type, tuple(map(_concrete, a.shape)), tuple(map(_concrete, a.stride()))


def _is_acceptable(a: Any) -> bool:
    return isinstance(a, (torch.Tensor, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool))


def _broadcasts(shapes: Sequence[torch.Size]) -> bool:
    for dim in range(1, max(map(len, shapes), default=0) + 1):
        sizes = {s[-dim] for s in shapes if len(s) >= dim} - {1}
        if len(sizes) > 1:
            return False
    return True


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"fuser: {text}; the groups concerned run by ATen", RuntimeWarning, stacklevel=2)


def explain_entry(entry: KernelEntry) -> str:
    """One line: the class of arguments, and its kernels or why there are none."""
    args = ", ".join(_text(a) for a in entry.spec.args)
    names = ", ".join(k.name for k in entry.kernels)
    return f"({args}): {names or 'no kernel'}{f', because {entry.reason}' if entry.reason else ''}"


def _text(a: Any) -> str:
    if not isinstance(a, TensorSpec):
        return str(a)
    sizes = ", ".join(map(str, a.sizes))
    strides = ", ".join(map(str, a.strides))
    return f"{text_of(a.dtype).removeprefix('torch.')} on {a.device_type} [{sizes}] strides [{strides}]"
