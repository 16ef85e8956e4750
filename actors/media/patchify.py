"""Cuts decoded pixels into the patches of an item, with one patchifier per kind of sizing.

Needs only the spec, no weights and no tower, so that decoder processes can run it. Patches are
uint8 [patches, 3 x patch x patch], resized but not normalised; for sounds, the bytes of float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from actors.errors import CheckpointError
from actors.media.log_mel import conformer_frames, cut_conformer, cut_positions, log_mel
from actors.spec.audio import AudioSizing, ChunkSizing, ConformerSizing
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import BlockSizing, CanvasSizing, PatchRange, Resample, WindowedSizing
from actors.spec.slices import PaddedCrops, SlicedSizing
from actors.spec.tiles import (
    AnyresSizing,
    CentredTile,
    FilledTiles,
    OverlappingTiles,
    SplitTiles,
    TileSizing,
    with_overview,
)
from actors.spec.video import CanvasPixels, PooledGroups
from actors.spec.views import CropSizing, WindowSizing
from actors.types import (
    NO_KWARGS,
    Bytes,
    Clip,
    Grid,
    Item,
    ItemPlan,
    Kind,
    ProcessorKwargs,
    Size,
)

CACHED_GRIDS = 256
CACHED_KWARGS = 64

Shape = tuple[int, int, int]
"""Frames per group, patches, bytes per patch. Videos may have groups of two frames."""


class Patchifier(ABC):
    """Patchifies the media of one model. Thread-safe."""

    sizing: Any  # of the kind that the subclass is for

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.sizing = spec.sizing
        self._asked = lru_cache(CACHED_KWARGS)(
            lambda kind, kwargs: patchifier_of(spec.asked(kind, kwargs))
        )

    def asked(self, kind: Kind, kwargs: ProcessorKwargs) -> Patchifier:
        """The patchifier for items whose request sets these values."""
        found: Patchifier = self if kwargs == NO_KWARGS else self._asked(kind, kwargs)
        return found

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Tensor]:
        """The plan and the patches of a decoded image, uint8 [3, height, width]."""
        return self.spec.sizing.plan(size_of(image)), self.patches(image)

    def example(self) -> tuple[ItemPlan, Tensor]:
        """As `patchify`, for a small item."""
        return self.patchify(torch.full((3, 64, 64), 128, dtype=torch.uint8))

    @abstractmethod
    def patches(self, image: Tensor) -> Tensor:
        """The patches of an image."""

    def patchify_video(self, clip: Clip, frames: Iterable[Tensor]) -> Item:
        """An item from the frames that `video.indices` chose, decoded: uint8 [3, height, width].
        Consumes them one by one, so that at most one decoded frame is in memory."""
        assert self.spec.video, "a video for a model that takes none. This is a bug."
        size = self.spec.video.resized(clip.size, clip.frames)
        patches = torch.cat([self.frame(frame, size) for frame in frames])
        return Item(self.spec.video.plan(clip), patches.numpy())

    def frame(self, frame: Tensor, size: Size) -> Tensor:
        """The patches of one frame of a video, resized to `size`."""
        raise AssertionError("a video for a family that takes none. This is a bug.")

    def shape(self, plan: ItemPlan) -> Shape:
        """The shape of all patches of an item, those of `Item.later` included."""
        return 1, plan.patches, 3 * self.spec.sizing.patch_size**2


class BlockPatchifier(Patchifier):
    """One grid of merge blocks per image or frame; transformers: Qwen2VLImageProcessor."""

    sizing: BlockSizing

    def patches(self, image: Tensor) -> Tensor:
        return self.frame(image, self.sizing.resized(size_of(image)))

    def frame(self, frame: Tensor, size: Size) -> Tensor:
        resized = resize(frame, size, self.spec.resample)
        return cut_blocks(resized, self.sizing.patch_size, self.sizing.merge_size)


class PairPatchifier(BlockPatchifier):
    """As BlockPatchifier, for videos whose groups have two frames, which are embedded together."""

    def patchify_video(self, clip: Clip, frames: Iterable[Tensor]) -> Item:
        assert self.spec.video, "a video for a model that takes none. This is a bug."
        plan = self.spec.video.plan(clip)
        resized = Size(*(side * self.sizing.patch_size for side in reversed(plan.grid_thw[1:])))
        shape = both, patches, patch_bytes = self.shape(plan)
        groups = np.empty((both, plan.frames, patches // plan.frames, patch_bytes), np.uint8)
        for index, frame in enumerate(frames):
            groups[index % both, index // both] = self.frame(frame, resized).numpy()
        if not index % both:
            groups[1, -1] = groups[0, -1]
        first, later = groups.reshape(shape)
        return Item(plan, first, later)

    def shape(self, plan: ItemPlan) -> Shape:
        frames, patches, size = super().shape(plan)
        return 2 if plan.frames else frames, patches, size


class WindowedPatchifier(PairPatchifier):
    """As PairPatchifier, with patches in the order of the windows of each grid (Qwen2.5-VL)."""

    sizing: WindowedSizing

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.order = lru_cache(CACHED_GRIDS)(self.sizing.order)

    def frame(self, frame: Tensor, size: Size) -> Tensor:
        patches, patch = super().frame(frame, size), self.sizing.patch_size
        order, _ = self.order(size.height // patch, size.width // patch)
        return patches.view(len(order), -1)[torch.from_numpy(order)].view(patches.shape)


class FloatPatchifier(PairPatchifier):
    """As PairPatchifier, but resizes in floats (Nemotron-H Omni)."""

    def frame(self, frame: Tensor, size: Size) -> Tensor:
        resized = in_floats(frame, size, self.spec.resample, antialias=True)
        return cut_blocks(resized, self.sizing.patch_size, self.sizing.merge_size)


class CanvasPatchifier(PairPatchifier):
    """As PairPatchifier, with the picture in the upper left of a canvas of zeros (GLM-5-next)."""

    sizing: CanvasSizing

    def patches(self, image: Tensor) -> Tensor:
        size = size_of(image)
        whole = self.on_canvas(image, self.sizing.shown(size), self.sizing.resized(size))
        return self.frame(whole, size_of(whole))

    def patchify_video(self, clip: Clip, frames: Iterable[Tensor]) -> Item:
        video = self.spec.video
        assert isinstance(video, CanvasPixels)
        count = len(video.indices(clip))
        sizes = video.shown(clip.size, count), video.resized(clip.size, count)
        return super().patchify_video(clip, (self.on_canvas(one, *sizes) for one in frames))

    def on_canvas(self, image: Tensor, shown: Size, canvas: Size) -> Tensor:
        picture = resize(image, shown, self.spec.resample)
        return padded(picture, canvas.width - shown.width, canvas.height - shown.height)


class SlicePatchifier(BlockPatchifier):
    """The whole image, and its slices in raster order (MiniCPM-V, LFM2-VL)."""

    sizing: SlicedSizing

    def patches(self, image: Tensor) -> Tensor:
        size = size_of(image)
        layout = self.sizing.slices(size)
        if layout is None:
            return super().patches(image)
        rows, columns = layout
        slice_size = self.sizing.sliced(size, layout)
        canvas = Size(columns * slice_size.width, rows * slice_size.height)
        views = squares(resize(image, canvas, self.spec.resample), rows, columns)
        slices = [self.frame(view, slice_size) for view in views]
        whole = [super().patches(image)] if self.sizing.with_whole else []
        return torch.cat(whole + slices if self.sizing.whole_first else slices + whole)


class CropsPatchifier(BlockPatchifier):
    """The whole canvas, then its crops in raster order (Phi-4-multimodal)."""

    sizing: PaddedCrops

    def patches(self, image: Tensor) -> Tensor:
        size, side, patch = size_of(image), self.sizing.picture_pixels, self.sizing.patch_size
        rows, columns = self.sizing.layout(size)
        picture = resize(image, self.sizing.resized(size), self.spec.resample)
        canvas = torch.full((3, rows * side, columns * side), 255, dtype=torch.uint8)
        canvas[:, : picture.shape[1], : picture.shape[2]] = picture
        whole = in_floats(canvas, Size(side, side), "bicubic", antialias=False)
        _, down, across = self.sizing.plan(size).grid_thw
        shown = canvas[:, : down * patch, : across * patch]
        crops = [one for row in shown.split(side, 1) for one in row.split(side, 2)]
        return torch.cat(
            [cut_blocks(one, patch, self.sizing.merge_size) for one in (whole, *crops)]
        )


class TilePatchifier(Patchifier):
    """Tiles in raster order, after or before the overview. Videos have one tile per frame."""

    sizing: TileSizing

    def patches(self, image: Tensor) -> Tensor:
        patches, side = self.tiles(image), self.sizing.tile_pixels
        if with_overview(len(patches) // self.sizing.side_patches**2) == 1:
            return patches
        overview, first = self.frame(image, Size(side, side)), self.sizing.overview_first
        return torch.cat([overview, patches] if first else [patches, overview])

    def tiles(self, image: Tensor) -> Tensor:
        """The patches of the tiles, without the overview."""
        sizing, size = self.sizing, size_of(image)
        rows, columns = sizing.layout(size)
        left, above = sizing.corner(size)
        picture = resize(image, sizing.resized(size), self.spec.resample)[:, above:, left:]
        right = columns * sizing.tile_pixels - picture.shape[2]
        below = rows * sizing.tile_pixels - picture.shape[1]
        return cut_tiles(padded(picture, right, below), sizing)

    def frame(self, frame: Tensor, size: Size) -> Tensor:
        return cut_tiles(resize(frame, size, self.spec.resample), self.sizing)


class FilledPatchifier(TilePatchifier):
    """Tiles in raster order, then empty ones (Llama 3.2 Vision)."""

    def patches(self, image: Tensor) -> Tensor:
        tiles = self.tiles(image)
        whole = self.sizing.max_tiles * self.sizing.side_patches**2
        return F.pad(tiles, (0, 0, 0, whole - len(tiles)))


class CentredPatchifier(TilePatchifier):
    """The image in the middle of a square (Janus)."""

    def patches(self, image: Tensor) -> Tensor:
        sizing, size = self.sizing, size_of(image)
        picture = resize(image, sizing.resized(size), self.spec.resample)
        square = framed(picture, sizing.corner(size), sizing.tile_pixels, self.spec)
        return cut_tiles(square, sizing)


class AnyresPatchifier(Patchifier):
    """The overview, then the tiles of the canvas (LLaVA-OneVision)."""

    sizing: AnyresSizing | SplitTiles

    def patches(self, image: Tensor) -> Tensor:
        size, side = size_of(image), self.sizing.picture_pixels
        rows, columns = self.sizing.layout(size)
        left, above = self.sizing.corner(size)
        shown = resize(image, self.sizing.resized(size), self.spec.resample)
        canvas = image.new_zeros(3, rows * side, columns * side)
        canvas[:, above : above + shown.shape[1], left : left + shown.shape[2]] = shown
        tiles = (image, *squares(canvas, rows, columns))
        return torch.cat([self.frame(tile, Size(side, side)) for tile in tiles])

    def frame(self, frame: Tensor, size: Size) -> Tensor:
        """Resizes a frame and crops its centre to the size of a picture."""
        side, whole = self.sizing.picture_pixels, self.sizing.tile_pixels
        left, above = (size.width - side) // 2, (size.height - side) // 2
        tile = resize(frame, size, self.spec.resample)[:, above:, left:]
        return cut_tiles(tile[:, :whole, :whole], self.sizing)


class SplitPatchifier(AnyresPatchifier):
    """The tiles of the canvas, then the canvas as the overview (Idefics3)."""

    sizing: SplitTiles

    def patches(self, image: Tensor) -> Tensor:
        size, side, mode = size_of(image), self.sizing.picture_pixels, self.spec.resample
        fitted = resize(image, self.sizing.fitted(size), mode)
        canvas = resize(fitted, self.sizing.resized(size), mode)
        tiles = list(squares(canvas, *self.sizing.layout(size)))
        if with_overview(len(tiles)) > 1:
            tiles.append(canvas)
        return torch.cat([self.frame(tile, Size(side, side)) for tile in tiles])


class OverlapPatchifier(TilePatchifier):
    """The overview, then the tiles of the canvas (Molmo 2)."""

    sizing: OverlappingTiles

    def patches(self, image: Tensor) -> Tensor:
        sizing, size, side = self.sizing, size_of(image), self.sizing.tile_pixels
        canvas, step = unsmoothed(image, sizing.resized(size)), sizing.step_patches
        tiles = canvas.unfold(1, side, step * sizing.patch_size)
        tiles = tiles.unfold(2, side, step * sizing.patch_size).permute(1, 2, 0, 3, 4).flatten(0, 1)
        return torch.cat(
            [self.frame(image, Size(side, side)), *(cut_tiles(t, sizing) for t in tiles)]
        )

    def frame(self, frame: Tensor, size: Size) -> Tensor:
        return cut_tiles(unsmoothed(frame, size), self.sizing)


class CropPatchifier(Patchifier):
    """The whole image, then its crops in raster order; patches row by row (DeepSeek-OCR)."""

    sizing: CropSizing

    def patches(self, image: Tensor) -> Tensor:
        crops, size = self.sizing.crops, size_of(image)
        parts = [cut_blocks(self.whole(image), crops.patch_size, merge=1)]
        if self.sizing.layout(size):
            canvas = resize(image, crops.resized(size), self.spec.resample)
            parts.append(cut_tiles(canvas, replace(crops, merge_size=1)))
        return torch.cat(parts)

    def whole(self, image: Tensor) -> Tensor:
        """The whole image, padded to a square with the mean colour: uint8 [3, side, side]."""
        sizing, size = self.sizing, size_of(image)
        picture = resize(image, sizing.whole(size), self.spec.resample)
        return framed(picture, sizing.corner(size), sizing.image_pixels, self.spec)


class WindowPatchifier(Patchifier):
    """The whole image, then its crops in raster order; patches row by row (Step3)."""

    sizing: WindowSizing

    def patches(self, image: Tensor) -> Tensor:
        sizing, mode = self.sizing, self.spec.resample
        windows = sizing.windows(size_of(image))
        if windows.shown.width == windows.shown.height:  # a no-op unless the image is thin
            longer = max(image.shape[1:])
            image = padded(image, longer - image.shape[2], longer - image.shape[1])
        shown = resize(image, windows.shown, mode)
        whole = resize(shown, Size(sizing.image_pixels, sizing.image_pixels), mode)
        patches = cut_blocks(whole, sizing.patch_size, merge=1)
        if windows.side:
            canvas = resize(image if sizing.stretches else shown, windows.canvas, mode)
            if not sizing.stretches:
                right = windows.columns * windows.side - windows.canvas.width
                below = windows.rows * windows.side - windows.canvas.height
                canvas = padded(canvas, right, below)
            square = Size(sizing.crop_pixels, sizing.crop_pixels)
            views = squares(canvas, windows.rows, windows.columns)
            crops = [resize(view, square, mode) for view in views]
            patches = torch.cat([patches, *(cut_blocks(c, sizing.patch_size, 1) for c in crops)])
        return patches


class AudioPatchifier(Patchifier):
    """The log-mel frames that each position of a sound sees. Sounds are float32 [1, 1, samples],
    mono, at the sizing's rate."""

    sizing: AudioSizing

    def example(self) -> tuple[ItemPlan, Tensor]:
        return self.patchify(torch.zeros(1, 1, self.sizing.rate))

    def patches(self, image: Tensor) -> Tensor:
        positions = cut_positions(log_mel(image.flatten(), self.sizing)).flatten(0, 1)
        return positions[: self.sizing.plan(size_of(image)).patches].view(torch.uint8)

    def shape(self, plan: ItemPlan) -> Shape:
        return 1, plan.patches, self.sizing.patch_values * torch.float32.itemsize


