"""Large products of float32 matrices on the CPU, written into warm memory.

`mm` and oneDNN's operators allocate their results: from 32 MiB on malloc maps these anew, and each page of 4 KiB costs
a fault. torch's own call of oneDNN that writes into a given tensor has no operator for float32; it is called by its
symbol, checked at first use. Measured on two AVX-512 cores, 512 tokens, 32,000 words, width 512: logits take 79 ms
instead of 98; the gradient of the head's weights, whose left operand is read transposed without a copy, 81 instead of
105.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fuser import config
from fuser.reasons import served_by
from fuser.runtime import launcher, torch_abi, warm

_MATMUL = ("libtorch_cpu.so", "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff")  # (x, w, result, beta, alpha)
LEAST_WORK = 1 << 23  # multiplications from which oneDNN's linear is faster than `mm`
_SLOW_NS = 1_000_000  # for the first huge page; if it takes longer, small pages are used
settings: Any = config
Function = Callable[..., Any]


@functools.cache
def _address() -> int | None:
    return torch_abi.symbol(*_MATMUL)


def are_possible() -> bool:
    """Whether this torch has the call."""
    return bool(torch._C._has_mkldnn) and _address() is not None


@functools.cache
def _into() -> Function | None:
    """The native launcher's `product(function, x, w, out)`, on addresses; None unless a small product is right."""
    native, address = launcher.native(), _address()
    call = getattr(native, "product", None)
    if call is None or address is None:
        return None
    x = torch.arange(6.0, device="cpu").view(2, 3)
    w = torch.arange(12.0, device="cpu").view(4, 3).t()
    out = torch.full((2, 4), 7.0, device="cpu")
    try:
        call(address, x._cdata, w._cdata, out._cdata)
    except RuntimeError:  # oneDNN refuses on some processors
        return None
    return functools.partial(call, address) if torch.equal(out, x @ w) else None


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`x @ w`, [M, K] and [K, N] to a contiguous [M, N], in float32 on the CPU; either operand may be transposed."""
    into = _into() if launcher.native() is not None and torch._C._get_mkldnn_enabled() else None
    if into is None:
        return torch.mm(x, w)
    rows, columns = x.shape[0], w.shape[1]
    limit = int(settings.product_limit_bytes)
    out = warm.empty_strided((rows, columns), (columns, 1), x.dtype, limit)
    native: Any = launcher.native()
    native.advise_huge(out.data_ptr(), out.nbytes, _SLOW_NS)
    into(x._cdata, w._cdata, out._cdata)
    return out


def sized_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`x @ w`, [M, K] and [K, N] to [M, N], for M unknown at compile time; a large result goes to warm memory.

    Float32 on the CPU, as in `product`.
    """
    rows, inner = x.shape
    columns = w.shape[1]
    if 4 * rows * columns >= warm.MAPPED:
        return product(x, w)
    if rows * inner * columns >= LEAST_WORK and torch._C._get_mkldnn_enabled() and x.stride(1) == 1:
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w.t(), None, "none", [], "")
        return made
    return torch.mm(x, w)


_WHY = "a library's kernel does this better, and writes into memory that is kept warm"
served_by(product, "library", _WHY)
served_by(sized_product, "library", _WHY)
