"""A fused script as text: its graph, its groups with their kernels, and why the rest runs as before."""

from __future__ import annotations

from typing import Any

from fuser.debug.explaining import explain_key
from fuser.errors import InputError
from fuser.frontends.script_fusion import Fused, ScriptGroup
from fuser.frontends.script_special import Specialised


def graph_for(fused: Any, *inputs: Any) -> str:
    """The graph of a script from `fuse_script`, with its groups and the nodes outside of them, as text.

    Args:
        fused: what `fuse_script` returned.
        *inputs: positional arguments of a call that is made first, so that the kernels of that call are included.

    Returns:
        The TorchScript graph, each group with its kernels, and each node that is not fused with its reason.

    Raises:
        InputError: `fused` is not from `fuse_script`.
        Exception: whatever the call raises.
    """
    if not isinstance(getattr(fused, "fusion", None), Fused):
        raise InputError(f"graph_for was given a {type(fused).__name__}: expected what fuser.fuse_script returns")
    if inputs:
        fused(*inputs)
    found: Fused = fused.fusion
    parts = [str(found.graph).rstrip()]
    parts += [_group(g) for g in {g.operator.name: g for g in found.groups}.values()]
    counted: dict[str, int] = {}
    for node in found.unfused:
        text = f"  {node.kind}: {node.reason}{f' ({node.line})' if node.line else ''}"
        counted[text] = counted.get(text, 0) + 1
    if counted:
        parts.append("\n".join(["not fused:", *(f"{t}{f', {n} times' if n > 1 else ''}" for t, n in counted.items())]))
    return "\n\n".join(parts) + "\n"


def _group(group: ScriptGroup) -> str:
    where = [f"  from {line}" for line in group.lines]
    told = [f"  {line}" for line in explain_key(group.key).splitlines()]
    handle = group.operator.handle
    if isinstance(handle, Specialised):
        told += [f"  runs on ATen: {reason}" for reason in handle.reasons]
        for values, key in handle.keys.items():
            told += [f"  for {values}:", *(f"    {line}" for line in explain_key(key).splitlines())]
    return "\n".join([f"{group.operator.name}: {', '.join(group.calls)}", *where, *told])
