"""Gathers, scatters and writes into places, of whole programs' kind: see operations.py."""

from __future__ import annotations

import torch

from tests.fuzz.generate import State, exact, smooth
from tests.fuzz.operations import Call, call, dim_of, has_dims, is_bool, is_float, is_number
from tests.fuzz.program import Ref


def indices(s: State, n: int, rank: int | None = None) -> int:
    """An int64 value whose elements are indices into a dim of `n`."""

    def fits(t: torch.Tensor) -> bool:
        if t.dtype is not torch.int64 or rank is not None and t.dim() != rank:
            return False
        return not t.numel() or (int(t.min()) >= -n and int(t.max()) < n)

    return s.pick(fits, exact=True)


@exact
def wrap_index(s: State) -> Call:
    """Makes an index out of whole numbers."""
    i = s.pick(lambda t: t.dtype is torch.int64, exact=True)
    return call("torch.remainder", Ref(i), s.rng.choice((2, 3, 4, 5, 8)))


@exact
def index_select(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    return call("torch.index_select", Ref(i), d, Ref(indices(s, s.values[i].shape[d], 1)))


@exact
def index_by_tensor(s: State) -> Call:
    i = s.pick(has_dims)
    at = s.rng.randrange(min(2, s.values[i].dim()))
    index = Ref(indices(s, s.values[i].shape[at]))
    return call("getitem", Ref(i), (*[slice(None)] * at, index))


@exact
def gather(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    return call("torch.gather", Ref(i), d, Ref(indices(s, s.values[i].shape[d], s.values[i].dim())))


@exact
def embedding(s: State) -> Call:
    i = s.pick(lambda t: t.dim() == 2 and is_float(t))
    return call("F.embedding", Ref(indices(s, s.values[i].shape[0])), Ref(i))


@exact
def scatter(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    j = indices(s, s.values[i].shape[d], s.values[i].dim())
    if s.rng.random() < 0.5:
        return call("torch.scatter", Ref(i), d, Ref(j), s.rng.choice((0, 1)))
    source = s.pick(lambda t: t.dtype is s.values[i].dtype and t.shape == s.values[j].shape)
    return call("torch.scatter_add", Ref(i), d, Ref(j), Ref(source))


@exact
def index_add(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and is_number(t))
    d = dim_of(s, i)
    j = indices(s, s.values[i].shape[d], 1)
    size = list(s.values[i].shape)
    size[d] = s.values[j].shape[0]
    source = s.pick(lambda t: t.dtype is s.values[i].dtype and list(t.shape) == size)
    return call("torch.index_add", Ref(i), d, Ref(j), Ref(source))


@exact
def index_put(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and is_number(t))
    j = indices(s, s.values[i].shape[0], 1)
    value = s.pick(lambda t: t.dtype is s.values[i].dtype and t.dim() == 0)
    return call("torch.index_put", Ref(i), (Ref(j),), Ref(value), accumulate=s.rng.random() < 0.5)


@exact
def write_slice(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    if s.rng.random() < 0.5:
        n = s.values[i].shape[d]
        size = list(s.values[i].shape)
        del size[d]
        source = s.pick(lambda t: list(t.shape) == size)
        return call("torch.select_scatter", Ref(i), Ref(source), d, s.rng.randrange(n) if n else 0)
    start = s.rng.randint(0, 3)
    step = s.rng.choice((1, 2))
    part = s.values[i].narrow(d, 0, 0)
    source = s.pick(lambda t: t.dim() == part.dim() and t.numel() > 0)
    end = start + step * s.values[source].shape[d]
    return call("torch.slice_scatter", Ref(i), Ref(source), d, start, end, step)


@exact
def scatter_extreme(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    j = indices(s, s.values[i].shape[d], s.values[i].dim())
    source = s.pick(lambda t: t.dtype is s.values[i].dtype and t.shape == s.values[j].shape)
    how = s.rng.choice(("amax", "amin"))
    return call("torch.scatter_reduce", Ref(i), d, Ref(j), Ref(source), how, include_self=s.rng.random() < 0.7)


@smooth
def scatter_reduce(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and is_float(t))
    d = dim_of(s, i)
    j = indices(s, s.values[i].shape[d], s.values[i].dim())
    source = s.pick(lambda t: t.dtype is s.values[i].dtype and t.shape == s.values[j].shape)
    how = s.rng.choice(("sum", "mean", "prod"))
    return call("torch.scatter_reduce", Ref(i), d, Ref(j), Ref(source), how, include_self=s.rng.random() < 0.7)


@exact
def index_copy(s: State) -> Call:
    i = s.pick(has_dims)
    d = dim_of(s, i)
    j = indices(s, s.values[i].shape[d], 1)
    places = s.values[j] % max(1, s.values[i].shape[d])
    if len(places.unique()) != len(places):
        raise LookupError  # which of two values stays is nobody's promise
    size = list(s.values[i].shape)
    size[d] = len(places)
    source = s.pick(lambda t: t.dtype is s.values[i].dtype and list(t.shape) == size)
    return call("torch.index_copy", Ref(i), d, Ref(j), Ref(source))


@exact
def index_fill(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and is_number(t))
    d = dim_of(s, i)
    return call("torch.index_fill", Ref(i), d, Ref(indices(s, s.values[i].shape[d], 1)), s.rng.choice((0, 1, 2)))


@exact
def masked_scatter(s: State) -> Call:
    m = s.pick(is_bool)
    i = s.pick(lambda t: t.shape == s.values[m].shape)
    n = int(s.values[m].sum())
    source = s.pick(lambda t: t.dtype is s.values[i].dtype and t.numel() >= n)
    return call("torch.masked_scatter", Ref(i), Ref(m), Ref(source))


@exact
def take(s: State) -> Call:
    i = s.pick(has_dims)
    return call("torch.take", Ref(i), Ref(indices(s, s.values[i].numel())))


@exact
def repeat_interleave(s: State) -> Call:
    i = s.pick(has_dims)
    return call("torch.repeat_interleave", Ref(i), s.rng.randint(1, 3), dim_of(s, i))


@exact
def buckets(s: State) -> Call:
    edges = s.pick(lambda t: t.dim() == 1 and bool((t[1:] >= t[:-1]).all()), exact=True)
    i = s.pick(lambda t: t.dtype is s.values[edges].dtype, exact=True)
    return call("torch.bucketize", Ref(i), Ref(edges), right=s.rng.random() < 0.5)


@exact
def one_hot(s: State) -> Call:
    i = s.pick(lambda t: t.dtype is torch.int64 and t.dim() < 4 and bool(((t >= 0) & (t < 5)).all()), exact=True)
    return call("F.one_hot", Ref(i), 5)
