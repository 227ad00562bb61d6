"""Programs such as state-space models, wavelets and scans by halves: sequences interleaved and taken apart again.

Rows of a time axis are stacked and flattened, shifted by a step with a first value in front, flipped, rolled, cut into
windows, halved into even and odd steps, and accumulated. Sizes are left open (`-1`, flattened dims), so that a program
runs for others too. They are smooth but for exact movements, so all have gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.fuzz.generate import _is_good, drop_unused
from tests.fuzz.program import Input, Program, Ref, Step, make_inputs, run_step

LENGTHS = (2, 4, 6, 8, 10, 12, 12, 16, 24, 30, 66, 130, 514)
WIDTHS = (1, 2, 3, 5, 8, 16)
MOST_STEPS, LONGEST = 26, 6000


class Writer:
    """A program in the making; `add` runs a step and gives the number of its value."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: list[Any] = []
        self.states: list[int] = []  # sequences that later moves start from

    def add(self, fn: str, *args: Any, **kwargs: Any) -> int:
        """LookupError if the step does not run, or makes numbers that are too large."""
        step = Step(fn, args, tuple(kwargs.items()))
        try:
            value = run_step(step, self.values)
        except (RuntimeError, IndexError, ValueError, TypeError) as e:
            raise LookupError from e
        if isinstance(value, torch.Tensor) and (not _is_good(value) or not value.numel() or value.dim() > 4):
            raise LookupError
        self.steps.append(step)
        self.values.append(value)
        return len(self.values) - 1

    def size(self, i: int, dim: int) -> int:
        """The extent of a dim of value `i`."""
        return int(self.values[i].shape[dim])

    def pick(self, want: Callable[[torch.Tensor], bool] = lambda t: True) -> int:
        """A sequence, later ones more likely."""
        fits = [i for i in self.states if want(self.values[i])]
        if not fits:
            raise LookupError
        return fits[-1 - min(int(self.rng.expovariate(0.7)), len(fits) - 1)]

    def like(self, i: int) -> int:
        """A sequence of the size of value `i`: another one, or the same with other values."""
        found = [j for j in self.states if j != i and self.values[j].shape == self.values[i].shape]
        if found and self.rng.random() < 0.7:
            return self.rng.choice(found)
        return self.add("torch.mul", Ref(i), self.rng.choice((2.0, -1.0, 0.5)))

    def dim(self, i: int) -> int:
        """A dim of value `i`, mostly its first."""
        rank = self.values[i].dim()
        return 0 if self.rng.random() < 0.5 else self.rng.randrange(rank)


def at(dim: int, part: Any) -> tuple[Any, ...]:
    """The index that takes `part` along `dim`."""
    return (*[slice(None)] * dim, part)


# -- moves -------------------------------------------------------------------------------------------------------------
def interleave(w: Writer) -> int:
    """a0 b0 a1 b1 …"""
    i = w.pick()
    d = w.dim(i)
    parts = [Ref(i), *(Ref(w.like(i)) for _ in range(w.rng.choice((1, 1, 1, 2))))]
    w.rng.shuffle(parts)
    both = w.add("torch.stack", tuple(parts), d + 1)
    if w.rng.random() < 0.5:
        return w.add("torch.flatten", Ref(both), d, d + 1)
    size = list(w.values[i].shape)
    size[d] = -1
    return w.add(".reshape", Ref(both), tuple(size))


def shift(w: Writer) -> int:
    """h y0 y1 …: what was before, with a first value in front; or the other way round."""
    i = w.pick()
    d = w.dim(i)
    n = w.rng.choice((1, 1, 1, 2, 3))
    if w.rng.random() < 0.5:
        rest, edge = w.add("getitem", Ref(i), at(d, slice(None, -n))), slice(None, n)
    else:
        rest, edge = w.add("getitem", Ref(i), at(d, slice(n, None))), slice(-n, None)
    if w.rng.random() < 0.6:
        rest = w.add("torch.mul", Ref(rest), w.rng.choice((2.0, 0.5, -1.0)))
    if w.rng.random() < 0.3:
        amounts = [0, 0] * (w.values[i].dim() - d - 1) + ([n, 0] if edge.start is None else [0, n])
        return w.add("F.pad", Ref(rest), tuple(amounts))
    own = w.add("torch.tanh", Ref(w.add("getitem", Ref(w.like(i)), at(d, edge))))
    return w.add("torch.cat", (Ref(own), Ref(rest)) if edge.start is None else (Ref(rest), Ref(own)), d)


