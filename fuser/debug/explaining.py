"""One fusion as text: its graph, its kernels with the arguments they accept, and why the rest runs on ATen."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import torch

from fuser import config, pipeline
from fuser.arguments import explain_entry
from fuser.debug.guarding import guards_of
from fuser.debug.reference import print_lowered
from fuser.debug.reporting import why_unfused
from fuser.errors import FuserError
from fuser.kernel_cache import REGISTRY, KernelSpec
from fuser.kernel_spec import LaunchProgram
from fuser.lowering.graph import Lowered, lower_graph
from fuser.scheduler.schedule import Schedule, schedule


def explain_key(key: int) -> str:
    """The explanation of the fusion `key` as text. UnknownKeyError if there is none."""
    registration = REGISTRY.find(key)
    spec = registration.spec
    count = len(spec.graph.calls)
    lines = [f"fusion {key}, {count} operation{'s' * (count != 1)}, hash {spec.hash[:16]}", *_graph_lines(spec)]
    if registration.bound:
        numbers = ", ".join(str(v) for v in registration.bound if not isinstance(v, torch.Tensor))
        lines.append(f"bound at registration: the first {len(registration.bound)} inputs{numbers and f' ({numbers})'}")
    for group in spec.broadcast_groups:
        lines.append(f"broadcast together: {', '.join(f'%{i}' for i in group)}")
    if spec.blocked:
        lines.append("never fused:")
        lines += [f"  {reason}" for reason in spec.blocked]
    lines += _kernel_lines(spec)
    for made in spec.store.splits:
        lines.append(f"split into the fusions {', '.join(map(str, made.keys))}, and by ATen:")
        lines += [f"  {op.op}: {op.reason}" for op in made.unfused]
    hits = getattr(registration.runner.handle, "hits", 0)
    if hits:
        lines.append(f"{hits} call{'s' * (hits != 1)} ran by kernels")
    split = bool(spec.store.splits)
    for reason, count in spec.store.fallbacks.items():
        lines.append(f"{count} call{'s' * (count != 1)} ran by ATen{', in part' * split}: {reason}")
    why = why_unfused(spec)
    lines.append("fused" if why is None else f"not fused{' as one group' * split}: {why}")
    return "\n".join(lines) + "\n"


def _graph_lines(spec: KernelSpec) -> list[str]:
    return [f"  {line}" for line in spec.graph.text.splitlines()[1:]]


def _kernel_lines(spec: KernelSpec) -> list[str]:
    lines: list[str] = []
    for entry in spec.store.entries:
        lines.append(f"class {explain_entry(entry)} ({entry.seconds:.2f} s)")
        for kernel in entry.kernels:
            lines.append(f"  {kernel.name}: {kernel.library}")
            if isinstance(getattr(kernel, "program", None), LaunchProgram):
                lines += [f"    {line}" for line in str(guards_of(kernel.name, kernel.program)).splitlines()[1:]]
            lines += [f"    apart: {' '.join(map(str, r))}" for r in getattr(kernel, "reasons", ())]
    return lines


def dump(key: int, folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Write a fusion's graph, fallback, explanation, IR and kernels' sources into a folder.

    Args:
        key: what `register_fusion` returned.
        folder: where to write; made if there is none. Files of the same names are replaced.

    Returns:
        The paths written: graph.txt, fallback.py, explain.txt, an IR for each class of arguments, a source for each
        kernel.

    Raises:
        UnknownKeyError: the key is not registered in this process.
        OSError: the folder cannot be made or written.
    """
    spec = REGISTRY.find(key).spec
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"graph.txt": spec.graph.text, "fallback.py": spec.fallback.source, "explain.txt": explain_key(key)}
    for n, entry in enumerate(spec.store.entries):
        texts[f"class{n}.ir.txt"] = ir_text(spec, entry.example)
    for kernel in spec.store.kernels:
        suffix = ".cpp" if str(kernel.library).endswith(".so") else ".py"
        texts[re.sub(r"\W+", "_", kernel.name) + suffix] = kernel.source
    paths = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text)
        paths.append(path)
    return paths


def ir_text(spec: KernelSpec, described: tuple[Any, ...]) -> str:
    """The lowered graph and its kernel plans as text, for arguments like those that it was compiled for."""
    try:
        return print_lowered(*planned(spec, described))
    except FuserError as e:
        return f"not lowered: {e}\n"


def planned(spec: KernelSpec, described: tuple[Any, ...]) -> tuple[Lowered, Schedule]:
    """The lowered graph and its kernel plans, for arguments like those that it was compiled for. Raises FuserError."""
    example = fake_of(described)
    numbers = frozenset(i for i, a in enumerate(example) if not isinstance(a, torch.Tensor))
    with config.override(**dict(spec.config)):
        lowered = lower_graph(pipeline.with_numbers(spec.graph, numbers), example, config.numerics)
        return lowered, schedule(lowered, config.max_body_rows)


def fake_of(described: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fake tensors and numbers like those of a described example."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return tuple(_fake(*a) if isinstance(a, tuple) else a for a in described)


def _fake(dtype: torch.dtype, device_type: str, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device_type)
