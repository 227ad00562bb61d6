"""Writes into inputs, views and lists of tensors: see operations.py."""

from __future__ import annotations

from typing import Any

from tests.fuzz.generate import State, mutating
from tests.fuzz.indexing import indices
from tests.fuzz.operations import Call, call, dim_of, has_dims, is_bool, is_float, is_number, other, partner
from tests.fuzz.program import Ref


@mutating
def write_binary(s: State) -> Call:
    i = s.pick()
    name = s.rng.choice((".add_", ".mul_", ".sub_", ".copy_"))
    return call(name, Ref(i), other(s, i) if name != ".copy_" else Ref(partner(s, i)))


@mutating
def write_unary(s: State) -> Call:
    name = s.rng.choice((".zero_", ".neg_", ".abs_", ".relu_", ".square_"))
    return call(name, Ref(s.pick(is_number)))


@mutating
def fill(s: State) -> Call:
    return call(".fill_", Ref(s.pick()), s.rng.choice((0, 1, 2)))


@mutating
def clamp_in_place(s: State) -> Call:
    return call(".clamp_", Ref(s.pick(is_number)), 0, 2)


@mutating
def write_index(s: State) -> Call:
    i = s.pick(has_dims)
    n = s.values[i].shape[0]
    at: Any = s.rng.choice((slice(1, None), slice(None, None, 2), slice(0, 2), -1 if n else slice(0, 0)))
    value = s.rng.choice((0, 1, 2)) if s.rng.random() < 0.5 else Ref(s.pick(lambda t: t.dim() <= 1))
    return call("setitem", Ref(i), at, value)


@mutating
def write_masked(s: State) -> Call:
    m = s.pick(is_bool)
    i = s.pick(lambda t: t.shape == s.values[m].shape)
    return call(".masked_fill_", Ref(i), Ref(m), s.rng.choice((0, 1)))


@mutating
def write_indexed(s: State) -> Call:
    i = s.pick(has_dims)
    j = indices(s, s.values[i].shape[0], 1)
    value = s.pick(lambda t: t.dtype is s.values[i].dtype and t.dim() == 0)
    return call(".index_put_", Ref(i), (Ref(j),), Ref(value), accumulate=False)


@mutating
def foreach_add(s: State) -> Call:
    i, j = s.pick(is_float), s.pick(is_float)
    return call("torch._foreach_add_", [Ref(i), Ref(j)], s.rng.choice((1, 2)))


@mutating
def foreach_mul(s: State) -> Call:
    i = s.pick(is_float)
    j = s.pick(lambda t: t.shape == s.values[i].shape and t.dtype is s.values[i].dtype)
    return call("torch._foreach_mul_", [Ref(i)], [Ref(j)])


@mutating
def foreach_lists(s: State) -> Call:
    i = s.pick(is_float)
    j = s.pick(lambda t: t.shape == s.values[i].shape and t.dtype is s.values[i].dtype)
    k = s.pick(lambda t: t.shape == s.values[i].shape and t.dtype is s.values[i].dtype)
    kind = s.rng.choice(("add", "sub", "addcmul", "lerp"))
    if kind == "addcmul":
        return call("torch._foreach_addcmul_", [Ref(i)], [Ref(j)], [Ref(k)], 2)
    if kind == "lerp":
        return call("torch._foreach_lerp_", [Ref(i)], [Ref(j)], 0.25)
    return call(f"torch._foreach_{kind}_", [Ref(i)], [Ref(j)], alpha=s.rng.choice((1, 2)))


@mutating
def foreach_made(s: State) -> Call:
    i, j = s.pick(is_float), s.pick(is_float)
    return call("torch._foreach_" + s.rng.choice(("neg", "abs")), [Ref(i), Ref(j)])


@mutating
def write_scattered(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and is_number(t))
    d = dim_of(s, i)
    if s.rng.random() < 0.5:
        j = indices(s, s.values[i].shape[d], s.values[i].dim())
        source = s.pick(lambda t: t.dtype is s.values[i].dtype and t.shape == s.values[j].shape)
        return call(".scatter_add_", Ref(i), d, Ref(j), Ref(source))
    j = indices(s, s.values[i].shape[d], 1)
    size = list(s.values[i].shape)
    size[d] = s.values[j].shape[0]
    source = s.pick(lambda t: t.dtype is s.values[i].dtype and list(t.shape) == size)
    return call(".index_add_", Ref(i), d, Ref(j), Ref(source))


@mutating
def write_scan(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and is_number(t))
    return call(".cumsum_", Ref(i), dim_of(s, i))


@mutating
def turn_in_place(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 1)
    return call(".transpose_", Ref(i), 0, 1) if s.rng.random() < 0.3 else call(".unsqueeze_", Ref(i), 0)


@mutating
def write_matmul(s: State) -> Call:
    """No write: a library's call between groups."""
    i = s.pick(lambda t: t.dim() == 2 and is_float(t))
    j = s.pick(lambda t: t.dim() == 2 and t.dtype is s.values[i].dtype)
    return call("torch.matmul", Ref(i), Ref(j))
