"""Why an operator is in no kernel: the closed list of reasons, each with what it means and what to do about it.

Stages say a reason as a sentence with the details of the case. `code_of` finds the row of such a sentence; what fits
no other row is "arguments", the refusal of one operator's lowering. docs/reasons.md is this table.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One row: its code, what it means, what a user may do, and how the sentences that it stands for read."""

    code: str
    means: str
    cure: str
    reads: str = ""

    @property
    def details(self) -> bool:
        """Whether a sentence of this row says more than the row."""
        return self.code not in _SAY_ALL


REASONS: tuple[Reason, ...] = (
    Reason(
        "not_run",
        "no call has come yet, so no kernel was needed",
        "call it",
        r"^not run yet",
    ),
    Reason(
        "defect",
        "fuser itself failed here; the result is eager's",
        "report it, with `fuser.debug.repro`",
        r"a defect of fuser|please report this",
    ),
    Reason(
        "library",
        "a library's kernel does this better than a generated one: products, convolutions, attention",
        "nothing; elementwise work around it is fused",
        r"a library's kernel|library's",
    ),
    Reason(
        "pending",
        "the kernel is being compiled in the background",
        "`fuser.wait()`",
        r"compiled in the background",
    ),
    Reason(
        "slower",
        "the kernel was timed beside ATen in a call like this and took longer",
        "`fuser.config.slowest = 0` keeps kernels without a contest",
        r"times as long as ATen|slower|ATen's ndtri is faster",
    ),
    Reason(
        "verify",
        "the kernel's result differed from ATen's under `config.verify`",
        "report it",
        r"verif|differs from",
    ),
    Reason(
        "disabled",
        "fusion is switched off by a setting or an override",
        "`fuser.config.enabled = True`",
        r"switched off|config\.enabled",
    ),
    Reason(
        "compiler",
        "there is no compiler, or it failed or took too long",
        "`python -m fuser doctor`",
        r"compiler|exit code|cannot be run|kernel can be written|cannot work|did not end|killed"
        r"|Triton (is|\d|cannot)|libcuda|CUDA error|shared memory|prebuilt|process ends"
        r"|ended (with|on|without)|the system refuses|NVIDIA",
    ),
    Reason(
        "backend",
        "no fusion backend serves the device of its tensors",
        "`fuser.register_fusion_backend`",
        r"no fusion backend",
    ),
    Reason(
        "gradient",
        "an argument requires a gradient, and the caller is not `torch.compile`, which makes a backward",
        "call under `torch.no_grad()`, or use `torch.compile`",
        r"requires a gradient",
    ),
    Reason(
        "subclass",
        "an argument is a tensor subclass or is inside a transform of torch.func",
        "compile the whole with `torch.compile`, which unwraps most of these",
        r"tensor subclass|torch\.func",
    ),
    Reason(
        "layout",
        "a tensor is sparse, nested, quantized, or lazily conjugated",
        "convert it to a dense tensor",
        r"layout torch\.|has (the )?layout|quantized|nested|conjugated",
    ),
    Reason(
        "default_dtype",
        "torch's default dtype changed after registration",
        "register the graph again",
        r"default dtype is another",
    ),
    Reason(
        "devices",
        "its tensors are on several devices",
        "move them to one",
        r"several devices|inputs are on|in a group on",
    ),
    Reason(
        "random",
        "it draws random numbers in a way that no kernel reproduces",
        "`config.random = 'philox'` fuses dropout, rand, randn and bernoulli",
        r"draws random numbers|random numbers$",
    ),
    Reason(
        "writes",
        "it writes one of its arguments, where the order with other readers matters",
        "use the operator without a trailing underscore",
        r"writes (one of|into|overlapping)|copy_ |inputs are written",
    ),
    Reason(
        "data_size",
        "the size or value of its result depends on data",
        "where possible, mask with `torch.where`",
        r"depends? on data|known ahead|has no outline",
    ),
    Reason(
        "no_tensor",
        "it computes no tensor: a number, a size, or nothing",
        "nothing",
        r"result is not a tensor|no tensor|Python number",
    ),
    Reason(
        "several_views",
        "it returns several views at once",
        "pick parts by slices",
        r"several views|read together",
    ),
    Reason(
        "from_numbers",
        "its group is computed from numbers alone and would be a kernel without inputs",
        "nothing",
        r"from numbers alone",
    ),
    Reason(
        "python",
        "it is no call of an ATen operator: a custom operator, a method, or Python that only eager can run",
        "write it with torch's operators",
        r"not an ATen operator|is not a call of|only the fallback|runs Python|calls a module"
        r"|in other words|cannot be written as a call|is a (str|list|tuple|complex)|more than 64 bits"
        r"|in other operators",
    ),
    Reason(
        "no_lowering",
        "nobody wrote a lowering for this operator yet",
        "docs/operators.md lists those that have one",
        r"no lowering for",
    ),
    Reason(
        "left_to_aten",
        "the operator is left to ATen on purpose",
        "nothing",
        r"left to ATen|a table of indices|it sorts|places that a tensor holds, between"
        r"|a loss (over pairs|with a recursion)|no scalar form|has no [a-z_]+$|windows of different",
    ),
    Reason(
        "dtype",
        "no kernel computes in this dtype",
        "cast it",
        r"dtype|complex|is not defined for|no (C\+\+|Triton) cell",
    ),
    Reason(
        "follows",
        "it takes all results of an operator that runs on ATen",
        "see that operator",
        r"which runs on ATen|reads what is not fused",
    ),
    Reason(
        "view_result",
        "a result is a view of an input or of another result, which must share its memory",
        "through `torch.compile` this is handled; else return a copy",
        r"an output is a view|an output is x\[i\]|memory is not dense",
    ),
    Reason(
        "eager_raises",
        "eager raises an error for these arguments",
        "correct the call",
        r"eager (raises|refuses)|do not broadcast",
    ),
    Reason(
        "reported",
        "a kernel found an index out of range, and eager raises the error",
        "correct the index",
        r"kernel reported",
    ),
    Reason(
        "variants",
        "too many kernels for inputs of one class",
        "mark sizes that vary as dynamic",
        r"more than \d+ kernels|does not take the inputs",
    ),
    Reason(
        "mode",
        "a torch mode or transform, autocast or a forward derivative is at work around the call",
        "call outside of it",
        r"a mode, a transform",
    ),
    Reason(
        "not_traced",
        "the graph could not be traced, so the whole of it runs in eager",
        "read the error in the reason",
        r"cannot be traced|graph raised|containers of more|share(s)? memory|overlap|interpolates uint8"
        r"|circle|symbolic number",
    ),
    Reason(
        "alone",
        "it stands alone: a kernel of its own would gain nothing",
        "nothing",
        r"stands alone|matmul is small",
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
_COMPILED = tuple((r.code, re.compile(r.reads)) for r in REASONS if r.reads)


@functools.lru_cache(maxsize=1024)
def code_of(sentence: str) -> str:
    """The code of the row that a reason belongs to."""
    return next((code for code, pattern in _COMPILED if pattern.search(sentence)), "arguments")


def table() -> str:
    """The rows as a Markdown table."""
    rows = [f"| `{r.code}` | {r.means} | {r.cure} |" for r in REASONS]
    return "\n".join(["| code | meaning | what to do |", "|---|---|---|", *rows]) + "\n"


__all__ = ["BY_CODE", "REASONS", "Reason", "code_of", "table"]
