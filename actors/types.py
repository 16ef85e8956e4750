"""The nouns that travel: one type for each stage of an item's way through the service.

    bytes -> Media -> Shard -> Item -> Pack -> Embedding

Knows nothing of Ray, torch, HTTP or gRPC; everything here pickles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actors.errors import ServiceError

Kind = Literal["image", "video"]
Dtype = Literal["bfloat16", "float16", "float32"]
Source = Literal["graph", "eager", "cache"]
Grid = tuple[int, int, int]
Bytes = npt.NDArray[np.uint8]

DTYPE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels of an upright image: EXIF rotation is already applied."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Clip:
    """What the header of a video tells, or what a list of frames is."""

    size: Size
    """Of each frame."""
    frames: int
    fps: float
    """How many are shown in a second."""
    chosen: bool = False
    """The client chose the frames: all are encoded."""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What an item will cost, known from its size in pixels alone."""

    grid_thw: Grid
    """Temporal groups, rows and columns, in patches. Tile families: the rows and columns of all
    tiles of the canvas, without the tile that shows the whole image once more. Models of two
    paths: of the canvas of the crops, or without crops of the view of the whole image."""
    patches: int
    tokens: int
    """Rows of the embedding."""
    path_tokens: tuple[int, ...]
    """Tokens that each path of the model computes, in the order of `ModelSpec.paths`."""
    frames: int = 0
    """Attention segments of a video: its temporal groups of frames, each a row of `grid_thw`'s
    first axis. 0: an image."""
    path_patches: tuple[int, ...] = ()
    """Patches of each path, whose rows follow each other in an item. Empty: one path has all."""
    kept: tuple[int, ...] = ()
    """Rows and columns of tokens that show the image, where the rest of the canvas only pads it and
    gives no rows of the embedding. Empty: all do."""
    group_pictures: int = 1
    """Pictures that a temporal group holds one after the other, each a grid of its own; the last
    group may have fewer."""

    @property
    def group_tokens(self) -> int:
        """Rows of each temporal group of a video. What is over belongs to none, and comes last."""
        return self.tokens // self.frames

    @property
    def group_patches(self) -> int:
        """Of each temporal group of a video; the last may have fewer."""
        return self.group_pictures * self.grid_thw[1] * self.grid_thw[2]

    def rows(self, path: int) -> slice:
        """Where in an item the patches of a path lie, by its place in `ModelSpec.paths`."""
        if not self.path_patches:
            return slice(0, self.patches)
        begin = sum(self.path_patches[:path])
        return slice(begin, begin + self.path_patches[path])


@dataclass(frozen=True, slots=True)
class Media:
    """One item as the client sent it, still compressed, with what its header told."""

    kind: Kind
    data: bytes
    plan: ItemPlan
    digest: str
    """Hexadecimal SHA-256 of `data`; of `frames`, that of their own digests."""
    notice: str = ""
    """What the client should know, such as "animated GIF: the first of 12 frames"."""
    clip: Clip | None = None
    """Of a video."""
    frames: tuple[bytes, ...] = ()
    """Of a video that came as images: their files, still compressed; `data` is empty."""
    evs_rate: float = 0.0
    """The share of a video's rows that is left out after encoding, where little changes."""
    on_device: bool = False
    """Who asks can read rows from the encoder's device (received.py), so that they may stay on it:
    where `encoder.transport` is nixl, and they are many, and nothing else is in the way."""

    @property
    def identity(self) -> tuple[str, ...]:
        """What decides its rows, beside the model. Equal ones are encoded once."""
        pruned = (f"evs {self.evs_rate!r}",) if self.evs_rate else ()
        return self.kind, self.digest, *pruned


@dataclass(frozen=True, slots=True)
class Shard:
    """The items of one request that go to one replica."""

    replica: str
    items: tuple[int, ...]
    """Positions in the request."""
    patches: int


@dataclass(slots=True, eq=False)
class Item:
    """One item on its way through the actor. Each stage fills in its part."""

    plan: ItemPlan
    patches: Bytes
    """uint8 [plan.patches, channels * patch_size ** 2], one frame, not normalised. Tile families:
    tile after tile. Models of several paths: path after path. Videos: group after group."""
    later: Bytes | None = None
    """The same patches in the second frame of each group of a video, where groups have two."""
    on_device: bool = False
    """Its rows stay on the device."""
    decode_queue_seconds: float = 0.0
    """How long it waited to be decoded."""
    preprocess_seconds: float = 0.0
    """Decoding, resizing and patchifying."""
    rows: Any = None
    """After encoding: a torch tensor [tokens, width] in the tower's dtype."""
    source: Source = "graph"
    queue_seconds: float = 0.0
    """How long it waited for its pack."""
    encode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Pack:
    """Items that share one forward pass."""

    items: tuple[int, ...]
    """Positions in the list that was packed."""
    budgets: tuple[int | None, ...]
    """The budget of each path; None: beyond every budget, to be run eagerly."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that an item spent in each stage of the actor."""

    queue_seconds: float
    preprocess_seconds: float
    encode_seconds: float


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes in Ray's shared memory, written once; they stay while anybody holds this (shared.py).

    Lost with the process that wrote them. Rows that were written together share an object, which
    stays as long as anybody holds one of them.
    """

    object_ref: object
    """Within the encoder perhaps what will be one: sharing.Writing."""
    size_bytes: int
    place: int = 0
    """Among the arrays of the object."""
    others_bytes: int = 0
    """Of the other arrays."""

    @property
    def object_bytes(self) -> int:
        """Of the whole object."""
        return self.size_bytes + self.others_bytes


@dataclass(frozen=True, slots=True)
class RemoteBytes:
    """Bytes on the device of the process that wrote them, in the place of an array in the object
    that a SharedBytes refers to (nixl.py)."""

    object_ref: object
    """Of a uint8 tensor, one of Ray's direct transport objects."""
    size_bytes: int
    total: int
    """nixl.total of them."""


@dataclass(frozen=True, slots=True)
class ReceivedBytes:
    """Bytes on a device of this process (received.py)."""

    tensor: Any
    """torch's, uint8 [bytes]. This file does not know torch."""

    @property
    def nbytes(self) -> int:
        """As an array says it."""
        return int(self.tensor.nbytes)


@dataclass(frozen=True, slots=True)
class Embedding:
    """One item's rows, in the order that the model's own processor gives."""

    data: Bytes | SharedBytes | ReceivedBytes
    """uint8 [tokens * width * bytes of dtype], row-major, little-endian; not to be written to.
    Empty in an answer with a `reference`."""
    dtype: Dtype
    shape: tuple[int, int]
    """Tokens, width. Deepstack models: width is hidden x (1 + n), main features first."""
    grid_thw: Grid
    source: Source
    timings: Timings
    replica: str = ""
    frame_tokens: tuple[int, ...] = ()
    """Of a video with an `evs_rate`: rows that are left of each temporal group."""
    reference: str = ""
    """Id under which its replica keeps it for a while. An id is one caller's alone."""


Answer = Embedding | ServiceError
"""What becomes of one item. Errors are values here: one bad item fails only itself."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a replica gives back for a shard."""

    answers: list[Answer]
    """One for each item, in order."""
    outstanding_patches: int
    """What the replica still has from all routers, these items no longer counted."""