class ChunkPatchifier(AudioPatchifier):
    """The log-mel frames of each window of a sound, frame after frame (Qwen3-Omni)."""

    def patches(self, image: Tensor) -> Tensor:
        windows = log_mel(image.flatten(), self.sizing).transpose(1, 2).flatten(1)
        rest = -windows.shape[1] % self.sizing.patch_values
        return F.pad(windows, (0, rest)).view(-1, self.sizing.patch_values).view(torch.uint8)


class ConformerPatchifier(AudioPatchifier):
    """The log-mel frames that each position of a sound sees, for conformers."""

    sizing: ConformerSizing

    def patches(self, image: Tensor) -> Tensor:
        frames = conformer_frames(image.flatten(), self.sizing)
        count = self.sizing.plan(size_of(image)).patches
        return cut_conformer(frames, count, self.sizing).view(torch.uint8)


def patchifier_of(spec: ModelSpec) -> Patchifier:
    """The patchifier for the spec's kind of sizing; subclasses are matched first."""
    match spec.sizing:
        case WindowedSizing():
            return WindowedPatchifier(spec)
        case CanvasSizing():
            return CanvasPatchifier(spec)
        case SlicedSizing():
            return SlicePatchifier(spec)
        case PaddedCrops():
            return CropsPatchifier(spec)
        case PatchRange():
            return FloatPatchifier(spec)
        case BlockSizing():
            pooled = isinstance(spec.video, PooledGroups)
            return BlockPatchifier(spec) if pooled else PairPatchifier(spec)
        case AnyresSizing():
            return AnyresPatchifier(spec)
        case SplitTiles():
            return SplitPatchifier(spec)
        case CentredTile():
            return CentredPatchifier(spec)
        case OverlappingTiles():
            return OverlapPatchifier(spec)
        case FilledTiles():
            return FilledPatchifier(spec)
        case TileSizing():
            return TilePatchifier(spec)
        case CropSizing():
            return CropPatchifier(spec)
        case WindowSizing():
            return WindowPatchifier(spec)
        case ChunkSizing():
            return ChunkPatchifier(spec)
        case ConformerSizing():
            return ConformerPatchifier(spec)
        case AudioSizing():
            return AudioPatchifier(spec)
    kind = type(spec.sizing).__name__
    raise CheckpointError(f"model.id {spec.id!r}: there is no patchifier for a {kind}")


