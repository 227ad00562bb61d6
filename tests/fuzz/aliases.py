"""`python -m tests.fuzz.aliases N`: N random programs that write in place through several names, with free sizes.

A program has a few inputs, views of views of them, readers before and after writes of every kind, and results that
share memory. Each goes one of several ways (alias_ways.py): static or free sizes, gradients, buffers of a module,
functionalisation, scripts, files. After every call the values of all names are judged, which results share memory, and
gradients. `--seed S` runs one and prints a smaller one that goes wrong.
"""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.fuzz import workers
from tests.fuzz.alias_table import RARE, READS, VIEWS, WRITES

SIZES = ((6, 8), (10, 4), (4, 12))  # n and m; every program runs in eager at all of them
EDGES = ((1, 4), (2, 2), (6, 1), (0, 4), (6, 0), (1, 1))  # where eager may raise
SHAPES = (("n", "m"), ("n", "m"), ("n", "m"), ("m", "n"), ("n",), ("m",), ("2", "n", "m"), ("n", "n"), ("n", "4"))
LAYOUTS = ("", "", "", "turned", "offset", "gap")
LARGEST = 1e4
_MOVES = ("{v}.copy_({w})", "{v}.copy_({w})", "{v}.add_({w})", "{v}.mul_({w})", "{v}[...] = {w}",
          "{v}.lerp_({w}, 0.25)", "torch.mul({w}, 2, out={v})", "torch._foreach_copy_([{v}], [{w}])")  # fmt: skip
TRIES = 80
PARTS = 8  # that are looked at for one of another tensor's size


@dataclass(frozen=True)
class Input:
    """A tensor of floats, with sizes such as "n // 2".

    `leaf`: with gradients, it is "leaf", a "result" or a "view" of one; "" without."""

    name: str
    shape: tuple[str, ...]
    layout: str = ""
    leaf: str = ""

    def size(self, n: int, m: int) -> tuple[int, ...]:
        return tuple(max(eval(s, {"n": n, "m": m}), 0) for s in self.shape)

    def make(self, n: int, m: int, chance: torch.Generator) -> torch.Tensor:
        """A tensor of quarters, in this layout; the leaf behind it is its attribute `leaf`."""
        size = self.size(n, m)
        more = {"turned": size[::-1], "offset": (*size[:-1], size[-1] + 1), "gap": (*size[:-1], size[-1] + 2)}
        given = torch.randint(-7, 8, more.get(self.layout, size), generator=chance) / 4
        if self.layout == "turned":
            given = given.permute(*reversed(range(len(size))))
        elif self.layout == "offset":
            given = given.flatten()[1 : 1 + torch.Size(size).numel()].view(size)
        elif self.layout == "gap":
            given = given[..., :-2]
        if not self.leaf:
            return given
        leaf = given.requires_grad_() if given.is_leaf else given.detach().requires_grad_()
        made = leaf if self.leaf == "leaf" else leaf * 1
        made = made.view(made.shape) if self.leaf == "view" else made
        made.behind = leaf  # type: ignore[attr-defined]
        return made


