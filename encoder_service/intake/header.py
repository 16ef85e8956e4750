"""Reads an image's header: format, upright size, transparency, and remarks for the client.

Files are opened with Pillow's reader for their format, and no pixel is decoded. A reader gets a
bounded number of reads and bytes, because a header that needs more was made to waste CPU time.
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
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from actors.errors import InvalidMedia, TooLarge, UnsupportedMedia
from actors.types import Alpha, Size
from encoder_service.intake.heif import read_heif
from encoder_service.wire.documents import SOUNDS, VIDEOS, name_format

MOST_READS = 50_000
MOST_EXIF_BYTES = 16 * 2**20
"""Limit for all values that an EXIF block declares. They may overlap, so a small block can declare
much."""
MOST_SCANS = 50
"""Limit for a progressive JPEG; encoders write about ten. Each scan is a pass over all
coefficients, and an empty one takes only 30 bytes."""
MOST_MARKERS = 5000  # of a JPEG, without restarts; 50 scans have some hundreds
START_OF_IMAGE = b"\xff\xd8"
SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xdb-\xec\xee-\xfe]")
"""The marker of a segment that has a length and is fast to read. Not APP13, because 64 KB of it may
hold 5,000 Photoshop blocks."""
FEW_SEGMENTS = 32
START_OF_SCAN = b"\xff\xda"
NEXT_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")
"""Any marker but those that have no length and occur anywhere: stuffed bytes, TEM, restarts."""
SEARCHED_BYTES = 2**18  # per call, because a search holds the GIL for up to 22 ns per byte

READERS: dict[str, Callable[[BytesIO], ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
"""Called without Image.open, whose pixel limit is global; ours is in the configuration."""
FORMATS = (*READERS, "HEIC", "AVIF")
TIFF_HEADER = re.compile(rb"II[*+]\0|MM\0[*+]")
MOST_TIFF_HEADERS = 16  # in the Exif of a HEIC or AVIF: its own, and those of makers' notes
UNKNOWN_RANGE = (
    "is scaled to 8 bits: 0 to {0}, or 0 to {1} if a value is over {0}, becomes 0 to 255; others "
    "are refused when it is decoded"
)
"""How values are converted if no header tells their range."""
BITS_PER_SAMPLE, SAMPLES, SAMPLE_FORMAT = 258, 277, 339  # tags of TIFF
SAMPLE_FORMATS = {1: "integers", 2: "signed integers", 3: "floats", 6: "complex numbers"}


@dataclass(frozen=True, slots=True)
class Header:
    format: str
    size: Size  # upright: EXIF orientation is applied
    notice: str  # a remark for the client; usually empty
    transparent: bool  # it has an alpha channel or a transparent colour


class BoundedStream(BytesIO):
    """A file in memory that limits how often and how much is read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left = MOST_READS
        self.bytes_left = 2 * len(data) + 2**20

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.reads_left -= 1
        self.bytes_left -= len(data)
        if min(self.reads_left, self.bytes_left) < 0:
            raise ValueError("its header is too long")
        return data


def read_header(data: bytes) -> Header:
    """Raises InvalidMedia if it is not an image or is damaged, UnsupportedMedia for a format that
    is not read here, and TooLarge for more pixels than Pillow decodes."""
    name = name_format(data)
    if name is None:
        raise InvalidMedia(
            f"the file is not an image, or it is damaged: send {', '.join(FORMATS)}"
            if data
            else "the file is empty"
        )
    if name in VIDEOS:
        raise UnsupportedMedia(
            f"the file is a video ({name}), sent as an image: send it as video/*, in a part named "
            'video, or with "type": "video"'
        )
    if name in SOUNDS:
        raise UnsupportedMedia(
            f"the file is a sound ({name}), sent as an image: send it as audio/*, in a part named "
            'audio, or with "type": "audio"'
        )
    if name not in FORMATS:
        raise UnsupportedMedia(f"{name} is not supported: send {', '.join(FORMATS)}")
    if name == "JPEG" and many_scans(data):
        raise InvalidMedia(f"the JPEG has more than {MOST_SCANS} scans: save it again")
    try:
        if name not in READERS:
            return boxed_header(name, data)
        with opened(name, metadata_first(data) if name == "PNG" else data) as image:
            size = Size(*image.size)
            # Pillow's TIFF reader applies the orientation to the size itself.
            if name != "TIFF" and orientation(image) in (5, 6, 7, 8):
                size = Size(size.height, size.width)
            return Header(name, size, notice(name, image), image.has_transparency_data)
    except UnsupportedMedia:
        raise
    except Image.DecompressionBombError as error:
        raise TooLarge(
            f"the {name} declares more pixels than can be decoded: scale it down ({error})"
        ) from error
    except Exception as error:  # Pillow's readers raise nearly everything
        reason = "" if isinstance(error.__cause__ or error, struct.error) else str(error)
        raise InvalidMedia(
            f"the {name} has no readable header: send the whole file, or save it again "
            f"({reason or 'cut short'})"
        ) from error


def opened(name: str, data: bytes) -> ImageFile:
    """Raises what Pillow raises, but UnsupportedMedia for a TIFF with samples that it does not
    read."""
    try:
        return READERS[name](BoundedStream(data))
    except SyntaxError as error:
        if str(error) != "unknown pixel mode":
            raise
        raise UnsupportedMedia(
            f"a TIFF with {samples(data)} is not supported: save it as grey, RGB or CMYK with 8 or "
            "16 bits, or as grey of 32-bit floats from 0 to 1"
        ) from error


