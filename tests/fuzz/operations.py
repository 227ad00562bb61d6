"""What programs are made of. A maker returns a call on values of the state; what torch refuses is dropped."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.generate import FLOATS, INTS, State, exact, smooth
from tests.fuzz.program import Ref

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
ALL = (*FLOATS, *INTS, torch.bool)


def is_float(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point


def is_number(t: torch.Tensor) -> bool:
    return t.dtype is not torch.bool


def is_whole(t: torch.Tensor) -> bool:
    return not t.dtype.is_floating_point


def is_bool(t: torch.Tensor) -> bool:
    return t.dtype is torch.bool


def has_dims(t: torch.Tensor) -> bool:
    return t.dim() > 0


def call(fn: str, *args: Any, **kwargs: Any) -> Call:
    return fn, args, kwargs


def partner(s: State, of: int, same_dtype: bool = False) -> int:
    """A value that broadcasts with value `of`."""
    x = s.values[of]

    def fits(t: torch.Tensor) -> bool:
        if same_dtype and t.dtype is not x.dtype:
            return False
        return all(a == b or a == 1 or b == 1 for a, b in zip(reversed(t.shape), reversed(x.shape)))

    return s.pick(fits)


def scalar(s: State, x: torch.Tensor) -> Any:
    """A number to combine with a tensor."""
    if s.rng.random() < 0.3 and x.dtype.is_floating_point:
        return s.rng.choice((0.5, 2.0, -1.5, 0.25))
    return s.rng.choice((1, 2, 3, -1, 0)) if x.dtype is not torch.uint8 else s.rng.choice((1, 2, 3))


def other(s: State, i: int) -> Any:
    return Ref(partner(s, i)) if s.rng.random() < 0.75 else scalar(s, s.values[i])


def dim_of(s: State, i: int) -> int:
    rank = s.values[i].dim()
    if not rank:
        raise LookupError
    return s.rng.randrange(-rank, rank)


# -- pointwise, exact --------------------------------------------------------------------------------------------------
@exact
def unary(s: State) -> Call:
    names = "neg abs sign floor ceil round trunc relu square logical_not isnan isinf isfinite clone frac signbit"
    name, i = s.rng.choice(names.split()), s.pick(exact=True)
    if name == "signbit" and bool(s.values[i].isnan().any()):
        raise LookupError  # which sign a NaN has is nobody's promise
    return call("torch." + name, Ref(i))


@exact
def binary(s: State) -> Call:
    i = s.pick()
    return call("torch." + s.rng.choice(("add", "sub", "mul", "add", "mul")), Ref(i), other(s, i))


@exact
def extremes(s: State) -> Call:
    i = s.pick()
    return call("torch." + s.rng.choice(("maximum", "minimum", "fmax", "fmin")), Ref(i), Ref(partner(s, i)))


@exact
def comparison(s: State) -> Call:
    i = s.pick(exact=True)
    j = partner(s, i)
    if not s.exact[j]:
        raise LookupError
    right = Ref(j) if s.rng.random() < 0.6 else scalar(s, s.values[i])
    return call("torch." + s.rng.choice(("eq", "ne", "lt", "le", "gt", "ge")), Ref(i), right)


@exact
def whole_binary(s: State) -> Call:
    i = s.pick(is_whole)
    j = partner(s, i)
    if s.values[j].dtype.is_floating_point:
        raise LookupError
    names = "bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor"
    return call("torch." + s.rng.choice(names.split()), Ref(i), Ref(j))


@exact
def bitwise_not(s: State) -> Call:
    return call("torch.bitwise_not", Ref(s.pick(is_whole)))


@exact
def shift(s: State) -> Call:
    i = s.pick(lambda t: is_whole(t) and is_number(t))
    return call("torch." + s.rng.choice(("bitwise_left_shift", "bitwise_right_shift")), Ref(i), s.rng.randint(0, 3))


@exact
def division(s: State) -> Call:
    i = s.pick(is_number, exact=True)
    name = s.rng.choice(("floor_divide", "remainder", "fmod"))
    return call("torch." + name, Ref(i), s.rng.choice((1, 2, 3, -2, 4)) if s.values[i].dtype is not torch.uint8 else 3)


@exact
def where(s: State) -> Call:
    c = s.pick(is_bool)
    i = partner(s, c)
    return call("torch.where", Ref(c), Ref(i), other(s, i))


@exact
def clamp(s: State) -> Call:
    low = s.rng.choice((-2, -1, 0, 0.5))
    return call("torch.clamp", Ref(s.pick(is_number)), low, low + s.rng.choice((1, 2, 3)))


@exact
def masked_fill(s: State) -> Call:
    m = s.pick(is_bool)
    return call("torch.masked_fill", Ref(partner(s, m)), Ref(m), s.rng.choice((0, 1, 2)))


@exact
def cast(s: State) -> Call:
    dtype = s.rng.choice(ALL)
    i = s.pick(exact=not dtype.is_floating_point)
    return call(".to", Ref(i), dtype)


@smooth  # eager rounds once where the machine can
def addcmul(s: State) -> Call:
    i = s.pick(is_number)
    return call("torch.addcmul", Ref(i), Ref(partner(s, i)), Ref(partner(s, i)), value=s.rng.choice((1, 2)))


@smooth
def scaled_add(s: State) -> Call:
    i = s.pick(is_number)
    return call("torch." + s.rng.choice(("add", "sub")), Ref(i), Ref(partner(s, i)), alpha=s.rng.choice((2, 3)))


@exact
def reverse_sub(s: State) -> Call:
    return call("torch.rsub", Ref(s.pick(is_number)), s.rng.choice((1, 2, 0.5)))


# -- views and movements -----------------------------------------------------------------------------------------------
@exact
def permute(s: State) -> Call:
    i = s.pick(has_dims)
    order = list(range(s.values[i].dim()))
    s.rng.shuffle(order)
    return call(".permute", Ref(i), tuple(order))


@exact
def transpose(s: State) -> Call:
    i = s.pick(has_dims)
    return call(".transpose", Ref(i), dim_of(s, i), dim_of(s, i))


@exact
def flatten(s: State) -> Call:
    i = s.pick(has_dims)
    first = s.rng.randrange(s.values[i].dim())
    return call("torch.flatten", Ref(i), first, s.rng.randrange(first, s.values[i].dim()))


@exact
def reshape(s: State) -> Call:
    i = s.pick(has_dims)
    size = list(s.values[i].shape)
    at = s.rng.randrange(len(size))
    inner = s.rng.choice([n for n in (2, 3, 4, 5, 8) if size[at] % n == 0] or [1])
    size[at : at + 1] = [size[at] // inner, inner]
    if s.rng.random() < 0.3:
        s.rng.shuffle(size)
    if s.rng.random() < 0.4 and 0 not in size:
        size[s.rng.randrange(len(size))] = -1
    return call(s.rng.choice((".reshape", ".view")), Ref(i), tuple(size))


@exact
def unsqueeze(s: State) -> Call:
    i = s.pick()
    return call(".unsqueeze", Ref(i), s.rng.randint(0, s.values[i].dim()))


@exact
def squeeze(s: State) -> Call:
    i = s.pick(has_dims)
    return call(".squeeze", Ref(i), dim_of(s, i))


@exact
def expand(s: State) -> Call:
    i = s.pick(lambda t: t.dim() < 4)
    size = [n if n != 1 or s.rng.random() < 0.3 else s.rng.choice((2, 5)) for n in s.values[i].shape]
    return call(".expand", Ref(i), (*([s.rng.choice((1, 3))] * s.rng.randint(0, 1)), *size))


@exact
def index_basic(s: State) -> Call:
    i = s.pick(has_dims)
    out: list[Any] = []
    for n in s.values[i].shape:
        kind = s.rng.random()
        if kind < 0.35:
            out.append(slice(None))
        elif kind < 0.55 and n:
            out.append(s.rng.randrange(-n, n))
        elif kind < 0.65:
            out.append(None)
            out.append(slice(None, None, s.rng.choice((1, 2, 3))))
        else:
            a = s.rng.randint(-n, n)
            out.append(slice(a, s.rng.choice((None, a + 3, n, -1)), s.rng.choice((None, 1, 2))))
    if s.rng.random() < 0.15:
        out.insert(s.rng.randint(0, len(out)), Ellipsis)
    return call("getitem", Ref(i), tuple(out))


@exact
def narrow(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    n = s.values[i].shape[d]
    start = s.rng.randint(0, n)
    return call("torch.narrow", Ref(i), d, start, s.rng.randint(0, n - start))


@exact
def select(s: State) -> Call:
    i = s.pick(lambda t: t.numel() > 0 and t.dim() > 0)
    d = dim_of(s, i)
    n = s.values[i].shape[d]
    return call("torch.select", Ref(i), d, s.rng.randrange(-n, n))


@exact
def diagonal(s: State) -> Call:
    return call("torch.diagonal", Ref(s.pick(lambda t: t.dim() > 1)), s.rng.randint(-2, 2))


@exact
def unfold(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    size = s.rng.randint(1, max(1, min(4, s.values[i].shape[d])))
    return call(".unfold", Ref(i), d, size, s.rng.randint(1, 3))


@exact
def pieces(s: State) -> Call:
    if any(x.of >= 0 for x in s.inputs):
        raise LookupError  # AOTAutograd itself ends the process where pieces of inputs that overlap are written
    i = s.pick(lambda t: t.numel() > 0 and t.dim() > 0)
    d = dim_of(s, i)
    if s.rng.random() < 0.5:
        return call("torch.chunk", Ref(i), s.rng.randint(1, 3), d)
    return call("torch.split", Ref(i), s.rng.randint(1, 3 + s.values[i].shape[d] // 4), d)


@exact
def flip_roll(s: State) -> Call:
    i = s.pick(has_dims)
    if s.rng.random() < 0.5:
        return call("torch.flip", Ref(i), (dim_of(s, i),))
    return call("torch.roll", Ref(i), (s.rng.randint(-3, 3),), (dim_of(s, i),))


@smooth
def cross(s: State) -> Call:
    i = s.pick(lambda t: 3 in t.shape and is_number(t))
    x = s.values[i]
    j = s.pick(lambda t: t.dim() == x.dim() and t.dtype is x.dtype and 3 in t.shape)
    return call("torch.linalg.cross", Ref(i), Ref(j), dim=x.shape.index(3) - s.rng.choice((0, x.dim())))


@exact
def join(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    size = list(s.values[i].shape)

    def fits(t: torch.Tensor) -> bool:
        own = list(t.shape)
        return len(own) == len(size) and all(a == b for k, (a, b) in enumerate(zip(own, size)) if k != d % len(size))

    parts = tuple(Ref(s.pick(fits)) for _ in range(s.rng.randint(1, 2)))
    return call("torch.cat", (Ref(i), *parts), d)


@exact
def stack(s: State) -> Call:
    i = s.pick()
    j = s.pick(lambda t: t.shape == s.values[i].shape)
    return call("torch.stack", (Ref(i), Ref(j)), s.rng.randint(0, s.values[i].dim()))


@exact
def pad(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and is_number(t))
    amounts = tuple(s.rng.randint(-1, 2) for _ in range(2 * s.rng.randint(1, min(2, s.values[i].dim()))))
    return call("F.pad", Ref(i), amounts, "constant", s.rng.choice((0, 1)))


@exact
def repeat(s: State) -> Call:
    i = s.pick(lambda t: t.dim() < 4)
    return call(".repeat", Ref(i), tuple(s.rng.randint(1, 3) for _ in range(max(1, s.values[i].dim()))))


@exact
def triangle(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 1)
    return call("torch." + s.rng.choice(("tril", "triu")), Ref(i), s.rng.randint(-2, 2))


@exact
def like(s: State) -> Call:
    i = s.pick()
    if s.rng.random() < 0.3:
        return call("torch.full_like", Ref(i), s.rng.choice((1, 2, 3)))
    return call("torch." + s.rng.choice(("zeros_like", "ones_like")), Ref(i))


@exact
def contiguous(s: State) -> Call:
    return call(".contiguous", Ref(s.pick()))


@exact
def channels_last(s: State) -> Call:
    i = s.pick(lambda t: t.dim() == 4)
    return call(s.rng.choice((".contiguous", ".to", ".clone")), Ref(i), memory_format=torch.channels_last)


@exact
def move_dim(s: State) -> Call:
    i = s.pick(has_dims)
    return call("torch.movedim", Ref(i), dim_of(s, i), dim_of(s, i))


@exact
def as_bits(s: State) -> Call:
    same = {4: (torch.int32, torch.float32), 2: (torch.int16, torch.float16, torch.bfloat16)}
    i = s.pick(lambda t: is_whole(t) and t.element_size() in same, exact=True)
    return call(".view", Ref(i), s.rng.choice(same[s.values[i].element_size()]))


@exact
def new_zeros(s: State) -> Call:
    i = s.pick()
    return call(".new_zeros", Ref(i), tuple(s.values[i].shape))


@exact
def unbind(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and 0 < t.shape[0] < 5)
    if any(x.of >= 0 for x in s.inputs):
        raise LookupError  # as for pieces
    return call("torch.unbind", Ref(i), 0)
