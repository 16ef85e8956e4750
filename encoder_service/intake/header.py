"""What an image's header tells: format, upright size, whether there is more than one frame.

Opens files with Pillow's readers of one format each and never decodes a pixel. A reader gets a
bounded number of reads and bytes: a header that needs more was made to keep us busy.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO

from PIL import ExifTags, Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from actors.errors import InvalidMedia, TooLarge, UnsupportedMedia
from actors.types import Size
from encoder_service.intake.frames import count_gif_frames
from encoder_service.wire.signatures import SUPPORTED, name_format

MOST_READS = 50_000
MOST_EXIF_BYTES = 16 * 2**20
"""Of all values that an EXIF block declares. They may overlap: a small one can declare much."""
MOST_SCANS = 50
"""Of a progressive JPEG; encoders write about ten. Each is a pass over all coefficients, and an
empty one takes 30 bytes."""

START_OF_IMAGE = b"\xff\xd8"
SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xdb-\xfe]")
"""The beginning of one that has a length."""
FEW_SEGMENTS = 32
START_OF_SCAN = b"\xff\xda"
NEXT_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")
"""But those without a length that may stand anywhere: stuffed bytes, TEM, restarts."""

READERS: dict[str, Callable[[BytesIO], ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
"""Called without Image.open: its limit of pixels is the process's, ours is the configuration's."""


@dataclass(frozen=True, slots=True)
class Header:
    """Of one image file."""

    format: str
    size: Size
    """Upright: EXIF orientation is applied."""
    notice: str
    """What the client should know; mostly empty."""


class BoundedStream(BytesIO):
    """A file in memory that refuses to be read again and again."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left = MOST_READS
        self.bytes_left = 2 * len(data) + 2**20

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises ValueError when it has been read too often."""
        data = super().read(size)
        self.reads_left -= 1
        self.bytes_left -= len(data)
        if min(self.reads_left, self.bytes_left) < 0:
            raise ValueError("its header is too long")
        return data


def read_header(data: bytes) -> Header:
    """Raises InvalidMedia for what is no image, UnsupportedMedia for a format nobody reads here."""
    name = name_format(data)
    if name is None:
        raise InvalidMedia(
            "the file is empty" if not data else "the file is not an image, or it is damaged"
        )
    if name not in READERS:
        raise UnsupportedMedia(f"{name} is not supported: send {', '.join(SUPPORTED)}")
    if name == "JPEG" and many_scans(data):
        raise InvalidMedia(f"the JPEG has more than {MOST_SCANS} scans: save it again")
    try:
        with READERS[name](BoundedStream(metadata_first(data) if name == "PNG" else data)) as image:
            size = Size(*image.size)
            # A TIFF reader turns the size by itself.
            if name != "TIFF" and orientation(image) in (5, 6, 7, 8):
                size = Size(size.height, size.width)
            return Header(name, size, notice(name, data, image))
    except Image.DecompressionBombError as error:
        raise TooLarge(f"the {name} declares more pixels than can be decoded: {error}") from error
    except Exception as error:  # Pillow's readers raise nearly everything
        raise InvalidMedia(f"the {name} has no readable header: {error or 'cut short'}") from error


def is_simple(data: bytes) -> bool:
    """Whether `read_header` of it is over at once, whoever made it.

    True of a JPEG without EXIF, of few segments, each right behind the other up to its pixels.
    """
    if not data.startswith(START_OF_IMAGE) or b"Exif" in data:
        return False
    start = len(START_OF_IMAGE)
    for _ in range(FEW_SEGMENTS):
        if data[start : start + 2] == START_OF_SCAN:
            return data.count(START_OF_SCAN) <= MOST_SCANS
        if not SEGMENT.match(data, start):
            return False
        start += 2 + max(2, int.from_bytes(data[start + 2 : start + 4], "big"))
    return False


def many_scans(data: bytes) -> bool:
    """Whether libjpeg would decode more than MOST_SCANS, or read markers without end."""
    if data.count(START_OF_SCAN) <= MOST_SCANS:  # as in nearly all files, chance included
        return False
    scans, start = 0, 2
    for _ in range(MOST_READS):
        marker = NEXT_MARKER.search(data, start)
        if not marker or marker[1] in b"\xd8\xd9":  # the image ends here, whatever follows
            return False
        scans += marker[1] == b"\xda"
        if scans > MOST_SCANS:
            return True
        length = int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        start = marker.end() + max(length, 2)
    return True


def orientation(image: ImageFile) -> int:
    """The EXIF orientation, 1 to 8, just as Pillow reads it when it decodes."""
    profile = image.info.pop("Raw profile type exif", None)  # ImageMagick's way, hexadecimal
    if profile and "exif" not in image.info:
        image.info["exif"] = bytes.fromhex("".join(profile.split("\n")[3:]))
    check_exif(image.info.get("exif", b""))
    # Not image.getexif(): a PNG's would load all pixels first.
    return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))


def check_exif(exif: bytes) -> None:
    """Raises ValueError for a block whose values would not fit in memory."""
    exif = exif.removeprefix(b"Exif\0\0")
    if len(exif) < 8:
        return
    order = "<" if exif[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "I", exif, 4)
    if len(exif) < start + 2:
        return
    (entries,) = struct.unpack_from(order + "H", exif, start)
    table = exif[start + 2 : start + 2 + 12 * entries]
    rows = struct.iter_unpack(order + "2xHI4x", table[: len(table) // 12 * 12])
    # No type is wider than 8 bytes; a value that ends beyond the block is cut there.
    declared = sum(min(8 * count, len(exif)) for _, count in rows if count > 4)
    if declared > MOST_EXIF_BYTES:
        raise ValueError(f"its EXIF block declares {declared} bytes of values")


def metadata_first(data: bytes) -> bytes:
    """A PNG without its pixels, metadata that follows them brought forward to where it is read."""
    early, late, seen_pixels = [data[:8]], [], False
    for kind, chunk in png_chunks(data):
        if kind == b"IDAT":
            seen_pixels = True
        elif not seen_pixels:
            early.append(chunk)
        elif kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            late.append(chunk)
    empty = struct.pack(">I4sI", 0, b"IDAT", 0x35AF061E) if seen_pixels else b""
    return b"".join([*early, *late, empty])


def png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and whole chunk, as far as the file goes; pixels come empty."""
    start = 8
    for _ in range(MOST_READS):
        if len(data) < start + 8:
            return
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 12 + length
        yield kind, b"" if kind in (b"IDAT", b"fdAT") else data[start:end]
        start = end
    raise ValueError("it has too many chunks")


def notice(name: str, data: bytes, image: ImageFile) -> str:
    """That only the first of several frames is encoded."""
    if name == "GIF":
        frames, more = count_gif_frames(data)
        count = f"more than {frames}" if more else str(frames)
        return f"animated GIF: the first of {count} frames" if more or frames > 1 else ""
    if not getattr(image, "is_animated", False):
        return ""
    if name == "TIFF":
        return "TIFF of several pages: the first"
    return f"animated {name}: the first of {getattr(image, 'n_frames', 0)} frames"