@dataclass(frozen=True)
class Program:
    """Inputs, lines and the expressions that are returned."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def text(self) -> str:
        return (
            f"def program({', '.join(x.name for x in self.inputs)}):\n    index = torch.tensor([1, 0])\n"
            + "".join(f"    {line}\n" for line in self.lines)
            + f"    return [{', '.join(self.results)}]\n"
        )

    def function(self) -> Callable[..., list[Any]]:
        return _function(self.text)

    def make_inputs(self, sizes: tuple[int, int], seed: int) -> list[torch.Tensor]:
        chance = torch.Generator().manual_seed(seed)
        return [x.make(*sizes, chance) for x in self.inputs]

    def __str__(self) -> str:
        return f"{self.text}# inputs: " + "; ".join(f"{x.name} {x.shape} {x.layout} {x.leaf}" for x in self.inputs)


@functools.lru_cache(4096)
def _function(text: str) -> Callable[..., list[Any]]:
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(text, "<aliases>", "exec"), space)
    made = space["program"]
    made.__module__ = "fuzzed"
    return made  # type: ignore[no-any-return]


# -- writing -----------------------------------------------------------------------------------------------------------
class Writer:
    """A program in the making: its lines run in eager at all sizes as they are written."""

    def __init__(self, rng: random.Random, inputs: Sequence[Input]) -> None:
        self.rng, self.inputs = rng, tuple(inputs)
        self.lines: list[str] = []
        self.count = self.writes = 0
        self.spaces: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        """The values that all names have behind the lines so far."""
        self.spaces = []
        for k, sizes in enumerate(SIZES):
            values = Program(self.inputs, (), ()).make_inputs(sizes, k)
            space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "index": torch.tensor([1, 0])}
            space |= {x.name: v for x, v in zip(self.inputs, values, strict=True)}
            self.spaces.append(space)
        for line in self.lines:
            self.run(line)

    def run(self, line: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            code = compile(line, "<line>", "exec")
        for space in self.spaces:
            exec(code, space)

    def add(self, line: str) -> bool:
        """Whether a line runs at all sizes, with numbers of an ordinary size everywhere."""
        try:
            self.run(line)
            good = all(map(_is_good, self.spaces))
        except Exception:  # whatever eager refuses
            good = False
        if good:
            self.lines.append(line)
        else:
            self.start()
        return good

    def names(self, like: Callable[[torch.Tensor], bool] = lambda t: True) -> list[str]:
        """Names of tensors of floats, in the order in which they were made."""
        skipped = ("index", "torch", "F", "t", "k")
        return [
            name for name, v in self.spaces[0].items()
            if name not in skipped and isinstance(v, torch.Tensor) and v.dtype is torch.float32 and like(v)
        ]  # fmt: skip

    def shapes(self, name: str) -> list[torch.Size]:
        return [space[name].shape for space in self.spaces]

    def pick(self, rank: int = 0) -> str:
        """A name of at least `rank` dims, a late one more likely."""
        names = self.names(lambda t: t.dim() >= rank)
        if not names:
            raise LookupError
        return names[-1 - min(int(self.rng.expovariate(0.3)), len(names) - 1)]

    def fitting(self, v: str) -> str:
        """A name of `v`'s size, mostly of other memory, or an expression that broadcasts to it."""
        rng = self.rng
        same = [n for n in self.names() if n != v and self.shapes(n) == self.shapes(v)]
        if same and rng.random() < 0.7:
            return rng.choice(same)
        wider = [n for n in self.names() if n != v and self._broadcasts(n, v)]
        if wider and rng.random() < 0.5:
            return f"{rng.choice(wider)}.expand_as({v})"
        w = rng.choice(self.names())
        made = (f"({v} * 0.5)", f"{v}.flip(0)" if self.spaces[0][v].dim() else v, f"{w}.sum().expand_as({v})", v,
                f"{w}.mean().expand_as({v})", f"{w}.reshape(-1)[:1].expand_as({v})")  # fmt: skip
        return rng.choice(made)

    def _broadcasts(self, w: str, v: str) -> bool:
        for a, b in zip(self.shapes(w), self.shapes(v), strict=True):
            if len(a) >= len(b) or any(x not in (1, y) for x, y in zip(a[::-1], b[::-1])):
                return False
        return True

    def filled(self, table: dict[int, tuple[str, ...]]) -> str:
        """A template of a table, with names in it. LookupError if no tensor has the dims."""
        rank = self.rng.choices(list(table), [len(t) for t in table.values()])[0]
        template = self.rng.choice(table[rank])
        v = self.pick(rank)
        d = self.rng.randrange(max(self.spaces[0][v].dim(), 1))
        d = d - self.spaces[0][v].dim() if self.rng.random() < 0.3 else d
        w = self.fitting(v) if "{w}" in template else ""
        return template.format(v=v, w=w, d=d, i=self.rng.randint(0, 1), n=f"t{self.count}")

    def named(self, text: str) -> bool:
        if not self.add(f"v{self.count} = {text}"):
            return False
        self.count += 1
        return True

    def crossed(self) -> None:
        """A part of one tensor is written into another of its size, before or after the first one is written."""
        rng = self.rng
        for _ in range(PARTS):
            x = self.pick_whole()
            rank = rng.choice([r for r in VIEWS if 0 < r <= self.spaces[0][x].dim()] or [0])
            lists = [v for v in VIEWS[rank] if v.endswith("[{i}]")]
            view = rng.choice(lists if lists and rng.random() < 0.4 else VIEWS[rank])
            place = {"d": rng.randrange(max(self.spaces[0][x].dim(), 1)), "i": rng.randint(0, 1), "n": f"t{self.count}"}
            part = view.format(v=x, w=x, **place)
            wholes = self._of_size(part, x)
            if wholes:
                break
        twins = [n for n in self.names() if n != x and self.shapes(n) == self.shapes(x)]
        if wholes and (rng.random() < 0.8 or not twins):
            target = rng.choice(wholes)
        elif twins:
            target = view.format(v=rng.choice(twins), w=x, **place)
        else:
            raise LookupError
        turned = rng.choice(("", "", ".mT", ".mT", ".flatten()", "[None]", ".movedim(0, -1)", "[1:]"))
        source = f"{part}{turned}" if rng.random() < 0.7 else rng.choice(READS[0][:4]).format(v=part, w=part) + turned
        moved = rng.choice(_MOVES).format(v=target + turned, w=source)
        written = rng.choice(WRITES[rng.choice([r for r in WRITES if r <= self.spaces[0][x].dim()])])
        written = written.format(v=x, w=self.fitting(x), **place)
        for line in (moved, written) if rng.random() < 0.75 else (written, moved):
            self.writes += self.add(line)
            self.count += 1

    def _of_size(self, part: str, x: str) -> list[str]:
        """Names other than `x` of the size of a part, if there is such a part at all sizes."""
        try:
            sizes = [eval(part, space).shape for space in self.spaces]
        except Exception:  # whatever eager refuses
            return []
        return [n for n in self.names() if n != x and self.shapes(n) == sizes]

    def pick_whole(self) -> str:
        """An input, mostly, or another name."""
        inputs = [x.name for x in self.inputs if x.name in self.names()]
        return self.rng.choice(inputs) if self.rng.random() < 0.8 else self.pick()

    def step(self, grad: bool) -> None:
        """One more line, or none."""
        weights = (32, 28, 12, 0.6, 6 if grad else 0, 28)
        kind = self.rng.choices(("view", "write", "read", "rare", "no_grad", "crossed"), weights)[0]
        try:
            if kind == "crossed":
                self.crossed()
            elif kind == "view":
                self.named(self.filled(VIEWS))
            elif kind == "read":
                self.named(self.filled(READS))
            else:
                line = self.filled({0: RARE} if kind == "rare" else WRITES)
                if kind == "no_grad":
                    if line.startswith("for"):
                        return
                    line = f"with torch.no_grad(): {line}"
                self.writes += self.add(line)
                self.count += 1
        except (LookupError, RuntimeError, ValueError, TypeError):  # no name or no part of it fits
            return


