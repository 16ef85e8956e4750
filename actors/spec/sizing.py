"""What an image costs, from its size in pixels alone: grid, patches, tokens. Pure: no torch.

The front door and the router plan from an image's header, the actor from the decoded image, and
both get the same plan. This module has the sizings with one grid of merge blocks per image. Sizings
in tiles are in tiles.py, in slices in slices.py, in a whole view and crops in views.py. Videos are
in video.py, sounds in audio.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from actors.errors import InvalidOption, TooLarge
from actors.types import Grid, ItemPlan, ProcessorKwargs, Size

Resample = Literal["bicubic", "bilinear", "lanczos"]  # how a family's images are resized

PATHS = ("global", "local")
"""The paths of models that see an image as a whole and in crops: see ViewSizing."""

MAX_ASPECT = 200  # images with a larger aspect ratio are rejected

SMALLEST_BUDGET_TOKENS = 64  # as in vLLM, unless the largest image has fewer tokens

MOST_ITEMS_A_BUDGET = 4
"""How many items of the largest size a budget may hold. More would save no launches, but cost
memory and time."""

MOST_BLOCKS = 10_000  # merge blocks on a side of Kimi's images
NAFLEX_STEP, NAFLEX_MOST_SCALE = 1e-5, 100.0
"""The precision with which the scale of an image is found, and the largest scale that is tried."""
NAFLEX_IMAGES_PER_BUDGET = 16

Defaults = Mapping[str, float | None]
"""Names of ProcessorKwargs that a sizing takes, and their defaults; None: no fixed value."""
Largest = Mapping[str, float]
"""Names of ProcessorKwargs that a sizing takes, and the largest value of each."""


class Sizing(Protocol):
    """How one family divides images into patches."""

    @property
    def patch_size(self) -> int:
        """The side of a patch in pixels."""

    @property
    def merge_size(self) -> int:
        """merge_size ** 2 patches give one token."""

    def plan(self, size: Size) -> ItemPlan:
        """Grid, patches and tokens of an image of this size. Raises TooLarge."""

    def token_range(self) -> tuple[int, int]:
        """The smallest useful token budget, and an upper bound on the tokens of any image."""

    def defaults(self) -> Defaults:
        """The options that a request may set for an image, and their defaults."""

    def largest(self, tokens: int) -> Largest:
        """The largest values of these options for images of up to so many tokens on the last
        path."""

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        """The sizing of an image with a request's options. Raises InvalidOption."""


@runtime_checkable
class ViewSizing(Sizing, Protocol):
    """A sizing with two paths: each image as a whole (`global`), and crops of some (`local`)."""

    @property
    def side_patches(self) -> tuple[int, int]:
        """Patches per side of the view of a whole image, and of a crop."""

    @property
    def view_tokens(self) -> tuple[int, int]:
        """Tokens that a path computes per whole image, and per crop."""

    def largest_budget(self, most: int) -> int:
        """The default largest token budget of both paths, at most `most`."""


class NoOptions:
    """Of a sizing for which a request may set nothing."""

    __slots__ = ()

    def defaults(self) -> Defaults:
        return {}

    def largest(self, tokens: int) -> Largest:
        return {}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class BlockSizing(NoOptions, ABC):
    """Resizes an image to one grid of merge blocks, which is one attention segment."""

    patch_size: int
    merge_size: int  # merge_size ** 2 patches give one token

    @abstractmethod
    def resized(self, size: Size) -> Size:
        """The size to resize an image to, before padding to whole merge blocks."""

    @abstractmethod
    def longest_side_patches(self) -> int:
        """An upper bound on the rows and columns of any plan that fits the largest budget."""

    @abstractmethod
    def largest_tokens(self) -> int:
        """An upper bound on the tokens of any plan."""

    def token_range(self) -> tuple[int, int]:
        largest = self.largest_tokens()
        return min(SMALLEST_BUDGET_TOKENS, largest), largest

    def plan(self, size: Size) -> ItemPlan:
        resized, block = self.resized(size), self.patch_size * self.merge_size
        down, across = math.ceil(resized.height / block), math.ceil(resized.width / block)
        return self.plan_of_grid((1, down * self.merge_size, across * self.merge_size))

    def plan_of_grid(self, grid: Grid, *, video: bool = False) -> ItemPlan:
        """The plan of an item with this grid in patches. The grid of a video begins with the number
        of its temporal groups."""
        patches = grid[0] * grid[1] * grid[2]
        tokens = patches // self.merge_size**2
        return ItemPlan(grid, patches, tokens, (tokens,), frames=grid[0] if video else 0)

    def nearly_square(self, tokens: int, *, video: bool = False) -> ItemPlan:
        """The plan of a nearly square item with at most this many tokens, and few fewer."""
        down = math.isqrt(tokens) * self.merge_size
        across = tokens // math.isqrt(tokens) * self.merge_size
        return self.plan_of_grid((1, down, across), video=video)


