"""Writes into inputs. The new content is computed like any other value; the scheduler places the write."""

from __future__ import annotations

from fuser.errors import Unsupported
from fuser.ir.nodes import TensorBox
from fuser.kernel_spec import memory_order
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.entries import lower
from fuser.lowering.pointwise import cast_loader
from fuser.reasons import because


@lower("aten.copy_")
def lower_copy_(ctx: LoweringContext, target: TensorBox, source: Operand, non_blocking: bool = False) -> TensorBox:
    """Write `source`, converted and broadcast, into the input `target`. Later reads of it see the new content."""
    number = target.storage.buffer.input_number
    if target.view is not None or number < 0:
        raise Unsupported(
            because("writes", "copy_ into something that is no input as it is, or into one for the second time")
        )
    if memory_order(ctx.meta.size(), ctx.meta.stride()) is None:
        raise Unsupported(because("writes", "copy_ into an input with gaps or overlaps"))
    size, dtype = ctx.size_of(target), target.dtype
    made = ctx.pointwise(size, dtype, cast_loader(ctx, source, size, dtype), ctx.order_of_meta())
    ctx.writes.append((made.storage.buffer.name, number))
    target.storage.buffer = made.storage.buffer
    return target
