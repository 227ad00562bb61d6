"""How one operation may be written: for each `Step.fn` the Python that means the same.

`{0}`, `{1}`, … are the positional arguments, `{all}` all arguments, `{rest}` all but the first, `{kwargs}` the named
ones, `{index}` an index in brackets' own syntax, `{r}` the name of the result. A text with `{r}` is a list of
statements, any other an expression. A spelling after `~` may differ by a rounding. What a spelling gives is compared
with the plain call's result while a program is written; where it is of another dtype, size or value for these
arguments (`x & y` of floats, `-x` of bool), another is taken. So a row may list what holds for some arguments only.
"""

from __future__ import annotations

import functools

import torch

_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "remainder": "%", "floor_divide": "//", "matmul": "@",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_NAMES = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "truediv", "pow": "pow", "remainder": "mod",
    "floor_divide": "floordiv", "matmul": "matmul", "bitwise_and": "and_", "bitwise_or": "or_", "bitwise_xor": "xor",
    "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le",
    "gt": "gt", "ge": "ge",
}  # fmt: skip
_AUGMENTED = {n: s for n, s in _OPERATORS.items() if n not in ("eq", "ne", "lt", "le", "gt", "ge", "matmul")}
_ALIASES = {
    "abs": "absolute", "neg": "negative", "mul": "multiply", "sub": "subtract", "div": "divide", "trunc": "fix",
    "clamp": "clip", "cat": "concat", "movedim": "moveaxis", "transpose": "swapaxes", "asinh": "arcsinh",
    "atan": "arctan", "gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "ne": "not_equal",
    "erf": "special.erf", "expm1": "special.expm1", "log1p": "special.log1p", "sinc": "special.sinc",
    "logsumexp": "special.logsumexp", "round": "special.round", "softmax": "special.softmax",
    "sigmoid": "special.expit", "exp2": "special.exp2", "log_softmax": "special.log_softmax",
    "bitwise_not": "bitwise_not",
}  # fmt: skip
_FUNCTIONAL = (
    "relu", "sigmoid", "tanh", "softmax", "log_softmax", "softplus", "logsigmoid", "selu", "celu", "silu", "gelu",
    "hardsigmoid", "hardswish", "mish", "softsign", "tanhshrink", "leaky_relu", "elu",
)  # fmt: skip
_MODULES = {
    "relu": "ReLU()", "sigmoid": "Sigmoid()", "tanh": "Tanh()", "softplus": "Softplus()", "logsigmoid": "LogSigmoid()",
    "selu": "SELU()", "celu": "CELU()", "silu": "SiLU()", "gelu": "GELU()", "hardsigmoid": "Hardsigmoid()",
    "hardswish": "Hardswish()", "mish": "Mish()", "softsign": "Softsign()", "tanhshrink": "Tanhshrink()",
    "leaky_relu": "LeakyReLU()", "elu": "ELU()",
}  # fmt: skip

