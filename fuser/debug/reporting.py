"""Counts of what was fused in this process, and of what was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import field

from fuser.errors import InputError
from fuser.frontends.records import CompiledGraph, compilations, last_compilation
from fuser.kernel_cache import REGISTRY, KernelSpec
from fuser.lazy_dataclasses import dataclass

NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Report:
    """`groups` counts fusion groups including equal ones; `specs` distinct ones; `kernels` those compiled for them.

    `ops_fused` are operators in groups that have a kernel, `ops_unfused` the others by reason. `fallback_calls` are
    calls of groups that ran on ATen. Seconds are wall time, summed over threads.
    """

    groups: int = 0
    specs: int = 0
    kernels: int = 0
    ops_fused: int = 0
    ops_unfused: dict[str, int] = field(default_factory=dict)
    fallback_calls: dict[str, int] = field(default_factory=dict)
    compile_seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.groups} fusion groups of {self.specs} kinds, {self.kernels} kernels, {self.ops_fused} ops fused, "
            f"{sum(self.ops_unfused.values())} not, {self.compile_seconds:.2f} s compiling"
        ]
        lines += [f"  {count} ops not fused: {reason}" for reason, count in _by_count(self.ops_unfused)]
        lines += [f"  {count} calls ran by ATen: {reason}" for reason, count in _by_count(self.fallback_calls)]
        return "\n".join(lines)


def _by_count(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def report(keys: Iterable[int] | None = None, *, last: bool = False) -> Report:
    """Counts of fused and unfused operators: of the whole process, of some fusions, or of the last compiled graph.

    Args:
        keys: what `register_fusion` returned, for the numbers of these fusions alone.
        last: take only the graph that `torch.compile` compiled last. `keys` takes precedence.

    Returns:
        A `Report`: groups, kernels, operators, calls on ATen by reason, and seconds of compiling.

    Raises:
        UnknownKeyError: one of the keys is not registered in this process.
        InputError: `keys` is no list of keys.
    """
    if keys is not None and not isinstance(keys, Iterable):
        raise InputError(f"report was given a {type(keys).__name__}: expected keys, such as [key]")
    if keys is not None:
        return _sum([(r.spec, 1) for r in REGISTRY.registrations(keys)], ())
    if last:
        record = last_compilation()
        return _of_graphs([record]) if record is not None else Report()
    graphs = compilations()
    registrations = REGISTRY.registrations()
    known = {key for g in graphs for key in g.keys} | {k for r in registrations for k in _pieces(r.spec)}
    others = [(r.spec, 1) for r in registrations if r.key not in known]
    return _of_graphs(graphs, others)


def _of_graphs(graphs: list[CompiledGraph], others: list[tuple[KernelSpec, int]] | None = None) -> Report:
    uses = Counter(group.key for g in graphs for group in g.groups)
    alive = {r.key: r.spec for r in REGISTRY.registrations()}  # others left with their program
    groups = [(alive[key], count) for key, count in uses.items() if key in alive]
    outside = [op.reason for g in graphs for op in g.unfused]
    by_eager: Counter[str] = sum((g.by_eager for g in graphs), Counter())
    return _sum(groups + (others or []), outside, by_eager)


def _sum(groups: list[tuple[KernelSpec, int]], outside: Iterable[str], by_eager: Counter[str] | None = None) -> Report:
    fused = 0
    unfused = Counter(outside)
    groups = [part for spec, count in groups for part in _parts(spec, count, unfused)]
    specs = list(dict.fromkeys(spec for spec, _ in groups))
    for spec, count in groups:
        ops = count * sum(not _is_free(node.op) for node in spec.graph.calls)
        reason = why_unfused(spec)
        if reason is None:
            fused += ops
        elif ops:
            unfused[reason] += ops
    calls = Counter(by_eager or {})
    for spec in specs:
        calls.update(spec.store.fallbacks)
    return Report(
        groups=sum(count for _, count in groups),
        specs=len(specs),
        kernels=sum(len(spec.store.kernels) for spec in specs),
        ops_fused=fused,
        ops_unfused=dict(_by_count(unfused)),
        fallback_calls=dict(_by_count(calls)),
        compile_seconds=sum(spec.store.compile_seconds for spec in specs),
    )


def _pieces(spec: KernelSpec) -> tuple[int, ...]:
    """The keys of the groups that a group without a kernel was split into."""
    splits = spec.store.splits
    return splits[-1].keys if splits and not spec.store.kernels else ()


def _parts(spec: KernelSpec, count: int, unfused: Counter[str]) -> list[tuple[KernelSpec, int]]:
    """A group, or the groups it was split into; adds to `unfused` the calls between them."""
    keys = _pieces(spec)
    if not keys:
        return [(spec, count)]
    for op in spec.store.splits[-1].unfused:
        unfused[op.reason] += count
    return [part for key in keys for part in _parts(REGISTRY.find(key).spec, count, unfused)]


def _is_free(op: str) -> bool:
    return op == "getitem" or op.startswith(("host.", "sizes.", "prim."))


def why_unfused(spec: KernelSpec) -> str | None:
    """None if the group has a kernel, else the reason."""
    if spec.blocked:
        return spec.blocked[0]
    if spec.store.kernels:
        return None
    reasons = [e.reason for e in spec.store.entries if e.reason is not None]
    return reasons[-1] if reasons else next(reversed(spec.store.fallbacks), NOT_RUN)
