"""Decoding against Pillow's own convert("RGB"), and patches against their definition."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageDraw, ImageOps

from actors.errors import InvalidMedia, TooLarge
from actors.families import registry
from actors.media.image import decode, prepare
from actors.media.patchify import cut_blocks, patchifier_of, resize
from actors.options import ModelOptions
from actors.types import Media, Size

BICUBIC = Image.Resampling.BICUBIC

MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "1", "P", "RGBA", "LA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "1", "P"),
    "TIFF": ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "I;16", "YCbCr"),
}


def picture(width: int = 61, height: int = 47) -> Image.Image:
    """Not symmetric, with smooth parts and edges."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = np.stack([255 * x, 255 * y, 255 * x * y], -1).astype(np.uint8)
    image = Image.fromarray(pixels)
    ImageDraw.Draw(image).ellipse((5, 5, width // 2, height // 3), fill=(250, 30, 10))
    return image


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """The file's bytes."""
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def reference(data: bytes) -> torch.Tensor:
    """What transformers' load_image makes of it: uint8 [3, height, width]."""
    with Image.open(BytesIO(data)) as image:
        rgb = ImageOps.exif_transpose(image).convert("RGB")
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("form", "mode"), [(form, mode) for form, modes in MODES.items() for mode in modes]
)
def test_every_mode_is_as_pillow_converts_it(form: str, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.arange(61 * 47, dtype=np.uint16).reshape(47, 61) * 22)
    else:
        image = picture().convert(mode)
    data = encoded(image, form)
    assert torch.equal(decode(data), reference(data))


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(9))
def test_exif_orientation_is_applied(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(picture(), form, exif=exif)
    assert torch.equal(decode(data), reference(data))


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": 0}, {"quality": 20}])
def test_jpeg_is_bit_for_bit_as_pillow_decodes_it(options: dict[str, Any]) -> None:
    data = encoded(picture(317, 211), "JPEG", **options)
    assert torch.equal(decode(data), reference(data))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "MPO"])
def test_an_animation_gives_its_first_frame(form: str) -> None:
    frames = [picture().rotate(90 * turn) for turn in range(3)]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    assert torch.equal(decode(data), reference(data))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
def test_a_transparent_palette_gives_its_colours_without_a_warning() -> None:
    image = picture().quantize(16)
    data = encoded(image, "PNG", transparency=bytes(range(0, 256, 16)))
    assert torch.equal(decode(data), reference(data))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
@given(share=st.floats(0, 0.95))
def test_a_truncated_file_is_invalid(form: str, share: float) -> None:
    data = encoded(picture(), form)
    with pytest.raises(InvalidMedia, match="truncated or corrupt"):
        decode(data[: int(len(data) * share)])


@given(
    data=st.binary(max_size=200),
    position=st.integers(0, 2000),
    form=st.sampled_from(["JPEG", "PNG"]),
)
def test_damage_never_raises_anything_else(data: bytes, position: int, form: str) -> None:
    whole = encoded(picture(), form)
    with suppress(InvalidMedia, TooLarge):
        decode(whole[:position] + data + whole[position + len(data) :])


def test_postscript_is_not_interpreted() -> None:
    with pytest.raises(InvalidMedia):
        decode(encoded(picture(), "EPS"))


def test_too_many_pixels_for_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture(), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(TooLarge):
        decode(data)


def test_patches_are_in_merge_block_order() -> None:
    height, width = 64, 96
    image = torch.arange(3 * height * width).view(3, height, width).remainder(251).byte()
    patches = cut_blocks(image, patch=16, merge=2)
    assert patches.shape == (24, 3 * 16 * 16)
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]  # row, column: block after block
    for patch, (row, column) in zip(patches, order, strict=False):
        area = image[:, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        assert torch.equal(patch.view(3, 16, 16), area)


@given(width=st.integers(20, 150), height=st.integers(20, 150))
def test_resizing_is_near_to_pillows(width: int, height: int) -> None:
    image = picture(width, height)
    # In two steps: which pass Pillow takes first depends on the shape, torch's first is over rows.
    theirs = image.resize((64, height), BICUBIC).resize((64, 64), BICUBIC)
    patches = cut_blocks(resize(decode(encoded(image, "PNG")), Size(64, 64)), patch=64, merge=1)
    ours = patches.view(3, 64, 64).permute(1, 2, 0).numpy()
    difference = np.abs(ours.astype(int) - np.asarray(theirs).astype(int))
    assert difference.max() <= 2
    assert (difference != 0).mean() < 0.02


def test_prepare_gives_the_plan_of_the_header_or_refuses() -> None:
    options = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")
    patchifier = patchifier_of(registry.read(options))
    data = encoded(picture(200, 100), "JPEG")
    plan = patchifier.spec.sizing.plan(Size(200, 100))
    media = Media("image", data, plan, hashlib.sha256(data).hexdigest())
    item = prepare(patchifier, media)
    assert item.plan == plan
    assert isinstance(item.patches, np.ndarray)
    assert item.patches.shape == (plan.patches, 768)
    assert item.patches.dtype == np.uint8
    other = patchifier.spec.sizing.plan(Size(100, 200))
    with pytest.raises(InvalidMedia, match="header"):
        prepare(patchifier, replace(media, plan=other))
