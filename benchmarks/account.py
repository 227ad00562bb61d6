"""What fuser made of the graphs it was given: a fast fallback must not pass for a fast compilation."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Account:
    """Graphs of `torch.compile`, taken together. `unfused` counts operators outside kernels by the reason why."""

    groups: int = 0
    kernels: int = 0
    ops_fused: int = 0
    unfused: dict[str, int] = field(default_factory=dict)

    @property
    def ops_unfused(self) -> int:
        """How many operators ran on ATen."""
        return sum(self.unfused.values())

    def text(self) -> str:
        """Fused of all, for a cell."""
        return f"{self.ops_fused}/{self.ops_fused + self.ops_unfused}"


def start() -> None:
    """Forget the graphs compiled so far, where fuser is here at all."""
    try:
        from fuser.frontends.records import forget_compilations
    except ImportError:
        return
    forget_compilations()


def take() -> Account | None:
    """The account since `start`; call it after the first run. None where fuser is not here or compiled nothing."""
    try:
        from fuser.frontends.records import compilations
        from fuser.interface import kernel_spec
    except ImportError:
        return None
    graphs = compilations()
    if not graphs:
        return None
    unfused: collections.Counter[str] = collections.Counter(op.reason for g in graphs for op in g.unfused)
    unfused.update(g.reason for g in graphs if g.route == "eager")
    groups = [group for g in graphs for group in g.groups]
    stores = {group.key: kernel_spec(group.key).store for group in groups}
    fused = 0
    for group in groups:
        reasons = stores[group.key].fallbacks
        if reasons:
            unfused[f"the group fell back: {next(iter(reasons))}"] += len(group.ops)
        else:
            fused += len(group.ops)
    return Account(len(groups), sum(len(s.kernels) for s in stores.values()), fused, dict(unfused))


def fallbacks() -> dict[str, int]:
    """Calls that ran by ATen in this process, by reason, whoever registered the graph."""
    try:
        from fuser.kernel_cache import REGISTRY
    except ImportError:
        return {}
    total: collections.Counter[str] = collections.Counter()
    for spec in REGISTRY.specs():
        total.update(spec.store.fallbacks)
    return dict(total)
