"""ATen operators with two names, mapped to the name that the lowerings use."""

from __future__ import annotations

import torch
from torch._ops import OpOverload, OpOverloadPacket

ALIASES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div",
    "fix": "trunc", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "linalg_matmul": "matmul",
    "moveaxis": "movedim", "multiply": "mul", "negative": "neg", "not_equal": "ne", "row_stack": "vstack",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__iand__": "bitwise_and_",
    "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_",
    "special_digamma": "digamma", "special_erf": "erf", "special_erfc": "erfc", "special_erfinv": "erfinv",
    "special_exp2": "exp2", "special_expit": "sigmoid", "special_expm1": "expm1", "special_gammaln": "lgamma",
    "special_i0": "i0", "special_log1p": "log1p", "special_logit": "logit", "special_logsumexp": "logsumexp",
    "special_psi": "digamma", "special_sinc": "sinc", "subtract": "sub", "true_divide": "div",
}  # fmt: skip


def packet_named(name: str) -> OpOverloadPacket | None:
    """ATen's operator of that name, such as "add" or "__and__"; None if there is none.

    `torch.ops.aten` also has the attributes of every Python object: its `__eq__` is not an operator.
    """
    found = getattr(torch.ops.aten, name, None)
    return found if isinstance(found, OpOverloadPacket) else None


def overloads_named(name: str) -> tuple[OpOverload, ...]:
    """All overloads of ATen's operator of that name; none if there is no such operator."""
    packet = packet_named(name)
    return () if packet is None else tuple(getattr(packet, o) for o in packet.overloads())  # type: ignore[no-untyped-call]


def main_packet(packet: OpOverloadPacket) -> OpOverloadPacket:
    """The packet of the same operator under its usual name; `packet` itself if it has only one name."""
    namespace, _, name = str(packet).partition(".")
    usual = ALIASES.get(name) if namespace == "aten" else None
    return getattr(torch.ops.aten, usual) if usual is not None else packet


def main_overload(overload: OpOverload) -> OpOverload:
    """The same overload under the operator's usual name; `overload` itself if it has only one name."""
    packet = main_packet(overload.overloadpacket)
    if packet is overload.overloadpacket:
        return overload
    found: OpOverload = getattr(packet, overload._overloadname or "default", overload)
    return found
