"""A random program as Python: each step in one of its spellings, with rewrites that keep the meaning."""

from __future__ import annotations

import operator
import random
import re
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests import compare
from tests.device import test_device
from tests.fuzz import program as programs
from tests.fuzz.program import Input, Program, Ref, Step, refs, run_step
from tests.fuzz.spelling_table import COPY_IDENTITIES, DEAD, DETACHED, VIEW_IDENTITIES, spellings

MODULES = {"torch": torch, "F": F, "nn": nn, "operator": operator}
_TRIES = 6
_TOUCHY = (
    "floor ceil round trunc sign eq ne lt le gt ge arg any all nonzero logical isinf remainder fmod max min .to frac "
    "isnan isfinite bucketize div count relu hard abs clamp"
).split()
# What `torch.fx.symbolic_trace` cannot see, or takes for something else: an augmented assignment to a proxy is a new
# value, and its sizes are proxies.
_UNTRACEABLE = re.compile(
    r"\w \S?\S?= |\] = |\.shape|\.dim\(\)|\blen\(|\.dtype|range\(|for x|max\(|\.T\b|tuple\(|list\(|__[ir]|\+= "
    r"|operator\.i|\bnn\.|torch\.(as_)?tensor\((?=.*v\d)|__setitem__|operator\.setitem"
)


_WRITING = re.compile(r"[a-z]_\(|\bout=|\w \S?\S?= |\] = ")


@dataclass(frozen=True)
class Style:
    """What a text may use. `plain`: no spellings and rewrites; `traceable`: what symbolic tracing sees; `detaches`:
    gradients may be cut off; `functional`: few writes, which `register_fusion` leaves to ATen."""

    plain: bool = False
    traceable: bool = False
    detaches: bool = False
    functional: bool = False


def is_writing(program: Program) -> bool:
    """Whether some step writes into a tensor."""
    return any(_writes(s) for s in program.steps)


def _writes(step: Step) -> bool:
    return step.fn == "setitem" or step.fn.endswith("_")


def write(program: Program, seed: int, style: Style = Style()) -> list[str]:
    """The body of the program in the spellings that `seed` chooses: its statements, without the last `return`.

    The choice for a step depends on the seed and the step alone, so that a smaller program keeps those of its steps.
    """
    return _Writer(program, seed, style).write()


def function_text(program: Program, body: Sequence[str], name: str = "program") -> str:
    """The function as text."""
    lines = [f"def {name}({', '.join(f'v{i}' for i in range(len(program.inputs)))}):"]
    lines += [f"    {part}" for statement in body for part in statement.split("\n")]
    results = "".join(f"v{o}, " for o in program.outputs)
    return "\n".join([*lines, f"    return ({results.rstrip()})", ""])


def make_function(text: str, name: str = "program", file: str = "<spelled>") -> Callable[..., Any]:
    """The function that a text defines."""
    space: dict[str, Any] = dict(MODULES)
    exec(compile(text, file, "exec"), space)
    made = space[name]
    assert isinstance(made, types.FunctionType)
    made.__module__ = "fuzzed"  # TorchScript asks for it, and refuses what has none
    if isinstance(module := space.get("module"), torch.nn.Module):
        module.to(test_device())
    return made


