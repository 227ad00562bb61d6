"""Upfront and runtime compilation, and the devices' backends.

Upfront: a graph becomes a `KernelSpec`, once. Runtime: a `KernelSpec` and actual arguments become a `FusedKernel`,
through the backend of the arguments' device.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from fuser import config, forks, plans, refusals, targets
from fuser.canonical import CanonicalGraph, Registered, refs_of
from fuser.cpu import toolchain
from fuser.cpu.target import TARGET as CPU
from fuser.errors import BackendError, NotPrebuilt, Unsupported
from fuser.fallback import Fallback
from fuser.kernel_cache import KernelSpec
from fuser.kernel_store import FusedKernel, KernelStore
from fuser.reasons import because, told
from fuser.runtime import foreign, prebuilt, workers
from fuser.runtime.background import as_here
from fuser.runtime.counting import COUNTS
from fuser.runtime.foreign import Runtime
from fuser.runtime.prebuilt import Prebuilt
from fuser.runtime.spans import span
from fuser.startup import import_at_rest
from fuser.targets import Target

if TYPE_CHECKING:
    from fuser.lowering.graph import Lowered
    from fuser.refusals import Refusals
    from fuser.scheduler.schedule import Schedule


settings: Any = config  # its attributes are made from a table


# -- backends ----------------------------------------------------------------------------------------------------------
class Source(Protocol):
    """Generated code: `text` for a compiler, and the data to launch it."""

    @property
    def text(self) -> str: ...


@runtime_checkable
class FusionBackend(Protocol):
    """A device's generator and compiler. `can_fuse` returns None, or the reason why it cannot fuse now.

    `codegen` needs neither a compiler nor the device. Both methods may raise Unsupported, `compile` also CompileError.
    """

    name: str

    def can_fuse(self) -> str | None: ...

    def codegen(self, lowered: Lowered, plan: Schedule, single: bool, comment: str) -> Source: ...

    def compile(self, source: Any) -> FusedKernel: ...


@runtime_checkable
class TuningBackend(FusionBackend, Protocol):
    """A backend that can time tiles: `tune` returns the source with the fastest tiles for the sizes of `args`."""

    def tune(self, source: Any, args: Sequence[Any]) -> Any: ...


@runtime_checkable
class KeepingBackend(FusionBackend, plans.Keeper, Protocol):
    """A backend whose kernels' plans are kept for other processes."""


class CpuBackend:
    """C++, compiled by the machine's compiler."""

    name = "cpp"

    @staticmethod
    def warm_up() -> None:
        """Do in the background what the first kernel would wait for."""
        toolchain.warm_up()

    def can_fuse(self) -> str | None:
        return toolchain.why_not()

    def codegen(self, lowered: Lowered, plan: Schedule, single: bool, comment: str) -> Source:
        import_at_rest("fuser.cpu.fused_kernel")
        from fuser.cpu import fused_kernel

        return fused_kernel.generate(lowered, plan, single, comment)

    def compile(self, source: Any) -> FusedKernel:
        from fuser.cpu import fused_kernel

        return fused_kernel.compile_source(source)

    def machine(self) -> str | None:
        return toolchain.machine()

    def machine_facts(self) -> Mapping[str, str]:
        return toolchain.machine_facts()

    def kept_of(self, kernel: Any) -> Mapping[str, Any] | None:
        return toolchain.describe(kernel.library)

    def library_of(self, kept: Mapping[str, Any], folder: pathlib.Path | None = None) -> str | None:
        return toolchain.kept_library(kept["library"], folder / "cpu" if folder is not None else None)

    def elsewhere(self, key: str) -> Iterable[tuple[Prebuilt, str]]:
        return [(folder, plans.portable(key)) for folder in prebuilt.for_cpu()]

    def why_not_made(self) -> str | None:
        """None if kernels can be compiled, else the reason; they can then only be found."""
        return toolchain.why_no_compiler()


