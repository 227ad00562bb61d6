"""The public interface: register, run, inspect, debug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.fx

from fuser import compiled_calls, compiler, config, orders
from fuser.arguments import why_unfit
from fuser.canonical import operators_of
from fuser.compiler import FusionBackend
from fuser.errors import BackendError, ConfigError, GraphError, InputError, Unsupported
from fuser.executor import register
from fuser.kernel_cache import REGISTRY, KernelSpec
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because
from fuser.runtime import heap, launcher
from fuser.runtime.foreign import Runtime
from fuser.targets import Target

Graph = torch.fx.Graph | torch.fx.GraphModule


# -- register and run --------------------------------------------------------------------------------------------------
def register_fusion(graph: Graph, *, functional: bool = False, in_place: bool = False) -> int:
    """Register a graph as a fusion group.

    An equal graph whose inputs have the same names gives the same key, which is valid until `unregister_fusion` was
    called as often as this function. A graph with other names shares the specification and its kernels. Tensors that
    the graph holds are bound as they are now. So are constants, if the graph differs from an earlier one in nothing
    else: all further ones share one specification. The settings that change generated code, and torch's default dtype,
    are the current ones. Nothing is compiled before the first call.

    Args:
        graph: a torch.fx Graph or GraphModule of calls of ATen or torch. Inputs are tensors of any dtype and size,
            numbers, and containers of these.
        functional: promises that nobody will write into the inputs or the results, so that a result may be a copy where
            eager gives a view.
        in_place: promises that an input into which the graph writes by `copy_` shares no memory with another input, so
            that a kernel may write it; the caller counts up its version.

    Returns:
        The key, a number that is the same in every process.

    Raises:
        GraphError: it is no graph, or one that can never run; the message names the node.
    """
    made = register(REGISTRY, graph, functional, in_place, by_name=True)
    REGISTRY.hold(made)
    return made.key


def unregister_fusion(key: int) -> None:
    """Undo one `register_fusion` that returned `key`.

    The last one removes the fusion: bound tensors, its kernels and their libraries are freed, at once or when the last
    of its handles and running calls ends. The key is valid until then; later it raises an UnknownKeyError.

    Args:
        key: what `register_fusion` returned.

    Raises:
        UnknownKeyError: no registration of the key is left in this process.
    """
    heap.give_back(REGISTRY.release(key))


def register_handle(
    graph: Graph, *, functional: bool = False, in_place: bool = False
) -> tuple[int, Callable[..., Any]]:  # fmt: skip
    """The key and handle of `graph`, registered while the handle is held. It takes inputs by position."""
    made = register(REGISTRY, graph, functional, in_place)
    return made.key, made.handle


def run_fusion(key: int, inputs: Sequence[Any]) -> list[Any]:
    """Run a registered fusion.

    Args:
        key: what `register_fusion` returned.
        inputs: one value for each placeholder of the graph, in order. A single tensor may stand alone.

    Returns:
        The results as a list, with eager's dtypes, sizes and strides, on the inputs' device.

    Raises:
        UnknownKeyError: the key is not registered in this process.
        InputError: a wrong number of inputs, or one that is neither tensor nor number where that is expected.
        Exception: whatever eager raises for these inputs.
    """
    registration = REGISTRY.find(key)
    if not isinstance(inputs, (list, tuple)):
        inputs = [inputs]
    result = registration.handle(*inputs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def fusion_handle(key: int) -> Callable[..., Any]:
    """Get a fusion's callable, the fastest way to run it: it returns a tensor, tuple, named tuple or list.

    It works as long as it is held, and keeps the fusion registered. It can be copied and pickled: another process, or
    this one, gets the handle of the same graph. Functions compiled with `fullgraph=True` may call it.

    Args:
        key: what `register_fusion` returned.

    Returns:
        A function of the graph's placeholders, by position or by name. Its `hits` and `misses` count calls,
        `kernel_count` kernels.

    Raises:
        UnknownKeyError: the key is not registered in this process.
    """
    found = REGISTRY.find(key).handle
    compiled_calls.allow(found)
    return found


def kernel_spec(key: int) -> KernelSpec:
    """The specification behind a key."""
    return REGISTRY.find(key).spec


def set_gradients(key: int, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let calls of a fusion whose arguments require gradients run `make(fallback)`, which is made on demand.

    `fallback` runs the fusion on ATen; both take the tensors and numbers bound at registration first.
    """
    registration = REGISTRY.find(key)
    if registration.runner.gradients is None:
        registration.runner.gradients = _WhenNeeded(make, registration.spec.fallback)


