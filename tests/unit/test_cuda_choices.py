"""Choices of classes of calls on CUDA: one race for each class, kept; none where nothing can be raced."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from fuser.contests.records import Choice
from fuser.cuda import choices


class Races:
    """Stands for the device: notes the races, of which the last contestant wins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[tuple[list[str], str]] = []
        self.error: Exception | None = None
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(choices, "name_of", lambda *parts: f"test {parts}")
        monkeypatch.setattr(choices, "race", self.race)

    def race(self, runs: dict[str, Any], incumbent: str) -> Choice:
        if self.error is not None:
            raise self.error
        self.held.append((list(runs), incumbent))
        return Choice(list(runs)[-1], "raced", (("new", 1.0), ("old", 2.0)))


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch, fresh_cache_dir: str) -> Races:
    return Races(monkeypatch)


def ask(*parts: Any) -> Choice | None:
    return choices.of_class(torch.device("cuda"), parts, lambda: {"old": lambda: 0, "new": lambda: 0}, "old", "a test")


def test_a_class_is_raced_once(races: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask("a", 1)
    assert first is not None and (first.winner, first.what) == ("new", "a test")
    assert ask("a", 1) == first and ask("a", 2) is not None
    assert races.held == [(["old", "new"], "old")] * 2
    monkeypatch.setattr(choices.records, "_made", {})  # another process
    assert ask("a", 1) == first and len(races.held) == 2


def test_nothing_is_raced_without_memory_or_while_a_graph_is_recorded(
    races: Races, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    races.error = torch.cuda.OutOfMemoryError("none left")
    assert ask("b") is None
    races.error = None
    assert ask("b") is not None  # a refusal is not kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ask("c") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ask("c") is None
