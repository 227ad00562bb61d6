"""Rows of a product of parameters: what is left out of the usual run."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(3, 4), (2, 2, 2), (5, 3, 2), (6, 2, 4, 3), (4, 4, 6, 2, 2), (1, 1, 7)], ids=str)
def test_any_two_values_of_two_parameters_meet(sizes, monkeypatch):
    monkeypatch.delenv("FUSER_TEST_ALL", raising=False)
    rows, every = pairwise(*map(range, sizes)), list(itertools.product(*map(range, sizes)))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(r[a], r[b]) for r in rows} == {(r[a], r[b]) for r in every}
    assert set(rows) <= set(every) and (len(rows) < len(every)) == (sum(sorted(sizes)[:-2]) > len(sizes) - 2)
    monkeypatch.setenv("FUSER_TEST_ALL", "1")
    assert pairwise(*map(range, sizes)) == every