def size_of(image: Tensor) -> Size:
    return Size(width=image.shape[2], height=image.shape[1])


def resize(image: Tensor, size: Size, mode: Resample = "bicubic") -> Tensor:
    """Resizes uint8 [3, height, width] with antialiasing. Equals transformers' torchvision backend
    on the CPU, bit for bit. Lanczos, which not every torch has, equals its Pillow backend."""
    if image.shape[1:] == (size.height, size.width):
        return image
    if mode == "lanczos":
        picture = Image.fromarray(contiguous(image.permute(1, 2, 0)).numpy())
        picture = picture.resize((size.width, size.height), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    # A batch of one in true channels-last strides takes torch's vectorised uint8 kernel.
    batch = image.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, size=(size.height, size.width), mode=mode, antialias=True)[0]


def unsmoothed(image: Tensor, size: Size) -> Tensor:
    """As `in_floats`, bilinear and without antialiasing."""
    return in_floats(image, size, "bilinear", antialias=False)


def in_floats(image: Tensor, size: Size, mode: str, *, antialias: bool) -> Tensor:
    """As `resize`, but computes in floats like transformers, and rounds the result to bytes, which
    transformers does not."""
    shape = size.height, size.width
    resized = F.interpolate(image[None].float(), shape, mode=mode, antialias=antialias)[0]
    return resized.round_().clamp_(0, 255).byte()


