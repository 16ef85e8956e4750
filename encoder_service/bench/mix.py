"""The images that are sent: JPEGs of given sizes, all different so that no cache helps."""

from __future__ import annotations

import itertools
import math
import re
import struct
from argparse import ArgumentTypeError
from collections.abc import Iterator
from functools import lru_cache
from io import BytesIO
from random import Random
from typing import Literal

import numpy as np
from PIL import Image

from router.simulate import drawn

Protocol = Literal[
    "http",
    "direct",
    "grpc",
    "grpc_stream",
    "grpc_direct",
    "reference",
    "grpc_reference",
    "handle",
]
"""direct and grpc_direct: rows come from the encoders' own ports. grpc: a response is one message.
reference: embeddings stay with the encoders and ids come back. handle: calls from inside Ray,
as a language model makes them; large embeddings are in Ray's shared memory and are not read."""

VARIANTS = 8
"""Number of different pictures, or one of each size if there are more sizes."""
HEAVY_TAILED = "heavy-tailed"
HEAVY_TAILED_KINDS = 512
PATCH_PIXELS = 16
"""Side of the patches that the simulator draws."""

Shape = tuple[int, int]


def parse_mix(text: str) -> list[list[Shape]]:
    """The sizes of each kind of request: "336x336*8+1024x1024,64x64" are two kinds in turn.

    "heavy-tailed": those of `encoder-service simulate`, as squares. Raises ArgumentTypeError.
    """
    if text == HEAVY_TAILED:
        return heavy_tailed(HEAVY_TAILED_KINDS)
    kinds = []
    for kind in text.split(","):
        sizes: list[Shape] = []
        for term in kind.split("+"):
            match = re.fullmatch(r"\s*(\d+)x(\d+)(?:\*(\d+))?\s*", term)
            if not match or not all(int(number or 1) for number in match.groups()):
                raise ArgumentTypeError(f"{term!r} is not WIDTHxHEIGHT or WIDTHxHEIGHT*COUNT")
            width, height, count = match.groups()
            sizes += [(int(width), int(height))] * int(count or 1)
        kinds.append(sizes)
    return kinds


def heavy_tailed(count: int) -> list[list[Shape]]:
    """Requests of 1 to 20 squares of log-normal size, sides a multiple of two patches."""
    return [[square(one) for one in patches] for patches in drawn(Random(1), count)]


def square(patches: int) -> Shape:
    side = 2 * PATCH_PIXELS * round(math.sqrt(patches) / 2)
    return side, side


@lru_cache(maxsize=1024)
def picture(width: int, height: int, seed: int) -> bytes:
    """A JPEG with about as many bytes as a photograph: soft shapes under a little grain."""
    random = np.random.default_rng(seed)
    soft = Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    pixels = np.asarray(soft.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    pixels = pixels + random.integers(-12, 13, (height, width, 1), dtype=np.int16)
    file = BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def stamped(jpeg: bytes, number: int) -> bytes:
    """The same picture as a different file, with a number in a comment."""
    return jpeg[:2] + struct.pack(">BBHQ", 0xFF, 0xFE, 10, number) + jpeg[2:]


def requests(kinds: list[list[Shape]], first: int = 0) -> Iterator[list[bytes]]:
    """Endless requests, images numbered from `first`. Draws all pictures before it returns."""
    shapes = {shape for kind in kinds for shape in kind}
    seeds = range(max(1, VARIANTS // len(shapes)))
    made = {
        shape: itertools.cycle([picture(*shape, seed) for seed in seeds])
        for shape in sorted(shapes)
    }
    numbers = itertools.count(first)
    return (
        [stamped(next(made[shape]), next(numbers)) for shape in kind]
        for kind in itertools.cycle(kinds)
    )
