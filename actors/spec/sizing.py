"""What an item will cost, from its size in pixels alone. Pure arithmetic: no torch, no decoding.

Ingress and router use it on image headers, the actor on decoded images: the same plan twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from actors.errors import TooLarge
from actors.types import ItemPlan, Size

MAX_ASPECT = 200


class Sizing(Protocol):
    """How one family cuts images up."""

    def plan(self, size: Size) -> ItemPlan:
        """Grid, patches and tokens of an image of this size."""

    def token_range(self) -> tuple[int, int]:
        """The smallest useful budget and the tokens of the largest item."""


PATHS = ("global", "local")
"""Of models with two paths: every image as a whole, and crops of some."""


@runtime_checkable
class ViewSizing(Sizing, Protocol):
    """A sizing of two paths: every image as a whole (`global`), and crops of some (`local`)."""

    @property
    def view_tokens(self) -> tuple[int, int]:
        """Tokens that a path computes of one whole image, and of one crop."""

    def largest_budget(self, most: int) -> int:
        """Tokens that the largest budgets of both paths hold by default, at most so many."""


@runtime_checkable
class BlockSizing(Sizing, Protocol):
    """A sizing that cuts each image into one grid of merge blocks."""

    @property
    def patch_size(self) -> int:
        """Pixels of a patch's side."""

    @property
    def merge_size(self) -> int:
        """Patches of a token's side."""

    def resized(self, size: Size) -> Size:
        """The size that an image is resized to, before it is padded to whole merge blocks."""

    def longest_side_patches(self) -> int:
        """A bound on the rows and columns of any plan."""


