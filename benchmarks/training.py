"""Training steps of the benchmarked models: a loss for each, and a step that leaves its gradients behind.

A step is: gradients set to None, forward, loss, backward. There is no optimizer in it; compiled ones are measured on
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models
from benchmarks.contestants import compile_for

Loss = Callable[..., Tensor]
IGNORED = -100  # cross_entropy's mark for words without a target


def _next_word(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross entropy of each word after the first."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _masked_words(model: nn.Module, ids: Tensor, segments: Tensor, padding: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the words that were masked."""
    return F.cross_entropy(model(ids, segments, padding).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _states(model: nn.Module, ids: Tensor, padding: Tensor, targets: Tensor) -> Tensor:
    """Mean square distance of an encoder's states from given ones."""
    return F.mse_loss(model(ids, padding), targets)


def _classes(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of an image's class."""
    return F.cross_entropy(model(images), targets)


def _no_targets(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs


def _some_words(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    ids = inputs[0]
    return (*inputs, torch.where(torch.rand(ids.shape, device=ids.device) < 0.15, ids, IGNORED))


def _random_states(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (*inputs, torch.randn_like(model(*inputs)))


def _random_classes(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (*inputs, torch.arange(inputs[0].shape[0], device=inputs[0].device) % 10)


LOSSES: dict[str, tuple[Loss, Callable[..., tuple[Tensor, ...]]]] = {
    "gpt2": (_next_word, _no_targets),
    "bert": (_masked_words, _some_words),
    "llama": (_next_word, _no_targets),
    "t5": (_states, _random_states),
    "vit": (_classes, _random_classes),
    "resnet50": (_classes, _random_classes),
}


def build(name: str, quick: bool, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in training mode and the arguments of its loss, the same in every process."""
    model, inputs = models.build(name, quick, device)
    inputs = LOSSES[name][1](model, inputs)
    return model.train(), inputs


def train_step(contestant: str, model: nn.Module, name: str) -> Callable[..., Tensor]:
    """A function of the loss's arguments that leaves the gradients in the parameters and returns the loss."""
    loss = compile_for(contestant, LOSSES[name][0])

    def step(*inputs: Any) -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            value: Tensor = loss(model, *inputs)
            value.backward()
        return value.detach()

    return step


def results(step: Callable[..., Tensor], model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What a step computes: the loss, and every parameter's gradient."""
    value = step(*inputs)
    found = [value, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found
