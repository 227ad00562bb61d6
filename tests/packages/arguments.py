"""Arguments for functions and modules that say nothing of them: by the parameters' names, and by trial.

A candidate counts if eager takes it and gives a tensor.
"""

from __future__ import annotations

import inspect
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.packages.programs import tensors

Maker = Callable[[], Any]
_SECONDS, _TRIALS, _LARGEST = 8, 400, 3_000_000  # for one program; parameters of a module


def _of(make: Callable[..., Any], *sizes: tuple[int, ...]) -> list[Maker]:
    return [lambda size=size: make(*size) for size in sizes]  # type: ignore[misc]


def _numbers(high: int, *size: int) -> Maker:
    return lambda: torch.randint(0, high, size)


def _near_identity(n: int) -> Maker:
    return lambda: torch.eye(n).expand(2, n, n).contiguous() + 0.01 * torch.randn(2, n, n)


IMAGES = _of(torch.rand, (2, 3, 32, 32), (2, 1, 32, 32), (3, 32, 32), (2, 3, 8, 16, 16))
POINTS = [lambda: torch.rand(2, 8, 2) * 20, *_of(torch.rand, (2, 8, 3)), *_of(torch.randn, (2, 8, 4))]
MATRICES = [_near_identity(3), _near_identity(4), *_of(torch.randn, (2, 2, 3), (2, 3, 4))]
VECTORS = _of(torch.randn, (2, 3), (2, 4), (2, 2), (2,), (16,))
LABELS = [_numbers(3, 2, 32, 32), _numbers(3, 16), _numbers(2, 2, 3)]
BOXES = [lambda: torch.cat([torch.rand(9, 2) * 10, torch.rand(9, 2) * 10 + 11], 1)]
OTHERS: list[Maker] = [lambda: 0.5, lambda: 3, lambda: (3, 3), lambda: True]
EDGES = _numbers(12, 2, 40)