class _Writer:
    def __init__(self, program: Program, seed: int, style: Style) -> None:
        self.program, self.seed, self.style = program, seed, style
        self.writing = is_writing(program)
        self.plain = programs.make_inputs(program)  # what the plain calls give, step by step
        self.own = programs.make_inputs(program)  # what the text gives
        self.count: Counter[str] = Counter()

    def write(self) -> list[str]:
        body: list[str] = []
        for n, step in enumerate(self.program.steps):
            name = f"v{len(self.plain)}"
            rng = random.Random(f"{self.seed} {step.fn} {self.count[step.fn]}")
            self.count[step.fn] += 1
            before = list(self.plain)
            want = run_step(step, self.plain)
            self.plain.append(want)
            rounds = not any(t in s.fn for s in self.program.steps[n:] for t in _TOUCHY)
            body += self._step(step, name, rng, rounds, before)
        return body

    def _step(self, step: Step, name: str, rng: random.Random, rounds: bool, before: list[Any]) -> list[str]:
        if not self.style.plain:
            choices = list(spellings(step.fn))
            rng.shuffle(choices)
            for template in choices[:_TRIES]:
                if template.startswith("~") and not rounds:
                    continue
                written = self._filled(step, template.removeprefix("~"), name, rng)
                if written is not None and self._accept(written, name, template.startswith("~"), _writes(step)):
                    return self._with_dead(written, rng)
        written = self._filled(step, spellings(step.fn)[0], name, None)
        assert written is not None
        self._run(written, name, self.own)
        return [written]

    def _with_dead(self, written: str, rng: random.Random) -> list[str]:
        if rng.random() > 0.06 or self.style.traceable:
            return [written]
        i = rng.randrange(len(self.own) - 1)
        dead = rng.choice(DEAD).format(f"v{i}")
        if not isinstance(self.own[i], torch.Tensor) or not self._works(dead):
            return [written]
        return [written, dead]

    def _filled(self, step: Step, template: str, name: str, rng: random.Random | None) -> str | None:
        """The template with the step's arguments; None if it asks for others, or is of no use in this style."""
        args = [self._argument(a, rng, i == 0 and _writes(step)) for i, a in enumerate(step.args)]
        kwargs = {k: _text(v) for k, v in step.kwargs}
        named = [f"{k}={v}" for k, v in kwargs.items()]
        if "{kwargs" not in template and "{all}" not in template and "{rest}" not in template:
            if named and not all("{" + k + "}" in template for k in kwargs):
                if any(v not in ("False", "None") for v in kwargs.values()):
                    return None
        fields = {
            **kwargs, "all": ", ".join(args + named), "rest": ", ".join(args[1:] + named), "kwargs": ", ".join(named),
            "kwargs_after": "".join(", " + n for n in named), "r": name,
            "index": _index_text(step.args[1]) if step.fn in ("getitem", "setitem") else "",
        }  # fmt: skip
        try:
            text = template.format(*args, **fields)
        except (IndexError, KeyError):
            return None
        text = text.replace("(, ", "(").replace(", )", ")")
        written = text if "{r}" in template else f"{name} = {text}"
        statement = written.removeprefix(f"{name} = ")
        if self.style.traceable and rng is not None and _UNTRACEABLE.search(statement):
            return None
        if self.style.functional and rng is not None and _WRITING.search(statement) and rng.random() < 0.9:
            return None
        return written

    def _argument(self, value: Any, rng: random.Random | None, target: bool) -> str:
        if isinstance(value, (tuple, list)) and any(True for _ in refs(value)):
            inner = ", ".join(self._argument(v, rng, target) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if not isinstance(value, Ref):
            return _text(value)
        if rng is None or target or rng.random() > 0.15:
            return f"v{value.index}"
        return self._wrapped(value.index, rng)

    def _wrapped(self, i: int, rng: random.Random) -> str:
        """A value in a rewrite that leaves it as it is."""
        value = self.own[i]
        if not isinstance(value, torch.Tensor):
            return f"v{i}"
        detaches = self.style.detaches and rng.random() < 0.15
        table = DETACHED if detaches else VIEW_IDENTITIES if self.writing or rng.random() < 0.4 else COPY_IDENTITIES
        for template in rng.sample(table, 3):
            text = template.format(f"v{i}")
            if self.style.traceable and _UNTRACEABLE.search(text):
                continue
            got = self._value(text)
            shares = not self.writing or (isinstance(got, torch.Tensor) and _shares(got, value))
            if shares and _agrees(got, value, False):
                return text
        return f"v{i}"

    # -- trials --------------------------------------------------------------------------------------------------------
    def _space(self, values: Sequence[Any]) -> dict[str, Any]:
        return {**MODULES, **{f"v{i}": v for i, v in enumerate(values)}}

    def _value(self, text: str) -> Any:
        try:
            return eval(text, self._space(self.own))
        except Exception:
            return None

    def _works(self, text: str) -> bool:
        try:
            exec(text, self._space(compare.copy_inputs(self.own)))
        except Exception:
            return False
        return True

    def _run(self, written: str, name: str, values: list[Any]) -> None:
        space = self._space(values)
        exec(written, space)
        values.append(space[name])

    def _accept(self, written: str, name: str, rounds: bool, writes: bool) -> bool:
        """Whether the text does what the plain call did; then it has been run."""
        trial = _copied(self.own) if writes else list(self.own)
        try:
            self._run(written, name, trial)
        except Exception:
            return False
        if not _agrees(trial[-1], self.plain[-1], rounds):
            return False
        if self.writing and not self._shared_alike(trial):
            return False
        if not writes:
            self.own = trial
            return True
        if not all(_agrees(a, b, False) for a, b in zip(trial, self.plain)):
            return False
        self._run(written, name, self.own)
        return True


    def _shared_alike(self, trial: Sequence[Any]) -> bool:
        """Whether the last value shares memory with the same values as the plain one: later writes are seen alike."""
        own, plain = ((compare.leaves(list(v[:-1])), compare.leaves([v[-1]])) for v in (trial, self.plain))
        return compare.alias_pattern(*own) == compare.alias_pattern(*plain)


def _copied(values: Sequence[Any]) -> list[Any]:
    """Copies that alias each other as the originals do, those in lists among them."""
    flat = compare.copy_inputs(compare.leaves(list(values)))
    leaves, spec = torch.utils._pytree.tree_flatten(list(values))
    assert len(flat) == len(leaves)
    return torch.utils._pytree.tree_unflatten(flat, spec)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.data_ptr() == b.data_ptr()


def _agrees(got: Any, want: Any, rounds: bool) -> bool:
    ours, theirs = compare.leaves(got), compare.leaves(want)
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs):
        if not isinstance(b, torch.Tensor):
            if a is not b and a != b:
                return False
        elif not isinstance(a, torch.Tensor) or a.dtype is not b.dtype or a.shape != b.shape:
            return False
        elif not _same_bits(a, b) and not (rounds and compare._is_close(a, b, None)):
            return False
    return True


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not b.dtype.is_floating_point:
        return torch.equal(a, b)
    same = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return bool(same.all())


