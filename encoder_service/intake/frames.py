"""How many frames a GIF has: the one format that says so nowhere. Skips from block to block."""

from __future__ import annotations

MOST_BLOCKS = 100_000
"""A block is at most 255 bytes: all of a 25 MB animation, in about 10 ms."""

IMAGE, EXTENSION = 0x2C, 0x21


def count_gif_frames(data: bytes) -> tuple[int, bool]:
    """Frames counted, and whether there may be more. A broken file has those before the break."""
    frames = 0
    blocks_left = MOST_BLOCKS
    try:
        at = 13 + palette_bytes(data[10])
        while data[at] in (IMAGE, EXTENSION):
            if data[at] == IMAGE:
                frames += 1
                at += 11 + palette_bytes(data[at + 9])
            else:
                at += 2
            while length := data[at]:
                at += 1 + length
                blocks_left -= 1
            at += 1
            blocks_left -= 1
            if blocks_left < 0:
                return frames, True
    except IndexError:
        return frames, False
    return frames, False


def palette_bytes(flags: int) -> int:
    """Length of the colour table that these flags announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
