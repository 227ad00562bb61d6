"""XLA through JAX, where it is installed: a handful of the `kernels` rows, and the small kernels of `coldstart`.

JAX is imported inside the functions only, so that nothing else pays for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Fn = Callable[..., Any]


def functions() -> dict[str, Fn]:
    """Row name to the same function in jax.numpy."""
    import jax
    import jax.numpy as jnp

    def layer_norm(x: Any, w: Any, b: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * w + b

    def cross_entropy(x: Any, target: Any) -> Any:
        picked = jnp.take_along_axis(jax.nn.log_softmax(x, -1), target[:, None], 1)
        return -picked.mean()

    def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    return {
        "relu_mul_add": lambda x, y: jax.nn.relu(x * y + 1),
        "bias_gelu_mul": lambda x, b: jax.nn.gelu(x + b, approximate=True) * x,
        "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
        "softmax": lambda x: jax.nn.softmax(x, -1),
        "log_softmax": lambda x: jax.nn.log_softmax(x, -1),
        "layer_norm": layer_norm,
        "rms_norm": lambda x, w: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w,
        "cross_entropy": cross_entropy,
        "adam": adam,
        "transposed_add": lambda x, y: x + y.T,
        "column_sum": lambda x: x.sum(0),
        "full_sum": lambda x: x.sum(),
        "argmax": lambda x: x.argmax(-1),
    }


def small_functions() -> list[Fn]:
    """The kernels of `coldstart.SMALL`, in its order."""
    import jax.numpy as jnp

    return [
        lambda x, y: jnp.maximum(x * y + 1, 0) * x,
        lambda x, y: 1 / (1 + jnp.exp(-x)) * y - x,
        lambda x, y: jnp.tanh(x + y) * (x - y),
        lambda x, y: jnp.exp(-(x * x)) + y,
        lambda x, y: jnp.where(x > y, x, y * 0.5) * 2,
        lambda x, y: (x * y).sum(-1) + 1,
    ]


def to_jax(tensor: torch.Tensor) -> Any:
    """A JAX array of a tensor's values, int64 as int32 as JAX has it."""
    import jax.numpy as jnp

    return jnp.asarray(tensor.cpu().numpy())


def to_torch(value: Any) -> torch.Tensor:
    """A tensor of a JAX array's values."""
    import numpy

    return torch.from_numpy(numpy.array(value))


def compiled(fn: Fn) -> Fn:
    """`jax.jit(fn)` that waits for its result, as torch on the CPU does."""
    import jax

    jitted = jax.jit(fn)
    return lambda *args: jax.block_until_ready(jitted(*args))