# -- text --------------------------------------------------------------------------------------------------------------
def _text(value: Any) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f"float('{value}')"
    return repr(value)


def _index_text(value: Any) -> str:
    """An index as it stands in brackets."""
    if isinstance(value, tuple):
        return ", ".join(_index_text(v) for v in value) + ("," if len(value) == 1 else "") if value else "()"
    if isinstance(value, slice):
        parts = ["" if v is None else str(v) for v in (value.start, value.stop)]
        return ":".join(parts) + (f":{value.step}" if value.step is not None else "")
    return "..." if value is Ellipsis else repr(value)


def inputs_text(program: Program) -> str:
    """A function `inputs()` that makes the program's inputs, with nothing but torch."""
    lines = ["def inputs():"]
    lines += [f"    v{i} = {_input_text(x)}" for i, x in enumerate(program.inputs)]
    return "\n".join([*lines, f"    return [{', '.join(f'v{i}' for i in range(len(program.inputs)))}]", ""])


_VIEW_TEXTS = {
    "same": "{0}", "alias": "{0}[...]", "tail": "{0}[1:] if {0}.dim() else {0}[...]",
    "head": "{0}[:-1] if {0}.dim() else {0}[...]", "row": "{0}[-1] if {0}.dim() and len({0}) else {0}[...]",
    "turned": "{0}.permute(tuple(range({0}.dim() - 1, -1, -1)))",
}  # fmt: skip


def _input_text(x: Input) -> str:
    if x.of >= 0:
        return _VIEW_TEXTS[x.view].format(f"v{x.of}")
    size = tuple(x.size)
    if x.layout == "transposed":
        return f"{_values_text(x, size[::-1])}.permute({tuple(range(len(size) - 1, -1, -1))})"
    if x.layout == "strided":
        index = _index_text(tuple(slice(None, None, 2) for _ in size))
        return f"{_values_text(x, tuple(2 * n for n in size))}[{index}]"
    if x.layout == "offset":
        index = _index_text(tuple(slice(1, n + 1) for n in size))
        return f"{_values_text(x, tuple(n + 2 for n in size))}[{index}]"
    if x.layout == "channels_last" and len(size) == 4:
        return f"{_values_text(x, size)}.contiguous(memory_format=torch.channels_last)"
    if x.layout == "expanded" and size:
        return f"{_values_text(x, (1, *size[1:]))}.expand({size})"
    return _values_text(x, size)


def _values_text(x: Input, size: tuple[int, ...]) -> str:
    g = f"generator=torch.Generator().manual_seed({x.seed})"
    if x.dtype is torch.bool:
        return f"torch.randint(0, 2, {size}, {g}).bool()"
    if x.values == "places":
        return f"torch.randint(0, 2, {size}, {g})"
    if x.dtype.is_floating_point and x.values == "normal":
        return f"torch.randn({size}, {g}).to({x.dtype})"
    if x.dtype.is_floating_point and x.values == "special":
        inf = "float('nan'), float('inf'), float('-inf'), 0.0, -0.0, 1.0, -1.0, 0.5"
        # the generator's state after the whole numbers, as in `program._values`
        drawn = f"torch.randint(-4, 5, {size}, generator=g), table[torch.randint(0, 8, {size}, generator=g)]"
        table = f"torch.tensor([{inf}], dtype={x.dtype})"
        return f"(lambda g, table: ({drawn})[1])(torch.Generator().manual_seed({x.seed}), {table})"
    low = 0 if x.dtype is torch.uint8 else -4
    return f"torch.randint({low}, 5, {size}, {g}).to({x.dtype})"
