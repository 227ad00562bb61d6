"""Random chains of `torch.nn` modules with random arguments, as Python.

A row of `MAKERS` gives the text of a module for an input of a size, or nothing where it takes no such input; what
torch refuses is dropped, as is what becomes too large.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.writer import make_function

Size = tuple[int, ...]
Maker = Callable[[random.Random, Size], str]
MOST_ELEMENTS = 8000
SIZES = (
    (6,), (4, 8), (3, 6), (2, 6, 8), (1, 4, 5), (2, 4, 9), (3, 8, 4), (2, 4, 6, 6), (1, 3, 8, 8), (2, 6, 5, 7),
    (2, 8, 4, 4), (1, 4, 4, 4, 4), (2, 2, 3, 6, 4),
)  # fmt: skip
_HEADER = """\
module = nn.ModuleList([{modules}]){settings}
with torch.no_grad():
    for n, t in enumerate(module.state_dict().values()):
        g = torch.Generator().manual_seed({seed} + n)
        if t.is_floating_point():
            t.copy_(torch.randint(1, 9, t.shape, generator=g) * (torch.rand(t.shape, generator=g) - {shift}).sign() / 8)
"""


def _call(name: str, *args: Any, **kwargs: Any) -> str:
    given = [*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())]
    return f"nn.{name}({', '.join(given)})"


def _pick(r: random.Random, *choices: Any) -> Any:
    return r.choice(choices)


def _some(r: random.Random, **choices: Any) -> dict[str, Any]:
    """Some of the named arguments, each with one of its values."""
    return {k: repr(r.choice(v)) for k, v in choices.items() if r.random() < 0.5}


# -- of any rank -------------------------------------------------------------------------------------------------------
_PLAIN = (
    "ReLU ReLU6 SELU Sigmoid Tanh SiLU Mish Softsign Tanhshrink Hardswish Hardsigmoid LogSigmoid GELU Identity"
).split()


def activation(r: random.Random, size: Size) -> str:
    name = r.choice(_PLAIN)
    inplace = name in ("ReLU", "ReLU6", "SELU", "SiLU", "Mish", "Hardswish", "Hardsigmoid") and r.random() < 0.2
    return _call(name, **({"inplace": True} if inplace else {}))


def shaped_activation(r: random.Random, size: Size) -> str:
    name = r.choice("ELU CELU GELU Softplus Softshrink Hardshrink Hardtanh LeakyReLU Threshold PReLU RReLU".split())
    rows: dict[str, dict[str, Any]] = {
        "ELU": {"alpha": (0.5, 1.5, 2)}, "CELU": {"alpha": (0.5, 2.0)}, "GELU": {"approximate": ("tanh", "none")},
        "Softplus": {"beta": (0.5, 2, 3.0), "threshold": (1, 5, 20)}, "Softshrink": {"lambd": (0.1, 1.0, 0)},
        "Hardshrink": {"lambd": (0.1, 1.0, 0)}, "Hardtanh": {"min_val": (-2, -0.5), "max_val": (0.5, 3.0)},
        "LeakyReLU": {"negative_slope": (0.1, 0.5, -0.1, 0.0)},
    }  # fmt: skip
    if name == "RReLU":
        return _call(name, 0.3, 0.3)  # drawn from one number: other slopes than eager's would be no fault
    if name == "Threshold":
        return _call(name, _pick(r, -0.5, 0, 0.1), _pick(r, 0, 20, -1.0))
    if name == "PReLU":
        return _call(name, size[1] if len(size) > 1 and r.random() < 0.6 else 1)
    return _call(name, **_some(r, **rows[name]))


def along_a_dim(r: random.Random, size: Size) -> str:
    name = _pick(r, "Softmax", "LogSoftmax", "Softmin", "GLU")
    return _call(name, dim=r.randrange(-len(size), len(size)))


def dropout(r: random.Random, size: Size) -> str:
    return _call(_pick(r, "Dropout", "AlphaDropout", "FeatureAlphaDropout", "Dropout1d", "Dropout2d"), 0.0)


def linear(r: random.Random, size: Size) -> str:
    return _call("Linear", size[-1], _pick(r, 1, 3, 8, size[-1]), **_some(r, bias=(True, False)))


def layer_norm(r: random.Random, size: Size) -> str:
    shape = size[-r.randint(1, min(3, len(size))) :]
    options = _some(r, eps=(1e-3, 1e-6), elementwise_affine=(True, False))
    if r.random() < 0.4:
        return _call("RMSNorm", shape, **options)
    return _call("LayerNorm", shape, **options, **_some(r, bias=(True, False)))


def flatten(r: random.Random, size: Size) -> str:
    first = r.randrange(len(size))
    return _call("Flatten", first, r.randrange(first, len(size)))


def unflatten(r: random.Random, size: Size) -> str:
    d = r.randrange(len(size))
    n = r.choice([k for k in (1, 2, 3, 4) if size[d] % k == 0])
    return _call("Unflatten", d, (n, size[d] // n))


def batch_norm(r: random.Random, size: Size) -> str:
    rank = max(len(size) - 2, 1)
    name = f"{_pick(r, 'BatchNorm', 'BatchNorm', 'InstanceNorm')}{rank}d"
    options = _some(r, eps=(1e-3,), momentum=(0.3, 0.0), affine=(True, False), track_running_stats=(True, False))
    return _call(name, size[1], **options)


def group_norm(r: random.Random, size: Size) -> str:
    groups = r.choice([g for g in (1, 2, 3, 4, size[1]) if size[1] % g == 0])
    return _call("GroupNorm", groups, size[1], **_some(r, eps=(1e-3,), affine=(True, False)))


def response_norm(r: random.Random, size: Size) -> str:
    return _call("LocalResponseNorm", _pick(r, 1, 2, 3, 5), **_some(r, alpha=(0.01, 1.0), beta=(0.5,), k=(2.0,)))


# -- with spatial dims -------------------------------------------------------------------------------------------------
def _spatial(size: Size) -> int:
    if not 3 <= len(size) <= 5:
        raise LookupError
    return len(size) - 2


def _each(r: random.Random, rank: int, *choices: int) -> Any:
    return r.choice(choices) if r.random() < 0.6 else tuple(r.choice(choices) for _ in range(rank))


def convolution(r: random.Random, size: Size) -> str:
    rank, channels = _spatial(size), size[1]
    groups = r.choice([g for g in (1, 1, 2, channels) if channels % g == 0])
    options = _some(r, bias=(True, False), stride=(1, 2), padding=(0, 1, 2), dilation=(1, 2))
    if r.random() < 0.35:
        options |= _some(r, output_padding=(0, 1))
        made = groups * _pick(r, 1, 2)
        return _call(f"ConvTranspose{rank}d", channels, made, _each(r, rank, 1, 2, 3), groups=groups, **options)
    if r.random() < 0.2:
        options = {"padding": repr(_pick(r, "same", "valid"))}
    mode = {"padding_mode": repr(_pick(r, "zeros", "reflect", "replicate", "circular"))}
    if r.random() < 0.3 and "same" not in str(options):
        options |= mode
    made = groups * _pick(r, 1, 2, 3)
    return _call(f"Conv{rank}d", channels, made, _each(r, rank, 1, 2, 3), groups=groups, **options)


def pool(r: random.Random, size: Size) -> str:
    rank = _spatial(size)
    kernel = _each(r, rank, 1, 2, 3)
    if r.random() < 0.5:
        options = _some(r, stride=(1, 2, 3), padding=(0, 1), dilation=(1, 2), ceil_mode=(True, False))
        if 1 in size[2:] and options.get("padding") == "1":
            options.pop("dilation", None)  # of a window with no element inside eager's gradient writes outside memory
        return _call(f"MaxPool{rank}d", kernel, **options)
    options = _some(r, stride=(1, 2, 3), padding=(0, 1), ceil_mode=(True, False), count_include_pad=(True, False))
    more = _some(r, divisor_override=(1, 2, 3)) if rank > 1 else {}
    return _call(f"AvgPool{rank}d", kernel, **options, **more)


def adaptive_pool(r: random.Random, size: Size) -> str:
    rank = _spatial(size)
    name = f"Adaptive{_pick(r, 'Avg', 'Max')}Pool{rank}d"
    return _call(name, _each(r, rank, 1, 2, 3, 5) if r.random() < 0.8 or rank == 1 else (None, *[2] * (rank - 1)))


def lp_pool(r: random.Random, size: Size) -> str:
    rank = _spatial(size)
    options = _some(r, stride=(1, 2), ceil_mode=(True, False))
    return _call(f"LPPool{rank}d", _pick(r, 1, 2, 3.0), _pick(r, 1, 2, 3), **options)


def pad(r: random.Random, size: Size) -> str:
    rank = _spatial(size)
    name = _pick(r, "ReflectionPad", "ReplicationPad", "CircularPad", "ZeroPad", "ConstantPad")
    amounts = r.randint(0, 2) if r.random() < 0.4 else tuple(r.randint(0, 2) for _ in range(2 * rank))
    return _call(f"{name}{rank}d", amounts, *([_pick(r, 0.5, -1.0)] if name == "ConstantPad" else []))


def upsample(r: random.Random, size: Size) -> str:
    rank = _spatial(size)
    smooth = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[rank]
    mode = r.choice(("nearest", "nearest-exact", *smooth))
    how = {"scale_factor": _pick(r, 2, 1.5, 0.5, 3)} if r.random() < 0.6 else {"size": _pick(r, 3, 5, 8)}
    corners = {"align_corners": _pick(r, True, False)} if mode in smooth else {}
    return _call("Upsample", **how, mode=repr(mode), **corners)


def shuffle(r: random.Random, size: Size) -> str:
    name = _pick(r, "PixelShuffle", "PixelUnshuffle", "ChannelShuffle")
    if _spatial(size) != 2:
        raise LookupError
    return _call(name, 2)


def unfold(r: random.Random, size: Size) -> str:
    if _spatial(size) != 2:
        raise LookupError
    return _call("Unfold", _pick(r, 1, 2, 3), **_some(r, stride=(1, 2), padding=(0, 1), dilation=(1, 2)))


def softmax2d(r: random.Random, size: Size) -> str:
    return _call("Softmax2d")


# -- of sequences, whose first result counts ---------------------------------------------------------------------------
def recurrent(r: random.Random, size: Size) -> str:
    if len(size) not in (2, 3):
        raise LookupError
    options = _some(r, num_layers=(1, 2), bias=(True, False), batch_first=(True, False), bidirectional=(True, False))
    return _call(_pick(r, "GRU", "LSTM", "RNN"), size[-1], _pick(r, 2, 5), **options)


def attention(r: random.Random, size: Size) -> str:
    if len(size) != 3:
        raise LookupError
    heads = r.choice([h for h in (1, 2, 3) if size[-1] % h == 0])
    if r.random() < 0.6:
        options = _some(r, batch_first=(True, False), norm_first=(True, False), activation=("relu", "gelu"))
        return _call("TransformerEncoderLayer", size[-1], heads, 7, 0.0, **options)
    return _call("MultiheadAttention", size[-1], heads, **_some(r, bias=(True, False), batch_first=(True, False)))


MAKERS: tuple[tuple[Maker, int], ...] = (
    (activation, 6), (shaped_activation, 5), (along_a_dim, 3), (dropout, 1), (linear, 4), (layer_norm, 4), (flatten, 1),
    (unflatten, 1), (batch_norm, 4), (group_norm, 3), (response_norm, 1), (convolution, 4), (pool, 4),
    (adaptive_pool, 2), (lp_pool, 1), (pad, 3), (upsample, 3), (shuffle, 2), (unfold, 1), (softmax2d, 1),
    (recurrent, 1), (attention, 1),
)  # fmt: skip
# Of the result `y` of a chain and a target `t` of its size; `{r}` is the reduction.
LOSSES = (
    "F.mse_loss(y, t{r})", "F.l1_loss(y, t{r})", "F.smooth_l1_loss(y, t, beta=0.5{r})",
    "F.huber_loss(y, t, delta=0.7{r})", "F.kl_div(y, t.softmax(-1){r})", "F.soft_margin_loss(y, t.sign(){r})",
    "F.binary_cross_entropy_with_logits(y, t.sigmoid(){r})", "F.poisson_nll_loss(y.tanh(), t.abs(){r})",
    "F.binary_cross_entropy(y.sigmoid(), t.sigmoid(){r})", "F.gaussian_nll_loss(y, t, t.abs() + 1{r})",
    "F.cross_entropy(y, torch.arange(y.shape[0]) % y.shape[1], label_smoothing=0.1{r})",
    "F.cross_entropy(y, t.softmax(1){r})", "F.nll_loss(y.log_softmax(1), torch.arange(y.shape[0]) % y.shape[1]{r})",
    "F.multi_margin_loss(y, torch.arange(y.shape[0]) % y.shape[1]{r})", "F.hinge_embedding_loss(y, t.sign(){r})",
    "F.cosine_similarity(y, t, -1)", "F.pairwise_distance(y, t)",
    "F.multilabel_soft_margin_loss(y, (t > 0).to(y.dtype){r})", "F.triplet_margin_loss(y, t, t.flip(0){r})",
    "F.margin_ranking_loss(y, t, t.sign(){r})", "F.normalize(y, dim=-1)",
    "F.cosine_embedding_loss(y.flatten(1), t.flatten(1), torch.ones(y.shape[0]){r})", "F.dropout(y, 0.0)",
)  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """The text that defines `module` and `program`; how its input is made."""

    text: str
    inputs_text: str
    dtype: torch.dtype
    training: bool

    def inputs(self) -> list[torch.Tensor]:
        made: list[torch.Tensor] = make_function(self.inputs_text, "inputs")()
        return made


def generate(seed: int) -> Chain:
    """The chain of a seed; eager runs it."""
    rng = random.Random(f"modules {seed}")
    while True:
        dtype = rng.choice((torch.float32,) * 5 + (torch.bfloat16, torch.bfloat16, torch.float16, torch.float64))
        size = rng.choice(SIZES)
        training = rng.random() < 0.6
        layout = ""
        if len(size) == 4 and rng.random() < 0.4:
            layout = ".contiguous(memory_format=torch.channels_last)"
        elif rng.random() < 0.15:
            layout = ".transpose(0, -1).contiguous().transpose(0, -1)"
        made = f"torch.randn({size}, generator=torch.Generator().manual_seed({seed})).to({dtype}){layout}"
        inputs_text = f"def inputs():\n    return [{made}]\n"
        chain = Chain(_chain(rng, seed, size, dtype, training, layout), inputs_text, dtype, training)
        if "module[0]" in chain.text and _is_made(chain.text):
            return chain


def _is_made(text: str) -> bool:
    """Whether eager makes the modules: no rank-5 weight is brought to `channels_last`."""
    try:
        make_function(text)
    except Exception:
        return False
    return True


def _chain(rng: random.Random, seed: int, size: Size, dtype: torch.dtype, training: bool, layout: str) -> str:
    modules: list[str] = []
    lines: list[str] = []
    own = size
    for _ in range(rng.randint(1, 4)):
        maker = rng.choices([m for m, _ in MAKERS], [w for _, w in MAKERS])[0]
        try:
            text = maker(rng, own)
        except (LookupError, ValueError):
            continue
        several = text.startswith(("nn.GRU", "nn.LSTM", "nn.RNN", "nn.Multi"))
        n = len(modules)
        text = text if n else text.replace("inplace=True", "")  # which no leaf takes that requires gradients
        line = f"v{n + 1} = module[{n}]({_arguments(text, n)}){'[0]' if several else ''}"
        after = _size_after(text, own, dtype, training, several)
        if after is None:
            continue
        if after == own and rng.random() < 0.15:
            line += f" + v{len(modules)}"
        modules.append(text)
        lines.append(line)
        own = after
    settings = f".{'train' if training else 'eval'}().to({dtype})"
    if layout.startswith(".contiguous") and rng.random() < 0.5:
        settings += ".to(memory_format=torch.channels_last)"
    result = f"v{len(modules)}"
    if rng.random() < 0.25:
        reduction = rng.choice(("", ", reduction='sum'", ", reduction='none'"))
        loss = rng.choice(LOSSES).replace("{r}", reduction)
        if _loss_works(loss, own, dtype):
            lines += [f"y = {result}", f"t = torch.linspace(-1, 1, y.numel(), dtype={dtype}).view(y.shape)"]
            lines += [f"loss = {loss}"]
            result = "loss"
    shift = rng.choice((0.0, 0.4))
    header = _HEADER.format(modules=", ".join(modules), settings=settings, seed=seed * 100, shift=shift)
    body = "".join(f"    {line}\n" for line in lines)
    return f"{header}\ndef program(v0):\n{body}    return {result},\n"


def _arguments(text: str, n: int) -> str:
    return f"v{n}, v{n}, v{n}" if text.startswith("nn.Multihead") else f"v{n}"


def _size_after(text: str, size: Size, dtype: torch.dtype, training: bool, several: bool) -> Size | None:
    """The size of a module's result for an input of `size`; None where it takes none, or makes too large a one."""
    from torch import nn

    try:
        module = eval(text, {"nn": nn}).train(training).to(dtype)
        x = torch.zeros(size, dtype=dtype)
        with torch.no_grad():
            y = module(x, x, x) if text.startswith("nn.Multihead") else module(x)
        y = y[0] if several else y
    except Exception:
        return None
    return tuple(y.shape) if 0 < y.numel() <= MOST_ELEMENTS and y.dim() else None


def _loss_works(loss: str, size: Size, dtype: torch.dtype) -> bool:
    import torch.nn.functional as F

    y = torch.zeros(size, dtype=dtype)
    try:
        eval(loss, {"F": F, "torch": torch, "y": y, "t": y + 0.5})
    except Exception:
        return False
    return True
