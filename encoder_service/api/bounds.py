"""How many values the body of a request would become, told before any of them is built.

The parsers of JSON and msgpack are C: while they build, nothing else in the process runs, and an
empty list of one byte becomes 56. Knows nothing of what the values mean.
"""

from __future__ import annotations

from encoder_service.wire.formats import WireError

MOST_VALUES = 8192
"""Of one request: an item is five, so a thousand items fit."""

FIXED_BYTES = {0xCA: 4, 0xCB: 8} | {first + i: 2**i for first in (0xCC, 0xD0) for i in range(4)}
"""Numbers, by the byte that begins them: how many follow."""
STRING_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length of binaries and strings."""
COUNT_LENGTHS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the count of arrays and maps."""
EXTENSIONS = {0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)}


def check_json(body: bytes, most: int = MOST_VALUES) -> None:
    """Raises WireError for too many values. base64 has none of the signs that are counted."""
    check(1 + body.count(b"[") + body.count(b"{") + body.count(b","), most)


def check_msgpack(body: bytes) -> None:
    """Raises WireError for too many values, as arrays and maps declare them, and for extensions.

    Walks from header to header, over the content of strings and binaries.
    """
    at, left, values = 0, 1, 1
    while left and at < len(body):
        first = body[at]
        at, left = at + 1, left - 1
        count = 0
        if 0x80 <= first < 0xA0:
            count = first & 0x0F if first >= 0x90 else 2 * (first & 0x0F)
        elif 0xA0 <= first < 0xC0:
            at += first & 0x1F
        elif first in STRING_LENGTHS:
            size = STRING_LENGTHS[first]
            at += size + int.from_bytes(body[at : at + size])
        elif first in COUNT_LENGTHS:
            size = COUNT_LENGTHS[first]
            count = int.from_bytes(body[at : at + size]) * (2 if first >= 0xDE else 1)
            at += size
        elif first in EXTENSIONS:
            raise WireError("the body has a msgpack extension: send plain types only")
        else:
            at += FIXED_BYTES.get(first, 0)
        left, values = left + count, values + count
        check(values)


def check(values: int, most: int = MOST_VALUES) -> None:
    """Raises WireError."""
    if values > most:
        raise WireError(f"the body has more than {most} values: send fewer items at a time")
