"""Writes docs/tutorial.md, whose printouts come from the package itself: `python tools/tutorial_doc.py [--check]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "tutorial.md"
PROGRAM = """import torch
import fuser
import fuser.debug


def normalise(x, weight):
    y = torch.relu(x * weight)
    return y / (1 + y.sum(-1, keepdim=True))


graph = torch.fx.symbolic_trace(normalise)
key = fuser.register_fusion(graph)

x, weight = torch.randn(64, 1000), torch.randn(1000)
(result,) = fuser.run_fusion(key, [x, weight])
torch.testing.assert_close(result, normalise(x, weight))

found = fuser.debug.trace(key)
"""
PAGE = """# Tutorial: one graph, from FX to C++ and Triton

This page follows one function through the package. `fuser.debug.trace` prints each stage; the printouts below are
made by
`tools/tutorial_doc.py`, and a test compares them with the package.

```python
{program}```

In eager this function runs five operators. Each reads its operands from memory and writes a result. A fused kernel
reads `x` and `weight` and
writes one result.

## 1. The FX graph

`torch.fx.symbolic_trace` records the calls of the function. With `torch.compile(backend="fuser")` Dynamo and
AOTAutograd do this, and passes
choose the groups. Here the whole graph is one group.

```text
{fx}
```

## 2. The canonical graph

`register_fusion` rewrites every call as one ATen operator with its arguments in the order of the schema. Names are
gone, so `x * y`, `x.mul(y)` and
`torch.mul(x, y)` have the same text. The hash of the text identifies the group: a second graph with this text shares
its kernels.

```text
{canonical}
```

Nothing has been compiled yet. The group is known for all devices and all sizes.

## 3. The IR: loops and buffers

The first call brings tensors. Their class, the `ArgSpec`, says: two float32 tensors on the CPU, of ranks 2 and 1,
both contiguous, where the last
sizes are equal. Each operator is lowered to a loop nest that fills a buffer. Sizes are symbols: `x0_1` is the size of
dim 1 of input 0.

```text
{ir}
```

`known` is a relation that kernels may rely on. It becomes a guard: a call with other sizes gets another kernel.

## 4. The plan

The scheduler puts loops together where that saves memory traffic. All five loops become one kernel, and only `buf4`
is stored. Elements
of the other buffers are computed where they are read.

```text
{plan}
```

`a0` runs over rows and `a1` along a row, in vector lanes. The first pass over a row adds up `relu(x * weight)`. The
second pass, behind `pass 1`,
computes it again and divides. Recomputation costs two operations an element; storing the row would cost a write and a
read. The row is in the cache by
then, so memory is read once.

## 5. C++

The code generator of the CPU spells the plan as vector IR and prints it as C++. This is the second pass, for AVX-512.
`stream` is true for
large results, which go past the cache. `t6` is the divisor of this row.

```cpp
{cpp}
```

The source includes no header, so g++ takes about 0.2 s. The library is kept on disk with the plan of its launch.

## 6. Triton

The code generator of CUDA spells the same plan in Triton. A program takes one row and holds it in registers, so
nothing is
computed twice.

```python notest
{triton}
```

## 7. Calls

`run_fusion` and `fuser.fusion_handle(key)` lead to the launcher. It compares the arguments with the kernel's guards,
allocates the result and runs the
kernel, all in native code. Another number of rows uses the same kernel:

```python
handle = fuser.fusion_handle(key)
compiled = fuser.num_compiled_kernels()
for rows in (1000, 2, 64):
    x = torch.randn(rows, 1000)
    torch.testing.assert_close(handle(x, weight), normalise(x, weight))
assert fuser.num_compiled_kernels() == compiled
```

What a kernel needs of its arguments:

```python
print(fuser.debug.guards(key))
```

## Where to go on

- [What happened to my model](explain.md): the same for a whole model.
- [Extending](extending.md): an op, a lowering, a pass, a reduction or a device of your own.
- [Architecture](architecture.md): the folders behind these stages.
"""


def text() -> str:
    """The page, with what the package prints now."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    import replay
    import torch

    from fuser import config
    from fuser.canonical import canonicalize

    names: dict[str, object] = {}
    exec(compile(PROGRAM, str(DOC), "exec"), names)
    graph, found = names["graph"], names["found"]
    canonical = canonicalize(graph).graph
    kept = [((64, 1000), (1000, 1), torch.float32, True), ((1000,), (1,), torch.float32, True)]
    case = canonical, kept, {name: getattr(config, name) for name in replay.SETTINGS}
    with config.override(isa="avx512"):
        cpp = replay.source(case, "cpu")
    second = re.search(r"^ {4}for \(i64 w0.*?^ {4}\}$", cpp, re.DOTALL | re.MULTILINE)
    triton = re.search(r"^@triton\.jit\ndef k0.*?(?=\n\n)", replay.source(case, "cuda"), re.DOTALL | re.MULTILINE)
    assert second is not None and triton is not None, "the generated text has another form than this page expects"
    lines = (re.sub(r"^    ", "", line) for line in second.group().splitlines())
    return PAGE.format(
        program=PROGRAM,
        fx=str(graph.graph).strip(),
        canonical=found.canonical.strip(),
        ir=found.ir.strip(),
        plan=found.plans[0].strip(),
        cpp="\n".join(lines),
        triton=triton.group().strip(),
    )


def main() -> int:
    """Write the page, or with --check say whether it is current."""
    current = DOC.read_text(encoding="utf-8") if DOC.exists() else ""
    new = text()
    if "--check" in sys.argv:
        if current != new:
            print("docs/tutorial.md is not current: run python tools/tutorial_doc.py")
        return int(current != new)
    DOC.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