# What is said of one operation alone; calls, methods, overloads, `out=`, in-place forms and aliases come by rule.
ROWS: dict[str, tuple[str, ...]] = {
    "torch.add": (
        "{1} + {0}", "{0} - (-{1})", "sum([{0}, {1}])", "torch.stack([{0}, {1}]).sum(0)",
        "torch.add({0}, {1}, alpha=1)", "torch.ops.aten.add.Tensor({0}, {1})", "{0} + torch.tensor({1})",
        "torch._foreach_add([{0}], [{1}])[0]", "torch.ops.aten.add.Scalar({0}, {1})", "torch.sub({0}, {1}, alpha=-1)",
        "{1}.__radd__({0})",
    ),
    "torch.sub": (
        "{0} + (-{1})", "torch.rsub({1}, {0})", "-({1} - {0})", "{0} - torch.tensor({1})",
        "torch.ops.aten.sub.Tensor({0}, {1})", "torch.ops.aten.sub.Scalar({0}, {1})", "torch.add({0}, {1}, alpha=-1)",
        "{1}.__rsub__({0})",
    ),
    "torch.mul": (
        "{1} * {0}", "torch.einsum('...,...->...', {0}, {1})", "torch.ops.aten.mul.Tensor({0}, {1})",
        "torch.ops.aten.mul.Scalar({0}, {1})", "{0} * torch.tensor({1})", "{0} & {1}",
        "torch._foreach_mul([{0}], {1})[0]", "{0}.square()", "{0} ** 2", "torch.addcmul({0} * 0, {0}, {1})",
        "torch.logical_and({0}, {1})", "{1}.__rmul__({0})",
    ),
    "torch.div": (
        "~{0} * (1 / {1})", "torch.true_divide({0}, {1})", "torch.div({0}, {1}, rounding_mode=None)",
        "{0} / torch.tensor({1})", "torch.ops.aten.div.Tensor({0}, {1})", "~{0} * {1}.reciprocal()",
        "{1}.__rtruediv__({0})", "torch.ops.aten.div.Scalar({0}, {1})",
    ),
    "torch.rsub": ("{1} - {0}", "-{0} + {1}", "torch.sub(torch.tensor({1}), {0})", "{0}.__rsub__({1})"),
    "torch.pow": (
        "{0} * {0}", "{0}.square()", "{0}.sqrt()", "{0} ** torch.tensor({1})", "torch.float_power({0}, {1})",
        "torch.ops.aten.pow.Tensor_Scalar({0}, {1})",
    ),
    "torch.square": ("{0} * {0}", "{0} ** 2", "torch.pow({0}, 2)"),
    "torch.neg": ("-{0}", "0 - {0}", "{0} * -1", "operator.neg({0})", "torch.neg({0}.clone())"),
    "torch.abs": (
        "abs({0})", "{0}.abs()", "torch.where({0} < 0, -{0}, {0})", "operator.abs({0})",
    ),
    "torch.relu": (
        "{0}.clamp(min=0)", "torch.clamp({0}, 0)", "torch.clamp_min({0}, 0)", "torch.where({0} > 0, {0}, 0)",
        "F.relu({0}.clone(), inplace=True)", "torch.threshold({0}, 0, 0)", "F.threshold({0}, 0, 0)", "{0} * ({0} > 0)",
    ),
    "torch.sign": ("torch.sgn({0})", "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)"),
    "torch.reciprocal": ("1 / {0}", "{0} ** -1", "1.0 / {0}", "{0}.__rtruediv__(1)"),
    "torch.rsqrt": ("~1 / torch.sqrt({0})", "~{0} ** -0.5"),
    "torch.sqrt": ("{0} ** 0.5", "{0}.pow(0.5)"),
    "torch.clone": (
        "{0} + 0", "{0}.contiguous().clone()", "torch.empty_like({0}).copy_({0})", "{0}.to({0}.dtype, copy=True)",
        "torch.cat([{0}])", "torch.clone({0}, memory_format=torch.preserve_format)", "{0}.__copy__()",
    ),
    "torch.sigmoid": ("torch.special.expit({0})", "~1 / (1 + torch.exp(-{0}))"),
    "torch.log1p": ("~torch.log(1 + {0})",),
    "torch.expm1": ("~torch.exp({0}) - 1",),
    "F.silu": ("~{0} * torch.sigmoid({0})",),
    "F.softplus": ("~torch.log1p(torch.exp({0}))",),
    "F.mish": ("~{0} * torch.tanh(F.softplus({0}))",),
    "F.gelu": ("~0.5 * {0} * (1 + torch.erf({0} * 0.7071067811865476))", "F.gelu({0}, approximate='none')"),
    "F.hardsigmoid": ("~F.relu6({0} + 3) / 6",),
    "F.leaky_relu": ("torch.where({0} > 0, {0}, 0.01 * {0})", "F.leaky_relu({0}.clone(), 0.01, inplace=True)"),
    "F.tanhshrink": ("{0} - torch.tanh({0})",),
    "F.softsign": ("{0} / (1 + {0}.abs())",),
    "torch.logical_not": ("~({0} != 0)", "{0} == 0", "~{0}"),
    "torch.logical_and": ("{0} & {1}", "({0} != 0) & ({1} != 0)", "({0} * {1}) != 0", "{0}.bool() & {1}.bool()"),
    "torch.logical_or": (
        "{0} | {1}", "({0} != 0) | ({1} != 0)", "{0}.bool() | {1}.bool()", "torch.maximum({0}.bool(), {1}.bool())",
    ),
    "torch.logical_xor": ("{0} ^ {1}", "({0} != 0) ^ ({1} != 0)", "{0}.bool() != {1}.bool()"),
    "torch.bitwise_and": ("{1} & {0}", "~(~{0} | ~{1})", "operator.and_({1}, {0})", "{0}.__and__({1})"),
    "torch.bitwise_or": ("{1} | {0}", "~(~{0} & ~{1})", "operator.or_({1}, {0})", "{0}.__or__({1})"),
    "torch.bitwise_xor": ("{1} ^ {0}", "({0} | {1}) & ~({0} & {1})", "{0} != {1}", "{0}.__xor__({1})"),
    "torch.bitwise_not": (
        "~{0}", "operator.invert({0})", "-1 - {0}", "{0} ^ -1", "{0}.logical_not()", "operator.inv({0})",
    ),
    "torch.bitwise_left_shift": ("{0} * (1 << {1})", "{0}.__lshift__({1})"),
    "torch.bitwise_right_shift": ("{0}.__rshift__({1})",),
    "torch.eq": (
        "~({0} != {1})", "~torch.ne({0}, {1})", "{1} == {0}", "operator.eq({1}, {0})", "({0} != {1}).logical_not()",
    ),
    "torch.ne": ("~({0} == {1})", "{1} != {0}", "torch.logical_not({0} == {1})"),
    "torch.lt": ("{1} > {0}", "~({0} >= {1})", "torch.gt({1}, {0})"),
    "torch.le": ("{1} >= {0}", "~({0} > {1})"),
    "torch.gt": ("{1} < {0}", "~({0} <= {1})"),
    "torch.ge": ("{1} <= {0}", "~({0} < {1})"),
    "torch.remainder": ("{0} - {1} * ({0} // {1})", "{0}.remainder({1})", "{0} % torch.tensor({1})"),
    "torch.fmod": ("{0} - {1} * torch.trunc({0} / {1})", "torch.fmod({0}, torch.tensor({1}))"),
    "torch.floor_divide": (
        "torch.div({0}, {1}, rounding_mode='floor')", "torch.floor({0} / {1})", "{0} // torch.tensor({1})",
    ),
    "torch.frac": ("{0} - torch.trunc({0})",),
    "torch.maximum": (
        "torch.max({0}, {1})", "torch.where({0} > {1}, {0}, {1})", "torch.stack([{0}, {1}]).amax(0)",
        "torch.maximum({1}, {0})", "torch.clamp({0}, min={1})", "torch.clamp_min({0}, {1})",
    ),
    "torch.minimum": (
        "torch.min({0}, {1})", "torch.where({0} < {1}, {0}, {1})", "torch.stack([{0}, {1}]).amin(0)",
        "torch.minimum({1}, {0})", "torch.clamp({0}, max={1})", "torch.clamp_max({0}, {1})",
    ),
    "torch.clamp": (
        "torch.clamp({0}, min={1}, max={2})", "{0}.clamp({1}).clamp(max={2})", "torch.clip({0}, {1}, {2})",
        "torch.clamp_max(torch.clamp_min({0}, {1}), {2})", "F.hardtanh({0}, {1}, {2})",
        "torch.clamp({0}, torch.tensor({1}), torch.tensor({2}))", "{0}.clip(max={2}, min={1})",
    ),
    "torch.where": (
        "torch.where({0}, {1}, torch.tensor({2}))", "torch.where(~{0}, {2}, {1})", "{1}.where({0}, {2})",
        "{2}.masked_fill({0}, {1})", "{1}.masked_fill(~{0}, {2})", "torch.where({0} == False, {2}, {1})",
        "torch.ops.aten.where.self({0}, {1}, {2})",
    ),
    "torch.masked_fill": (
        "torch.where({1}, {2}, {0})", "{0}.masked_fill({1}, torch.tensor({2}))", "{r} = {0}.clone()\n{r}[{1}] = {2}",
        "{r} = {0} * 1\n{r}.masked_fill_({1}, {2})",
    ),
    "torch.addcmul": (
        "{0} + {value} * {1} * {2}", "{0} + {1} * {2} * {value}", "torch.add({0}, {1} * {2}, alpha={value})",
    ),
    "torch.lerp": (
        "~{0} + {2} * ({1} - {0})", "torch.lerp({0}, {1}, torch.tensor({2}))", "torch.lerp({0}, {1}, weight={2})",
    ),
    ".to": (
        "{0}.type({1})", "{0}.to(dtype={1})", "torch.ops.aten.to.dtype({0}, {1})",
        "torch.ops.aten._to_copy({0}, dtype={1})", "{0}.to(torch.empty(0, dtype={1}))",
        "{0}.type_as(torch.empty(0, dtype={1}))", "{0}.float()", "{0}.double()", "{0}.half()", "{0}.bfloat16()",
        "{0}.long()", "{0}.int()", "{0}.bool()", "{0} != 0", "{0} + 0.0",
        "torch.empty_like({0}, dtype={1}).copy_({0})", "torch.tensor(0, dtype={1}) + {0}", "{0}.to({1}, copy=True)",
        "torch.ops.prims.convert_element_type({0}, {1})",
    ),
    "getitem": ("{0}[{index}]", "operator.getitem({0}, {1})", "{0}.__getitem__({1})", "{0}[({index},)]"),
    ".permute": (
        "torch.permute({0}, {1})", "{0}.permute(*{1})", "torch.ops.aten.permute({0}, {1})", "{0}.permute(dims={1})",
        "{0}.movedim({1}, tuple(range({0}.dim())))", "{0}.t()", "{0}.T", "{0}.mT", "{0}.transpose(-1, -2)",
    ),
    ".transpose": (
        "torch.transpose({0}, {1}, {2})", "{0}.transpose({2}, {1})", "{0}.swapaxes({1}, {2})",
        "torch.swapdims({0}, {1}, {2})", "{0}.mT", "{0}.t()", "{0}.transpose(dim0={1}, dim1={2})",
    ),
    "torch.movedim": ("torch.moveaxis({0}, {1}, {2})", "{0}.movedim({1}, {2})"),
    "torch.flatten": (
        "{0}.flatten({1}, {2})", "{0}.flatten(start_dim={1}, end_dim={2})", "nn.Flatten({1}, {2})({0})",
        "{0}.reshape(-1)", "{0}.ravel()", "torch.ravel({0})", "{0}",
    ),
    ".reshape": (
        "torch.reshape({0}, {1})", "{0}.reshape(*{1})", "{0}.contiguous().view({1})", "{0}.reshape(shape={1})",
        "{0}.flatten().unflatten(0, {1})", "{0}.flatten().view({1})",
    ),
    ".view": (
        "{0}.reshape({1})", "{0}.view(*{1})", "torch.ops.aten.view({0}, {1})", "{0}.view(dtype={1})",
        "torch._unsafe_view({0}, {1})", "{0}.view_as({0}.view({1}))", "{0}.view(size={1})",
    ),
    ".unsqueeze": (
        "torch.unsqueeze({0}, {1})", "{0}.unsqueeze(dim={1})", "{0}[None]", "{0}[..., None]", "{0}[:, None]",
        "torch.unsqueeze({0}, dim={1})",
    ),
    ".squeeze": (
        "torch.squeeze({0}, {1})", "{0}.squeeze(dim={1})", "{0}.squeeze(({1},))", "torch.squeeze({0}, dim={1})", "{0}",
    ),
    ".expand": (
        "{0}.expand(*{1})", "torch.broadcast_to({0}, {1})", "{0}.broadcast_to({1})", "{0}.expand_as(torch.empty({1}))",
        "torch.ops.aten.expand({0}, {1})", "torch.broadcast_tensors({0}, torch.empty({1}))[0]", "{0}.expand(size={1})",
    ),
    "torch.narrow": (
        "{0}.narrow({1}, {2}, {3})", "torch.narrow_copy({0}, {1}, {2}, {3})", "{0}[{2}:{2} + {3}]",
        "{0}[..., {2}:{2} + {3}]", "torch.ops.aten.slice({0}, {1}, {2}, {2} + {3})",
        "torch.index_select({0}, {1}, torch.arange({2}, {2} + {3}))", "{0}[:, {2}:{2} + {3}]",
    ),
    "torch.select": (
        "{0}.select({1}, {2})", "{0}.movedim({1}, 0)[{2}]", "{0}.unbind({1})[{2}]", "{0}[{2}]", "{0}[..., {2}]",
        "torch.unbind({0}, dim={1})[{2}]", "{0}[:, {2}]", "torch.select(dim={1}, index={2}, input={0})",
    ),
    "torch.diagonal": (
        "{0}.diagonal({1})", "torch.diagonal({0}, offset={1})",
        "torch.linalg.diagonal({0}, offset={1}, dim1=0, dim2=1)", "torch.diag({0}, {1})", "torch.einsum('ii->i', {0})",
    ),
    "torch.chunk": ("{0}.chunk({1}, {2})", "{0}.chunk({1}, dim={2})", "torch.tensor_split({0}, {1}, {2})"),
    "torch.split": ("{0}.split({1}, {2})", "torch.split({0}, {1}, dim={2})", "torch.ops.aten.split({0}, {1}, {2})"),
    "torch.unbind": (
        "{0}.unbind({1})", "torch.unbind({0})", "tuple({0})", "[{0}[i] for i in range(len({0}))]", "list({0})",
    ),
    "torch.flip": ("{0}.flip({1})", "{0}.flip(*{1})", "torch.flipud({0})", "torch.fliplr({0})"),
    "torch.roll": ("{0}.roll({1}, {2})", "torch.roll({0}, shifts={1}, dims={2})"),
    "torch.cat": (
        "torch.concat({0}, {1})", "torch.cat({0}, dim={1})", "torch.cat([*{0}], {1})", "torch.concatenate({0}, {1})",
        "torch.hstack({0})", "torch.vstack({0})", "torch.cat(dim={1}, tensors={0})",
    ),
    "torch.stack": (
        "torch.stack([*{0}], dim={1})", "torch.cat([x.unsqueeze({1}) for x in {0}], {1})",
        "torch.stack(tensors={0}, dim={1})",
    ),
    "F.pad": (
        "F.pad({0}, {1}, value={3})", "torch.constant_pad_nd({0}, {1}, {3})",
        "torch.ops.aten.constant_pad_nd({0}, {1}, {3})", "F.pad({0}, list({1}), mode='constant', value={3})",
        "torch._C._nn.pad({0}, {1}, 'constant', {3})",
    ),
    ".repeat": ("{0}.repeat(*{1})", "torch.tile({0}, {1})", "{0}.tile({1})", "torch.ops.aten.repeat({0}, {1})"),
    "torch.repeat_interleave": (
        "{0}.repeat_interleave({1}, {2})", "torch.repeat_interleave({0}, {1}, dim={2})",
        "torch.repeat_interleave({0}, torch.tensor({1}), {2})",
    ),
    "torch.tril": ("{0}.tril({1})", "torch.tril({0}, diagonal={1})", "{0} - torch.triu({0}, {1} + 1)"),
    "torch.triu": ("{0}.triu({1})", "torch.triu({0}, diagonal={1})"),
    "torch.full_like": (
        "torch.full({0}.shape, {1}, dtype={0}.dtype)", "{0}.new_full({0}.shape, {1})", "torch.zeros_like({0}) + {1}",
        "torch.empty_like({0}).fill_({1})", "torch.full_like({0}, fill_value={1})",
    ),
    "torch.zeros_like": (
        "torch.zeros({0}.shape, dtype={0}.dtype)", "{0}.new_zeros({0}.shape)", "torch.empty_like({0}).zero_()",
        "torch.zeros_like({0}.contiguous())", "torch.zeros_like({0}, memory_format=torch.preserve_format)",
    ),
    "torch.ones_like": (
        "torch.ones({0}.shape, dtype={0}.dtype)", "{0}.new_ones({0}.shape)", "torch.empty_like({0}).fill_(1)",
        "torch.zeros_like({0}) + 1",
    ),
    ".new_zeros": (
        "torch.zeros({1}, dtype={0}.dtype)", "{0}.new_zeros(*{1})", "{0}.new_full({1}, 0)", "torch.zeros_like({0})",
        "{0}.new_empty({1}).zero_()",
    ),
    ".contiguous": (
        "{0}.contiguous(memory_format=torch.contiguous_format)", "{0}.clone(memory_format=torch.contiguous_format)",
        "torch.ops.aten.contiguous({0})", "{0}.reshape({0}.shape).contiguous()",
        "{0}.to(memory_format=torch.contiguous_format)",
    ),
    "torch.sum": (
        "{0}.sum({rest})", "~torch.einsum('ij->i', {0})", "~torch.einsum('ij->j', {0})", "~torch.einsum('ij->', {0})",
        "torch.sum(input={0}{kwargs_after})", "{0}.count_nonzero()", "{0}.sum(dim={1}{kwargs_after})",
        "~{0}.mean({rest}) * ({0}.numel() / max({0}.mean({rest}).numel(), 1))",
        "torch.ops.aten.sum.dim_IntList({all})", "{0}.nansum({rest})", "torch.nansum({all})",
        "torch.sum({0}, axis={1}{kwargs_after})",
    ),
    "torch.mean": (
        "{0}.mean({rest})", "~torch.sum({all}) / ({0}.numel() / max(torch.mean({all}).numel(), 1))",
        "{0}.mean(dim={1}{kwargs_after})", "torch.nanmean({all})", "torch.var_mean({all})[1]",
    ),
    "torch.var": (
        "{0}.var({rest})", "torch.var_mean({all})[0]", "~torch.std({all}).square()",
        "torch.var({0}, dim={1}{kwargs_after})",
    ),
    "torch.prod": ("{0}.prod({rest})", "torch.prod({0}, dim={1}{kwargs_after})"),
    "torch.amax": (
        "{0}.amax({rest})", "-torch.amin(-{0}, {rest})", "torch.aminmax({0}).max", "{0}.max()",
        "torch.max({0}, {1}[0]{kwargs_after}).values", "torch.amax({0}, dim={1}{kwargs_after})",
    ),
    "torch.amin": (
        "{0}.amin({rest})", "-torch.amax(-{0}, {rest})", "{0}.min()", "torch.min({0}, {1}[0]{kwargs_after})[0]",
    ),
    "torch.any": (
        "{0}.any({rest})", "{0}.bool().any({rest})", "torch.any({0} != 0, {rest})", "{0}.bool().amax({rest})",
    ),
    "torch.all": (
        "{0}.all({rest})", "{0}.bool().all({rest})", "~torch.any({0} == 0, {rest})", "~((~{0}.bool()).any({rest}))",
    ),
    "torch.count_nonzero": ("{0}.count_nonzero({rest})", "({0} != 0).sum({rest})", "torch.count_nonzero({0}, dim={1})"),
    "torch.argmax": ("{0}.argmax({rest})", "torch.max({all})[1]", "{0}.flatten().argmax()", "torch.max({all}).indices"),
    "torch.argmin": ("{0}.argmin({rest})", "torch.min({all})[1]", "{0}.flatten().argmin()"),
    "torch.max": ("{0}.max({rest})", "(torch.amax({all}), torch.argmax({all}))", "torch.max({0}, dim={1})"),
    "torch.min": ("{0}.min({rest})", "(torch.amin({all}), torch.argmin({all}))", "torch.min({0}, dim={1})"),
    "torch.aminmax": ("{0}.aminmax({kwargs})", "(torch.amin({0}, {kwargs}), torch.amax({0}, {kwargs}))"),
    "torch.logsumexp": ("{0}.logsumexp({rest})", "~{0}.exp().sum({rest}).log()", "torch.logsumexp({0}, dim={1})"),
    "torch.softmax": (
        "F.softmax({all})", "{0}.softmax({rest})", "~{0}.exp() / {0}.exp().sum({1}, keepdim=True)",
        "nn.Softmax({1})({0})", "torch.softmax({0}, dim={1}{kwargs_after})", "~F.log_softmax({all}).exp()",
    ),
    "torch.log_softmax": (
        "F.log_softmax({all})", "{0}.log_softmax({rest})", "~{0} - {0}.logsumexp({1}, keepdim=True)",
        "nn.LogSoftmax({1})({0})", "~torch.softmax({all}).log()",
    ),
    "torch.linalg.vector_norm": (
        "torch.norm({0}, {1}, {2})", "{0}.norm({1}, {2})", "~{0}.square().sum({2}).sqrt()", "{0}.abs().sum({2})",
        "torch.linalg.norm({0}, {1}, {2})", "torch.linalg.vector_norm({0}, ord={1}, dim={2})",
    ),
    "F.layer_norm": (
        "nn.LayerNorm({1}, elementwise_affine=False)({0})", "torch.layer_norm({0}, {1})",
        "F.layer_norm({0}, list({1}), None, None, 1e-5)",
        "~({0} - {0}.mean(-1, keepdim=True)) / ({0}.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()",
        "torch.ops.aten.native_layer_norm({0}, {1}, None, None, 1e-5)[0]",
    ),
    "F.group_norm": ("nn.GroupNorm({1}, {0}.shape[1], affine=False)({0})", "torch.group_norm({0}, {1})"),
    "F.avg_pool2d": (
        "nn.AvgPool2d({1}, {2})({0})", "F.avg_pool2d({0}, kernel_size=({1}, {1}), stride={2})",
        "torch._C._nn.avg_pool2d({0}, {1}, {2})",
    ),
    "F.max_pool2d": (
        "nn.MaxPool2d({1}, {2})({0})", "F.max_pool2d({0}, ({1}, {1}), stride={2})", "torch.max_pool2d({0}, {1}, {2})",
        "F.max_pool2d({0}, {1}, {2}, return_indices=True)[0]",
    ),
    "F.interpolate": (
        "nn.Upsample({kwargs})({0})", "nn.UpsamplingNearest2d(scale_factor=2)({0})", "F.upsample({0}, {kwargs})",
        "{0}.repeat_interleave(2, -1).repeat_interleave(2, -2)",
    ),
    "F.one_hot": (
        "F.one_hot({0}, num_classes={1})", "({0}.unsqueeze(-1) == torch.arange({1})).long()",
        "torch.ops.aten.one_hot({0}, {1})",
        "torch.zeros(*{0}.shape, {1}, dtype=torch.long).scatter(-1, {0}.unsqueeze(-1), 1)",
    ),
    "F.embedding": (
        "{1}[{0}]", "torch.embedding({1}, {0})", "F.embedding(weight={1}, input={0})",
        "{1}.index_select(0, {0}.flatten()).view(*{0}.shape, -1)",
    ),
    "torch.index_select": (
        "{0}.index_select({1}, {2})", "{0}[{2}]", "{0}[..., {2}]", "{0}[:, {2}]",
        "torch.index_select({0}, dim={1}, index={2})",
    ),
    "torch.gather": (
        "{0}.gather({1}, {2})", "torch.take_along_dim({0}, {2}, {1})", "torch.gather({0}, dim={1}, index={2})",
    ),
    "torch.take": (
        "{0}.take({1})", "{0}.flatten()[{1}]", "{0}.reshape(-1).index_select(0, {1}.flatten()).view({1}.shape)",
    ),
    "torch.scatter": ("{0}.scatter({rest})", "{r} = {0}.clone()\n{r}.scatter_({rest})"),
    "torch.scatter_add": ("{0}.scatter_add({rest})", "{r} = {0}.clone()\n{r}.scatter_add_({rest})"),
    "torch.scatter_reduce": ("{0}.scatter_reduce({rest})", "{r} = {0}.clone()\n{r}.scatter_reduce_({rest})"),
    "torch.index_add": (
        "{0}.index_add({rest})", "{r} = {0}.clone()\n{r}.index_add_({rest})", "{0}.index_add({1}, {2}, {3}, alpha=1)",
    ),
    "torch.index_copy": ("{0}.index_copy({rest})", "{r} = {0}.clone()\n{r}.index_copy_({rest})"),
    "torch.index_fill": (
        "{0}.index_fill({rest})", "{r} = {0}.clone()\n{r}.index_fill_({rest})", "{r} = {0}.clone()\n{r}[{2}] = {3}",
    ),
    "torch.index_put": ("{0}.index_put({rest})", "{r} = {0}.clone()\n{r}.index_put_({rest})"),
    "torch.select_scatter": ("{0}.select_scatter({rest})", "{r} = {0}.clone()\n{r}.select({2}, {3}).copy_({1})"),
    "torch.slice_scatter": (
        "{0}.slice_scatter({rest})", "torch.slice_scatter({0}, {1}, dim={2}, start={3}, end={4}, step={5})",
    ),
    "torch.bucketize": ("torch.searchsorted({1}, {0})", "torch.bucketize({0}, boundaries={1}, {kwargs})"),
    "torch.matmul": (
        "torch.mm({0}, {1})", "{0}.mm({1})", "torch.einsum('ij,jk->ik', {0}, {1})", "F.linear({0}, {1}.t())",
        "torch.bmm({0}[None], {1}[None])[0]", "({1}.t() @ {0}.t()).t()", "~({0}.unsqueeze(-1) * {1}).sum(1)",
        "{1}.__rmatmul__({0})", "torch.addmm(torch.zeros((), dtype={0}.dtype), {0}, {1})",
        "torch.tensordot({0}, {1}, 1)",
    ),
    "torch.isnan": ("{0} != {0}", "{0}.isnan()", "~({0} == {0})"),
    "torch.isinf": ("{0}.isinf()", "{0}.abs() == float('inf')"),
    "torch.isfinite": ("{0}.isfinite()", "({0} - {0}) == 0", "{0}.abs() < float('inf')"),
    # -- writes
    ".add_": (
        "{0} += {1}\n{r} = {0}", "torch.add({0}, {1}, out={0})\n{r} = {0}", "{r} = {0}.copy_({0} + {1})",
        "{0}[...] = {0} + {1}\n{r} = {0}", "{r} = operator.iadd({0}, {1})", "{r} = torch.ops.aten.add_({0}, {1})",
        "torch._foreach_add_([{0}], {1})\n{r} = {0}", "{r} = {0}.__iadd__({1})", "{0}[:] = {0} + {1}\n{r} = {0}",
        "{r} = {0}.add_({1}, alpha=1)", "{r} = {0}.sub_(-{1})",
    ),
    ".sub_": (
        "{0} -= {1}\n{r} = {0}", "torch.sub({0}, {1}, out={0})\n{r} = {0}", "{r} = operator.isub({0}, {1})",
        "{0}[...] = {0} - {1}\n{r} = {0}", "{r} = {0}.copy_({0} - {1})", "{r} = {0}.add_({1}, alpha=-1)",
    ),
    ".mul_": (
        "{0} *= {1}\n{r} = {0}", "torch.mul({0}, {1}, out={0})\n{r} = {0}", "{r} = operator.imul({0}, {1})",
        "{0}[...] *= {1}\n{r} = {0}", "{r} = {0}.copy_({0} * {1})", "{r} = {0}.multiply_({1})",
        "{0}[:] *= {1}\n{r} = {0}",
    ),
    ".copy_": (
        "{0}[...] = {1}\n{r} = {0}", "{0}[:] = {1}\n{r} = {0}", "{r} = torch.ops.aten.copy_({0}, {1})",
        "torch.clone({1}, out={0})\n{r} = {0}", "{r} = {0}.zero_().add_({1})",
        "{0}.set_data = None\n{r} = {0}.copy_({1})",
    ),
    ".zero_": (
        "{r} = {0}.fill_(0)", "{r} = {0}.mul_(0)", "{0}[...] = 0\n{r} = {0}", "{r} = torch.zero_({0})",
        "{0} *= 0\n{r} = {0}", "{r} = {0}.copy_(torch.zeros_like({0}))",
    ),
    ".fill_": (
        "{0}[...] = {1}\n{r} = {0}", "{r} = {0}.copy_(torch.full_like({0}, {1}))", "{r} = torch.fill_({0}, {1})",
        "{0}[:] = {1}\n{r} = {0}", "{r} = {0}.zero_().add_({1})", "{r} = {0}.copy_(torch.tensor({1}))",
        "{r} = {0}.fill_(torch.tensor({1}))",
    ),
    ".neg_": (
        "{r} = {0}.mul_(-1)", "torch.neg({0}, out={0})\n{r} = {0}", "{r} = {0}.copy_(-{0})", "{r} = torch.neg_({0})",
        "{r} = {0}.negative_()",
    ),
    ".abs_": (
        "torch.abs({0}, out={0})\n{r} = {0}", "{r} = {0}.copy_({0}.abs())", "{r} = torch.abs_({0})",
        "{0}[...] = abs({0})\n{r} = {0}",
    ),
    ".relu_": (
        "{r} = F.relu({0}, inplace=True)", "{r} = F.relu_({0})", "{r} = torch.relu_({0})", "{r} = {0}.clamp_(min=0)",
        "{r} = nn.ReLU(inplace=True)({0})", "{0}[{0} < 0] = 0\n{r} = {0}", "{r} = {0}.copy_({0}.relu())",
    ),
    ".square_": ("{r} = {0}.mul_({0})", "{r} = {0}.pow_(2)", "{0} **= 2\n{r} = {0}", "{r} = {0}.copy_({0} * {0})"),
    ".clamp_": (
        "{r} = {0}.clip_({1}, {2})", "torch.clamp({0}, {1}, {2}, out={0})\n{r} = {0}",
        "{r} = torch.clamp_({0}, {1}, {2})", "{r} = F.hardtanh_({0}, {1}, {2})",
        "{r} = {0}.clamp_(min={1}).clamp_(max={2})", "{r} = {0}.copy_({0}.clamp({1}, {2}))",
    ),
    ".masked_fill_": (
        "{0}[{1}] = {2}\n{r} = {0}", "{r} = {0}.copy_({0}.masked_fill({1}, {2}))",
        "{r} = {0}.copy_(torch.where({1}, {2}, {0}))", "{r} = {0}.masked_fill_({1}, torch.tensor({2}))",
        "{r} = {0}.index_put_(({1},), torch.tensor({2}, dtype={0}.dtype))",
    ),
    "setitem": (
        "{0}[{index}] = {2}\n{r} = None", "{r} = operator.setitem({0}, {1}, {2})",
        "{0}[{index}].copy_({2})\n{r} = None", "{0}[{index}].fill_({2})\n{r} = None",
        "{0}.__setitem__({1}, {2})\n{r} = None", "{0}[{index}] = torch.tensor({2})\n{r} = None",
        "{0}[{index}].zero_().add_({2})\n{r} = None",
    ),
    ".cumsum_": (
        "{r} = {0}.copy_({0}.cumsum({1}))", "torch.cumsum({0}, {1}, out={0})\n{r} = {0}",
        "{0}[...] = torch.cumsum({0}, dim={1})\n{r} = {0}",
    ),
    ".index_put_": ("{0}[{1}] = {2}\n{r} = {0}", "{r} = torch.index_put_({all})"),
    ".unsqueeze_": ("{r} = torch.ops.aten.unsqueeze_({0}, {1})",),
    ".transpose_": ("{r} = {0}.swapaxes_({1}, {2})", "{r} = {0}.t_()", "{r} = {0}.swapdims_({1}, {2})"),
    "torch._foreach_mul_": (
        "{r} = [x.mul_(y) for x, y in zip({0}, {1})]", "for x, y in zip({0}, {1}):\n    x *= y\n{r} = None",
    ),
    "torch._foreach_neg": ("[-x for x in {0}]", "tuple(x.neg() for x in {0})"),
    "torch._foreach_abs": ("[x.abs() for x in {0}]", "tuple(abs(x) for x in {0})"),
}  # fmt: skip