def halve(w: Writer) -> int:
    """Even and odd steps, joined again: one level of a scan by halves, or of a wavelet."""
    i = w.pick()
    d = w.dim(i)
    if w.size(i, d) % 2:
        raise LookupError
    even = w.add("getitem", Ref(i), at(d, slice(None, None, 2)))
    odd = w.add("getitem", Ref(i), at(d, slice(1, None, 2)))
    kind = w.rng.random()
    if kind < 0.4:
        return w.add("torch." + w.rng.choice(("add", "mul", "sub")), Ref(odd), Ref(even))
    if kind < 0.7:
        odd = w.add("torch.add", Ref(odd), Ref(even))
    if w.rng.random() < 0.5:
        return w.add("torch.cat", (Ref(odd), Ref(even)), d)
    both = w.add("torch.stack", (Ref(even), Ref(odd)), d + 1)
    return w.add("torch.flatten", Ref(both), d, d + 1)


def doubling(w: Writer) -> int:
    """A cumulative sum by shifts of 1, 2, 4, …"""
    i = w.pick()
    d = w.dim(i)
    n, step, limit = w.size(i, d), 1, w.rng.choice((2, 4, 8))
    while step < min(n, limit):
        amounts = [0, 0] * (w.values[i].dim() - d - 1) + [step, 0]
        moved = w.add("F.pad", Ref(w.add("getitem", Ref(i), at(d, slice(None, -step)))), tuple(amounts))
        i = w.add("torch.add", Ref(i), Ref(moved), alpha=w.rng.choice((1, 1, 0.5)))
        step *= 2
    return i


def turn(w: Writer) -> int:
    """Flips and rolls."""
    i = w.pick()
    d = w.dim(i)
    if w.rng.random() < 0.5:
        return w.add("torch.flip", Ref(i), (d,))
    return w.add("torch.roll", Ref(i), (w.rng.choice((1, -1, 2, -3)),), (d,))


def step_back(w: Writer) -> int:
    """x[::-k], by a flip and a strided slice."""
    i = w.pick()
    d = w.dim(i)
    turned = w.add("torch.flip", Ref(i), (d,))
    return w.add("getitem", Ref(turned), at(d, slice(w.rng.choice((None, 1)), None, w.rng.choice((2, 2, 3)))))


def strided(w: Writer) -> int:
    """x[1::2] and its like."""
    i = w.pick()
    part = slice(w.rng.choice((None, 0, 1, 2, -5)), w.rng.choice((None, None, -1)), w.rng.choice((1, 2, 2, 3)))
    return w.add("getitem", Ref(i), at(w.dim(i), part))


def windows(w: Writer) -> int:
    """Windows along a dim, summed or flattened."""
    i = w.pick()
    d = w.dim(i)
    made = w.add(".unfold", Ref(i), d, min(w.rng.choice((2, 2, 3, 4)), w.size(i, d)), w.rng.choice((1, 1, 2, 3)))
    if w.rng.random() < 0.5:
        return w.add("torch.sum", Ref(made), (-1,))
    last = w.add(".movedim", Ref(made), -1, d + 1)
    return w.add("torch.flatten", Ref(last), d, d + 1)


def blocks(w: Writer) -> int:
    """A dim in blocks that are turned round, or one after the other in another order."""
    i = w.pick()
    d = w.dim(i)
    n = w.rng.choice([k for k in (2, 3, 4, 5) if w.size(i, d) % k == 0] or [1])
    cut = w.add(".unflatten", Ref(i), d, w.rng.choice(((-1, n), (n, -1))))
    if w.rng.random() < 0.5:
        cut = w.add(".transpose", Ref(cut), d, d + 1)
    elif w.rng.random() < 0.5:
        cut = w.add("torch.flip", Ref(cut), (d + w.rng.randrange(2),))
    return w.add("torch.flatten", Ref(cut), d, d + 1)


def transposed(w: Writer) -> int:
    i = w.pick(lambda t: t.dim() > 1)
    made = w.add(".transpose", Ref(i), 0, w.values[i].dim() - 1)
    return w.add("torch.flatten", Ref(made)) if w.rng.random() < 0.3 else made


