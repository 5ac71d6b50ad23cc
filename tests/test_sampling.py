"""What `make test` leaves out: the tail of large tables, never a value."""

from __future__ import annotations

import itertools

import pytest

from tests.support.sampling import sample

TABLE = [
    f"{op} {rows}x{columns}, {mask}" for op, rows, columns, mask in itertools.product("AB", (1, 2), (3, 5), ("none", "bias"))
]


def test_a_sample_has_every_word_of_the_table_and_not_every_case() -> None:
    kept = sample(TABLE)
    assert {word for name in kept for word in name.replace(",", "").split()} == {
        "A",
        "B",
        "1x3",
        "1x5",
        "2x3",
        "2x5",
        "none",
        "bias",
    }
    assert len(kept) < len(TABLE) / 2


def test_a_case_with_a_value_of_its_own_is_in_the_sample_wherever_it_stands() -> None:
    assert "A 1x3, ranges" in sample([*TABLE, "A 1x3, ranges"])
    assert "A 1x3, none, bias" not in sample([*TABLE, "A 1x3, none, bias"])


@pytest.mark.parametrize(("every", "count"), [(1, 16), (5, 4), (20, 1)])
def test_every_so_many_cases_are_kept_and_the_first(every: int, count: int) -> None:
    assert (sample(TABLE, every)[0], len(sample(TABLE, every))) == (TABLE[0], count)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("number", range(4))
def test_the_cases_of_a_table_that_stay_are_not_marked(number: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("exhaustive") is None) == (number % 2 == 0)


def test_a_test_without_a_table_is_never_left_out(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("exhaustive") is None
