"""Lines of programs that write in place through several names: views, writes and readers, as templates.

`{v}` is a tensor, `{w}` one that fits it (the same size, or a size that broadcasts), `{d}` a dim of `{v}`, `{i}` 0 or 1
and `{n}` another name for it. The number before a list is the least rank of `{v}`.
"""

from __future__ import annotations

_COMPLEX = "torch.view_as_complex({v}.unflatten(-1, (-1, 2)))"

# Views of every kind, some of them copies: contiguous, to and reshape give their very input where they can.
VIEWS: dict[int, tuple[str, ...]] = {
    0: (
        "{v}.detach()", "{v}.data", "{v}.unsqueeze(0)", "{v}[None]", "{v}.view_as({v})", "{v}.reshape({v}.shape)",
        "{v}.squeeze()", "torch.atleast_2d({v})", "{v}.expand_as({v})", "{v}.contiguous()", "{v}.to({v}.dtype)",
        "torch.ops.aten.alias({v})", "{v}.clone()", "{v}.type_as({v})", "{v}.expand(2, *{v}.shape)",
        "F.dropout({v}, 0.5, False)", "{v}.real", "{v}[...]", "{v}.flatten()",
    ),
    1: (
        "{v}[1:]", "{v}[::2]", "{v}[1::2]", "{v}[:-1]", "{v}[-2:]", "{v}[: {v}.shape[0] // 2]",
        "{v}[{v}.shape[0] // 2 :]", "{v}[1:-1]", "{v}.narrow({d}, 0, 2)", "{v}.narrow({d}, 1, {v}.shape[{d}] - 1)",
        "{v}.select({d}, {i})", "{v}[{i}]", "{v}[-1]", "{v}.select({d}, -1)", "{v}.chunk(2, {d})[{i}]",
        "{v}.chunk(3, {d})[{i}]", "{v}.split(2, {d})[{i}]", "{v}.split([1, {v}.shape[{d}] - 1], {d})[{i}]",
        "{v}.split({v}.shape[{d}] // 2, {d})[{i}]", "{v}.unbind({d})[{i}]", "{v}.tensor_split(2, {d})[{i}]",
        "{v}.tensor_split((1, 2), {d})[{i}]", "{v}.unfold({d}, 2, 2)", "{v}.unfold({d}, 2, 1)",
        "{v}.as_strided(({v}.shape[0] // 2,), (2 * {v}.stride(0),))", "{v}.as_strided((2,), (1,), 1)",
        "{v}.view(-1)", "{v}.reshape(-1)", "{v}.ravel()", "{v}.reshape(-1, 2)", "{v}.unflatten({d}, (2, -1))",
        "{v}.unflatten({d}, (-1, 2))", "{v}.unsqueeze({d})", "{v}[..., 0]", "{v}[..., 1:]", "{v}[..., ::2]",
        "{v}.view(torch.int32).view(torch.float32)", f"torch.view_as_real({_COMPLEX})",
        f"{_COMPLEX}.real", f"{_COMPLEX}.imag",
        "{v}.broadcast_to({v}.shape)", "{v}.index_select({d}, index)", "{v}[index]", "{v}.hsplit(2)[{i}]",
    ),
    2: (
        "{v}.t()", "{v}.T", "{v}.mT", "{v}.transpose(0, -1)", "{v}.movedim(0, -1)", "{v}.swapaxes(-1, 0)",
        "{v}.diagonal()", "{v}.diagonal(1)", "{v}[:, 1]", "{v}[:, ::2]", "{v}[1:, :-1]", "{v}.flatten(0, 1)",
        "{v}.t().contiguous()", "{v}.mT.reshape(-1)", "{v}.T[1:]", "{v}[:, None]", "{v}.view({v}.shape[0], -1)",
        "{v}[0, 1:]", "{v}.permute(1, 0)", "{v}.squeeze(0)", "{v}.t().flatten()", "{v}.vsplit(2)[{i}]",
        "{v}.chunk(2, 1)[{i}].chunk(2)[1]", "{v}.chunk(2)[1].t()", "{v}.flatten()[2:]", "{v}.unbind(0)[0].view(2, -1)",
    ),
    3: ("{v}.permute(2, 0, 1)", "{v}.flatten(1)", "{v}.transpose(1, 2)", "{v}[:, 1]", "{v}[..., 0, :]", "{v}.mT"),
}  # fmt: skip

