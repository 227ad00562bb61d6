"""Reductions, scans and what rounds: see operations.py."""

from __future__ import annotations

import torch

from tests.fuzz.generate import State, exact, smooth
from tests.fuzz.operations import Call, call, dim_of, has_dims, is_float, is_number, is_whole, partner
from tests.fuzz.program import Ref


def dims_of(s: State, i: int) -> tuple[int, ...]:
    rank = s.values[i].dim()
    if not rank:
        raise LookupError
    return tuple(sorted(s.rng.sample(range(rank), s.rng.randint(1, rank))))


@exact
def total(s: State) -> Call:
    i = s.pick()
    if s.rng.random() < 0.3:
        return call("torch.sum", Ref(i))
    return call("torch.sum", Ref(i), dims_of(s, i), keepdim=s.rng.random() < 0.5)


@exact
def extreme(s: State) -> Call:
    i = s.pick()
    return call("torch." + s.rng.choice(("amax", "amin")), Ref(i), dims_of(s, i), keepdim=s.rng.random() < 0.5)


@exact
def argument(s: State) -> Call:
    i = s.pick(is_number, exact=True)
    name = "torch." + s.rng.choice(("argmax", "argmin"))
    return call(name, Ref(i), dim_of(s, i)) if s.rng.random() < 0.7 else call(name, Ref(i))


@exact
def truth(s: State) -> Call:
    i = s.pick(exact=True)
    name = "torch." + s.rng.choice(("any", "all", "count_nonzero"))
    return call(name, Ref(i), dim_of(s, i)) if s.rng.random() < 0.7 else call(name, Ref(i))


@exact
def max_with_index(s: State) -> Call:
    i = s.pick(exact=True)
    return call("torch." + s.rng.choice(("max", "min")), Ref(i), dim_of(s, i))


@exact
def scan(s: State) -> Call:
    i = s.pick(has_dims)
    return call("torch.cumsum", Ref(i), dim_of(s, i))


@exact
def scan_of_extremes(s: State) -> Call:
    i = s.pick(has_dims, exact=True)
    return call("torch." + s.rng.choice(("cummax", "cummin")), Ref(i), dim_of(s, i))


@exact
def whole_product(s: State) -> Call:
    i = s.pick(lambda t: is_whole(t) and t.dim() > 0)
    return call("torch." + s.rng.choice(("prod", "cumprod")), Ref(i), dim_of(s, i))


@exact
def both_extremes(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and t.numel() > 0)
    return call("torch.aminmax", Ref(i), dim=dim_of(s, i), keepdim=s.rng.random() < 0.5)


@exact
def typed_total(s: State) -> Call:
    i = s.pick()
    dtype = s.rng.choice((torch.float64, torch.float32, torch.int64))
    if not dtype.is_floating_point and is_float(s.values[i]):
        raise LookupError
    return call("torch.sum", Ref(i), dims_of(s, i), dtype=dtype)


@exact
def pooled(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() in (3, 4) and min(t.shape[-2:]) > 1)
    return call("F.max_pool2d", Ref(i), 2, s.rng.choice((1, 2)))


@exact
def enlarged(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() == 4 and 0 not in t.shape)
    return call("F.interpolate", Ref(i), scale_factor=2, mode="nearest")


@exact
def ordered(s: State) -> Call:
    i = s.pick(lambda t: t.dim() > 0 and is_number(t), exact=True)
    return call("torch.sort", Ref(i), dim_of(s, i), descending=s.rng.random() < 0.5, stable=True)


# -- rounding ----------------------------------------------------------------------------------------------------------
@smooth
def elementary(s: State) -> Call:
    names = "sigmoid tanh sin cos erf atan exp asinh expm1 sinc"
    return call("torch." + s.rng.choice(names.split()), Ref(s.pick(lambda t: t.numel() < 3000)))


@smooth
def activation(s: State) -> Call:
    names = "gelu silu softplus elu mish hardswish logsigmoid leaky_relu softsign tanhshrink hardsigmoid selu celu"
    return call("F." + s.rng.choice(names.split()), Ref(s.pick(is_float)))


@smooth
def mean(s: State) -> Call:
    i = s.pick(is_float)
    return call("torch.mean", Ref(i), dims_of(s, i), keepdim=s.rng.random() < 0.5)


@smooth
def softmax(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() > 0)
    return call("torch." + s.rng.choice(("softmax", "log_softmax")), Ref(i), dim_of(s, i))


@smooth
def spread(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() > 0 and t.numel() > 0)
    return call("torch.var", Ref(i), dims_of(s, i), correction=0, keepdim=s.rng.random() < 0.5)


@smooth
def logsumexp(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() > 0)
    return call("torch.logsumexp", Ref(i), dims_of(s, i))


@smooth
def layer_norm(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() > 0 and t.shape[-1] > 1)
    return call("F.layer_norm", Ref(i), (s.values[i].shape[-1],))


@smooth
def quotient(s: State) -> Call:
    i = s.pick()
    return call("torch.div", Ref(i), s.rng.choice((2, 3, 4, 0.5, -1.5)))


@smooth
def lerp(s: State) -> Call:
    i = s.pick(is_float)
    return call("torch.lerp", Ref(i), Ref(partner(s, i, same_dtype=True)), 0.25)


@smooth
def root(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and bool((t > 0.1).all()))
    return call("torch." + s.rng.choice(("sqrt", "rsqrt", "log", "reciprocal", "log2", "log1p")), Ref(i))


@smooth
def float_scan(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() > 0)
    return call("torch." + s.rng.choice(("logcumsumexp", "cumprod")), Ref(i), dim_of(s, i))


@smooth
def norm(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() > 0)
    return call("torch.linalg.vector_norm", Ref(i), s.rng.choice((1, 2, float("inf"))), dims_of(s, i))


@smooth
def product(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() > 0)
    return call("torch.prod", Ref(i), dim_of(s, i), keepdim=s.rng.random() < 0.5)


@smooth
def averaged(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() in (3, 4) and min(t.shape[-2:]) > 1)
    return call("F.avg_pool2d", Ref(i), 2, s.rng.choice((1, 2)))


@smooth
def group_norm(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() in (3, 4) and t.shape[1] % 2 == 0 and t.numel() > 0)
    return call("F.group_norm", Ref(i), 2)


@smooth
def typed_softmax(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and t.dim() > 0)
    return call("torch.softmax", Ref(i), dim_of(s, i), dtype=torch.float32)


@smooth
def power(s: State) -> Call:
    i, exponent = s.pick(is_float), s.rng.choice((2, 3, 0.5, -1))
    if exponent < 1 and not s.exact[i] and bool((s.values[i].abs() < 0.1).any()):
        raise LookupError  # the sign of what is nearly 0 is a rounding's
    return call("torch.pow", Ref(i), exponent)


@smooth
def rounded_division(s: State) -> Call:
    i = s.pick(lambda t: is_float(t) and bool((t.abs() > 0.1).all()))
    return call("torch.div", Ref(partner(s, i)), Ref(i))
