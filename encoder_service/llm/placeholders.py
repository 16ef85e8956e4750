"""What stands in a prompt for an image or a video, as each family's own processor writes it. Pure.

A group of frames is text with its time around a token for each row. Groups without any text follow
each other as one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import UnsupportedMedia
from actors.spec.video import VideoSizing
from actors.types import Grid, Kind, Media


@dataclass(frozen=True, slots=True)
class VideoStyle:
    """How one family writes the groups of frames of a video."""

    before: str = ""
    """Of each group: {seconds} is its time, {whole} the same cut off to a whole number."""
    after: str = ""
    as_images: bool = False
    """The image token stands for their rows, too."""
    timed: bool = False
    """The positions of their rows depend on the time between groups."""


QWEN2 = VideoStyle()
QWEN2_5 = VideoStyle(timed=True)
QWEN3 = VideoStyle("<{seconds:.1f} seconds><|vision_start|>", "<|vision_end|>")
GLM4V = VideoStyle("<|begin_of_image|>", "<|end_of_image|>{whole}", as_images=True)
GLM46V = VideoStyle("<|begin_of_image|>", "<|end_of_image|>{seconds:.1f} seconds", as_images=True)

STYLES = {
    "qwen2_vl": QWEN2,
    "qwen2_5_vl": QWEN2_5,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V,
    "glm46v": GLM46V,
}
"""`model_type` of config.json -> transformers: replace_video_token of the family's processor."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An image or a video of a prompt."""

    kind: Kind
    grid_thw: Grid
    tokens: int
    """Rows of its embedding."""
    times: tuple[float, ...] = ()
    """Of a video: seconds into it, one a group of frames."""
    seconds_per_group: float = 0.0
    """Of a video."""

    def texts(self, style: VideoStyle) -> list[tuple[str, str]]:
        """Before and after the rows of each group of a video."""
        times = [{"seconds": time, "whole": int(time)} for time in self.times]
        return [(style.before.format(**time), style.after.format(**time)) for time in times]


def placed(media: Sequence[Media], video: VideoSizing | None) -> list[Placed]:
    """In order. `video`: how the encoders cut videos up. Raises UnsupportedMedia without it."""
    return [place(one, video) for one in media]


def place(media: Media, video: VideoSizing | None) -> Placed:
    """See placed."""
    plan, clip = media.plan, media.clip
    if clip is None:
        return Placed(media.kind, plan.grid_thw, plan.tokens)
    if video is None:
        raise UnsupportedMedia("this model takes no videos: send frames as images")
    return Placed(
        media.kind,
        plan.grid_thw,
        plan.tokens,
        tuple(video.timestamps(clip)),
        video.seconds_per_group(clip),
    )
