"""Decoding against Pillow's own convert("RGB") or, where that is wrong, against the picture; and
patches against their definition."""

from __future__ import annotations

import hashlib
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import Any, Literal

import numpy as np
import pillow_heif
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageDraw, ImageOps

from actors.errors import InvalidMedia, TooLarge, UnsupportedMedia
from actors.families import registry
from actors.media.image import decode, prepare
from actors.media.patchify import cut_blocks, patchifier_of, resize
from actors.options import ModelOptions
from actors.types import Media, Size
from encoder_service.intake.header import read_header
from tests.images import chunk

BICUBIC = Image.Resampling.BICUBIC

MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "1", "P", "RGBA", "LA"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "1", "P"),
    "TIFF": ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr"),
    "HEIF": ("RGB", "L", "RGBA"),
    "AVIF": ("RGB", "L", "RGBA"),
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
    data = encoded(picture().convert(mode), form)
    assert torch.equal(decode(data), reference(data))


def grey() -> Any:
    """The picture in grey: uint8 [height, width], with black and white in it."""
    values = np.array(picture().convert("L"))
    values[0, :2] = 0, 255
    return values


def tiff(values: bytes, size: tuple[int, int], bits: int, photometric: int = 1) -> bytes:
    """An uncompressed grey TIFF, little-endian."""
    width, height = size
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 122)]
    tags += [(277, 1), (278, height), (279, len(values))]
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + table + bytes(4) + values


def twelve_bits(values: Any) -> bytes:
    """Rows of samples of 12 bits, two in three bytes."""
    rows = []
    for row in values:
        text = "".join(f"{int(value):012b}" for value in row)
        text += "0" * (-len(text) % 8)
        rows.append(int(text, 2).to_bytes(len(text) // 8, "big"))
    return b"".join(rows)


def deep(kind: str) -> bytes:
    """The grey picture as a file of more than 8 bits."""
    values = grey()
    size = values.shape[1], values.shape[0]
    wide = values.astype(np.uint16) * 257
    match kind:
        case "PNG":
            return encoded(Image.fromarray(wide), "PNG")
        case "PNG shifted":
            return encoded(Image.fromarray(values.astype(np.uint16) << 8), "PNG")
        case "TIFF":
            return encoded(Image.fromarray(wide), "TIFF", compression="tiff_lzw")
        case "TIFF big-endian":
            return encoded(Image.fromarray(wide.astype(">u2")), "TIFF")
        case "TIFF inverted":
            return tiff((65535 - wide).tobytes(), size, 16, photometric=0)
        case "TIFF of 12 bits":
            return tiff(twelve_bits(values.astype(int) * 16 + 7), size, 12)
        case "TIFF of 32 bits":
            return encoded(Image.fromarray(wide.astype(np.int32)), "TIFF")
        case "TIFF of 32 bits, small":
            return encoded(Image.fromarray(values.astype(np.int32)), "TIFF")
        case "floats to 1":
            return encoded(Image.fromarray((values / 255).astype(np.float32)), "TIFF")
        case "floats to 255":
            return encoded(Image.fromarray(values.astype(np.float32)), "TIFF")
    raise AssertionError(kind)


DEEP = ["PNG", "PNG shifted", "TIFF", "TIFF big-endian", "TIFF inverted", "TIFF of 12 bits"]
DEEP += ["TIFF of 32 bits", "TIFF of 32 bits, small", "floats to 1", "floats to 255"]


@pytest.mark.parametrize("kind", DEEP)
def test_more_than_8_bits_give_the_picture_of_8_bits(kind: str) -> None:
    pixels = decode(deep(kind), "white")
    assert torch.equal(pixels, torch.from_numpy(grey()).expand(3, -1, -1))


def test_grey_of_16_bits_in_colour_is_as_grey() -> None:
    """Pillow keeps the upper 8 of 16 bits of colours; 16-bit grey is scaled in the same way."""
    values = np.arange(61 * 47, dtype=np.uint16).reshape(47, 61) * 22
    one = decode(encoded(Image.fromarray(values), "PNG"))
    header = struct.pack(">IIBBBBB", 61, 47, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + np.repeat(row, 3).astype(">u2").tobytes() for row in values)
    colour = b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(kind, content)
        for kind, content in [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    )
    assert torch.equal(one, decode(colour))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((4, 4), -1, np.int32), "from -1 to -1"),
        (np.full((4, 4), 65536, np.int32), "from 65536 to 65536"),
        (np.full((4, 4), 255.5, np.float32), "from 255.5 to 255.5"),
        (np.full((4, 4), np.nan, np.float32), "from nan to nan"),
        (np.array([[-0.1, 1]], np.float32), "from -0.1.* to 1.0"),
    ],
)
def test_samples_without_a_known_range_are_refused(values: Any, message: str) -> None:
    with pytest.raises(UnsupportedMedia, match=f"{message}, a range .*save it with 8 or 16 bits"):
        decode(encoded(Image.fromarray(values), "TIFF"))