class CudaBackend:
    """Triton for NVIDIA GPUs."""

    name = "triton"

    def __init__(self) -> None:
        self._reason: str | None = None
        self._known = False

    def can_fuse(self) -> str | None:
        if not self._known:
            from fuser.cuda import driver as cuda_driver
            from fuser.cuda import toolchain as cuda_toolchain

            self._reason = cuda_toolchain.why_not() or cuda_driver.why_not()
            self._known = True
        return self._reason

    def codegen(self, lowered: Lowered, plan: Schedule, single: bool, comment: str) -> Source:
        from fuser.cuda import fused_kernel

        return fused_kernel.generate(lowered, plan, single, comment)

    def compile(self, source: Any) -> FusedKernel:
        from fuser.cuda import fused_kernel

        return fused_kernel.compile_source(source)

    def tune(self, source: Any, args: Sequence[Any]) -> Any:
        from fuser.cuda import tuning  # races need an import that most processes never use

        return tuning.tuned(source, args)

    def machine(self) -> str | None:
        from fuser.cuda import kept

        return kept.machine() if settings.cache_dir or prebuilt.for_gpu() else None

    def machine_facts(self) -> Mapping[str, str]:
        from fuser.cuda import kept

        return kept.machine_facts()

    def kept_of(self, kernel: Any) -> Mapping[str, Any] | None:
        from fuser.cuda import kept

        return kept.describe(kernel)

    def library_of(self, kept: Mapping[str, Any], folder: pathlib.Path | None = None) -> Any:
        from fuser.cuda.kept import restore

        return restore(kept, folder)

    def elsewhere(self, key: str) -> Iterable[tuple[Prebuilt, str]]:
        """Folders with prebuilt plans. GPU plans have their full names there, with the version of Triton."""
        from fuser.cuda import kept, toolchain

        for folder in prebuilt.for_gpu():
            there = kept.machine(toolchain.triton_version() or folder.manifest.triton)
            if there is not None:
                yield folder, f"{plans.portable(key)}-{plans.machine_suffix(there)}"


def _cuda_target() -> Target:
    from fuser.cuda.target import TARGET  # processes without a GPU import nothing of that folder

    return TARGET


BUILT_IN: dict[str, Callable[[], FusionBackend]] = {"cpu": CpuBackend, "cuda": CudaBackend}
targets.OWN.update({"cpu": lambda: CPU, "cuda": _cuda_target})
_backends: dict[str, FusionBackend | None] = {}
_overrides: dict[str, bool] = {}
_lock = forks.lock()


def register_backend(
    device_type: str, backend: FusionBackend | None, target: Target | None = None, runtime: Runtime | None = None
) -> None:
    """Compile for `device_type` with `backend`; None restores the package's own, if any. BackendError if unfit.

    A device that the package does not know also needs a target and a runtime.
    """
    _check_device_type(device_type)
    if backend is not None and not isinstance(backend, FusionBackend):
        missing = [n for n in ("name", "can_fuse", "codegen", "compile") if getattr(backend, n, None) is None]
        raise BackendError(
            f"{type(backend).__name__} is no backend for {device_type!r}: it lacks {', '.join(missing)}; "
            "see fuser.compiler.FusionBackend"
        )
    if isinstance(backend, type):
        raise BackendError(f"{backend.__name__} is a class: expected an instance, the backend for {device_type!r}")
    if backend is not None:
        _check_foreign(device_type, target, runtime)
    with _lock:
        if backend is None:
            _backends.pop(device_type, None)
            targets.forget(device_type)
            foreign.RUNTIMES.pop(device_type, None)
            return
        _backends[device_type] = backend
        if target is not None:
            targets.keep(target)
        if runtime is not None:
            foreign.RUNTIMES[device_type] = runtime


def _check_foreign(device_type: str, target: Target | None, runtime: Runtime | None) -> None:
    """BackendError if target or runtime are unfit. A device of the package's own needs neither."""
    own = device_type in targets.OWN
    if not (own and target is None) and (not isinstance(target, Target) or target.device_type != device_type):
        raise BackendError(f"a backend for {device_type!r} needs a fuser.targets.Target({device_type!r}, …)")
    if not (own and runtime is None):
        foreign.check(runtime, device_type)


def _check_device_type(device_type: str) -> None:
    try:
        if not isinstance(device_type, str):
            raise TypeError  # torch takes a number for the index of an accelerator device
        torch.device(device_type)
    except (RuntimeError, TypeError):
        raise BackendError(f"{device_type!r} is no device type: expected one such as 'cpu' or 'cuda'") from None


def find_backend(device_type: str) -> FusionBackend | None:
    """The backend of a device type, or None."""
    with _lock:
        if device_type not in _backends:
            make = BUILT_IN.get(device_type)
            _backends[device_type] = make() if make is not None else None
        return _backends[device_type]


def override_can_fuse(device_type: str, value: bool | None) -> None:
    """Fuse on a device type or not, whatever its backend says; None restores the backend's answer."""
    with _lock:
        if value is None:
            _overrides.pop(device_type, None)
        else:
            _overrides[device_type] = bool(value)


def why_not(device_type: str) -> str | None:
    """None if groups on `device_type` are fused, else the reason why they are not."""
    override = _overrides.get(device_type)
    if override is False:
        return because("disabled", f"fusion on {device_type} is switched off")
    backend = find_backend(device_type)
    if backend is None:
        return because("backend", f"no fusion backend for {device_type}")
    return None if override else backend.can_fuse()


