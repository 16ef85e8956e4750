"""Sizings in tiles: an image becomes a canvas of square tiles. Pure: no torch.

A tile is one attention segment and gives a fixed number of tokens. If there is more than one,
another tile (the overview) shows the whole image once more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np

from actors.errors import TooLarge
from actors.spec.sizing import MOST_ITEMS_A_BUDGET, Defaults, Largest
from actors.types import ItemPlan, ProcessorKwargs, Size

TILES_PER_BUDGET = 16
"""Tiles of the default largest budget if every image is one tile, so that images share a graph."""

SCALED_OVER = 1.1
"""LLaVA-OneVision scales rows and columns down only if they are too long by more than this
factor."""

COVERED_OVER = 0.9
"""Ovis 2 takes the fewest tiles that keep a larger share of the image's area."""
CACHED_PARTITIONS = 256

MOST_TILES = 10_000
"""The limit on the tiles of an image, because all their layouts are tried. No model has as many."""

Layout = tuple[int, int]  # rows and columns of tiles


@dataclass(frozen=True, slots=True)
class TileSizing(ABC):
    """How a tile is divided. Subclasses lay out the tiles. See Sizing."""

    tile_pixels: int  # the side of a tile
    patch_size: int
    merge_size: int  # merge_size ** 2 patches give one token (pixel shuffle)
    max_tiles: int  # without the overview

    overview_first: ClassVar[bool] = False
    """The overview precedes the tiles."""

    @abstractmethod
    def layout(self, size: Size) -> Layout:
        """The canvas for an image of this size."""

    @abstractmethod
    def resized(self, size: Size) -> Size:
        """The size of the image on its canvas; the rest is black."""

    def corner(self, size: Size) -> tuple[int, int]:
        """Left and upper edge of the canvas on the resized image, in pixels."""
        return 0, 0

    @property
    def side_patches(self) -> int:
        return self.tile_pixels // self.patch_size

    @property
    def token_side(self) -> int:
        """Tokens per side of a tile."""
        return self.side_patches // self.merge_size

    @property
    def tile_tokens(self) -> int:
        return self.token_side**2

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is that of the canvas without the overview, so that the layout follows from
        it."""
        rows, columns = self.layout(size)
        tiles = with_overview(rows * columns)
        tokens = tiles * self.tile_tokens
        grid = (1, rows * self.side_patches, columns * self.side_patches)
        return ItemPlan(grid, tiles * self.side_patches**2, tokens, (tokens,))

    def token_range(self) -> tuple[int, int]:
        """Every budget in between is a number of whole tiles."""
        return self.tile_tokens, with_overview(self.max_tiles) * self.tile_tokens

    def defaults(self) -> Defaults:
        return {}

    def largest(self, tokens: int) -> Largest:
        return {}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return replace(self, max_tiles=kwargs.max_patches or self.max_tiles)


@dataclass(frozen=True, slots=True)
class CutTiles(TileSizing):
    """As many tiles as suit the image, up to the processor's `max_patches`."""

    def defaults(self) -> Defaults:
        """Empty for a model that sees every image as one tile (Gemma 3)."""
        return {"max_patches": self.max_tiles} if self.max_tiles > 1 else {}

    def largest(self, tokens: int) -> Largest:
        """One tile of the tokens is the overview."""
        most = max(1, tokens // self.tile_tokens - 1)
        return dict.fromkeys(self.defaults(), most)


@dataclass(frozen=True, slots=True)
class StretchedTiles(CutTiles):
    """Stretches the image to the canvas with the nearest aspect ratio (InternVL)."""

    min_tiles: int

    def layout(self, size: Size) -> Layout:
        return nearest_canvas(size, self.tile_pixels, self.min_tiles, self.max_tiles)

    def resized(self, size: Size) -> Size:
        rows, columns = self.layout(size)
        return Size(columns * self.tile_pixels, rows * self.tile_pixels)


@dataclass(frozen=True, slots=True)
class CoveringTiles(StretchedTiles):
    """Stretches the image to the canvas that enlarges it least, or else shrinks it least (Cohere 2
    Vision). `min_tiles` is not read."""

    def layout(self, size: Size) -> Layout:
        """transformers.models.cohere2_vision: get_optimal_tiled_canvas."""
        scales = {
            (rows, columns): min(
                columns * self.tile_pixels / size.width, rows * self.tile_pixels / size.height
            )
            for rows, columns in layouts(1, self.max_tiles)
        }
        enlarging = [canvas for canvas, scale in scales.items() if scale >= 1]
        if enlarging:
            return min(enlarging, key=scales.__getitem__)
        return max(scales, key=scales.__getitem__)


@dataclass(frozen=True, slots=True)
class PartitionedTiles(CutTiles):
    """Stretches the image to the canvas of the fewest tiles that nearly keep its size (Ovis 2)."""

    overview_first: ClassVar[bool] = True

    def layout(self, size: Size) -> Layout:
        """The processor swaps the rows and columns of the best partition, so a wide image has a
        canvas that is as high as the partition is wide."""
        down, across = partition(size, self.tile_pixels, self.max_tiles)
        return across, down

    def resized(self, size: Size) -> Size:
        rows, columns = self.layout(size)
        return Size(columns * self.tile_pixels, rows * self.tile_pixels)


@dataclass(frozen=True, slots=True)
class PaddedTiles(CutTiles):
    """Pads the image to the canvas that it fits best, and keeps its aspect ratio (Llama 4)."""

    precision: ClassVar[type[np.floating]] = np.float32
    """As in transformers: canvases tie after rounding."""

    def layout(self, size: Size) -> Layout:
        """transformers.models.llama4: get_best_fit, without `resize_to_max_canvas`."""
        canvases = layouts(1, self.max_tiles)
        ratios = np.array(canvases) * self.tile_pixels / np.array([size.height, size.width])
        scales = ratios.astype(self.precision).min(1)
        enlarging = scales[scales >= 1]
        scale = enlarging.min() if len(enlarging) else scales.max()
        fitting = [canvas for canvas, one in zip(canvases, scales, strict=True) if one == scale]
        return min(fitting, key=lambda canvas: canvas[0] * canvas[1])

    def resized(self, size: Size) -> Size:
        """transformers.models.llama4: get_max_res_without_distortion.

        Enlarges only images that are smaller than a tile.
        """
        rows, columns = self.layout(size)
        height = min(max(size.height, self.tile_pixels), rows * self.tile_pixels)
        width = min(max(size.width, self.tile_pixels), columns * self.tile_pixels)
        across, down = width / size.width, height / size.height
        if across < down:
            return Size(width, max(1, min(math.floor(size.height * across), height)))
        return Size(max(1, min(math.floor(size.width * down), width)), height)


@dataclass(frozen=True, slots=True)
class FilledTiles(PaddedTiles):
    """Like PaddedTiles, without an overview. `max_tiles` are computed for every image: empty ones
    follow those that show it (Llama 3.2 Vision). transformers.models.mllama has the same rules:
    get_optimal_tiled_canvas and get_image_size_fit_to_canvas."""

    precision = np.float64

    @property
    def aspects(self) -> list[Layout]:
        """All canvases, as the tower numbers them; transformers: supported_aspect_ratios."""
        return sorted(layouts(1, self.max_tiles))

    @property
    def tile_tokens(self) -> int:
        """The class token of a tile, and its patches."""
        return 1 + self.side_patches**2

    def plan(self, size: Size) -> ItemPlan:
        rows, columns = self.layout(size)
        return ItemPlan(
            grid_thw=(1, rows * self.side_patches, columns * self.side_patches),
            patches=self.max_tiles * self.side_patches**2,
            tokens=rows * columns * self.tile_tokens,
            path_tokens=(self.max_tiles * self.tile_tokens,),
        )

    def token_range(self) -> tuple[int, int]:
        """The largest budget holds MOST_ITEMS_A_BUDGET images, which all have the same size."""
        computed = self.max_tiles * self.tile_tokens
        return computed, MOST_ITEMS_A_BUDGET * computed

    def defaults(self) -> Defaults:
        return {}


@dataclass(frozen=True, slots=True)
class OneTile(TileSizing):
    """Every image is one tile, cut from a square picture of it (SigLIP, CLIP).

    Pixels of the picture that fill no whole patch are dropped on the right and at the bottom.
    """

    picture_pixels: int
    """The side of the picture."""
    cropped: bool
    """True: the picture is the centre of the image, whose shorter side it fills unless
    `shorter_pixels` is more. False: the picture is all of the image, stretched."""
    class_tokens: int
    """Rows of the embedding before those of the patches."""
    pooled: bool = False
    """The tile gives one vector instead of the rows of its tokens."""
    paths: int = 1
    """How many paths the model has. Images take the first."""
    shorter_pixels: int | None = None
    """The shorter side of the image from which the picture is cropped. None: the picture's side."""

    def plan(self, size: Size) -> ItemPlan:
        plan = TileSizing.plan(self, size)  # super() does not work with slots
        tokens = (plan.tokens, *[0] * (self.paths - 1))
        return replace(plan, tokens=1 if self.pooled else plan.tokens, path_tokens=tokens)

    def layout(self, size: Size) -> Layout:
        return 1, 1

    def resized(self, size: Size) -> Size:
        """transformers: get_resize_output_image_size, with a shortest edge."""
        side = self.picture_pixels
        if not self.cropped:
            return Size(side, side)
        side = self.shorter_pixels or side
        if size.width <= size.height:
            return Size(side, side * size.height // size.width)
        return Size(side * size.width // size.height, side)

    def corner(self, size: Size) -> tuple[int, int]:
        """transformers: center_crop."""
        resized, side = self.resized(size), self.picture_pixels
        return (resized.width - side) // 2, (resized.height - side) // 2

    @property
    def tile_tokens(self) -> int:
        """The tokens of its patches, and the class tokens."""
        return self.class_tokens + self.token_side**2

    def token_range(self) -> tuple[int, int]:
        """The largest budget holds TILES_PER_BUDGET images, as they are small."""
        return self.tile_tokens, TILES_PER_BUDGET * self.tile_tokens


@dataclass(frozen=True, slots=True)
class CentredTile(OneTile):
    """All of the image, in the middle of a square of the mean's colour (Janus)."""

    shortest_pixels: int = 14
    """The least that a side is shrunk to."""

    def resized(self, size: Size) -> Size:
        """transformers.models.janus: JanusImageProcessor.resize."""
        scale = self.tile_pixels / max(size.width, size.height)
        width, height = (round(side * scale) for side in (size.width, size.height))
        return Size(max(width, self.shortest_pixels), max(height, self.shortest_pixels))

    def corner(self, size: Size) -> tuple[int, int]:
        """Left and upper edge of the resized image on the square."""
        resized, side = self.resized(size), self.tile_pixels
        return (side - resized.width) // 2, (side - resized.height) // 2


@dataclass(frozen=True, slots=True)
class AnyresSizing(TileSizing):
    """Pads the image to one of a list of canvases, after the overview (LLaVA-OneVision).

    An image has fewer rows than computed tokens: padding gives no rows, and the rows and columns of
    tokens of a canvas of many tiles are scaled down. Each row of tokens ends in a newline token.
    """

    picture_pixels: int
    """The side of a tile on the canvas. Pixels that fill no whole patch are dropped on the right
    and at the bottom of each."""
    canvases: tuple[Layout, ...]
    """In order of preference: the first of equally good ones is taken."""
    most_tiles: int
    """Canvases are scaled down to about the tokens of this many tiles."""

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
        """Left and upper edge of the resized image, which is centred on its canvas, in pixels."""
        rows, columns = self.layout(size)
        resized = self.resized(size)
        free = columns * self.picture_pixels - resized.width
        return free // 2, (rows * self.picture_pixels - resized.height) // 2

    def kept(self, size: Size) -> Layout:
        """Rows and columns of tokens that show the image; transformers: unpad_image."""
        rows, columns = (tiles * self.token_side for tiles in self.layout(size))
        if size.width / size.height > columns / rows:
            shown = int(round(size.height * (columns / size.width), 7))
            return rows - (rows - shown) // 2 * 2, columns
        shown = int(round(size.width * (rows / size.height), 7))
        return rows, columns - (columns - shown) // 2 * 2

    def scaled(self, kept: Layout) -> Layout:
        """Rows and columns of tokens after scaling down; transformers: pack_image_features."""
        rows, columns = kept
        ratio = math.sqrt(rows * columns / (self.most_tiles * self.tile_tokens))
        if ratio <= SCALED_OVER:
            return kept
        return int(rows // ratio), int(columns // ratio)

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is the canvas; tokens are the overview, the rest and newlines."""
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
        """One tile, as for a frame of a video, to the largest canvas with overview."""
        return self.tile_tokens, (self.max_tiles + 1) * self.tile_tokens


@dataclass(frozen=True, slots=True)
class SplitTiles(TileSizing):
    """Scales the longer side to a length, then stretches both to whole tiles (Idefics3)."""

    picture_pixels: int
    """As in AnyresSizing."""
    longest_pixels: int
    """The length of the longer side, which is whole tiles."""

    def fitted(self, size: Size) -> Size:
        """transformers.models.idefics3: get_resize_output_image_size."""
        longest = self.longest_pixels
        if size.width >= size.height:
            return Size(longest, even(longest / (size.width / size.height)))
        return Size(even(longest * (size.width / size.height)), longest)

    def layout(self, size: Size) -> Layout:
        """transformers.models.idefics3: resize_for_vision_encoder, split_images."""
        fitted, side = self.fitted(size), self.picture_pixels
        return math.ceil(fitted.height / side), math.ceil(fitted.width / side)

    def resized(self, size: Size) -> Size:
        rows, columns = self.layout(size)
        return Size(columns * self.picture_pixels, rows * self.picture_pixels)


@dataclass(frozen=True, slots=True)
class OverlappingTiles(CutTiles):
    """The overview, then overlapping tiles of a canvas that the image is stretched to. Windows of
    patches are pooled to tokens, each patch of the canvas once (Molmo 2)."""

    window: int
    """The side of a window in patches."""
    margins: tuple[int, int]
    """Rows, and columns, of patches that a tile shares with the one before and the one after."""

    @property
    def step_patches(self) -> int:
        """Patches from one tile to the next."""
        return self.side_patches - sum(self.margins)

    @property
    def tile_tokens(self) -> int:
        """As many as the overview gives. Other tiles give fewer."""
        return windows(self.side_patches, self.window) ** 2

    def layout(self, size: Size) -> Layout:
        """transformers.models.molmo2: select_tiling, in float32 as there."""
        margin, step = (count * self.patch_size for count in (sum(self.margins), self.step_patches))
        found = sorted(layouts(1, self.max_tiles), key=lambda one: (one[0] * one[1], one[0]))
        shown = np.array([size.height - margin, size.width - margin], dtype=np.float32)
        with np.errstate(divide="ignore"):
            scales = ((np.array(found) * step).astype(np.float32) / shown).min(1)
        if (scales < 1).all():
            return found[int(scales.argmax())]
        return found[int(np.where(scales < 1, np.inf, scales).argmin())]

    def canvas(self, size: Size) -> Layout:
        """Rows and columns of patches of the canvas."""
        rows, columns = (
            tiles * self.step_patches + sum(self.margins) for tiles in self.layout(size)
        )
        return rows, columns

    def resized(self, size: Size) -> Size:
        rows, columns = self.canvas(size)
        return Size(columns * self.patch_size, rows * self.patch_size)

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is the canvas; tokens are the overview's, then those of the canvas."""
        rows, columns = self.canvas(size)
        down, across = self.layout(size)
        tiles = 1 + down * across
        return ItemPlan(
            grid_thw=(1, rows, columns),
            patches=tiles * self.side_patches**2,
            tokens=self.tile_tokens + windows(rows, self.window) * windows(columns, self.window),
            path_tokens=(tiles * self.tile_tokens,),
        )

    def token_range(self) -> tuple[int, int]:
        """One tile, as for a frame of a video, to the most, with the overview."""
        return self.tile_tokens, (self.max_tiles + 1) * self.tile_tokens


def windows(patches: int, window: int) -> int:
    """The windows along a side with so many patches. The first and the last may be smaller."""
    return -(-patches // window)


def nearest_canvas(size: Size, tile_pixels: int, least: int, most: int) -> Layout:
    """The canvas of `least` to `most` tiles whose aspect ratio is nearest to the image's.
    transformers.models.got_ocr2: get_optimal_tiled_canvas."""
    aspect, area = size.width / size.height, size.width * size.height
    best, best_distance = (1, 1), math.inf
    for rows, columns in layouts(least, most):
        distance = abs(aspect - columns / rows)
        # Of two that are equally near, the larger one, unless it has over twice the image's area.
        ample = area > 0.5 * tile_pixels**2 * rows * columns
        if distance < best_distance or (distance == best_distance and ample):
            best, best_distance = (rows, columns), distance
    return best


@lru_cache(CACHED_PARTITIONS)
def partition(size: Size, tile_pixels: int, most: int) -> Layout:
    """Divides an image into the fewest parts, up to `most`, that nearly keep their size as tiles:
    rows and columns. transformers.models.ovis2: get_min_tile_covering_grid."""
    kept = {
        (down, across): kept_area(size, down, across, tile_pixels) / (size.width * size.height)
        for across, down in layouts(1, most)
    }
    enough = [one for one, share in kept.items() if share > COVERED_OVER]
    if enough:
        return min(enough, key=lambda one: (one[0] * one[1], -kept[one]))
    return min(kept, key=lambda one: (-kept[one], one[0] * one[1]))


def kept_area(size: Size, down: int, across: int, tile_pixels: int) -> float:
    """What is left of the image's area if each of down x across parts is shrunk until no side is
    longer than a tile."""

    def sides(pixels: int, parts: int) -> list[int]:
        return [pixels // parts] * (parts - 1) + [pixels - pixels // parts * (parts - 1)]

    def left(width: int, height: int) -> float:
        long, short = max(width, height), min(width, height)
        return long * short if long <= tile_pixels else tile_pixels * (short / long * tile_pixels)

    columns = sides(size.width, across)
    return sum(left(width, height) for height in sides(size.height, down) for width in columns)


def even(pixels: float) -> int:
    """Rounds down to an integer, then up to an even one; at least 1."""
    return max(int(pixels) + int(pixels) % 2, 1)


def with_overview(tiles: int) -> int:
    """Tiles to encode for a canvas of this many."""
    return tiles + 1 if tiles > 1 else 1


@lru_cache
def layouts(least: int, most: int) -> tuple[Layout, ...]:
    """All layouts with `least` to `most` tiles: fewer first, then narrower first. Raises
    ValueError."""
    if most > MOST_TILES:
        raise ValueError(f"{most} tiles of an image")
    found = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= least
    ]
    return tuple(sorted(found, key=lambda layout: layout[0] * layout[1]))