# What leaves a value as it is; those of the first list are views of it.
VIEW_IDENTITIES = (
    "{0}[...]", "{0}.view_as({0})", "{0}.unsqueeze(0).squeeze(0)", "{0}[None][0]",
    "{0}.transpose(0, -1).transpose(0, -1)", "{0}.view({0}.shape)", "{0}.expand({0}.shape)", "{0}.expand_as({0})",
    "{0}.t().t()", "{0}.mT.mT", "{0}.to({0}.dtype)", "{0}.movedim(0, -1).movedim(-1, 0)",
    "{0}.narrow(0, 0, {0}.shape[0])", "{0}[:]", "{0}[0:]", "{0}.unsqueeze(-1).select(-1, 0)",
    "{0}.swapaxes(0, 1).swapaxes(1, 0)", "{0}.alias()", "torch.ops.aten.alias({0})", "{0}.unsqueeze(-1)[..., 0]",
    "{0}.view({0}.dtype)", "{0}.unflatten(0, (1, -1)).flatten(0, 1)", "torch.atleast_1d({0})",
    "{0}.as_strided({0}.size(), {0}.stride(), {0}.storage_offset())", "{0}.positive()", "+{0}", "{0}.resolve_conj()",
    "{0}.real", "{0}.broadcast_to({0}.shape)", "torch.squeeze(torch.unsqueeze({0}, 1), 1)", "{0}.type({0}.dtype)",
    "{0}.permute(tuple(range({0}.dim())))", "torch.broadcast_tensors({0}, {0})[1]",
)  # fmt: skip
COPY_IDENTITIES = (
    "({0} + 0)", "({0} * 1)", "({0} - 0)", "({0} / 1)", "(-(-{0}))", "{0}.clone()", "{0}.contiguous()",
    "{0}.reshape({0}.shape)", "torch.cat({0}.split(2, 0), 0)", "torch.cat({0}.chunk(2, -1), -1)",
    "torch.stack({0}.unbind(0))", "{0}.flip(0).flip(0)", "{0}.roll(1).roll(-1)", "torch.stack([{0}, {0}])[1]",
    "torch.where(torch.ones_like({0}, dtype=torch.bool), {0}, 0)", "{0}.double().to({0}.dtype)",
    "{0}.flatten().view({0}.shape)", "F.pad({0}, (1, 1))[..., 1:-1]", "torch.maximum({0}, {0})",
    "torch.index_select({0}, 0, torch.arange({0}.shape[0]))", "{0}[torch.arange({0}.shape[0])]",
    "torch.cat([{0}, {0}])[:{0}.shape[0]]", "{0}.masked_fill(torch.zeros_like({0}, dtype=torch.bool), 0)",
    "torch.empty_like({0}).copy_({0})", "(~~{0})", "({0} | {0})", "({0} & {0})", "({0} ^ 0)", "F.pad({0}, (0, 0))",
    "{0}.repeat(*([1] * {0}.dim()))", "{0}.expand(2, *{0}.shape).sum(0).div(2).to({0}.dtype)", "({0} ** 1)",
    "F.dropout({0}, 0.5, False)", "nn.Identity()({0})", "torch.tril({0}) + torch.triu({0}, 1)",
    "torch.zeros_like({0}).add_({0})", "{0}.clone(memory_format=torch.contiguous_format)",
    "torch.einsum('ij->ij', {0})", "{0}.mul(2).div(2).to({0}.dtype)", "{0}.float().to({0}.dtype)",
    "torch.take_along_dim({0}, torch.arange({0}.shape[0]).reshape(-1, *([1] * ({0}.dim() - 1))), 0)",
    "{0}.unfold(0, 1, 1).squeeze(-1)", "{0}.to(memory_format=torch.channels_last)",
    "{0}.contiguous(memory_format=torch.channels_last)", "torch.hstack(torch.hsplit({0}, 1))",
    "torch.amax(torch.stack([{0}, {0}]), 0)", "F.fold(F.unfold({0}, 1), {0}.shape[2:], 1)",
    "F.pixel_unshuffle(F.pixel_shuffle({0}, 2), 2)",
)  # fmt: skip
DETACHED = (
    "{0}.detach()", "{0}.data", "torch.tensor(0.5) * {0} + 0.5 * {0}.detach()",
)  # fmt: skip
# What nobody reads.
DEAD = (
    "dead = {0} * 2", "dead = {0}.sum()", "dead = {0}.clone().fill_(1)", "dead = torch.empty_like({0})",
    "dead = {0}.reshape(-1)", "dead = {0}.shape[0] if {0}.dim() else 0", "dead = ({0} == {0}).all()",
    "dead = torch.stack([{0}, {0}])", "dead = {0}.to(torch.float32)",
)  # fmt: skip


