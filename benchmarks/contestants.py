"""Who competes: how each contestant compiles a function, and why one is absent."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import frozen

Fn = Callable[..., Any]
RIVALS = ("eager", "inductor", "xla")
FROZEN = tuple(frozen.COMPILE)  # rivals that run only where they are named


def fuser_backend() -> Any:
    """What `torch.compile(backend=...)` takes for fuser: its name where installed, else the function of a checkout."""
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name="fuser"):
        return "fuser"
    return importlib.import_module("fuser.frontends.dynamo").fuser_backend


def fuser_function() -> Any:
    """The function behind the name, which starts sooner: Dynamo is imported by the package."""
    import fuser

    return fuser.backend


def why_absent(name: str) -> str | None:
    """A sentence if the contestant cannot run here, else None. Imports nothing heavy."""
    if name.startswith("fuser"):
        needed = ("fuser.interface", *(("fuser.frontends.dynamo",) if name != "fuser handle" else ()))
        missing = [m for m in needed if importlib.util.find_spec(m) is None]
        return f"{name}: this checkout has no {missing[0]}" if missing else None
    for module in frozen.NEEDED.get(name, ()):
        if importlib.util.find_spec(module) is None:
            return f"{name}: {module} is not installed (pip install fuser[rivals])"
    if name == "xla" and importlib.util.find_spec("jax") is None:
        return "xla: jax is not installed (pip install jax)"
    return None


def present(names: list[str], notes: list[str]) -> list[str]:
    """The names that can run; a sentence about each of the others is appended to `notes`."""
    absent = {name: why_absent(name) for name in names}
    notes.extend(reason for reason in absent.values() if reason)
    return [name for name in names if not absent[name]]


def register(fn: Fn | torch.fx.GraphModule) -> Fn:
    """fuser without torch.compile: symbolic trace, register, and the bound handle."""
    import fuser

    graph = fn if isinstance(fn, torch.fx.GraphModule) else torch.fx.symbolic_trace(fn)
    return fuser.fusion_handle(fuser.register_fusion(graph))


def _copy(fn: Fn) -> Fn:
    """The function with a code object of its own: Dynamo keeps its cache there, and contestants must not share one."""
    if not isinstance(fn, types.FunctionType):
        return fn
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name}_")
    return types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def _compiled(backend: str) -> Callable[..., Fn]:
    return lambda fn, dynamic=False: torch.compile(_copy(fn), backend=backend, dynamic=dynamic)


COMPILE: dict[str, Callable[..., Fn]] = {
    "eager": lambda fn, dynamic=False: fn,
    "fuser": lambda fn, dynamic=False: torch.compile(_copy(fn), backend=fuser_backend(), dynamic=dynamic),
    "fuser function": lambda fn, dynamic=False: torch.compile(_copy(fn), backend=fuser_function(), dynamic=dynamic),
    "fuser handle": lambda fn, dynamic=False: register(fn),
    "fuser-frozen": lambda fn, dynamic=False: torch.compile(
        _copy(fn), backend=fuser_backend(), dynamic=dynamic, options={"freeze": True}
    ),
    "inductor": _compiled("inductor"),
    "aot_eager": _compiled("aot_eager"),
    "dynamo": _compiled("eager"),
    **{n: lambda fn, dynamic=False, make=make: make(_copy(fn), dynamic=dynamic) for n, make in frozen.COMPILE.items()},
}


def compile_for(name: str, fn: Fn, dynamic: bool | None = False) -> Fn:
    """`fn` as the contestant runs it; compilation itself mostly happens at its first call.

    `dynamic` is torch.compile's. False keeps Dynamo from taking a second size as a symbol, and costs each call about
    4 µs inside torch; None is what a call without the argument does.
    """
    return COMPILE[name](fn, dynamic=dynamic)


def kernels_compiled() -> int | None:
    """How many kernels fuser has compiled in this process; None where it cannot say."""
    try:
        import fuser

        return int(fuser.num_compiled_kernels())
    except (ImportError, AttributeError):
        return None
