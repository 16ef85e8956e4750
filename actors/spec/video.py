"""What a video costs, from its header alone: which frames, what size, which groups. No torch.

The front door and the router plan from the container's header; the actor decodes only the frames of
the plan. Also describes how language models write videos in prompts (VideoStyle), and which rows
Efficient Video Sampling keeps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from actors.errors import InvalidMedia, InvalidOption, TooLarge
from actors.spec.sampling import Sampling
from actors.spec.sizing import (
    MAX_ASPECT,
    BlockSizing,
    Defaults,
    Largest,
    at_least,
    canvas,
    check_aspect,
    longest_side,
    pixels_of,
    shown,
    smart_resize,
)
from actors.spec.tiles import windows
from actors.types import Clip, ItemPlan, ProcessorKwargs, Size

FRAMES_PER_GROUP = 2
"""In the Qwen-VL and GLM-V families. A tower with other groups takes images only."""

POOLED = 2
"""LLaVA-OneVision pools frames to this fraction of their rows and columns, rounded up;
LLaVA-NeXT-Video divides them exactly."""

EVS_FIRST = 255.0
"""The dissimilarity of the first group of frames, which has none before it."""
EVS_TINY = 1e-8  # as in torch's cosine_similarity: rows of zeros are similar to nothing


@dataclass(frozen=True, slots=True)
class VideoSizing(ABC):
    """How one family divides videos. A group of frames is one attention segment."""

    sampling: Sampling
    patch_size: int
    merge_size: int
    group: int  # frames per group, which are embedded together

    @abstractmethod
    def resized(self, size: Size, frames: int) -> Size:
        """The size to resize each frame to, if there are this many. Raises TooLarge."""

    @abstractmethod
    def longest_side_patches(self) -> int:
        """An upper bound on the rows and columns of any plan."""

    def defaults(self) -> Defaults:
        """The options that a request may set for a video, and their defaults."""
        return self.sampling.defaults()

    def largest(self, tokens: int) -> Largest:
        """The largest values of these options, for groups of frames of up to so many tokens."""
        return self.sampling.largest()

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        """The sizing of a video with a request's options. Raises InvalidOption."""
        return replace(self, sampling=self.sampling.asked(kwargs))

    @property
    def most_groups(self) -> int:
        return -(-self.sampling.most // self.group)

    @property
    def least(self) -> int:
        """The fewest frames of a video."""
        return self.group

    def indices(self, clip: Clip) -> list[int]:
        """The frames to encode, before the last group is padded.

        Raises InvalidMedia for too few frames, InvalidOption for a `num_frames` that gives too few,
        TooLarge for too many chosen ones.
        """
        if clip.chosen:
            found = list(range(clip.frames))
        else:
            found = self.sampling.indices(clip.frames, clip.fps)
        if clip.frames < self.least:
            frames = "1 frame" if clip.frames == 1 else f"{clip.frames} frames"
            raise InvalidMedia(
                f"a video of {frames}: this model needs at least {self.least}: send an image"
            )
        if len(found) < self.least:
            if asked := self.sampling.defaults().get("num_frames"):
                raise InvalidOption(
                    f"num_frames: {asked} gives {len(found)} of the frames, and this model needs "
                    f"{self.least}: raise it"
                )
            raise InvalidMedia(
                f"a video of {clip.frames} frames at {clip.fps:g} a second: this model takes "
                f"{len(found)} of them and needs {self.least}: send an image"
            )
        if len(found) > self.sampling.most:
            raise TooLarge(
                f"{len(found)} frames; this model takes {self.sampling.most}: send fewer"
            )
        return found

    def groups(self, clip: Clip) -> list[tuple[int, ...]]:
        """The frames of each group; repeats of the last frame pad the last group."""
        found = self.indices(clip)
        found += found[-1:] * (-len(found) % self.group)
        return [tuple(found[i : i + self.group]) for i in range(0, len(found), self.group)]

    def plan(self, clip: Clip) -> ItemPlan:
        """Grid, patches, tokens and attention segments. Raises what `indices` raises, and TooLarge
        for other reasons."""
        size = self.resized(clip.size, len(self.indices(clip)))
        grid = (
            len(self.groups(clip)),
            size.height // self.patch_size,
            size.width // self.patch_size,
        )
        patches = grid[0] * grid[1] * grid[2]
        tokens = patches // self.merge_size**2
        return ItemPlan(grid, patches, tokens, (tokens,), frames=grid[0])

    def timestamps(self, clip: Clip) -> list[float]:
        """Seconds into the video, per group: the time of its first frame."""
        return [frames[0] / clip.fps for frames in self.groups(clip)]

    def seconds_per_group(self, clip: Clip) -> float:
        """transformers: second_per_grid_ts."""
        return self.group * clip.frames / clip.fps / len(self.indices(clip))


@dataclass(frozen=True, slots=True)
class PixelRange(VideoSizing):
    """Frames are resized into a range of pixels. Requests give the range of one frame."""

    def largest(self, tokens: int) -> Largest:
        pixels = tokens * (self.patch_size * self.merge_size) ** 2
        return {"min_pixels": pixels, "max_pixels": pixels, **self.sampling.largest()}


@dataclass(frozen=True, slots=True)
class FramePixels(PixelRange):
    """Each frame is resized into a range of pixels (Qwen2-VL, Qwen2.5-VL)."""

    min_pixels: int
    max_pixels: int
    most_tokens: int = 0
    """Ninety per cent of this limits the tokens of all frames together; 0: no limit."""

    def resized(self, size: Size, frames: int) -> Size:
        """transformers: Qwen2VLVideoProcessor.resize."""
        factor, most = self.patch_size * self.merge_size, self.max_pixels
        if self.most_tokens:
            total = int(self.most_tokens * factor**2 * 0.9)
            share = total * self.group // frames
            most = max(min(most, share), int(self.min_pixels * 1.05))
        return smart_resize(size, factor, self.min_pixels, most)

    def defaults(self) -> Defaults:
        pixels = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {**pixels, **self.sampling.defaults()}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        smallest, largest = pixels_of(kwargs, self.min_pixels, self.max_pixels)
        rule = self.sampling.asked(kwargs)
        return replace(self, sampling=rule, min_pixels=smallest, max_pixels=largest)

    def longest_side_patches(self) -> int:
        most = max(self.max_pixels, int(self.min_pixels * 1.05))
        return longest_side(most, self.patch_size, self.merge_size)


@dataclass(frozen=True, slots=True)
class TotalPixels(PixelRange):
    """All frames together are resized into a range of pixels (Qwen3-VL, GLM-V)."""

    min_pixels: int
    max_pixels: int
    most_frame_tokens: int = 0  # limit of each frame, in addition; 0: no limit
    min_frame_pixels: int = 0  # of each frame, as a request asks, within the range of all
    max_frame_pixels: int = 0  # likewise; 0: only the range of all

    def limits(self, frames: int) -> tuple[int, int]:
        """The fewest and the most pixels of so many frames together."""
        factor, most = self.patch_size * self.merge_size, self.max_pixels
        if self.most_frame_tokens:
            each = min(self.most_frame_tokens * factor**2, most // frames)
            most = max(each, int(self.min_pixels * 1.05)) * frames
        if self.max_frame_pixels:
            most = min(most, self.max_frame_pixels * frames)
        return min(max(self.min_pixels, self.min_frame_pixels * frames), most), most

    def resized(self, size: Size, frames: int) -> Size:
        """transformers: Qwen3VLVideoProcessor.resize, Glm4vVideoProcessor.resize."""
        factor = self.patch_size * self.merge_size
        enlarged = at_least(size, factor)
        return smart_resize(enlarged, factor, *self.limits(frames), frames, self.group)

    def defaults(self) -> Defaults:
        pixels = {"min_pixels": self.min_frame_pixels, "max_pixels": self.max_frame_pixels}
        shown = {name: value or None for name, value in pixels.items()}
        return {**shown, **self.sampling.defaults()}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        whole = self.max_frame_pixels or self.max_pixels
        smallest, largest = pixels_of(kwargs, self.min_frame_pixels, whole)
        changed = {"min_frame_pixels": smallest}
        if kwargs.max_pixels:
            changed["max_frame_pixels"] = largest
        return replace(self, sampling=self.sampling.asked(kwargs), **changed)

    def longest_side_patches(self) -> int:
        most = max(self.max_pixels // self.group, int(self.min_pixels * 1.05))
        return longest_side(most, self.patch_size, self.merge_size)


@dataclass(frozen=True, slots=True)
class MeanTimes(TotalPixels):
    """Like TotalPixels, but a group's time is the mean of its first and last frame's (Qwen3-VL)."""

    def timestamps(self, clip: Clip) -> list[float]:
        """transformers: Qwen3VLProcessor._calculate_timestamps."""
        return [(frames[0] / clip.fps + frames[-1] / clip.fps) / 2 for frames in self.groups(clip)]


@dataclass(frozen=True, slots=True)
class TargetPatches(VideoSizing):
    """Each frame is stretched to about `patches` (Nemotron-H Omni)."""

    patches: int
    """Every frame has more than a sixteenth of them."""

    @property
    def least(self) -> int:
        return 1  # a group is padded

    def resized(self, size: Size, frames: int) -> Size:
        """transformers: NemotronH_Omni_Reasoning_V3VideoProcessor._compute_target_patches."""
        check_aspect(size)
        aspect, block = size.width / size.height, self.merge_size
        rows = max(round(math.sqrt(self.patches / aspect)), 1)
        columns = max(round(math.sqrt(self.patches * aspect)), 1)
        more = Size(columns + -columns % block, rows + -rows % block)
        if more.width * more.height > self.patches:
            rows, columns = (max(block, side - side % block) for side in (rows, columns))
            more = Size(columns, rows)
        return Size(more.width * self.patch_size, more.height * self.patch_size)

    def longest_side_patches(self) -> int:
        return math.ceil(math.sqrt(self.patches * MAX_ASPECT)) + self.merge_size


@dataclass(frozen=True, slots=True)
class CanvasPixels(TotalPixels):
    """Like TotalPixels, but shows frames on a canvas, as CanvasSizing does (GLM-5-next)."""

    def resized(self, size: Size, frames: int) -> Size:
        """The canvas."""
        factor = self.patch_size * self.merge_size
        return canvas(size, factor, *self.limits(frames), frames, self.group)

    def shown(self, size: Size, frames: int) -> Size:
        """transformers: Glm5NextVideoProcessor.resize, without its padding."""
        smallest, _ = self.limits(frames)
        return shown(size, self.resized(size, frames), smallest, frames)


@dataclass(frozen=True, slots=True)
class FrameTiles(VideoSizing):
    """Each frame fills one tile (InternVL)."""

    tile_pixels: int

    def resized(self, size: Size, frames: int) -> Size:
        return Size(self.tile_pixels, self.tile_pixels)

    def longest_side_patches(self) -> int:
        return self.tile_pixels // self.patch_size


@dataclass(frozen=True, slots=True)
class PooledGroups(VideoSizing):
    """Frames attend to each other within a group and are pooled to one picture (Kimi-K2.5)."""

    pictures: BlockSizing  # how each frame is resized and divided

    @property
    def least(self) -> int:
        return 1  # the last group, or the only one, may have fewer frames

    def groups(self, clip: Clip) -> list[tuple[int, ...]]:
        """Like VideoSizing, but the last group is not padded."""
        found = self.indices(clip)
        return [tuple(found[i : i + self.group]) for i in range(0, len(found), self.group)]

    def resized(self, size: Size, frames: int) -> Size:
        """Before padding to whole merge blocks."""
        return self.pictures.resized(size)

    def longest_side_patches(self) -> int:
        return self.pictures.longest_side_patches()

    def defaults(self) -> Defaults:
        return {**self.pictures.defaults(), **self.sampling.defaults()}

    def largest(self, tokens: int) -> Largest:
        return {**self.pictures.largest(tokens), **self.sampling.largest()}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        pictures, rule = self.pictures.asked(kwargs), self.sampling.asked(kwargs)
        return replace(self, sampling=rule, pictures=pictures)

    def plan(self, clip: Clip) -> ItemPlan:
        frames, groups = len(self.indices(clip)), self.groups(clip)
        one = self.pictures.plan(clip.size)
        return ItemPlan(
            grid_thw=(len(groups), *one.grid_thw[1:]),
            patches=frames * one.patches,
            tokens=len(groups) * one.tokens,
            path_tokens=(frames * one.tokens,),
            frames=len(groups),
            group_pictures=self.group,
        )


@dataclass(frozen=True, slots=True)
class PooledFrames(VideoSizing):
    """Each frame fills one tile and is pooled; a newline ends the video (LLaVA-OneVision)."""

    picture_pixels: int

    @property
    def side(self) -> int:
        """Tokens per side of a frame before pooling."""
        return self.picture_pixels // self.patch_size

    @property
    def frame_side(self) -> int:
        """Tokens per side of a frame after pooling."""
        return -(-self.side // POOLED)

    def resized(self, size: Size, frames: int) -> Size:
        return Size(self.picture_pixels, self.picture_pixels)

    def longest_side_patches(self) -> int:
        return self.side

    def plan(self, clip: Clip) -> ItemPlan:
        frames = len(self.indices(clip))
        computed = frames * self.side**2
        return ItemPlan(
            grid_thw=(frames, self.side, self.side),
            patches=computed,
            tokens=frames * self.frame_side**2 + 1,
            path_tokens=(computed,),
            frames=frames,
        )


@dataclass(frozen=True, slots=True)
class AveragedFrames(PooledFrames):
    """The middle of each frame fills one tile and is pooled, 2 x 2 patches to one
    (LLaVA-NeXT-Video)."""

    def resized(self, size: Size, frames: int) -> Size:
        """The shorter side fills the tile."""
        side = self.picture_pixels
        if size.width <= size.height:
            return Size(side, side * size.height // size.width)
        return Size(side * size.width // size.height, side)

    def plan(self, clip: Clip) -> ItemPlan:
        """Without a newline. Also raises TooLarge for an aspect ratio over MAX_ASPECT."""
        check_aspect(clip.size)
        plan = PooledFrames.plan(self, clip)  # super() does not work with slots
        return replace(plan, tokens=plan.tokens - 1)


@dataclass(frozen=True, slots=True)
class PooledWindows(PooledFrames):
    """Each frame fills one tile. Windows of its patches are pooled to tokens (Molmo 2)."""

    window: int
    """The side of a window in patches."""
    tile_tokens: int
    """The tokens of a budget that a tile takes; see OverlappingTiles."""

    def plan(self, clip: Clip) -> ItemPlan:
        frames = len(self.indices(clip))
        return ItemPlan(
            grid_thw=(frames, self.side, self.side),
            patches=frames * self.side**2,
            tokens=frames * windows(self.side, self.window) ** 2,
            path_tokens=(frames * self.tile_tokens,),
            frames=frames,
        )


@dataclass(frozen=True, slots=True)
class VideoStyle:
    """How the language models of one family write the groups of frames of a video."""

    family: str
    """The family whose embeddings they read."""
    before: str = ""
    """Text before each group: {seconds} is its time, {whole} the same truncated to an integer."""
    after: str = ""
    as_images: bool = False
    """The image token stands for the rows of videos, too."""
    timed: bool = False
    """The positions of their rows depend on the time between groups."""


def retained_tokens(plan: ItemPlan, rate: float) -> int:
    """Rows that Efficient Video Sampling keeps of a video at a rate in [0, 1), at least one group.

    All rows of an image, and of a video of one group. Efficient Video Sampling (arXiv 2510.14624)
    drops the rows that change least. It saves the language model's time, not the encoder's.
    """
    if plan.frames < 2 or not rate:
        return plan.tokens
    rows = plan.group_tokens * plan.frames
    return max(plan.group_tokens, int(rows * (1 - rate))) + plan.tokens - rows


def retention_mask(
    rows: npt.NDArray[np.float32], plan: ItemPlan, rate: float
) -> npt.NDArray[np.bool_]:
    """Which rows [tokens, width] of a video are kept: bool [tokens].

    The rows that are least similar to the row at the same place in the previous group, over the
    whole video; of equal ones the earlier. Rows after the last group are kept. As in vLLM's
    video_prune/evs.py, which compares whole rows, deepstack features included.
    """
    judged = plan.group_tokens * plan.frames
    groups = rows[:judged].reshape(plan.frames, -1, rows.shape[1])
    lengths = np.maximum(np.linalg.norm(groups, axis=2), EVS_TINY)
    dots = (groups[1:] * groups[:-1]).sum(2)
    unlike = np.full(groups.shape[:2], EVS_FIRST, np.float32)
    unlike[1:] = 1 - dots / (lengths[1:] * lengths[:-1])
    order = np.argsort(-unlike.ravel(), kind="stable")
    mask = np.zeros(len(rows), np.bool_)
    mask[judged:] = True
    mask[order[: retained_tokens(plan, rate) - (len(rows) - judged)]] = True
    return mask


def group_tokens(mask: npt.NDArray[np.bool_], plan: ItemPlan) -> tuple[int, ...]:
    """How many rows of each group are kept."""
    judged = mask[: plan.group_tokens * plan.frames]
    return tuple(judged.reshape(plan.frames, -1).sum(1).tolist())
