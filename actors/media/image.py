"""Compressed bytes to an Item: decode to upright RGB, then cut into the patches of the family.

Pixels equal those of transformers' load_image, bit for bit. Limits on bytes and pixels have been
checked on the header before (encoder_service/intake/media.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from actors.errors import InvalidMedia, TooLarge
from actors.media import video_file
from actors.media.patchify import Patchifier
from actors.types import Clip, Item, Media

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What Pillow may open (as JPEG also MPO): bitmaps, and no format that runs an interpreter."""


def prepare(patchifier: Patchifier, media: Media) -> Item:
    """Decodes one item and cuts it into patches. Raises InvalidMedia, TooLarge."""
    if media.clip:
        return patchifier.patchify_video(media.clip, decoded_frames(patchifier, media, media.clip))
    plan, patches = patchifier.patchify(decode(media.data))
    if plan != media.plan:
        raise InvalidMedia(
            f"the image is not of the size that its header says: it gives a grid of {plan.grid_thw}"
            f", not {media.plan.grid_thw}. Save it again"
        )
    return Item(plan, patches.numpy())


def decoded_frames(patchifier: Patchifier, media: Media, clip: Clip) -> Iterator[Tensor]:
    """The frames to encode, one at a time, each as `decode` returns an image."""
    assert patchifier.spec.video, "a video for a family of images. This is a bug."
    if not media.frames:
        for pixels in video_file.frames(media.data, clip, patchifier.spec.video.indices(clip)):
            yield torch.from_numpy(pixels).permute(2, 0, 1)
    for place, data in enumerate(media.frames):
        frame = decode(data)
        if frame.shape[1:] != (clip.size.height, clip.size.width):
            raise InvalidMedia(f"frames[{place}] is not of the size that its header says")
        yield frame


def decode(data: bytes) -> Tensor:
    """Upright RGB of the first frame: uint8 [3, height, width], a view of [height, width, 3].
    Raises InvalidMedia, TooLarge."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            pixels = plain_jpeg(data, image)
            if pixels is None:
                turned = ImageOps.exif_transpose(image)
                # A transparent colour of a palette changes no RGB value, but makes `convert` warn.
                turned.info.pop("transparency", None)
                pixels = np.array(turned.convert("RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(f"the image is too large to be decoded: {error}") from error
    except Exception as error:  # Pillow's decoders raise nearly everything
        raise InvalidMedia(
            f"the image cannot be decoded, it is truncated or corrupt: {error}"
        ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def plain_jpeg(data: bytes, image: Image.Image) -> Pixels | None:
    """Decodes faster than Pillow. None: not an RGB or grey JPEG, or damaged."""
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
    return np.ascontiguousarray(pixels)