@dataclass(frozen=True, slots=True)
class PackedSizing:
    """Images resized to whole merge blocks within a range of pixels (Qwen-VL and its kin)."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def resized(self, size: Size) -> Size:
        """The size that the image is resized to (transformers: `smart_resize`)."""
        return smart_resize(
            size, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels
        )

    def plan(self, size: Size) -> ItemPlan:
        """One attention segment of rows x columns patches; merge_size ** 2 patches a token."""
        return block_plan(self.resized(size), self.patch_size, self.merge_size)

    def longest_side_patches(self) -> int:
        """A bound on the rows and columns of any plan, at the longest aspect that is admitted."""
        return longest_side(self.max_pixels, self.patch_size, self.merge_size)

    def token_range(self) -> tuple[int, int]:
        """64 as in vLLM, unless the largest image is smaller."""
        largest = self.max_pixels // (self.patch_size * self.merge_size) ** 2
        return min(64, largest), largest


@dataclass(frozen=True, slots=True)
class EnlargingSizing(PackedSizing):
    """As PackedSizing, but a side shorter than a merge block is first enlarged to one (GLM-V)."""

    def resized(self, size: Size) -> Size:
        """transformers.models.glm4v.image_processing_glm4v.smart_resize."""
        factor = self.patch_size * self.merge_size
        return smart_resize(at_least(size, factor), factor, self.min_pixels, self.max_pixels)


@dataclass(frozen=True, slots=True)
class RoundingSizing(PackedSizing):
    """As EnlargingSizing, but the other side is rounded, not cut off (PaddleOCR-VL)."""

    def resized(self, size: Size) -> Size:
        """transformers.models.paddleocr_vl.image_processing_paddleocr_vl.smart_resize."""
        factor = self.patch_size * self.merge_size
        width, height = size.width, size.height
        if height < factor:
            width, height = round(width * factor / height), factor
        if width < factor:
            width, height = factor, round(height * factor / width)
        return smart_resize(Size(width, height), factor, self.min_pixels, self.max_pixels)


@dataclass(frozen=True, slots=True)
class FittedSizing:
    """Images shrunk until both sides fit, then stretched to whole merge blocks (Pixtral)."""

    patch_size: int
    merge_size: int
    max_side: int
    """Pixels of the longer side."""

    def resized(self, size: Size) -> Size:
        """transformers.models.pixtral: get_resize_output_image_size. Raises TooLarge."""
        ratio = max(size.width / self.max_side, size.height / self.max_side, 1.0)
        width, height = math.floor(size.width / ratio), math.floor(size.height / ratio)
        if not min(width, height):
            raise TooLarge(
                f"an image of {size.width} x {size.height} pixels has nothing left of a side when "
                f"the other is shrunk to {self.max_side}: crop it"
            )
        block = self.patch_size * self.merge_size
        return Size(-(-width // block) * block, -(-height // block) * block)

    def plan(self, size: Size) -> ItemPlan:
        """One attention segment of rows x columns patches; merge_size ** 2 patches a token."""
        return block_plan(self.resized(size), self.patch_size, self.merge_size)

    def longest_side_patches(self) -> int:
        """A bound on the rows and columns of any plan."""
        return math.ceil(self.max_side / (self.patch_size * self.merge_size)) * self.merge_size

    def token_range(self) -> tuple[int, int]:
        """64 as in vLLM, unless the largest image is smaller."""
        largest = (self.longest_side_patches() // self.merge_size) ** 2
        return min(64, largest), largest


@dataclass(frozen=True, slots=True)
class CappedSizing:
    """Images at their own size, padded to whole merge blocks; shrunk over a limit (Kimi-VL)."""

    patch_size: int
    merge_size: int
    max_patches: int
    """Over it an image is shrunk. Padding may exceed it a little."""
    max_side_patches: int
    """A side of so many patches, after padding, is refused."""

    def resized(self, size: Size) -> Size:
        """moonshotai/Kimi-VL: KimiVLImageProcessor.rescale. Raises TooLarge."""
        patches = (size.width // self.patch_size) * (size.height // self.patch_size)
        scale = math.sqrt(self.max_patches / patches) if patches > self.max_patches else 1.0
        resized = Size(int(size.width * scale), int(size.height * scale))
        if self.blocks(max(resized.width, resized.height)) > self.most_blocks():
            raise TooLarge(
                f"an image of {size.width} x {size.height} pixels has more than "
                f"{self.max_side_patches - 1} patches on a side: crop it"
            )
        return resized

    def plan(self, size: Size) -> ItemPlan:
        """One attention segment of rows x columns patches; merge_size ** 2 patches a token."""
        return block_plan(self.resized(size), self.patch_size, self.merge_size)

    def longest_side_patches(self) -> int:
        """A bound on the rows and columns of any plan."""
        return self.most_blocks() * self.merge_size

    def token_range(self) -> tuple[int, int]:
        """64 as in vLLM, and a bound on the tokens of any plan."""
        # A side of d + 1 blocks is longer than d blocks. Patches that are begun are not counted:
        # before it is shrunk, a side of n counted patches is shorter than n + 1, so d blocks may
        # be left of as little as d * merge_size counted ones, and shrinking then was less, by
        # nearly one patch, than the limit asks for. The other side gains what this one gives.
        most = self.most_blocks()
        largest = most
        for blocks in range(2, most + 1):
            counted = (blocks - 1) * self.merge_size
            shrunk = counted**2 / (counted + 1)
            across = math.ceil((self.max_patches / shrunk + 1) / self.merge_size)
            largest = max(largest, blocks * min(most, across))
        return min(64, largest), largest

    def blocks(self, pixels: int) -> int:
        """Merge blocks of a side, the last one padded."""
        return math.ceil(pixels / (self.patch_size * self.merge_size))

    def most_blocks(self) -> int:
        """Merge blocks of the longest side that is admitted."""
        return (self.max_side_patches - 1) // self.merge_size


@dataclass(frozen=True, slots=True)
class ShrinkingSizing(CappedSizing):
    """As CappedSizing, but a side that is too long is shrunk, not refused (Kimi-K2.5)."""

    def resized(self, size: Size) -> Size:
        """transformers.models.kimi_k25.image_processing_kimi_k25.navit_resize."""
        patches = max(1, size.width // self.patch_size) * max(1, size.height // self.patch_size)
        longest = self.max_side_patches * self.patch_size
        scale = min(
            1.0,
            math.sqrt(self.max_patches / patches),
            longest / size.height,
            longest / size.width,
        )
        width, height = (max(1, int(side * scale)) for side in (size.width, size.height))
        return Size(min(width, longest), min(height, longest))

    def most_blocks(self) -> int:
        """See CappedSizing: here a side may have all of its patches."""
        return self.max_side_patches // self.merge_size


def block_plan(size: Size, patch_size: int, merge_size: int) -> ItemPlan:
    """The plan of an image of this size, padded to whole merge blocks."""
    block = patch_size * merge_size
    down, across = math.ceil(size.height / block), math.ceil(size.width / block)
    grid = (1, down * merge_size, across * merge_size)
    return ItemPlan(grid, grid[1] * grid[2], down * across, (down * across,))


def longest_side(max_pixels: int, patch_size: int, merge_size: int) -> int:
    """A bound on the patches of a side after `smart_resize`, at the longest aspect admitted."""
    # A resized side s has area over s * (s / MAX_ASPECT - factor), which max_pixels bounds.
    factor = patch_size * merge_size
    half = MAX_ASPECT * factor / 2
    side = half + math.sqrt(half**2 + MAX_ASPECT * max_pixels)
    return math.ceil(side / factor + 1) * merge_size


def at_least(size: Size, side: int) -> Size:
    """The size, enlarged if a side is shorter."""
    if min(size.width, size.height) >= side:
        return size
    scale = max(side / size.height, side / size.width)
    return Size(width=int(size.width * scale), height=int(size.height * scale))


def smart_resize(
    size: Size, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, group: int = 1
) -> Size:
    """Both sides to multiples of `factor`, the area into the range, the shape kept as it can be.

    Equal to transformers.models.qwen2_vl.image_processing_qwen2_vl.smart_resize; with the pixels of
    `frames` frames, in groups of so many, to that of video_processing_qwen3_vl.
    Raises TooLarge for an aspect ratio over 200.
    """
    width, height = size.width, size.height
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise TooLarge(
            f"an image of {width} x {height} pixels has an aspect ratio over {MAX_ASPECT}: crop it"
        )
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    whole = round(frames / group) * group
    if whole * new_width * new_height > max_pixels:
        beta = math.sqrt(frames * width * height / max_pixels)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
    elif whole * new_width * new_height < min_pixels:
        beta = math.sqrt(min_pixels / (frames * width * height))
        new_width = math.ceil(width * beta / factor) * factor
        new_height = math.ceil(height * beta / factor) * factor
    return Size(new_width, new_height)
