"""Entry points: `dynamo` for torch.compile, `torchscript` for functions and modules of torch.jit."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import a frontend when it is first accessed."""
    if name in ("dynamo", "torchscript"):
        return importlib.import_module(f"fuser.frontends.{name}")
    raise AttributeError(f"module 'fuser.frontends' has no attribute {name!r}: expected dynamo or torchscript")