def boxed_header(name: str, data: bytes) -> Header:
    """The header of a HEIC or AVIF."""
    found = read_heif(data, crops=name == "HEIC")
    for exif in found.exif:
        starts = [match.start() for match in TIFF_HEADER.finditer(exif)]
        if len(starts) > MOST_TIFF_HEADERS:
            raise ValueError("its EXIF is damaged")
        for start in starts:
            check_exif(exif[start:])
    animated = data[8:12] in (b"avis", b"msf1", b"hevc", b"hevx")
    remarks = [f"animated {name}: only the first frame is encoded"] if animated else []
    remarks += [deep("colours are", found.bits)] if found.bits > 8 else []
    return Header(name, found.size, "; ".join(remarks), found.transparent)


def is_simple(data: bytes) -> bool:
    """Whether `read_header` is certain to be fast, even for a hostile file.

    True for a JPEG that has neither EXIF nor Photoshop blocks, and whose few segments follow each
    other up to the pixels.
    """
    if not data.startswith(START_OF_IMAGE):
        return False
    start = len(START_OF_IMAGE)
    for _ in range(FEW_SEGMENTS):
        if data[start : start + 2] == START_OF_SCAN:
            return data.find(b"Exif", 0, start) < 0
        if not SEGMENT.match(data, start):
            return False
        start += 2 + max(2, int.from_bytes(data[start + 2 : start + 4], "big"))
    return False


def many_scans(data: bytes) -> bool:
    """Whether libjpeg would decode more than MOST_SCANS, or read endless markers."""
    if data.count(START_OF_SCAN) <= MOST_SCANS:  # nearly all files, random matches included
        return False
    scans, start = 0, 2
    for _ in range(MOST_MARKERS):
        marker = next_marker(data, start)
        if not marker or marker[1] in b"\xd8\xd9":  # the image ends here, whatever follows
            return False
        scans += marker[1] == b"\xda"
        if scans > MOST_SCANS:
            return True
        length = int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        start = marker.end() + max(length, 2)
    return True


def next_marker(data: bytes, start: int) -> re.Match[bytes] | None:
    for place in range(start, len(data), SEARCHED_BYTES):
        if marker := NEXT_MARKER.search(data, place, place + SEARCHED_BYTES + 1):
            return marker
    return None


def orientation(image: ImageFile) -> int:
    """The EXIF orientation, 1 to 8, as Pillow reads it when it decodes."""
    profile = image.info.pop("Raw profile type exif", None)  # written by ImageMagick, hexadecimal
    if profile and "exif" not in image.info:
        image.info["exif"] = bytes.fromhex("".join(profile.split("\n")[3:]))
    check_exif(image.info.get("exif", b""))
    # Not image.getexif(): for a PNG it would load all pixels first.
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
    # No type is wider than 8 bytes; a value that extends beyond the block is cut off there.
    declared = sum(min(8 * count, len(exif)) for _, count in rows if count > 4)
    if declared > MOST_EXIF_BYTES:
        raise ValueError(f"its EXIF block declares {declared} bytes of values")


def metadata_first(data: bytes) -> bytes:
    """A PNG without its pixels. Metadata after the pixels is moved before them, where it is
    read."""
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
    """Kind and whole chunk, up to the end of the file; pixel chunks are empty."""
    start = 8
    for _ in range(MOST_READS):
        if len(data) < start + 8:
            return
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 12 + length
        yield kind, b"" if kind in (b"IDAT", b"fdAT") else data[start:end]
        start = end
    raise ValueError("it has too many chunks")


def notice(name: str, image: ImageFile) -> str:
    try:
        several = getattr(image, "is_animated", False)
    except Exception:  # a GIF that is cut off, or whose first frame exceeds BoundedStream
        several = False
    remarks = []
    if several and name == "TIFF":
        remarks = ["TIFF of several pages: only the first is encoded"]
    elif several:
        remarks = [f"animated {name}: only the first frame is encoded"]
    bits = bits_per_sample(name, image)
    if image.mode == "F":
        remarks.append(f"floating-point grey {UNKNOWN_RANGE.format(1, 255)}")
    elif image.mode == "I":
        remarks.append(f"{bits}-bit grey {UNKNOWN_RANGE.format(255, 65535)}")
    elif bits > 8:
        remarks.append(deep("grey is" if image.mode.startswith("I;16") else "colours are", bits))
    if image.mode == "CMYK":
        remarks.append("CMYK is converted to RGB without its colour profile")
    return "; ".join(remarks)


def deep(kind: str, bits: int) -> str:
    return f"{bits}-bit {kind} scaled to 8 bits: 0 to {2**bits - 1} becomes 0 to 255"


def bits_per_sample(name: str, image: ImageFile) -> int:
    """Bits per sample of a PNG or TIFF. 8 for other formats."""
    if isinstance(image, TiffImageFile):
        return int(max(image.tag_v2.get(BITS_PER_SAMPLE, (1,))))
    return 16 if name == "PNG" and image.tile and ";16" in str(image.tile[0].args) else 8


def samples(data: bytes) -> str:
    """What a pixel of a TIFF is made of."""
    file = BoundedStream(data)
    start = file.read(8)
    tags = ImageFileDirectory_v2(start + file.read(8) if start[2] == 43 else start)
    file.seek(tags.next)
    tags.load(file)
    count, bits = tags.get(SAMPLES, 1), max(tags.get(BITS_PER_SAMPLE, (1,)))
    kind = SAMPLE_FORMATS.get(tags.get(SAMPLE_FORMAT, (1,))[0], "values")
    return f"{count} {'value' if count == 1 else 'values'} per pixel, {bits}-bit {kind},"


def alpha_notice(alpha: Alpha) -> str:
    """How transparency is handled."""
    done = "dropped" if alpha == "drop" else f"composited on {alpha}"
    return f"transparency is {done} (preprocess.alpha)"