def is_broken(device_type: str) -> bool:
    """Whether a device type has a backend that the user did not override; if it cannot fuse, something is missing."""
    return find_backend(device_type) is not None and _overrides.get(device_type) is None


# -- upfront -----------------------------------------------------------------------------------------------------------
def compile_upfront(registered: Registered, key: int, config: tuple[tuple[str, Any], ...]) -> KernelSpec:
    """The specification of a graph: everything that is known before an input is seen."""
    store = KernelStore()
    store.label = functools.partial(_label, key, registered.graph)
    return KernelSpec(
        key=key,
        graph=registered.graph,
        registered=registered,
        config=config,
        broadcast_groups=broadcast_groups(registered.graph, registered.pointwise),
        blocked=registered.blocked or _unlowered(registered.graph),
        fallback=Fallback(registered),
        store=store,
    )


def _label(key: int, graph: CanonicalGraph) -> str:
    ops = list(dict.fromkeys(n.op.removeprefix("aten.") for n in graph.calls))
    return f"fusion {key} ({' '.join(ops[:6])}{' …' if len(ops) > 6 else ''})"


def _unlowered(graph: CanonicalGraph) -> tuple[str, ...]:
    if "fuser.pipeline" not in sys.modules:
        known = plans.operators()
        others = [op for op in dict.fromkeys(node.op for node in graph.calls) if op not in known]
        answers = {op: refusals.recall(_QUESTION.format(op)) for op in others} if known else {}
        if known and None not in answers.values():
            return _sentences(answers)
        toolchain.warm_up()  # in parallel with the imports, which take as long
        import_at_rest("fuser.pipeline")

        if not known:
            _beside(_keep_operators)
    else:
        others = list(dict.fromkeys(node.op for node in graph.calls))
    found = {op: why_not_lowered([op]) for op in others}
    for op, reason in found.items():
        _remember(op, reason)
    return _sentences(found)


def _keep_operators() -> None:
    """Keep the lowered operators for processes that only look up kernels and do not import the lowerings."""
    from fuser import pipeline
    from fuser.lowering import registry

    plans.keep_operators(pipeline.lowered_operators(), pipeline.unordered_operators(), registry.VIEWS)


def _remember(op: str, reason: str | None) -> None:
    """Keep the reason why an operator is not lowered for other processes, if it is not."""
    if reason is not None and not config.check_ir and refusals.recall(_QUESTION.format(op)) is None:
        refusals.remember(_QUESTION.format(op), reason)


def _beside(function: Callable[[], object]) -> None:
    """Run `function`, which only other processes need, in a non-daemon thread; at once if no thread can be started."""
    here = as_here(function)
    if workers.start(here, "fuser-beside", daemon=False) is None:
        here()


_QUESTION = "why is {} not lowered?"


def _sentences(reasons: Mapping[str, str | None]) -> tuple[str, ...]:
    return tuple(
        reason if op in reason else told(reason, f"{op}: {reason}")
        for op, reason in reasons.items()
        if reason is not None
    )


def why_not_lowered(operators: Iterable[str]) -> str | None:
    """None if every one of these canonical operators can be lowered, else the reason for the first that cannot."""
    from fuser import pipeline

    return pipeline.why_not_lowered(operators)


def lowered_of(operators: Iterable[str]) -> frozenset[str]:
    """The operators among these that kernels of some device can contain."""
    if _REGISTRY not in sys.modules and (known := plans.operators()):
        return known.intersection(operators)
    from fuser.lowering import registry

    return frozenset(op for op in operators if registry.supports(op) is None)


def views() -> frozenset[str]:
    """The ATen operators with a lowering whose result aliases their first argument."""
    if _REGISTRY not in sys.modules and (known := plans.views()):
        return known
    from fuser.lowering import registry

    return frozenset(registry.VIEWS)


def why_not_on(operator: str, device_type: str) -> str | None:
    """None if kernels on a device can contain this ATen operator, else the reason."""
    if _REGISTRY not in sys.modules:
        target = targets.known(device_type)
        if target is not None and target.ordered and operator in plans.operators(ordered=True):
            return None
        kept = refusals.recall(_QUESTION.format(operator))
        if kept:
            return kept
    from fuser.lowering import registry

    reason = registry.supports(operator, device_type)
    if registry.find(operator) is None:
        _remember(operator, reason)
    return reason


_REGISTRY = "fuser.lowering.registry"  # used if it is already imported


