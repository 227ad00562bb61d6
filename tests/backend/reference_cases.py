"""Functions with inputs that between them use every kind of row and loop."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F

g = torch.Generator().manual_seed(0)


def rand(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=g).to(dtype)


X, Y, Z, V = rand(6, 40), rand(6, 40), rand(6, 1), rand(40)
H, B = rand(6, 40, dtype=torch.float16), rand(6, 40, dtype=torch.bfloat16)
D = rand(6, 40, dtype=torch.float64)
I, J = torch.randint(-9, 9, (6, 40), generator=g), torch.randint(-9, 9, (6, 40), generator=g, dtype=torch.int32)
IDX = torch.randint(-6, 6, (5,), generator=g)
M = X > 0
C = rand(2, 3, 4, 5)
E = rand(0, 40)

CASES = {
    "chain": (lambda x, y: torch.relu(x * y + 1), X, Y),
    "broadcast": (lambda x, z, v: (x + z) * v, X, Z, V),
    "half": (lambda h: (h * h).sigmoid() + 1, H),
    "bfloat16_cast": (lambda x, b: (x.to(torch.bfloat16) * b).float() - x, X, B),
    "mixed": (lambda x, i: x * i + i, X, I),
    "ints": (lambda i, j: (i // 3) * j - (i % 5), I, J),
    "bools": (lambda x, m: torch.where(m, x, -x).gt(0.5) & m, X, M),
    "double": (lambda x, d: torch.tanh(x + d), X, D),
    "transposed": (lambda x, y: x.t() + y.t() * 2, X, Y),
    "transposed_input": (lambda x, v: x.exp() * v, X.t(), rand(6)),
    "permute_view": (lambda c: c.permute(0, 2, 1, 3).reshape(8, 15) * 2, C),
    "slice": (lambda x: x[1:5:2, 3:] - x[0:4:2, :-3], X),
    "cat": (lambda x, y: torch.cat([x, y * 2, x[:2]], 0) + 1, X, Y),
    "pad_flip": (lambda x: F.pad(x, (1, 2)).flip(1) * 3, X),
    "roll": (lambda x: torch.roll(x, 3, 1) + x, X),
    "index_select": (lambda x, i: torch.index_select(x, 0, i) * 2, X, IDX % 6),
    "index": (lambda x, i: x[i] + 1, X, IDX),
    "embedding": (lambda i, w: F.embedding(i, w) * 2, IDX % 6, X),
    "gather": (lambda x, i: torch.gather(x, 1, i) * 2, X, (I % 40).abs()),
    "arange_where": (lambda x, v: torch.where(torch.arange(40) < 7, x, v), X, V),
    "tril": (lambda x: torch.tril(x, 3) + 1, X),
    "sum": (lambda x: x.sum(1), X),
    "sum_all": (lambda x: (x * x).sum(), X),
    "columns": (lambda x: x.mean(0), X),
    "amax_int": (lambda i: i.amax(1) - i.amin(1), I),
    "argmax": (lambda x: x.argmax(1), X),
    "prod_any": (lambda x, m: (x.prod(1), m.any(0), m.all(1)), X, M),
    "softmax": (lambda x: torch.softmax(x, -1), X),
    "softmax_half": (lambda h: torch.softmax(h, -1), H),
    "layer_norm": (lambda x, v: F.layer_norm(x, (40,), v, v) + x, X, V),
    "group_norm": (lambda c: F.group_norm(c.reshape(2, 12, 5), 3), C),
    "var_std": (lambda x: (x.var(1), x.std(0)), X),
    "rows_and_columns": (lambda x, y: ((x * y).sum(1), (x * y).sum(0), x.sum(0)), rand(270, 24), rand(270, 24)),
    "drawn": (lambda n, x: torch.ops.fuser.normal_like(n, 3, x) * x, torch.tensor(77), rand(5, 21)),
    "rms_swiglu": (lambda x, y, v: F.silu(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * v) * y, X, Y, V),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), X, (I[:, 0] % 40).abs()),
    "empty": (lambda e: (e * 2).sum(0), E),
    "scalar_inputs": (lambda x, n, f: x * n + f, X, 3, 0.5),
    "size_arithmetic": (lambda x: x * x.shape[1] + operator.floordiv(x.shape[0], 2), X),
    "zero_dim": (lambda x: x.reshape(()) * 2 + 1, rand(1)),
}  # fmt: skip
