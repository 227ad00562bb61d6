"""What a long process remembers stays within bounds."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

import fuser
from fuser import config, interface, notices
from fuser.runtime.memory import OTHERS, Recent, Seen, Tally


def test_the_items_used_longest_ago_are_forgotten():
    recent, found = Recent(), []

    def ask(n):
        if recent.get(n) is None:
            found.append(n)
            recent[n] = 2 * n
        return recent[n]

    with config.override(memo_limit=3):
        assert [ask(n) for n in (1, 2, 3, 1, 4, 1, 2)] == [2, 4, 6, 2, 8, 2, 4]
    assert found == [1, 2, 3, 4, 2] and sorted(recent) == [1, 2, 4]


def test_a_bounded_set():
    seen = Seen("abc")
    with config.override(memo_limit=3):
        seen.add("d")
        assert "a" not in seen and set(seen) == set("bcd") and seen - {"b"} == {"c", "d"}
        seen.discard("b")
        seen -= {"c"}
        assert list(seen) == ["d"]


def test_threads_share_what_is_remembered():
    recent = Recent()

    def ask(n):
        with config.override(memo_limit=5):
            found = recent.get(n % 11)
            if found is None:
                found = recent[n % 11] = n % 11
            return found

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(3000))) == [n % 11 for n in range(3000)]


def test_a_tally_counts_further_reasons_together():
    tally = Tally()
    with config.override(memo_limit=2):
        for reason in "a", "b", "c", "a", "d":
            tally.note(reason)
    assert tally == {"a": 2, "b": 1, OTHERS: 2}


def test_sentences_about_sizes_are_bounded_in_a_process(monkeypatch):
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x, y: x * 2.125 + y))
    x = torch.zeros(1)
    with config.override(memo_limit=8):
        for n in range(2, 40):  # sizes that do not broadcast: each is a reason of its own
            try:
                fuser.run_fusion(key, [torch.zeros(n), torch.zeros(n + 1)])
            except RuntimeError:
                pass
        fallbacks = interface.kernel_spec(key).store.fallbacks
        assert len(fallbacks) <= 9 and sum(fallbacks.values()) == 38
        monkeypatch.setattr(notices, "_MOST", 8)
        monkeypatch.setattr(notices, "_said", {})
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            for n in range(40):
                notices.warn_once(f"there is a cause number {n}")
        assert list(notices._said) == [f"there is a cause number {n}" for n in range(32, 40)]
    assert fuser.run_fusion(key, [x, x])[0].item() == 0
