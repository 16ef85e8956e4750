"""Real photographs in several formats and sizes, and hostile files. For tests and the demo."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path

import skimage
from PIL import ExifTags, Image
from pillow_heif import register_heif_opener
from torch import Tensor

from actors.media.patchify import Patchifier
from actors.types import Item

register_heif_opener()

FOLDER = Path(skimage.__file__).parent / "data"

PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg")
"""512x512, 451x300, 600x400, 640x427, 1000x872: all RGB, shipped inside scikit-image."""


def photograph(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


@cache
def opened(name: str = "coffee.png") -> Image.Image:
    """Shared between callers: do not change it in place."""
    return Image.open(FOLDER / name).convert("RGB")


def encoded(image: Image.Image, format: str, orientation: int = 0, **options: object) -> bytes:
    if orientation:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        # pillow-heif writes the rotation box, which takes precedence, only if EXIF is given as
        # bytes.
        options["exif"] = exif.tobytes() if format == "HEIF" else exif
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@cache
def jpeg(width: int, height: int, name: str = "coffee.png") -> bytes:
    return encoded(opened(name).resize((width, height)), "JPEG", quality=90)


@cache
def animated(format: str, frames: int) -> bytes:
    image = opened().resize((60, 40))
    turned = [image.rotate(5 * i) for i in range(frames)]
    return encoded(turned[0], format, save_all=True, append_images=turned[1:])


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I4s", len(data), kind) + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A grey PNG that declares a size but has only a few bytes of pixels, followed by `chunks`."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(64)))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + b"".join(chunks) + chunk(b"IEND", b"")


def deep_png(colours: int) -> bytes:
    """A PNG with 16 bits per sample. `colours`: color type in its header; 2 is RGB, 6 RGBA."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 16, colours, 0, 0, 0))
    row = b"\0" + bytes(range(128)) * {0: 1, 2: 3, 4: 2, 6: 4}[colours]
    pixels = chunk(b"IDAT", zlib.compress(row * 64))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def exif_with(entries: Sequence[tuple[int, int, int, int]]) -> bytes:
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + table + bytes(4)


def item_of(patchifier: Patchifier, image: Tensor) -> Item:
    plan, patches = patchifier.patchify(image)
    return Item(plan, patches.numpy())


def jpeg_segments(data: bytes, *segments: tuple[int, bytes]) -> bytes:
    """A JPEG with segments of (marker, content) inserted after its start marker."""
    extra = b"".join(
        struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content
        for marker, content in segments
    )
    return data[:2] + extra + data[2:]
