"""Thousands of damaged inputs for everything that takes bytes from strangers.

The same ones in every run; `make fuzz` looks for new ones, guided by what they reach.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import corpus
from tests.fuzz.targets import TARGETS, run

pytestmark = pytest.mark.extended

EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from(["set", "insert", "cut", "repeat", "end"]),
        st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from([b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4), b"../", b"\r\n", b"@"]),
        ),
    ),
    min_size=1,
    max_size=6,
)


def edited(data: bytes, edits: list[tuple[float, str, bytes]]) -> bytes:
    """The bytes after a few changes at places in proportion to their length."""
    for where, how, piece in edits:
        at = int(where * len(data))
        if how == "set":
            data = data[:at] + piece + data[at + len(piece) :]
        elif how == "insert":
            data = data[:at] + piece + data[at:]
        elif how == "cut":
            data = data[:at] + data[at + len(piece) ** 2 :]
        elif how == "repeat":
            data = data[:at] + data[max(0, at - 16) : at] * 3 + data[at:]
        else:
            data = data[:at]
    return data


def test_make_fuzz_runs_every_target() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text().replace("\\\n", "")
    (listed,) = re.findall(r"^FUZZ \?= (.*)$", makefile, re.MULTILINE)
    assert listed.split() == list(TARGETS)


@pytest.mark.parametrize("name", list(TARGETS))
def test_good_inputs_and_those_that_once_failed(name: str) -> None:
    for data in [b"", *TARGETS[name].seeds(), *corpus(name)]:
        run(name, data)


@pytest.mark.parametrize("name", list(TARGETS))
@pytest.mark.filterwarnings("ignore")  # Pillow warns of much that is damaged
def test_damaged_inputs(name: str) -> None:
    good = TARGETS[name].seeds()

    @settings(
        max_examples=TARGETS[name].examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(good), EDITS)
    def damaged(data: bytes, edits: list[tuple[float, str, bytes]]) -> None:
        run(name, edited(data, edits))

    damaged()
