"""A share of a test's cases still has each value of each parameter."""

from __future__ import annotations

import os

import pytest

from tests import sampling


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fixed, also", [(7, 7)])
@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("number", range(5))
def test_positions_add_up(number: int, letter: str, fixed: int, also: int, request: pytest.FixtureRequest) -> None:
    assert sampling.position(request.node) == number + "abc".index(letter)


@pytest.mark.sampled(4, also=("3",))
@pytest.mark.parametrize("number", range(6))
def test_named_cases_stay(number: int, request: pytest.FixtureRequest) -> None:
    assert number in (0, 3, 4) or is_whole(request)


def is_whole(request: pytest.FixtureRequest) -> bool:
    """Whether other cases were asked for than a share."""
    chosen = any("::" in arg for arg in request.config.args) or request.config.option.keyword
    return bool(chosen or os.environ.get("FUSER_TEST_ALL"))


def test_each_value_has_a_case(request: pytest.FixtureRequest) -> None:
    items = [i for i in request.session.items if getattr(i, "originalname", "") == "test_positions_add_up"]
    cases = [(item.callspec.params["number"], item.callspec.params["letter"]) for item in items]
    named = [i.callspec.id for i in request.session.items if getattr(i, "originalname", "") == "test_named_cases_stay"]
    if is_whole(request):
        pytest.skip("other cases were chosen")
    assert named == ["0", "3", "4"]
    assert cases == [(0, "a"), (1, "c"), (2, "b"), (3, "a"), (4, "c")]


def test_a_test_without_parameters_is_never_left_out(request: pytest.FixtureRequest) -> None:
    assert (sampling.position(request.node), sampling.share(request.node)) == (0, 1)