@dataclass(frozen=True, slots=True)
class PackedSizing(BlockSizing):
    """Images resized to whole merge blocks within a range of pixels (Qwen-VL and its kin)."""

    min_pixels: int
    max_pixels: int

    def resized(self, size: Size) -> Size:
        return smart_resize(
            size, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels
        )

    def longest_side_patches(self) -> int:
        most = MOST_ITEMS_A_BUDGET * self.max_pixels
        return longest_side(most, self.patch_size, self.merge_size)

    def largest_tokens(self) -> int:
        """If `max_pixels` are fewer than MAX_ASPECT tokens, very thin images may have more."""
        factor = self.patch_size * self.merge_size
        return max(self.max_pixels // factor**2, most_enlarged(self.min_pixels, factor))

    def defaults(self) -> Defaults:
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    def largest(self, tokens: int) -> Largest:
        pixels = tokens * (self.patch_size * self.merge_size) ** 2
        if self.largest_tokens() <= tokens:  # max_pixels may be more, by less than a token's pixels
            pixels = max(pixels, self.max_pixels)
        return {"min_pixels": pixels, "max_pixels": pixels}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        smallest, largest = pixels_of(kwargs, self.min_pixels, self.max_pixels)
        return replace(self, min_pixels=smallest, max_pixels=largest)


@dataclass(frozen=True, slots=True)
class WindowedSizing(PackedSizing):
    """Like PackedSizing, with the patches of each attention window adjacent (Qwen2.5-VL)."""

    window: int  # the side of a window in tokens

    def order(self, rows: int, columns: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The tokens of a grid of rows x columns patches, window by window, and the number of
        tokens in each window.

        Windows at the right and bottom edge may be smaller. Equal to
        transformers.vision_utils.get_vision_window_index.
        """
        down, across = rows // self.merge_size, columns // self.merge_size
        row, column = np.divmod(np.arange(down * across), across)
        inside = row // self.window * -(-across // self.window) + column // self.window
        return inside.argsort(kind="stable"), np.bincount(inside).tolist()


@dataclass(frozen=True, slots=True)
class EnlargingSizing(PackedSizing):
    """Like PackedSizing, but first enlarges a side shorter than a merge block (GLM-V)."""

    def resized(self, size: Size) -> Size:
        """transformers.models.glm4v.image_processing_glm4v.smart_resize."""
        factor = self.patch_size * self.merge_size
        return smart_resize(at_least(size, factor), factor, self.min_pixels, self.max_pixels)


@dataclass(frozen=True, slots=True)
class RoundingSizing(PackedSizing):
    """Like EnlargingSizing, but rounds the other side instead of truncating it (PaddleOCR-VL)."""

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
class LinedSizing(PackedSizing):
    """Like PackedSizing, but an image has more rows than tokens: one more after each line of
    tokens, one before all and one after all (HunyuanVL)."""

    def plan_of_grid(self, grid: Grid, *, video: bool = False) -> ItemPlan:
        plan = PackedSizing.plan_of_grid(self, grid, video=video)
        return replace(plan, tokens=plan.tokens + grid[1] // self.merge_size + 2)


@dataclass(frozen=True, slots=True)
class CanvasSizing(PackedSizing):
    """Shows images on a canvas of whole merge blocks, at their own size if that fits the range of
    pixels (GLM-5-next)."""

    def resized(self, size: Size) -> Size:
        """The canvas."""
        factor = self.patch_size * self.merge_size
        return canvas(size, factor, self.min_pixels, self.max_pixels)

    def shown(self, size: Size) -> Size:
        """The size of the image on its canvas."""
        return shown(size, self.resized(size), self.min_pixels)


@dataclass(frozen=True, slots=True)
class FittedSizing(BlockSizing):
    """Shrinks images until both sides fit, then stretches them to whole merge blocks (Pixtral)."""

    max_side: int  # limit of the longer side in pixels

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

    def longest_side_patches(self) -> int:
        return math.ceil(self.max_side / (self.patch_size * self.merge_size)) * self.merge_size

    def largest_tokens(self) -> int:
        return (self.longest_side_patches() // self.merge_size) ** 2


@dataclass(frozen=True, slots=True)
class FillingSizing(BlockSizing):
    """Scales every image to about `max_tokens`, and rounds both sides down to whole merge blocks
    (Gemma 4)."""

    max_tokens: int

    def resized(self, size: Size) -> Size:
        """transformers.models.gemma4: get_aspect_ratio_preserving_size."""
        block = self.patch_size * self.merge_size
        pixels = self.max_tokens * self.merge_size**2 * self.patch_size**2
        scale = math.sqrt(pixels / (size.height * size.width))
        down, across = int(scale * size.height / block), int(scale * size.width / block)
        if not down:
            down, across = 1, min(size.width // size.height, self.max_tokens)
        elif not across:
            down, across = min(size.height // size.width, self.max_tokens), 1
        return Size(across * block, down * block)

    def longest_side_patches(self) -> int:
        return self.max_tokens * self.merge_size

    def largest_tokens(self) -> int:
        return self.max_tokens


@dataclass(frozen=True, slots=True)
class NaflexSizing(BlockSizing):
    """Scales every image to about `max_patches`, and rounds both sides up to whole patches
    (SigLIP 2)."""

    max_patches: int
    pooled: bool = False
    """An image gives one vector instead of the rows of its patches."""
    paths: int = 1
    """How many paths the model has. Images take the first."""

    def resized(self, size: Size) -> Size:
        """transformers.models.siglip2: get_image_size_for_max_num_patches."""
        patch, least, most = self.patch_size, NAFLEX_STEP / 10, NAFLEX_MOST_SCALE

        def scaled(scale: float) -> tuple[int, int]:
            width, height = (
                max(1, math.ceil(side * scale / patch)) for side in (size.width, size.height)
            )
            return width, height

        while most - least >= NAFLEX_STEP:
            middle = (least + most) / 2
            if math.prod(scaled(middle)) <= self.max_patches:
                least = middle
            else:
                most = middle
        across, down = scaled(least)
        return Size(across * patch, down * patch)

    def plan(self, size: Size) -> ItemPlan:
        plan = BlockSizing.plan(self, size)  # super() does not work with slots
        tokens = (plan.tokens, *[0] * (self.paths - 1))
        return replace(plan, tokens=1 if self.pooled else plan.tokens, path_tokens=tokens)

    def longest_side_patches(self) -> int:
        return MOST_ITEMS_A_BUDGET * self.token_range()[1]

    def largest_tokens(self) -> int:
        return self.max_patches

    def token_range(self) -> tuple[int, int]:
        """Nearly all images have `max_patches`. That is few, so the largest budget holds several
        images."""
        return self.max_patches, NAFLEX_IMAGES_PER_BUDGET * self.max_patches

    def defaults(self) -> Defaults:
        return {"max_patches": self.max_patches}

    def largest(self, tokens: int) -> Largest:
        return {"max_patches": tokens}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return replace(self, max_patches=kwargs.max_patches or self.max_patches)


@dataclass(frozen=True, slots=True)
class CappedSizing(BlockSizing):
    """Keeps images at their own size, padded to whole merge blocks, up to a limit (Kimi-VL)."""

    max_patches: int
    """Images with more patches are shrunk. With padding, an image may have slightly more."""
    max_side_patches: int
    """Images with this many patches on a side, after padding, are rejected."""

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

    def longest_side_patches(self) -> int:
        return self.most_blocks() * self.merge_size

    def largest_tokens(self) -> int:
        """Raises ValueError for longer sides than any image has."""
        # A side of d + 1 blocks is longer than d blocks. The limit counts whole patches only: a
        # side of n counted patches may be almost n + 1 long, so that d blocks can come from as few
        # as d * merge_size counted patches, and the image was shrunk by almost one patch less than
        # the limit demands. The other side may be longer by the same factor.
        most = self.most_blocks()
        if most > MOST_BLOCKS:
            raise ValueError(f"{self.max_side_patches} patches on a side")
        largest = most
        for blocks in range(2, most + 1):
            counted = (blocks - 1) * self.merge_size
            shrunk = counted**2 / (counted + 1)
            across = math.ceil((self.max_patches / shrunk + 1) / self.merge_size)
            largest = max(largest, blocks * min(most, across))
        return largest

    def defaults(self) -> Defaults:
        return {"max_patches": self.max_patches}

    def largest(self, tokens: int) -> Largest:
        return {"max_patches": tokens * self.merge_size**2}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return replace(self, max_patches=kwargs.max_patches or self.max_patches)

    def blocks(self, pixels: int) -> int:
        """Merge blocks on a side, the last one padded."""
        return math.ceil(pixels / (self.patch_size * self.merge_size))

    def most_blocks(self) -> int:
        """Merge blocks on the longest side that is accepted."""
        return (self.max_side_patches - 1) // self.merge_size


@dataclass(frozen=True, slots=True)
class ShrinkingSizing(CappedSizing):
    """Like CappedSizing, but shrinks an image whose side is too long (Kimi-K2.5)."""

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
        """Like CappedSizing, but a side may have all of `max_side_patches`."""
        return self.max_side_patches // self.merge_size


@dataclass(frozen=True, slots=True)
class PatchRange(BlockSizing):
    """Stretches images to whole merge blocks within a range of patches (Nemotron-H Omni)."""

    min_patches: int
    """Every image has more than half as many."""
    max_patches: int

    def resized(self, size: Size) -> Size:
        """transformers.models.nemotron_h_omni: get_patch_grid_size. Raises TooLarge."""
        check_aspect(size)
        rows, columns = (round(side / self.patch_size + 0.5) for side in (size.height, size.width))
        if (scale := math.sqrt(self.max_patches / (rows * columns))) < 1:
            rows, columns = (max(1, math.floor(scale * side)) for side in (rows, columns))
        if rows * columns < self.min_patches:
            scale = math.sqrt(self.min_patches / (rows * columns))
            rows, columns = math.ceil(scale * rows), math.ceil(scale * columns)
        rows = whole_within(rows, columns, self.merge_size, self.max_patches)
        columns = whole_within(columns, rows, self.merge_size, self.max_patches)
        if rows * columns > self.max_patches:
            raise TooLarge(
                f"an image of {size.width} x {size.height} pixels is too thin for "
                f"{self.max_patches} patches: crop it"
            )
        return Size(columns * self.patch_size, rows * self.patch_size)

    def longest_side_patches(self) -> int:
        return self.max_patches // self.merge_size

    def largest_tokens(self) -> int:
        return self.max_patches // self.merge_size**2

    def token_range(self) -> tuple[int, int]:
        return self.min_patches // self.merge_size**2, self.largest_tokens()

    def defaults(self) -> Defaults:
        return {"max_patches": self.max_patches}

    def largest(self, tokens: int) -> Largest:
        return {"max_patches": tokens * self.merge_size**2}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        """Raises InvalidOption for an empty range: with one, transformers does not enlarge small
        images, which is not supported."""
        most = kwargs.max_patches or self.max_patches
        if most <= self.min_patches:
            raise InvalidOption(
                f"max_patches: {most} is not over the fewest patches of an image, "
                f"{self.min_patches}: raise it"
            )
        return replace(self, max_patches=most)


def pixels_of(kwargs: ProcessorKwargs, smallest: int, largest: int) -> tuple[int, int]:
    """The range of pixels of a request; `smallest` and `largest` are the defaults. Raises
    InvalidOption."""
    largest = kwargs.max_pixels or largest
    asked = kwargs.min_pixels or min(smallest, largest)
    if asked > largest:
        raise InvalidOption(
            f"min_pixels: {asked} is over max_pixels, {largest}: lower it, or raise max_pixels"
        )
    return asked, largest


def longest_side(max_pixels: int, patch_size: int, merge_size: int) -> int:
    """An upper bound on the patches of a side after `smart_resize`, at the largest aspect ratio."""
    # A resized side s has area over s * (s / MAX_ASPECT - factor), which max_pixels bounds.
    factor = patch_size * merge_size
    half = MAX_ASPECT * factor / 2
    side = half + math.sqrt(half**2 + MAX_ASPECT * max_pixels)
    return math.ceil(side / factor + 1) * merge_size


def most_enlarged(min_pixels: int, factor: int) -> int:
    """An upper bound on the merge blocks of an image that `smart_resize` enlarges."""
    # Rounding up makes each side less than a block longer, or a whole one because of floats. That
    # adds most to the longest sides.
    across = math.sqrt(min_pixels * MAX_ASPECT) / factor
    down = math.sqrt(min_pixels / MAX_ASPECT) / factor
    return int((across + 1) * (down + 1))


def whole_within(side: int, other: int, block: int, most: int) -> int:
    """Rounds a side to whole blocks: up if the area allows it, otherwise down, but at least to
    one."""
    more = side + -side % block
    return more if more * other <= most else max(block, side - side % block)


def check_aspect(size: Size) -> None:
    """Raises TooLarge for an aspect ratio over MAX_ASPECT."""
    if max(size.width, size.height) > MAX_ASPECT * min(size.width, size.height):
        raise TooLarge(
            f"an image of {size.width} x {size.height} pixels has an aspect ratio over "
            f"{MAX_ASPECT}: crop it"
        )


def at_least(size: Size, side: int) -> Size:
    """The size, enlarged until no side is shorter than `side`."""
    if min(size.width, size.height) >= side:
        return size
    scale = max(side / size.height, side / size.width)
    return Size(width=int(size.width * scale), height=int(size.height * scale))


def smart_resize(
    size: Size,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    group: int = 1,
    *,
    least: int = 0,
) -> Size:
    """Resizes sides to multiples of `factor` and the area into the range, and nearly keeps the
    aspect ratio.

    Equal to transformers.models.qwen2_vl.image_processing_qwen2_vl.smart_resize. With `frames` in
    groups of `group`, equal to video_processing_qwen3_vl.smart_resize, where the range is that of
    all frames together. With `least` equal to the factor, equal to
    Lfm2VlImageProcessor.smart_resize, whose rounded sides are at least that long. Raises TooLarge
    for an aspect ratio over MAX_ASPECT.
    """
    check_aspect(size)
    width, height = size.width, size.height
    new_width, new_height = (max(least, round(one / factor) * factor) for one in (width, height))
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


def canvas(
    size: Size, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, group: int = 1
) -> Size:
    """The smallest canvas for the image, its sides multiples of `factor`, within the range.

    Equal to transformers.models.glm5_next.image_processing_glm5_next.smart_resize; the range is
    that of all frames together, which come in groups of `group`. Raises TooLarge for an aspect
    ratio over MAX_ASPECT.
    """
    check_aspect(size)
    whole = max(group, round(frames / group) * group)
    found = blocks_around(size.width, size.height, factor)
    if whole * found.width * found.height < min_pixels:
        scale = math.sqrt(min_pixels / (frames * size.height * size.width))
        found = blocks_around(math.ceil(size.width * scale), math.ceil(size.height * scale), factor)
    if whole * found.width * found.height <= max_pixels:
        return found
    best, low, high = Size(factor, factor), 1, size.height
    while low <= high:  # the largest height that fits
        height = (low + high) // 2
        width = max(1, math.floor(size.width * height / size.height))
        found = blocks_around(width, height, factor)
        if whole * found.width * found.height <= max_pixels:
            best, low = found, height + 1
        else:
            high = height - 1
    return best


def blocks_around(width: int, height: int, factor: int) -> Size:
    return Size(-(-width // factor) * factor, -(-height // factor) * factor)


def shown(size: Size, canvas: Size, min_pixels: int, frames: int = 1) -> Size:
    """The size of an image, or of frames, on a canvas: enlarged only if all frames together have
    fewer pixels than the range."""
    scale = min(canvas.height / size.height, canvas.width / size.width)
    if frames * size.height * size.width >= min_pixels:
        scale = min(1.0, scale)
    height = max(1, min(canvas.height, math.floor(size.height * scale)))
    width = max(1, min(canvas.width, math.floor(size.width * scale)))
    return Size(width, height)
