"""Turns compressed bytes into an Item: decodes to upright RGB, then cuts the family's patches.

Pixels equal those of transformers' load_image, bit for bit, with two exceptions. Transparent images
are composited (preprocess.alpha), and grey of more than 8 bits is scaled, not clipped at 255.
Limits on bytes and pixels are checked before, on the header (encoder_service/intake/media.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import AvifImagePlugin, Image, ImageOps, UnidentifiedImageError
from pillow_heif import register_heif_opener
from torch import Tensor

from actors.errors import InvalidMedia, TooLarge, UnsupportedMedia
from actors.media import audio_file, video_file
from actors.media.animation import is_animation, read_animation
from actors.media.jpeg import Pixels, plain_jpeg
from actors.media.patchify import Patchifier, unrepeated
from actors.types import Alpha, Clip, Item, ItemPlan, Media

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")
"""Formats that Pillow may open (JPEG includes MPO): bitmaps only, none that runs an interpreter."""
BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # tags of TIFF

register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # one thread per image: several are decoded at a time


def prepare(patchifier: Patchifier, media: Media) -> Item:
    """Decodes one item and cuts it into patches. Raises InvalidMedia, TooLarge."""
    if media.kind == "audio":
        return prepare_sound(patchifier, media)
    patchifier = patchifier.asked("video" if media.clip else "image", media.kwargs)
    if media.clip:
        return patchifier.patchify_video(media.clip, decoded_frames(patchifier, media, media.clip))
    plan, patches = patchifier.patchify(decode(media.data, media.alpha))
    check_grid(media, plan)
    whole = patches.numpy()
    merge = patchifier.spec.sizing.merge_size
    if not media.prune or (kept := unrepeated(whole, plan.grid_thw, merge)).all():
        return Item(plan, whole)
    blocks = whole.reshape(len(kept), -1)[kept]
    return Item(plan.pruned(np.packbits(kept).tobytes()), blocks.reshape(-1, whole.shape[1]))


def check_grid(media: Media, plan: ItemPlan) -> None:
    if plan != media.plan:
        raise InvalidMedia(
            f"the image differs in size from its header: it gives a grid of {plan.grid_thw}"
            f", not {media.plan.grid_thw}. Save it again"
        )


def prepare_sound(patchifier: Patchifier, media: Media) -> Item:
    sizing = patchifier.spec.audio
    assert sizing, "a sound for a family of images. This is a bug."
    assert media.size, "a sound whose length was not read. This is a bug."
    samples = audio_file.decoded(media.data, sizing.rate, media.size.width)
    plan, patches = patchifier.patchify(torch.from_numpy(samples).view(1, 1, -1))
    if not patches.view(torch.float32).isfinite().all():
        raise InvalidMedia("samples of the sound are not finite, or far beyond -1 to 1: scale them")
    return Item(plan, patches.numpy())


def decoded_frames(patchifier: Patchifier, media: Media, clip: Clip) -> Iterator[Tensor]:
    """The frames to encode, one at a time, each as `decode` returns an image."""
    assert patchifier.spec.video, "a video for a family of images. This is a bug."
    if not media.frames:
        wanted = patchifier.spec.video.indices(clip)
        if is_animation(media.data):
            found = animation_frames(media.data, clip, wanted, media.alpha)
        else:
            found = video_file.frames(media.data, clip, wanted)
        for pixels in found:
            yield torch.from_numpy(pixels).permute(2, 0, 1)
    for place, data in enumerate(media.frames):
        frame = decode(data, media.alpha)
        if frame.shape[1:] != (clip.size.height, clip.size.width):
            raise InvalidMedia(f"frames[{place}] differs in size from its header")
        yield frame


def decode(data: bytes, alpha: Alpha = "drop") -> Tensor:
    """Upright RGB of the first frame: uint8 [3, height, width], a view of [height, width, 3].
    Raises InvalidMedia, UnsupportedMedia, TooLarge."""
    with decoding(), Image.open(BytesIO(data), formats=FORMATS) as image:
        pixels = plain_jpeg(data, image)
        if pixels is None:
            pixels = shown(image, alpha)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def animation_frames(data: bytes, clip: Clip, wanted: list[int], alpha: Alpha) -> Iterator[Pixels]:
    """Decodes frames of a GIF or WebP, one at a time. `wanted` ascends. Raises as `decode` does."""
    places = read_animation(data, clip.frames).places(wanted)
    with decoding(), Image.open(BytesIO(data), formats=("GIF", "WEBP")) as image:
        for place in places:
            image.seek(place)
            pixels = shown(image, alpha)
            if pixels.shape[:2] != (clip.size.height, clip.size.width):
                raise InvalidMedia("a frame of the animation is larger than its header says")
            yield pixels


def shown(image: Image.Image, alpha: Alpha) -> Pixels:
    """The current frame, upright, as RGB."""
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    return np.array(opaque(eight_bits(ImageOps.exif_transpose(image), tags), alpha))


@contextmanager
def decoding() -> Iterator[None]:
    """Pillow's errors become InvalidMedia or TooLarge."""
    try:
        yield
    except (InvalidMedia, UnsupportedMedia):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(f"the image is too large to be decoded: scale it down ({error})") from error
    except Exception as error:  # Pillow's decoders raise nearly everything
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
        raise InvalidMedia(
            "the image cannot be decoded, it is truncated or corrupt: send the whole file, or save "
            f"it again ({reason})"
        ) from error


def eight_bits(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    """Converts grey images of 16 bits, 32 bits or floats to 8 bits. Returns others unchanged.

    16-bit samples are scaled by their whole range. Wider samples have no usual range, so the first
    of these that holds them is assumed: for integers 255 or 65535, for floats 1 or 255. Raises
    UnsupportedMedia if none does.
    """
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    key = image.info.get("transparency")
    opacity = None if key is None else np.where(values == key, 0, 255).astype(np.uint8)
    if image.mode in ("I", "F"):
        least, most = values.min(), values.max()
        if not (least >= 0 and most <= (65535 if image.mode == "I" else 255)):  # NaN included
            raise UnsupportedMedia(
                f"the samples of the image are from {least} to {most}, a range of unknown "
                "meaning: save it with 8 or 16 bits, or as floats from 0 to 1"
            )
        if image.mode == "F":
            values = np.rint(values * 255 if most <= 1 else values)
        elif most > 255:
            values = values >> 8
    else:
        values = values >> (tags.get(BITS_PER_SAMPLE, (16,))[0] - 8)
    grey = Image.fromarray(values.astype(np.uint8))
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        grey = ImageOps.invert(grey)
    return grey if opacity is None else Image.merge("LA", (grey, Image.fromarray(opacity)))


def opaque(image: Image.Image, alpha: Alpha) -> Image.Image:
    """Converts an image to RGB, on the background `alpha`."""
    if image.mode == "La":  # premultiplied alpha, which Pillow converts only to LA
        image = image.convert("LA")
    if alpha == "drop" or not image.has_transparency_data:
        # A transparent colour of a palette changes no RGB value, but makes `convert` warn.
        image.info.pop("transparency", None)
        return image.convert("RGB")
    image = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, alpha)
    canvas.paste(image, mask=image.getchannel("A"))
    return canvas
