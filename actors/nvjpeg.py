"""JPEGs that wait, decoded and cut into patches on the GPU: nvJPEG, through torchvision.

Only plain ones, whose header says all that matters: every other file, and each of a batch that
nvJPEG refuses, is for preprocess.py, whose errors and pixels are the ones that are promised.
nvJPEG's pixels are near libjpeg's; resizing and cutting are equal. Knows nothing of packs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image
from torch import Tensor

from actors.errors import InvalidMedia, StartError
from actors.models.tower import Tower
from actors.types import Item, Media, Size

MOST_PIXELS = 2**26
"""Of the images that are decoded together: 200 MB of the device. One with more is not for it."""

Decode = Callable[[Sequence[bytes]], Sequence[Tensor]]
"""JPEGs to uint8 [3, height, width] each, on the device."""


class Nvjpeg:
    """One thread's: a stream of its own, and torchvision's one decoder of this process."""

    def __init__(self, tower: Tower, decode: Decode, device: torch.device) -> None:
        self.tower = tower
        self.decode = decode
        self.stream = torch.cuda.Stream(device)

    def pixels(self, media: Media) -> int:
        """See Together."""
        size = plain(media.data)
        if size is None or self.tower.spec.sizing.plan(size) != media.plan:
            return 0
        count = size.width * size.height
        return count if count <= MOST_PIXELS else 0

    def prepare(self, media: Sequence[Media]) -> list[Item]:
        """See Together. The patches lie on the device."""
        try:
            with torch.cuda.stream(self.stream):
                images = self.decode([one.data for one in media])
                made = [self.tower.patchify(image) for image in images]
            # So that the engine may read at once, and the next batch write where this one was:
            # torchvision decodes on a stream that the allocator does not know of.
            self.stream.synchronize()
        except Exception:
            torch.cuda.synchronize(self.stream.device)  # that stream may be writing still
            raise
        for one, (plan, _) in zip(media, made, strict=True):
            if plan != one.plan:
                raise InvalidMedia("a JPEG is not of the size that its header says")
        return [Item(plan, patches) for plan, patches in made]


def plain(data: bytes) -> Size | None:
    """The size of a JPEG in YCbCr that is upright and ends where it should; None: it is not one."""
    if not data.startswith(b"\xff\xd8\xff") or not data.endswith(b"\xff\xd9"):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        with Image.open(BytesIO(data), formats=("JPEG",)) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
            plain_jpeg = image.format == "JPEG" and not turned
    except Exception:  # Pillow's readers raise nearly everything
        return None
    return Size(width, height) if plain_jpeg and colours == "YCbCr" else None


def open_nvjpeg(tower: Tower, device: torch.device) -> Nvjpeg:
    """Decodes an image, so that nothing is loaded later. Raises StartError."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise StartError(
            "preprocess.device is cuda, which needs torchvision (pip install "
            f"'encoder-service[gpu]'), of the release that fits torch: {error}"
        ) from error

    def decode(files: Sequence[bytes]) -> Sequence[Tensor]:
        compressed = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
        images: list[Tensor] = decode_jpeg(compressed, ImageReadMode.RGB, device)
        return images

    try:
        nvjpeg = Nvjpeg(tower, decode, device)
        grey = simplejpeg.encode_jpeg(np.full((96, 160, 3), 128, np.uint8))
        plan = tower.spec.sizing.plan(Size(160, 96))
        nvjpeg.prepare([Media("image", grey, plan, digest="")])
    except (AssertionError, RuntimeError) as error:
        raise StartError(
            "preprocess.device is cuda, but this torchvision cannot decode JPEGs on this device: "
            f"install one that is built for it, or set preprocess.device to cpu ({error})"
        ) from error
    return nvjpeg
