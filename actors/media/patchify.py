"""From decoded pixels to the patches of an item: how each family cuts, by its spec alone.

Whoever has the spec cuts, without weights and without a tower: so do processes beside the actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from actors.errors import CheckpointError
from actors.models import llava_onevision, packed, packed_tower, qwen25vl, step_tower, tiled, views
from actors.models.deepseek_ocr_config import crop_sizing
from actors.models.step_config import window_sizing
from actors.spec.anyres import AnyresSizing
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import BlockSizing
from actors.types import Clip, Item, ItemPlan, Size

Shape = tuple[int, int, int]
"""Frames of a patch, patches, bytes: a video whose groups have two frames has two of each patch."""


class Cutter(Protocol):
    """Cuts images of one family. Any thread may."""

    spec: ModelSpec

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Tensor]:
        """A decoded image, uint8 [3, height, width], to its plan and its patches."""

    def shape(self, plan: ItemPlan) -> Shape:
        """Of all that an item has: its patches, and where there are two frames those of `later`."""


@runtime_checkable
class VideoCutter(Cutter, Protocol):
    """Of a family that takes videos."""

    def cut_video(self, clip: Clip, frames: Iterable[Tensor]) -> Item:
        """Decoded frames, uint8 [3, height, width], as `spec.video.indices` chose them.

        They are taken one by one: no more than one is held as it was decoded.
        """


class PackedCutter:
    """One grid of merge blocks an image; groups of two frames a video."""

    def __init__(self, spec: ModelSpec) -> None:
        if not isinstance(spec.sizing, BlockSizing):
            raise CheckpointError(f"model.id {spec.id!r}: this family needs a sizing in blocks")
        self.spec = spec
        self.sizing = spec.sizing

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Tensor]:
        """See Cutter; transformers: Qwen2VLImageProcessor, before normalisation."""
        size = size_of(image)
        return self.sizing.plan(size), self.cut(image, self.sizing.resized(size))

    def cut_video(self, clip: Clip, frames: Iterable[Tensor]) -> Item:
        """See VideoCutter."""
        assert self.spec.video, "a video for a family that takes none. This is a bug."
        plan = self.spec.video.plan(clip)
        resized = Size(*(side * self.sizing.patch_size for side in reversed(plan.grid_thw[1:])))
        shape = both, patches, patch_bytes = self.shape(plan)
        groups = np.empty((both, plan.frames, patches // plan.frames, patch_bytes), np.uint8)
        for index, frame in enumerate(frames):
            groups[index % both, index // both] = self.cut(frame, resized).numpy()
        if not index % both:
            groups[1, -1] = groups[0, -1]
        first, later = groups.reshape(shape)
        return Item(plan, first, later)

    def shape(self, plan: ItemPlan) -> Shape:
        """See Cutter."""
        return 2 if plan.frames else 1, plan.patches, 3 * self.sizing.patch_size**2

    def cut(self, image: Tensor, resized: Size) -> Tensor:
        """uint8 [3, height, width] to uint8 patches of a size, in the tower's order."""
        return packed.patchify(image, resized, self.sizing.patch_size, self.sizing.merge_size)


