"""Reasons why an operator is in no kernel: a closed list, each with its meaning and cure.

A stage states a reason as a sentence with the details of the case and the code of its row: `because(code, sentence)`
is a string that carries its code. A plain string has the code "arguments", the refusal of one operator's lowering.
docs/reasons.md is this table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuser.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One row: its code, its meaning, and what a user may do."""

    code: str
    means: str
    cure: str

    @property
    def details(self) -> bool:
        """Whether sentences of this row say more than the row."""
        return self.code not in _SAY_ALL


REASONS: tuple[Reason, ...] = (
    Reason(
        "not_run",
        "no call has come yet, so no kernel was needed",
        "call it",
    ),
    Reason(
        "defect",
        "fuser itself failed here; the result is eager's",
        "report it, with `fuser.debug.repro`",
    ),
    Reason(
        "library",
        "a library's kernel does this better than a generated one: products, convolutions, attention",
        "nothing; elementwise work around it is fused",
    ),
    Reason(
        "pending",
        "the kernel is being compiled in the background",
        "`fuser.wait()`",
    ),
    Reason(
        "slower",
        "the kernel was timed beside ATen in a call like this and took longer",
        "`fuser.config.slowest = 0` keeps kernels without a contest",
    ),
    Reason(
        "verify",
        "the kernel's result differed from ATen's under `config.verify`",
        "report it",
    ),
    Reason(
        "disabled",
        "fusion is switched off by a setting or an override",
        "`fuser.config.enabled = True`",
    ),
    Reason(
        "compiler",
        "there is no compiler, or it failed or took too long",
        "`python -m fuser doctor`",
    ),
    Reason(
        "backend",
        "no fusion backend serves the device of its tensors",
        "`fuser.register_fusion_backend`",
    ),
    Reason(
        "gradient",
        "an argument requires a gradient, and the caller is not `torch.compile`, which makes a backward",
        "call under `torch.no_grad()`, or use `torch.compile`",
    ),
    Reason(
        "subclass",
        "an argument is a tensor subclass or is inside a transform of torch.func",
        "compile the whole with `torch.compile`, which unwraps most of these",
    ),
    Reason(
        "layout",
        "a tensor is sparse, nested, quantized, or lazily conjugated",
        "convert it to a dense tensor",
    ),
    Reason(
        "default_dtype",
        "torch's default dtype changed after registration",
        "register the graph again",
    ),
    Reason(
        "devices",
        "its tensors are on several devices",
        "move them to one",
    ),
    Reason(
        "random",
        "it draws random numbers in a way that no kernel reproduces",
        "`config.random = 'philox'` fuses dropout, rand, randn and bernoulli",
    ),
    Reason(
        "writes",
        "it writes one of its arguments, where the order with other readers matters",
        "use the operator without a trailing underscore",
    ),
    Reason(
        "data_size",
        "the size or value of its result depends on data",
        "where possible, mask with `torch.where`",
    ),
    Reason(
        "no_tensor",
        "it computes no tensor: a number, a size, or nothing",
        "nothing",
    ),
    Reason(
        "several_views",
        "it returns several views at once",
        "pick parts by slices",
    ),
    Reason(
        "from_numbers",
        "it makes a tensor from numbers alone, and nothing that could be in a kernel with it reads the tensor",
        "nothing",
    ),
    Reason(
        "python",
        "it is no call of an ATen operator: a custom operator, a method, or Python that only eager can run",
        "write it with torch's operators",
    ),
    Reason(
        "bodies",
        "it is an operator on graphs, such as `cond` or `scan`; its graphs are compiled, and stand beside this one",
        "nothing",
    ),
    Reason(
        "no_lowering",
        "nobody wrote a lowering for this operator yet",
        "docs/operators.md lists those that have one",
    ),
    Reason(
        "left_to_aten",
        "the operator is left to ATen on purpose",
        "nothing",
    ),
    Reason(
        "dtype",
        "no kernel computes in this dtype",
        "cast it; compute complex numbers as pairs of reals (`torch.view_as_real`)",
    ),
    Reason(
        "follows",
        "it takes all results of an operator that runs on ATen",
        "see that operator",
    ),
    Reason(
        "view_result",
        "a result is a view of an input or of another result, which must share its memory",
        "through `torch.compile` this is handled; else return a copy",
    ),
    Reason(
        "eager_raises",
        "eager raises an error for these arguments",
        "correct the call",
    ),
    Reason(
        "reported",
        "a kernel found an index out of range, and eager raises the error",
        "correct the index",
    ),
    Reason(
        "variants",
        "too many kernels for inputs of one class",
        "mark sizes that vary as dynamic",
    ),
    Reason(
        "mode",
        "a torch mode or transform, autocast or a forward derivative is at work around the call",
        "call outside of it",
    ),
    Reason(
        "not_traced",
        "the graph could not be traced, so the whole of it runs in eager",
        "read the error in the reason",
    ),
    Reason(
        "alone",
        "it stands alone: a kernel of its own would gain nothing",
        "nothing",
    ),
    Reason(
        "arguments",
        "the operator is lowered, but not for these arguments",
        "the sentence says which argument",
    ),
)
_SAY_ALL = frozenset(
    "not_run library pending random writes no_tensor several_views from_numbers no_lowering alone".split()
)
BY_CODE = {r.code: r for r in REASONS}


class Because(str):
    """A sentence with the code of its row."""

    __slots__ = ("code",)
    code: str

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.code, str(self)

    def __new__(cls, code: str, sentence: str) -> Because:
        if code not in BY_CODE:
            raise ValueError(f"a reason has the code {code!r}: expected one of {', '.join(BY_CODE)}")
        made = super().__new__(cls, sentence)
        made.code = code
        return made


def because(code: str, sentence: str) -> str:
    """`sentence` as a reason with the code of a row."""
    return Because(code, sentence)


def code_of(reason: str) -> str:
    """The code of the row of a reason."""
    return getattr(reason, "code", "arguments")


def told(reason: str, sentence: str) -> str:
    """`sentence`, which contains `reason`, with the code of `reason`."""
    return Because(code_of(reason), sentence)


def as_json(reason: str) -> list[str]:
    """A reason as data, with its code."""
    return [code_of(reason), str(reason)]


def from_json(kept: Any) -> str:
    """The reason that `as_json` encoded. ValueError or TypeError for anything else."""
    code, sentence = kept
    if not isinstance(sentence, str):
        raise TypeError(f"a reason is kept as {kept!r}: expected a code and a sentence")
    return Because(code, sentence)


def table() -> str:
    """The rows as a Markdown table."""
    rows = [f"| `{r.code}` | {r.means} | {r.cure} |" for r in REASONS]
    return "\n".join(["| code | meaning | what to do |", "|---|---|---|", *rows]) + "\n"


def served_by(function: Callable[..., Any], code: str, sentence: str) -> Callable[..., Any]:
    """Attach the reason why it is in no kernel to `function`, which passes insert into graphs: see `reason_of_call`."""
    function.fuser_reason = because(code, sentence)  # type: ignore[attr-defined]
    return function


def reason_of_call(target: Any) -> str | None:
    """The reason that `served_by` attached to a function; None if it has none."""
    return getattr(target, "fuser_reason", None)


__all__ = [
    "BY_CODE", "REASONS", "Because", "Reason", "as_json", "because", "code_of", "from_json", "reason_of_call",
    "served_by", "table", "told",
]  # fmt: skip