WRITES: dict[int, tuple[str, ...]] = {
    0: (
        "{v}.add_({w})", "{v}.copy_({w})", "{v}.mul_({w})", "{v}.sub_({w}, alpha=2)", "{v} += {w}", "{v}.fill_(0.75)",
        "{v}.zero_()", "{v}[...] = {w}", "{v}.add_(1)", "{v}.mul_(0.5)", "{v}.neg_()", "{v}.relu_()",
        "F.relu({v}, inplace=True)", "{v}.clamp_(-0.5, 0.75)", "{v}.masked_fill_({v} > 0.3, -1.0)",
        "{v}[{v} > 0.3] = 0.25", "{v}[{w} < 0.1] = 0.5", "torch.mul({w}, 2, out={v})", "torch.add({v}, {w}, out={v})",
        "torch.clamp({w}, 0, 1, out={v})", "torch.where({v} > 0.1, {v}, {w}, out={v})", "{v}.lerp_({w}, 0.25)",
        "{v}.addcmul_({w}, {w}, value=0.5)", "{v}.addcdiv_({w}, 2 + {w} * {w})", "{v}.tanh_()", "{v}.sin_()",
        "{v}.fill_({w}.sum())", "{v}.sub_({v}.mean())", "{v}.copy_({w}.double())", "{v}.detach().mul_(0.5)",
        "torch._foreach_add_([{v}, {w}], 1.0)", "torch._foreach_mul_([{v}], [{w}])", "{v}.copy_({v} + {w})",
        "torch._foreach_lerp_([{v}], [{w}], 0.25)", "torch._foreach_copy_([{v}], [{w}])",
        "{n} = {v}.clone(); {v}.copy_({w}); {w}.copy_({n})", "{v}.copy_(torch.maximum({v}, {w}))",
        "{v}.mul_(0.875).add_({w}, alpha=0.125)", "{v}.data.add_({w})", "torch.sub({w}, {v}, alpha=2, out={v})",
    ),
    1: (
        "{v}[0] = 2.0", "{v}[-1] = {w}[0]", "{v}[..., 0] = {w}[..., -1]", "{v}[1:] = {v}[:-1].clone()",
        "{v}[:-1].copy_({v}[1:] * 0.5)", "{v}.copy_({v}.roll(1, 0))", "{v}.copy_({w}.roll(-1, {d}))",
        "{v}.copy_({v}.flip({d}))", "torch.cumsum({w}, {d}, out={v})", "{v}.cumsum_({d})",
        "torch.sort({w}, {d}, out=({v}, torch.empty(0, dtype=torch.long)))", "{v}[index] = {w}[:2]",
        "{v}[index] += {w}[:2]", "{v}.index_add_({d}, index, {w}.narrow({d}, 0, 2))",
        "{v}.index_copy_({d}, index, {w}.narrow({d}, 0, 2) * 2)", "{v}.index_fill_({d}, index, 0.5)",
        "{v}.index_put_((index,), {w}[:2], accumulate=True)", "{v}.scatter_({d}, {w}.argmax({d}, keepdim=True), 0.5)",
        "{v}.scatter_add_({d}, ({w} > 0.2).long(), {w})",
        "torch.index_select({w}, {d}, index, out={v}.narrow({d}, 0, 2))",
        "{n} = {v}[0].clone(); {v}[0] = {v}[1]; {v}[1] = {n}", "{v}[[0, 1]] = {v}[[1, 0]]",
        "{v}.copy_(torch.cat([{v}[1:], {w}[:1]]))", "{v}[::2] = {v}[::2] * 2", "{v}[1::2].add_({w}[1::2])",
        "{v}.narrow({d}, 1, 1).copy_({w}.narrow({d}, 0, 1))", "{v}.copy_(torch.slice_scatter({v}, {w}[1:], 0, 1))",
        "{v}.copy_(torch.select_scatter({v}, {w}[0], 0, 1))", "torch.cat([{w}[1:], {w}[:1]], out={v})",
        "for t in {v}.chunk(2, {d}): t.mul_(0.5)", "{v}.chunk(2, {d})[1].copy_({v}.chunk(2, {d})[0].narrow({d}, 0, 1))",
        "{v}.split(1, {d})[0].add_({w}.split(1, {d})[1])", "for k in range(2): {v}[k] = {w}[k] + {v}[k - 1]",
        "{v}.masked_scatter_({v} > 0.2, {w})", "{v}[1:].copy_({v}[:-1])",
        "{v}.scatter_reduce_({d}, ({w} > 0).long(), {w}, 'amax')",
        "{v}.view(torch.int32).bitwise_and_(-65536)", f"{_COMPLEX}.mul_(1j)",
        f"{_COMPLEX}.imag.copy_({_COMPLEX}.real)", f"{_COMPLEX}.real.copy_({_COMPLEX.replace('{v}', '{w}')}.imag)",
    ),
    2: (
        "{v}[:, 0] += 1", "{v}[..., 1:3] *= 2", "{v}.fill_diagonal_(0.5)", "{v}.diagonal().copy_({w}.diagonal())",
        "{v}.t().copy_({w}.t())", "{v}[:, 1] = {w}[:, 0]", "{v}[1:, 1:].sub_({w}[:-1, :-1])",
        "torch.stack([{w}[0], {w}[1]], out={v}[:2])", "{v}.mT.mul_({w}.mT)", "{v}.T[0] = {w}.T[1]",
        "torch.mm({w}, {w}.t() @ {w}, out={v})", "{v}.addmm_({w}, {w}.t() @ {w}, beta=0.5, alpha=0.125)",
        "{v}.sub_({w}.mean(1, keepdim=True))", "{v}.mul_({v}.softmax(-1))", "{v}.flatten()[1:3] = 0.25",
    ),
}  # fmt: skip

