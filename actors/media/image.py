"""From compressed bytes to an Item: decode upright RGB, then the patches of the model's family.

Decodes to what transformers' load_image gives, bit for bit. Limits on bytes and pixels were checked
on the header before (encoder_service/intake/media.py). Knows nothing of packs, devices or models.
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
from actors.media import video_file as container
from actors.media.patchify import Patchifier
from actors.types import Clip, Item, Media

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3]."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What Pillow may open here (JPEG: MPO as well): bitmaps, nothing that runs an interpreter."""


def prepare(patchifier: Patchifier, media: Media) -> Item:
    """Decodes and cuts up one item. Raises InvalidMedia, or TooLarge."""
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
    """The frames that are encoded, one by one: see decode."""
    assert patchifier.spec.video, "a video for a family of images. This is a bug."
    if not media.frames:
        for pixels in container.frames(media.data, clip, patchifier.spec.video.indices(clip)):
            yield torch.from_numpy(pixels).permute(2, 0, 1)
    for place, data in enumerate(media.frames):
        frame = decode(data)
        if frame.shape[1:] != (clip.size.height, clip.size.width):
            raise InvalidMedia(f"frames[{place}] is not of the size that its header says")
        yield frame


def decode(data: bytes) -> Tensor:
    """Upright RGB, uint8 [3, height, width]: a view of [height, width, 3]. First frame only.

    Raises InvalidMedia where the bytes are truncated, corrupt or no image.
    """
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            pixels = jpeg(data, image)
            if pixels is None:
                pixels = anything(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(f"the image is too large to be decoded: {error}") from error
    except Exception as error:  # Pillow's decoders raise nearly everything
        raise InvalidMedia(
            f"the image cannot be decoded, it is truncated or corrupt: {error}"
        ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def jpeg(data: bytes, image: Image.Image) -> Pixels | None:
    """A plain JPEG, faster than Pillow decodes it. None: not plain, or not without fault."""
    if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data)
    except ValueError:
        return None
    return upright(pixels, image.getexif().get(ExifTags.Base.Orientation, 1))


def upright(pixels: Pixels, orientation: Any) -> Pixels:
    """Undoes an EXIF orientation, as PIL.ImageOps.exif_transpose."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def anything(image: Image.Image) -> Pixels:
    """Whatever Pillow opens."""
    upright = ImageOps.exif_transpose(image)
    # The colour that stands for transparent changes no RGB value, but makes `convert` warn.
    upright.info.pop("transparency", None)
    return np.array(upright.convert("RGB"))
