"""What an image of LLaVA-OneVision will cost: all of it as one tile, and tiles of a padded canvas.

The canvas is one of a list. What only pads it gives no rows, a canvas of many tiles is scaled down
in rows, and each row of tokens ends in a newline: an item has fewer rows than it has tokens
computed. A frame of a video is one tile, pooled. Pure: no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.errors import TooLarge
from actors.spec.tiling import Layout, TileSizing
from actors.spec.video import VideoSizing
from actors.types import Clip, ItemPlan, Size

POOLED = 2
"""A frame has half as many rows and columns of tokens as a tile, rounded up."""

SCALED_OVER = 1.1
"""Rows and columns are scaled down where they are longer than they should be by more than that."""


@dataclass(frozen=True, slots=True)
class AnyresSizing(TileSizing):
    """See TileSizing. The tile that shows the whole image comes first, and is always there."""

    picture_pixels: int
    """The side of a tile on the canvas. Pixels that make no whole patch are left out of it, on the
    right and below."""
    canvases: tuple[Layout, ...]
    """In the order of the list: of equally good ones the first is taken."""
    most_tiles: int
    """Tokens of so many tiles are left of a canvas, about."""

    def layout(self, size: Size) -> Layout:
        """transformers.image_processing_utils: select_best_resolution. Raises TooLarge."""
        area, side = size.width * size.height, self.picture_pixels
        best, most, least_wasted = None, 0, 0
        for rows, columns in self.canvases:
            width, height = columns * side, rows * side
            scale = min(width / size.width, height / size.height)
            shown = min(int(size.width * scale) * int(size.height * scale), area)
            wasted = width * height - shown
            if shown > most or (shown == most and best and wasted < least_wasted):
                best, most, least_wasted = (rows, columns), shown, wasted
        if best is None:
            raise TooLarge(
                f"an image of {size.width} x {size.height} pixels has nothing left of a side on "
                "any canvas of this model: crop it"
            )
        return best

    def resized(self, size: Size) -> Size:
        """transformers.image_processing_utils: get_patch_output_size."""
        rows, columns = self.layout(size)
        width, height = columns * self.picture_pixels, rows * self.picture_pixels
        across, down = width / size.width, height / size.height
        if across < down:
            return Size(width, min(math.ceil(size.height * across), height))
        return Size(min(math.ceil(size.width * down), width), height)

    def corner(self, size: Size) -> tuple[int, int]:
        """Where on the canvas the resized image begins: it is in the middle."""
        rows, columns = self.layout(size)
        resized = self.resized(size)
        free = columns * self.picture_pixels - resized.width
        return free // 2, (rows * self.picture_pixels - resized.height) // 2

    def kept(self, size: Size) -> Layout:
        """Rows and columns of tokens that show the image: transformers: unpad_image."""
        rows, columns = (tiles * self.side_patches for tiles in self.layout(size))
        if size.width / size.height > columns / rows:
            shown = int(round(size.height * (columns / size.width), 7))
            return rows - (rows - shown) // 2 * 2, columns
        shown = int(round(size.width * (rows / size.height), 7))
        return rows, columns - (columns - shown) // 2 * 2

    def scaled(self, kept: Layout) -> Layout:
        """What is left of those: transformers: pack_image_features."""
        rows, columns = kept
        ratio = math.sqrt(rows * columns / (self.most_tiles * self.tile_tokens))
        if ratio <= SCALED_OVER:
            return kept
        return int(rows // ratio), int(columns // ratio)

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is the canvas; rows are those of the whole, of what is kept, and newlines."""
        (rows, columns), side, kept = self.layout(size), self.side_patches, self.kept(size)
        down, across = self.scaled(kept)
        tiles = rows * columns + 1
        return ItemPlan(
            grid_thw=(1, rows * side, columns * side),
            patches=tiles * side**2,
            tokens=self.tile_tokens + down * (across + 1),
            path_tokens=(tiles * self.tile_tokens,),
            kept=kept,
        )

    def token_range(self) -> tuple[int, int]:
        """One tile, as a frame of a video is; and the largest canvas with the whole."""
        return self.tile_tokens, (self.max_tiles + 1) * self.tile_tokens


@dataclass(frozen=True, slots=True)
class PooledFrames(VideoSizing):
    """Each frame fills one tile and is pooled; a newline ends the video (LLaVA-OneVision)."""

    picture_pixels: int

    @property
    def side(self) -> int:
        """Rows, or columns, of tokens of a frame before they are pooled."""
        return self.picture_pixels // self.patch_size

    @property
    def frame_side(self) -> int:
        """And afterwards."""
        return -(-self.side // POOLED)

    def resized(self, size: Size, frames: int) -> Size:
        """The tile's."""
        return Size(self.picture_pixels, self.picture_pixels)

    def longest_side_patches(self) -> int:
        """See VideoSizing."""
        return self.side

    def plan(self, clip: Clip) -> ItemPlan:
        """See VideoSizing."""
        frames = len(self.indices(clip))
        computed = frames * self.side**2
        return ItemPlan(
            grid_thw=(frames, self.side, self.side),
            patches=computed,
            tokens=frames * self.frame_side**2 + 1,
            path_tokens=(computed,),
            frames=frames,
        )