class _WhenNeeded:
    """Calls `make(fallback)`, made at the first call. It references no runner: see `kernel_cache.Registry`."""

    def __init__(self, make: Callable[[Callable[..., Any]], Callable[..., Any]], fallback: Callable[..., Any]) -> None:
        self._make, self._fallback = make, fallback
        self._made: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        made = self._made = self._made or self._make(self._fallback)
        return made(*args)


def prepare(key: int, examples: Sequence[Any]) -> Future[str | None]:
    """Compile in the background, so that the first call finds its kernel.

    Calls made in the meantime wait for it only if they are of the same class.

    Args:
        key: what `register_fusion` returned.
        examples: inputs of the class to compile for; they may be fake tensors and symbolic numbers. A single tensor may
            stand alone.

    Returns:
        A future, whose result is None, or the reason why there is no kernel.

    Raises:
        UnknownKeyError: the key is not registered in this process.
        InputError: a wrong number or type of examples.
        Unsupported: a size of an example depends on data, so it has no value yet.
    """
    registration = REGISTRY.find(key)
    return registration.runner.prepare(registration.arguments(examples))


def wait(timeout: float | None = None) -> bool:
    """Wait for all running background compilations.

    Args:
        timeout: seconds to wait at most; None waits for all.

    Returns:
        Whether all are done.

    Raises:
        InputError: the timeout is no number of seconds.
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
        raise InputError(f"wait was given {timeout!r}: expected seconds, or None")
    return orders.wait(timeout)


# -- interrogate -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fusibility:
    """A truth value, with the reason if it is false."""

    fusible: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.fusible


def is_fusible(node: torch.fx.Node) -> Fusibility:
    """Find out whether a node can be part of a kernel. Nothing is compiled; sizes and dtypes are not checked.

    Args:
        node: a node of a torch.fx graph of calls of ATen or torch. Only calls of functions and methods can be fused.

    Returns:
        A `Fusibility`, which is true or false; if it is false, its `reason` says why.

    Raises:
        GraphError: it is no node, or a call that can never run: an unknown method, or a wrong keyword.
    """
    if not isinstance(node, torch.fx.Node):
        raise GraphError(f"is_fusible was given a {type(node).__name__}: expected a torch.fx.Node of a graph")
    if node.op == "call_module":
        why = f"{node.name} calls a module: register the graph, or ask about the calls inside it"
        return Fusibility(fusible=False, reason=why)
    if node.op not in ("call_function", "call_method"):
        return Fusibility(fusible=False, reason=f"{node.name} is of the kind {node.op}, which computes nothing")
    operators, blocked = operators_of(node)
    reason = blocked[0] if blocked else compiler.why_not_lowered(operators)
    return Fusibility(reason is None, reason or "")


def can_fuse_on_cpu() -> bool:
    """Whether groups of CPU tensors are fused.

    Returns:
        True if `config.enabled` is set and the backend has what it needs: a C++ compiler or prebuilt kernels. A value
        given to `override_can_fuse_on_cpu` replaces the backend's answer.
    """
    return config.enabled and compiler.why_not("cpu") is None


def can_fuse_on_gpu() -> bool:
    """Whether groups of CUDA tensors are fused.

    Returns:
        True if `config.enabled` is set and the backend has what it needs, such as Triton and a driver. A value
        given to `override_can_fuse_on_gpu` replaces the backend's answer.
    """
    return config.enabled and compiler.why_not("cuda") is None


def override_can_fuse_on_cpu(value: bool | None) -> None:
    """Fuse on the CPU or not, from the next call on, whatever the backend says.

    Args:
        value: True fuses, False runs all groups of CPU tensors on ATen, None goes back to the backend's answer.

    Raises:
        ConfigError: the value is neither a bool nor None.
    """
    _override("cpu", value)


def override_can_fuse_on_gpu(value: bool | None) -> None:
    """Fuse on CUDA devices or not, from the next call on, whatever the backend says.

    Args:
        value: True fuses, False runs all groups of CUDA tensors on ATen, None goes back to the backend's answer.

    Raises:
        ConfigError: the value is neither a bool nor None.
    """
    _override("cuda", value)


def _override(device_type: str, value: bool | None) -> None:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"can_fuse on {device_type} was overridden by {value!r}: expected True, False or None")
    compiler.override_can_fuse(device_type, value)
    launcher.set_enabled(device_type, value is not False)
    _reconsider()


def _reconsider() -> None:
    for registration in REGISTRY.registrations():
        registration.runner.reconsider()


def register_fusion_backend(
    device_type: str, backend: FusionBackend | None, target: Target | None = None, runtime: Runtime | None = None
) -> None:
    """Have groups on a device compiled by a backend.

    Args:
        device_type: torch's name of the device, such as "cpu".
        backend: a `fuser.compiler.FusionBackend`, which makes code of scheduled loops; None takes it away, and a device
            of the package's own gets its own backend back.
        target: of a device from outside, the `fuser.targets.Target` that lowering and scheduler read.
        runtime: of a device from outside, the `fuser.runtime.foreign.Runtime` that allocates, loads and launches.

    Raises:
        BackendError: one of them is not what was expected; the message names what it lacks.
    """
    compiler.register_backend(device_type, backend, target, runtime)
    _reconsider()


def has_fusion_backend(device_type: str) -> bool:
    """Whether there is a backend for a device type. It may still be unable to fuse: `can_fuse_on_cpu` asks that.

    Args:
        device_type: torch's name of the device without an index, such as "cpu" or "cuda".

    Returns:
        True for the package's own backends and for those from `register_fusion_backend`.

    Raises:
        BackendError: the device type is no string.
    """
    if not isinstance(device_type, str):
        raise BackendError(f"{device_type!r} is no device type: expected one such as 'cpu' or 'cuda'")
    return compiler.find_backend(device_type) is not None


def num_compiled_kernels() -> int:
    """How many kernels this process has compiled or taken from the disk.

    Returns:
        The number since the process began; kernels of fusions that left are counted, too.
    """
    return REGISTRY.compiled.value


# -- debug -------------------------------------------------------------------------------------------------------------
def debug_launch_graph(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    """Register a graph and run it once, as `register_fusion` and `run_fusion` do. It stays registered.

    Args:
        graph: a torch.fx Graph or GraphModule, as for `register_fusion`.
        inputs: one value for each placeholder of the graph, in order. A single tensor may stand alone.

    Returns:
        The results as a list, with eager's dtypes, sizes and strides, on the inputs' device.

    Raises:
        GraphError: it is no graph, or one that can never run.
        InputError: a wrong number of inputs, or one that is neither tensor nor number where that is expected.
        Exception: whatever eager raises for these inputs.
    """
    return run_fusion(register_fusion(graph), inputs)


def debug_get_fused_kernel_code(graph: Graph, inputs: Sequence[Any]) -> str:
    """The source of the kernel that a graph would get for some inputs. Neither a compiler nor a run is needed.

    Args:
        graph: a torch.fx Graph or GraphModule, as for `register_fusion`.
        inputs: one value for each placeholder of the graph, in order. A single tensor may stand alone.

    Returns:
        C++ for inputs on the CPU, Python with Triton for inputs on a CUDA device.

    Raises:
        GraphError: it is no graph, or one that can never run.
        InputError: a wrong number of inputs, or one that is neither tensor nor number where that is expected.
        Unsupported: there would be no kernel; the message says why.
    """
    registration = register(REGISTRY, graph)
    args = registration.arguments(inputs)
    spec = registration.spec
    reason = spec.blocked[0] if spec.blocked else why_unfit(args)
    if reason is not None:
        raise Unsupported(reason)
    device_type = next(a.device.type for a in args if isinstance(a, torch.Tensor))
    backend = compiler.find_backend(device_type)
    if backend is None:
        raise Unsupported(because("backend", f"no fusion backend for {device_type}"))
    with config.override(**dict(spec.config)):
        return compiler.generate(spec, args, backend).text
