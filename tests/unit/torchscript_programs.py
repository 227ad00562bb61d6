# ruff: noqa: UP006, UP032, UP035, UP045 (TorchScript reads these annotations)
"""Small programs and modules that are scripted, with inputs: what a frontend for TorchScript has to give alike."""

from __future__ import annotations

import math
import warnings
from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Pair(NamedTuple):
    total: Tensor
    count: int


# -- numbers -----------------------------------------------------------------------------------------------------------
def int_power(x: Tensor, n: int):
    return torch.arange(3) * n**2, n**2, n**-1, x * n**2


def float_power(x: Tensor, p: float):
    return x * p**2, p**2, p**0.5, (-p) ** 0.5, 2**p


def divisions(x: Tensor, n: int, p: float):
    return x * (1.0 / p), 1 / p, n / 3, n // 4, n % 4, (-n) // 4, (-n) % 4, p // 2, p % 2


def zero_division(x: Tensor, p: float):
    return x, 1.0 / 0.0, 1.0 / p, -1.0 / p, p / p


def integer_zero_division(x: Tensor, n: int):
    return x * (3 // n)


def differences(x: Tensor, n: int, p: float):
    return (1 - p) * x, x * (n - 1) + (-p), x - (p * n)


def extremes(x: Tensor, n: int, p: float):
    return x * max(n, 2), max(n, p), min(n, p), max(n, 1), min(2.0, p), abs(-n), abs(-p)


def roots(x: Tensor, n: int, p: float):
    return x / math.sqrt(n), math.sqrt(p), math.sqrt(-p), math.exp(p), math.floor(p), math.ceil(p)


def rounded(x: Tensor, p: float):
    return x, round(p), float(3), int(p), bool(p)


def comparisons(x: Tensor, n: int, p: float):
    return x, n < 3, p >= n, n == 3, n != 3, not bool(n)


def bits(x: Tensor, n: int):
    return x, n & 6, n | 8, n ^ 5, n << 2, n >> 1


def tensor_bits(x: Tensor, n: int):
    i = (x * 10).to(torch.int64)
    return i & 7, i | n, i ^ 3, (x > 0) & (x < 1), (x > 0) | (x < -1), i << 1, i >> 1


def defaults(x: Tensor, scale: float = 2.5, n: int = 3, flag: bool = True, sizes: Optional[List[int]] = None):
    return x * scale + n


def infinite_default(x: Tensor, low: float = -math.inf, high: float = math.inf):
    return x.clamp(low, high)


def items(x: Tensor):
    i = torch.tensor(3)
    return x * int(i), float(x.sum()) * 0.5, bool(x.sum() < 1e9), x.numel(), x.dim()


# -- lists, tuples, dicts ----------------------------------------------------------------------------------------------
def list_changes(x: Tensor, n: int):
    a = [n]
    a.append(2)
    a[0] = 3
    a += [4, 5]
    a.extend([6])
    a.insert(0, n)
    a.reverse()
    del a[0]
    last = a.pop()
    return x * a[0], a, last, len(a)


def list_clear(x: Tensor):
    a = [3, 1, 2]
    b = a
    a.sort()
    c = b.copy()
    b.clear()
    return x, a, b, c


def list_sort_unknown(x: Tensor, n: int):
    a = [n, 1]
    a.sort()
    return x, a


def list_alias(x: Tensor):
    a = [x, x + 1]
    b = a
    b[0] = x * 5
    c = a[0]
    a.append(c - 1)
    return torch.cat(b), len(a)


def list_argument_changed(x: Tensor, a: List[int]):
    a.append(1)
    return x, len(a)


def list_argument(x: Tensor, a: List[Tensor]):
    p, q = a
    return torch.cat([x, p]), q + a[0], len(a)


def list_products(x: Tensor, n: int):
    return x.reshape([1] * 2 + [-1]), [n] * 2 + [1], [x] * 2, [1, 2, 3][1:], [1, 2] == [1, 2]


def list_pop_empty(x: Tensor):
    a = [1]
    a.pop()
    a.pop()
    return x


def list_sum(x: Tensor):
    return x * sum([1, 2]), max([1, 3]), min([1, 3]), 2 in [1, 2]


def shape_sums(x: Tensor):
    return x.view(x.shape[:-1] + [2, -1]), x.reshape([-1] + x.shape[1:]), x.shape, x.shape[-1], len(x.shape), x.size()


def shape_tensor(x: Tensor):
    return torch.tensor([x.size(0), 3]), torch.tensor(2.5), torch.tensor([1.5, float(x.size(1))]), torch.tensor(3)


def shape_tensor_typed(x: Tensor):
    return torch.tensor([x.size(0)], dtype=torch.float64) + x[0, 0], torch.tensor([[1, 2], [3, 4]])


def shape_unpacked(x: Tensor):
    b, c = x.shape
    return x.view(c, b), b * c


def dicts(x: Tensor):
    d = {"a": x, "b": x + 1}
    d["c"] = d["a"] * 2
    return d, len(d), "a" in d


def nested(x: Tensor):
    return (x, (x + 1, 2)), [x * 2, x * 3], (x.size(0), None)


def named(x: Tensor):
    return Pair(x.sum(), x.size(0))


def named_inside(x: Tensor):
    p = Pair(x * 2, 3)
    return p, p.total + p.count


def swapped(x: Tensor, p: Tuple[Tensor, float]):
    a, b = p
    return b, a * x


# -- several results ---------------------------------------------------------------------------------------------------
def largest(x: Tensor):
    v, i = x.max(0)
    w, j = torch.min(x, 1, True)
    return v, i, w, j


def sorted_(x: Tensor):
    v, i = x.sort(1, descending=True)
    w, j = torch.topk(x, 2, 1)
    return v * 2, i, w, j


def moments(x: Tensor):
    v, m = torch.var_mean(x, 1)
    return (x - m[:, None]) / v[:, None].sqrt()


def largest_whole(x: Tensor):
    return x.max(0)


def pieces(x: Tensor):
    a, b = x.split(3, 0)
    c, d = torch.unbind(x[:2])
    return a, b, c + d, x.chunk(2, 1), torch.meshgrid([c, d])


# -- indexing, constants, strings --------------------------------------------------------------------------------------
def indexed(x: Tensor):
    return x[torch.tensor([0, 2])], x[:, torch.tensor([1, 0])] + 1, x[None, 1:, ..., 0], x[x > 0].sum()


def index_written(x: Tensor):
    y = x.clone()
    y[0] = 1.0
    y[:, 1] += 2
    return y, x


def formatted(x: Tensor, n: int):
    return x, "{}".format(n)


def formatted_unused(x: Tensor, n: int):
    text = "{}".format(n)  # noqa: F841
    return x * n


def text(x: Tensor, mode: str = "sum"):
    if "su" + "m" == "sum":
        return x.sum(), "done"
    return x.mean(), "not"


def optional_given(x: Tensor, y: Optional[Tensor] = None):
    return torch.clamp(x, 0.0, None), x.sum(dim=None)


def unwrapped(x: Tensor):
    y: Optional[Tensor] = x * 2
    return torch.jit._unwrap_optional(y) + 1


def unwrapped_none(x: Tensor):
    y: Optional[Tensor] = None
    return torch.jit._unwrap_optional(y) + 1


def early(x: Tensor):
    flag = 3
    if flag > 2:
        return x + 1
    return x - 1


def early_unknown(x: Tensor, n: int):
    if n > 2:
        return x + 1
    y = x * 2
    return y - 1


def asserted(x: Tensor):
    assert x.dim() == 2, "expected a matrix"
    return x + 1


def warned(x: Tensor):
    warnings.warn("beware", stacklevel=2)
    return x + 1


def dtypes(x: Tensor):
    y = x.to(torch.float64)
    return y.to(x.dtype), torch.zeros_like(x, dtype=torch.int64), torch.ones(2, dtype=y.dtype), y.type_as(x)


def mixed(x: Tensor, n: int, p: float):
    return x.to(torch.int64) * n, x.to(torch.int64) * p, torch.full((2,), p), torch.full((2,), n), n * x.mean()


def creation(x: Tensor, n: int):
    return torch.arange(n), torch.arange(0.0, 3.0), torch.linspace(0.0, 1.0, n), torch.eye(n), x.new_zeros([n])


def losses(x: Tensor):
    return F.softmax(x, -1), F.layer_norm(x, [x.size(-1)]), F.pad(x, [1, 1])


# -- modules -----------------------------------------------------------------------------------------------------------
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.sizes = nn.Linear(6, 6), 0.5, [2, 3]
        self.limits: Tuple[float, float] = (-1.0, 1.0)

    def forward(self, x, gain: float = 2.0):
        y = self.linear(x) * self.scale * gain
        return y.clamp(self.limits[0], self.limits[1]).view([-1] + self.sizes)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.layers = Plain(), nn.ModuleList([nn.Linear(6, 6), nn.Tanh()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.inner(x)


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = [2, 3]

    def forward(self, x):
        self.sizes.append(1)
        return x


class DividesByZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 0.0

    def forward(self, x):
        return x * 0 + 1.0 / self.eps


def scales_input(self, inputs: Tuple[Tensor]) -> Tuple[Tensor]:
    return (inputs[0] * 10,)


def keeps_input(self, inputs: Tuple[Tensor]) -> None:
    return None


def shifts_result(self, inputs: Tuple[Tensor], out: Tensor) -> Tensor:
    return out - inputs[0].sum()


class Inner(nn.Module):
    def forward(self, x):
        return x + 1


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x) * 2


def hooked(top: bool, inner: bool) -> nn.Module:
    module = Hooked()
    for m in (*([module] if top else []), *([module.inner] if inner else [])):
        m.register_forward_pre_hook(scales_input)
        m.register_forward_pre_hook(keeps_input)
        m.register_forward_hook(shifts_result)
    return module


_X = torch.linspace(-1.5, 2.0, 24).view(4, 6)

# name: program, inputs after x, and what a refusal says, for those that may be refused.
PROGRAMS: list[tuple[object, tuple[object, ...], str]] = [
    (int_power, (3,), ""), (int_power, (-2,), ""), (int_power, (0,), ""), (float_power, (2.5,), ""),
    (divisions, (7, 2.5), ""), (zero_division, (0.0,), ""),
    (integer_zero_division, (2,), ""), (differences, (3, 2.5), ""), (extremes, (3, 2.5), ""), (extremes, (4, 5.0), ""),
    (roots, (3, 2.5), ""), (rounded, (2.5,), ""), (comparisons, (3, 2.5), ""), (bits, (3,), ""),
    (tensor_bits, (3,), ""),
    (defaults, (), ""), (defaults, (1.5, 2), ""), (infinite_default, (), ""), (items, (), ""),
    (list_changes, (7,), ""), (list_clear, (), ""), (list_sort_unknown, (3,), "aten::sort works on a list"),
    (list_alias, (), ""), (list_argument_changed, ([1],), "changes a list or dict that the script did not make"),
    (list_argument, ([_X + 1, _X * 2],), ""), (list_products, (3,), ""), (list_pop_empty, (), ""),
    (list_sum, (), ""), (shape_sums, (), ""), (shape_tensor, (), ""), (shape_tensor_typed, (), ""),
    (shape_unpacked, (), ""), (dicts, (), ""), (nested, (), ""), (named, (), ""), (named_inside, (), ""),
    (swapped, ((_X, 2.0),), ""), (largest, (), ""), (sorted_, (), ""), (moments, (), ""), (largest_whole, (), ""),
    (pieces, (), ""), (indexed, (), ""), (index_written, (), ""), (formatted, (3,), "aten::format"),
    (formatted_unused, (3,), ""), (text, (), ""), (optional_given, (), ""), (unwrapped, (), ""),
    (unwrapped_none, (), "aten::_unwrap_optional"), (early, (), ""), (early_unknown, (3,), "branch depends on"),
    (asserted, (), "branch depends on"), (warned, (), "aten::warn"), (dtypes, (), ""), (mixed, (3, 2.5), ""),
    (creation, (3,), ""), (losses, (), ""), (Plain, (), ""), (Plain, (0.5,), ""), (Nested, (), ""),
    (Changing, (), "changes a list or dict"), (DividesByZero, (), ""), (lambda: hooked(True, False), (), ""),
    (lambda: hooked(False, True), (), ""), (lambda: hooked(True, True), (), ""),
]  # fmt: skip


def x() -> Tensor:
    """The first input of all."""
    return _X.clone()
