"""Programs of the fuzzer: data that can be run by torch, turned into an FX graph, printed as Python and shrunk."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx


@dataclass(frozen=True)
class Ref:
    """The value `index` of a program: an input, or the result of a step."""

    index: int

    def __repr__(self) -> str:
        return f"v{self.index}"


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same": lambda b: b,
    "alias": lambda b: b[...],
    "tail": lambda b: b[1:] if b.dim() else b[...],
    "head": lambda b: b[:-1] if b.dim() else b[...],
    "row": lambda b: b[-1] if b.dim() and len(b) else b[...],
    "turned": lambda b: b.permute(tuple(range(b.dim() - 1, -1, -1))),
}


@dataclass(frozen=True)
class Input:
    """How an input is made.

    layout: "dense", "transposed" (dims reversed in memory), "strided" (every second element of a larger tensor),
    "offset" (inside a larger tensor), "expanded" (its first dim has stride 0), "channels_last" (if it has four dims).
    `of` and `view`: the input is a view of input `of`, see VIEWS.
    values: "integers" (small whole numbers), "normal", "special" (NaN, infinities, zeros of both signs among them),
    "places" (0 and 1: indices into any dim of more than one element).
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "dense"
    values: str = "integers"
    seed: int = 0
    of: int = -1
    view: str = ""


@dataclass(frozen=True)
class Step:
    """`fn(*args, **kwargs)`: "torch.add", ".view" (a method), "F.gelu", "getitem" or "setitem"."""

    fn: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Program:
    """Inputs are values 0, 1, …; then each step is one value. `outputs` are indices of values."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    exact: tuple[int, ...] = ()  # values that every way of computing must give to the bit

    def __str__(self) -> str:
        n = len(self.inputs)
        lines = [f"# {i}: {x}" for i, x in enumerate(self.inputs)]
        lines.append(f"def program({', '.join(f'v{i}' for i in range(n))}):")
        lines += [f"    v{n + i} = {step_text(s)}" for i, s in enumerate(self.steps)]
        return "\n".join([*lines, f"    return {', '.join(f'v{o}' for o in self.outputs)},"])


def step_text(s: Step) -> str:
    """The step as Python."""
    named = [f"{k}={v!r}" for k, v in s.kwargs]
    args = [repr(a) for a in s.args]
    if s.fn.startswith("."):
        return f"{args[0]}{s.fn}({', '.join(args[1:] + named)})"
    name = f"operator.{s.fn}" if s.fn in ("getitem", "setitem") else s.fn
    return f"{name}({', '.join(args + named)})"


def resolve(fn: str) -> Callable[..., Any]:
    """What a step calls."""
    if fn in ("getitem", "setitem"):
        return getattr(operator, fn)
    if fn.startswith("."):
        return lambda x, *args, **kwargs: getattr(x, fn[1:])(*args, **kwargs)
    head, *path = fn.split(".")
    found: Any = {"torch": torch, "F": torch.nn.functional}[head]
    for part in path:
        found = getattr(found, part)
    return found


def map_refs(value: Any, change: Callable[[Ref], Any]) -> Any:
    """`value` with each reference replaced."""
    if isinstance(value, Ref):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_refs(v, change) for v in value)
    if isinstance(value, slice):
        return slice(*(map_refs(v, change) for v in (value.start, value.stop, value.step)))
    return value


def refs(value: Any) -> Iterator[int]:
    """The values that `value` refers to."""
    found: list[int] = []
    map_refs(value, lambda r: found.append(r.index))
    yield from found


def run_step(s: Step, values: Sequence[Any]) -> Any:
    """One step, by torch."""
    args = map_refs(s.args, lambda r: values[r.index])
    return resolve(s.fn)(*args, **{k: map_refs(v, lambda r: values[r.index]) for k, v in s.kwargs})


def run(program: Program, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The program's outputs, by torch, op by op."""
    values = list(inputs)
    for s in program.steps:
        values.append(run_step(s, values))
    return tuple(values[o] for o in program.outputs)


def graph_of(program: Program) -> torch.fx.Graph:
    """The program as an FX graph of torch-level calls."""
    graph = torch.fx.Graph()
    values: list[Any] = [graph.placeholder(f"v{i}") for i in range(len(program.inputs))]
    for s in program.steps:
        args = map_refs(s.args, lambda r: values[r.index])
        kwargs = {k: map_refs(v, lambda r: values[r.index]) for k, v in s.kwargs}
        if s.fn.startswith("."):
            values.append(graph.call_method(s.fn[1:], args, kwargs))
        else:
            values.append(graph.call_function(resolve(s.fn), args, kwargs))
    graph.output(tuple(values[o] for o in program.outputs))
    return graph


def make_inputs(
    program: Program, sizes: dict[int, int] | None = None, device: str = "cpu"
) -> list[torch.Tensor]:  # fmt: skip
    """The program's inputs; `sizes` replaces extents of dims by others. The values are the same on all devices."""
    made: list[torch.Tensor] = []
    for x in program.inputs:
        if x.of >= 0:
            made.append(VIEWS[x.view](made[x.of]))
            continue
        size = tuple((sizes or {}).get(n, n) for n in x.size)
        made.append(_make_tensor(replace(x, size=size), device))
    return made


def _make_tensor(x: Input, device: str) -> torch.Tensor:
    size = x.size
    if x.layout == "transposed":
        return _fill(x, device, size[::-1]).permute(tuple(range(len(size) - 1, -1, -1)))
    if x.layout == "strided":
        wide = _fill(x, device, tuple(2 * n for n in size))
        return wide[tuple(slice(0, None, 2) for _ in size)]
    if x.layout == "offset":
        wide = _fill(x, device, tuple(n + 2 for n in size))
        return wide[tuple(slice(1, n + 1) for n in size)]
    if x.layout == "channels_last" and len(size) == 4:
        return _fill(x, device, size).contiguous(memory_format=torch.channels_last)
    if x.layout == "expanded" and size:
        return _fill(x, device, (1, *size[1:])).expand(size)
    return _fill(x, device, size)


_SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5)


def _fill(x: Input, device: str, size: Sequence[int]) -> torch.Tensor:
    return _values(x, size).to(device)


def _values(x: Input, size: Sequence[int]) -> torch.Tensor:
    g = torch.Generator().manual_seed(x.seed)
    if x.dtype is torch.bool:
        return torch.randint(0, 2, tuple(size), generator=g).bool()
    if x.values == "places":
        return torch.randint(0, 2, tuple(size), generator=g)
    if not x.dtype.is_floating_point:
        low = 0 if x.dtype is torch.uint8 else -4
        return torch.randint(low, 5, tuple(size), generator=g).to(x.dtype)
    if x.values == "normal":
        return torch.randn(tuple(size), generator=g).to(x.dtype)
    whole = torch.randint(-4, 5, tuple(size), generator=g).to(x.dtype)
    if x.values == "special":
        table = torch.tensor(_SPECIAL, dtype=x.dtype)
        return table[torch.randint(0, len(_SPECIAL), tuple(size), generator=g)]
    return whole
