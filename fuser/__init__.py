"""Just-in-time fusion for PyTorch."""

import importlib
import sys
import types
from typing import Any

from fuser.startup import collector_at_rest

with collector_at_rest():
    from fuser import config, errors, logs
    from fuser.interface import (
        can_fuse_on_cpu,
        can_fuse_on_gpu,
        debug_get_fused_kernel_code,
        debug_launch_graph,
        fusion_handle,
        has_fusion_backend,
        is_fusible,
        num_compiled_kernels,
        override_can_fuse_on_cpu,
        override_can_fuse_on_gpu,
        prepare,
        register_fusion,
        register_fusion_backend,
        run_fusion,
        unregister_fusion,
        wait,
    )

_settings: Any = config  # its attributes are made from a table
logs.register()
_settings.watch("log", lambda: logs.apply(_settings.log))
logs.apply(_settings.log)

__version__ = "0.1.0"
__all__ = [
    "can_fuse_on_cpu",
    "can_fuse_on_gpu",
    "config",
    "debug_get_fused_kernel_code",
    "debug_launch_graph",
    "errors",
    "explain",
    "fuse_script",
    "fusion_handle",
    "has_fusion_backend",
    "is_fusible",
    "num_compiled_kernels",
    "override_can_fuse_on_cpu",
    "override_can_fuse_on_gpu",
    "prepare",
    "profile",
    "prometheus",
    "register_decomposition",
    "register_fusion",
    "register_fusion_backend",
    "register_lowering",
    "register_op",
    "register_pass",
    "register_reduction",
    "require_fused",
    "run_fusion",
    "stats",
    "unregister_fusion",
    "wait",
]


# Modules, and attributes of modules, that are imported on first access.
_LATER: dict[str, tuple[str, str]] = {
    **{name: (name, "") for name in ("aot", "cache", "debug", "frontends", "passes", "testing")},
    "backend": ("frontends.dynamo", "fuser_backend"),
    "explain": ("debug.models", "explain_model"),
    "require_fused": ("debug.guaranteeing", "require_fused"),
    "fuse_script": ("frontends.fuse_script", "fuse_script"),
    "profile": ("debug.profiling", "profile"),
    **{name: ("metrics", name) for name in ("prometheus", "stats")},
    **{name: ("passes.extending", name) for name in (
        "register_decomposition", "register_lowering", "register_op", "register_pass", "unregister_decomposition",
        "unregister_lowering", "unregister_op",
    )},
    **{name: ("passes.own_reductions", name) for name in ("register_reduction", "unregister_reduction")},
}


class _Package(types.ModuleType):
    """The package itself, which is not a backend."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error for `torch.compile(model, backend=fuser)`: a ConfigError with the two valid forms."""
        error = errors.ConfigError("backend=fuser is the package: expected backend='fuser' or backend=fuser.backend")
        raise importlib.import_module("fuser.frontends.guarantees").in_dynamo(error)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a module or attribute of `_LATER` on first access.

    `fuser.backend` is the function behind `torch.compile(model, backend="fuser")`, and may be passed in place of the
    name: then Dynamo is imported without garbage collections, and the first call comes 0.4 s sooner.
    """
    if name not in _LATER:
        said = ": torch.compile(model, backend='fuser') fuses a model" if name in ("compile", "jit", "optimize") else ""
        raise AttributeError(f"module 'fuser' has no attribute {name!r}{said}", name=name, obj=sys.modules[__name__])
    module, attribute = _LATER[name]
    found = importlib.import_module(f"fuser.{module}")
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATER})
