"""An image as a whole and in crops: its patches, and the order of its rows (DeepSeek-OCR).

Pure functions of images and plans. Knows no tower, no budget and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models import packed
from actors.models.tiled import cut
from actors.spec.crops import CropSizing
from actors.spec.tiling import Layout
from actors.types import ItemPlan, Size

NEWLINE = -1
"""Marks a newline in an order of rows."""


def patchify(image: Tensor, sizing: CropSizing, mean: packed.Rgb) -> Tensor:
    """uint8 [3, height, width] to uint8 [patches, 3 x patch x patch]: the whole, then crops.

    A view's patches lie row by row. The whole keeps its shape on a ground of the mean's colour.
    """
    size = Size(width=image.shape[2], height=image.shape[1])
    side, patch = sizing.image_pixels, sizing.crops.patch_size
    parts = [packed.patchify(whole(image, sizing, mean), Size(side, side), patch, merge=1)]
    if sizing.layout(size):
        canvas = packed.resize(image, sizing.crops.resized(size))
        parts.append(cut(canvas, replace(sizing.crops, merge_size=1)))
    return torch.cat(parts)


def whole(image: Tensor, sizing: CropSizing, mean: packed.Rgb) -> Tensor:
    """The view of the whole image: uint8 [3, side, side]. Equal to PIL.ImageOps.pad."""
    size = sizing.whole(Size(width=image.shape[2], height=image.shape[1]))
    side = sizing.image_pixels
    ground = torch.tensor([int(value * 255) for value in mean], dtype=torch.uint8)
    canvas = ground[:, None, None].repeat(1, side, side)
    left, top = round((side - size.width) * 0.5), round((side - size.height) * 0.5)
    resized = packed.resize(image, size)
    canvas[:, top : top + size.height, left : left + size.width] = resized
    return canvas


def order(plans: Sequence[ItemPlan], sizing: CropSizing, whole: int, crops: int) -> Tensor:
    """Where each row of the items lies: int64 [tokens of all items].

    Among the `whole` rows of the global path, then the `crops` rows of the local path, then the
    newline, then the separator.
    """
    image_tokens, crop_tokens = sizing.view_tokens
    parts, before = [], whole
    for index, plan in enumerate(plans):
        if count := plan.path_tokens[1] // crop_tokens:
            columns = plan.grid_thw[2] // sizing.crops.side_patches
            grid = crop_grid((count // columns, columns), sizing.crop_side)
            parts.append(torch.where(grid == NEWLINE, whole + crops, grid + before))
            before += plan.path_tokens[1]
        parts.append(torch.arange(index * image_tokens, (index + 1) * image_tokens))
        parts.append(torch.tensor([whole + crops + 1]))
    return torch.cat(parts)


@lru_cache(maxsize=64)
def crop_grid(layout: Layout, side: int) -> Tensor:
    """Rows of an item's crops as those of one grid, a newline after each of the grid's rows."""
    rows, columns = layout
    places = torch.arange(rows * columns * side**2).view(rows, columns, side, side)
    grid = places.transpose(1, 2).reshape(rows * side, columns * side)
    return F.pad(grid, (0, 1), value=NEWLINE).flatten()
