"""Random programs. Each step is tried on real tensors as it is added, so programs run; a seed gives the same program.

Beside the real run goes one in float64. A value is *exact* if it was computed by exact operations from exact values
and both runs agree: such values must come out the same to the bit, and only they go into operations that a rounding
could turn over (comparisons, casts to integers, floor, argmax).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import compare
from tests.fuzz.program import VIEWS, Input, Program, Ref, Step, make_inputs, map_refs, refs, run_step

FLOATS = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SIZES = ((), (5,), (40,), (3, 8), (8, 3), (4, 16), (2, 3, 8), (1, 8), (4, 1), (17, 3), (2, 2, 2, 4), (0, 4), (33, 40),
         (2, 4, 3, 5), (1, 3, 4, 4), (5000,), (70, 65))  # fmt: skip
OFTEN = {
    "unary": 3, "binary": 4, "where": 2, "cast": 2, "total": 2, "elementary": 3, "activation": 3, "write_binary": 3,
}  # fmt: skip
MOST_ELEMENTS, LARGEST = 6000, 512.0


@dataclass
class State:
    """A program in the making, its values so far in both runs."""

    rng: random.Random
    mutate: bool
    often: Mapping[str, int]
    inputs: list[Input] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    wide: list[Any] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)

    def pick(self, want: Callable[[torch.Tensor], bool] = lambda t: True, exact: bool = False) -> int:
        """A random tensor value, later ones more likely. LookupError if none fits."""
        fits = [
            i for i, v in enumerate(self.values)
            if isinstance(v, torch.Tensor) and want(v) and (self.exact[i] or not exact)
        ]  # fmt: skip
        if not fits:
            raise LookupError
        return fits[-1 - min(int(self.rng.expovariate(0.4)), len(fits) - 1)]


Maker = Callable[[State], tuple[str, tuple[Any, ...], dict[str, Any]]]
_EXACT: dict[str, Maker] = {}  # exact on exact values
_SMOOTH: dict[str, Maker] = {}  # a small error in gives a small error out
_MUTATING: dict[str, Maker] = {}


def exact(fn: Maker) -> Maker:
    _EXACT[fn.__name__] = fn
    return fn


def smooth(fn: Maker) -> Maker:
    _SMOOTH[fn.__name__] = fn
    return fn


def mutating(fn: Maker) -> Maker:
    _MUTATING[fn.__name__] = fn
    return fn


def generate(seed: int, mutate: bool = False, most: int = 10, often: Mapping[str, int] = OFTEN) -> Program:
    """The program of a seed, of up to `most` steps, some kinds of which are `often` chosen. `mutate` lets it write into
    its inputs and into views, and lets inputs overlap."""
    rng = random.Random(seed * 2 + mutate)
    while True:
        state = State(rng, mutate, often)
        _make_inputs(state)
        want = rng.randint(1, most)
        for _ in range(3 * want):
            if len(state.steps) >= want:
                break
            _try_step(state)
        if state.steps:
            return _finish(state)


def _make_inputs(state: State) -> None:
    rng = state.rng
    size = rng.choice(SIZES)
    for n in range(rng.randint(1, 4)):
        if state.mutate and n and rng.random() < 0.25:
            of = rng.randrange(n)
            while state.inputs[of].of >= 0:
                of = state.inputs[of].of
            base = state.inputs[of]
            state.inputs.append(Input(base.size, base.dtype, of=of, view=rng.choice(tuple(VIEWS))))
            continue
        own = size if rng.random() < 0.7 else rng.choice(SIZES)
        if rng.random() < 0.2 and own:
            own = own[1:] if rng.random() < 0.5 else tuple(1 if rng.random() < 0.5 else s for s in own)
        if own and rng.random() < 0.12:
            state.inputs.append(Input(own[-1:] if rng.random() < 0.6 else own, torch.int64, "dense", "places", n))
            continue
        kind = rng.random()
        dtype = rng.choice(FLOATS) if kind < 0.7 else rng.choice(INTS) if kind < 0.9 else torch.bool
        values = rng.choice(("integers", "integers", "normal", "special")) if dtype.is_floating_point else "integers"
        layout = rng.choice(("dense", "dense", "dense", "transposed", "strided", "offset"))
        if len(own) == 4 and rng.random() < 0.4:
            layout = "channels_last"
        if not state.mutate and rng.random() < 0.08:
            layout = "expanded"
        state.inputs.append(Input(own, dtype, layout, values, rng.randrange(1 << 30)))
    made = make_inputs(Program(tuple(state.inputs), (), ()))
    state.values = list(made)
    # The wide run's inputs alias each other as the real ones do.
    state.wide = []
    for i, x in enumerate(state.inputs):
        if x.of >= 0:
            state.wide.append(VIEWS[x.view](state.wide[x.of]))
        else:
            wide = made[i].clone().double() if made[i].is_floating_point() else made[i].clone()
            state.wide.append(wide)
    state.exact = [True] * len(made)


def _weighted(names: Iterable[str], often: Mapping[str, int]) -> list[str]:
    return [n for n in names for _ in range(often.get(n, 1))]


def _tables(state: State) -> list[tuple[dict[str, Maker], float]]:
    tables = [(_EXACT, 0.75), (_SMOOTH, 0.25)]
    return [*tables, (_MUTATING, 0.45)] if state.mutate else tables


def _try_step(state: State) -> None:
    tables = _tables(state)
    table = state.rng.choices([t for t, _ in tables], [w for _, w in tables])[0]
    name = state.rng.choice(_weighted(table, state.often))
    try:
        fn, args, kwargs = table[name](state)
    except LookupError:
        return
    step = Step(fn, args, tuple(kwargs.items()))
    mutates = table is _MUTATING
    before = [_snapshot(state.values), _snapshot(state.wide)] if mutates else None
    try:
        value = run_step(step, state.values)
        wide = run_step(_widened(step), state.wide)
        good = all(_is_good(v) for v in _tensors(value)) and (not mutates or all(map(_is_good, _tensors(state.values))))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        good = False
    if not good:
        if before is not None:
            _restore(state.values, before[0])
            _restore(state.wide, before[1])
        return
    adds = any(word in fn for word in _ADDING)  # in whatever order: exact where no order rounds
    safe = table is not _SMOOTH and (not adds or _are_round(state, args))
    safe = safe and all(state.exact[i] for i in refs((args, tuple(kwargs.values()))))
    safe = safe and not (fn in _TIED and any(_has_negative_zero(state.values[i]) for i in refs(args)))
    state.steps.append(step)
    state.values.append(value)
    state.wide.append(wide)
    state.exact.append(safe and _agree(value, wide))
    if isinstance(value, (tuple, list)):
        _unpack(state, value)
    if mutates:
        _spread_doubt(state)


_ADDING = ("sum", "_add", "index_put")
# Of two zeros, eager takes the one or the other by where in a vector of the machine they lie; so does a kernel where
# eager takes the first.
_TIED = (
    "torch.amax", "torch.amin", "torch.aminmax", "torch.maximum", "torch.minimum", "torch.fmax", "torch.fmin",
    "torch.scatter_reduce", "torch.max", "torch.min", "F.max_pool2d",
)  # fmt: skip


def _has_negative_zero(v: Any) -> bool:
    return isinstance(v, torch.Tensor) and v.is_floating_point() and bool(((v == 0) & v.signbit()).any())


def _are_round(state: State, args: tuple[Any, ...]) -> bool:
    return all(_is_round(state.values[i]) for i in refs(args) if isinstance(state.values[i], torch.Tensor))


def _is_round(v: torch.Tensor) -> bool:
    """Whether the numbers are multiples of an eighth, as small as all are here: their sums do not round."""
    if not v.dtype.is_floating_point:
        return True
    eighths = v.double()[v.isfinite()] * 8
    return bool((eighths == eighths.round()).all())


def _unpack(state: State, value: Any) -> None:
    at = len(state.values) - 1
    for i in state.rng.sample(range(len(value)), min(2, len(value))):
        if not isinstance(value[i], torch.Tensor):
            continue
        state.steps.append(Step("getitem", (Ref(at), i)))
        state.values.append(value[i])
        state.wide.append(state.wide[at][i])
        state.exact.append(state.exact[at])


def _snapshot(values: list[Any]) -> list[Any]:
    """What each tensor holds, and its form, which a write may change, too (`unsqueeze_`)."""
    return [
        (v.clone(), v.size(), v.stride(), v.storage_offset()) if isinstance(v, torch.Tensor) else None for v in values
    ]


def _restore(values: list[Any], saved: list[Any]) -> None:
    for v, before in zip(values, saved):
        if before is not None:
            held, *form = before
            v.as_strided_(*form)
            if 0 not in v.stride() or not v.numel():
                v.copy_(held)


def _spread_doubt(state: State) -> None:
    """After a write: values whose memory no longer holds what the wide run has are not exact any more."""
    for i, (v, w) in enumerate(zip(state.values, state.wide)):
        if isinstance(v, torch.Tensor) and state.exact[i]:
            state.exact[i] = state.exact[-1] and _agree(v, w) if _shares(v, state.values[-1]) else _agree(v, w)


def _shares(a: Any, b: Any) -> bool:
    if not isinstance(b, torch.Tensor):
        return True
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _widened(step: Step) -> Step:
    if step.fn == ".view":
        return step  # of the same bits

    def widen(v: Any) -> Any:
        if isinstance(v, torch.dtype):
            return torch.float64 if v.is_floating_point else v
        if isinstance(v, (tuple, list)):
            return type(v)(widen(x) for x in v)
        return v

    return Step(step.fn, widen(step.args), widen(step.kwargs))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in compare.leaves(value) if isinstance(v, torch.Tensor)]


def _is_good(v: torch.Tensor) -> bool:
    if v.numel() > MOST_ELEMENTS or v.dim() > 6 or v.is_complex():
        return False
    if not v.dtype.is_floating_point:
        return True
    finite = v.double()[v.isfinite()]
    return not finite.numel() or float(finite.abs().max()) <= LARGEST


def _agree(value: Any, wide: Any) -> bool:
    pairs = list(zip(_tensors(value), _tensors(wide)))
    return all(_same_bits(a, b) for a, b in pairs)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    x, y = a.double(), b.double()
    same = (x == y) & (torch.signbit(x) == torch.signbit(y)) | x.isnan() & y.isnan()
    return bool(same.all())


def _finish(state: State) -> Program:
    tensors = [i for i, v in enumerate(state.values) if isinstance(v, torch.Tensor)]
    made = [i for i in tensors if i >= len(state.inputs)]
    read = {r for s in state.steps for r in refs((s.args, s.kwargs))}
    last = [i for i in made if i not in read]
    outputs = last[:4] or made[-1:]
    if state.rng.random() < 0.3 and made:
        outputs.append(state.rng.choice(made))
    if state.rng.random() < 0.05:
        outputs.append(state.rng.choice(tensors))
    exact = tuple(o for o in outputs if state.exact[o])
    program = Program(tuple(state.inputs), tuple(state.steps), tuple(outputs), exact)
    return drop_unused(program) if not state.mutate else program


def drop_unused(program: Program) -> Program:
    """The program without steps and inputs that its outputs do not need; only for programs that write nothing."""
    n = len(program.inputs)
    needed: set[int] = set()
    pending = list(program.outputs)
    while pending:
        i = pending.pop()
        if i not in needed:
            needed.add(i)
            if i >= n:
                s = program.steps[i - n]
                pending += refs((s.args, s.kwargs))
            elif program.inputs[i].of >= 0:
                pending.append(program.inputs[i].of)
    number = {old: new for new, old in enumerate(sorted(needed))}

    def moved(v: Any) -> Any:
        return map_refs(v, lambda r: Ref(number[r.index]))

    inputs = tuple(
        x if x.of < 0 else Input(x.size, x.dtype, x.layout, x.values, x.seed, number[x.of], x.view)
        for i, x in enumerate(program.inputs)
        if i in needed
    )
    steps = tuple(Step(s.fn, moved(s.args), moved(s.kwargs)) for i, s in enumerate(program.steps) if i + n in needed)
    outputs = tuple(number[o] for o in program.outputs)
    return Program(inputs, steps, outputs, tuple(number[o] for o in program.exact if o in number))


from tests.fuzz import indexing, operations, reductions, writes  # noqa: E402, F401  they register the makers above
