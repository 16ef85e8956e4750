"""How the families that take videos cut them up: from their video processors' settings.

Settings that are missing are those of the processor's class in transformers. No torch here.
"""

from __future__ import annotations

from dataclasses import replace

from actors.spec.anyres import AnyresSizing, PooledFrames
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import BICUBIC, ModelSpec, only, rgb, side, video_processor
from actors.spec.sampling import Evenly, Middles, Paced, Sampling, Spread, Strided, Thinning, Timed
from actors.spec.sizing import ShrinkingSizing
from actors.spec.tiling import TileSizing
from actors.spec.video import (
    FramePixels,
    FrameTiles,
    MeanTimes,
    PooledGroups,
    TotalPixels,
    VideoSizing,
)

GROUP = 2
"""Frames that are embedded together. A tower of other groups takes images alone."""

INTERNVL_FRAMES = 8
"""As many segments as the model cards of InternVL take of a video."""

KIMI_GROUP, KIMI_FRAME_PATCHES = 4, 4096
"""What Kimi-K2.5 publishes: frames of a group, patches of each."""

KIMI_FRAMES = 2048
"""Kimi-K2.5 itself has no limit: more than a video has that this service takes by default."""

ONEVISION_FRAMES = 32
"""As many frames as LLaVA-OneVision's own code takes of a video."""


def spread_video(model: ModelSpec, files: Files) -> ModelSpec:
    """With the videos of Qwen3-VL and Qwen3.5: transformers' Qwen3VLVideoProcessor."""
    settings = video_processor(files)
    capped = settings.get("cap_pixels_per_frame")
    video = MeanTimes(
        Spread(*frame_settings(settings)),
        *cut(model),
        *total_pixels(settings, 128 * 32 * 32, 768 * 32 * 32),
        most_frame_tokens=int(settings.get("max_video_tokens", 768)) if capped else 0,
    )
    return with_video(model, settings, video)


def strided_video(model: ModelSpec, files: Files) -> ModelSpec:
    """With the videos of Qwen2-VL and Qwen2.5-VL: transformers' Qwen2VLVideoProcessor."""
    settings = video_processor(files)
    smallest, largest = total_pixels(settings, 128 * 28 * 28, 768 * 28 * 28)
    capped = settings.get("cap_pixels_per_frame")
    video = FramePixels(
        Strided(*frame_settings(settings), GROUP),
        *cut(model),
        min_pixels=int(settings.get("min_pixels") or smallest),
        max_pixels=int(settings.get("max_pixels") or largest),
        most_tokens=int(settings.get("max_video_tokens", 128000)) if capped else 0,
    )
    return with_video(model, settings, video)


def timed_video(model: ModelSpec, files: Files) -> ModelSpec:
    """With the videos of GLM-4.1V and GLM-4.5V: transformers' Glm4vVideoProcessor."""
    settings = video_processor(files)
    rule = Timed(float(settings.get("fps") or 2), float(settings.get("max_duration") or 300))
    return glm_video(model, settings, rule)


def thinning_video(model: ModelSpec, files: Files) -> ModelSpec:
    """With the videos of GLM-4.6V: transformers' Glm46VVideoProcessor."""
    return glm_video(model, video_processor(files), Thinning(GROUP))


def glm_video(model: ModelSpec, settings: Json, rule: Sampling) -> ModelSpec:
    """With GLM-V's sizes of frames."""
    pixels = total_pixels(settings, 112 * 112, 28 * 28 * 2 * 30000)
    return with_video(model, settings, TotalPixels(rule, *cut(model), *pixels))


def tiled_video(model: ModelSpec, files: Files) -> ModelSpec:
    """With the videos of InternVL: transformers' InternVLVideoProcessor, a tile a frame."""
    settings, sizing = video_processor(files), model.sizing
    assert isinstance(sizing, TileSizing), "InternVL is a tile family. This is a bug."
    video = FrameTiles(
        Middles(int(settings.get("num_frames") or INTERNVL_FRAMES)),
        *(sizing.patch_size, sizing.merge_size, 1),
        tile_pixels=sizing.tile_pixels,
    )
    return with_video(model, settings, video)


def pooled_video(model: ModelSpec, files: Files) -> ModelSpec:
    """With the videos of LLaVA-OneVision. Its processor samples nothing unless it is told to."""
    settings, sizing = video_processor(files), model.sizing
    assert isinstance(sizing, AnyresSizing), "its images are cut otherwise. This is a bug."
    pixels, frames = sizing.picture_pixels, int(settings.get("num_frames") or ONEVISION_FRAMES)
    only(settings, {"fps": None}, "the video processor")
    if side(settings.get("size") or pixels) != pixels:
        raise ValueError(f"size of the video processor: only the tower's {pixels} is supported")
    video = PooledFrames(Evenly(frames), sizing.patch_size, 1, 1, picture_pixels=pixels)
    return with_video(model, settings, video)


def grouped_video(model: ModelSpec, media: Json) -> ModelSpec:
    """With the videos of Kimi-K2.5, as `media_proc_cfg` says: moonshotai/Kimi-K2.5's own code."""
    sizing = model.sizing
    assert isinstance(sizing, ShrinkingSizing), "its images are cut otherwise. This is a bug."
    only(media, {"in_patch_limit_video": None}, "the image processor")
    each = int(media.get("in_patch_limit_each_frame") or KIMI_FRAME_PATCHES)
    rule = Paced(
        float(media.get("sample_fps") or 2),
        int(media.get("max_num_frames_each_video") or KIMI_FRAMES),
    )
    group = int(media.get("temporal_merge_kernel_size") or KIMI_GROUP)
    if group > int(model.vision["pos_emb_time"]):
        raise ValueError(f"temporal_merge_kernel_size: {group} is over pos_emb_time")
    pictures = replace(sizing, max_patches=each)
    video = PooledGroups(rule, sizing.patch_size, sizing.merge_size, group, pictures=pictures)
    return replace(model, video=video)


def with_video(model: ModelSpec, settings: Json, video: VideoSizing) -> ModelSpec:
    """The spec with videos. Raises ValueError for steps that preprocessing here has fixed."""
    fixed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": BICUBIC}
    only(settings, fixed, "the video processor")
    for key, value in (("image_mean", model.mean), ("image_std", model.std)):
        if settings.get(key) is not None and rgb(settings[key]) != value:
            raise ValueError(f"{key} of the video processor: only the image processor's {value}")
    groups = int(model.vision.get("temporal_patch_size", video.group))
    return replace(model, video=video) if groups == video.group else model


def cut(model: ModelSpec) -> tuple[int, int, int]:
    """Patch size, merge size, frames of a group."""
    vision = model.vision
    return int(vision["patch_size"]), int(vision["spatial_merge_size"]), GROUP


def frame_settings(settings: Json) -> tuple[float, int, int]:
    """Frames a second, the fewest and the most."""
    return (
        float(settings.get("fps") or 2),
        int(settings.get("min_frames") or 4),
        int(settings.get("max_frames") or 768),
    )


def total_pixels(settings: Json, smallest: int, largest: int) -> tuple[int, int]:
    """The range of pixels."""
    size = {"shortest_edge": smallest, "longest_edge": largest} | (settings.get("size") or {})
    return int(size["shortest_edge"]), int(size["longest_edge"])
