"""Guarantees: the calls of a block, or of a function in a test, are fused, or an error is raised."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fuser import config, interface
from fuser.debug.explaining import planned
from fuser.debug.explanation import Explanation
from fuser.debug.gathering import explanation_of, graph_break_count, graph_breaks
from fuser.debug.models import explain_model
from fuser.errors import ConfigError, FuserError, NotFusedError
from fuser.frontends.guarantees import ALLOWED, complain
from fuser.frontends.records import collected
from fuser.ir.loop_body import loads_in
from fuser.kernel_cache import REGISTRY

settings: Any = config  # its attributes are made from a table


@contextlib.contextmanager
def require_fused(max_kernels: int | None = None) -> Iterator[None]:
    """Require that everything compiled and called in this block is fused, except products, convolutions and attention.

    A graph with another operator on ATen raises a NotFusedError when it is compiled, and a group that runs on ATen
    when it is called. A graph break raises one at the end of the block; so do more than `max_kernels` kernels of all
    graphs compiled here. The error names operators, lines and reasons. Functions compiled before are checked only when
    called.

    Args:
        max_kernels: the most loop nests of all graphs compiled in the block; None allows any number.

    Returns:
        A context manager without a value, for a `with` statement. The errors are raised inside the block and at its
        end.

    Raises:
        NotFusedError: an AssertionError; see above.
        ConfigError: `max_kernels` is no number.
    """
    most = settings.MANY if max_kernels is None else config.check("require_fused", max_kernels)
    before, breaks = _fallbacks(), graph_break_count()
    with config.override(require_fused=True), collected() as records:
        yield
    interface.wait()
    e = explanation_of(records, graph_breaks(breaks), ())
    said = [*_why_not(e), *(f"{n} calls ran on ATen: {why}" for why, n in (_fallbacks() - before).items())]
    complain(said, _launches(e), most)


def assert_fused(
    function: Callable[..., Any], *args: Any, kernels: int | None = None, reads: int | None = None, **kwargs: Any
) -> Explanation:
    """Compile and call `function`; AssertionError, with the reasons, unless all is fused except calls of libraries.

    Args:
        function: a function, a module, or what `torch.compile` returned.
        *args: positional arguments of the call.
        kernels: the most loop nests that it may launch, forward and backward together.
        reads: the most tensors that these read from memory, each counted once for each loop nest.
        **kwargs: keyword arguments of the call.

    Returns:
        The explanation, as `fuser.explain` gives it.

    Raises:
        NotFusedError: an AssertionError that names operators, lines and reasons.
        ConfigError: `kernels` or `reads` is no number.
    """
    for name, most in (("kernels", kernels), ("reads", reads)):
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise ConfigError(f"{name}={most!r}: expected the most that are allowed, such as 1")
    e = explain_model(function, *args, **kwargs)
    complain(_why_not(e), _launches(e), settings.MANY if kernels is None else kernels)
    found = sum(_reads(g.key) for g in e.groups) if reads is not None else 0
    if reads is not None and found > reads:
        raise NotFusedError(f"its kernels read {found} tensors: expected {reads} at most\n{e}")
    return e


def _why_not(e: Explanation) -> list[str]:
    said = [f"graph break at {b.source or 'an unknown line'}: {b.reason.splitlines()[0]}" for b in e.breaks]
    said += [f"a graph runs in eager, because {g.reason}" for g in e.graphs if g.route == "eager"]
    said += [
        f"{o.op} at {o.source or 'an unknown line'} [{o.code}]: {o.reason}"
        for o in e.not_fused
        if o.code not in (*ALLOWED, "not_run")
    ]
    return said


def _launches(e: Explanation) -> int:
    return sum(k.launches for g in e.groups for k in g.kernels[:1])


def _fallbacks() -> Counter[str]:
    found: Counter[str] = Counter()
    for spec in REGISTRY.specs():
        found.update(spec.store.fallbacks)
    return found


def _reads(key: int) -> int:
    """The tensors that a group's loop nests read, each once for each loop nest, lowered for its first call."""
    spec = REGISTRY.find(key).spec
    example = next((entry.example for entry in spec.store.entries if entry.example), None)
    if example is None:
        return 0
    try:
        _, schedule = planned(spec, example)
    except FuserError:
        return 0
    return sum(len({row.buffer for row in loads_in(p.rows)}) for p in schedule.plans)


__all__ = ["assert_fused", "require_fused"]
