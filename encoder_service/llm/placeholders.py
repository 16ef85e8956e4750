"""What stands in a prompt for an image or a video, as each family's own processor writes it.

A group of frames is text with its time around a token for each row. Groups without any text follow
each other as one run.
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
