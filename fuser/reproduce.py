"""Reproducers: a fusion and its inputs as a Python script, which compares its kernel with the fallback."""

from __future__ import annotations

import contextlib
import math
import operator
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from fuser import config
from fuser.canonical import Ref, Row
from fuser.fallback import is_plain_name, text_of
from fuser.kernel_cache import KernelSpec
from fuser.runtime import files

_MODULES = {"operator": operator, "math": math, "torch": torch, "torch.nn.functional": torch.nn.functional}

_SCRIPT = '''\
{why}
import math, operator, pathlib, sys
import torch, torch.fx
import fuser
from fuser import config, debug
from fuser.interface import kernel_spec
from fuser.verify import difference

inf, nan = math.inf, math.nan
bound, inputs = torch.load(pathlib.Path(__file__).with_suffix(".pt"), weights_only=True)
root = torch.nn.Module()
for i, t in enumerate(bound):
    root.register_buffer(f"b{{i}}", t)
g = torch.fx.Graph()
{graph}
with config.override({settings}):
    key = fuser.register_fusion(torch.fx.GraphModule(root, g), functional={functional})
    spec = kernel_spec(key)
    got = fuser.fusion_handle(key)(*inputs)
want = spec.fallback(*bound, *inputs)
wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in (*bound, *inputs)]
problem = difference(got, want, (*bound, *inputs), lambda: spec.fallback(*wide))
print(debug.explain(key))
sys.exit(problem or 0)
'''


def write_reproducer(spec: KernelSpec, args: Sequence[Any], why: str, folder: str | None = None) -> str:
    """Write the script and its inputs (`args`, bound tensors first), for this user alone; returns the script's path.

    It is written to `folder`; without one to the cache, or to a new folder if the cache cannot be used. Raises
    TypeError if the graph holds Python objects that no script can name.
    """
    graph = "\n".join(_graph_lines(spec))
    path = _place(folder) / f"{spec.hash[:12]}.py"
    n = sum(isinstance(value, torch.Tensor) for value in spec.registered.bound)
    with files.working_folder(path.parent) as work:
        torch.save((list(args[:n]), list(args[n:])), work / "tensors")
        files.put(work / "tensors", path.with_suffix(".pt"), sealed=False)
    settings = ", ".join(f"{k}={v!r}" for k, v in (*spec.config, ("verify", 0)))
    text = _SCRIPT.format(why=repr(why), graph=graph, settings=settings, functional=spec.graph.functional)
    files.write(path, text.encode(), sealed=False)
    return str(path)


def _place(folder: str | None) -> pathlib.Path:
    if folder is not None:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        return pathlib.Path(folder)
    if config.cache_dir:
        with contextlib.suppress(OSError):
            return files.folder(config.cache_dir, "reproducers")
    return pathlib.Path(tempfile.mkdtemp(prefix="fuser-reproducer-"))


def _graph_lines(spec: KernelSpec) -> list[str]:
    lines = []
    defaults = iter(spec.registered.inputs)
    for row in spec.registered.rows:
        lines.append(f"v{row.index} = {_lifted(row, spec) or _row(row, defaults)}")
    return [*lines, f"g.output({_value(spec.registered.output)})"]


def _lifted(row: Row, spec: KernelSpec) -> str | None:
    """The source of a placeholder for a bound number, one of the kernel's first inputs; None for other rows."""
    value = spec.registered.bound[row.target.index] if row.op == "get_attr" and isinstance(row.target, Ref) else None
    kind = type(value).__name__
    return f'g.placeholder("c{row.index}", type_expr={kind})' if isinstance(value, (int, float)) else None


def _row(row: Row, names: Any) -> str:
    if row.op == "placeholder":
        return f"g.placeholder({next(names)!r})"
    if row.op == "get_attr":
        return f'g.get_attr("b{row.target.index}")' if isinstance(row.target, Ref) else _value(row.target)
    target = repr(row.target) if row.op == "call_method" else path_of(row.target)
    kwargs = "{" + ", ".join(f"{k!r}: {_value(v)}" for k, v in row.kwargs.items()) + "}"
    return f"g.{row.op}({target}, {_value(row.args)}, {kwargs})"


def _value(value: Any) -> str:
    return text_of(value, _leaf)


def _leaf(value: Any) -> str:
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if value is None or value is Ellipsis or type(value) in (int, float, bool, complex, str):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return repr(value)
    return path_of(value)


def path_of(thing: Any) -> str:
    """An expression for `thing` in a script with `torch`, `operator` and `math`. TypeError if there is none."""
    if isinstance(thing, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "".join(["torch.ops", *map(_attribute, str(thing).replace("::", ".").split("."))])
    name = getattr(thing, "__name__", "")
    for path, module in _MODULES.items():
        if name and getattr(module, name, None) is thing:
            return path + _attribute(name)
    home = sys.modules.get(getattr(thing, "__module__", None) or "")
    if home is not None and name and getattr(home, name, None) is thing:
        return f"__import__({home.__name__!r}, fromlist=[{name!r}])" + _attribute(name)
    raise TypeError(f"the graph holds {thing!r}, which a script cannot name")


def _attribute(name: str) -> str:
    if not is_plain_name(name):
        raise TypeError(f"the graph holds {name!r}, which a script cannot name")
    return f".{name}"


__all__ = ["path_of", "write_reproducer"]
