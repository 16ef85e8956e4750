"""A body that would become very many values is refused before they are built."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.wire.documents import parse_request
from encoder_service.wire.formats import (
    JSON,
    MOST_VALUES,
    MSGPACK,
    WireError,
    check_json,
    check_msgpack,
)

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(), st.text()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


def values(document: Any) -> int:
    """How many there are, the document itself among them."""
    if isinstance(document, dict):
        return 1 + sum(1 + values(one) for one in document.values())
    return 1 + (sum(map(values, document)) if isinstance(document, list) else 0)


@given(VALUES)
@settings(max_examples=30)
def test_the_count_of_msgpack_is_exact(document: Any) -> None:
    room = MOST_VALUES - values(document) - 1
    check_msgpack(msgpack.packb([document] + [0] * room))
    with pytest.raises(WireError, match="more than 8192 values"):
        check_msgpack(msgpack.packb([document] + [0] * (room + 1)))


@given(VALUES)
def test_small_json_passes(document: Any) -> None:
    check_json(json.dumps(document, default=repr).encode())


@pytest.mark.parametrize("size", [40, 70_000])
@pytest.mark.parametrize("kind", [bytes, str])
def test_content_is_not_walked(size: int, kind: type) -> None:
    content = b"\x9f" * size if kind is bytes else "[" * size
    check_msgpack(msgpack.packb({"items": [content] * 3, "n": [1.5, -(2**40), 2**60]}))


def wide() -> bytes:
    inner = b"\xdc\xff\xff" + b"\x90" * 65_535
    return b"\x82\xa5items\xdc" + struct.pack(">H", 300) + inner * 300 + b"\xa7options\x80"


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty lists": (wide, MSGPACK),
    "declared, not there": (lambda: b"\x81\xa5items" + b"\xdc\xff\xff" * 1000, MSGPACK),
    "empty lists of JSON": (lambda: b'{"items":[' + b",".join([b"[]"] * 6_000_000) + b"]}", JSON),
}
"""Bodies that took seconds and gigabytes to parse."""


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_soon(name: str) -> None:
    make, content_type = BOMBS[name]
    body = make()
    started = time.process_time()
    with pytest.raises(WireError, match="values"):
        parse_request(body, content_type)
    assert time.process_time() - started < 0.3


def test_a_message_says_what_is_wrong_with_depth() -> None:
    with pytest.raises(WireError, match="nested too deeply"):
        parse_request(b"\x91" * 5000, MSGPACK)


@pytest.mark.parametrize("options", [[], False, 0, ""])
def test_options_are_a_map(options: Any) -> None:
    body = {"items": [], "options": options}
    with pytest.raises(WireError, match='"options" must be a map'):
        parse_request(msgpack.packb(body), MSGPACK)
    assert parse_request(json.dumps(body | {"options": None}).encode(), JSON) == ([], {})