# Writes of the tensor object itself: sizes, strides, memory.
RARE = ("{v}.t_()", "{v}.transpose_(0, -1)", "{v}.unsqueeze_(0)", "{v}.squeeze_(0)", "{v}.set_({w})")

READS: dict[int, tuple[str, ...]] = {
    0: (
        "{v} * {w}", "{v} + 1", "{v}.sum()", "torch.sin({v})", "{v} - {v}.mean()", "torch.where({v} > 0.2, {v}, {w})",
        "{v}.max()", "torch.stack([{v}, {w}])", "{v}.tanh() + {w}.sum()", "{v}.double().mean()", "{v}.clone()",
    ),
    1: (
        "{v}.sum(0)", "{v}.softmax(-1)", "{v}.max({d}).values", "{v}.cumsum({d})", "{v}.flip(0)", "{v}.roll(1, {d})",
        "torch.cat([{v}, {w}])", "F.pad({v}, (1, 1))", "{v}.pow(2).mean(-1)", "{v}[1:] - {v}[:-1]", "{v}[index]",
        "{v}.sort({d}).values", "torch.unsafe_chunk({v}, 2, {d})[{i}] + 0", "{v}.norm() + {w}",
    ),
    2: ("{v} @ {w}.t()", "{v}.t() @ {w}", "{v}.mT + 0", "{v}.diagonal().sum()", "F.layer_norm({v}, {v}.shape[-1:])"),
}  # fmt: skip
