"""The format of an image or video file, from its first bytes."""

from __future__ import annotations

SUPPORTED = ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF")

VIDEOS = ("MP4 or QuickTime", "Matroska or WebM", "AVI")
"""Container formats that are treated as videos."""

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
    # Not supported; known for the error message.
    ("AVIF", 4, b"ftypavif"),
    ("AVIF", 4, b"ftypavis"),
    ("HEIC", 4, b"ftyphe"),
    ("HEIC", 4, b"ftypmif1"),
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
)


def name_format(data: bytes) -> str | None:
    for name, offset, signature in SIGNATURES:
        if data.startswith(signature, offset):
            return name
    beginning = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    return "SVG" if beginning.startswith(b"<") and b"<svg" in beginning else None
