"""The records that the stages of the service pass on, one per stage.

bytes -> Media (+ ItemPlan) -> Item -> Pack -> Embedding -> Reply
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from actors.errors import ServiceError

Kind = Literal["image", "video", "audio"]
PLURALS = {"image": "images", "video": "videos", "audio": "sounds", "text": "texts"}
"""Plural of each kind, for messages."""
ModelDtype = Literal["bfloat16", "float16", "float32"]
Dtype = Literal["bfloat16", "float16", "float32", "float8_e4m3"]
"""Dtype of rows. float8_e4m3 has a scale per row (kernels/gemm/fp8.py); it is for output only."""
Source = Literal["graph", "eager", "cache"]
Alpha = Literal["white", "black", "drop"]
"""The background of transparent images. `drop`: their colours without the alpha channel."""
Grid = tuple[int, int, int]
Bytes = npt.NDArray[np.uint8]

DTYPE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels of an image after its EXIF rotation. For a sound: samples x 1 (spec/audio.py)."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as its header describes it, or a list of frames."""

    size: Size  # of each frame
    frames: int
    fps: float  # frames per second of playing time
    chosen: bool = False  # the client chose the frames, so all are encoded


@dataclass(frozen=True, slots=True)
class ProcessorKwargs:
    """How an item is resized and sampled. The names are those of transformers' processors.

    None: the value of `model.images_kwargs` or `model.videos_kwargs`, or else the checkpoint's.
    """

    min_pixels: int | None = None
    """Smaller images and video frames are enlarged to this size."""
    max_pixels: int | None = None
    """Larger images and video frames are scaled down to this size."""
    max_patches: int | None = None
    """Tile families: tiles per image. Kimi, SigLIP 2: patches per image or frame."""
    fps: float | None = None
    """Frames sampled per second of a video file."""
    num_frames: int | None = None
    """Frames sampled from a video file, instead of `fps`."""

    def given(self) -> dict[str, float]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


NO_KWARGS = ProcessorKwargs()


class Work(NamedTuple):
    """The amount of work in items, whatever the speed of the encoder. Cost converts it to time."""

    patches: int
    pairs: int = 0
    """Pairs of patches that attend to each other, within an image or a video's temporal group."""

    @classmethod
    def of(cls, parts: Iterable[Work]) -> Work:
        """The sum of the parts."""
        patches = pairs = 0
        for part in parts:
            patches += part.patches
            pairs += part.pairs
        return cls(patches, pairs)

    def times(self, factor: float) -> Work:
        return Work(round(self.patches * factor), round(self.pairs * factor))

    def without(self, done: Work) -> Work:
        return Work(self.patches - done.patches, self.pairs - done.pairs)


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What an item will cost, computed from its size in pixels."""

    grid_thw: Grid
    """Temporal groups, rows and columns, in patches. Tile families: the grid of the tile canvas,
    without the thumbnail. Models of two paths: the grid of the crop canvas, or of the whole view if
    there are no crops."""
    patches: int
    tokens: int  # rows of the embedding
    path_tokens: tuple[int, ...]
    """Tokens that each path computes, in the order of `ModelSpec.paths`."""
    frames: int = 0
    """Temporal groups of a video, or attention segments of a sound that may have several; equal to
    `grid_thw[0]`. 0: an image, or a sound of one window."""
    path_patches: tuple[int, ...] = ()
    """Patches of each path, one path after the other. Empty: the model has one path."""
    kept: tuple[int, ...] = ()
    """Rows and columns of tokens that show the image. The rest of the canvas is padding and has no
    rows in the embedding. Empty: all rows and columns. Images in slices (spec/slices.py): rows and
    columns, in patches, of the whole image (zeros if it is not shown), then of a slice.
    Phi-4-multimodal: rows and columns of the canvas, in patches, that are not only padding."""
    group_pictures: int = 1  # per temporal group, each a grid; the last group may have fewer
    blocks: bytes = b""
    """Mask of the merge blocks that are encoded if an image was pruned, one bit per block
    (numpy.packbits). `patches` and `tokens` count only those. Empty: all blocks."""

    @property
    def work(self) -> Work:
        return Work(self.patches, self.patches**2 // max(1, self.frames))

    @property
    def least_tokens(self) -> tuple[int, ...]:
        """Tokens on each path of the smallest part that must fit one pack: an image, or a temporal
        group."""
        if not self.frames:
            return self.path_tokens
        patches = min(self.group_patches, self.patches)
        return (self.path_tokens[0] * patches // self.patches,)

    @property
    def group_tokens(self) -> int:
        """Rows per temporal group of a video. Remaining rows belong to no group and come last."""
        return self.tokens // self.frames

    @property
    def group_patches(self) -> int:
        """Patches per temporal group of a video; the last group may have fewer."""
        return self.group_pictures * self.grid_thw[1] * self.grid_thw[2]

    def pruned(self, blocks: bytes) -> ItemPlan:
        """The plan of the same image with only these merge blocks: see `blocks`."""
        if not blocks:
            return self
        kept = np.unpackbits(np.frombuffer(blocks, np.uint8), count=self.tokens)
        tokens = int(kept.sum())
        if not 0 < tokens < self.tokens:
            return self
        return replace(
            self,
            patches=self.patches // self.tokens * tokens,
            tokens=tokens,
            path_tokens=(tokens,),
            blocks=np.packbits(kept).tobytes(),
        )

    @property
    def kept_rows(self) -> npt.NDArray[np.int64]:
        """Indices of a pruned image's rows among all rows of the grid."""
        return np.unpackbits(np.frombuffer(self.blocks, np.uint8)).nonzero()[0]

    def rows(self, path: int) -> slice:
        """The slice of an item's patches that belongs to a path, by its index in
        `ModelSpec.paths`."""
        if not self.path_patches:
            return slice(0, self.patches)
        begin = sum(self.path_patches[:path])
        return slice(begin, begin + self.path_patches[path])


