"""Whatever holds images -> names and sources, one by one: folders, lists, datasets of dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from PIL import Image

File = str | Path | bytes | Image.Image

DRAWING = "image/svg+xml"
"""Of a folder left out: it has no pixels, and no service takes it."""


@dataclass(frozen=True, slots=True)
class Frames:
    """A video as a list of images of one size, all of which are encoded."""

    images: Sequence[File]
    """Paths, bytes of files or images; no URLs."""
    fps: float | None = None
    """How many are shown in a second; None: as many as the model samples."""


Source = File | Frames
"""A path, an https URL, the bytes of a file, an image (which travels as PNG), or frames."""
Samples = str | Path | Iterable[str | Path] | Iterable[Mapping[str, Any]]
"""A folder or a file, several of them, or rows with an image in a column (as of `datasets`)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One item of a dataset."""

    name: str
    """Its path as it was found, or the number of its row."""
    source: Source


def samples(given: Samples, column: str) -> Iterator[Sample]:
    """In an order that is the same each time. Raises ValueError for two of one name."""
    seen: set[str] = set()
    entries: Iterable[Any] = [given] if isinstance(given, str | Path) else given
    for position, entry in enumerate(entries):
        for sample in unfolded(entry, position, column):
            if sample.name in seen:
                raise ValueError(f"{sample.name!r} is there twice: each name stands for one item")
            seen.add(sample.name)
            yield sample


def unfolded(entry: Any, position: int, column: str) -> Iterator[Sample]:
    """A row is one, a file is one, a folder all images and videos below it, by name."""
    if isinstance(entry, Mapping):
        yield Sample(f"{position:09}", content(entry, position, column))
        return
    name = str(entry)
    if name.startswith("https://") or not Path(name).is_dir():
        yield Sample(name, name)
        return
    for path in sorted(Path(name).rglob("*")):
        kind = guess_type(path)[0] or ""
        if kind.startswith(("image/", "video/")) and kind != DRAWING and path.is_file():
            yield Sample(str(path), path)


def content(row: Mapping[str, Any], position: int, column: str) -> Source:
    """The image of a row: decoded, as a file's bytes, as a path, or as `datasets` stores both."""
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
    """How many there are, if that can be said without reading them."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        rows = given and isinstance(given[0], Mapping)
        return len(given) if rows else sum(1 for _ in samples(given, column))
    if isinstance(given, str | Path):
        return sum(1 for _ in samples(given, column))
    return len(given) if isinstance(given, Sized) else None
