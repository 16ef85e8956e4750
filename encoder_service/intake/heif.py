"""Reads the boxes of a HEIC or AVIF file (ISO/IEC 23008-12) without libheif or libavif.

Those libraries copy all metadata that a file refers to before they tell its size. The parts may
overlap, so a file of 10 MB can take 4 GB and half a minute.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from actors.types import Size

MOST_METADATA_BYTES = 16 * 2**20
"""Limit for all metadata that a file refers to, counted once per image that has it. Phones write
some KB."""
MOST_META_BYTES = 4 * 2**20  # of the box that describes all items; it may hold an ICC profile
MOST_ENTRIES = 20_000  # items, properties, parts; the photograph of a phone has about 300
METADATA = (b"Exif", b"mime", b"uri ")
ONCE = (b"meta", b"moov", b"pitm", b"iinf", b"iloc", b"iref", b"iprp", b"idat")
ALPHA = (b"urn:mpeg:hevc:2015:auxid:1", b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha")
QUARTER_TURNS = (1, 3)

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeifHeader:
    """The properties of the primary image."""

    size: Size  # upright
    transparent: bool
    bits: int  # per sample
    exif: list[bytes]  # each Exif item's content


def read_heif(data: bytes, *, crops: bool) -> HeifHeader:
    """`crops`: apply a clean aperture, as libheif does and libavif does not. Raises ValueError and
    other exceptions for a file that is damaged or declares too much."""
    return Boxes(data).header(crops)


class Boxes:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.entries_left = MOST_ENTRIES
        file = self.unique(0, len(data))
        self.tracks = file.get(b"moov", (0, 0))
        if b"Exif" in data[slice(*self.tracks)]:
            raise ValueError("it has Exif in a track of frames: save it without")
        begin, end = file[b"meta"]
        if end - begin > MOST_META_BYTES:
            raise ValueError(f"its meta box is over {MOST_META_BYTES} bytes")
        self.meta = self.unique(begin + 4, end)

    def header(self, crops: bool) -> HeifHeader:
        begin, _ = self.meta[b"pitm"]
        primary, _ = self.item_id(begin + 4, wide=self.data[begin] > 0)
        properties, references = self.properties(), list(self.references())
        width = height = 0
        bits = 8
        for kind, at in properties[primary]:  # in the order in which they apply
            if kind == b"ispe":
                width, height = struct.unpack_from(">II", self.data, at + 4)
                if self.track_sizes() - {(width, height), (0, 0)}:
                    raise ValueError("its frames differ from it in size")
            elif kind == b"clap" and crops:
                across, by, down, by_too = struct.unpack_from(">4I", self.data, at)
                width, height = across // by, down // by_too
            elif kind == b"pixi":
                bits = max(self.data[at + 5 : at + 5 + self.data[at + 4]], default=8)
            elif kind == b"irot" and self.data[at] & 3 in QUARTER_TURNS:
                width, height = height, width
        if not (width and height):
            raise ValueError("it declares no size")
        transparent = any(
            kind == b"auxC" and self.data[at + 4 : at + 60].split(b"\0")[0] in ALPHA
            for reference, item, targets in references
            if reference == b"auxl" and primary in targets
            for kind, at in properties.get(item, ())
        )
        owners = Counter(
            item for reference, item, to in references if reference == b"cdsc" for _ in to
        )
        return HeifHeader(Size(width, height), transparent, bits, self.exif(owners))

    def track_sizes(self) -> set[Span]:
        """Width and height of the tracks of frames and sound, in whole pixels."""
        return {
            (self.number(end - 8, 2)[0], self.number(end - 4, 2)[0])
            for track, start, stop in self.within(*self.tracks)
            if track == b"trak"
            for kind, _, end in self.within(start, stop)
            if kind == b"tkhd"
        }

    def unique(self, start: int, end: int) -> dict[bytes, Span]:
        found: dict[bytes, Span] = {}
        for kind, begin, stop in self.within(start, end):
            if kind in found and kind in ONCE:  # readers differ in which one they take
                raise ValueError(f"it has several boxes {kind.decode()}")
            found[kind] = begin, stop
        return found

    def within(self, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
        """The boxes between two places: their kind, and where their content begins and ends."""
        while start + 8 <= end:
            self.count(1)
            size, kind = struct.unpack_from(">I4s", self.data, start)
            begin = start + 8
            if size == 1:
                (size,) = struct.unpack_from(">Q", self.data, begin)
                begin += 8
            stop = start + size if size else end
            if stop < begin or (stop > end and kind != b"mdat"):
                raise ValueError("a box exceeds its parent")
            yield kind, begin, stop
            start = stop

    def count(self, entries: int) -> None:
        self.entries_left -= entries
        if self.entries_left < 0:
            raise ValueError("it has too many items")

    def number(self, at: int, size: int) -> Span:
        """An integer of `size` bytes, and where it ends."""
        return int.from_bytes(self.data[at : at + size], "big"), at + size

    def item_id(self, at: int, *, wide: bool) -> Span:
        return self.number(at, 4 if wide else 2)

    def properties(self) -> dict[int, list[tuple[bytes, int]]]:
        """The properties of each item, in order: their kind, and where their content begins."""
        listed: list[tuple[bytes, int]] = []
        found: dict[int, list[tuple[bytes, int]]] = {}
        for kind, begin, end in self.within(*self.meta[b"iprp"]):
            if kind == b"ipco":
                listed = [(name, at) for name, at, _ in self.within(begin, end)]
            if kind != b"ipma":
                continue
            size = 2 if self.data[begin + 3] & 1 else 1  # the highest bit is a flag
            items, at = self.number(begin + 4, 4)
            self.count(items)
            for _ in range(items):
                item, at = self.item_id(at, wide=self.data[begin] > 0)
                places, at = self.number(at, 1)
                self.count(places)
                found[item] = []
                for _ in range(places):
                    place, at = self.number(at, size)
                    place &= 2 ** (8 * size - 1) - 1
                    found[item] += listed[place - 1 : place] if place else []
        return found

    def references(self) -> Iterator[tuple[bytes, int, list[int]]]:
        """Kind, item, and the items that it refers to."""
        begin, end = self.meta.get(b"iref", (0, 0))
        wide = self.data[begin] > 0
        for kind, at, _ in self.within(begin + 4, end):
            item, at = self.item_id(at, wide=wide)
            targets, at = self.number(at, 2)
            self.count(targets)
            width = 4 if wide else 2
            yield kind, item, [self.number(at + width * i, width)[0] for i in range(targets)]

    def exif(self, owners: Mapping[int, int]) -> list[bytes]:
        """The content of each Exif item. Raises ValueError if all metadata is too large.

        `owners`: how many images a metadata item belongs to.
        """
        begin, end = self.meta[b"iinf"]
        kinds: dict[int, bytes] = {}
        for kind, start, _ in self.within(begin + (8 if self.data[begin] else 6), end):
            if kind == b"infe" and self.data[start] >= 2:
                item, at = self.item_id(start + 4, wide=self.data[start] > 2)
                kinds[item] = self.data[at + 2 : at + 6]
        size_bytes, parts = 0, defaultdict[int, list[Span]](list)
        for item, (start, stop) in self.extents():
            if kinds.get(item) in METADATA:
                size_bytes += (stop - start) * max(1, owners.get(item, 0))
                parts[item].append((start, stop))
        if size_bytes > MOST_METADATA_BYTES:
            raise ValueError(f"it declares {size_bytes} bytes of metadata")
        return [
            b"".join(self.data[slice(*span)] for span in spans)
            for item, spans in parts.items()
            if kinds[item] == b"Exif"
        ]

    def extents(self) -> Iterator[tuple[int, Span]]:
        """Yields items, and where in the file each of their parts lies."""
        begin, _ = self.meta[b"iloc"]
        version = self.data[begin]
        sizes = self.data[begin + 4 : begin + 6].hex()
        offset_size, length_size, base_size, index_size = map(int, sizes)
        items, at = self.item_id(begin + 6, wide=version > 1)
        self.count(items)
        for _ in range(items):
            item, at = self.item_id(at, wide=version > 1)
            in_box = version > 0 and self.data[at + 1] & 15 == 1
            at += 4 if version else 2
            source, end = self.meta[b"idat"] if in_box else (0, len(self.data))
            base, at = self.number(at, base_size)
            parts, at = self.number(at, 2)
            self.count(parts)
            for _ in range(parts):
                offset, at = self.number(at + (index_size if version else 0), offset_size)
                length, at = self.number(at, length_size)
                start = source + base + offset
                yield item, (start, start + length if length else max(start, end))