@dataclass(frozen=True, slots=True)
class Cost:
    """How long a pack takes on a device: a launch, time per patch, and time for attention."""

    launch_seconds: float
    patch_seconds: float
    attention_seconds: float  # per pair of patches of the same image

    def work_seconds(self, work: Work) -> float:
        """Seconds without the launch."""
        return work.patches * self.patch_seconds + work.pairs * self.attention_seconds

    def seconds(self, patches: Sequence[int]) -> float:
        """Seconds for images with these numbers of patches, encoded together."""
        together = Work(sum(patches), sum(one * one for one in patches))
        return self.launch_seconds + self.work_seconds(together)

    def times(self, factor: float) -> Cost:
        """The cost on a device that takes `factor` times as long."""
        return Cost(*(factor * getattr(self, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Media:
    """One item as the client sent it, still compressed, with what its header says."""

    kind: Kind | Literal["text"]
    data: bytes  # UTF-8 for a text
    plan: ItemPlan
    digest: str  # hexadecimal SHA-256 of `data`; for `frames`, of their digests
    notice: str = ""  # for the client, such as "animated GIF: only the first frame is encoded"
    clip: Clip | None = None  # of a video
    frames: tuple[bytes, ...] = ()  # image files of a video sent as frames; `data` is empty then
    evs_rate: float = 0.0  # share of a video's rows to drop, where little changes (spec/video.py)
    on_device: bool = False
    """The caller can read rows from the encoder's device: see `encoder.transport`."""
    size: Size | None = None  # of the image, of each frame or of the sound, from its header

    alpha: Alpha = "drop"
    """How transparency is handled. `drop` for an image or a video without any."""
    kwargs: ProcessorKwargs = NO_KWARGS
    """The request's values, as far as they make a difference for this item."""
    prune: bool = False
    """Whether an image's merge blocks that repeat a neighbour are left out (patchify.unrepeated).
    `plan` counts all blocks, because how many are left is known only after decoding."""

    @property
    def size_bytes(self) -> int:
        return len(self.data) + sum(map(len, self.frames))

    @property
    def emptied(self) -> Media:
        """The same without its bytes."""
        return replace(self, data=b"", frames=())

    @property
    def identity(self) -> tuple[str, ...]:
        """What determines the rows, besides the model. Items of equal identity are encoded once."""
        thinned = (f"evs {self.evs_rate!r}",) if self.evs_rate else ()
        pruned = ("prune exact",) if self.prune else ()
        composited = (f"alpha {self.alpha}",) if self.alpha != "drop" else ()
        asked = {} if self.kwargs is NO_KWARGS else self.kwargs.given()
        sized = (f"{name} {value!r}" for name, value in asked.items())
        return self.kind, self.digest, *thinned, *pruned, *composited, *sized


@dataclass(slots=True, eq=False)
class Item:
    """One item on its way through the actor. Each stage fills in its part."""

    plan: ItemPlan
    patches: Any
    """uint8 [plan.patches, channels * patch_size ** 2], one frame, not normalised. An array, or a
    torch tensor, which may be on the engine's device. Tile families: tile after tile. Models of
    several paths: path after path. Videos: group after group. Sounds: the bytes of float32
    [plan.patches, spec.audio.patch_values], window after window."""
    later: Any = None
    """The patches of the second frame of each temporal group, for videos whose groups have two."""
    on_device: bool = False  # its rows stay on the device
    in_fp8: bool = False  # its rows leave the device in FP8
    decode_queue_seconds: float = 0.0  # until decoding began
    preprocess_seconds: float = 0.0  # decoding, resizing and patchifying
    rows: Any = None
    """After encoding: a torch tensor [tokens, width] in the tower's dtype, or Fp8Rows if `in_fp8`.
    For a video that was cut, a tuple with those of each chunk: see video_chunks.rows_of."""
    source: Source = "graph"
    queue_seconds: float = 0.0  # from the decoded item to the launch of its pack
    encode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Pack:
    """Items that share one forward pass."""

    items: tuple[int, ...]  # positions in the list that was packed
    budgets: tuple[int | None, ...]
    """The budget of each path. None: no budget holds the pack, so it runs eagerly."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that an item spent in each stage of the actor."""

    queue_seconds: float
    preprocess_seconds: float
    encode_seconds: float


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes in Ray's shared memory, kept as long as this object is (store/shared_memory.py).

    They are lost with the process that wrote them. Rows that were written together share an object.
    """

    object_ref: object  # within the encoder, a kept.PendingWrite until the rows are written
    size_bytes: int
    place: int = 0  # index among the arrays of the object
    others_bytes: int = 0  # size of the other arrays

    @property
    def object_bytes(self) -> int:
        return self.size_bytes + self.others_bytes


@dataclass(frozen=True, slots=True)
class RemoteBytes:
    """Bytes on the device of the process that wrote them (store/nixl.py). The object that a
    SharedBytes refers to holds this in place of an array."""

    object_ref: object  # a uint8 tensor, as an object of Ray's direct transport
    size_bytes: int
    total: int  # checksum: nixl.total of the bytes


@dataclass(frozen=True, slots=True)
class ReceivedBytes:
    """Bytes on a device of this process (nixl.Receiver)."""

    tensor: Any  # a torch tensor, uint8 [bytes]; this file does not import torch

    @property
    def nbytes(self) -> int:
        return int(self.tensor.nbytes)


@dataclass(frozen=True, slots=True)
class Embedding:
    """One item's rows, in the order of the model's own processor."""

    data: Bytes | SharedBytes | ReceivedBytes
    """uint8 [tokens * width * bytes of dtype], row-major, little-endian. Must not be written to.
    Empty in an answer with a `reference`."""
    dtype: Dtype
    shape: tuple[int, int]
    """Tokens, width. Deepstack models: width is hidden x (1 + n), main features first."""
    grid_thw: Grid
    source: Source
    timings: Timings
    replica: str = ""
    frame_tokens: tuple[int, ...] = ()  # with an `evs_rate`: remaining rows per temporal group
    kept_rows: tuple[int, ...] = ()
    """Indices of the remaining rows of a pruned image, or with an `evs_rate`."""
    reference: str = ""
    """The id under which the replica keeps the embedding for a while. Each caller gets its own."""
    scales: bytes = b""
    """float8_e4m3 only: float32 [tokens], little-endian. A row is its values times its scale."""

    @property
    def size_bytes(self) -> int:
        return self.data.size_bytes if isinstance(self.data, SharedBytes) else self.data.nbytes


Answer = Embedding | ServiceError
"""The result of one item. Errors are values, so that one bad item fails only itself."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A replica's answer to a shard."""

    answers: list[Answer]  # one per item, in order, or one per entry of `places`
    outstanding_patches: int  # of all routers, without these items
    outstanding_pairs: int = 0  # of the same work: see Work
    places: tuple[int, ...] = ()
    """Indices of the answered items in the shard, if some were answered early. Empty: all."""
