"""Small real video files whose frames can encode their own index. For tests and the demo."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from io import BytesIO
from typing import cast

import av
import numpy as np
import numpy.typing as npt
from torch import Tensor

from actors.media.patchify import patchifier_of
from actors.spec.model_spec import ModelSpec
from actors.types import Clip, Item
from tests.images import opened

Pixels = npt.NDArray[np.uint8]


def patchify_video(spec: ModelSpec, clip: Clip, frames: Iterable[Tensor]) -> Item:
    return patchifier_of(spec).patchify_video(clip, frames)


def picture(index: int, width: int, height: int) -> Pixels:
    """Frame `index` of a moving photograph, uint8 [height, width, 3]."""
    return np.roll(scene(2 * width, 2 * height), (3 * index, 5 * index), (0, 1))[:height, :width]


@cache
def scene(width: int, height: int) -> Pixels:
    return np.array(opened().resize((width, height)))


def numbered(index: int, width: int, height: int) -> Pixels:
    """A frame that shows the bits of its index from left to right, black or white."""
    bits = [(index >> bit) % 2 * 255 for bit in range(8)]
    return (
        np.repeat(np.array(bits, np.uint8), width // 8)[None, :, None]
        .repeat(height, 0)
        .repeat(3, 2)
    )


def number(pixels: Pixels) -> int:
    step = pixels.shape[1] // 8
    middle = pixels[pixels.shape[0] // 2, step // 2 :: step, 0]
    return sum(int(value > 127) << bit for bit, value in enumerate(middle[:8]))


@cache
def video(
    frames: int,
    *,
    size: tuple[int, int] = (64, 48),
    fps: int = 10,
    container: str = "mp4",
    codec: str = "libx264",
    counting: bool = False,
    **options: str,
) -> bytes:
    """A video file. `counting`: its frames show their index."""
    width, height = size
    draw = numbered if counting else picture
    file = BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = cast(av.VideoStream, output.add_stream(codec, rate=fps, options=options))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            frame = av.VideoFrame.from_ndarray(draw(index, width, height), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()
