"""What a video will cost, from its header alone: which frames, how large, in which groups. Pure.

Ingress and router use it on what the container says, the actor to decode no more than is encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from actors.errors import InvalidMedia, TooLarge
from actors.spec.sampling import Sampling
from actors.spec.sizing import BlockSizing, at_least, longest_side, smart_resize
from actors.types import Clip, ItemPlan, Size


@dataclass(frozen=True, slots=True)
class VideoSizing(ABC):
    """How one family cuts videos up. A group of frames is one attention segment."""

    sampling: Sampling
    patch_size: int
    merge_size: int
    group: int
    """Frames that are embedded together."""

    @abstractmethod
    def resized(self, size: Size, frames: int) -> Size:
        """The size that each of so many frames is resized to. Raises TooLarge."""

    @abstractmethod
    def longest_side_patches(self) -> int:
        """A bound on the rows and columns of any plan."""

    @property
    def most_groups(self) -> int:
        """Of any video."""
        return -(-self.sampling.most // self.group)

    @property
    def least(self) -> int:
        """Frames of a video, at least."""
        return self.group

    def indices(self, clip: Clip) -> list[int]:
        """The frames that are encoded, before the last group is filled up.

        Raises InvalidMedia for too few, TooLarge for a list of too many.
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
        """The frames of each group; the last frame fills up the last group."""
        found = self.indices(clip)
        found += found[-1:] * (-len(found) % self.group)
        return [tuple(found[i : i + self.group]) for i in range(0, len(found), self.group)]

    def plan(self, clip: Clip) -> ItemPlan:
        """Grid, patches, tokens and attention segments. Raises InvalidMedia, TooLarge."""
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
        """Seconds into the video, one a group: of its first frame."""
        return [frames[0] / clip.fps for frames in self.groups(clip)]

    def seconds_per_group(self, clip: Clip) -> float:
        """transformers: second_per_grid_ts."""
        return self.group * clip.frames / clip.fps / len(self.indices(clip))


@dataclass(frozen=True, slots=True)
class FramePixels(VideoSizing):
    """Each frame is resized into a range of pixels (Qwen2-VL, Qwen2.5-VL)."""

    min_pixels: int
    max_pixels: int
    most_tokens: int = 0
    """Ninety per cent of so many bound all frames together; 0: nothing does."""

    def resized(self, size: Size, frames: int) -> Size:
        """transformers: Qwen2VLVideoProcessor.resize."""
        factor, most = self.patch_size * self.merge_size, self.max_pixels
        if self.most_tokens:
            total = int(self.most_tokens * factor**2 * 0.9)
            share = total * self.group // frames
            most = max(min(most, share), int(self.min_pixels * 1.05))
        return smart_resize(size, factor, self.min_pixels, most)

    def longest_side_patches(self) -> int:
        """See VideoSizing."""
        most = max(self.max_pixels, int(self.min_pixels * 1.05))
        return longest_side(most, self.patch_size, self.merge_size)


@dataclass(frozen=True, slots=True)
class TotalPixels(VideoSizing):
    """All frames together are resized into a range of pixels (Qwen3-VL, GLM-V)."""

    min_pixels: int
    max_pixels: int
    most_frame_tokens: int = 0
    """A bound on each frame beside that; 0: there is none."""

    def resized(self, size: Size, frames: int) -> Size:
        """transformers: Qwen3VLVideoProcessor.resize, Glm4vVideoProcessor.resize."""
        factor, most = self.patch_size * self.merge_size, self.max_pixels
        if self.most_frame_tokens:
            each = min(self.most_frame_tokens * factor**2, most // frames)
            most = max(each, int(self.min_pixels * 1.05)) * frames
        enlarged = at_least(size, factor)
        return smart_resize(enlarged, factor, self.min_pixels, most, frames, self.group)

    def longest_side_patches(self) -> int:
        """See VideoSizing. Of the fewest frames."""
        most = max(self.max_pixels // self.group, int(self.min_pixels * 1.05))
        return longest_side(most, self.patch_size, self.merge_size)


@dataclass(frozen=True, slots=True)
class MeanTimes(TotalPixels):
    """As TotalPixels, but a group's time is between its first frame and its last (Qwen3-VL)."""

    def timestamps(self, clip: Clip) -> list[float]:
        """transformers: Qwen3VLProcessor._calculate_timestamps."""
        return [(frames[0] / clip.fps + frames[-1] / clip.fps) / 2 for frames in self.groups(clip)]


@dataclass(frozen=True, slots=True)
class FrameTiles(VideoSizing):
    """Each frame fills one tile (InternVL)."""

    tile_pixels: int

    def resized(self, size: Size, frames: int) -> Size:
        """The tile's."""
        return Size(self.tile_pixels, self.tile_pixels)

    def longest_side_patches(self) -> int:
        """See VideoSizing."""
        return self.tile_pixels // self.patch_size


@dataclass(frozen=True, slots=True)
class PooledGroups(VideoSizing):
    """Each frame is a picture; those of a group see each other and give one's rows (Kimi-K2.5)."""

    pictures: BlockSizing
    """How each frame is resized and cut up."""

    @property
    def least(self) -> int:
        """See VideoSizing. The last group, or the only one, may have fewer frames."""
        return 1

    def groups(self, clip: Clip) -> list[tuple[int, ...]]:
        """See VideoSizing. Nothing fills up the last group."""
        found = self.indices(clip)
        return [tuple(found[i : i + self.group]) for i in range(0, len(found), self.group)]

    def resized(self, size: Size, frames: int) -> Size:
        """See VideoSizing; before it is padded to whole merge blocks."""
        return self.pictures.resized(size)

    def longest_side_patches(self) -> int:
        """See VideoSizing."""
        return self.pictures.longest_side_patches()

    def plan(self, clip: Clip) -> ItemPlan:
        """See VideoSizing."""
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
