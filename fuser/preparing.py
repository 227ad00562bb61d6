"""The work of background compilation for one specification: a kernel for some arguments, or the split of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fuser import config, examples
from fuser.arguments import NO_TENSOR, why_apart
from fuser.kernel_cache import KernelSpec, Registry
from fuser.kernel_spec import ArgSpec
from fuser.kernel_store import FusedKernel
from fuser.reasons import because

if TYPE_CHECKING:
    from fuser.splitting import Split


class Maker(Protocol):
    """The part of a specification's executor that is needed here (see `Executor`)."""

    spec: KernelSpec
    registry: Registry
    splits: dict[ArgSpec | None, Split | None]

    def compile(self, args: tuple[Any, ...], key: ArgSpec) -> FusedKernel: ...

    def split(self, args: tuple[Any, ...]) -> Split | None: ...

    def device_of(self, args: tuple[Any, ...]) -> str | None: ...

    def why_not_device(self, device: str) -> str | None: ...


def make(maker: Maker, key: ArgSpec | None, args: tuple[Any, ...], have: int) -> str | None:
    """Carry out an order: for an `ArgSpec`, a kernel if more than `have` are wanted; for None, the split of the group.

    Returns None, or why there is no kernel.
    """
    if key is not None:
        return _make_kernel(maker, key, args, have)
    made = maker.split(args)
    maker.splits.setdefault(None, made)
    return None if made is not None else maker.spec.blocked[0]


def _make_kernel(maker: Maker, key: ArgSpec, args: tuple[Any, ...], have: int) -> str | None:
    device = maker.device_of(args)
    if device is None:
        return NO_TENSOR
    reason = maker.spec.blocked[0] if maker.spec.blocked else why_apart(args, device) or maker.why_not_device(device)
    if reason is not None or not config.enabled:
        return reason or because("disabled", "fusion is switched off (config.enabled is False)")
    entry, _ = maker.spec.store.get_or_compile(key, lambda: maker.compile(args, key), have)
    entry.example = entry.example or tuple(map(examples.described, args))
    _prepare_pieces(maker, maker.splits.get(key), device)
    return None if entry.kernels else entry.reason


def _prepare_pieces(maker: Maker, made: Split | None, device_type: str) -> None:
    """Compile the pieces of a split whose inputs are known."""
    for key, piece in zip(made.keys, made.pieces, strict=True) if made is not None else ():
        if None not in piece.examples:
            found = maker.registry.find(key)  # bound constants come first among its arguments
            found.runner.prepare(found.arguments([examples.on(device_type, e) for e in piece.examples]))


__all__ = ["Maker", "make"]
