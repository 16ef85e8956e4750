"""What an image of the tile families will cost: a canvas of square tiles, and the whole once more.

An image is resized onto rows x columns tiles; with more than one, a tile that shows the whole image
follows them. A tile is one attention segment and gives a fixed number of tokens. Pure: no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from actors.types import ItemPlan, Size

TILES_A_BUDGET = 16
"""Where images are one tile each, so that they share a graph."""

Layout = tuple[int, int]
"""Rows and columns of tiles."""


@dataclass(frozen=True, slots=True)
class TileSizing(ABC):
    """How a tile is cut up, whatever the rule that lays the tiles out. See Sizing."""

    tile_pixels: int
    """The side of a tile."""
    patch_size: int
    merge_size: int
    """merge_size ** 2 patches give a token (pixel shuffle)."""
    max_tiles: int
    """Without the one that shows the whole image."""

    @abstractmethod
    def layout(self, size: Size) -> Layout:
        """The canvas of an image of this size."""

    @abstractmethod
    def resized(self, size: Size) -> Size:
        """The size of the image on its canvas, from the upper left corner; the rest is black."""

    def corner(self, size: Size) -> tuple[int, int]:
        """Where on the resized image its canvas begins: pixels from the left and from above."""
        return 0, 0

    @property
    def side_patches(self) -> int:
        """Rows, or columns, of patches in a tile."""
        return self.tile_pixels // self.patch_size

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return (self.side_patches // self.merge_size) ** 2

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is the canvas, so that its layout can be told; the rest counts every tile."""
        rows, columns = self.layout(size)
        tiles = with_overview(rows * columns)
        tokens = tiles * self.tile_tokens
        grid = (1, rows * self.side_patches, columns * self.side_patches)
        return ItemPlan(grid, tiles * self.side_patches**2, tokens, (tokens,))

    def token_range(self) -> tuple[int, int]:
        """One tile, and the largest image: every budget in between is whole tiles."""
        return self.tile_tokens, with_overview(self.max_tiles) * self.tile_tokens


@dataclass(frozen=True, slots=True)
class StretchedTiles(TileSizing):
    """The image fills the canvas of the nearest shape (InternVL)."""

    min_tiles: int

    def layout(self, size: Size) -> Layout:
        """transformers.models.got_ocr2: get_optimal_tiled_canvas."""
        aspect, area = size.width / size.height, size.width * size.height
        best, best_distance = (1, 1), math.inf
        for rows, columns in layouts(self.min_tiles, self.max_tiles):
            distance = abs(aspect - columns / rows)
            # Of the same shape, the larger canvas, unless it is over twice the image.
            ample = area > 0.5 * self.tile_pixels**2 * rows * columns
            if distance < best_distance or (distance == best_distance and ample):
                best, best_distance = (rows, columns), distance
        return best

    def resized(self, size: Size) -> Size:
        """All of the canvas."""
        rows, columns = self.layout(size)
        return Size(columns * self.tile_pixels, rows * self.tile_pixels)


@dataclass(frozen=True, slots=True)
class PaddedTiles(TileSizing):
    """The image keeps its shape on the canvas that it fits best (Llama 4)."""

    def layout(self, size: Size) -> Layout:
        """transformers.models.llama4: get_best_fit, without `resize_to_max_canvas`."""
        canvases = layouts(1, self.max_tiles)
        # float32 as there: ties between canvases are ties after rounding.
        ratios = np.array(canvases) * self.tile_pixels / np.array([size.height, size.width])
        scales = ratios.astype(np.float32).min(1)
        enlarging = scales[scales >= 1]
        scale = enlarging.min() if len(enlarging) else scales.max()
        fitting = [canvas for canvas, one in zip(canvases, scales, strict=True) if one == scale]
        return min(fitting, key=lambda canvas: canvas[0] * canvas[1])

    def resized(self, size: Size) -> Size:
        """transformers.models.llama4: get_max_res_without_distortion.

        Never enlarged, but for an image smaller than a tile.
        """
        rows, columns = self.layout(size)
        height = min(max(size.height, self.tile_pixels), rows * self.tile_pixels)
        width = min(max(size.width, self.tile_pixels), columns * self.tile_pixels)
        across, down = width / size.width, height / size.height
        if across < down:
            return Size(width, max(1, min(math.floor(size.height * across), height)))
        return Size(max(1, min(math.floor(size.width * down), width)), height)


@dataclass(frozen=True, slots=True)
class OneTile(TileSizing):
    """Every image is one tile, cut from a square picture of it (SigLIP, CLIP).

    Of the picture, pixels that make no whole patch are left out, on the right and below.
    """

    picture_pixels: int
    """The side of the picture."""
    cropped: bool
    """The picture is the middle of the image, whose shorter side it fills; otherwise all of it,
    stretched."""
    class_tokens: int
    """Rows before those of the patches."""

    def layout(self, size: Size) -> Layout:
        """One tile."""
        return 1, 1

    def resized(self, size: Size) -> Size:
        """transformers: get_resize_output_image_size, with a shortest edge."""
        side = self.picture_pixels
        if not self.cropped:
            return Size(side, side)
        if size.width <= size.height:
            return Size(side, side * size.height // size.width)
        return Size(side * size.width // size.height, side)

    def corner(self, size: Size) -> tuple[int, int]:
        """transformers: center_crop."""
        resized, side = self.resized(size), self.picture_pixels
        return (resized.width - side) // 2, (resized.height - side) // 2

    @property
    def tile_tokens(self) -> int:
        """Of its patches, and of its class."""
        return self.class_tokens + (self.side_patches // self.merge_size) ** 2

    def token_range(self) -> tuple[int, int]:
        """One tile; the largest budget holds TILES_A_BUDGET of them, as they are small."""
        return self.tile_tokens, TILES_A_BUDGET * self.tile_tokens


def with_overview(tiles: int) -> int:
    """Tiles that are encoded for a canvas of so many."""
    return tiles + 1 if tiles > 1 else 1


@lru_cache
def layouts(least: int, most: int) -> tuple[Layout, ...]:
    """All layouts of so many tiles: fewer first, then narrower first."""
    found = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= least
    ]
    return tuple(sorted(found, key=lambda layout: layout[0] * layout[1]))
