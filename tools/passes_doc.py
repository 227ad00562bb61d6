"""Writes docs/passes.md from the stages and passes of the package: `python tools/passes_doc.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "passes.md"
HEAD = """# The passes

A graph of `torch.compile(backend="fuser")` goes through three stages of passes and is then grouped into fusions. This
page is written by `tools/passes_doc.py` from the lists themselves; `fuser.debug.passes()` prints them with the settings
in force. A setting is given by `FUSER_DISABLE_PASSES=...` in the environment, by `fuser.config.set(disable_passes=...)`
or for one graph by `torch.compile(..., options={"disable_passes": ...})`.
"""
HOW = (
    ("switch passes off", '`disable_passes="merge_equal,drop_dead"`'),
    ("run only the passes up to number n", "`pass_limit=n`"),
    ("find the pass that breaks a result", "`fuser.debug.bisect_passes(is_right)`: it compiles, runs and judges"),
    ("see what each pass changes", '`dump_passes="log"` or a folder'),
    ("check graph and shapes after each pass", "`check_passes=True`; always done for passes of your own"),
    ("go on without a pass that fails", '`on_pass_error="skip"`: one warning; otherwise an error names pass and node'),
    ("see what each pass did, and its seconds", "`fuser.frontends.dynamo.last_compilation().passes`"),
    ("add a pass", "`fuser.passes.register(stage, name, function, before=..., after=...)`"),
    ("add a pattern", "`fuser.passes.register_pattern(stage, name, pattern, replacement, example_inputs)`"),
)

KEPT = """## What a training step keeps

Between `joint_graph` and `post_grad` torch's min-cut partitioner decides what the forward saves. Its rules are kept but
for one. On the CPU it may compute elementwise work again even where the backward has to write it to memory. A
pass over tensors in the cache costs little beside the product that reads them. Reductions, products, attention and
random numbers are saved. With `keep_logits`, by `python -m benchmarks.saved`, in training steps of the benchmarks:

| model | torch's default cut, as TorchInductor's | fuser's |
|---|---:|---:|
| GPT-2 | 389 MiB | 318 MiB |
| BERT | 356 MiB | 282 MiB |
| Llama, 6 layers | 161 MiB | 129 MiB |
| T5's encoder, 6 layers | 99 MiB | 85 MiB |
| ResNet-50 | 326 MiB | 266 MiB |

Of a batch norm in training on the CPU its input is saved and two numbers for each channel, in any case. The next
convolution's backward reads the activation behind it. With `norms_again` a kernel computes that from these again; a
ReLU's mask is taken inside the norm's own backward. It costs no time: that reads one tensor less.
Behind a sum, as at the end of ResNet's blocks, the activation is saved, since the sum has a second input.
"""

GROUPING = """## Grouping

Behind `post_grad`, `passes/classify.py` says of each call whether it can be fused. Operators that are lowered for some
arguments only, such as `index` and `scatter`, are tried; the verdict is remembered by dtypes, sizes and strides.
`passes/grouping.py` makes groups of the calls that can. `passes/rounding.py` marks the values that a decision in
another group, or in the backward, depends on: kernels round these as eager does. A group that no kernel takes after
all is split at its first call (`splitting.py`).
"""

NOT_DONE = """## What is left off, and why

- **Linears with a shared input as one.** On one AVX-512 core, with 512 tokens, three products of width 768 take
  16.2 ms, and one of width 2,304 takes 16.4 ms. The weights would have to be joined at each call. Products of these
  sizes keep a core busy by themselves.
- **Splits, views and casts before autograd.** AOTAutograd brings all spellings to the same few ATen calls and makes
  aliases and writes explicit. So `merge_views`, `merge_casts`, `split_to_slices` and `join_pieces` run behind it.
  Only what eager answers with its very argument goes before it (`drop_identities`).
- **`cat` without a copy of what libraries compute.** A `cat` of what kernels compute is part of a kernel. Products and
  attention have no operator that writes into a part of a tensor, so theirs are copied.
- **Batch norms before an activation.** A kernel does the norm with the activation for nothing (`fold_batch_norms`).
- **Live dropout in attention on the CPU.** torch has no fused attention with dropout there.
- **A learned bias of attention**: no fused attention gives its gradient.
"""


def text() -> str:
    """The page."""
    from fuser.passes.registry import STAGES

    lines = [HEAD, "| to | do |", "|---|---|", *(f"| {to} | {do} |" for to, do in HOW), ""]
    number = 0
    for stage in STAGES:
        lines += [f"## {stage.name}", "", f"**The graph.** {stage.graph}", "", f"**Why here.** {stage.why}", ""]
        lines += ["| number | pass | what it does |", "|---|---|---|"]
        for p in stage.passes:
            number += 1
            lines.append(f"| {number} | `{p.name}` | {p.doc} |")
        lines.append("")
    return "\n".join([*lines, GROUPING, KEPT, NOT_DONE]).rstrip() + "\n"


def main() -> int:
    """Write the page, or with --check say whether it is current."""
    sys.path.insert(0, str(ROOT))
    current = DOC.read_text() if DOC.exists() else ""
    if "--check" in sys.argv:
        if current != text():
            print("docs/passes.md is not current: run python tools/passes_doc.py")
            return 1
        return 0
    DOC.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