def _is_good(space: dict[str, Any]) -> bool:
    values = [v.detach() for v in space.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return all(not v.numel() or bool(v.abs().max() < LARGEST) for v in values)


def generate(seed: int, grad: bool) -> Program:
    """The program of a seed."""
    rng = random.Random(f"aliases {seed}")
    while True:
        inputs = [Input(n, rng.choice(SHAPES), rng.choice(LAYOUTS)) for n in "abcd"[: rng.choice((2, 3, 3, 4))]]
        if rng.random() < 0.7:  # more names fit each other
            inputs = [replace(x, shape=inputs[0].shape) for x in inputs]
        if rng.random() < 0.6:  # one has the size of a part of the others
            shape, at = list(inputs[0].shape), rng.randrange(len(inputs[0].shape))
            if shape[at] in "nm":
                shape[at] = rng.choice((f"{shape[at]} // 2", f"{shape[at]} // 2", f"{shape[at]} - 1", "2"))
            k = rng.randrange(1, len(inputs))
            inputs[k] = replace(inputs[k], shape=tuple(shape))
        if grad:
            kinds = ("leaf", "result", "view")
            inputs = [replace(x, leaf=rng.choice(kinds) if k < 2 else "") for k, x in enumerate(inputs)]
        w = Writer(rng, inputs)
        for k, x in enumerate(inputs):
            if x.leaf == "leaf":  # eager refuses writes into leaves
                w.named(f"{x.name} {'* 1' if k else '+ 0'}")
        wanted, tries = rng.choice((3, 4, 4, 5, 5, 6, 7, 9)), 0
        while tries < TRIES and (len(w.lines) < wanted or not w.writes):
            tries += 1
            w.step(grad)
        made = Program(w.inputs, tuple(w.lines), _results(w))
        if w.writes and runs(made, grad):
            return made


def _results(w: Writer) -> tuple[str, ...]:
    """What the program returns: copies of all values, some values as they are, or a single one.

    Passes do not rewrite a value that is returned, so programs that return little are needed, too.
    """
    names, rng = w.names(), w.rng
    kind = rng.random()
    if kind < 0.2:
        return tuple(f"{n}.clone()" for n in names)
    own = [n for n in names if n not in [x.name for x in w.inputs]]
    if kind < 0.6:  # the inputs are judged all the same
        return (rng.choice([*own, "index"]) if rng.random() < 0.5 else f"{rng.choice(names)}.sum()",)
    some = [n for n in names if rng.random() < 0.5] or names[-1:]
    rng.shuffle(some)
    return tuple(n if kind < 0.9 or rng.random() < 0.5 else f"{n} * 2" for n in some)


def runs(program: Program, grad: bool) -> bool:
    """Whether eager runs a program at all sizes, backward too, twice with the same outcome."""
    from tests.fuzz.alias_ways import differs, outcome

    for k, sizes in enumerate(SIZES):
        found = [outcome(program.function(), program.make_inputs(sizes, k), grad) for _ in range(2)]
        if isinstance(found[0], str) or differs(*found):
            return False
    return True


# -- running -----------------------------------------------------------------------------------------------------------
def way_of(seed: int) -> str:
    """The way that a seed's program goes."""
    from tests.fuzz.alias_ways import WAYS

    names = [w.name for w in WAYS.values() for _ in range(w.share)]
    return names[seed * 37 % len(names)]


def run_batch(seeds: Sequence[int], way: str | None, level: str) -> Iterator[workers.Event]:
    """The events of a suite, see workers.py. Groups run on ATen, but for one program in eight."""
    from tests.fuzz.alias_ways import problem

    for seed in seeds:
        workers.alive()
        own = way or way_of(seed)
        program = generate(seed, own.startswith("grad"))
        yield seed, own, None, program
        yield seed, own, problem(program, own, seed), program


def shrunk(seed: int, way: str | None) -> str:
    """The program of a seed with as few lines, results and inputs in odd layouts as go wrong."""
    from tests.fuzz.alias_ways import problem

    own = way or way_of(seed)
    grad = own.startswith("grad")
    program = generate(seed, grad)
    found = problem(program, own, seed)
    if not found:
        return f"seed {seed} by {own}: nothing is wrong"
    smaller = True
    while smaller:
        smaller = False
        for other in _smaller(program):
            try:
                wrong = runs(other, grad) and problem(other, own, seed)
            except Exception:  # a name is missing
                wrong = ""
            if wrong:
                program, found, smaller = other, wrong, True
                break
    return f"seed {seed} by {own}: {found}\n{program}"


def _smaller(p: Program) -> Iterator[Program]:
    for k in reversed(range(len(p.lines))):
        yield replace(p, lines=p.lines[:k] + p.lines[k + 1 :])
    for k in range(len(p.results)) if len(p.results) > 1 else ():
        yield replace(p, results=p.results[:k] + p.results[k + 1 :])
    for k, x in enumerate(p.inputs):
        if x.layout:
            yield replace(p, inputs=(*p.inputs[:k], replace(x, layout=""), *p.inputs[k + 1 :]))


def text(seed: int, way: str) -> str:
    return str(generate(seed, way.startswith("grad")))


SUITE = workers.Suite("tests.fuzz.aliases", run_batch, way_of, shrunk, text, batch=16)

if __name__ == "__main__":
    sys.exit(workers.main(SUITE, __doc__))
