"""C++ for a kernel plan: returns strings, needs no compiler.

Three shapes of loop nest, told apart by which axis runs over vector lanes: pointwise (`pointwise.py`), row and column
reductions (`reduction.py`); few long reductions are split (`split.py`). Loops carry `#pragma omp simd` and cells are
scalar expressions: the compiler vectorises them for its widest unit. Pointwise loops over halves, whose conversions it
does not vectorise well, are spelled in explicit vectors too (`lanes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fuser import config
from fuser.cpu import bits, contraction, joined, pointwise, reduction, transposes
from fuser.cpu.accumulators import SHUFFLE_HELPER
from fuser.cpu.blocks import blocked
from fuser.cpu.chains import chained
from fuser.cpu.checked import CHECKED_HELPER
from fuser.cpu.facts import Facts
from fuser.cpu.ordered import scan, scatter
from fuser.cpu.parts import ZEROS
from fuser.cpu.records import Bindings, Function, Generated, Partial
from fuser.cpu.sharing import shared
from fuser.cpu.split import split
from fuser.cpu.streams import stream_helper
from fuser.cpu.text import FLOOR_HELPERS, HIDDEN_HELPER, PLACE_HELPERS
from fuser.cpu.vir.passes import through_passes
from fuser.cpu.vir.printer import Text
from fuser.cpu.vir.verifier import verify_kernel
from fuser.machines import Machine
from fuser.ops import CPP_TYPEDEFS, helpers_in, known_helpers, prelude_for
from fuser.scheduler.kernel_plan import KernelPlan
from fuser.scheduler.together import Joined

Helper = Callable[[frozenset[str], Machine], str]


def generate(plan: KernelPlan, name: str, bindings: Bindings) -> Generated:
    """C++ functions for `plan`."""
    return _through_passes(_functions(Facts(plan, name, bindings)), bindings.machine)


def generate_joined(both: Joined, name: str, bindings: Bindings) -> Generated | None:
    """C++ functions for two plans in one; None where each is generated for itself."""
    return _through_passes(joined.walked(both, name, bindings), bindings.machine) if joined.fits(both) else None


def _through_passes(made: Generated, machine: Machine) -> Generated:
    return replace(made, functions=tuple(replace(f, code=through_passes(f.code, machine)) for f in made.functions))


def _functions(facts: Facts) -> Generated:
    """Vector IR by the first kind of nest that takes the plan."""
    plan = facts.plan
    if plan.ordered is not None:
        return _ordered(facts)
    if not facts.checked and contraction.fits(plan):
        return Generated((contraction.whole(facts),), ())
    if plan.split:
        return split(facts)
    return Generated((reduction.whole(facts) if facts.reduced_axes else pointwise.whole(facts),), ())


def _ordered(facts: Facts) -> Generated:
    """The functions of a scatter's or scan's plan."""
    assert facts.plan.ordered is not None
    if facts.plan.ordered.kind != "scan":
        return Generated((scatter(facts),), ())
    found = None
    if facts.vector is None and len(facts.reduced_axes) == 1:
        found = blocked(facts) or chained(facts)
    return found or Generated((scan(facts),), ())


def _text(text: str, *names: str) -> Helper:
    """A helper that is `text`, where one of the names is used."""
    return lambda uses, machine: "" if uses.isdisjoint(names) else text


# The generator's own helpers, in order: the text for the names that a source uses.
_HELPERS: tuple[Helper, ...] = (
    _text(FLOOR_HELPERS, "floor_div", "floor_mod"), _text(HIDDEN_HELPER, "hidden"),
    _text(PLACE_HELPERS, "place_div", "place_mod"), transposes.helpers, bits.helpers, contraction.helpers,
    _text(SHUFFLE_HELPER, "FUSER_SHUFFLE"), _text(ZEROS, "fuser_zeros"), _text(CHECKED_HELPER, "fuser_checked"),
    stream_helper,
)  # fmt: skip


def source_text(functions: Iterable[Text], comment: str, machine: Machine) -> str:
    """A complete source for `machine`: typedefs, the helpers that are used, the functions' texts."""
    functions = list(functions)
    uses = frozenset[str]().union(*(f.uses for f in functions))
    helpers = "".join(helper(uses, machine) for helper in _HELPERS)
    prelude = prelude_for({*helpers_in(helpers), *known_helpers(uses)}, machine)
    head, body = "".join(f"// {line}\n" for line in comment.splitlines()), "\n".join(f.text for f in functions)
    return f"{head}{CPP_TYPEDEFS}{prelude}{helpers}\n{body}"


PART = 12_000  # most characters of functions that are compiled together; longer sources become parts


def source_parts(functions: Sequence[Function], comment: str, machine: Machine) -> tuple[str, ...]:
    """The sources of all functions: one, or several that are compiled at the same time. A function stays whole.

    Those that are equal up to their arguments share a body, and a source with it. The comment is in the first source.
    """
    if config.check_ir:
        for function in functions:
            verify_kernel(function.code)
    parts: list[list[Text]] = [[]]
    length = 0
    for texts in shared(functions):
        more = sum(len(t.text) for t in texts)
        if length and length + more > PART:
            parts.append([])
            length = 0
        parts[-1] += texts
        length += more
    return tuple(source_text(part, "" if n else comment, machine) for n, part in enumerate(parts))


__all__ = ["Bindings", "Function", "Generated", "Partial", "generate", "generate_joined", "source_parts", "source_text"]
