"""The one table of loop-level operations: a row per scalar or reduction op, read by everything below `ops`.

A row says how an op is evaluated by torch (the IR interpreter), how it is spelled in C++ and in Triton, what it costs,
and with which samples it is tested. Adding an op touches this folder alone.

Dtypes of a row's arguments are *compute* dtypes: float16 and bfloat16 are computed in float32 and converted by loads,
stores and `to_dtype`, so cells never see them. All tensor arguments of a row have one dtype unless `signature` says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
BOOL = (torch.bool,)
ALL = (*FLOATS, *INTS, *BOOL)

# A cell: a template with {0} {1} … for the arguments and {T} for the C++ type of the *argument*, a function from the
# argument's dtype to a template, or None: Unsupported.
Cell = str | Callable[[torch.dtype], str | None] | None


@dataclass(frozen=True)
class OpRow:
    """One loop-level op.

    result: "same" (the arguments' dtype), "bool", or a dtype.
    signature: per argument "t" (the row's dtype) or "b" (bool), for `where`.
    eval: the op on torch tensors of compute dtype.
    cpp: its C++ expression for scalars; must vectorise when used inside a simd loop, wherever the machine can.
    prelude: names of C++ helper functions that the cell calls (see `ops/prelude.py`).
    cost: about how many simple operations it is worth; 1 for an add, 20 for an exp.
    samples: per dtype family, values that tests feed each argument.
    """

    name: str
    arity: int
    eval: Callable[..., torch.Tensor]
    cpp: Cell
    triton: Cell = None
    dtypes: tuple[torch.dtype, ...] = ALL
    result: str | torch.dtype = "same"
    signature: str = ""
    prelude: tuple[str, ...] | Callable[[torch.dtype], tuple[str, ...]] = ()
    cost: int = 1
    domain: tuple[float, float] = (-4.0, 4.0)
    notes: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