class WindowedCutter(PackedCutter):
    """Window after window within each grid (Qwen2.5-VL)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.windows = lru_cache(packed_tower.CACHED_GRIDS)(partial(qwen25vl.windows_of_grid, spec))

    def cut(self, image: Tensor, resized: Size) -> Tensor:
        """See PackedCutter."""
        patches = super().cut(image, resized)
        patch = self.sizing.patch_size
        order, _ = self.windows(resized.height // patch, resized.width // patch)
        return patches.view(len(order), -1)[order].view(patches.shape)


class FrameCutter(PackedCutter):
    """Videos frame after frame (Kimi-K2.5)."""

    def cut_video(self, clip: Clip, frames: Iterable[Tensor]) -> Item:
        """See VideoCutter."""
        assert self.spec.video, "a video for a checkpoint that takes none. This is a bug."
        plan, resized = self.spec.video.plan(clip), self.spec.video.resized(clip.size, clip.frames)
        return Item(plan, torch.cat([self.cut(frame, resized) for frame in frames]).numpy())

    def shape(self, plan: ItemPlan) -> Shape:
        """See Cutter."""
        return 1, *super().shape(plan)[1:]


class TileCutter:
    """Tiles in raster order, the one that shows the whole image last; of a video a tile a frame."""

    def __init__(self, spec: ModelSpec, mode: packed.Resample = "bicubic") -> None:
        self.spec = spec
        self.sizing = tiled.tile_sizing(spec)
        self.mode = mode

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Tensor]:
        """See Cutter."""
        return self.sizing.plan(size_of(image)), tiled.patchify(image, self.sizing, self.mode)

    def cut_video(self, clip: Clip, frames: Iterable[Tensor]) -> Item:
        """See VideoCutter."""
        assert self.spec.video, "a video for a family that takes none. This is a bug."
        tiles = [self.frame(frame) for frame in frames]
        return Item(self.spec.video.plan(clip), torch.cat(tiles).numpy())

    def shape(self, plan: ItemPlan) -> Shape:
        """See Cutter."""
        return 1, plan.patches, 3 * self.sizing.patch_size**2

    def frame(self, frame: Tensor) -> Tensor:
        """The patches of a frame of a video."""
        side = Size(self.sizing.tile_pixels, self.sizing.tile_pixels)
        return tiled.cut(packed.resize(frame, side, self.mode), self.sizing)


class AnyresCutter(TileCutter):
    """The tile that shows the whole image, then those of the canvas (LLaVA-OneVision)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        if not isinstance(spec.sizing, AnyresSizing):
            raise CheckpointError(f"model.id {spec.id!r}: this family needs an AnyresSizing")
        self.anyres = spec.sizing

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Tensor]:
        """See Cutter."""
        return self.anyres.plan(size_of(image)), llava_onevision.patchify(image, self.anyres)

    def frame(self, frame: Tensor) -> Tensor:
        """See TileCutter."""
        return llava_onevision.tile_of(frame, self.anyres)


class CropCutter:
    """The whole image, then its crops in raster order; patches row by row (DeepSeek-OCR)."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.sizing = crop_sizing(spec)

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Tensor]:
        """See Cutter."""
        patches = views.patchify(image, self.sizing, self.spec.mean)
        return self.sizing.plan(size_of(image)), patches

    def shape(self, plan: ItemPlan) -> Shape:
        """See Cutter."""
        return 1, plan.patches, 3 * self.sizing.crops.patch_size**2


class WindowCutter:
    """The whole view, then the crops, row by row (Step3)."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.sizing = window_sizing(spec)

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Tensor]:
        """See Cutter."""
        return self.sizing.plan(size_of(image)), step_tower.patchify(image, self.sizing)

    def shape(self, plan: ItemPlan) -> Shape:
        """See Cutter."""
        return 1, plan.patches, 3 * self.sizing.patch_size**2


def size_of(image: Tensor) -> Size:
    """Of uint8 [3, height, width]."""
    return Size(width=image.shape[2], height=image.shape[1])


BILINEAR_TILES = partial(TileCutter, mode="bilinear")

OTHERS: Mapping[str, Callable[[ModelSpec], Cutter]] = {
    "qwen2_5_vl": WindowedCutter,
    "kimi_k25": FrameCutter,
    "gemma3": BILINEAR_TILES,
    "llama4": BILINEAR_TILES,
    "llava_onevision": AnyresCutter,
    "llava_qwen": AnyresCutter,
    "deepseek_ocr": CropCutter,
    "step3p7": WindowCutter,
    "step3_vl": WindowCutter,
}
"""By family; those of merge blocks have PackedCutter, those of tiles TileCutter."""


def cutter_of(spec: ModelSpec) -> Cutter:
    """The family's. Raises CheckpointError for a sizing that it cannot have."""
    packs = PackedCutter if isinstance(spec.sizing, BlockSizing) else TileCutter
    return OTHERS.get(spec.family, packs)(spec)
