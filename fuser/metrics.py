"""Metrics of the process, as a dict and as text for Prometheus: one table, `METRICS`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fuser import config
from fuser.kernel_cache import REGISTRY
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import launcher, pool, warm
from fuser.runtime.background import COMPILERS
from fuser.runtime.counting import COUNTS

settings: Any = config  # its attributes are made from a table


@dataclass(frozen=True)
class Metric:
    """One metric. A "counter" only increases in a process, a "gauge" may decrease. `label`: one for each reason."""

    name: str
    kind: str
    help: str
    read: Callable[[], Any]
    label: str = ""


def _handles() -> list[Any]:
    return [r.runner.handle for r in _alive().values()]


def _alive() -> dict[int, Any]:
    """One registration of each specification: several share a handle."""
    return {id(r.spec): r for r in REGISTRY.registrations()}


def _fallbacks() -> dict[str, int]:
    found: Counter[str] = Counter()
    for spec in REGISTRY.specs():
        found.update(spec.store.fallbacks)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _cache_files() -> Iterator[int]:
    """The bytes of each file in the cache."""
    for folder, _, names in os.walk(settings.cache_dir) if settings.cache_dir else ():
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(found.st_mode):
                    yield found.st_size


def _counted(name: str) -> Callable[[], float]:
    return lambda: COUNTS[name]


METRICS: tuple[Metric, ...] = (
    Metric("groups", "gauge", "fusion groups that are alive, equal ones once", lambda: len(REGISTRY.specs())),
    Metric("kernels", "gauge", "kernels of these groups", lambda: sum(len(s.store.kernels) for s in REGISTRY.specs())),
    Metric("libraries", "gauge", "libraries of CPU kernels that are loaded", launcher.loaded_libraries),
    Metric("compiles", "counter", "kernels that were lowered, scheduled and written as code", _counted("made")),
    Metric("restored", "counter", "kernels taken from an earlier process, without any of that", _counted("restored")),
    Metric("lowerings", "counter", "times that a group, or a part of one, was lowered", _counted("lowerings")),
    Metric("failures", "counter", "kernels that could not be made", _counted("failed")),
    Metric("binaries_made", "counter", "libraries and GPU binaries made by a compiler", _counted("binaries_made")),
    Metric("binaries_found", "counter", "those of new kernels found on disk", _counted("binaries_found")),
    Metric("remote_hits", "counter", "entries taken from the remote cache", _counted("remote_hits")),
    Metric("remote_misses", "counter", "entries that it did not have", _counted("remote_misses")),
    Metric("remote_errors", "counter", "requests to it that failed", _counted("remote_errors")),
    Metric("remote_stored", "counter", "entries written to it", _counted("remote_stored")),
    Metric("compile_seconds", "counter", "seconds of making kernels, all threads together", _counted("seconds")),
    Metric("pending", "gauge", "compilations under way in the background", lambda: COMPILERS.busy),
    Metric("hits", "gauge", "calls that kernels of these groups answered", lambda: sum(h.hits for h in _handles())),
    Metric(
        "misses", "gauge", "calls of these groups that no kernel took at once",
        lambda: sum(h.misses for h in _handles()),
    ),
    Metric("fallbacks", "gauge", "calls of these groups that ran on ATen, whole or in part", _fallbacks, "reason"),
    Metric("pool_bytes", "gauge", "memory for temporaries, idle or in use",
           lambda: sum(pool.stats()[k] for k in ("idle_bytes", "used_bytes"))),
    Metric("output_bytes", "gauge", "memory of large results that is held for later ones",
           lambda: warm.outputs.stats()["held_bytes"]),
    Metric("cache_files", "gauge", "files in the cache folder", lambda: sum(1 for _ in _cache_files())),
    Metric("cache_bytes", "gauge", "their size", lambda: sum(_cache_files())),
)  # fmt: skip


def stats() -> dict[str, Any]:
    """Counts of this process so far.

    Groups that were unregistered and freed are not included in "hits", "misses" and "fallbacks".

    Returns:
        Numbers by the names in docs/metrics.md; "fallbacks" is a dict of calls by reason. Sizes are bytes, times
        seconds.
    """
    return {m.name: m.read() for m in METRICS}


def prometheus() -> str:
    """The metrics of `stats` in Prometheus' format.

    Returns:
        Text in Prometheus' exposition format. Names have the prefix `fuser_`, and counters the ending `_total`.
    """
    lines = []
    for m in METRICS:
        name = f"fuser_{m.name}{'_total' if m.kind == 'counter' else ''}"
        lines += [f"# HELP {name} {m.help}", f"# TYPE {name} {m.kind}"]
        value = m.read()
        lines += [f"{name} {value}"] if not m.label else [
            f'{name}{{{m.label}="{_escaped(reason)}"}} {number}' for reason, number in value.items()
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


__all__ = ["METRICS", "Metric", "prometheus", "stats"]
