"""The calls of torch's own modules, for graphs of `torch.fx.symbolic_trace`, which keeps calls of modules."""

from __future__ import annotations

import torch

_HOOKS = tuple(name for name in vars(torch.nn.Module()) if name.endswith("_hooks"))
# In training mode these draw or write, and the mode may change after registration: they are not inlined.
_MODAL = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return not is_plain(m)


def is_plain(module: torch.nn.Module) -> bool:
    """Whether a module is an unchanged one of `torch.nn`, without hooks, that does the same in either mode."""
    own = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    return own and not isinstance(module, _MODAL) and not any(vars(module).get(name) for name in _HOOKS)


def graph_of(module: torch.nn.Module) -> torch.fx.Graph | None:
    """The calls that a plain module makes; None for other modules, or if the calls depend on more than tensors."""
    if not is_plain(module):
        return None
    try:
        return _Tracer().trace(module)
    except Exception:  # torch.fx.Proxy raises errors of many kinds if control flow depends on a value
        return None