def framed(picture: Tensor, corner: tuple[int, int], side: int, spec: ModelSpec) -> Tensor:
    """Puts a picture on a square of the mean colour: uint8 [3, side, side]."""
    ground = torch.tensor([int(value * 255) for value in spec.mean], dtype=torch.uint8)
    canvas = ground[:, None, None].repeat(1, side, side)
    left, top = corner
    canvas[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
    return canvas


def squares(canvas: Tensor, rows: int, columns: int) -> Tensor:
    """Cuts [3, height, width] into rows x columns equal parts: [rows x columns, 3, height, width],
    in raster order."""
    grid: Tensor = canvas.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
    return grid.permute(1, 3, 0, 2, 4).flatten(0, 1)


def padded(image: Tensor, right: int, below: int) -> Tensor:
    """Pads with zeros on the right and below. Negative numbers crop."""
    return F.pad(image, (0, right, 0, below)) if right or below else image


def cut_blocks(image: Tensor, patch: int, merge: int) -> Tensor:
    """Cuts uint8 [3, height, width] into patches, in the order of merge blocks. The image is padded
    with zeros, on the right and below, to whole blocks."""
    block = patch * merge
    whole = padded(image, -image.shape[2] % block, -image.shape[1] % block)
    rows, columns = whole.shape[1] // block, whole.shape[2] // block
    blocks = whole.reshape(3, rows, merge, patch, columns, merge, patch)
    return contiguous(blocks.permute(1, 4, 2, 5, 0, 3, 6)).view(-1, 3 * patch**2)


def unrepeated(patches: Bytes, grid: Grid, merge: int) -> npt.NDArray[np.bool_]:
    """Which merge blocks of an image to keep, in raster order, by PixelPrune's exact rule
    (https://arxiv.org/abs/2604.00886): those that differ from the neighbour that predicts them.

    The predictor is the left neighbour, or the one above in the first column. It is also the one
    above where a vertical edge is likely: the left neighbour equals the block above it, and that
    block differs from its own right neighbour.
    """
    _, rows, columns = grid
    blocks: npt.NDArray[Any] = patches.reshape(rows // merge, columns // merge, -1)
    if blocks.shape[2] % 4 == 0:
        blocks = blocks.view(np.uint32)  # compares faster
    left, above = (np.zeros(blocks.shape[:2], bool) for _ in range(2))
    left[:, 1:] = (blocks[:, 1:] == blocks[:, :-1]).all(-1)
    above[1:] = (blocks[1:] == blocks[:-1]).all(-1)
    from_above = np.zeros_like(left)
    from_above[:, 0] = True
    from_above[1:, 1:] = above[1:, :-1] & ~left[:-1, 1:]
    kept: npt.NDArray[np.bool_] = ~np.where(from_above, above, left)
    return kept.ravel()


def cut_tiles(canvas: Tensor, sizing: TileSizing) -> Tensor:
    """Cuts uint8 [3, height, width], made of whole tiles, into patches, tile by tile."""
    patch, merge = sizing.patch_size, sizing.merge_size
    side = (sizing.side_patches // merge, merge, patch)
    parts = canvas.unflatten(2, (-1, *side)).unflatten(1, (-1, *side))
    # Row and column of the tile, of the block and of the patch; then channel, row and column.
    return contiguous(parts.permute(1, 5, 2, 6, 3, 7, 0, 4, 8)).view(-1, 3 * patch**2)


def contiguous(pixels: Tensor) -> Tensor:
    """On the CPU, uses numpy, which takes half of torch's time and only this thread. Torch would
    start its own threads in each decoding thread."""
    if pixels.is_cuda:
        return pixels.contiguous()
    return torch.from_numpy(np.ascontiguousarray(pixels.numpy()))
