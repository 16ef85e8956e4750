"""Decodes plain JPEGs. Not in image.py, because vLLM's process decodes them with this, too
(encoder_service/engines/vllm_pixels.py), and lacks av and pillow-heif.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import ExifTags, Image

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]


def plain_jpeg(data: bytes, image: Image.Image) -> Pixels | None:
    """Decodes a JPEG faster than Pillow. None: it is not an RGB or grey JPEG, or is damaged."""
    if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data)
    except ValueError:
        return None
    return upright(pixels, image.getexif().get(ExifTags.Base.Orientation, 1))


def upright(pixels: Pixels, orientation: Any) -> Pixels:
    """As PIL.ImageOps.exif_transpose."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    # Always copied, because numpy calls a side of one pixel contiguous even if its stride is
    # negative, which torch does not accept.
    return pixels.copy() if orientation in (2, 3, 4, 5, 6, 7, 8) else pixels
