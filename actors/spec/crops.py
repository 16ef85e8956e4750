"""What an image costs that is seen as a whole and, if it is large, in crops (DeepSeek-OCR).

The whole is one square view of fixed size on the global path; the crops are tiles of a canvas on
the local path. Rows of tokens end in a newline token, the whole in a separator. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.spec.tiling import Layout, StretchedTiles, layouts
from actors.types import ItemPlan, Size


@dataclass(frozen=True, slots=True)
class CropSizing:
    """See ViewSizing."""

    image_pixels: int
    """The side of the view of the whole image."""
    crops: StretchedTiles
    """How crops are laid out and cut up; the view of the whole is cut up in the same way."""

    @property
    def image_patches(self) -> int:
        """Rows, or columns, of patches in the view of the whole image."""
        return self.image_pixels // self.crops.patch_size

    @property
    def image_side(self) -> int:
        """Rows, or columns, of tokens in the view of the whole image."""
        return self.image_patches // self.crops.merge_size

    @property
    def crop_side(self) -> int:
        """Rows, or columns, of tokens in a crop."""
        return self.crops.side_patches // self.crops.merge_size

    @property
    def view_tokens(self) -> tuple[int, int]:
        """See ViewSizing. The newlines of the whole image are computed with it."""
        return self.image_side * (self.image_side + 1), self.crops.tile_tokens

    def layout(self, size: Size) -> Layout | None:
        """Rows and columns of crops. None: the image is no larger than one, and has none."""
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

    def plan(self, size: Size) -> ItemPlan:
        """`grid_thw` is the canvas of the crops; without crops, the view of the whole."""
        layout = self.layout(size)
        rows, columns = layout or (0, 0)
        image_tokens, crop_tokens = self.view_tokens
        path_patches = (self.image_patches**2, rows * columns * self.crops.side_patches**2)
        side = self.crops.side_patches
        canvas = (1, rows * side, columns * side)
        return ItemPlan(
            grid_thw=canvas if layout else (1, self.image_patches, self.image_patches),
            patches=sum(path_patches),
            tokens=self.rows(layout),
            path_tokens=(image_tokens, rows * columns * crop_tokens),
            path_patches=path_patches,
        )

    def rows(self, layout: Layout | None) -> int:
        """Rows of the embedding: crops, the whole, newlines and the separator."""
        whole = self.view_tokens[0] + 1
        if layout is None:
            return whole
        rows, columns = layout
        return whole + rows * self.crop_side * (columns * self.crop_side + 1)

    def largest_budget(self, most: int) -> int:
        """See ViewSizing: all of it, as published."""
        return most

    def token_range(self) -> tuple[int, int]:
        """See Sizing: an image without crops, and the most crops in the longest column."""
        found = layouts(self.crops.min_tiles, self.crops.max_tiles)
        return self.rows(None), max(map(self.rows, found))
