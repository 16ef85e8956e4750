"""Sizings with two paths: the whole image as one square view, and crops if it is large.

See sizing.ViewSizing. A view is one attention segment of fixed length; both paths run the same
weights. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from actors.spec.sizing import MAX_ASPECT, Defaults, Largest, NoOptions, check_aspect
from actors.spec.tiles import Layout, StretchedTiles, layouts
from actors.types import ItemPlan, ProcessorKwargs, Size

THIN_PIXELS, THIN_ASPECT = 32, 4
"""Step3 first pads an image to a square if a side is shorter than this, and the aspect ratio
larger."""

LONG_ASPECT = 1.5
"""Step3 cuts an image with a larger aspect ratio even if it fits the view of the whole image."""

ROUNDED_UP = 0.2
"""A remainder of more than this share of a window is a window of its own."""

IMAGES_PER_BUDGET = 32
"""Whole images that Step3's largest budget holds by default. Crop budgets, which double up to the
same number of tokens, then hold 64 crops: all of the largest image, which has at most 49."""


@dataclass(frozen=True, slots=True)
class CropSizing:
    """The crops are tiles of a canvas; each row of tokens ends in a newline (DeepSeek-OCR)."""

    image_pixels: int
    """The side of the view of the whole image, which a separator token follows."""
    crops: StretchedTiles
    """How crops are laid out and divided; the view of the whole image is divided the same way."""

    @property
    def patch_size(self) -> int:
        return self.crops.patch_size

    @property
    def merge_size(self) -> int:
        return self.crops.merge_size

    @property
    def side_patches(self) -> tuple[int, int]:
        return self.image_pixels // self.patch_size, self.crops.side_patches

    @property
    def image_side(self) -> int:
        """Tokens per side of the view of the whole image."""
        return self.side_patches[0] // self.crops.merge_size

    @property
    def crop_side(self) -> int:
        """Tokens per side of a crop."""
        return self.crops.side_patches // self.crops.merge_size

    @property
    def view_tokens(self) -> tuple[int, int]:
        """Includes the newlines of the whole image, which are computed with it."""
        return self.image_side * (self.image_side + 1), self.crops.tile_tokens

    def layout(self, size: Size) -> Layout | None:
        """Rows and columns of crops. None: the image is no larger than one crop and has none."""
        if max(size.width, size.height) <= self.crops.tile_pixels:
            return None
        rows, columns = self.crops.layout(size)
        return (rows, columns) if rows * columns > 1 else None

    def whole(self, size: Size) -> Size:
        """The size of the image in the view of the whole, centred (PIL.ImageOps.contain)."""
        side = self.image_pixels
        if size.width > size.height:
            return Size(side, max(1, round(size.height / size.width * side)))
        return Size(max(1, round(size.width / size.height * side)), side)

    def corner(self, size: Size) -> tuple[int, int]:
        """Left and upper edge of the image in the view of the whole (PIL.ImageOps.pad)."""
        whole, side = self.whole(size), self.image_pixels
        return round((side - whole.width) * 0.5), round((side - whole.height) * 0.5)

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is the canvas of the crops; without crops, the view of the whole."""
        layout = self.layout(size)
        rows, columns = layout or (0, 0)
        image_tokens, crop_tokens = self.view_tokens
        whole, side = self.side_patches
        path_patches = (whole**2, rows * columns * side**2)
        return ItemPlan(
            grid_thw=(1, rows * side, columns * side) if layout else (1, whole, whole),
            patches=sum(path_patches),
            tokens=self.rows(layout),
            path_tokens=(image_tokens, rows * columns * crop_tokens),
            path_patches=path_patches,
        )

    def rows(self, layout: Layout | None) -> int:
        """Rows of the embedding: crops, the whole image, newlines and the separator."""
        whole = self.view_tokens[0] + 1
        if layout is None:
            return whole
        rows, columns = layout
        return whole + rows * self.crop_side * (columns * self.crop_side + 1)

    def largest_budget(self, most: int) -> int:
        """`most`, as published."""
        return most

    def token_range(self) -> tuple[int, int]:
        """An image without crops, and the most crops in the longest column."""
        found = layouts(self.crops.min_tiles, self.crops.max_tiles)
        return self.rows(None), max(map(self.rows, found), default=self.rows(None))

    def defaults(self) -> Defaults:
        return self.crops.defaults()

    def largest(self, tokens: int) -> Largest:
        return dict.fromkeys(self.defaults(), max(1, tokens // self.crops.tile_tokens))

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return replace(self, crops=self.crops.asked(kwargs))


@dataclass(frozen=True, slots=True)
class PlainCrops(CropSizing):
    """Like CropSizing, without newlines (DeepSeek-OCR 2)."""

    @property
    def view_tokens(self) -> tuple[int, int]:
        return self.image_side**2, self.crops.tile_tokens

    def layout(self, size: Size) -> Layout | None:
        """Like CropSizing, but a single crop counts, too: it shows the whole image."""
        if max(size.width, size.height) <= self.crops.tile_pixels:
            return None
        return self.crops.layout(size)

    def whole(self, size: Size) -> Size:
        """transformers: DeepseekOcr2ImageProcessor, as `corner`."""
        scale = self.image_pixels / max(size.width, size.height)
        return Size(max(1, round(size.width * scale)), max(1, round(size.height * scale)))

    def corner(self, size: Size) -> tuple[int, int]:
        whole, side = self.whole(size), self.image_pixels
        return (side - whole.width) // 2, (side - whole.height) // 2

    def rows(self, layout: Layout | None) -> int:
        """Rows of the embedding: crops, the whole image and the separator."""
        rows, columns = layout or (0, 0)
        image_tokens, crop_tokens = self.view_tokens
        return rows * columns * crop_tokens + image_tokens + 1

    def token_range(self) -> tuple[int, int]:
        """An image without crops, and the most crops."""
        return self.rows(None), self.rows((self.crops.max_tiles, 1))


@dataclass(frozen=True, slots=True)
class Windows:
    """How Step3 divides one image."""

    shown: Size
    """The size of the image, padded if it is thin, shrunk if it exceeds the longest side."""
    canvas: Size
    """What the windows cover, resized to whole windows; a side shorter than a window stays."""
    side: int
    """The side of a window in pixels; 0: there are none."""
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class WindowSizing(NoOptions):
    """The crops are square windows, resized to one size (Step3).

    Equal to transformers.models.step3p7: Step3p7ImageProcessor._plan_patches.
    """

    image_pixels: int
    """The side of the view that shows the whole image."""
    crop_pixels: int
    """The side of a crop."""
    longest_pixels: int
    """Images with a longer side are shrunk to it."""
    patch_size: int
    merge_size: int
    """merge_size ** 2 patches give one token."""

    stretches: ClassVar[bool] = True
    """A window that is longer than the image is wide is stretched to a square, not padded."""

    @property
    def side_patches(self) -> tuple[int, int]:
        return self.image_pixels // self.patch_size, self.crop_pixels // self.patch_size

    @property
    def view_tokens(self) -> tuple[int, int]:
        whole, crop = ((side // self.merge_size) ** 2 for side in self.side_patches)
        return whole, crop

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is that of all crops together; without crops, of the whole view."""
        windows = self.windows(size)
        whole, crop = self.side_patches
        crops = windows.rows * windows.columns
        grid = (1, windows.rows * crop, windows.columns * crop) if crops else (1, whole, whole)
        patches = (whole**2, crops * crop**2)
        tokens = (self.view_tokens[0], crops * self.view_tokens[1])
        return ItemPlan(grid, sum(patches), sum(tokens), tokens, path_patches=patches)

    def token_range(self) -> tuple[int, int]:
        """The smallest is the whole view alone."""
        square = self.longest_pixels // self.crop_pixels + 1
        strip = self.longest_pixels // max(1, self.longest_pixels // MAX_ASPECT) + 1
        whole, crop = self.view_tokens
        return whole, whole + max(square**2, strip) * crop

    def largest_budget(self, most: int) -> int:
        """More would use the GPU no better and take more memory."""
        return min(most, IMAGES_PER_BUDGET * self.view_tokens[0])

    def windows(self, size: Size) -> Windows:
        """Raises TooLarge for an aspect ratio over MAX_ASPECT."""
        check_aspect(size)
        width, height = size.width, size.height
        thin = min(width, height) < THIN_PIXELS
        if thin and max(width / height, height / width) > THIN_ASPECT:
            width = height = max(width, height)
        if max(width, height) > self.longest_pixels:
            scale = self.longest_pixels / max(width, height)
            width, height = int(width * scale), int(height * scale)
        shown = Size(width, height)
        side = self.window(max(width, height), min(width, height))
        if not side:
            return Windows(shown, shown, 0, 0, 0)
        canvas = Size(self.snapped(width, side), self.snapped(height, side))
        rows, columns = max(1, canvas.height // side), max(1, canvas.width // side)
        return Windows(shown, canvas, side, rows, columns)

    def window(self, long: int, short: int) -> int:
        """The side of a window for an image with these sides; 0: the whole view is enough."""
        if long <= self.image_pixels:
            return short if long / short > LONG_ASPECT else 0
        return min(short, self.crop_pixels) if long / short > THIN_ASPECT else self.crop_pixels

    def snapped(self, pixels: int, side: int) -> int:
        """A side of the image as whole windows."""
        if pixels < side:
            return pixels
        return side * (pixels // side + (pixels % side > ROUNDED_UP * side))


@dataclass(frozen=True, slots=True)
class PaddedWindows(WindowSizing):
    """Like the first models' own code (ImagePatcher), which rounds and pads differently."""

    stretches: ClassVar[bool] = False

    def snapped(self, pixels: int, side: int) -> int:
        """As that code divides: a remainder of exactly a fifth may count as more than a fifth."""
        if pixels < side:
            return pixels
        ratio = pixels / side
        return side * (int(ratio) + (ratio - pixels // side > ROUNDED_UP))
