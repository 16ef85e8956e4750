"""The images, videos and datasets that a caller may pass, and the request items made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from io import BytesIO
from mimetypes import guess_type
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from encoder_service.wire.documents import VIDEOS, RequestItem, name_format

File = str | Path | bytes | Image.Image

SVG = "image/svg+xml"
"""Skipped in folders: it has no pixels, and the service does not take it."""
SENT_AS_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")
"""Pillow's modes that PNG holds as they are."""
CONVERTED = {
    **dict.fromkeys(("CMYK", "YCbCr", "HSV", "LAB", "RGBX"), "RGB"),
    **{"RGBa": "RGBA", "PA": "RGBA", "La": "LA"},
}
"""Pillow's modes that are converted first; JPEGs made for print are CMYK."""


@dataclass(frozen=True, slots=True)
class Frames:
    """A video as a list of images of one size, all of which are encoded."""

    images: Sequence[File]
    """Paths, bytes of files or images; no URLs."""
    fps: float | None = None
    """Frames per second; None: the model's own sampling rate."""


Source = File | Frames
"""A path, an https URL, the bytes of a file, an image (sent as PNG), or frames."""
Samples = str | Path | Iterable[str | Path] | Iterable[Mapping[str, Any]]
"""A folder or a file, several of them, or rows with an image in a column (as of `datasets`)."""


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    """Its path as it was found, or the number of its row."""
    source: Source


def check_list(sources: object) -> None:
    """Raises TypeError for a single source: a string would be taken for a list of letters."""
    if isinstance(sources, File | Frames):
        raise TypeError(f"encode takes a list, not one {type(sources).__name__}: encode([source])")


def request_item(source: Source) -> RequestItem:
    """What is sent for a source. Reads files. Raises OSError."""
    if isinstance(source, Frames):
        files = tuple(request_item(image).data or b"" for image in source.images)
        return RequestItem("video", frames=files, fps=source.fps)
    if isinstance(source, bytes):
        return RequestItem("video" if name_format(source) in VIDEOS else "image", source)
    if isinstance(source, Image.Image):
        return RequestItem("image", png(source))
    name = str(source)
    kind: Literal["image", "video"] = (
        "video" if (guess_type(name)[0] or "").startswith("video/") else "image"
    )
    if name.startswith("http://"):
        raise OSError(f"{name}: only https URLs are accepted")
    if name.startswith("https://"):
        return RequestItem(kind, url=name)
    return RequestItem(kind, Path(name).read_bytes())


def png(image: Image.Image) -> bytes:
    """A PNG file. Raises OSError for modes such as I and F, whose values have no known range."""
    if image.mode not in SENT_AS_PNG:
        if image.mode not in CONVERTED:
            raise OSError(
                f"an image of mode {image.mode}: the range of its values is unknown; scale them to "
                "0 to 255 and convert it to L or RGB"
            )
        image = image.convert(CONVERTED[image.mode])
    file = BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def samples(given: Samples, column: str) -> Iterator[Sample]:
    """The items, in the same order every time. Raises ValueError if two have the same name."""
    seen: set[str] = set()
    entries: Iterable[Any] = [given] if isinstance(given, str | Path) else given
    for position, entry in enumerate(entries):
        for sample in expanded_entry(entry, position, column):
            if sample.name in seen:
                raise ValueError(f"{sample.name!r} is there twice: names must be unique")
            seen.add(sample.name)
            yield sample


def expanded_entry(entry: Any, position: int, column: str) -> Iterator[Sample]:
    """A row or a file is one item; a folder is all images and videos below it, by name."""
    if isinstance(entry, Mapping):
        yield Sample(f"{position:09}", row_image(entry, position, column))
        return
    name = str(entry)
    if name.startswith("https://") or not Path(name).is_dir():
        yield Sample(name, name)
        return
    for path in sorted(Path(name).rglob("*")):
        kind = guess_type(path)[0] or ""
        if kind.startswith(("image/", "video/")) and kind != SVG and path.is_file():
            yield Sample(str(path), path)


def row_image(row: Mapping[str, Any], position: int, column: str) -> Source:
    """A row's image: decoded, a file's bytes, a path, or the map that `datasets` makes of these."""
    found = row.get(column)
    if isinstance(found, Mapping):
        found = found.get("bytes") or found.get("path")
    if not isinstance(found, str | Path | bytes | Image.Image):
        raise ValueError(
            f"row {position}: column {column!r} holds no image but {type(found).__name__}; "
            f"columns are {sorted(row)}"
        )
    return found


def count(given: Samples, column: str) -> int | None:
    """How many items there are, if that is known without reading them."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        rows = given and isinstance(given[0], Mapping)
        return len(given) if rows else sum(1 for _ in samples(given, column))
    if isinstance(given, str | Path):
        return sum(1 for _ in samples(given, column))
    return len(given) if isinstance(given, Sized) else None