def ycck() -> bytes:
    """The picture as a JPEG of YCCK, as Adobe writes it: inks inverted, and turned into YCbCr."""
    inks = Image.fromarray(255 - np.array(picture())).convert("YCbCr")
    planes = [Image.fromarray(255 - np.array(plane)) for plane in inks.split()]
    black = Image.new("L", inks.size, 0)
    data = encoded(Image.merge("CMYK", (*planes, black)), "JPEG", quality=95, subsampling=0)
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    return data[:at] + b"\x02" + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        encoded(picture().convert("CMYK"), "JPEG", quality=95, subsampling=0),
        ycck(),
        encoded(picture().convert("CMYK"), "TIFF"),
        encoded(picture(), "HEIF", quality=95),
        encoded(picture(), "AVIF", quality=95),
    ],
    ids=["CMYK JPEG", "YCCK JPEG", "CMYK TIFF", "HEIC", "AVIF"],
)
def test_colours_are_those_of_the_picture(data: bytes) -> None:
    expected = np.array(picture()).astype(int).transpose(2, 0, 1)
    assert np.abs(decode(data).numpy().astype(int) - expected).mean() < 3


@pytest.mark.parametrize("orientation", [1, 6, 8])
def test_a_photograph_as_phones_write_it(orientation: int) -> None:
    """Tiles of one canvas, turned by a box."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    image = picture(300, 200)
    data = encoded(image, "HEIF", quality=95, tile_size=64, exif=exif.tobytes())
    assert b"grid" in data
    image.getexif()[ExifTags.Base.Orientation] = orientation
    expected = np.array(ImageOps.exif_transpose(image)).astype(int)
    pixels = decode(data).permute(1, 2, 0).numpy()
    size = read_header(data).size
    assert pixels.shape == expected.shape == (size.height, size.width, 3)
    assert np.abs(pixels - expected).mean() < 3


def test_a_heic_of_ten_bits() -> None:
    wide = np.array(picture()).astype(np.uint16) * 257
    buffer = BytesIO()
    pillow_heif.from_bytes("RGB;16", (61, 47), wide.tobytes()).save(buffer, quality=95)
    data = buffer.getvalue()
    assert pillow_heif.open_heif(data, convert_hdr_to_8bit=False).info["bit_depth"] == 10
    assert read_header(data).size == Size(61, 47)
    difference = decode(data).permute(1, 2, 0).numpy() - np.array(picture()).astype(int)
    assert np.abs(difference).mean() < 4


@pytest.mark.parametrize("form", ["HEIF", "AVIF"])
def test_more_pixels_than_the_header_declares_are_not_given(form: str) -> None:
    data = bytearray(encoded(picture(610, 470), form))
    at = data.index(b"ispe") + 8
    struct.pack_into(">II", data, at, 61, 47)
    assert read_header(bytes(data)).size == Size(61, 47)
    with suppress(InvalidMedia):  # libheif refuses; libavif scales the image to the header's size
        assert decode(bytes(data)).shape == (3, 47, 61)


def test_one_bit_gives_black_and_white() -> None:
    bits = np.array(picture().convert("L")) > 90
    expected = torch.from_numpy(bits * np.uint8(255)).expand(3, -1, -1)
    for form in ("PNG", "TIFF", "BMP"):
        assert torch.equal(decode(encoded(Image.fromarray(bits), form)), expected)


def opacity() -> Any:
    """uint8 [height, width]: transparent to the left, opaque to the right."""
    return np.tile(np.linspace(0, 255, 61).astype(np.uint8), (47, 1))


def transparent(kind: str) -> tuple[bytes, Any]:
    """A file, and its colours and opacity: uint8 [height, width, 4]."""
    colours, part = np.array(picture()), opacity()
    whole = np.dstack([colours, part])
    if kind in ("PNG", "WEBP", "TIFF"):
        return encoded(Image.fromarray(whole), kind, lossless=True, exact=True), whole
    if kind in ("HEIF", "AVIF"):
        return encoded(Image.fromarray(whole), kind, quality=95, subsampling="4:4:4"), whole
    if kind == "LA":
        image = Image.merge("LA", (Image.fromarray(grey()), Image.fromarray(part)))
        return encoded(image, "PNG"), np.dstack([grey()] * 3 + [part])
    if kind == "16-bit key":
        file = encoded(Image.fromarray(grey().astype(np.uint16) * 257), "PNG", transparency=65535)
        return file, np.dstack([grey()] * 3 + [np.where(grey() == 255, 0, 255)])
    if kind == "RGB key":
        key = tuple(int(value) for value in colours[20, 20])
        hidden = (colours == key).all(axis=2)
        return encoded(picture(), "PNG", transparency=key), np.dstack([colours, 255 - 255 * hidden])
    palette = picture().quantize(16)
    colours, places = np.array(palette.convert("RGB")), np.array(palette)
    if kind == "GIF":
        data = encoded(palette, "GIF", transparency=3)
        return data, np.dstack([colours, np.where(places == 3, 0, 255)])
    steps = np.arange(0, 256, 16)
    return encoded(palette, "PNG", transparency=bytes(steps.tolist())), np.dstack(
        [colours, steps[places]]
    )


TRANSPARENT = ["PNG", "WEBP", "TIFF", "HEIF", "AVIF", "LA", "16-bit key", "RGB key", "GIF"]


@pytest.mark.parametrize("alpha", ["white", "black"])
@pytest.mark.parametrize("kind", [*TRANSPARENT, "palette"])
def test_transparency_is_composited(kind: str, alpha: Literal["white", "black"]) -> None:
    data, whole = transparent(kind)
    assert read_header(data).transparent
    share = whole[..., 3:] / 255
    expected = whole[..., :3] * share + (255 if alpha == "white" else 0) * (1 - share)
    difference = np.abs(decode(data, alpha).permute(1, 2, 0).numpy() - expected)
    if kind in ("HEIF", "AVIF"):
        assert difference.mean() < 3
    else:
        assert difference.max() <= 1


@pytest.mark.parametrize("alpha", ["white", "drop"])
def test_premultiplied_grey_is_decoded(alpha: Literal["white", "drop"]) -> None:
    data = encoded(Image.new("LA", (30, 20), (100, 255)), "TIFF")
    kind = (338).to_bytes(2, "little") + (3).to_bytes(2, "little") + (1).to_bytes(4, "little")
    data = data.replace(kind + b"\2", kind + b"\1")  # ExtraSamples: associated alpha
    with Image.open(BytesIO(data)) as image:
        assert image.mode == "La"
    assert (decode(data, alpha) == 100).all()


def test_a_black_logo_on_transparency_is_not_a_black_image() -> None:
    logo = Image.new("RGBA", (60, 40), (0, 0, 0, 0))
    ImageDraw.Draw(logo).ellipse((20, 10, 40, 30), fill=(0, 0, 0, 255))
    data = encoded(logo, "PNG")
    assert decode(data, "drop").max() == decode(data, "black").max() == 0
    shown = decode(data, "white")
    assert shown[:, 0, 0].tolist() == [255] * 3
    assert shown[:, 20, 30].tolist() == [0] * 3


def test_white_is_as_vllm_composites_rgba() -> None:
    """vllm.multimodal.image.rgba_to_rgb."""
    image = Image.fromarray(np.dstack([np.array(picture()), opacity()]))
    theirs = Image.new("RGB", image.size, (255, 255, 255))
    theirs.paste(image, mask=image.split()[3])
    pixels = decode(encoded(image, "PNG"), "white").permute(1, 2, 0).numpy()
    assert np.array_equal(pixels, np.array(theirs))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "HEIF", "AVIF"])
@pytest.mark.parametrize("orientation", range(9))
def test_exif_orientation_is_applied(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(picture(), form, exif=exif.tobytes())
    assert torch.equal(decode(data), reference(data))
    turned = reference(encoded(picture(), "PNG", exif=exif))
    assert (decode(data).int() - turned.int()).abs().float().mean() < 12


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1)])
@pytest.mark.parametrize("orientation", range(9))
def test_a_side_of_one_pixel_is_turned(size: tuple[int, int], orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(picture().resize(size), "JPEG", exif=exif.tobytes())
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


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "HEIF", "AVIF"])
@given(share=st.floats(0, 0.95))
def test_a_truncated_file_is_invalid(form: str, share: float) -> None:
    data = encoded(picture(), form)
    with pytest.raises(InvalidMedia, match=r"truncated or corrupt: send the whole file"):
        decode(data[: int(len(data) * share)])


@given(
    data=st.binary(max_size=200),
    position=st.integers(0, 2000),
    form=st.sampled_from(["JPEG", "PNG", "HEIF", "AVIF"]),
)
def test_damage_never_raises_anything_else(data: bytes, position: int, form: str) -> None:
    whole = encoded(picture(), form)
    with suppress(InvalidMedia, TooLarge, UnsupportedMedia):
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
