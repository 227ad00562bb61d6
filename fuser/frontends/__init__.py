"""Ways in: `dynamo` for torch.compile, `torchscript` for what torch.jit has scripted or traced."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """The frontends are imported when they are first asked for."""
    if name in ("dynamo", "torchscript"):
        return importlib.import_module(f"fuser.frontends.{name}")
    raise AttributeError(f"module 'fuser.frontends' has no attribute {name!r}: expected dynamo or torchscript")