def broadcast_groups(graph: CanonicalGraph, pointwise: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """The sets of inputs that are combined in one elementwise computation, through elementwise operations alone.

    Such inputs have to broadcast together. There is one set for each elementwise value that no other elementwise
    operation reads, if more than one input reaches it.
    """
    reach = [0] * len(graph.nodes)  # bit i: input i
    read: set[int] = set()
    for node in graph.nodes:
        if node.index < graph.n_inputs:
            reach[node.index] = 1 << node.index
        elif node.index in pointwise:
            for i in refs_of(node.args):
                reach[node.index] |= reach[i]
                read.add(i)
    roots = {reach[i] for i in pointwise if i not in read}
    return tuple(_bits(mask) for mask in sorted(roots) if mask & (mask - 1))


def _bits(mask: int) -> tuple[int, ...]:
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return tuple(out)


# -- runtime -----------------------------------------------------------------------------------------------------------
def compile_runtime(spec: KernelSpec, args: Sequence[Any]) -> FusedKernel:
    """The kernel of `spec` for arguments like `args` (bound tensors first). Raises Unsupported or CompileError.

    An earlier process may have compiled it. With `config.check_ir` it is compiled again, so that it can be checked.
    """
    device_type = _device_type(args)
    backend = find_backend(device_type)
    if backend is None:
        raise Unsupported(because("backend", f"no fusion backend for {device_type}"))
    with span("compile", device=device_type, group=str(spec.key), operators=len(spec.graph.calls)) as noted:
        kernel = _found_or_made(spec, args, backend)
        noted.note(kernel=kernel.name, restored=isinstance(kernel, plans.KeptKernel))
        return kernel


def backend_of(args: Sequence[Any]) -> FusionBackend | None:
    """The backend of the arguments' device, or None."""
    return find_backend(_device_type(args))


def _found_or_made(spec: KernelSpec, args: Sequence[Any], backend: FusionBackend) -> FusedKernel:
    if not isinstance(backend, KeepingBackend) or config.check_ir:
        return _make(spec, args, backend)
    machine = backend.machine()
    key = plans.key_of(spec, args, machine)
    kept = plans.find(key, backend) if key is not None else None
    if kept is not None:
        COUNTS.add("restored")
        return kept
    refused = refusals.find(key, spec.graph, backend) if key is not None else None
    if refused is not None and refused.reason is not None:
        raise Unsupported(refused.reason)
    if machine is not None and _made_elsewhere(spec, args):
        kept = plans.find(str(key), backend, elsewhere=False)
        if kept is not None:
            COUNTS.add("made")
            return kept
    made = _make(spec, args, backend)
    if key is not None and machine is not None:
        plans.keep(key, made, backend, {**plans.facts(spec, args), **backend.machine_facts()})
    return made


def _made_elsewhere(spec: KernelSpec, args: Sequence[Any], refusals_only: bool = False) -> bool:
    from fuser import elsewhere  # processes that find their kernels do not need it

    return elsewhere.make(spec, args, refusals_only)


def _make(spec: KernelSpec, args: Sequence[Any], backend: FusionBackend) -> FusedKernel:
    why = backend.why_not_made() if isinstance(backend, CpuBackend) else None
    if why is not None:
        raise NotPrebuilt(because("compiler", f"its kernel is not among the prebuilt ones, and {why}"))
    source: Any = generate(spec, args, backend)
    if config.max_autotune and isinstance(backend, TuningBackend):
        with span("tune"):
            source = backend.tune(source, args)
    with span("build"):
        made = backend.compile(source)
    COUNTS.add("made")
    return made


def generate(spec: KernelSpec, args: Sequence[Any], backend: FusionBackend) -> Source:
    """The source of the kernel of `spec` for arguments like `args`, without compiler and device."""
    import_at_rest("fuser.pipeline")
    from fuser import pipeline

    return pipeline.generate(spec.graph, args, backend)


def find_refused(spec: KernelSpec, args: Sequence[Any], reason: str | None = None) -> Refusals:
    """The calls of `spec` that no kernel can compute for arguments like `args`, and an example of each value.

    `reason` is why the whole group has no kernel, if that depends only on group and arguments. It is kept with the
    result.
    """
    backend = find_backend(_device_type(args))
    keeper = backend if isinstance(backend, KeepingBackend) and not config.check_ir else None
    machine = keeper.machine() if keeper is not None else None
    key = plans.key_of(spec, args, machine) if keeper is not None else None
    if key is not None and keeper is not None:
        kept = refusals.find(key, spec.graph, keeper)
        if kept is None and machine is not None and _made_elsewhere(spec, args, refusals_only=True):
            kept = refusals.find(key, spec.graph, keeper)
        if kept is not None:
            return kept.found
    from fuser import pipeline

    found = pipeline.find_refused(spec.graph, args, backend)
    if key is not None and keeper is not None and machine is not None:
        about = {**plans.facts(spec, args), **keeper.machine_facts()}
        refusals.keep(key, refusals.Refusal(reason, found), about)
    return found


def _device_type(args: Sequence[Any]) -> str:
    return next((a.device.type for a in args if isinstance(a, torch.Tensor)), targets.HOST)