@functools.cache
def spellings(fn: str) -> tuple[str, ...]:
    """All ways in which a step of `fn` may be written; the plain one comes first."""
    name = fn.rpartition(".")[2]
    method = "{0}" + f".{name}({{rest}})"
    if fn in ("getitem", "setitem"):
        return ROWS[fn]
    if fn.startswith("."):
        return (method, *_by_rule(fn, name), *ROWS.get(fn, ()))
    return (f"{fn}({{all}})", *_by_rule(fn, name), *ROWS.get(fn, ()))


def _by_rule(fn: str, name: str) -> tuple[str, ...]:
    made: list[str] = []
    plain = "{0}" + f".{name}({{rest}})" if fn.startswith(".") else f"{fn}({{all}})"
    if name.endswith("_") or name.startswith("_"):
        return (f"torch.ops.aten.{name}({{all}})",) if hasattr(torch.ops.aten, name) else ()
    if hasattr(torch.Tensor, name):
        made.append("{0}" + f".{name}({{rest}})")
    if fn.startswith(".") and hasattr(torch, name):
        made.append(f"torch.{name}({{all}})")
    if hasattr(torch.ops.aten, name):
        made += [f"torch.ops.aten.{name}({{all}})", f"torch.ops.aten.{name}.default({{all}})"]
    if hasattr(getattr(torch.ops.aten, name, None), "out"):
        made.append(f"{plain[:-1]}, out=torch.empty_like({plain}))")
        made.append(f"{{r}} = torch.empty_like({plain})\n{plain[:-1]}, out={{r}})")
    if hasattr(torch.Tensor, name + "_"):
        made += [f"{{0}}.clone().{name}_({{rest}})", f"{{r}} = {{0}}.clone()\n{{r}}.{name}_({{rest}})"]
    if name in _OPERATORS:
        made += [f"{{0}} {_OPERATORS[name]} {{1}}"] * 3 + [f"operator.{_NAMES[name]}({{0}}, {{1}})"]
    if name in _AUGMENTED:
        made += [f"{{r}} = {{0}}.clone()\n{{r}} {_AUGMENTED[name]}= {{1}}"]
    if name in _ALIASES:
        made.append(f"torch.{_ALIASES[name]}({{all}})")
    if name in _FUNCTIONAL:
        made.append(f"F.{name}({{all}})")
    if name in _MODULES:
        made.append(f"nn.{_MODULES[name]}({{0}})")
    return tuple(made)
