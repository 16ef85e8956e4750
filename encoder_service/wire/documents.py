"""The items of a request, how its body is parsed, and how file formats are recognised.

Knows nothing of HTTP, gRPC, models or limits on items.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from reprlib import Repr
from typing import Any, Literal

from encoder_service.wire.formats import (
    JSON,
    MOST_VALUES,
    MSGPACK,
    Document,
    UnsupportedType,
    WireError,
    check_msgpack,
    from_base64,
    read_json,
    read_msgpack,
)

VIDEOS = ("MP4 or QuickTime", "Matroska or WebM", "AVI")
"""Container formats that are treated as videos."""
SOUNDS = ("WAV", "FLAC", "OGG", "MP3")
"""Formats that are treated as audio."""
KINDS: tuple[Literal["image", "video", "audio"], ...] = ("image", "video", "audio")
DATA_URL = "data:"
FRAMES = "video/jpeg"
"""The media type of data URLs whose base64 is frames, separated by commas. Only chats take them."""

SIGNATURES: tuple[tuple[str, int, bytes], ...] = (
    ("JPEG", 0, b"\xff\xd8\xff"),
    ("PNG", 0, b"\x89PNG\r\n\x1a\n"),
    ("WebP", 8, b"WEBP"),
    ("GIF", 0, b"GIF87a"),
    ("GIF", 0, b"GIF89a"),
    ("BMP", 0, b"BM"),
    ("TIFF", 0, b"II*\0"),
    ("TIFF", 0, b"MM\0*"),
    ("TIFF", 0, b"II+\0"),
    ("TIFF", 0, b"MM\0+"),
    ("AVIF", 4, b"ftypavif"),
    ("AVIF", 4, b"ftypavis"),
    ("HEIC", 4, b"ftyphe"),
    ("HEIC", 4, b"ftypmif1"),  # the brands that follow may say AVIF: see name_format
    ("HEIC", 4, b"ftypmsf1"),
    ("WAV", 8, b"WAVE"),
    ("FLAC", 0, b"fLaC"),
    ("OGG", 0, b"OggS"),
    ("MP3", 0, b"ID3"),
    *(("MP3", 0, bytes((0xFF, second))) for second in (0xFB, 0xFA, 0xF3, 0xF2, 0xE3, 0xE2)),
    # Not supported as images. Known for error messages, the first three also as videos.
    ("MP4 or QuickTime", 4, b"ftyp"),
    ("Matroska or WebM", 0, b"\x1aE\xdf\xa3"),
    ("AVI", 8, b"AVI "),
    ("JPEG 2000", 4, b"jP  \r\n\x87\n"),
    ("JPEG 2000", 0, b"\xff\x4f\xff\x51"),
    ("JPEG XL", 4, b"JXL \r\n\x87\n"),
    ("JPEG XL", 0, b"\xff\x0a"),
    ("ICO", 0, b"\0\0\1\0"),
    ("PSD", 0, b"8BPS"),
    ("PDF", 0, b"%PDF-"),
    ("PostScript", 0, b"%!PS"),
    ("OpenEXR", 0, b"\x76\x2f\x31\x01"),
    ("DDS", 0, b"DDS "),
    ("QOI", 0, b"qoif"),
    ("SVG", 0, b"<svg"),
    ("gzip", 0, b"\x1f\x8b"),
)


COUNTS = ("min_pixels", "max_pixels", "max_patches", "num_frames")
KWARGS = (*COUNTS, "fps")
"""Options for how an item is sized and sampled: the fields of actors.types.ProcessorKwargs."""
MOST_COUNT = 2**31
"""Their values must be below this, whatever a model takes."""


@dataclass(frozen=True, slots=True)
class RequestItem:
    """One item of a request, with one of `data`, `url` and `frames`."""

    type: Literal["image", "video", "audio"]
    data: bytes | None = None  # the file, still compressed
    url: str | None = None
    frames: tuple[bytes, ...] | None = None  # a video as image files
    fps: float | None = None  # of `frames`: their rate; of a file: frames to take per second
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_patches: int | None = None
    num_frames: int | None = None

    def own(self) -> dict[str, Any]:
        """The item's own options, not checked."""
        values = {name: getattr(self, name) for name in KWARGS}
        return {name: value for name, value in values.items() if value is not None}

    def kwargs(self) -> dict[str, Any]:
        """The item's own options for sizing and sampling. Raises WireError for a wrong value."""
        given = self.own()
        for name, value in given.items():
            check_option(name, value)
        if self.frames is None:
            return given
        if "num_frames" in given:
            raise WireError("num_frames goes with a video file: all `frames` are encoded")
        return {name: value for name, value in given.items() if name != "fps"}

    def document(self) -> Document:
        """The item's entry in "items" of a msgpack request."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


class Shortened(Repr):
    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[: self.maxstring])


short = Shortened().repr
"""A value of a request for an error message. Unlike `repr`, it is fast for 100 MB, and does not
raise RecursionError for deeply nested lists."""


CURLS_DEFAULT = "application/x-www-form-urlencoded"


def is_file(content_type: str) -> bool:
    """Whether the body is one bare file, by its content type."""
    return content_type.lstrip().lower().startswith(tuple(f"{kind}/" for kind in KINDS))


def parse_request(body: bytes, content_type: str) -> tuple[list[RequestItem], dict[str, Any]]:
    """The items of a request, and its options, which are not checked. Raises WireError."""
    media_type = content_type.split(";")[0].strip().lower()
    if is_file(content_type):
        kind: Any = media_type.partition("/")[0]
        return [RequestItem(kind, body)], {}
    if media_type == MSGPACK:
        check_msgpack(body)
        document = read_msgpack(body)
    elif media_type == JSON:
        if body[:1] != b"{" and (name := name_format(body)):
            raise WireError(f"the body is a file ({name}): send it with its own content type")
        document = read_json(body, MOST_VALUES)
    else:
        default = "" if media_type != CURLS_DEFAULT else " (which curl sends unless -H sets it)"
        raise UnsupportedType(
            f"content type {content_type!r}{default} is not supported: send {JSON}, {MSGPACK}, "
            "multipart/form-data, or one file as image/*, video/* or audio/*"
        )
    check_keys(document, {"items", "options"}, "the request")
    items, options = document.get("items"), document.get("options")
    options = {} if options is None else options
    if not isinstance(items, list):
        raise WireError('the request needs "items", a list')
    if not isinstance(options, dict):
        raise WireError('"options" must be a map')
    return [parse_item(item, f"items[{i}]") for i, item in enumerate(items)], options


def parse_item(item: Any, where: str) -> RequestItem:
    """One entry of "items", whose options are not checked. Files are bytes in msgpack, base64 in
    JSON."""
    if not isinstance(item, dict):
        raise WireError(f"{where} must be a map")
    check_keys(item, {"type", "data", "url", "frames", *KWARGS}, where)
    kind: Any = "image" if item.get("type") is None else item["type"]
    options = {name: item[name] for name in KWARGS if name in item}
    data, url, frames = item.get("data"), item.get("url"), item.get("frames")
    if kind not in KINDS:
        raise WireError(f'{where}.type must be "image", "video" or "audio", not {short(kind)}')
    if (data is not None) + (url is not None) + (frames is not None) != 1:
        raise WireError(f'{where} needs one of "data", "url" and "frames"')
    if url is not None and not isinstance(url, str):
        raise WireError(f"{where}.url must be a string")
    if url is not None and is_data_url(url):
        media_type, encoded = split_data_url(url, kind, f"{where}.url")
        if kind == "video" and media_type == FRAMES:
            raise WireError(f'{where}.url is a data URL of frames: send "frames", a list of files')
        return RequestItem(kind, from_base64(encoded, f"{where}.url"), **options)
    if frames is None:
        file = None if data is None else content(data, f"{where}.data")
        return RequestItem(kind, file, url, **options)
    if kind != "video":
        raise WireError(f'{where}.frames: the type must be "video"')
    if not isinstance(frames, list):
        raise WireError(f"{where}.frames must be a list")
    files = tuple(content(one, f"{where}.frames[{i}]") for i, one in enumerate(frames))
    return RequestItem("video", frames=files, **options)


def check_option(name: str, value: Any) -> None:
    """Raises WireError unless the option, one of KWARGS, may have this value."""
    kinds: tuple[type, ...] = (int,) if name in COUNTS else (int, float)
    if type(value) not in kinds or not 0 < value < MOST_COUNT:
        number = "a whole number" if name in COUNTS else "a number"
        raise WireError(
            f"{name} must be {number} above zero and below {MOST_COUNT}, not {short(value)}"
        )


def content(data: Any, where: str) -> bytes:
    if isinstance(data, str):
        if is_data_url(data):
            raise WireError(
                f'{where} is a data URL, which only "url" takes: here send what follows its comma'
            )
        data = from_base64(data, where)
    if not isinstance(data, bytes):
        raise WireError(f"{where} must be bytes (msgpack) or base64 (JSON)")
    return data


def is_data_url(url: str) -> bool:
    return url[: len(DATA_URL)].lower() == DATA_URL


def split_data_url(url: str, kind: str, where: str) -> tuple[str, str]:
    """The media type, in lower case, and the base64 of a data URL. Raises WireError."""
    head, comma, encoded = url.partition(",")
    media_type, marker, rest = head[len(DATA_URL) :].lower().rpartition(";base64")
    if not comma or not marker or rest:
        raise WireError(f"{where}: a data URL must read data:{kind}/...;base64,...")
    return media_type, encoded


def check_keys(given: Document, known: set[str], where: str) -> None:
    """Raises WireError for an unknown key, which is most often a typo."""
    for key in given:
        if key not in known:
            raise WireError(
                f"{where} has an unknown key {short(key)}; known are {', '.join(sorted(known))}"
            )


def name_format(data: bytes) -> str | None:
    for name, offset, signature in SIGNATURES:
        if data.startswith(signature, offset):
            brands = data[16 : min(128, int.from_bytes(data[:4], "big"))]
            return "AVIF" if data[8:12] == b"mif1" and b"avif" in brands else name
    beginning = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    return "SVG" if beginning.startswith(b"<") and b"<svg" in beginning else None
