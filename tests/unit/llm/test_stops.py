"""Stop texts in a text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.llm.model import StopFilter

TEXT = st.text("ab.", max_size=30)


def shown(stops: list[str], pieces: list[str]) -> list[str]:
    stop_filter = StopFilter(stops)
    return [stop_filter.feed(piece) for piece in pieces] + [stop_filter.rest()]


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["a", "b"], ["a", "b", ""]),
        (["END"], ["aE", "N", "Db", "c"], ["a", "", "", "", ""]),
        (["END"], ["aE", "Nx"], ["a", "ENx", ""]),
        (["END"], ["aEN"], ["a", "EN"]),
        (["bc", "abcd"], ["xabcd"], ["xa", ""]),
        (["."], ["one. two."], ["one", ""]),
        (["aab"], ["aa", "ab"], ["", "a", ""]),
    ],
)
def test_what_is_shown_when(stops: list[str], pieces: list[str], expected: list[str]) -> None:
    assert shown(stops, pieces) == expected


@given(st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3), st.lists(TEXT, max_size=8))
def test_it_is_the_text_up_to_the_first_stop(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    result = "".join(shown(stops, pieces))
    ends = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
    assert result == (whole[: min(ends)[1]] if ends else whole)
