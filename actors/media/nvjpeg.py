"""JPEGs that wait, decoded and cut into patches on the GPU: nvJPEG, through torchvision.

Only plain ones, whose header says all that matters: every other file, and what nvJPEG refuses, is
for preprocess.py, whose errors and pixels are the ones that are promised.
Colours between the samples of chroma, resizing and cutting are libjpeg's and torch's, made again;
what is left are pixels that nvJPEG rounds otherwise or cuts off. Knows nothing of packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from typing import Protocol

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image
from torch import Tensor

from actors.errors import InvalidMedia, ServiceError, StartError
from actors.media.image import decode
from actors.media.patchify import Patchifier, resize
from actors.types import Item, Media, Size

MOST_PIXELS = 2**26
"""Of the images that are decoded together: up to 8 bytes of the device each, beside what nvJPEG
takes itself. An image with more is not for it."""

MOST_MEAN_DIFFERENCE = 0.5
"""Of a byte from libjpeg's, of the image that is decoded at start."""

CHROMA_ROWS = {"444": 0, "422": 1, "420": 2}
"""Rows of pixels to a sample of chroma, by the subsampling; 0: each pixel has its own."""

SMALLEST_SIDE = 8
"""Below, libjpeg upsamples in another way."""


class Decoder(Protocol):
    """torchvision's, of this process."""

    def __call__(self, files: Sequence[bytes], *, luma: bool) -> Sequence[Tensor]:
        """uint8 [3, height, width] of each, or [1, height, width], on the device."""


class Nvjpeg:
    """One thread's, with a stream of its own."""

    def __init__(self, patchifier: Patchifier, decoder: Decoder, device: torch.device) -> None:
        self.patchifier = patchifier
        self.decoder = decoder
        self.stream = torch.cuda.Stream(device)

    def pixels(self, media: Media) -> int:
        """See Together."""
        size = plain(media.data)
        with suppress(ServiceError):  # no plan for a size that is not the one that was admitted
            if size and self.patchifier.spec.sizing.plan(size) == media.plan:
                count = size.width * size.height
                return count if count <= MOST_PIXELS else 0
        return 0

    def prepare(self, media: Sequence[Media]) -> list[Item]:
        """See Together. The patches lie on the device."""
        try:
            with torch.cuda.stream(self.stream):
                images = self.decode([one.data for one in media])
                made = [self.patchifier.patchify(image) for image in images]
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

    def decode(self, files: Sequence[bytes]) -> list[Tensor]:
        """uint8 [3, height, width] of files that are plain."""
        from actors.kernels.chroma import smoothed  # Triton needs CUDA

        images = list(self.decoder(files, luma=False))
        rows = [chroma_rows(data) for data in files]
        coarse = [index for index, count in enumerate(rows) if count]
        if coarse:
            lumas = self.decoder([files[index] for index in coarse], luma=True)
            for index, luma in zip(coarse, lumas, strict=True):
                images[index] = smoothed(images[index], luma, rows[index])
        return images


def plain(data: bytes) -> Size | None:
    """The size of a JPEG in YCbCr that is upright and ends where it should; None: it is not one."""
    if not data.startswith(b"\xff\xd8\xff") or not data.endswith(b"\xff\xd9"):
        return None
    try:
        height, width, colours, subsampling = simplejpeg.decode_jpeg_header(data)
        with Image.open(BytesIO(data), formats=("JPEG",)) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
            upright = image.format == "JPEG" and not turned
    except Exception:  # Pillow's readers raise nearly everything
        return None
    known = colours == "YCbCr" and subsampling in CHROMA_ROWS
    ample = min(width, height) >= SMALLEST_SIDE
    return Size(width, height) if upright and known and ample else None


def chroma_rows(data: bytes) -> int:
    """See CHROMA_ROWS."""
    *_, subsampling = simplejpeg.decode_jpeg_header(data)
    return CHROMA_ROWS[subsampling]


def open_nvjpeg(patchifier: Patchifier, device: torch.device) -> Nvjpeg:
    """Decodes an image, so that nothing is loaded later. Raises StartError."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise StartError(
            "preprocess.device is cuda, which needs torchvision (pip install "
            f"'encoder-service[gpu]'), of the release that fits torch: {error}"
        ) from error

    def decoder(files: Sequence[bytes], *, luma: bool) -> Sequence[Tensor]:
        compressed = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
        mode = ImageReadMode.GRAY if luma else ImageReadMode.RGB
        images: list[Tensor] = decode_jpeg(compressed, mode, device)
        return images

    try:
        nvjpeg = Nvjpeg(patchifier, decoder, device)
        check(nvjpeg)
        # Not every family resizes every image.
        resize(torch.zeros(3, 8, 8, dtype=torch.uint8, device=device), Size(6, 6))
    except StartError:
        raise
    except Exception as error:  # torchvision's, CUDA's, and Triton's, which is none of Python's own
        raise StartError(
            "preprocess.device is cuda, but this torchvision or Triton cannot decode JPEGs on this "
            f"device: install what is built for it, or set preprocess.device to cpu ({error})"
        ) from error
    return nvjpeg


def check(nvjpeg: Nvjpeg) -> None:
    """Raises StartError where its pixels are not what they are taken to be."""
    down, across = np.mgrid[0:96, 0:160]
    colours = np.stack([across, 255 - across, 2 * down], -1).astype(np.uint8)
    for subsampling in CHROMA_ROWS:
        file = simplejpeg.encode_jpeg(colours, quality=95, colorsubsampling=subsampling)
        media = Media("image", file, nvjpeg.patchifier.spec.sizing.plan(Size(160, 96)), digest="")
        (item,) = nvjpeg.prepare([media])
        exact = nvjpeg.patchifier.patchify(decode(file))[1]
        found = torch.as_tensor(item.patches).cpu()
        difference = float((found.int() - exact.int()).abs().float().mean())
        if not difference < MOST_MEAN_DIFFERENCE:
            raise StartError(
                f"preprocess.device is cuda, but nvJPEG's pixels of a {subsampling} JPEG are "
                f"{difference:.2f} from libjpeg's in the mean: set preprocess.device to cpu"
            )
