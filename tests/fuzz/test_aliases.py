"""Some random programs that write through several names, the same each time; `make aliases` runs many."""

from __future__ import annotations

import operator

import pytest
from torch import fx

from fuser.passes import classify
from tests.fuzz import alias_ways, aliases
from tests.fuzz.aliases import Input, Program


@pytest.mark.parametrize(("way", "seeds"), [("functional", range(6)), ("dynamic", range(1)), ("grad_static", range(1))])
def test_programs_do_what_eager_does(way, seeds):
    for seed in seeds:
        program = aliases.generate(seed, way.startswith("grad"))
        wrong = alias_ways.problem(program, way, seed)
        assert not wrong, f"seed {seed} by {way}: {wrong}\n{program}"


def test_a_wrong_order_of_writes_is_found(monkeypatch):
    """A piece of a list that counts as a tensor of its own, so that its tensor is written before it is read."""
    whole, half = Input("a", ("n", "m")), Input("b", ("n // 2", "m"))
    program = Program((whole, half), ("b.t().copy_(a.chunk(2)[1].t())", "a.mul_(2)"), ("index",))
    assert not alias_ways.problem(program, "functional", 1)

    def views_first(node: fx.Node) -> bool:
        return node.target is not operator.getitem and classify.is_view(node.target)

    monkeypatch.setattr(classify, "views_first", views_first)
    assert "input 1" in alias_ways.problem(program, "functional", 1)


def test_a_seed_gives_the_same_program():
    assert str(aliases.generate(3, False)) == str(aliases.generate(3, False)) != str(aliases.generate(4, False))
