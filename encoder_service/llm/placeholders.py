"""The placeholders of images and videos in a prompt, as each family's own processor writes them.

An image is one token per embedding row. A video is that for each group of frames, for some families
between texts that give the group's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import UnsupportedMedia
from actors.spec.video import VideoSizing, VideoStyle
from actors.types import Grid, Kind, Media


@dataclass(frozen=True, slots=True)
class Placed:
    """An image or a video of a prompt."""

    kind: Kind
    grid_thw: Grid
    tokens: int
    times: tuple[float, ...] = ()
    """Of a video: the time of each group of frames in seconds."""
    seconds_per_group: float = 0.0

    def texts(self, style: VideoStyle) -> list[tuple[str, str]]:
        """The text before and after each group of frames."""
        times = [{"seconds": time, "whole": int(time)} for time in self.times]
        return [(style.before.format(**time), style.after.format(**time)) for time in times]


def placed(media: Sequence[Media], video: VideoSizing | None) -> list[Placed]:
    """`video`: how the encoders cut up videos. Raises UnsupportedMedia for a video without it."""
    return [place(one, video) for one in media]


def place(media: Media, video: VideoSizing | None) -> Placed:
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