BY_NAME: dict[str, list[Maker]] = {
    **dict.fromkeys("image img input x tensor data target preds y img1 img2 image1 image2".split(),
                    [*IMAGES, *POINTS, *VECTORS, *MATRICES]),
    **dict.fromkeys("points points1 points2 pts boxes boxes1 boxes2 keypoints".split(), [*POINTS, *BOXES]),
    **dict.fromkeys("M matrix H homography transform camera_matrix K E_mat F_mat P1 P2 R1".split(), MATRICES),
    **dict.fromkeys("labels label index".split(), LABELS),
    **dict.fromkeys("kernel_size window_size ksize".split(), [lambda: (3, 3), lambda: 3]),
    **dict.fromkeys("size dsize output_size out_size patch_size block_size".split(), [lambda: (24, 24), lambda: 8]),
    "sigma": [lambda: (1.5, 1.5), lambda: 1.5],
    "kernel": [lambda: torch.ones(3, 3), *_of(torch.rand, (1, 3, 3))],
}  # fmt: skip
OF_MODULES: dict[str, Sequence[Any]] = {
    "image_size": [32], "img_size": [(32, 32), 32], "patch_size": [8], "image_patch_size": [8], "frames": [4],
    "frame_patch_size": [2], "num_classes": [10], "dim": [32], "depth": [2], "heads": [2], "mlp_dim": [64],
    "dim_head": [16], "channels": [3], "in_channels": [3, 8], "out_channels": [4, 8], "hidden_channels": [8],
    "channel": [8], "spatial_dims": [2], "in_chns": [3], "in_dim": [8], "out_dim": [8], "input_dim": [32],
    "output_dim": [16], "hidden_dim": [16], "kernel_size": [3, (3, 3)], "sigma": [(1.5, 1.5), 1.5],
    "size": [(24, 24)], "num_heads": [2], "hidden_size": [32], "embedding_size": [32], "num_layers": [2],
    "num_features": [8], "feature_size": [8], "window_size": [4, 3], "strides": [(2, 2)], "features": [(8,) * 6],
    "num_tokens": [20], "max_seq_len": [16], "emb_dim": [32], "n_heads": [2], "d_model": [32], "in_features": [32],
    "out_features": [16], "K": [2], "num_relations": [3], "edge_dim": [4], "layer": [1], "ratio": [0.5], "k": [3],
    "dropout": [0.0], "num_groups": [2], "groups": [2], "upscale_factor": [2], "max_val": [1.0], "filters": [[8, 16]],
}  # fmt: skip
OF_CALLS: tuple[tuple[Maker, ...], ...] = (
    *((make,) for make in (*IMAGES, *_of(torch.randn, (2, 8, 32, 32), (2, 16, 32), (2, 16), (2, 3, 4, 32, 32)))),
    *((make,) for make in _of(torch.randn, (2, 32, 8, 8), (2, 8, 64), (2, 3, 64), (2, 3, 16, 16, 16), (2, 8, 3))),
    (_numbers(20, 2, 16),), *((make, EDGES) for make in _of(torch.randn, (12, 8), (12, 32), (12, 3))),
    (IMAGES[0], IMAGES[0]), (IMAGES[1], IMAGES[1]), (*_of(torch.randn, (2, 4, 16, 16)), _numbers(4, 2, 16, 16)),
    (*_of(torch.randn, (2, 4, 16, 16)), _numbers(4, 2, 1, 16, 16)), (*_of(torch.randn, (16, 32)), _numbers(4, 16)),
    tuple(_of(torch.randn, (2, 16, 32), (2, 16, 32))), tuple(_of(torch.randn, (2, 16, 32), (2, 16, 32), (2, 16, 32))),
    (*_of(torch.randn, (12, 8)), EDGES, *_of(torch.randn, (40, 4))),
    (*_of(torch.randn, (12, 8)), EDGES, _numbers(3, 40)),
)  # fmt: skip


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TimeoutError in a block that takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _runs(function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
    try:
        with limited(1), torch.no_grad():
            return bool(tensors(function(*arguments)))
    except Exception:
        return False


def _candidates(parameter: inspect.Parameter) -> list[Maker]:
    kind = str(parameter.annotation)
    if parameter.name in BY_NAME:
        return BY_NAME[parameter.name]
    if "tuple[int, int]" in kind:
        return [lambda: (3, 3), lambda: (24, 24)]
    plain: dict[str, list[Maker]] = {
        "float": [lambda: 0.5, lambda: 1.5], "int": [lambda: 3, lambda: 2], "bool": [lambda: True],
        "str": [lambda: "mean", lambda: "bilinear"],
    }  # fmt: skip
    name = kind.removeprefix("<class '").removesuffix("'>")
    return plain.get(name) or [*IMAGES[:2], *POINTS, *MATRICES[:2], *VECTORS, *OTHERS, *LABELS[:2]]


def _required(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [p for p in found if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def for_function(function: Callable[..., Any]) -> list[Any] | None:
    """One value for each parameter without a default; None if none were found."""
    required = _required(function)
    if not required:
        return None
    alike = [(make,) * len(required) for make in (*IMAGES, *POINTS, *VECTORS, *MATRICES)] if len(required) > 1 else []
    late = time.monotonic() + _SECONDS
    trials = itertools.chain(alike, itertools.product(*map(_candidates, required)))
    for n, makers in enumerate(itertools.islice(trials, _TRIALS)):
        torch.manual_seed(n)
        arguments = [make() for make in makers]
        if time.monotonic() > late:
            return None
        if _runs(function, arguments):
            return arguments
    return None


def for_module(cls: type[nn.Module]) -> tuple[nn.Module, list[Any]] | None:
    """A small module of a class, in eval mode, and what it is called with; None if none were found."""
    required = _required(cls)
    if required is None:
        return None
    known = inspect.signature(cls).parameters
    small = {name: values[0] for name, values in OF_MODULES.items() if name in known}
    late = time.monotonic() + 2 * _SECONDS
    values = [OF_MODULES.get(p.name, (2, 0.5, 8, (3, 3))) for p in required]
    for options, chosen in itertools.product((small, {}), itertools.islice(itertools.product(*values), 40)):
        torch.manual_seed(0)
        try:
            with limited(3):
                module = cls(**{**options, **dict(zip((p.name for p in required), chosen, strict=True))}).eval()
        except Exception:  # it does not take these
            continue
        if sum(p.numel() for p in module.parameters()) > _LARGEST:
            continue
        for makers in OF_CALLS:
            torch.manual_seed(1)
            arguments = [make() for make in makers]
            if time.monotonic() > late:
                return None
            if _runs(module, arguments):
                return module, arguments
    return None