def accumulate(w: Writer) -> int:
    i = w.pick()
    d = w.dim(i)
    mean = w.add("torch.mul", Ref(i), 1.0 / w.size(i, d))
    return w.add("torch.cumsum", Ref(mean), d)


def gate(w: Writer) -> int:
    """What one sequence lets through of another."""
    i = w.pick()
    return w.add("torch.mul", Ref(i), Ref(w.add("torch.sigmoid", Ref(w.like(i)))))


def combine(w: Writer) -> int:
    i = w.pick()
    return w.add("torch." + w.rng.choice(("add", "sub", "mul")), Ref(i), Ref(w.like(i)))


def bend(w: Writer) -> int:
    return w.add("torch." + w.rng.choice(("tanh", "sin", "sigmoid", "neg")), Ref(w.pick()))


def repeated(w: Writer) -> int:
    i = w.pick()
    return w.add("torch.repeat_interleave", Ref(i), 2, w.dim(i))


def joined(w: Writer) -> int:
    i = w.pick()
    d = w.dim(i)
    return w.add("torch.cat", (Ref(i), Ref(w.add("torch.flip", Ref(w.like(i)), (d,)))), d)


def drawn(w: Writer) -> int:
    """Rows by a computed index, the one before each for instance."""
    i = w.pick(lambda t: t.dim() > 0)
    n = w.size(i, 0)
    index = w.add("torch.arange", n)
    index = w.add("torch.add", Ref(index), w.rng.choice((-1, 1, n // 2)))
    index = w.add("torch.remainder", Ref(index), n)
    return w.add("torch.index_select", Ref(i), 0, Ref(index))


MOVES = {
    interleave: 6, shift: 6, halve: 4, strided: 4, turn: 3, step_back: 2, windows: 2, blocks: 3, transposed: 1,
    doubling: 2, accumulate: 1, gate: 2, combine: 3, bend: 1, repeated: 1, joined: 2, drawn: 1,
}  # fmt: skip


def generate(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(f"sequence {seed}")
    while True:
        w = Writer(rng)
        dtype = rng.choice((torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16))
        size = rng.choice(((), (), (rng.choice((2, 3)),))) + (rng.choice(LENGTHS),)
        size = size if rng.random() < 0.5 else (*size, rng.choice(WIDTHS))
        for _ in range(rng.randint(1, 3)):
            layout = rng.choice(("dense", "dense", "dense", "transposed", "strided"))
            own = _in_blocks(rng, size) if rng.random() < 0.4 else size
            w.inputs.append(Input(own, dtype, layout, rng.choice(("integers", "normal")), rng.randrange(1 << 30)))
        w.values = list(make_inputs(Program(tuple(w.inputs), (), ())))
        plain = [i for i, x in enumerate(w.inputs) if x.size == size]
        try:
            w.states = plain + [w.add("torch.flatten", Ref(i), 0, 1) for i, x in enumerate(w.inputs) if x.size != size]
        except LookupError:  # numbers of an input are too large: others are drawn
            continue
        for _ in range(rng.randint(2, 9)):
            if len(w.steps) >= MOST_STEPS:
                break
            _try(w)
        made = [i for i in w.states[len(w.inputs) :] if i >= len(w.inputs)]
        if made:
            outputs = {made[-1], *rng.sample(made, min(len(made), rng.choice((0, 0, 1, 2))))}
            return drop_unused(Program(tuple(w.inputs), tuple(w.steps), tuple(sorted(outputs))))


def _in_blocks(rng: random.Random, size: tuple[int, ...]) -> tuple[int, ...]:
    """`size` with the first dim in two, if it can be divided."""
    inner = [k for k in (2, 3, 4, 5) if size[0] % k == 0 and size[0] > k]
    if not inner:
        return size
    n = rng.choice(inner)
    return (size[0] // n, n, *size[1:])


def _try(w: Writer) -> None:
    """One move, or none if it does not fit."""
    done = len(w.steps)
    try:
        w.states.append(w.rng.choices(list(MOVES), list(MOVES.values()))[0](w))
    except LookupError:
        del w.steps[done:], w.values[len(w.inputs) + done :]
