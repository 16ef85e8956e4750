"""What an image of the Step3 families will cost: all of it once, and windows of it where it is big.

The whole image is resized to one square view. An image that is larger, or long, is also cut into
square windows, row by row; each is resized to one crop. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from actors.errors import TooLarge
from actors.spec.sizing import MAX_ASPECT
from actors.types import ItemPlan, Size

THIN_PIXELS, THIN_ASPECT = 32, 4
"""An image with a side below the one and an aspect over the other is first padded to a square."""

LONG_ASPECT = 1.5
"""Over it even an image that fits the whole view is cut."""

ROUNDED_UP = 0.2
"""A rest of more than so much of a window is a window of its own."""

IMAGES_A_BUDGET = 32
"""Whole images that the largest budget holds by default. Doubled budgets of crops up to as many
tokens hold 64 crops: all of the largest image, which has 49 at most."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How one image is cut."""

    shown: Size
    """All that is shown, padded if it is thin, shrunk if it is beyond the longest side."""
    canvas: Size
    """What the windows cover, resized to whole windows; a side shorter than a window stays."""
    side: int
    """Pixels of a window's side; 0: there are none."""
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class WindowSizing:
    """transformers.models.step3p7: Step3p7ImageProcessor._plan_patches. See ViewSizing."""

    image_pixels: int
    """The side of the view that shows the whole image."""
    crop_pixels: int
    """The side of a crop."""
    longest_pixels: int
    """Larger images are shrunk to it."""
    patch_size: int
    merge_size: int
    """merge_size ** 2 patches give a token."""

    stretches: ClassVar[bool] = True
    """A window that is longer than the image is wide is stretched to a square, not padded."""

    @property
    def side_patches(self) -> tuple[int, int]:
        """Rows, or columns, of patches in the whole view, and in a crop."""
        return self.image_pixels // self.patch_size, self.crop_pixels // self.patch_size

    @property
    def view_tokens(self) -> tuple[int, int]:
        """See ViewSizing."""
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
        """The whole view alone, and a bound on the tokens of any image that is admitted."""
        square = self.longest_pixels // self.crop_pixels + 1
        strip = self.longest_pixels // max(1, self.longest_pixels // MAX_ASPECT) + 1
        whole, crop = self.view_tokens
        return whole, whole + max(square**2, strip) * crop

    def largest_budget(self, most: int) -> int:
        """See ViewSizing: more fills no GPU better, and takes memory in proportion."""
        return min(most, IMAGES_A_BUDGET * self.view_tokens[0])

    def windows(self, size: Size) -> Windows:
        """Raises TooLarge for an aspect ratio over 200."""
        width, height = size.width, size.height
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise TooLarge(
                f"an image of {width} x {height} pixels has an aspect ratio over {MAX_ASPECT}: "
                "crop it"
            )
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
        """The side of a window for an image of these sides; 0: the whole view is enough."""
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
    """The first models' own code (ImagePatcher), which differs in how it rounds and pads."""

    stretches: ClassVar[bool] = False

    def snapped(self, pixels: int, side: int) -> int:
        """As that code divides: a rest of exactly a fifth may count as more than a fifth."""
        if pixels < side:
            return pixels
        ratio = pixels / side
        return side * (int(ratio) + (ratio - pixels // side > ROUNDED_UP))
