"""Triton for a kernel plan: returns strings, imports no Triton and needs no GPU.

A program computes a tile of one or two dims. Each dim runs over some axes of the plan, numbered as one:

- *pointwise*: the vector axis and all other axes; if an operand is transposed, the two axes along which memory is
  contiguous; or all axes as one.
- *row*: results, and the reduced axes, along which memory is contiguous.
- *column*: neighbouring results, and the reduced axes.
- *walk*: rows in turn, and columns, if both are reduced (`joined.py`).

Short reduced axes are held whole in registers, so every phase uses the same loads. Longer ones have a loop for each
phase. Axes that no dim covers are digits of the program's number.
"""

from __future__ import annotations

from collections.abc import Iterable

from fuser.cuda.joined import fits, write_joined
from fuser.cuda.layout import Context
from fuser.cuda.nest import Function
from fuser.cuda.scan import write_scan
from fuser.cuda.scatter import write_scatter
from fuser.cuda.split import Partial, cut, split, unsplit
from fuser.cuda.text import Guard
from fuser.lazy_dataclasses import dataclass
from fuser.ops import triton_prelude
from fuser.scheduler.kernel_plan import KernelPlan
from fuser.scheduler.together import Joined

HEAD = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"


@dataclass(frozen=True)
class Generated:
    """The functions of one plan in launch order, the temporaries they share, and the guards of their tile choices."""

    functions: tuple[Function, ...]
    partials: tuple[Partial, ...]
    guards: tuple[Guard, ...]


def generate(plan: KernelPlan, name: str, ctx: Context) -> Generated:
    """Triton functions for `plan`. Unsupported if the plan has no Triton form."""
    if plan.ordered is not None:
        write = write_scan if plan.ordered.kind == "scan" else write_scatter
        return Generated(*write(plan, name, ctx))
    if cut(plan, ctx).split:
        return Generated(*split(plan, name, ctx))
    function, guards = unsplit(plan, name, ctx)
    return Generated((function,), (), guards)


def generate_joined(joined: Joined, name: str, ctx: Context) -> Generated | None:
    """Triton functions for two plans that share one pass over memory; None if they are better run one by one."""
    walk = fits(joined, ctx)
    return Generated(*write_joined(joined, walk, name, ctx)) if walk is not None else None


def source_text(functions: Iterable[Function], comment: str) -> str:
    """A complete source: imports, the helpers that are called, the kernels."""
    body = "\n\n".join(text for f in functions for text in (*f.helpers, f.text))
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return f"{head}{HEAD}{triton_prelude(body)}{body}"


__all__ = ["Context", "Function", "Generated", "Partial", "generate", "generate_joined", "source_text"]
