"""Sizings in several pictures: the whole image and parts of it, each an attention segment of its
own size (MiniCPM-V, LFM2-VL, Phi-4-multimodal). Pure: no torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from actors.errors import TooLarge
from actors.spec.sizing import (
    MAX_ASPECT,
    BlockSizing,
    Defaults,
    Largest,
    check_aspect,
    smart_resize,
)
from actors.spec.tiles import MOST_TILES, StretchedTiles, nearest_canvas
from actors.types import ItemPlan, ProcessorKwargs, Size

Layout = tuple[int, int]  # rows and columns

LEAST_PIXELS = 10
"""The fewest pixels of a side of an image on Phi-4-multimodal's canvas."""

SQUARISH = 4
"""A bound on the aspect ratio of a slice of an image that is not too long for its slices."""


@dataclass(frozen=True, slots=True)
class SlicedSizing(BlockSizing):
    """The base of the sizings in slices: all slices of an image have one size, the whole image
    another."""

    max_slices: int
    """Without the whole image. 1: there are no slices."""

    whole_first: ClassVar[bool] = True
    """The whole image precedes its slices."""

    @property
    def with_whole(self) -> bool:
        """Whether an image in slices is shown as a whole, too."""
        return True

    @abstractmethod
    def slices(self, size: Size) -> Layout | None:
        """Rows and columns of slices; None: the whole image is enough."""

    @abstractmethod
    def sliced(self, size: Size, layout: Layout) -> Size:
        """The size of a slice."""

    @property
    @abstractmethod
    def least_tokens(self) -> int:
        """A lower bound on the tokens of a picture."""

    @abstractmethod
    def most_tokens(self, slices: int) -> int:
        """An upper bound on the tokens of an image of up to so many slices."""

    def grid(self, size: Size) -> Layout:
        """Rows and columns of patches of a picture that has been resized."""
        return size.height // self.patch_size, size.width // self.patch_size

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is that of all slices together, or of the whole image if there are none."""
        first = self.grid(self.resized(size))
        layout = self.slices(size)
        if layout is None:
            return self.plan_of_grid((1, *first))
        if not self.with_whole:
            first = 0, 0
        rows, columns = self.grid(self.sliced(size, layout))
        grid = (1, layout[0] * rows, layout[1] * columns)
        patches = first[0] * first[1] + grid[1] * grid[2]
        tokens = patches // self.merge_size**2
        return ItemPlan(grid, patches, tokens, (tokens,), kept=(*first, rows, columns))

    def pictures(self, plan: ItemPlan) -> list[Layout]:
        """Rows and columns of patches of each picture, in the order of the patches."""
        _, rows, columns = plan.grid_thw
        if not plan.kept:
            return [(rows, columns)]
        above, across, down, right = plan.kept
        whole = [(above, across)] if above else []
        slices = [(down, right)] * (rows // down * (columns // right))
        return whole + slices if self.whole_first else slices + whole

    def largest_tokens(self) -> int:
        """Raises ValueError for more slices than any model has."""
        if self.max_slices > MOST_TILES:
            raise ValueError(f"{self.max_slices} slices of an image")
        return self.most_tokens(self.max_slices)

    def defaults(self) -> Defaults:
        return {"max_patches": self.max_slices}

    def largest(self, tokens: int) -> Largest:
        more = range(2, MOST_TILES + 1)
        return {"max_patches": 1 + bisect_right(more, tokens, key=self.most_tokens)}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return replace(self, max_slices=kwargs.max_patches or self.max_slices)


@dataclass(frozen=True, slots=True)
class ScaledSlices(SlicedSizing):
    """Scales the whole image, and each of its slices, to about as many pixels as a square
    (MiniCPM-V)."""

    picture_pixels: int
    """The side of that square."""

    def slices(self, size: Size) -> Layout | None:
        """transformers: MiniCPMV4_6ImageProcessor.get_sliced_grid."""
        ratio = size.width * size.height / self.picture_pixels**2
        count = min(math.ceil(ratio), self.max_slices)
        if count <= 1:
            return None
        aspect = math.log(size.width / size.height)
        best, least = (1, 1), math.inf
        for total in (count - 1, count, count + 1):
            if total == 1 or total > self.max_slices:
                continue
            for rows in range(1, total + 1):
                if total % rows:
                    continue
                columns = total // rows
                error = abs(aspect - math.log(columns / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, columns), error
        return best

    def fitted(self, width: float, height: float) -> Size:
        """transformers: MiniCPMV4_6ImageProcessor.find_best_resize, which always scales here."""
        aspect = width / height
        down = int(self.picture_pixels / math.sqrt(aspect))
        block = self.patch_size * self.merge_size
        return Size(whole(int(down * aspect), block), whole(down, block))

    def resized(self, size: Size) -> Size:
        """The size of the whole image. Raises TooLarge for an aspect ratio over MAX_ASPECT."""
        check_aspect(size)
        return self.fitted(size.width, size.height)

    def sliced(self, size: Size, layout: Layout) -> Size:
        """transformers: MiniCPMV4_6ImageProcessor.get_refine_size."""
        rows, columns = layout
        return self.fitted(whole(size.width, columns) / columns, whole(size.height, rows) / rows)

    @property
    def least_tokens(self) -> int:
        return max(1, self.square_tokens // 2)

    @property
    def square_tokens(self) -> int:
        return (self.picture_pixels // (self.patch_size * self.merge_size)) ** 2

    def longest_side_patches(self) -> int:
        blocks = self.picture_pixels / (self.patch_size * self.merge_size)
        return math.ceil(blocks * math.sqrt(MAX_ASPECT) + 1) * self.merge_size

    def most_tokens(self, slices: int) -> int:
        """The tokens of the longest image, and of its slices."""
        counts = range(2, slices + 1)
        return self.longest_tokens(MAX_ASPECT) + max(
            (n * self.longest_tokens(max(SQUARISH, MAX_ASPECT / n)) for n in counts), default=0
        )

    def longest_tokens(self, aspect: float) -> int:
        """An upper bound for a picture of up to this aspect ratio. Its sides are rounded to
        blocks."""
        blocks = self.picture_pixels / (self.patch_size * self.merge_size)
        shorter = max(1.0, blocks / math.sqrt(aspect) + 0.5)
        square = math.ceil((blocks + 0.5) ** 2)
        return max(square, math.ceil(shorter * (blocks * math.sqrt(aspect) + 0.5)))


@dataclass(frozen=True, slots=True)
class SquareSlices(SlicedSizing):
    """Keeps an image at about its own size, or, if it is large, stretches it to a canvas of square
    slices, which precede the whole (LFM2-VL)."""

    min_slices: int
    slice_pixels: int
    """The side of a slice: whole merge blocks."""
    min_tokens: int
    max_tokens: int
    """With `min_tokens`, the range of tokens of the whole image."""
    tolerance: float
    """Only images of more than so many times `max_tokens` have slices."""
    thumbnail: bool
    """An image in slices is shown as a whole, too."""

    whole_first: ClassVar[bool] = False

    @property
    def with_whole(self) -> bool:
        return self.thumbnail

    @property
    def block(self) -> int:
        """Pixels per side of a token."""
        return self.patch_size * self.merge_size

    def slices(self, size: Size) -> Layout | None:
        """transformers: Lfm2VlImageProcessor.resize_and_split. A single slice counts as none,
        because the processor then counts the tokens of the whole image."""
        width, height = (
            max(self.patch_size, round(side / self.block) * self.block)
            for side in (size.width, size.height)
        )
        if width * height <= self.max_tokens * self.block**2 * self.tolerance:
            return None
        layout = nearest_canvas(size, self.slice_pixels, self.min_slices, self.max_slices)
        return layout if layout != (1, 1) else None

    def resized(self, size: Size) -> Size:
        """The size of the whole image. Raises TooLarge for an aspect ratio over MAX_ASPECT."""
        least, most = (tokens * self.block**2 for tokens in (self.min_tokens, self.max_tokens))
        return smart_resize(size, self.block, least, most, least=self.block)

    def sliced(self, size: Size, layout: Layout) -> Size:
        return Size(self.slice_pixels, self.slice_pixels)

    @property
    def slice_tokens(self) -> int:
        return (self.slice_pixels // self.block) ** 2

    @property
    def least_tokens(self) -> int:
        """Shrinking rounds both sides down, each by at most a half."""
        return max(1, min(self.min_tokens, self.max_tokens // 4, self.slice_tokens))

    def longest_side_patches(self) -> int:
        longest = math.sqrt(MAX_ASPECT * max(self.min_tokens, self.max_tokens)) + 1
        sides = self.slice_pixels // self.block, self.max_tokens, math.ceil(longest)
        return max(sides) * self.merge_size

    def most_tokens(self, slices: int) -> int:
        """A side of a long image is at least one token, and enlarging rounds both sides up."""
        least, most = self.min_tokens, self.max_tokens
        longest = math.floor(math.sqrt(MAX_ASPECT * most))
        enlarged = math.floor(least + math.sqrt(MAX_ASPECT * least) + math.sqrt(least) + 1)
        alone = max(most, longest, enlarged)
        in_slices = slices * self.slice_tokens + (alone if self.thumbnail else 0)
        return max(alone, in_slices) if slices > 1 else alone


@dataclass(frozen=True, slots=True)
class PaddedCrops(BlockSizing):
    """The whole image as a square, then square crops of a canvas, whose padding on the right and
    below gives no tokens (Phi-4-multimodal)."""

    picture_pixels: int
    """The side of a crop, and of the whole image: whole merge blocks."""
    max_crops: int

    @property
    def side_patches(self) -> int:
        return self.picture_pixels // self.patch_size

    @property
    def square_tokens(self) -> int:
        return (self.side_patches // self.merge_size) ** 2

    @property
    def least_tokens(self) -> int:
        """A lower bound on the tokens of a picture, because a crop is padded on at most one
        side."""
        return self.side_patches // self.merge_size

    def layout(self, size: Size) -> Layout:
        """Rows and columns of crops; transformers.models.phi4_multimodal: dynamic_preprocess."""
        side = self.picture_pixels
        rows, columns = math.ceil(size.height / side), math.ceil(size.width / side)
        if rows * columns <= self.max_crops:
            return rows, columns
        return StretchedTiles(side, self.patch_size, 1, self.max_crops, min_tiles=1).layout(size)

    def resized(self, size: Size) -> Size:
        """The size of the image on its canvas. Raises TooLarge if too little is left of a side."""
        rows, columns = self.layout(size)
        width, height = columns * self.picture_pixels, rows * self.picture_pixels
        across, down = width / size.width, height / size.height
        if across < down:
            resized = Size(width, int(size.height * across))
        else:
            resized = Size(int(size.width * down), height)
        if min(resized.width, resized.height) < LEAST_PIXELS:
            raise TooLarge(
                f"an image of {size.width} x {size.height} pixels is {resized.width} x "
                f"{resized.height} on its canvas, and {LEAST_PIXELS} is the least: crop it"
            )
        return resized

    def shown(self, size: Size) -> Layout:
        """Rows and columns of patches on the canvas that are not padding alone."""
        resized, (rows, columns) = self.resized(size), self.layout(size)
        below = rows * self.picture_pixels - resized.height
        right = columns * self.picture_pixels - resized.width
        return (
            rows * self.side_patches - below // self.patch_size,
            columns * self.side_patches - right // self.patch_size,
        )

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is that of all crops together, in whole merge blocks; tokens are theirs and
        those of the whole image, a newline after each row, and a separator."""
        kept, merge = self.shown(size), self.merge_size
        down, across = (-(-patches // merge) for patches in kept)
        computed = self.square_tokens + down * across
        side = self.side_patches // merge
        return ItemPlan(
            grid_thw=(1, down * merge, across * merge),
            patches=computed * merge**2,
            tokens=computed + side + 1 + down,
            path_tokens=(computed,),
            kept=kept,
        )

    def longest_side_patches(self) -> int:
        return self.max_crops * self.side_patches

    def largest_tokens(self) -> int:
        return (1 + self.max_crops) * self.square_tokens

    def defaults(self) -> Defaults:
        return {"max_patches": self.max_crops}

    def largest(self, tokens: int) -> Largest:
        return {"max_patches": max(1, tokens // self.square_tokens - 1)}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return replace(self, max_crops=kwargs.max_patches or self.max_crops)


def whole(length: float, divisor: int) -> int:
    """Rounds to the nearest multiple of the divisor, but at least to the divisor."""
    return max(round(length / divisor) * divisor, divisor)
