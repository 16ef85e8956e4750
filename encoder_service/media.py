"""From the bytes of one item to Media: what it is and what it will cost, from its header alone.

Nothing is decoded here. A file that is whole at its head and truncated later is found by the actor
that decodes it.
"""

from __future__ import annotations

import hashlib

from actors.errors import TooLarge, UnsupportedMedia
from actors.sizing import MAX_ASPECT
from actors.spec import ModelSpec
from actors.types import Kind, Media, Size
from encoder_service.config import LimitOptions
from encoder_service.header import read_header


def probe(data: bytes, kind: Kind, spec: ModelSpec, limits: LimitOptions) -> Media:
    """Raises InvalidMedia (no image), UnsupportedMedia (format or kind), TooLarge (limits).

    Takes about a millisecond for each 2 MB of `data`: the digest reads all of it.
    """
    if kind not in spec.kinds:
        raise UnsupportedMedia(
            f"the model {spec.id} takes {' and '.join(f'{one}s' for one in spec.kinds)} only, "
            f"not a {kind}: send its frames as images"
        )
    header = read_header(data)
    check_size(header.size, limits.max_pixels)
    digest = hashlib.sha256(data).hexdigest()
    return Media(kind, data, spec.sizing.plan(header.size), digest, header.notice)


def check_size(size: Size, max_pixels: int) -> None:
    """Raises TooLarge for what no model should be given."""
    width, height = size.width, size.height
    if width * height > max_pixels:
        raise TooLarge(
            f"the image declares {width} x {height} pixels, over the limit of {max_pixels} "
            "(limits.max_pixels): scale it down"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise TooLarge(
            f"an image of {width} x {height} pixels has an aspect ratio over {MAX_ASPECT}: crop it"
        )
